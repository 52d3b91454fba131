"""The agreement of a candidate with its reference, each output by what it means, held against limits.

Cosine misranks quantizations of classifiers: a bad calibration costs many classes while the cosine of the logits hardly falls
(docs/results/accuracy-lite0.md). It is reported, since people look for it, and judges embeddings alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.builder.instrumented import build_with_outputs
from trtopt.core.documents import plain
from trtopt.core.errors import DataError, UsageError
from trtopt.core.files import opened_regular, sha256_file
from trtopt.core.options import taking
from trtopt.core.progress import Reporter
from trtopt.core.shapes import outside
from trtopt.core.temporary import scratch
from trtopt.core.values import TensorInfo
from trtopt.cuda.device import probe
from trtopt.data import named_batches, open_data
from trtopt.data.rebatch import Arrays, alone, chunks, joined, laid_out, rebatched, samples_first
from trtopt.engine.manifest import kept_graph, load_manifest
from trtopt.evaluation.limits import Limits, not_finite, without_share
from trtopt.evaluation.metric import called, labels_of, metric_of, of_all, scored, takes_labels
from trtopt.evaluation.outputs import OutputAgreement, OutputSums, rows_of, sentence, spread
from trtopt.evaluation.per_layer import (
    SAMPLES as LAYER_SAMPLES,
    LayerAgreement,
    compare_layers,
    tensors_of_engine,
    verdict,
)
from trtopt.evaluation.request import VerifyRequest
from trtopt.graph.io import Model, load_model
from trtopt.graph.output_kinds import Kind, by_shape, index_outputs, resolve, stated
from trtopt.graph.passes.embed import embedded_in
from trtopt.graph.passes.typed import FP16_MAX
from trtopt.linting.rules import refuse_damaged
from trtopt.ort.runner import OnnxRunner
from trtopt.recipes.classnames import load_classes
from trtopt.runtime.session import Session
from trtopt.trt.plans import plan_header

FEW_DB = 30.0  # FP16 has more, unless a value overflows or a choice falls otherwise

Runner = Callable[[Arrays], Arrays]
"""Input name → array to output name → array: an `OnnxRunner`, or `Session.run`."""


_FINITE = (
    "build it with `fp16=True` and these samples (`data=` or `images=`), which keep in FP32 what FP16 can't hold, as a table "
    "calibrated on them does in INT8, or with `bf16=True`"
)
_FIRST = "; `per_layer=True` names the first node that gives such values"


@dataclass(frozen=True)
class Accuracy:
    """Share of samples whose label is the largest class, or among the five largest."""

    top1: float
    top5: float


@dataclass(frozen=True)
class Scores:
    """Values of a function of the user's own for the outputs of both. `least` is asked of the candidate's; None: nothing is."""

    name: str
    reference: float
    candidate: float
    least: float | None = None

    @property
    def missed(self) -> tuple[str, ...]:
        if self.least is None or self.candidate >= self.least:
            return ()
        own = "" if self.reference >= self.least else f"; the reference itself gives {self.reference:.6g}"
        return (f"{self.name} gives {self.candidate:.6g}, at least {self.least:g} is asked for{own}",)


@dataclass(frozen=True)
class Agreement:
    """The result of `verify`. The two accuracies are None without labels.

    Attributes:
        limits: what it was judged by; None: it wasn't.
        metric: what a function of the user's own gives, where there is one.
        engine: the candidate, where that was an engine, and the SHA-256 of its plan.
        ran: what its results came from.
        layers: the tensors that both graphs have, in the candidate's order, where they were asked for.
        beyond_fp16: inputs that hold numbers beyond FP16's largest, 65,504, with the largest magnitude.
        choices: outputs of few dB that follow a choice among computed values, with the node that chooses.
    """

    samples: int
    outputs: tuple[OutputAgreement, ...]
    reference_accuracy: Accuracy | None = None
    candidate_accuracy: Accuracy | None = None
    limits: Limits | None = None
    metric: Scores | None = None
    engine: str = ""
    engine_sha256: str = ""
    ran: str = ""
    layers: tuple[LayerAgreement, ...] = ()
    beyond_fp16: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def snr_db(self) -> float:
        """The lowest over the outputs."""
        return min(item.snr_db for item in self.outputs)

    @property
    def top1(self) -> float | None:
        """Agreement of the first output that is classes."""
        return next((item.top1 for item in self.outputs if item.top1 is not None), None)

    @property
    def missed(self) -> tuple[str, ...]:
        """Return what is outside the limits, each with the value and the limit; without limits, values that aren't finite."""
        scores = () if self.metric is None else self.metric.missed
        return (*(not_finite if self.limits is None else self.limits.missed)(self.figures()), *scores)

    @property
    def ok(self) -> bool:
        """Return whether all values are finite, and nothing that was asked for is missed."""
        return not self.missed

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values; a number that isn't finite is its name ("inf", "-inf", "nan")."""
        values = {**self.figures(), "missed": list(self.missed), "ok": self.ok}
        known = ("engine", "engine_sha256", "ran", "metric", "beyond_fp16", "choices")
        values |= {name: plain(value) for name in known if (value := getattr(self, name))}
        if self.layers:
            values["layers"] = [item.describe() for item in self.layers]
            values["verdict"] = verdict(self.layers)
        if self.limits is not None:
            values["limits"] = plain(self.limits)
        return values

    def figures(self) -> dict[str, Any]:
        """Return what was measured, without a judgement, as `describe`."""
        return {
            "samples": self.samples,
            "snr_db": plain(self.snr_db),
            "top1_agreement": self.top1,
            "reference_accuracy": plain(self.reference_accuracy),
            "candidate_accuracy": plain(self.candidate_accuracy),
            "outputs": {item.name: item.describe() for item in self.outputs},
        }

    def __str__(self) -> str:
        lines = [f"ran {self.ran}"] if self.ran else []
        for name, output in self.figures()["outputs"].items():
            lines.append(sentence(name, output, self.samples))
            if more := spread(output):
                lines.append(f"  {more}")
            if name in self.choices:
                lines.append(
                    f"  it follows a choice ({self.choices[name]}): where two values are nearly equal, rounding takes the "
                    "other one, so that dB say little; those of an output that has the values themselves do"
                )
        if self.reference_accuracy and self.candidate_accuracy:
            old, new = self.reference_accuracy, self.candidate_accuracy
            lines.append(f"top-1 {old.top1:.1%} → {new.top1:.1%}, top-5 {old.top5:.1%} → {new.top5:.1%}")
        if self.layers:
            lines.append(verdict(self.layers))
        asked = [] if self.limits is None else [self.limits.kept(self.figures())]
        if (scores := self.metric) is not None:
            lines.append(f"{scores.name}: {scores.reference:.6g} → {scores.candidate:.6g}")
            asked += [] if scores.least is None else [f"{scores.name} at least {scores.least:g}"]
        what = "outside the limit" if asked else "outside any limit"
        lines += [f"{what}: {text}" for text in self.missed]
        if asked and not self.missed:
            lines.append(f"within the limits: {'; '.join(asked)}")
        if any(item.nonfinite for item in self.outputs):
            for name, largest in self.beyond_fp16.items():
                lines.append(
                    f"the samples hold {largest:,.0f} > {FP16_MAX:,.0f}, FP16's largest number, in the input {name!r}"
                )
            lines.append(f"next: {_FINITE}{_FIRST * (not self.layers)}")
        return "\n".join(lines)


