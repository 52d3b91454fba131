"""The content that a job depends on, by reading its files' bytes alone: so finished work is known without opening anything."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from trtopt.core.files import existing_file, sha256_file, sha256_json
from trtopt.core.kept import ARRAYS, EXTENSIONS
from trtopt.graph.io import external_files
from trtopt.jobs.joblist import DataSet, Job


class Contents:
    """Keys of jobs; every file is read once."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        self._versions = dict(versions)
        self._model, self._samples = functools.cache(_model), functools.cache(_samples)

    def key(self, job: Job) -> str:
        """SHA-256 of everything that the job's table depends on."""
        return sha256_json(
            {
                "versions": self._versions,
                "model": self._model(job.model),
                "data": self._samples(job.data),
                "method": job.method,
                "overrides": job.precision_override,
                "output": str(job.output.absolute()),
            }
            | ({"device": job.device} if job.device != "cpu" else {})
        )


def _model(path: Path) -> object:
    """Digests of the model's files; what can't be read is found out when the job runs."""
    try:
        # It refuses what isn't a file of the model's, before that is opened.
        beside = external_files(existing_file(path, "the model")).values()
        return [sha256_file(path), *((file.name, sha256_file(file)) for file in beside)]
    except Exception as error:  # protobuf raises errors of its own
        return str(error)


def _samples(data: DataSet) -> object:
    source = data.images or data.data or Path()
    suffixes = EXTENSIONS if data.images is not None else ARRAYS
    try:
        files = [source] if source.is_file() else sorted(source.rglob("*"))
        digests = [sha256_file(file) for file in files if file.is_file() and file.suffix.lower() in suffixes]
    except OSError as error:
        return str(error)
    prepared = None if data.preprocess is None else data.preprocess.describe()
    return {
        "kind": "images" if data.images is not None else "arrays",
        "files": sorted(digests),
        "limit": data.limit,
        "unusual": data.allow_unusual_data,
        "preprocess": prepared,
    }
