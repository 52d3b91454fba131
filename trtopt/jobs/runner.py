"""run_jobs(): a job list in, tables and engines out. Each pass over data is opened, observed in shards, and merged.

Engines are built when all tables are made: a build times kernels, which calibration beside it would disturb, as would another
build on the same GPU. A thread goes through the steps of each pass and build; the work is done in other processes. What fails
ends the jobs that need it and no others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeVar, Union

from trtopt.core.errors import CalibrationError, DeviceError, OutputError, TrtoptError, UsageError
from trtopt.core.files import check_writable, existing_file, made_folder, sha256_file, sha256_json
from trtopt.core.host import cores, free_memory
from trtopt.core.kept import ARRAYS, EXTENSIONS
from trtopt.core.options import taking
from trtopt.core.progress import Phase, Reporter
from trtopt.core.words import grouped
from trtopt.graph.io import external_files
from trtopt.jobs import work
from trtopt.jobs.joblist import BuildJob, DataSet, Job, in_list, load_jobs
from trtopt.jobs.request import JobsRequest, JobsStateRequest
from trtopt.jobs.results import JobResult, JobsResult
from trtopt.jobs.state import State, is_at_work, read_state, state_beside
from trtopt.jobs.workers import Workers, gpu_places

if TYPE_CHECKING:
    from trtopt.jobs.cluster import Cluster

_EACH = 2 << 30  # bytes of memory for a worker, where their number isn't given
# Samples in a shard: starting one costs about as much as ten samples.
SMALLEST, LARGEST = 32, 256


@taking(JobsRequest)
def run_jobs(request: JobsRequest) -> JobsResult:
    """Calibrate every model of a job list on its data and build its engines. What an earlier run finished isn't done again.

    A table has the same bits as one from `calibrate`, whatever the number of workers. Engines are made by `build`, one at a
    time on each GPU. Workers are processes: a script calls this under `if __name__ == "__main__":`.

    Args:
        jobs: the list, `jobs.toml`; docs/jobs.md says what is in it.
        state: file that says what is done; None: NAME.state beside the list.
        workers: processes; None: as many as cores, and no more than one for each 2 GiB of free memory.
        threads: samples that a worker runs at a time; None: the cores divided among the workers.
        ray: a Ray cluster's address; "auto": the one of $RAY_ADDRESS or this machine, else a new one.

    Raises:
        UsageError: the list or an argument can't be right, or another run is at work on the state file.
        UnsupportedRequest: this machine can't build what the list asks for; nothing was started.
        BackendError: the Ray cluster can't be reached, or lacks what the list asks for.
        DeviceError: the list asks for GPUs, and there is none.
        OutputError: the state can't be written.
        MissingDependency: Ray is asked for and not installed.
    """
    started, listed = time.monotonic(), load_jobs(request.jobs)
    path = state_beside(request.jobs) if request.state is None else Path(request.state)
    device = next((job.device for job in listed if isinstance(job, Job)), "cpu")
    gpus = _examined(request, listed, device)
    with State.locked(path) as state, request.reporter.phase("jobs", len(listed)) as phase:
        run = _Run(state, request.reporter, phase, device)
        run.begin(listed)
        if request.ray is None:
            _run_here(request, run, listed, gpus)
        else:
            _run_on_cluster(request.ray, request.threads or 1, run, listed)
    return JobsResult(tuple(run.results[job.name] for job in listed), path, time.monotonic() - started)


def _examined(request: JobsRequest, listed: Sequence[Job | BuildJob], device: str) -> tuple[str, ...]:
    """Refuse what can't be done before any work; return the GPUs of this machine where the list may use them."""
    builds, gpus = [job for job in listed if isinstance(job, BuildJob)], tuple[str, ...]()
    if request.ray is None and (elsewhere := [job for job in builds if job.resource]):
        raise UsageError(
            f"{elsewhere[0].name} is to be built on a Ray node with resource = {elsewhere[0].resource!r}: add `ray='auto'`, or "
            "drop resource from the list"
        )
    if builds or device != "cpu":
        with closing(Workers([{}])) as asking:  # a process that ends then: TensorRT takes memory, on the first GPU too
            gpus = asking.submit(work.examine_builds, builds, request.ray is None).result()
        if len(set(gpus)) > 1 and request.ray is None:
            request.reporter.note(
                "GPUs of different kinds: the first is used, others where CUDA_VISIBLE_DEVICES names them"
            )
    if device != "cpu" and not gpus and request.ray is None:
        raise DeviceError(f'no GPU can be used here; drop device = "{device}" from {os.fspath(request.jobs)}')
    return gpus