@taking(VerifyRequest)
def verify(request: VerifyRequest) -> Agreement:
    """Run both on the same samples and compare every output by its kind (`trtopt.evaluation.outputs` has the measures).

    Args:
        reference: usually the FP32 ONNX model, in ONNX Runtime, on a GPU where the installed package can use one.
        candidate: its Q/DQ, FP16 or BF16 model, on the CPU, node by node without graph optimizations; an engine, on this
            machine's GPU, without one its graph that `build --save-onnx` kept (`ran` says which), on either side; or a
            function from inputs to outputs, such as `Session.run`.
        batches: what `data` of `calibrate` may be. A candidate with its preprocessing embedded gets the pixels that they were
            made of. The worst samples are named by their `names`.
        metric, min: a function (`trtopt.evaluation.metric`), or module:function, called with the outputs of both.
        min_agreement, min_snr: with either the result is judged, by `Limits` with the other one's default; see `missed`.
        per_layer: compare the tensors that both graphs have by the same name, on the first samples; of an engine on a GPU
            those of another build, with its layers' tensors as outputs.

    Raises:
        ModelError, EngineError, DeviceError, BuildFailed: one of them can't run, or be built with its tensors as outputs.
        DataError: no samples, inputs that don't fit, or a reference output that isn't finite.
        UsageError: two engines or one whose graph is needed and wasn't kept, samples outside its shapes, outputs, labels, a
            kind or limit that don't fit.
    """
    limits = Limits.of(request.min_agreement, request.min_snr)
    if request.batches is not None and (request.images is not None or request.data is not None):
        raise UsageError("batches are given, and `images=` or `data=` besides: choose one")
    labels = None if request.labels is None else labels_of(request.labels)
    metric = None if request.metric is None else metric_of(request.metric, labels)
    reference, graph, engine = _sides(request)
    model = load_model(reference, lazy=True)
    kinds = kinds_of(model, request)
    run = by_samples(
        OnnxRunner(reference, optimize=False, threads=request.threads, gpu=True), model.inputs, model.outputs
    )
    batches = _Recorder(_batches(request, model.inputs), LAYER_SAMPLES if request.per_layer else 0)
    kept: dict[str, list[Arrays]] = {"reference": [], "candidate": []}
    with contextlib.ExitStack() as stack:
        other, place = _candidate(stack, request, model, graph, engine)
        if metric is not None:
            run, other = (_keeping(each, arrays) for each, arrays in zip((run, other), kept.values()))
        true = None if metric is not None and takes_labels(metric) else labels
        try:
            agreement = verify_all(run, {"candidate": other}, batches, true, kinds=kinds)["candidate"]
        except DataError:
            refuse_damaged(load_model(reference).proto, "the reference")
            raise
    if request.min_agreement is not None and (warning := without_share(item.kind for item in agreement.outputs)):
        request.reporter.warn(warning)
    more: dict[str, Any] = {"limits": limits, "ran": place, "beyond_fp16": batches.beyond_fp16}
    if engine is not None:
        more |= {"engine": str(engine), "engine_sha256": sha256_file(engine)}
    if metric is not None:
        expected, name = of_all(kept["reference"]), called(request.metric)
        before, after = (scored(metric, name, of_all(each), expected, labels) for each in kept.values())
        more["metric"] = Scores(name, before, after, request.min)
    if request.per_layer:
        samples = list(rebatched(batches.first, LAYER_SAMPLES))
        protos = load_model(reference).proto, load_model(graph).proto
        if engine is not None and probe():
            more["layers"] = _layers_of(engine, *protos, samples, request.reporter)
        else:
            more["layers"] = compare_layers(*protos, samples)
    few = [item.name for item in agreement.outputs if _lowest_db(item) < FEW_DB]
    follow = index_outputs(model.proto) if few else {}
    return replace(agreement, choices={name: follow[name] for name in few if name in follow}, **more)


