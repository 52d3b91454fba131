"""The state of a job list: one JSON file, written whole after each change, so that a run that was killed goes on.

A job is done as long as the content that its table was made from is the same, and the table is there as it was written; an
engine, as long as `build` finds it up to date.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtopt.core.documents import Damaged, converted, read_json
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import write_json
from trtopt.core.locks import alone_now
from trtopt.core.temporary import folder_in
from trtopt.jobs.results import JobResult

_FORMAT = "trtopt.jobs/1"


def state_beside(jobs: str | os.PathLike[str]) -> Path:
    """Return where a list's state is, unless it is told otherwise."""
    return Path(jobs).with_suffix(".state")


def read_state(path: Path) -> dict[str, dict[str, Any]]:
    """Return what a state file has of each job, by name; UsageError: it isn't a state file, or was damaged."""
    try:
        content = read_json(path)
        if content["format"] != _FORMAT:
            raise KeyError(_FORMAT)
        records = converted(content["jobs"], dict[str, dict[str, Any]], "jobs")
        for name, record in records.items():
            JobResult.recorded({**record, "name": name})
    except (Damaged, KeyError, TypeError):
        raise UsageError(
            f"{path} isn't the state file of a job list: remove it, or give another with `state=`"
        ) from None
    return records


def is_at_work(path: Path) -> bool:
    """Return True where a run holds the state file now; also where that can't be asked."""
    try:
        lock = alone_now(Path(f"{path}.lock"))
    except OutputError:
        return True
    if lock is not None:
        lock.close()
    return lock is None


class State:
    """A state file at work, made by `locked`: `jobs` has the records by name, `scratch` is a folder for the run's files."""

    def __init__(self, path: Path, jobs: dict[str, dict[str, Any]], scratch: Path) -> None:
        self.path, self.jobs, self.scratch = path, jobs, scratch
        self._guard = threading.Lock()

    @classmethod
    @contextlib.contextmanager
    def locked(cls, path: Path) -> Iterator[State]:
        """Hold the file, which may be absent, for this process alone.

        Raises:
            UsageError: another run is at work on it, or it is none of a run's.
            OutputError: the folder can't be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                tries = iter(range(4))  # it may only be `is_at_work` that looks, or a process just being started
                while (lock := alone_now(Path(f"{path}.lock"))) is None and next(tries, None) is not None:
                    time.sleep(0.1)
                if lock is None:
                    raise UsageError(
                        f"another run is at work on {path}: wait for it, end it, or give another file with `state=`"
                    )
                stack.enter_context(lock)
                scratch = stack.enter_context(folder_in(path.parent, ".trtopt-jobs-"))
            except OSError as error:
                raise OutputError(f"can't use the state file {path}: {error}", "give another with `state=`") from error
            yield cls(path, read_state(path) if os.path.lexists(path) else {}, scratch)

    def record(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace what is recorded of a job; from any thread."""
        with self._guard:
            self.jobs[name] = dict(content)
            try:
                write_json(self.path, {"format": _FORMAT, "jobs": self.jobs})
            except OutputError as error:  # its advice is a command's that has an output
                raise OutputError(error.problem, "make room, or give another file with `state=`") from error