def _run_here(request: JobsRequest, run: _Run, listed: Sequence[Job | BuildJob], gpus: Sequence[str]) -> None:
    have, threads = cores(), request.threads or 1
    workers = request.workers or max(1, min(have // threads, (free_memory() or _EACH * have) // _EACH))
    if workers * threads > have:
        text = f"{workers} workers with {threads} threads each share {have} cores: fewer would be faster"
        request.reporter.warn(text)
    for on_gpu, step in ((run.device != "cpu", run.calibrate), (bool(gpus), run.build)):
        places = gpu_places(gpus) if on_gpu else [{}] * workers
        with closing(Workers(places, request.threads or max(1, have // len(places)))) as place:
            step(place, listed)


def _run_on_cluster(address: str, threads: int, run: _Run, listed: Sequence[Job | BuildJob]) -> None:
    from trtopt.jobs.cluster import Cluster

    builds = [job for job in listed if isinstance(job, BuildJob)]
    with closing(Cluster(address, threads, run.state.path.parent)) as cluster:
        needy = run.device != "cpu" or any(takes_gpu(job, cluster.has_gpus) for job in builds)
        cluster.check({job.resource for job in builds}, needy)
        run.calibrate(cluster, listed)
        run.build(cluster, listed)


def takes_gpu(job: BuildJob, there: bool) -> bool:
    """Return True where a build takes a GPU: TensorRT-RTX needs none, and gets the one of a kind that the list names."""
    backend = job.request.backend
    return backend == "tensorrt" or job.resource.startswith("accelerator_type:") or (backend == "auto" and there)


@taking(JobsStateRequest)
def show_jobs(request: JobsStateRequest) -> JobsResult:
    """Return what a state file has of its jobs; a run may be at work on it. If none is, no job is running: those that were when
    one was killed are pending.

    Args:
        state: the file, or the list that it lies beside.

    Raises:
        UsageError: it isn't a state file.
    """
    given = Path(request.state)
    path = state_beside(given) if given.suffix == ".toml" else given
    if not path.is_file():
        raise UsageError(
            f"there is no state file {path}: trtopt jobs run {shlex.quote(str(given.with_suffix('.toml')))} makes it; where a "
            "run was given another one, show that"
        )
    records, stopped = read_state(path), not is_at_work(path)
    results = [
        JobResult.recorded(
            {**record, "name": name} | ({"state": "pending"} if stopped and record["state"] == "running" else {}),
            cached=True,
        )
        for name, record in records.items()
    ]
    return JobsResult(tuple(results), path, 0.0)


_J = TypeVar("_J", Job, BuildJob)
Place = Union[Workers, "Cluster"]


class _Stopped(Exception):
    """The run is being stopped: what its threads say of their jobs isn't so."""


class _Run:
    """The jobs of a list at work. Threads go through the steps of each; what they say and record is guarded.

    Args:
        device: of the calibrations.

    Attributes:
        results: of the jobs that are through, by name.
        state, device: as given.
    """

    def __init__(self, state: State, reporter: Reporter, phase: Phase, device: str) -> None:
        self.results: dict[str, JobResult] = {}
        self.state, self._reporter, self._phase = state, reporter, phase
        self.device, self._guard, self._stopped = device, threading.Lock(), False
        self._running: dict[str, float] = {}
        self._keys: dict[str, dict[str, str]] = {}  # of a record; a build's own is in its engine's manifest

    def begin(self, listed: Sequence[Job | BuildJob]) -> None:
        """Find the tables that an earlier run finished; the rest is pending."""
        versions = work.versions() if any(isinstance(job, Job) for job in listed) else {}
        models, samples = functools.cache(_model), functools.cache(_samples)  # each file is read once
        for job in listed:
            if isinstance(job, BuildJob):
                self._keys[job.name] = {"kind": "build"}
                self.state.record(job.name, {"kind": "build", "state": "pending"})
                continue
            record = self.state.jobs.get(job.name, {})
            content: dict[str, Any] = {"versions": versions, "method": job.method, "overrides": job.precision_override}
            content |= {"output": str(job.output.absolute()), "device": job.device}
            with contextlib.suppress(Exception):  # what can't be read is found out when the job runs
                content |= {"model": models(job.model), "data": samples(job.data)}
                content["operators"] = list(map(sha256_file, job.operators))
            key = sha256_json(content)
            self._keys[job.name] = {"key": key}
            done = record.get("state") == "done" and record.get("key") == key
            if done and job.output.is_file() and sha256_file(job.output) == record.get("sha256"):
                self.results[job.name] = JobResult.of(job, record, cached=True)
                self._reporter.note(f"{job.name}: done before")
                self._phase.advance()
                continue
            self.state.record(job.name, {"state": "pending", "key": key})
            try:  # told now rather than after the work
                check_writable(made_folder(job.output.parent) / job.output.name)
            except OutputError as error:
                self._fail([job], error)

    def calibrate(self, place: Place, listed: Sequence[Job | BuildJob]) -> None:
        """Make the tables that are lacking: a pass for all methods on one model and data set."""
        lacking = (job for job in listed if isinstance(job, Job) and job.name not in self.results)
        passes = grouped(((job.model, job.precision_override, job.data.name), job) for job in lacking)
        # One more than slots: the next pass is opened while the shards of the last ones are observed.
        self._each(place, place.slots + 1, list(passes.values()), functools.partial(self._calibrate, place))

    def build(self, place: Place, listed: Sequence[Job | BuildJob]) -> None:
        jobs = [[job] for job in listed if isinstance(job, BuildJob)]
        self._each(place, place.slots, jobs, functools.partial(self._build, place))

    def _each(self, place: Place, threads: int, groups: Sequence[list[_J]], steps: Callable[[list[_J]], None]) -> None:
        """Go through steps for each group of jobs, which fail if an error comes out of them."""

        def go(jobs: list[_J]) -> None:
            try:
                steps(jobs)
            except _Stopped:
                raise
            except Exception as error:
                self._fail(jobs, error)

        with ThreadPoolExecutor(threads, "trtopt-jobs") as pool:
            futures = [pool.submit(go, jobs) for jobs in groups]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                place.close()  # which ends what the threads wait for
                raise

    def _calibrate(self, place: Place, jobs: list[Job]) -> None:
        first = jobs[0]
        self._start(jobs)
        folder = Path(mkdtemp(dir=self.state.scratch))
        opened = place.submit(work.open_pass, first, folder, place.threads).result()
        count = opened.samples.samples
        size = min(LARGEST, max(SMALLEST, -(-count // place.slots)))
        size = -(-size // opened.fixed_batch) * opened.fixed_batch  # so that fixed batches are filled as by one process
        shards, how = list[work.Shard](), (place.threads, self.device)
        observe = functools.partial(place.submit, work.observe_shard, opened, gpu=self.device != "cpu")
        pending = [observe(start, min(start + size, count), *how) for start in range(0, count, size)]
        try:
            for future in pending:
                shards.append(future.result())
                self._phase.detail(f"{first.name}: {len(shards)} of {len(pending)} shards")
        finally:
            for future in pending:
                future.cancel()
        made_by = [dict(shard.versions) for shard in shards]
        if any(item != made_by[0] or item | work.versions() != item for item in made_by):
            raise CalibrationError(
                f"workers have {made_by[0]} and {made_by[-1]}, this run {work.versions()}: install the same versions, and use "
                "GPUs of one kind"
            )
        outcomes = place.submit(work.make_tables, opened, shards, jobs).result()
        shutil.rmtree(folder, ignore_errors=True)
        for job, outcome in zip(jobs, outcomes):
            if isinstance(outcome, TrtoptError):
                self._fail([job], outcome)
            else:
                self._record(job, "done", outcome | {"shards": len(shards)})

    def _build(self, place: Place, jobs: list[BuildJob]) -> None:
        [job] = jobs
        if job.calibration is not None and self.results[job.calibration.name].state != "done":
            raise CalibrationError(f"its table wasn't made: {self.results[job.calibration.name]}")
        made_folder(job.output.parent, advice="")
        self._start([job])
        gpu = takes_gpu(job, place.has_gpus)
        self._record(job, "done", place.submit(work.build_engine, job.request, gpu=gpu, resource=job.resource).result())

    # What is said and written of jobs.

    def _start(self, jobs: Sequence[Job | BuildJob]) -> None:
        for job in jobs:
            self._running[job.name] = time.monotonic()
            self._write(job, {"state": "running", **self._keys[job.name]})
            with self._guard:
                self._reporter.note(f"{job.name}: running")

    def _fail(self, jobs: Iterable[Job | BuildJob], error: Exception) -> None:
        for job in jobs:
            if isinstance(error, (OSError, OutputError)):
                problem = error.problem if isinstance(error, OutputError) else f"{error.filename}: {error}"
                folder = "engines" if isinstance(job, BuildJob) else "output"
                error = OutputError(problem, f"make room, change {folder} in the list, or give `state=`")
            ours = isinstance(error, TrtoptError)
            kind = type(error).__name__ if ours else "InternalError"
            text = str(error) if ours else f"internal error: {type(error).__name__}: {error}"
            self._record(job, "failed", {"error": {"type": kind, "message": in_list(text)}})

    def _record(self, job: Job | BuildJob, state: str, content: dict[str, Any]) -> None:
        seconds = time.monotonic() - self._running.pop(job.name, time.monotonic())
        record = {"state": state, **self._keys[job.name], "seconds": round(seconds, 3), **content}
        record["notes"] = [in_list(note) for note in record.get("notes", ())]
        result = JobResult.of(job, record, cached=record.get("cached", False))
        self._write(job, record | result.to_json())
        with self._guard:
            self.results[job.name] = result
            for note in record["notes"]:
                self._reporter.warn(f"{job.name}: {note}")
            self._phase.advance()
            (self._reporter.warn if state == "failed" else self._reporter.note)(str(result))

    def _write(self, job: Job | BuildJob, record: Mapping[str, Any]) -> None:
        if self._stopped:
            raise _Stopped
        self.state.record(job.name, record)


# The content that a table depends on, by its files' bytes alone.


def _model(path: Path) -> object:
    # It refuses what isn't a file of the model's, before that is opened.
    beside = external_files(existing_file(path, "the model")).values()
    return [sha256_file(path), *((file.name, sha256_file(file)) for file in beside)]


def _samples(data: DataSet) -> object:
    source = data.images or data.data or Path()
    suffixes = EXTENSIONS if data.images is not None else ARRAYS
    files = [source] if source.is_file() else sorted(source.rglob("*"))
    digests = [sha256_file(file) for file in files if file.is_file() and file.suffix.lower() in suffixes]
    return {
        "kind": "images" if data.images is not None else "arrays",
        "files": sorted(digests),
        "limit": data.limit,
        "unusual": data.allow_unusual_data,
        "preprocess": None if data.preprocess is None else data.preprocess.describe(),
    }
