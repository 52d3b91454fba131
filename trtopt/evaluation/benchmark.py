"""The speed of an engine: on the GPU, on the host, end to end, from several threads, beside other ways of running the model.

    print(trtopt.bench("resnet50.engine", batch=(1, 32), against=("onnxruntime",)))

All of it in one process on the same inputs; ways of running take turns, so that falling clocks or a busy machine meet each
alike.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Plain
from trtopt.core.errors import DeviceError, ModelError, UsageError
from trtopt.core.files import existing_file
from trtopt.core.options import taking
from trtopt.core.values import Profile, choice
from trtopt.cuda.clocks import Clocks, clocks
from trtopt.cuda.device import probe
from trtopt.data.difference import difference
from trtopt.data.rebatch import Arrays
from trtopt.engine.manifest import REASONS, Manifest
from trtopt.evaluation.baselines import BASELINES, Baseline, Torch, open_baselines
from trtopt.evaluation.request import BenchRequest
from trtopt.evaluation.timing import MADE_UP, tuned_infos
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.runtime.open_engine import MemoryReport
from trtopt.runtime.request import BACKENDS, opening_options
from trtopt.runtime.session import Session
from trtopt.runtime.timing import Spread, in_turns, timed

_ROUNDS = 5
_SECONDS = 10.0  # that one way of running may take for one batch; ONNX Runtime on a CPU would need minutes
_WARM_SECONDS = 2.0
_BUSY = 10  # percent of utilization by others, before this starts, from which a GPU counts as shared
_OURS = "trtopt"


@dataclass(frozen=True)
class BenchRow:
    """One way of running one batch; milliseconds.

    Attributes:
        gpu: inference alone between CUDA events; None: it can't be asked.
        host: inference alone, from launch to synchronized, one at a time; None: it can't be asked.
        run: end to end, from NumPy arrays to NumPy arrays; None: it didn't run, `note` says why.
        iterations: calls that `run` is made of.
        throughput: samples a second end to end, by `streams` callers.
        difference: largest difference of the results from the engine's, of the largest result; None: for the engine.
    """

    runner: str
    batch: int
    gpu: Spread | None = None
    host: Spread | None = None
    run: Spread | None = None
    iterations: int = 0
    throughput: float | None = None
    streams: int = 1
    difference: float | None = None
    note: str = ""


@dataclass(frozen=True)
class BenchReport(Plain):
    """The result of `bench`.

    Attributes:
        gpu: the GPU's name; inputs: what they are; clocks: under this load, for each batch.
        memory: what the session held at the end; notes: what to know before believing a figure.
    """

    engine: Path
    precision_summary: str
    gpu: str
    inputs: str
    rows: tuple[BenchRow, ...]
    clocks: tuple[Clocks, ...]
    memory: MemoryReport
    notes: tuple[str, ...]

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows, as text; the last column is how many times as long as the engine it takes. Callers stand behind the
        throughput where there are several."""
        times = ("GPU ms", "host ms", "p50 ms", "p90 ms", "p99 ms")
        columns = ("runner", "batch", *times, "samples/s", "× time")
        ours = {row.batch: row.run.median for row in self.rows if row.runner == _OURS and row.run}
        rows = []
        for row in self.rows:
            run = row.run
            cells = [item and item.median for item in (row.gpu, row.host)]
            cells += [run and run.median, run and run.p90, run and run.p99]
            rate = "-" if row.throughput is None else f"{row.throughput:.0f}{f' by {row.streams}' * (row.streams > 1)}"
            ratio = f"{run.median / ours[row.batch]:.2f}" if run and row.batch in ours else "-"
            texts = ["-" if cell is None else f"{cell:.4g}" for cell in cells]
            rows.append((row.runner, str(row.batch), *texts, rate, ratio))
        return columns, rows

    def remarks(self) -> list[str]:
        lines = [f"{self.engine}: {REASONS.split(self.precision_summary)[0]}"] if self.precision_summary else []
        lines += [f"{self.gpu}; {clock}" if self.gpu else str(clock) for clock in self.clocks[:1]]
        memory = f"{self.memory.gpu / 2**20:.1f} MiB on the GPU and {self.memory.pinned / 2**20:.1f} MiB pinned"
        lines.append(f"memory: {memory} for {self.memory.slots} slots, weights of {self.memory.plan / 2**20:.1f} MiB")
        lines.append(f"inputs: {self.inputs}")
        lines += [f"{row.runner}, batch {row.batch}: {row.note}" for row in self.rows if row.note]
        return lines + [f"note: {text}" for text in self.notes]

    def __str__(self) -> str:
        return "\n".join([*aligned(*self.table()), *self.remarks()])


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, its columns as wide as what stands in them."""
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in (columns, *rows)]


def engine_to_time(request: Any, what: str, instead: str) -> Path:
    """Return the engine of a request that times it at batch sizes on a GPU; `instead` says what goes without one."""
    choice(request.backend, BACKENDS, "`backend=`")
    if len(set(request.batch)) != len(request.batch):
        raise UsageError(f"`batch=` names a size twice: {', '.join(map(str, request.batch))}")
    path = existing_file(request.engine, "the engine")
    if path.suffix == ".onnx":
        raise UsageError(f"{path} is an ONNX model; engines are timed: trtopt build {quote(str(path))} … makes one")
    if request.backend == "onnxruntime" or not (gpus := probe()):
        why = "`backend='onnxruntime'` runs on the CPU" if request.backend == "onnxruntime" else gpus.reason
        raise DeviceError(f"{what} {path.name} needs an NVIDIA GPU: {why}. {instead.format(quote(str(path)))}")
    return path


def gpu_name(device: int) -> str:
    """Return the name of a GPU as results have it; "" where it isn't known."""
    return next((str(item) for item in probe().devices if item.ordinal == device), "")


