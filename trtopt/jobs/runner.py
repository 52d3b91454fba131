"""run_jobs(): a job list in, tables and engines out. Models and data are opened, shards observed, merged, thresholds chosen.
Engines are built when all tables are made: a build times kernels, which calibration beside it would disturb.

One loop hands tasks to workers and takes results back; it alone writes the state. A task that fails ends the jobs that need
it and no others.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trtopt.core.errors import CalibrationError, OutputError, TrtoptError, UsageError
from trtopt.core.files import check_writable, made_folder, sha256_file, sha256_json
from trtopt.core.host import cores
from trtopt.core.options import taking
from trtopt.core.progress import Phase, Reporter
from trtopt.core.words import counted
from trtopt.jobs.builders import Lane, check_place, local_lanes
from trtopt.jobs.building import install, make_place
from trtopt.jobs.contents import Contents
from trtopt.jobs.engines import Engine, Local
from trtopt.jobs.gpus import HOST_MEMORY, Gpus
from trtopt.jobs.joblist import BuildJob, Job, in_list, load_jobs
from trtopt.jobs.loop import BUILD, FINISH, OBSERVE, OPEN, STAGE, Call, Loop, Memory, Steps, result_of
from trtopt.jobs.pool import Pool
from trtopt.jobs.request import JobsRequest, JobsStateRequest
from trtopt.jobs.results import JobResult, JobsResult
from trtopt.jobs.state import State, check_folder, state_beside
from trtopt.jobs.work import OpenData, OpenModel, Samples, versions

BUILDER = 1 << 30  # bytes: TensorRT's builder, before it was measured with a model
# Samples in a shard where none is asked for: starting one costs about as much as ten samples.
SMALLEST, LARGEST = 32, 256


@taking(JobsRequest)
def run_jobs(request: JobsRequest) -> JobsResult:
    """Calibrate every model of a job list on its data and build its engines. What an earlier run finished isn't done again.

    A table has the same bits as one from `calibrate`, whatever the number of workers and shards. Engines are made by `build`,
    one at a time on each GPU.

    Args:
        jobs: the list, `jobs.toml`; `trtopt.jobs.joblist` says what is in it.
        state: folder that holds what is done; None: NAME.state beside the list.
        workers: processes; None: as many as cores, and fewer where memory is short.
        threads: samples that a worker runs at a time; None: the cores divided among the workers.
        shard: samples in one piece of work, after which a stopped run goes on; None: 32 to 256, by the number of workers.
        ray: run the shards and the builds on a Ray cluster: its address; "auto": the one of $RAY_ADDRESS or this machine, else
            a new one.

    Raises:
        UsageError: the list or an argument can't be right, or another run is at work on the state folder.
        UnsupportedRequest: this machine can't build what the list asks for; nothing was started.
        BackendError: the Ray cluster can't be reached, or lacks what the list asks for.
        OutputError: the state can't be written.
        MissingDependency: Ray is asked for and not installed.
    """
    reporter, workers = request.reporter, request.workers
    started, listed = time.monotonic(), load_jobs(request.jobs)
    folder = state_beside(request.jobs) if request.state is None else Path(request.state)
    have = cores()
    workers = workers or max(1, have // (request.threads or 1))
    if workers * (request.threads or 1) > have:
        reporter.warn(
            f"{workers} workers with {request.threads or 1} threads each share {have} cores: fewer would be faster"
        )
    building = [job for job in listed if isinstance(job, BuildJob)]
    calibrating = [job for job in listed if isinstance(job, Job)]
    check_place(building, request.ray is not None)
    if request.shard is not None and not calibrating:
        raise UsageError(f"`shard=` is for calibrations, and {os.fspath(request.jobs)} has none: drop it")
    devices: tuple[str, ...] = ()
    if building:
        named_requests = [(job.name, job.request) for job in building]
        devices = _asked("trtopt.jobs.building:examine", named_requests, request.ray is None)
    with ExitStack() as stack:
        state = stack.enter_context(State.locked(folder))
        pool = Pool(workers, request.threads or max(1, have // workers))
        stack.callback(pool.close)
        on_gpu = bool(calibrating) and calibrating[0].device != "cpu"
        lanes: list[Lane] = []
        identity: Mapping[str, str] | None = None
        engine: Engine
        if request.ray is not None:
            from trtopt.jobs.cluster import Cluster

            cluster = engine = Cluster(request.ray, request.threads or 1, "cuda" if on_gpu else None)
            stack.callback(cluster.close)
            identity = cluster.identity()
            lanes = cluster.lanes(building)
        elif on_gpu:
            gpus: Gpus = _asked("trtopt.jobs.gpus:find_gpus")
            identity, places = gpus.identity, gpus.places()
            reporter.note(f"{counted(len(places), 'GPU')}: {', '.join(gpus.names)}")
            own = Pool(len(places), request.threads or max(1, have // len(places)), places)
            stack.callback(own.close)
            engine = Local(pool, request.threads or 1, state.scratch, own, gpus.device)
        else:
            engine = Local(pool, request.threads or 1, state.scratch)
        if building and request.ray is None:
            lanes = local_lanes(pool, devices, max(1, have // max(1, len(devices))), stack)
        shared = have if request.threads is None and request.ray is None else None
        run = _Run(calibrating, building, state, pool, engine, lanes, request.shard, reporter, identity, shared)
        results = run.all()
    return JobsResult(
        tuple(results[job.name] for job in listed), folder, run.observed, run.reused, time.monotonic() - started
    )


def _asked(function: str, *arguments: Any) -> Any:
    """Of a process that ends then: PyTorch and TensorRT take memory, on the first GPU too."""
    asking = Pool(1, 1)
    try:
        return asking.submit(function, *arguments).result()
    finally:
        asking.close()


@taking(JobsStateRequest)
def show_jobs(request: JobsStateRequest) -> JobsResult:
    """What a state folder holds of its jobs, by name; a run may be at work on it. If none is, no job is running: those
    that were when one was killed are pending.

    Args:
        state: the folder, or the list that it lies beside.

    Raises:
        UsageError: it isn't a state folder, or it holds something else than files and folders.
    """
    given = Path(request.state)
    listed = given.is_file()
    folder = state_beside(given) if listed else given
    if not (folder / "jobs").is_dir():
        if listed:
            raise UsageError(
                f"there is no state folder {folder}: trtopt jobs run {shlex.quote(str(given))} makes it; where a run was given "
                "another one, show that"
            )
        raise UsageError(f"{folder} isn't the state folder of a job list; trtopt jobs run LIST.toml makes LIST.state")
    check_folder(folder)
    state = State(folder)
    records, stopped = state.jobs(), not state.at_work()
    records = [item | {"state": "pending"} if stopped and item.get("state") == "running" else item for item in records]
    return JobsResult(tuple(JobResult.recorded(item, cached=True) for item in records), folder, 0, 0, 0.0)


class _Dropped(Exception):
    """The jobs that a call was for have failed by now."""


@dataclass(eq=False)
class _Pass:
    """One model on one data set."""

    key: str
    model: OpenModel
    data: OpenData
    jobs: list[Job] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Run:
    jobs: Sequence[Job]
    builds: Sequence[BuildJob]
    state: State
    pool: Pool
    engine: Engine
    lanes: Sequence[Lane]
    shard: int | None
    reporter: Reporter
    identity: Mapping[str, str] | None  # of what else than ONNX Runtime on the CPU runs models
    cores: int | None  # to be divided among the calls there are; None: threads are given
    observed: int = 0
    reused: int = 0
    results: dict[str, JobResult] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    _running: dict[str, float] = field(default_factory=dict)
    _keys: dict[str, str] = field(default_factory=dict)
    _pass_of: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = Loop(max(self.engine.slots, self.pool.workers), self.memory)
        self.versions = versions(self.identity) if self.jobs else {}
        self._phase: Phase

    def all(self) -> Mapping[str, JobResult]:
        """By the jobs' names."""
        with self.reporter.phase("jobs", total=len(self.jobs) + len(self.builds)) as self._phase:
            try:
                for build in self.builds:
                    if self.state.job(build.name).get("state") != "done":
                        self.state.record(build.name, {"state": "pending", "kind": "build"})
                todo = self._unfinished()
                passes = self._passes(todo, self._models(todo))
                self._observe(passes)
                self._prune(passes)
                self._build()
            except BaseException:
                for name in self._running:  # so that nobody takes a stopped run for one at work
                    self.state.record(name, {"state": "pending", **self._origin(name)})
                raise
        return self.results

    # The steps, each for all jobs: only when all models are known is it known who shares which images.

    def _unfinished(self) -> list[Job]:
        contents, todo = Contents(self.versions), list[Job]()
        unwritable = None
        if self.jobs:
            try:
                check_writable(made_folder(self.jobs[0].output.parent) / self.jobs[0].output.name)  # all lie there
            except OutputError as error:
                unwritable = error
        for job in self.jobs:
            self._phase.detail(f"looking at {job.name}")
            key, record = contents.key(job), self.state.job(job.name)
            self._keys[job.name] = key
            done = record.get("state") == "done" and record.get("key") == key
            if done and job.output.is_file() and sha256_file(job.output) == record.get("sha256"):
                self.results[job.name] = JobResult.of(job, record, cached=True)
                self._pass_of[job.name] = record.get("pass", "")
                self.reporter.note(f"{job.name}: done before")
                self._phase.advance()
            elif unwritable is not None:  # told now rather than after the work
                self._fail([job], unwritable)
            else:
                self.state.record(job.name, {"state": "pending", "key": key})
                todo.append(job)
        return todo

    def _models(self, todo: Iterable[Job]) -> list[tuple[OpenModel, list[Job]]]:
        sharing: dict[tuple[Path, tuple[str, ...]], list[Job]] = {}
        for job in todo:
            sharing.setdefault((job.model, job.precision_override), []).append(job)
        models: list[tuple[OpenModel, list[Job]]] = []

        async def opening(path: Path, overrides: Sequence[str], folder: Path, jobs: list[Job]) -> None:
            call = partial(self.pool.submit, "trtopt.jobs.work:open_model", path, overrides, folder)
            need = partial(self.memory.need, "", 2 * (path.stat().st_size if path.is_file() else 0))
            models.append((await self._call(OPEN, jobs, call, need), jobs))

        for number, ((path, overrides), jobs) in enumerate(sharing.items()):
            self._add(jobs, opening(path, overrides, self.state.scratch / f"model{number}", jobs))
        self._work("opening models")
        return models

    def _passes(self, todo: Sequence[Job], models: Sequence[tuple[OpenModel, list[Job]]]) -> list[_Pass]:
        sharing: dict[tuple[str, str], list[tuple[OpenModel, Job]]] = {}
        for model, jobs in models:
            for job in jobs:
                sharing.setdefault((job.data.name, _signature(model, job)), []).append((model, job))
        passes: dict[str, _Pass] = {}
        threads = max(1, (self.cores or 1) // max(1, min(len(sharing), self.pool.workers)))

        async def opening(users: list[tuple[OpenModel, Job]], jobs: list[Job], folder: Path) -> None:
            inputs = users[0][0].inputs
            call = partial(self.pool.submit, "trtopt.jobs.work:open_samples", jobs[0].data, inputs, threads, folder)
            data = await self._call(OPEN, jobs, call, partial(self.memory.need, "", 0, threads))
            for model, job in users:
                key = self._pass_of[job.name] = model.pass_key(data.described, data.preprocess, self.identity)
                passes.setdefault(key, _Pass(key, model, data)).jobs.append(job)

        for number, users in enumerate(sharing.values()):
            jobs = [job for _, job in users]
            self._add(jobs, opening(users, jobs, self.state.scratch / f"arrays{number}"))
        self._work("opening data")
        order = {job.name: number for number, job in enumerate(todo)}
        return sorted(passes.values(), key=lambda item: order[item.jobs[0].name])

    def _observe(self, passes: Sequence[_Pass]) -> None:
        sharing: dict[int, list[_Pass]] = {}
        for item in passes:
            sharing.setdefault(id(item.data), []).append(item)
        work: list[tuple[Samples, int, str, list[_Pass]]] = []
        for users in sharing.values():
            data = users[0].data
            size = self._shard_size(data, math.lcm(*(item.model.fixed_batch for item in users)))
            for start in range(0, len(data), size):
                stop = min(start + size, len(data))
                name = data.shard(start, stop)
                lacking = [item for item in users if self._lacks(item, name, stop - start)]
                if lacking:
                    work.append((data.samples.part(start, stop), start, name, lacking))
        if self.cores:
            tasks = sum(len(users) for _, _, _, users in work)
            self.engine.threads = max(1, self.cores // max(1, min(tasks, self.engine.slots)))
        for part, first, name, users in work:
            self._add([job for item in users for job in item.jobs], self._shard(part, first, name, users))
        for item in passes:
            if not item.missing:
                self._add(item.jobs, self._finish(item))
        self._work("observing")

    def _prune(self, passes: Sequence[_Pass]) -> None:
        done = [item for item in passes if all(self.results[job.name].state == "done" for job in item.jobs)]
        removed = self.state.prune(
            {job.name: self._pass_of.get(job.name, "") for job in self.jobs}, {item.key: item.shards for item in done}
        )
        if removed:
            self.reporter.note(f"removed {counted(removed, 'shard')} that no job comes from any more")

    def _shard_size(self, data: OpenData, batch: int) -> int:
        """Samples in each shard: a multiple of the batch that models have fixed, so that their batches stay the same."""
        key = sha256_json({"data": data.described, "preprocess": data.preprocess})
        recorded = self.state.shard_size(key)
        if self.shard is None and recorded and recorded % batch == 0:
            return recorded
        size = self.shard or min(LARGEST, max(SMALLEST, -(-len(data) // self.engine.slots)))
        size = -(-size // batch) * batch
        self.state.keep_shard_size(key, size)
        return size

    def _lacks(self, item: _Pass, shard: str, samples: int) -> bool:
        item.shards.append(shard)
        if shard in item.missing:  # the same content once more
            return False
        record = self.state.shard(item.key, shard)
        if (
            record is not None
            and record[0].samples == samples
            and record[0].histograms.keys() == set(item.model.tensors)
        ):
            self.reused += 1
            return False
        item.missing.add(shard)
        return True

    async def _shard(self, part: Samples, first: int, name: str, users: list[_Pass]) -> None:
        source: Any = part
        if self.engine.stages(part, len(users)):
            jobs = [job for item in users for job in item.jobs]
            source = await self._call(STAGE, jobs, lambda: self.engine.stage(part), partial(self.memory.need, "", 0))
        pending = {item.key for item in users}  # passes that still need the source
        for item in users:
            self._add(item.jobs, self._observe_one(item, source, first, part.samples, name, pending))

    async def _observe_one(
        self, item: _Pass, source: Any, first: int, count: int, name: str, pending: set[str]
    ) -> None:
        model = item.model
        try:
            result = await self._call(
                OBSERVE,
                item.jobs,
                lambda: self.engine.observe(model, source, first, count),
                lambda: self.memory.need(
                    model.fingerprint, model.nbytes, self.engine.threads, HOST_MEMORY if self.identity else 0
                ),
            )
        finally:
            pending.discard(item.key)
            if not pending:
                self.engine.release(source)
        made_by = result.pop("versions")
        if made_by != self.versions:
            raise CalibrationError(
                f"a worker has {made_by}, this run {self.versions}: install the same versions, and use GPUs of one kind"
            )
        self.memory.measured(model.fingerprint, result.pop("peak"))
        self.state.save_shard(item.key, name, result)
        self.observed += 1
        item.missing.discard(name)
        self._phase.detail(f"{item.jobs[0].name}: {len(item.shards) - len(item.missing)} of {len(item.shards)} shards")
        if not item.missing:
            await self._finish(item)

    async def _finish(self, item: _Pass) -> None:
        tables = [(job.model, job.method, job.output) for job in item.jobs]
        unusual = all(job.data.allow_unusual_data for job in item.jobs)
        arguments = (self.state.folder, item.model, item.data, item.key, item.shards, tables, unusual)
        outcomes = await self._call(
            FINISH,
            item.jobs,
            partial(self.pool.submit, "trtopt.jobs.work:make_tables", *arguments),
            partial(self.memory.need, "", item.model.nbytes),
        )
        for job, outcome in zip(item.jobs, outcomes):
            if isinstance(outcome, TrtoptError):
                self._fail([job], outcome)
            else:
                self._record(job, "done", outcome | {"shards": len(item.shards)})

    # Engines, by lanes.

    def _build(self) -> None:
        if not self.builds:
            return
        self.engine.finish()
        waiting = list(self.builds)
        self.loop.slots = max(1, len(self.lanes))
        for lane in self.lanes:
            self.loop.add(self._along(lane, waiting))
        self._work("building")

    async def _along(self, lane: Lane, waiting: list[BuildJob]) -> None:
        while (job := next((job for job in waiting if lane.takes(job)), None)) is not None:
            waiting.remove(job)
            try:
                await self._build_one(job, lane)
            except Exception as error:
                self._fail([job], error)

    async def _build_one(self, job: BuildJob, lane: Lane) -> None:
        if job.calibration is not None and self.results[job.calibration.name].state != "done":
            raise CalibrationError(f"its table wasn't made: {self.results[job.calibration.name]}")
        make_place(job.output)
        key, nbytes = f"build {job.model}", job.model.stat().st_size if job.model.is_file() else 0
        result = await self._call(
            BUILD, [job], partial(lane.build, job), partial(self.memory.need, key, nbytes, unmeasured=BUILDER)
        )
        self.memory.measured(key, result.pop("peak"))
        if "manifest" in result:  # it was built elsewhere
            install(job.output, result.pop("plan"), result.pop("manifest"))
        self._record(job, "done", result)

    async def _call(
        self, priority: int, jobs: Sequence[Job | BuildJob], start: Callable[[], Future[Any]], need: Callable[[], int]
    ) -> Any:
        """The result of a call for these jobs, which run from its start on; `_Dropped` once none of them needs it."""

        def begin() -> Future[Any]:
            if all(job.name in self.results for job in jobs):
                raise _Dropped
            for job in jobs:
                self._mark_running(job)
            return start()

        return await result_of(Call(priority, begin, need))

    def _add(self, jobs: Sequence[Job], steps: Steps) -> None:
        """Take steps for these jobs, which fail if an error comes out of them."""

        async def guarded() -> None:
            try:
                await steps
            except Exception as error:
                self._fail(jobs, error)

        self.loop.add(guarded())

    def _work(self, what: str) -> None:
        self._phase.detail(what)
        self.loop.run()

    # What is said and written of jobs.

    def _mark_running(self, job: Job | BuildJob) -> None:
        if job.name not in self._running and job.name not in self.results:
            self._running[job.name] = time.monotonic()
            self.state.record(job.name, {"state": "running", **self._origin(job.name)})
            self.reporter.note(f"{job.name}: running")

    def _origin(self, name: str) -> dict[str, str]:
        """For a job's record: its key, and the pass that it comes from, as far as that is known; a build's key is in its
        engine's manifest."""
        if name not in self._keys:
            return {"kind": "build"}
        pass_key = self._pass_of.get(name)
        return {"key": self._keys[name]} | ({"pass": pass_key} if pass_key else {})

    def _fail(self, jobs: Iterable[Job | BuildJob], error: Exception) -> None:
        for job in jobs:
            if job.name not in self.results:
                if isinstance(error, OSError):  # such as of a state that was removed meanwhile
                    error = OutputError(
                        f"{error.filename or self.state.folder}: {error.strerror or error}", "start again"
                    )
                internal = not isinstance(error, TrtoptError)
                if isinstance(error, OutputError) and error.advice:
                    folder = "engines" if isinstance(job, BuildJob) else "output"
                    error = OutputError(error.problem, f"make room, change {folder} in the list, or give `state=`")
                kind = "InternalError" if internal else type(error).__name__
                text = f"internal error: {type(error).__name__}: {error}" if internal else str(error)
                self._record(job, "failed", {"error": {"type": kind, "message": in_list(text)}})

    def _record(self, job: Job | BuildJob, state: str, content: dict[str, Any]) -> None:
        seconds = time.monotonic() - self._running.pop(job.name, time.monotonic())
        record = {"state": state, **self._origin(job.name), "seconds": round(seconds, 3), **content}
        record["notes"] = [in_list(note) for note in record.get("notes", ())]
        result = self.results[job.name] = JobResult.of(job, record, cached=record.get("cached", False))
        self.state.record(job.name, record | result.to_json())
        for note in record["notes"]:
            self.reporter.warn(f"{job.name}: {note}")
        self._phase.advance()
        (self.reporter.warn if state == "failed" else self.reporter.note)(str(result))


def _signature(model: OpenModel, job: Job) -> str:
    """Equal for models that take the same samples: arrays go by the inputs' names, images only by their size and type."""
    if job.data.images is not None and len(model.inputs) == 1:
        (info,) = model.inputs
        return sha256_json([info.dtype, info.sizes[1:]])
    return sha256_json([(info.name, info.dtype, info.shape) for info in model.inputs])
