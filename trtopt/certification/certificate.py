"""An engine that is known to be right: `certify`, and what it finds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.builder.instrumented import build_with_outputs
from trtopt.certification.relations import LEAST, Candidate, Relation, Row, closeness, limits, own_rows, relations
from trtopt.certification.request import CertifyRequest
from trtopt.certification.upgrading import save
from trtopt.core.documents import plain
from trtopt.core.errors import DataError, EngineError, UsageError
from trtopt.core.options import taking
from trtopt.core.temporary import scratch
from trtopt.core.values import Precision, TensorInfo
from trtopt.core.words import counted, first_of
from trtopt.cuda.device import probe
from trtopt.data import open_data, samples_of
from trtopt.data.rebatch import Arrays, alone, chunks, counting, samples_first
from trtopt.engine.manifest import Manifest, described_spec, kept_graph, load_manifest
from trtopt.evaluation.measures import decibels
from trtopt.evaluation.timing import Times, time_in_turns
from trtopt.evaluation.verify import by_samples, engine_file, session_runner
from trtopt.graph.io import Model, load_model
from trtopt.graph.proto import all_nodes
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.session import Session

MODEL = "the model as given"
CONTEXT, GRAPHS, BESIDE, REBUILT = "another context", "without CUDA graphs", "beside another call", "another build"
_SIZES = (1, 3, 8)  # of a graph's batches, where no profile says them
_BY_SCORE = ("NonMaxSuppression", "TopK", "EfficientNMS_TRT", "Unique", "NonZero")  # what orders or chooses by values
# Arithmetic → dB that a graph of these types may be beside the model, at the most, and how much farther an engine may be from
# it than that graph in ONNX Runtime: it sums in another order, FP16 in FP16, too, and TF32 isn't in the graph.
_NOISE = {
    Precision.FP32: (110.0, 30.0),
    Precision.FP16: (60.0, 25.0),
    Precision.BF16: (45.0, 20.0),
    Precision.INT8: (40.0, 8.0),
    Precision.FP8: (40.0, 8.0),
}
_TF32 = (60.0, 20.0)
_UNKNOWN = 20.0  # dB, where nothing says what the arithmetic does to this network


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`.

    Attributes:
        ran: what the results came from.
        samples: how many; made_up: they were; on_gpu: the engine itself was run.
        relations: each that was tried, by output and batch.
        left_out: what wasn't tried, and why.
        seconds: wall-clock time of all of it.
    """

    engine: str
    engine_sha256: str
    ran: str
    samples: int
    made_up: bool
    on_gpu: bool
    relations: tuple[Relation, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Relation, ...]:
        """Return those that don't hold, the worst first."""
        return tuple(sorted((item for item in self.relations if not item.holds), key=lambda item: item.slack))

    @property
    def ok(self) -> bool:
        return not self.failed

    def worst(self) -> dict[str, Relation]:
        """Return of each relation the output and batch where it is nearest to not holding."""
        found: dict[str, Relation] = {}
        for item in self.relations:
            if item.name not in found or item.slack < found[item.name].slack:
                found[item.name] = item
        return found

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values; a number that isn't finite is its name ("inf", "-inf")."""
        return {**plain(self), "ok": self.ok, "failed": [item.describe() for item in self.failed]}

    def __str__(self) -> str:
        tried = f"{counted(len(self.relations), 'trial')} of {counted(len(self.worst()), 'relation')}"
        tried += f" on {counted(self.samples, 'made-up sample' if self.made_up else 'sample')}, {self.seconds:.1f} s"
        verdict = ("certified" if self.on_gpu else "all holds") if self.ok else "NOT RIGHT"
        lines = [f"{self.ran}: {verdict}; {tried}"]
        for item in self.worst().values():
            said = f"{'holds' if item.holds else 'FAILS'}: {item.name}"
            if item.worst_db == np.inf:
                lines.append(f"  {said}, to the bit")
            else:
                where = f"{item.output}, batch {item.batch}, {item.sample}"
                lines.append(f"  {said}: {decibels(item.worst_db)}, {decibels(item.limit_db)} wanted ({where})")
        return "\n".join([*lines, *(f"  not tried: {text}" for text in self.left_out)])


