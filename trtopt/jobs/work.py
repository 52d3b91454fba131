"""The work of a job list, in workers: open and observe passes, make tables, build engines. All can be pickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import onnx

from trtopt.autotune.building import build, goal_asked
from trtopt.builder.asked import spec_of
from trtopt.builder.request import BuildRequest
from trtopt.calibration.observe import Observation, combined, observe, require_gpu_provider
from trtopt.calibration.prepared import Prepared, prepare
from trtopt.calibration.quality import check_samples, data_notes
from trtopt.core.errors import CalibrationError, TrtoptError, UnsupportedRequest
from trtopt.core.files import sha256_file
from trtopt.core.operators import load
from trtopt.core.progress import Warnings
from trtopt.core.values import Override
from trtopt.core.version import __version__
from trtopt.core.words import first_of, grouped
from trtopt.cuda.device import probe, require_gpu
from trtopt.data import Batches, open_data, samples_of
from trtopt.data.rebatch import alone
from trtopt.graph.io import load_model, save_model
from trtopt.jobs.joblist import BuildJob, Job, in_list
from trtopt.ort.sessions import version as ort_version
from trtopt.trt import select

BATCH = 8  # samples read at a time; nothing depends on it


@dataclass(frozen=True)
class Pass:
    """One model on one data set, opened: what is observed, without the graph, and the samples, which still lie in their files.

    Attributes:
        folder: has the folded model.
        fixed_batch: samples that the model takes at once; 1 where it takes any number.
        operators: files with references of custom operators, which each process loads.
    """

    prepared: Prepared
    folder: Path
    fixed_batch: int
    samples: Batches
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """The observation of some samples of a pass.

    Attributes:
        versions: of what the bits of a histogram may depend on.
    """

    observation: Observation
    seconds: float
    versions: Mapping[str, str]


def versions() -> dict[str, str]:
    """Return the versions that histograms depend on, where ONNX Runtime runs models."""
    return {"trtopt": __version__, "onnxruntime": ort_version("calibration")}


def open_pass(job: Job, folder: Path, threads: int) -> Pass:
    """Load, check and fold a model, write it to `folder`, and look through its data."""
    load(job)
    loaded = load_model(job.model, lazy=True)
    prepared = prepare(loaded, tuple(map(Override.parse, job.precision_override)))
    save_model(prepared.proto, folder / "model.onnx")
    samples = open_data(loaded.inputs, **samples_of(job.data), batch=BATCH, threads=threads)
    insist = "insist with allow_unusual_data = true in the list's [data.NAME]"
    check_samples(samples, insist=None if job.data.allow_unusual_data else insist)
    fixed = 1 if alone(loaded.inputs) else max([1, *(info.sizes[0] for info in loaded.inputs if info.shape)])
    return Pass(replace(prepared, proto=onnx.ModelProto()), folder, fixed, samples, job.operators)


@lru_cache(maxsize=1)
def _graph(folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / "model.onnx")


def observe_shard(opened: Pass, start: int, stop: int, threads: int, device: str) -> Shard:
    """Count the samples from `start` to `stop`; on the GPU where `device` is "cuda"."""
    began = monotonic()
    load(opened)
    try:
        observation = observe(
            _graph(opened.folder),
            opened.prepared.tensors,
            opened.samples.part(start, stop),
            beside=opened.prepared.beside,
            threads=threads,
            shard=True,
            device=device,
        )
    except CalibrationError as error:
        if not start:
            raise
        raise CalibrationError(f"{error} (samples counted from number {start} of the data set)") from None
    if observation.samples != stop - start:
        raise CalibrationError(
            f"{observation.samples} of the {stop - start} samples of a shard were there: the data changed"
        )
    made_by = versions() | ({} if device == "cpu" else require_gpu_provider())
    return Shard(observation, monotonic() - began, made_by)


def make_tables(opened: Pass, shards: Sequence[Shard], jobs: Sequence[Job]) -> list[dict[str, Any] | TrtoptError]:
    """Merge the shards of a pass, and write a table for each job: a result or an error each.

    Raises:
        CalibrationError: a tensor is constant over all shards.
    """
    load(opened)
    prepared = replace(opened.prepared, proto=_graph(opened.folder))
    seen = combined(prepared.proto, [shard.observation for shard in shards], prepared.beside)
    whole = prepared.table(seen, opened.samples, jobs[0].method)
    whole = replace(whole, seconds=round(sum(shard.seconds for shard in shards), 3))

    def written(job: Job) -> dict[str, Any] | TrtoptError:
        try:
            table = whole.with_method(job.method)
            table.save(job.output)
        except TrtoptError as error:
            return error
        return {
            "digest": table.digest,
            "sha256": sha256_file(job.output),
            "samples": table.samples,
            "tensors": dict(Counter(entry.method for entry in table.tensors.values())),
            "notes": list(data_notes(table)),
        }

    return [written(job) for job in jobs]


# Engines -----------------------------------------------------------------------------------------------------------------


def examine_builds(builds: Sequence[BuildJob], here: bool) -> tuple[str, ...]:
    """Refuse builds, by their jobs' names, for every reason why they can't be; else return the names of this machine's GPUs.

    Args:
        here: they are built on this machine; else only what holds for any is looked at.
    """
    names_by_reason = grouped((why, job.name) for job in builds if (why := _refused(job.request, here)))
    if names_by_reason:
        lines = [f"{first_of(names)}: {why}" for why, names in names_by_reason.items()]
        raise UnsupportedRequest(
            "jobs of the list can't be built " + ("on this machine" if here else "anywhere"),
            lines,
            "nothing was started" + ("; with `ray=` they are built where Ray has what they need" if here else ""),
        )
    return tuple(device.name for device in probe().devices)


def _refused(request: BuildRequest, here: bool) -> str:
    """Return why it can't be built, as far as that is known before the work; else nothing."""
    try:
        if not request.best:
            goal_asked(request)
        if here:
            select(request.backend).refuse(spec_of(request))
        if here and request.best:
            require_gpu("`best=True`", request.device)
    except TrtoptError as error:
        return in_list(" ".join(line.strip() for line in error.lines))
    return ""


def build_engine(request: BuildRequest) -> dict[str, Any]:
    """Build, unless the engine is up to date; return what a job's record says of it."""
    heard = Warnings()
    result = build(**vars(replace(request, reporter=heard)))
    return {
        "cached": result.cached,
        "precision_summary": result.precision_summary,
        "targets": list(result.targets),
        "sha256": sha256_file(result.engine),
        "notes": list(dict.fromkeys([*heard.texts, *(result.warnings if result.cached else ())])),
    }
