"""How fast an engine is: on the GPU, on the host, end to end, from several threads, and beside other ways of running the model.

    print(trtopt.bench("resnet50.engine", batch=(1, 32), against=("onnxruntime",)))

All of it in one process on the same inputs; ways of running take turns, so that falling clocks or a busy machine meet each
alike.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DeviceError, ModelError, UsageError
from trtopt.core.files import existing_file
from trtopt.core.options import taking
from trtopt.core.values import ShapeRange, TensorInfo, choice
from trtopt.cuda.device import probe
from trtopt.cuda.smi import Clocks, clocks, others
from trtopt.data import open_data
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import filled, joined, samples_in
from trtopt.engine.manifest import Manifest
from trtopt.evaluation.peers import PEERS, Peer, open_peers
from trtopt.evaluation.request import BenchRequest
from trtopt.graph.io import load_model
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.ort.difference import difference
from trtopt.runtime.session import BACKENDS, MemoryReport, Session
from trtopt.runtime.timing import Spread

Arrays = Mapping[str, NDArray[Any]]
_TURNS = 5  # in how many pieces a measurement is cut, so that all take turns
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
    gpu: Spread | None
    host: Spread | None
    run: Spread | None
    iterations: int
    throughput: float | None
    streams: int
    difference: float | None = None
    note: str = ""


@dataclass(frozen=True)
class BenchReport:
    """What `bench` found.

    Attributes:
        gpu: the GPU's name; inputs: where they came from; clocks: under this load, for each batch.
        memory: what the session held at the end; notes: what to know before believing a figure.
    """

    engine: Path
    truth: str
    gpu: str
    inputs: str
    rows: tuple[BenchRow, ...]
    clocks: tuple[Clocks, ...]
    memory: MemoryReport
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": str(self.engine),
            "truth": self.truth,
            "gpu": self.gpu,
            "inputs": self.inputs,
            "rows": [asdict(row) for row in self.rows],
            "clocks": [item.describe() for item in self.clocks],
            "memory": self.memory.describe(),
            "notes": list(self.notes),
        }

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows, as text; the last column is how many times as long as the engine it takes."""
        columns = (
            "runner",
            "batch",
            "GPU ms",
            "host ms",
            "p50 ms",
            "p90 ms",
            "p99 ms",
            "samples/s",
            "callers",
            "× time",
        )
        ours = {row.batch: row.run.median for row in self.rows if row.runner == _OURS and row.run}
        rows = []
        for row in self.rows:
            run = [f"{value:.4g}" for value in (row.run.median, row.run.p90, row.run.p99)] if row.run else ["-"] * 3
            times = f"{row.run.median / ours[row.batch]:.2f}" if row.run and row.batch in ours else "-"
            alone = [f"{item.median:.4g}" if item else "-" for item in (row.gpu, row.host)]
            rate = "-" if row.throughput is None else f"{row.throughput:.0f}"
            rows.append((row.runner, str(row.batch), *alone, *run, rate, str(row.streams), times))
        return columns, rows

    def remarks(self) -> list[str]:
        said = [f"{self.engine}: {self.truth}"] if self.truth else []
        said += [f"{self.gpu}; {clock}" if self.gpu else str(clock) for clock in self.clocks[:1]]
        held = f"{self.memory.gpu / 2**20:.1f} MiB on the GPU and {self.memory.pinned / 2**20:.1f} MiB pinned"
        said.append(f"memory: {held} for {self.memory.lanes} lanes, weights of {self.memory.plan / 2**20:.1f} MiB")
        said.append(f"inputs: {self.inputs}")
        said += [f"{row.runner}, batch {row.batch}: {row.note}" for row in self.rows if row.note]
        return said + [f"note: {text}" for text in self.notes]

    def __str__(self) -> str:
        columns, rows = self.table()
        widths = [max(map(len, column)) for column in zip(columns, *rows)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in (columns, *rows)]
        return "\n".join([*lines, *self.remarks()])