@taking(CertifyRequest)
def certify(request: CertifyRequest) -> Certificate:
    """Hold an engine against itself and against the model that it was built from.

        certificate = trtopt.certify("net.onnx", "net.engine", data="samples.npz")
        if not certificate.ok: ...

    Relations between its own results (`trtopt.certification.relations`) find what a comparison of one batch doesn't: a wrong
    row of a large batch, memory of an earlier call that is read. Every row is held against ONNX Runtime without optimizations
    on the model as given, too. What differences may be is measured: the noise of this engine for the relations; beside the
    model that of the graph that `build --save-onnx` kept, in ONNX Runtime, and what its arithmetic may add to it.

    On a GPU the verdict is written into the engine's manifest, which `Session(require="certified")` asks for.

    Args:
        engine: a plan; without a GPU its kept graph is tried in ONNX Runtime, and `ran` says that it was the graph. Also an
            ONNX graph, or a function from inputs to outputs.
        images, data, preprocess: samples; without them made-up ones.
        batch: batches to try; default: the least, the most used and the largest of each profile, and two between.
        save: a file for `trtopt.upgrade`, which compares engines of one model that several TensorRTs have made.
        min_snr: dB to the model that each output must have, in place of what is measured.
        rebuild: build the kept graph once more and compare its results, too.

    Raises:
        UsageError: no such file, an engine whose graph is needed and wasn't kept, samples that it doesn't take.
        ModelError, EngineError, DeviceError, DataError: one of them can't run.
    """
    start = time.monotonic()
    model = load_model(request.model, lazy=True)
    engine = engine_file(request.engine)
    if request.save is not None and engine is None:
        raise UsageError("`save=` keeps what an engine is: give a plan as the engine")
    manifest = load_manifest(engine) if engine is not None else None
    samples, names = _samples(request, model, manifest)
    reference = by_samples(OnnxRunner(model, optimize=False, threads=request.threads, gpu=True), model)
    with contextlib.ExitStack() as stack:
        candidate, ran, left_out = _candidate(stack, request, model, samples[0])
        with request.reporter.phase("running the model as given"):
            wanted = [candidate.alone(reference, sample) for sample in samples]
        bound = _bound(request, candidate, manifest, samples)
        found = list(_tried(request, candidate, reference, _Samples(samples, names, wanted), bound, left_out))
    digest = "" if manifest is None else str(manifest.plan["sha256"])
    made_up, on_gpu = request.images is None and request.data is None, engine is not None and bool(probe())
    seconds, whose = round(time.monotonic() - start, 1), (str(engine or ""), digest, ran)
    certificate = Certificate(*whose, len(samples), made_up, on_gpu, tuple(found), tuple(left_out), seconds)
    if manifest is not None and engine is not None and on_gpu:
        manifest = replace(manifest, certificate=_summary(certificate))
        manifest.save(engine)
    if request.save is not None and manifest is not None and engine is not None:
        with request.reporter.phase("timing") if on_gpu else contextlib.nullcontext():
            save(Path(request.save), manifest, certificate, _times(engine, samples) if on_gpu else ())
    return certificate


def _times(engine: Path, samples: Sequence[Arrays]) -> tuple[Times, ...]:
    with Session(engine, contexts=1) as session:
        return time_in_turns({"": session}, samples)[0][""]