@taking(BenchRequest)
def bench(request: BenchRequest) -> BenchReport:
    """Measure an engine, and what else can run the model, on the same made-up inputs.

    Args:
        against: of "torch", "onnxruntime"; all are opened before anything is measured.
        batch: samples at a time; empty: what each profile is tuned for.
        iterations, warmup: calls of each kind; fewer where one way of running would take more than ten seconds.
        source: where PyTorch's module comes from, as for `export`.

    Raises:
        UsageError, OutputError: arguments that can't be right, or a batch outside the engine's shapes.
        MissingDependency, DeviceError: something in `against` isn't installed; no GPU, or PyTorch can't use it.
        ModelError: a baseline can't load the model. One that can't run it has a row that says so.
    """
    reporter = request.reporter
    for name in request.against:
        choice(name, BASELINES, "`against=`")
    if len(set(request.against)) != len(request.against):
        raise UsageError(f"`against=` names something twice: {', '.join(request.against)}")
    path = engine_to_time(
        request, "measuring", "To see what it gives, without times, on the CPU: trtopt run {} … --backend onnxruntime"
    )
    idle = clocks(request.device)
    with contextlib.ExitStack() as stack:
        session = Session(path, contexts=max(4, request.streams), **opening_options(request))
        stack.callback(session.close)
        notes = list(session.notes)
        if (idle.utilization or 0) >= _BUSY:
            notes.append(
                f"the GPU was {idle.utilization} % busy before this started: it is shared, and times may be too long"
            )
        inputs = inputs_by_size(session, request.batch)
        opened = open_baselines(request, session, lambda: _source_model(session.manifest, request.model, notes))
        baselines = [stack.enter_context(contextlib.closing(baseline)) for baseline in opened]
        for arrays in inputs.values():
            session.run(arrays)  # a shape that doesn't fit is refused before anything is measured
        rows, load_clocks = list[BenchRow](), list[Clocks]()
        for size, arrays in inputs.items():
            with reporter.phase(f"measuring batch {size}"):
                rows += _measure(session, baselines, size, arrays, request)
                load_clocks.append(clocks(request.device, lambda arrays=arrays: session.run(arrays)))  # type: ignore[misc]
        notes += [f"batch {size}: {clock}" for size, clock in zip(inputs, load_clocks) if clock.throttled]
        for text in notes:
            reporter.warn(text)
        summary = session.manifest.precision_summary if session.manifest else ""
        given = (path, summary, gpu_name(request.device), MADE_UP, tuple(rows), tuple(load_clocks))
        return BenchReport(*given, session.memory(), tuple(notes))


# Inputs ----------------------------------------------------------------------------------------------------------------


def inputs_by_size(session: Session, batch: Sequence[int]) -> dict[int, dict[str, NDArray[Any]]]:
    """Return made-up inputs for each of these batch sizes; by default for those that the profiles are tuned for."""
    sizes = list(batch) or [1]
    first = next((info for info in session.inputs if info.shape), None)
    if not batch and first is not None and (axis := first.batch_axis) is not None:
        sizes = sorted({tuned_infos([first], each)[0].sizes[axis] for each in session.profiles or ({},)})
    whole_input = next((info for info in session.inputs if info.shape and info.batch_axis is None), None)
    if whole_input is not None and sizes != [1]:
        raise UsageError(
            f"`batch={sizes}`: input {whole_input.name!r} {whole_input.dims} has no batch; 1 is all it takes"
        )
    return {size: synthetic_inputs(tuned_infos(session.inputs, _holding(session, size), size), {}) for size in sizes}