@taking(BenchRequest)
def bench(request: BenchRequest) -> BenchReport:
    """Measure an engine, and what else can run the model, on the same inputs.

    Args:
        engine: a plan file.
        against: of "torch", "onnxruntime", "polygraphy"; all are opened before anything is measured.
        batch: samples at a time; empty: what each profile is tuned for.
        streams: threads that call at the same time, for the throughput.
        iterations, warmup: calls of each kind; fewer where one way of running would take more than ten seconds.
        data, images, preprocess: real inputs, as for `calibrate`; without, synthetic ones, which say how fast it is and
            nothing else. Without `preprocess`, images are prepared as the manifest says;
            a mapping without `preset` changes that.
        model: the ONNX model for ONNX Runtime; default: the one that the manifest names.
        source: where PyTorch's module comes from, as for `export`.
        trust_host_code: as for `Session`: run the machine code that a version-compatible plan carries.

    Raises:
        UsageError: arguments that can't be right, or a batch outside the engine's shapes.
        MissingDependency: something in `against` isn't installed.
        DeviceError: no GPU, or PyTorch can't use it.
        ModelError: a baseline can't load the model. One that can't run it has a row that says so.
    """
    reporter = request.reporter
    _check(request.against, request.batch, request.streams, request.iterations, request.warmup)
    path = existing_file(request.engine, "the engine")
    choice(request.backend, BACKENDS, "backend")
    if request.backend == "onnxruntime" or not (found := probe()):
        why = "backend='onnxruntime' runs on the CPU" if request.backend == "onnxruntime" else found.reason
        raise DeviceError(
            f"measuring {path.name} needs an NVIDIA GPU: {why}. To see what it gives, without times, on the CPU: trtopt run "
            f"{path.name} … --backend onnxruntime"
        )
    strangers = others(request.device)  # before this process is there itself
    idle = clocks(request.device)
    session = Session(
        path,
        device=request.device,
        backend=request.backend,
        contexts=max(4, request.streams),
        trust_host_code=request.trust_host_code,
    )
    opened: list[Peer] = []
    try:
        notes = list(session.notes) + _shared(strangers, idle)
        sizes = tuple(request.batch) or _tuned(session)
        pool, origin = _inputs(session, sizes, request.data, request.images, request.preprocess)
        opened = open_peers(
            request.against,
            engine=path,
            backend=session.backend,
            model=lambda: _source_model(session.manifest, request.model, notes),
            source=request.source,
            outputs=session.outputs,
            ordinal=request.device,
        )
        for inputs in pool.values():
            session.run(inputs)  # a shape that doesn't fit is refused before anything is measured
        rows: list[BenchRow] = []
        seen: list[Clocks] = []
        for size, inputs in pool.items():
            with reporter.phase(f"measuring batch {size}"):
                rows += _measure(session, opened, size, inputs, request.streams, request.iterations, request.warmup)
                seen.append(clocks(request.device, lambda inputs=inputs: session.run(inputs)))  # type: ignore[misc]
        notes += [f"batch {size}: {clock}" for size, clock in zip(pool, seen) if clock.throttled]
        arrived = [item for item in others(request.device) if item not in strangers]
        if len(arrived) > 1:  # one is this process, by a number that it may not know
            notes.append(f"other processes came to the GPU meanwhile: {', '.join(arrived)} (one is this one)")
        for text in notes:
            reporter.warn(text)
        truth = session.manifest.truth if session.manifest else ""
        return BenchReport(
            path, truth, _gpu_name(request.device), origin, tuple(rows), tuple(seen), session.memory(), tuple(notes)
        )
    finally:
        for peer in opened:
            peer.close()
        session.close()