def _sides(request: VerifyRequest) -> tuple[Any, Any, Path | None]:
    """Return the reference, the candidate (of an engine, the graph that was kept where that is needed), and the engine."""
    reference: Any = request.reference
    graph: Any = request.candidate
    if engine_file(reference) is not None and engine_file(graph) is None:
        reference, graph = graph, reference
    engine, gpu = engine_file(graph), probe()
    if engine is not None and (not gpu or request.per_layer):
        graph = _graph_of(engine, "to compare tensors" if gpu else f"here, where it can't run ({gpu.reason})")
    if (other := engine_file(reference)) is not None:
        model_file = kept_graph(other) or "MODEL.onnx"
        raise UsageError(
            f"both are TensorRT engines, and results are held against a model's: trtopt verify {model_file} {engine} …"
        )
    if request.per_layer and callable(graph):
        raise UsageError("`per_layer=True` compares graphs: give ONNX models, not functions")
    return reference, graph, engine


def _candidate(
    stack: contextlib.ExitStack, request: VerifyRequest, model: Model, graph: Any, engine: Path | None
) -> tuple[Runner, str]:
    """Open the candidate; return it as a function of the model's own inputs, and what an engine's results come from."""
    if engine is not None and (gpu := probe()):
        tensors = f"; its tensors: another build of {graph}, with these as outputs" * request.per_layer
        session = stack.enter_context(Session(engine, contexts=1))
        return session_runner(session), f"{engine} on {gpu.devices[0]}{tensors}"
    if callable(graph):
        return by_samples(graph, model.inputs, model.outputs), ""
    runner = OnnxRunner(graph, optimize=False, threads=request.threads)
    preprocessing = embedded_in(load_model(graph, lazy=True).proto)
    prepared = runner if preprocessing is None else lambda batch: runner(preprocessing.to_pixels(batch))
    run = by_samples(prepared, model.inputs, model.outputs)
    if engine is None:
        return run, ""
    place = f"{graph}, the graph that {engine} was built from, in ONNX Runtime: {probe().reason}"
    return _within(engine, run, model.inputs), place