def _holding(session: Session, size: int) -> Profile:
    """Return the first profile that takes so many samples, else the first one."""
    axes = {info.name: info.batch_axis for info in session.inputs if info.batch_axis is not None}
    for profile in session.profiles:
        ranges = [(axis, profile[name]) for name, axis in axes.items() if profile[name].min]
        if all(each.min[axis] <= size <= each.max[axis] for axis, each in ranges):
            return profile
    return next(iter(session.profiles), {})


def _source_model(manifest: Manifest | None, model: str | os.PathLike[str] | None, notes: list[str]) -> Path:
    """The ONNX model that the engine was built from."""
    source: Any = model or (manifest.source.get("path") if manifest else None)
    if not source or (model is None and not Path(source).is_file()):
        why = f"the manifest names {source}, which isn't there" if source else "the manifest doesn't name it"
        raise UsageError(
            f"`against=['onnxruntime']` needs the ONNX model that the engine was built from, and {why}: give `model=`"
        )
    path = existing_file(source, "the ONNX model")
    from trtopt.graph.io import load_model  # loads onnx, which engines alone don't need

    if manifest and load_model(path).fingerprint != manifest.source.get("sha256"):
        notes.append(f"{path} isn't (any more) what the engine was built from: its times are of another network")
    return path


# Measuring -------------------------------------------------------------------------------------------------------------


def _measure(
    session: Session, baselines: Sequence[Baseline], size: int, inputs: Arrays, request: BenchRequest
) -> list[BenchRow]:
    iterations, streams = request.iterations, request.streams
    floats = inputs if session.embedded is None else session.embedded.from_pixels(inputs)
    timing = session.time(inputs, iterations, request.warmup)
    ways: dict[str, Callable[[], Mapping[str, Any]]] = {_OURS: lambda: session.run(inputs)}
    rows: dict[str, BenchRow] = {}
    for baseline in baselines:
        try:
            baseline.prepare(floats)
        except ModelError as error:  # noqa: PERF203
            rows[baseline.name] = BenchRow(baseline.name, size, note=f"didn't run: {error}")
        else:
            ways[baseline.name] = lambda baseline=baseline: baseline.run(floats)  # type: ignore[misc]
    results = {name: {output: np.array(array) for output, array in way().items()} for name, way in ways.items()}
    measurements = {name: lambda way=way: timed(way)[0] for name, way in ways.items()}
    in_turns(measurements, request.warmup, rounds=1, seconds=_WARM_SECONDS)
    times = in_turns(measurements, iterations, rounds=_ROUNDS, seconds=_SECONDS)
    ours, rate = times[_OURS], _throughput(ways[_OURS], size, streams, iterations)
    spread = Spread.of(ours)
    rows[_OURS] = BenchRow(_OURS, size, timing.gpu, timing.host, spread, len(ours), rate, streams, note=timing.note)
    for name, baseline in ((item.name, item) for item in baselines if item.name in ways):
        own = times[name]
        distance = difference(results[_OURS], results[name]).relative
        note = f"{baseline.note}; results {distance:.2g} of the largest away from the engine's"
        rate = size * len(own) / sum(own) * 1e3
        gpu = baseline.gpu(iterations) if isinstance(baseline, Torch) else None  # ONNX Runtime can't be asked
        rows[name] = BenchRow(name, size, gpu, None, Spread.of(own), len(own), rate, 1, distance, note)
    return [rows[name] for name in (_OURS, *(item.name for item in baselines))]


def _throughput(call: Callable[[], object], size: int, streams: int, iterations: int) -> float:
    """Return samples a second with `streams` threads calling, which all have called before the clock starts."""
    ready = threading.Barrier(streams)  # so that each thread has one of the calls

    def work(count: int) -> None:
        ready.wait()
        for _ in range(count):
            call()

    with ThreadPoolExecutor(streams, "trtopt-bench") as pool:
        list(pool.map(work, [1] * streams))
        start = time.perf_counter()
        list(pool.map(work, [iterations] * streams))
    return size * streams * iterations / (time.perf_counter() - start)