def _check(against: Sequence[str], batch: Sequence[int], streams: int, iterations: int, warmup: int) -> None:
    if isinstance(against, str) or isinstance(batch, int):
        raise UsageError("against and batch are lists, such as against=('torch',), batch=(1, 32)")
    for name in against:
        choice(name, PEERS, "`against=`")
    for values, what in ((against, "`against=`"), (batch, "`batch=`")):
        if len(set(values)) != len(values):
            raise UsageError(f"{what} names something twice: {', '.join(map(str, values))}")
    least = [("`streams=`", streams, 1), ("`iterations=`", iterations, 1), ("`warmup=`", warmup, 0)]
    for what, value, low in least + [("`batch=`", size, 1) for size in batch]:
        if value < low:
            raise UsageError(f"{what} is {value}; at least {low} is needed")


def _shared(strangers: Sequence[str], idle: Clocks) -> list[str]:
    if strangers:
        return [f"the GPU is shared: {', '.join(strangers)}; times may be longer than they would be alone"]
    if (idle.utilization or 0) >= _BUSY:
        return [f"the GPU was {idle.utilization} % busy before this started: it is shared, and times may be too long"]
    return []


def _gpu_name(device: int) -> str:
    return next((str(item) for item in probe().devices if item.ordinal == device), "")


# Inputs ----------------------------------------------------------------------------------------------------------------


def _tuned(session: Session) -> tuple[int, ...]:
    """The batch sizes that the profiles are tuned for."""
    if not session.inputs:
        return (1,)
    first = session.inputs[0]
    tuned = {profile[first.name].opt[0] for profile in session.profiles if profile[first.name].opt}
    size = first.shape[0] if first.shape else 1
    return tuple(sorted(tuned)) or (size if isinstance(size, int) and size > 0 else 1,)


def _inputs(
    session: Session, sizes: Sequence[int], data: Any, images: Any, preprocess: Any
) -> tuple[dict[int, dict[str, NDArray[Any]]], str]:
    """Batch size → arrays, and where they came from."""
    if data is None and images is None:
        if preprocess is not None:
            raise UsageError("`preprocess=` is for `images=`: give both, or neither for synthetic inputs")
        made = {size: synthetic_inputs(_shaped(session, size), {}) for size in sizes}
        return made, "synthetic: good for speed only (give `data=` or `images=` for real ones)"
    if images is not None:
        prepared = session.preprocess if preprocess is None else Preprocess.load(preprocess, session.preprocess)
        preprocess = prepared and prepared.at_opt(session.inputs, session.profiles)
    batches = open_data(
        session.inputs, images=images, data=data, preprocess=preprocess, limit=max(sizes), batch=min(sizes)
    )
    samples = joined(batches)
    count = samples_in(samples)
    cut = {size: filled(samples, size) for size in sizes}
    again = f", repeated to fill batches of up to {max(sizes)}" if count < max(sizes) else ""
    return cut, f"{count} real samples from {images if images is not None else data}{again}"


def _shaped(session: Session, size: int) -> list[TensorInfo]:
    """The inputs with every dimension known: `size` samples, the rest as the profile for that is tuned."""
    fitting = [item for item in session.profiles if all(_holds(item[info.name], size) for info in session.inputs)]
    profile = next(iter(fitting or session.profiles), {})
    shaped = []
    for info in session.inputs:
        fixed = [axis for axis in info.shape[:1] if isinstance(axis, int) and axis > 0]
        if fixed and fixed[0] != size:
            raise UsageError(
                f"`batch=[{size}]`: input {info.name!r} has a fixed batch of {fixed[0]}; build with `shapes=`"
            )
        shape: tuple[int | str, ...] = profile[info.name].opt if info.name in profile else info.shape
        shaped.append(replace(info, shape=(size, *shape[1:]) if shape else shape))
    return shaped


def _holds(shapes: ShapeRange, size: int) -> bool:
    return not shapes.min or shapes.min[0] <= size <= shapes.max[0]