def _keeping(run: Runner, arrays: list[Arrays]) -> Runner:
    def kept(batch: Arrays) -> Arrays:
        arrays.append(run(batch))
        return arrays[-1]

    return kept


def kinds_of(model: Model, request: Any) -> dict[str, Kind]:
    """Return the kinds of a model's outputs, by a request that may say them or name classes."""
    names = None if request.classes is None else load_classes(request.classes)
    return resolve(model.proto, model.outputs, request.output_kind, names)


def _graph_of(engine: Path, why: str) -> Path:
    """Return the graph that `build` kept of an engine; UsageError where it kept none, with `why` it is needed."""
    load_manifest(engine)  # of one that can't be read, that is the error, not that it names no graph
    if (graph := kept_graph(engine)) is not None:
        return graph
    kept_file = engine.with_suffix(".kept.onnx")  # the model itself is often called as the engine is
    raise UsageError(
        f"{engine} is a TensorRT engine, and its graph is needed {why}; build keeps it with `save_onnx=`: trtopt build "
        f"… --save-onnx {kept_file} -o {engine}, then the same again"
    )


def _within(engine: Path, run: Runner, inputs: Sequence[TensorInfo]) -> Runner:
    """`run` of such samples as the engine itself takes."""
    manifest = load_manifest(engine)
    profiles = () if manifest is None or manifest.embedded else manifest.ranges  # if embedded, of pixels

    def checked(batch: Arrays) -> Arrays:
        if problem := outside(profiles, inputs, batch):
            raise UsageError(f"{problem}: give others, or build it with other `shapes=`")
        return run(batch)

    return checked


def _lowest_db(output: OutputAgreement) -> float:
    """Return the lowest dB, of a sample where samples have their own; inf of integers, of which dB say nothing."""
    if output.integers:
        return math.inf
    return output.spread.lowest if output.spread and output.spread.figure == "snr_db" else output.snr_db


def _layers_of(
    engine: Path, reference: ModelProto, graph: ModelProto, samples: Sequence[Arrays], reporter: Reporter
) -> tuple[LayerAgreement, ...]:
    """Compare the engine itself, by a build with its tensors as outputs."""
    manifest, preprocessing = load_manifest(engine), embedded_in(graph)
    assert manifest is not None  # it names the graph
    tensors = tensors_of_engine(reference, graph)
    with scratch() as folder:
        plan = build_with_outputs(manifest, graph, tensors, folder, reporter=reporter)
        with Session(plan, contexts=1, trust=True) as session:  # built just now
            types = {item.name: item.dtype for item in session.inputs}
            batches = [shape.min[0] for profile in session.profiles for shape in profile.values() if shape.min]

            def run(feed: Arrays) -> Arrays:
                arrays = feed if preprocessing is None else preprocessing.to_pixels(feed)
                return session.run({name: np.asarray(array).astype(types[name]) for name, array in arrays.items()})

            return compare_layers(reference, graph, samples, run, min(batches, default=1))