def _summary(certificate: Certificate) -> dict[str, Any]:
    """Return what the manifest says of it."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    worst = {name: plain(item.worst_db) for name, item in certificate.worst().items()}
    return {
        "ok": certificate.ok,
        "ran": certificate.ran,
        "samples": certificate.samples,
        "date": now,
        "worst_db": worst,
    }


def _samples(request: CertifyRequest, model: Model, manifest: Manifest | None) -> tuple[Sequence[Arrays], list[str]]:
    """Return samples one by one, and their names."""
    if request.images is None and request.data is None:
        made = samples_first(synthetic_inputs(model.inputs, _sides(request, model, manifest)), model.inputs)
        if not counting(model.inputs):  # nothing counts samples: it is one as a whole
            return [made], ["made-up"]
        count = min(map(len, made.values()), default=1)
        return [{name: array[at : at + 1] for name, array in made.items()} for at in range(count)], [
            f"made-up[{at}]" for at in range(count)
        ]
    source = open_data(model.inputs, **samples_of(request), batch=1, reporter=request.reporter)
    samples = [sample for batch in source for sample, _ in chunks(batch, 1)]
    if not samples:
        raise DataError("there are no samples to certify with")
    names = list(getattr(source, "names", ()) or ())
    return samples, names if len(names) == len(samples) else [f"sample {at}" for at in range(len(samples))]


def _sides(request: CertifyRequest, model: Model, manifest: Manifest | None) -> dict[str, int]:
    """Return sizes of open dimensions for made-up inputs: those that the engine is tuned for, and as many samples as asked."""
    ranges = manifest.ranges[:1] if manifest is not None else ()
    sizes = {
        f"{name}:{at}": size for profile in ranges for name, item in profile.items() for at, size in enumerate(item.opt)
    }
    for info in model.inputs:
        if info.shape and info.batch_axis is not None:
            sizes |= dict.fromkeys((f"{info.name}:{info.batch_axis}", str(info.shape[info.batch_axis])), request.limit)
    return sizes


@dataclass(frozen=True)
class _Samples:
    """Samples one by one, their names, and what the model as given makes of them."""

    arrays: Sequence[Arrays]
    names: Sequence[str]
    wanted: Sequence[Row]


# What is held against itself -------------------------------------------------------------------------------------------------


def _candidate(
    stack: contextlib.ExitStack, request: CertifyRequest, model: Model, sample: Arrays
) -> tuple[Candidate, str, list[str]]:
    """Open what is certified; return it, what its results come from, and what of it isn't tried."""
    given: Any = request.engine
    engine, gpu, ways, left_out = engine_file(given), probe(), dict[str, Any](), list[str]()
    profiles: Sequence[Mapping[str, Any]] = ()
    if engine is not None and gpu:
        main = stack.enter_context(Session(engine, contexts=2))
        run, ran, profiles = session_runner(main), f"{engine} on {gpu.devices[0]}", main.profiles
        plainly = session_runner(stack.enter_context(Session(engine, contexts=1, graphs=0)))
        ways = {CONTEXT: run, GRAPHS: plainly, BESIDE: _beside(stack, run)}
        if request.rebuild:
            ways[REBUILT] = _rebuilt(stack, request, engine)
    elif callable(given):
        run, ran = by_samples(given, model), "the function"
    else:
        graph = kept_graph(engine) if engine is not None else None
        if engine is not None and graph is None:
            raise EngineError(
                f"{engine} can't run here ({gpu.reason}), and its graph wasn't kept: build it with `save_onnx=`, or certify it "
                "where there is a GPU"
            )
        run = by_samples(OnnxRunner(graph or given, optimize=False, threads=request.threads), model)
        ran = (
            f"{graph}, the graph of {engine}, in ONNX Runtime: {gpu.reason}" if engine else "the graph in ONNX Runtime"
        )
        manifest = load_manifest(engine) if engine is not None else None
        profiles = () if manifest is None else manifest.ranges
        if engine is not None:
            left_out.append("the engine itself: it was the graph")
    sizes = (
        (1,)
        if alone(model.inputs) or not counting(model.inputs)
        else _sizes(model.inputs, profiles, sample, request.batch)
    )
    sides = {size for info in model.inputs for size in info.shape}
    outputs = [
        info
        for info in model.outputs
        if info.batch_axis is not None or sides.issuperset(info.shape[axis] for axis in info.open_axes)
    ]
    left_out += [
        f"{info.name} {info.dims}: its size depends on values" for info in model.outputs if info not in outputs
    ]
    if not outputs:
        raise UsageError(f"no output of {model.path or 'the model'} can be compared: {'; '.join(left_out)}")
    return Candidate(run, sizes, outputs, ways, _unordered(model)), ran, left_out


