"""An engine that is known to be right: `certify`, and what it finds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.certification.bundling import bundle
from trtopt.certification.opening import batched, built_with, open_candidate, with_tensors
from trtopt.certification.placing import Place, Subject, blamed, layers_of, place
from trtopt.certification.relations import (
    LEAST,
    MODEL,
    Candidate,
    Relation,
    Runner,
    Samples,
    closeness,
    hidden_by_masks,
    own_rows,
    relations,
    silent,
    undecided,
)
from trtopt.certification.request import CertifyRequest
from trtopt.core.documents import plain
from trtopt.core.errors import BuildFailed, TrtoptError, UnsupportedOperator, UsageError
from trtopt.core.files import write_json
from trtopt.core.options import taking
from trtopt.core.values import Precision
from trtopt.core.words import counted, first_of
from trtopt.cuda.device import probe
from trtopt.data import open_data, samples_of
from trtopt.data.rebatch import Arrays, counting, samples_first
from trtopt.engine.manifest import Manifest, described_spec, kept_graph, load_manifest
from trtopt.evaluation.measures import decibels
from trtopt.evaluation.timing import Times, time_in_turns
from trtopt.evaluation.verify import engine_file, graph_of, layers_beside
from trtopt.graph.half import has_half
from trtopt.graph.io import Model, load_model
from trtopt.graph.passes.quantize import is_quantized
from trtopt.graph.passes.typed import to_typed
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.session import Session
from trtopt.trt import select

FORMAT = "trtopt.certified/1"  # of what `save=` writes


class _Noise(NamedTuple):
    """Noise that an arithmetic may add to a network, in dB.

    Attributes:
        most: more is never demanded beside the model.
        apart: how much farther off an engine may be than its graph in ONNX Runtime: it sums in another order, FP16 in FP16,
            too, and TF32 isn't in the graph; infinite: the graph doesn't say what it does.
        unknown: what is wanted where no graph says what the arithmetic does to this network.
    """

    most: float
    apart: float
    unknown: float


_NOISE = {
    Precision.FP32: _Noise(110.0, 30.0, 80.0),
    Precision.FP16: _Noise(60.0, 25.0, 20.0),
    Precision.BF16: _Noise(45.0, 20.0, LEAST),
    Precision.INT8: _Noise(40.0, 10.0, LEAST),
    Precision.FP8: _Noise(40.0, 10.0, LEAST),
    Precision.INT4: _Noise(40.0, 25.0, LEAST),  # of weights alone, beside FP16
}
_TF32 = _Noise(60.0, 20.0, 40.0)
_NO_MANIFEST = _Noise(np.inf, 0.0, 20.0)


def _noise_of(manifest: Manifest | None, graph: ModelProto | None) -> _Noise:
    """Return what an engine's arithmetic adds; of the graph that was kept of it, if one was, what doesn't stand in it."""
    if manifest is None:
        return _NO_MANIFEST
    spec = described_spec(manifest.spec)
    if graph is not None and is_quantized(graph) and not spec.precision.quantized:
        spec = replace(spec, precision=Precision.INT8)  # by the model's own Q/DQ
    if spec.precision is Precision.FP32 and spec.tf32 and probe():
        return _TF32
    noise = _NOISE[Precision.INT4 if spec.int4 else spec.precision]
    # Where its layers in INT8 write FP16 is what TensorRT 8.6 chooses, and not in its graph.
    short = spec.precision.quantized and spec.base is not Precision.FP32
    unseen = short and graph is not None and not has_half(graph)
    return noise._replace(apart=np.inf) if unseen else noise


def _with_chosen_types(graph: Model, manifest: Manifest) -> Model:
    """Write the FP16 that TensorRT 8.6 chose into the graph that it was given, as later ones are given it."""
    spec, proto = described_spec(manifest.spec), graph.proto
    if spec.base is not Precision.FP16 or spec.precision.quantized or is_quantized(proto) or has_half(proto):
        return graph
    kept = {str(item["node"]): str(item["reason"]) for item in manifest.kept}
    typed = to_typed(to_ir(proto), spec.base, overrides=spec.overrides, measured=kept)
    return load_model(to_proto(typed.model))


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`.

    Attributes:
        ran: what the results came from.
        samples: how many; made_up: they were; on_gpu: the engine itself was run.
        relations: each that was tried, by output and batch.
        left_out: what wasn't tried, and why.
        seconds: wall-clock time of all of it.
        place: of what fails worst, where it was looked for and found.
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
    place: Place | None = None

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
        lines = [f"{self.ran}: {verdict(self.ok, self.on_gpu)}; {tried}"]
        for item in self.worst().values():
            said = f"{'holds' if item.holds else 'FAILS'}: {item.name}"
            if item.worst_db == np.inf:
                lines.append(f"  {said}, to the bit")
            else:
                where = f"{item.output}, batch {item.batch}, {item.sample}"
                lines.append(f"  {said}: {decibels(item.worst_db)}, {decibels(item.limit_db)} wanted ({where})")
        if self.place is not None:
            lines.append(f"  {self.place.relation} fails {self.place} ({counted(self.place.builds, 'build')})")
        return "\n".join([*lines, *(f"  not tried: {text}" for text in self.left_out)])


def verdict(ok: bool, on_gpu: bool) -> str:
    """Return a certificate's verdict in words."""
    return ("certified" if on_gpu else "all holds") if ok else "NOT RIGHT"


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
        bundle: a folder for what a report of the worst failure needs: the smallest part of the graph that is wrong, inputs for
            it, what they should give, and a script that shows it with TensorRT alone.
        locate: find the tensor at which the worst failure begins: engines are built with tensors of the kept graph as outputs,
            which may make the fault vanish; then that is told.
        rebuild: build the kept graph once more and compare its results, too.

    Raises:
        UsageError: no such file, an engine whose graph is needed and wasn't kept, samples that it doesn't take.
        ModelError, EngineError, DeviceError, DataError: one of them can't run.
    """
    return _Certifying(request).certificate()


class _Certifying:
    """The engine, graph or function that a request names, the model as given, and samples."""

    def __init__(self, request: CertifyRequest) -> None:
        self.started, self.request, self.reporter = time.monotonic(), request, request.reporter
        self.model, self.engine = load_model(request.model, lazy=True), engine_file(request.engine)
        if request.save is not None and self.engine is None:
            raise UsageError("`save=` keeps what an engine is: give a plan as the engine")
        self.on_gpu = self.engine is not None and bool(probe())
        located = request.locate or request.bundle is not None
        if located and callable(request.engine):
            raise UsageError("`locate=True` looks at a graph's tensors, and a function has none")
        self.looked_at: Any = request.engine if located else None  # the graph whose tensors are looked at
        if located and self.engine is not None:
            self.looked_at = graph_of(self.engine, "to look at its tensors")
        self.manifest = None if self.engine is None else load_manifest(self.engine)
        if self.manifest is not None and self.manifest.source["sha256"] != self.model.fingerprint:
            built_of = self.manifest.source["path"] or "a model in memory"
            said = f"{self.engine} wasn't built from this model, by content: from {built_of}, as that was then"
            self.reporter.warn(said)
        self.samples, self.names = samples_for(request, self.model, self.manifest)
        self.reference = batched(OnnxRunner(self.model, optimize=False, threads=request.threads, gpu=True), self.model)

    def certificate(self) -> Certificate:
        request, model, manifest = self.request, self.model, self.manifest
        with contextlib.ExitStack() as stack:
            candidate, ran, left_out = open_candidate(stack, request, model, manifest, self.samples[0])
            with self.reporter.phase("running the model as given"):
                wanted = [candidate.alone(self.reference, sample) for sample in self.samples]
            graph, given = self._graph(), Samples(self.samples, self.names, wanted)
            noise = _noise_of(manifest, None if graph is None else graph.proto)
            candidate = replace(candidate, most=noise.most)
            tried = tuple(self._tried(candidate, given, _least(request, candidate, graph, given, noise), left_out))
        if not tried:
            raise UsageError(f"no output of {model.path or 'the model'} can be compared: {'; '.join(left_out)}")
        certificate = Certificate(
            engine=str(self.engine or ""),
            engine_sha256="" if manifest is None else str(manifest.plan["sha256"]),
            ran=ran,
            samples=len(self.samples),
            made_up=request.images is None and request.data is None,
            on_gpu=self.on_gpu,
            relations=tried,
            left_out=tuple(left_out),
            seconds=round(time.monotonic() - self.started, 1),
        )
        fault = next((item for item in certificate.failed if item.name not in candidate.ways), None)
        if self.looked_at is not None and fault is not None:
            certificate = replace(certificate, place=self._located(candidate, fault))
        if self.engine is not None and manifest is not None:
            self._keep(self.engine, manifest, certificate)
        return certificate

    def _graph(self) -> Model | None:
        """Return the graph that was kept of an engine that runs here, if it takes what the model takes."""
        manifest = self.manifest
        if not self.on_gpu or self.engine is None or manifest is None or manifest.embedded is not None:
            return None
        path = kept_graph(self.engine)
        return None if path is None else _with_chosen_types(load_model(path, lazy=True), manifest)

    def _tried(
        self, candidate: Candidate, given: Samples, least: Mapping[str, NDArray[np.float64]], left_out: list[str]
    ) -> Iterator[Relation]:
        """Try the model's own results, then the relations; say in `left_out` what isn't."""
        with self.reporter.phase("one sample at a time"):
            found = [candidate.alone(candidate.run, sample) for sample in given.arrays]
            alike = [at for at, sample in enumerate(given.arrays) if _shapes(sample) == _shapes(given.arrays[0])]
        if odd := undecided(candidate, found):
            left_out.append(f"{first_of(odd)}: some scores are equal, and which of them comes first is open")
            candidate = replace(candidate, outputs=[info for info in candidate.outputs if info.name not in odd])
        quiet = silent(candidate, [*given.wanted, *found])
        for info in candidate.outputs:
            if info.name in quiet:
                continue
            near, limit = closeness(candidate, info.name, given.wanted, found), least[info.name]
            at = int((near - limit).argmin())
            yield Relation(MODEL, info.name, candidate.sizes[0], float(near[at]), float(limit[at]), given.names[at])
        if other := len(found) - len(alike):
            left_out.append(f"{counted(other, 'sample')} of other shapes: beside the model alone")
        own = own_rows(self.reference, candidate, given.of(alike[:8]))
        mixed = [info.name for info in candidate.outputs if info not in own]
        if mixed:
            left_out.append(f"rows of {first_of(mixed)}: in the model itself they depend on others, or on their place")
        if quiet := [name for name in quiet if name not in mixed]:
            left_out.append(f"{first_of(quiet)}: nothing but zeros and NaN for all samples")
        candidate = replace(candidate, outputs=[info for info in own if info.name not in quiet])
        if not candidate.outputs:
            return
        sizes = ", ".join(map(str, candidate.sizes))
        with self.reporter.phase(f"batches of {sizes}"):
            masked = hidden_by_masks(self.reference, candidate, given.of(alike[:8]))
            yield from relations(candidate, given.of(alike), [found[at] for at in alike], masked)

    def _located(self, candidate: Candidate, fault: Relation) -> Place | None:
        """Find where the worst failure begins, and write what a report of it needs, if that is asked for."""
        engine, manifest, few, found = self.engine, self.manifest, self.samples[:8], None
        if manifest is not None and manifest.spec["calibrator"] == "native" and self.on_gpu:
            self.reporter.warn("where it fails isn't looked for: the engine's scales stand beside its graph")
            return None
        graph = load_model(self.looked_at)
        pixels = manifest is not None and manifest.embedded is not None
        # Without a GPU it is the graph that is tried.
        right = graph.proto if self.on_gpu or pixels else self.model.proto
        subject = Subject(graph.proto, right, candidate, self._opened, few)
        with self.reporter.phase("looking for the place"):
            try:
                if fault.name == MODEL:
                    found = blamed(fault, layers_beside((self.model, graph, engine), few, self.reporter))
                else:
                    own = {*layers_of(right)}
                    found = place(subject, [name for name in layers_of(graph.proto) if name in own], fault)
                if self.request.bundle is not None and found is not None:
                    with self.reporter.phase("looking for the smallest part"):
                        said = bundle(Path(self.request.bundle), subject, found, fault, manifest)
                    self.reporter.note(said)
            except (BuildFailed, UnsupportedOperator) as error:  # not every graph is built with tensors as outputs
                self.reporter.warn(f"where it fails isn't known: {error}")
        return found

    def _opened(
        self, part: ModelProto, tensors: Sequence[str], shapes: Mapping[str, str] | None
    ) -> contextlib.AbstractContextManager[Runner]:
        if not self.on_gpu:
            return contextlib.nullcontext(with_tensors(load_model(part), tensors))
        return built_with(self.request, self.manifest, part, tensors, shapes)

    def _keep(self, engine: Path, manifest: Manifest, certificate: Certificate) -> None:
        """Write the verdict into the manifest, if it is of the engine itself, and what `upgrade` takes."""
        save, times = self.request.save, tuple[Times, ...]()
        if certificate.on_gpu:
            manifest = replace(manifest, certificate=_summary(certificate))
            manifest.save(engine)
            if save is not None:
                with self.reporter.phase("timing"), Session(engine, contexts=1) as session:
                    times = tuple(time_in_turns({"": session}, self.samples)[0][""])
        if save is not None:
            content = {"manifest": asdict(manifest), "certificate": certificate.describe(), "times": plain(times)}
            write_json(save, {"format": FORMAT, **content, "capabilities": _capabilities(manifest)})


def _capabilities(manifest: Manifest) -> dict[str, Any] | None:
    """Return what the TensorRT that made an engine can; None where it isn't this process's."""
    with contextlib.suppress(TrtoptError):  # another one's plan, tried by its graph
        generation = select("rtx" if manifest.generation["family"] == "rtx" else "tensorrt")
        if str(generation) == str(manifest.origin):
            return dict(msgspec.to_builtins(generation.capabilities, order="deterministic"))
    return None


def _summary(certificate: Certificate) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    worst = {name: plain(item.worst_db) for name, item in certificate.worst().items()}
    return {name: getattr(certificate, name) for name in ("ok", "ran", "samples")} | {"date": now, "worst_db": worst}


def samples_for(request: CertifyRequest, model: Model, manifest: Manifest | None) -> tuple[Sequence[Arrays], list[str]]:
    """Return samples one by one, and their names."""
    if request.images is None and request.data is None:
        made = samples_first(synthetic_inputs(model.inputs, _sides(request, model, manifest)), model.inputs)
        if not counting(model.inputs):  # nothing counts samples: it is one as a whole
            return [made], ["made-up"]
        count = range(min(map(len, made.values()), default=1))
        single = [{name: array[at : at + 1] for name, array in made.items()} for at in count]
        return single, [f"made-up[{at}]" for at in count]
    source = open_data(model.inputs, **samples_of(request), batch=1, reporter=request.reporter)
    return list(source), list(source.names)


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


def _shapes(sample: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in sample.items()}


def _nudged(sample: Arrays) -> dict[str, NDArray[Any]]:
    """Return a sample whose 32-bit floats are each the next one, up or down."""
    signs = np.random.default_rng(0)
    return {
        name: np.nextafter(array, np.where(signs.random(array.shape) < 0.5, np.inf, -np.inf), dtype=array.dtype)
        if array.dtype == np.float32
        else array
        for name, array in sample.items()
    }


def _least(
    request: CertifyRequest, candidate: Candidate, graph: Model | None, given: Samples, noise: _Noise
) -> dict[str, NDArray[np.float64]]:
    """Return for each output the dB that its rows have to reach beside the model as given: those asked for, or near what the
    engine's graph, where it was kept, reaches in ONNX Runtime: what its roundings do to this network. Its inputs are off by a
    last bit, since that is what another order of sums comes to: some networks make much of it."""
    names = [info.name for info in candidate.outputs]
    if request.min_snr is not None or graph is None:
        least = noise.unknown if request.min_snr is None else request.min_snr
        return dict.fromkeys(names, np.full(len(given.arrays), least))
    run = batched(OnnxRunner(graph, optimize=False, threads=request.threads), graph)
    with request.reporter.phase("running the engine's graph"):
        rows = [candidate.alone(run, _nudged(sample)) for sample in given.arrays]
    reached = {name: np.minimum(closeness(candidate, name, given.wanted, rows), noise.most) for name in names}
    for name, rows_db in reached.items():
        if (worst := float(rows_db.min())) < LEAST:
            said = f"{name}: the engine's own graph gives {decibels(worst)} to the model in ONNX Runtime, too"
            request.reporter.warn(f"{said}: that is lost by its precision, not by TensorRT")
    return {name: np.maximum(decibels - noise.apart, LEAST) for name, decibels in reached.items()}