def _source_model(manifest: Manifest | None, model: str | os.PathLike[str] | None, notes: list[str]) -> Path:
    """The ONNX model that the engine was built from."""
    said = str(manifest.source.get("path") or "") if manifest else ""
    if model is None and not (said and Path(said).is_file()):
        why = f"the manifest names {said}, which isn't there" if said else "the manifest doesn't name it"
        raise UsageError(
            f"`against=['onnxruntime']` needs the ONNX model that the engine was built from, and {why}: give `model=`"
        )
    path = existing_file(said if model is None else model, "the ONNX model")
    if manifest and load_model(path).fingerprint != manifest.source.get("sha256"):
        if model is None:
            raise UsageError(f"{path} isn't any more what the engine was built from: give `model=`, or build it again")
        notes.append(f"{path} isn't the model that the engine was built from: its times are of another network")
    return path


# Measuring -------------------------------------------------------------------------------------------------------------


def _measure(
    session: Session, peers: Sequence[Peer], size: int, inputs: Arrays, streams: int, iterations: int, warmup: int
) -> list[BenchRow]:
    timing = session.time(inputs, iterations, warmup)
    failed: dict[str, str] = {}
    ways: dict[str, Callable[[], Mapping[str, Any]]] = {_OURS: lambda: session.run(inputs)}
    for peer in peers:
        try:
            peer.prepare(inputs)
        except ModelError as error:  # noqa: PERF203
            failed[peer.name] = str(error)
        else:
            ways[peer.name] = lambda peer=peer: peer.run(inputs)  # type: ignore[misc]
    reference = {name: np.array(array) for name, array in session.run(inputs).items()}
    apart = {name: difference(reference, dict(way())).relative for name, way in ways.items() if name != _OURS}
    runs = _in_turns(ways, iterations, warmup)
    mine = runs[_OURS]
    rate = _throughput(lambda: session.run(inputs), size, streams, iterations)
    rows = [BenchRow(_OURS, size, timing.gpu, timing.host, Spread.of(mine), len(mine), rate, streams, note=timing.note)]
    for peer in peers:
        if peer.name in failed:
            rows.append(
                BenchRow(peer.name, size, None, None, None, 0, None, 1, note=f"didn't run: {failed[peer.name]}")
            )
            continue
        times = runs[peer.name]
        fast = size * len(times) / sum(times) * 1e3
        row = BenchRow(peer.name, size, peer.gpu(iterations), None, Spread.of(times), len(times), fast, 1)
        far = f"; results {apart[peer.name]:.2g} of the largest away from the engine's"
        rows.append(replace(row, difference=apart[peer.name], note=peer.note + far))
    return rows


def _in_turns(ways: Mapping[str, Callable[[], object]], iterations: int, warmup: int) -> dict[str, list[float]]:
    """Milliseconds of each call. At least one call in each turn, at most what the time allows."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        end = time.perf_counter() + _WARM_SECONDS
        for _ in range(warmup):
            call()
            if time.perf_counter() > end:
                break
    for turn in range(_TURNS):
        wanted = iterations * (turn + 1) // _TURNS
        for name, call in ways.items():
            end = time.perf_counter() + _SECONDS / _TURNS
            while len(times[name]) < wanted:
                start = time.perf_counter()
                call()
                now = time.perf_counter()
                times[name].append((now - start) * 1e3)
                if now > end:
                    break
    return times


def _throughput(call: Callable[[], object], size: int, streams: int, iterations: int) -> float:
    """Samples a second with `streams` threads calling; each calls once before the clock starts."""
    failed: list[BaseException] = []
    started: list[float] = []
    gate = threading.Barrier(streams, action=lambda: started.append(time.perf_counter()))

    def work() -> None:
        try:
            call()
            gate.wait()
            for _ in range(iterations):
                call()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            failed.append(error)
            gate.abort()

    threads = [threading.Thread(target=work, name=f"trtopt-bench-{number}", daemon=True) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return size * streams * iterations / (time.perf_counter() - started[0])