def _sizes(
    inputs: Sequence[TensorInfo], profiles: Sequence[Mapping[str, Any]], sample: Arrays, asked: Sequence[int]
) -> tuple[int, ...]:
    """Return batches to try, ascending: those asked for, or each profile's least, most used and largest and two between."""
    fixed = {info.sizes[0] for info in inputs if info.shape and info.sizes[0] > 0}
    if fixed:
        return (min(fixed),)
    found = set(map(int, asked))
    for profile in profiles if not asked else ():
        bounds = [(profile[name], sample[name].shape[1:]) for name in profile if name in sample]
        if bounds and all(item.holds((item.min[0], *rest)) for item, rest in bounds):
            low, tuned, high = (max(getattr(bounds[0][0], name)[0], 1) for name in ("min", "opt", "max"))
            found |= {low, tuned, high, low + (high - low) // 3, low + 2 * (high - low) // 3}
    return tuple(sorted(found or _SIZES))


def _beside(stack: contextlib.ExitStack, run: Any) -> Any:
    """Return a function that runs a batch while another one runs."""
    pool = stack.enter_context(ThreadPoolExecutor(1))

    def beside(batch: Arrays) -> Arrays:
        other = pool.submit(run, {name: np.ascontiguousarray(array[::-1]) for name, array in batch.items()})
        results: Arrays = run(batch)
        other.result()
        return results

    return beside


def _rebuilt(stack: contextlib.ExitStack, request: CertifyRequest, engine: Path) -> Any:
    graph, manifest = kept_graph(engine), load_manifest(engine)
    if graph is None or manifest is None:
        raise EngineError(
            f"the graph of {engine} wasn't kept, so that it can't be built again: build it with `save_onnx=`"
        )
    folder = stack.enter_context(scratch())
    plan = build_with_outputs(manifest, load_model(graph).proto, (), folder, reporter=request.reporter)
    return session_runner(stack.enter_context(Session(plan, contexts=1, trust=True)))  # built just now


def _unordered(model: Model) -> frozenset[str]:
    """Return the outputs that come, by whatever way, from operators that order or choose by values."""
    reached = set[str]()
    for node in all_nodes(model.proto.graph):  # in an order in which they can run
        if node.op_type in _BY_SCORE or reached.intersection(node.input):
            reached.update(node.output)
    return frozenset(info.name for info in model.outputs if info.name in reached)


# The trials -----------------------------------------------------------------------------------------------------------------


def _tried(
    request: CertifyRequest,
    candidate: Candidate,
    reference: Any,
    given: _Samples,
    bound: _Bound,
    left_out: list[str],
) -> Iterator[Relation]:
    """Try the model's own results, then the relations; say in `left_out` what isn't."""
    samples, names, wanted = given.arrays, given.names, given.wanted
    with request.reporter.phase("one sample at a time"):
        found = [candidate.alone(candidate.run, sample) for sample in samples]
    for info in candidate.outputs:
        near, least = closeness(candidate, info.name, wanted, found), bound.limits(candidate, info.name, wanted)
        worst = int(np.argmin(np.nan_to_num(near - least, posinf=np.inf, neginf=-np.inf)))
        yield Relation(MODEL, info.name, candidate.sizes[0], float(near[worst]), float(least[worst]), names[worst])
    alike = [at for at, sample in enumerate(samples) if _shapes(sample) == _shapes(samples[0])]
    if len(alike) < len(samples):
        left_out.append(f"{counted(len(samples) - len(alike), 'sample')} of other shapes: beside the model alone")
    own = own_rows(reference, candidate, [samples[at] for at in alike[:8]], [wanted[at] for at in alike[:8]])
    mixed = [info.name for info in candidate.outputs if info not in own]
    if mixed:
        left_out.append(f"rows of {first_of(mixed)}: the model itself computes them from others, too")
    candidate = replace(candidate, outputs=own)
    if not own:
        return
    sizes = ", ".join(map(str, candidate.sizes))
    with request.reporter.phase(f"batches of {sizes}"):
        chosen = ([samples[at] for at in alike], [names[at] for at in alike], [found[at] for at in alike])
        yield from relations(candidate, *chosen, limits(candidate, wanted, found))


def _shapes(sample: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in sample.items()}


@dataclass(frozen=True)
class _Bound:
    """What rows have to reach beside the model as given.

    Attributes:
        asked: dB that are asked for instead of all that follows.
        most: dB that arithmetic of the engine's kind reaches; apart: how much farther off an engine may be than its graph.
        graph: results of that graph in ONNX Runtime, where it was kept: what its roundings do to this network.
    """

    asked: float | None
    most: float
    apart: float
    graph: Sequence[Row] | None

    def limits(self, candidate: Candidate, name: str, wanted: Sequence[Row]) -> NDArray[np.float64]:
        """Return dB for each row of an output."""
        if self.asked is not None:
            return np.full(len(wanted), self.asked)
        reached = np.full(len(wanted), np.inf) if self.graph is None else closeness(candidate, name, wanted, self.graph)
        return np.maximum(np.minimum(reached, self.most) - self.apart, 0.0)


def _bound(
    request: CertifyRequest, candidate: Candidate, manifest: Manifest | None, samples: Sequence[Arrays]
) -> _Bound:
    if manifest is None:
        return _Bound(_UNKNOWN if request.min_snr is None else request.min_snr, 0, 0, None)
    spec, engine = described_spec(manifest.spec), Path(request.engine)  # type: ignore[arg-type]
    tf32 = spec.precision is Precision.FP32 and spec.tf32 and bool(probe())
    most, apart = _TF32 if tf32 else _NOISE[spec.precision]
    path = kept_graph(engine) if probe() and manifest.embedded is None else None
    if path is None:
        return _Bound(request.min_snr, LEAST + apart if spec.precision.quantized else most, apart, None)
    graph = load_model(path, lazy=True)
    run = by_samples(OnnxRunner(graph, optimize=False, threads=request.threads), graph)
    with request.reporter.phase("running the engine's graph"):
        return _Bound(request.min_snr, most, apart, [candidate.alone(run, sample) for sample in samples])