def _batches(request: VerifyRequest, inputs: Sequence[TensorInfo]) -> Any:
    """Batches as they are; what else `open_data` takes, opened."""
    batches: Any = request.batches
    if batches is None:
        how = {name: getattr(request, name) for name in ("images", "data", "preprocess", "limit", "batch")}
        return open_data(inputs, **how, reporter=request.reporter)
    if isinstance(batches, (str, os.PathLike, Mapping)) or hasattr(batches, "__array__"):
        return open_data(inputs, data=batches)
    if hasattr(batches, "names"):
        return batches
    return (samples_first(batch, inputs) if alone(inputs) else batch for batch in named_batches(batches, inputs))


def session_runner(session: Session) -> Runner:
    """The engine, of the model's own inputs, with samples first in all."""

    def run(batch: Arrays) -> Arrays:
        return session.run_batches(session.taken(batch))

    return by_samples(run, session.inputs, session.outputs)


def by_samples(run: Runner, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> Runner:
    """`run`, which has these inputs and outputs, with samples along all first axes: one at a time where inputs have them
    elsewhere. An output that has none stays as it is."""
    if not alone(inputs):
        counted = [info for info in outputs if info.batch_axis is not None]
        return (lambda batch: samples_first(run(batch), counted)) if alone(counted) else run
    return lambda batch: joined(samples_first(run(laid_out(sample, inputs)), outputs) for sample, _ in chunks(batch, 1))


class _Recorder:
    """Batches, of which the first `keep` samples are kept, and which inputs hold numbers that FP16 doesn't."""

    def __init__(self, batches: Iterable[Arrays], keep: int) -> None:
        self.batches, self.keep, self.first = batches, keep, list[Arrays]()
        self.beyond_fp16: dict[str, float] = {}

    @property
    def names(self) -> Sequence[str]:
        return getattr(self.batches, "names", ())

    def __iter__(self) -> Iterator[Arrays]:
        count = 0
        for batch in self.batches:
            for name, array in batch.items():
                if np.size(array) and np.asarray(array).dtype.kind in "fiu":
                    largest = max(float(np.max(array)), -float(np.min(array)))
                    if largest > max(FP16_MAX, self.beyond_fp16.get(name, 0.0)):
                        self.beyond_fp16[name] = largest
            if count < self.keep:
                self.first.append({name: array[: self.keep - count] for name, array in batch.items()})
                count += len(next(iter(self.first[-1].values())))
            yield batch


def engine_file(candidate: Any) -> Path | None:
    """The candidate's path, where it is a TensorRT engine."""
    path = Path(candidate) if isinstance(candidate, (str, os.PathLike)) else None
    if path is None or not path.is_file():
        return None
    with opened_regular(path) as file:
        return path if plan_header(file.read(64)) is not None else None


def verify_all(
    reference: Runner,
    candidates: Mapping[str, Runner],
    batches: Iterable[Arrays],
    labels: Sequence[int] | None = None,
    *,
    kinds: Mapping[str, Kind] | None = None,
) -> dict[str, Agreement]:
    """`verify` for several candidates by name: one pass over the samples, each run once through the reference.

    `kinds` are of the outputs; those that it lacks go by type and shape.
    """
    comparisons = {name: _Comparison(labels, kinds) for name in candidates}
    for batch in batches:
        samples = next((len(array) for array in batch.values() if array.ndim), 1)
        outputs, masks = reference(batch), _unpadded(batch)
        for name, runner in candidates.items():
            comparisons[name].add(outputs, runner(batch), samples, masks)
    names = tuple(getattr(batches, "names", ()))
    return {name: comparison.result(names) for name, comparison in comparisons.items()}


def _unpadded(batch: Arrays) -> list[NDArray[np.bool_]]:
    """Samples × positions, which aren't padding, by each input of 0 and 1 that is called a mask or padding.

    A row that changes once has padding: where an attention mask is 0; else in its second part, as PyTorch's masks have 1 there
    and others 0. Any other row has none, since no sample is all padding.
    """
    masks = []
    for name, array in batch.items():
        named = re.search("mask|pad", name, re.I) and array.ndim == 2 and array.dtype.kind in "biu"
        if named and not ((array != 0) & (array != 1)).any():
            once = (array[:, 1:] != array[:, :-1]).sum(1, keepdims=True) == 1
            masks.append((array == (1 if re.search("att", name, re.I) else array[:, :1])) | ~once)
    return masks


class _Comparison:
    """Adds batches up."""

    def __init__(self, labels: Sequence[int] | None, kinds: Mapping[str, Kind] | None) -> None:
        self.labels, self.kinds = labels, dict(kinds or {})
        self.samples = 0
        self.sums: dict[str, OutputSums] = {}
        # Of the first output that is classes: in the reference and the candidate, of one and of five.
        self.hits: Any = None

    def add(self, reference: Arrays, candidate: Arrays, samples: int, masks: Sequence[NDArray[np.bool_]] = ()) -> None:
        if not isinstance(candidate, Mapping) or not all(hasattr(array, "ndim") for array in candidate.values()):
            raise UsageError(f"the candidate gives {type(candidate).__name__}; a mapping of names to arrays is needed")
        if set(reference) != set(candidate):
            names = (", ".join(sorted(outputs)) for outputs in (reference, candidate))
            raise UsageError("the reference has outputs {}; the candidate {}".format(*names))
        labels = None if self.labels is None else np.asarray(self.labels[self.samples : self.samples + samples])
        if labels is not None and len(labels) < samples:
            raise UsageError(f"{len(labels) + self.samples} labels were given; there are more samples")
        outputs = {name: (np.asarray(reference[name]), np.asarray(candidate[name])) for name in reference}
        if not self.sums:
            infos = [TensorInfo(name, old.dtype.name, old.shape) for name, (old, _) in outputs.items()]
            stated(self.kinds, infos)
            for name, kind in by_shape(infos).items():
                other_count = kind is Kind.CLASSES and len(outputs[name][0]) != samples
                self.sums[name] = OutputSums(name, self.kinds.get(name, Kind.OTHER if other_count else kind))
        for name, (old, new) in outputs.items():
            if old.shape != new.shape:
                raise UsageError(f"output {name!r}: shape {old.shape} in the reference, {new.shape} in the candidate")
            fitting = [mask for mask in masks if mask.shape == old.shape[:2]]
            self.sums[name].add(old, new, samples, fitting[-1] if fitting else None)  # a decoder's comes last
        class_outputs = [name for name, sums in self.sums.items() if sums.kind is Kind.CLASSES]
        class_outputs = [name for name in class_outputs if rows_of(outputs[name][0]).shape[:2] == (samples, 1)]
        if labels is not None and class_outputs:
            hits = np.array([_hits(class_outputs[0], array, labels) for array in outputs[class_outputs[0]]])
            self.hits = hits if self.hits is None else self.hits + hits
        self.samples += samples

    def result(self, names: Sequence[str] = ()) -> Agreement:
        if not self.samples:
            raise DataError("there are no samples to compare")
        if len(names) != self.samples:
            names = [f"sample {number}" for number in range(self.samples)]
        outputs = tuple(sums.result(names) for sums in self.sums.values())
        if self.labels is None:
            return Agreement(self.samples, outputs)
        if len(self.labels) != self.samples:
            raise UsageError(f"{len(self.labels)} labels were given for {self.samples} samples")
        if self.hits is None:
            kinds = ", ".join(f"{item.name} is {item.kind}" for item in outputs)
            raise UsageError(
                f"labels were given, but no output is samples × classes: {kinds}; say which it is "
                f"(`output_kind=['{outputs[0].name}=classes']`), or measure by a `metric=` that takes them"
            )
        before, after = (Accuracy(*map(float, shares)) for shares in self.hits / self.samples)
        return Agreement(self.samples, outputs, before, after)


def _hits(name: str, array: NDArray[Any], labels: NDArray[Any]) -> tuple[int, int]:
    """Count how often the label is the best class, and one of the five best."""
    scores = array.astype(np.float64).reshape(len(array), -1)
    if labels.min() < 0 or labels.max() >= scores.shape[1]:
        low, high, last = int(labels.min()), int(labels.max()), scores.shape[1] - 1
        numbered = f"label{f's {low} to' * (low != high)} {high}: output {name!r} has classes 0 to {last}"
        raise UsageError(numbered + "; where labels begin at 1, give each less 1" * (high == last + 1 > 1))
    best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")[:, :5]
    right = (best == labels[:, None]) & ~np.isnan(np.take_along_axis(scores, labels[:, None], 1))
    return int(right[:, 0].sum()), int(right.any(1).sum())
