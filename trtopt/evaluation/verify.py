"""A candidate held against its reference on real samples: `verify`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtopt.builder.instrumented import build_with_outputs
from trtopt.core.errors import DataError, UsageError
from trtopt.core.files import opened_regular, sha256_file
from trtopt.core.options import taking
from trtopt.core.progress import Reporter
from trtopt.core.shapes import outside
from trtopt.core.temporary import scratch
from trtopt.core.values import Kind, TensorInfo
from trtopt.cuda.device import probe
from trtopt.data import named_batches, open_data, samples_of
from trtopt.data.rebatch import Arrays, alone, chunks, joined, laid_out, rebatched, samples_first, samples_in
from trtopt.engine.manifest import kept_graph, load_manifest
from trtopt.evaluation.agreement import Agreement, Runner, Scores, verify_all
from trtopt.evaluation.limits import Limits, without_share
from trtopt.evaluation.metric import Metric, labels_of
from trtopt.evaluation.per_layer import SAMPLES as LAYER_SAMPLES, LayerAgreement, compare_layers, tensors_of_engine
from trtopt.evaluation.request import VerifyRequest
from trtopt.graph.io import Model, load_model
from trtopt.graph.output_kinds import resolve
from trtopt.graph.passes.embed import embedded_in
from trtopt.linting.rules import refuse_damaged
from trtopt.ort.runner import OnnxRunner
from trtopt.recipes.loader import load_classes
from trtopt.runtime.session import Session
from trtopt.trt.plans import plan_header


@taking(VerifyRequest)
def verify(request: VerifyRequest) -> Agreement:
    """Run both on the same samples and compare every output by its kind (`trtopt.evaluation.measures`).

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
    labels = labels_of(request.labels)
    metric = None if request.metric is None else Metric(request.metric, labels)
    *_, engine = sides = _sides(request)
    agreement = replace(_compared(request, sides, labels, metric), limits=limits)
    if request.min_agreement is not None and (warning := without_share(item.kind for item in agreement.outputs)):
        request.reporter.warn(warning)
    return agreement if engine is None else replace(agreement, engine=str(engine), engine_sha256=sha256_file(engine))


# The two sides -------------------------------------------------------------------------------------------------------------


_Sides = tuple[Model, Any, "Path | None"]
"""An ONNX model; a model or function that is compared with it, of an engine its graph where that is needed; the engine."""


def _sides(request: VerifyRequest) -> _Sides:
    """Tell reference and candidate apart, in whichever order they are given; UsageError where they can't be compared."""
    reference: Any = request.reference
    graph: Any = request.candidate
    if engine_file(reference) is not None and engine_file(graph) is None:
        reference, graph = graph, reference
    engine, gpu = engine_file(graph), probe()
    if engine is not None:
        why = "to compare tensors" if gpu else f"here, where it can't run ({gpu.reason})"
        graph = graph_of(engine, why) if request.per_layer or not gpu else None
    if (other := engine_file(reference)) is not None:
        model_file = kept_graph(other) or "MODEL.onnx"
        raise UsageError(
            f"both are TensorRT engines, and results are held against a model's: trtopt verify {model_file} {engine} …"
        )
    if request.per_layer and callable(graph):
        raise UsageError("`per_layer=True` compares graphs: give ONNX models, not functions")
    loaded = graph if graph is None or callable(graph) else load_model(graph, lazy=True)
    return load_model(reference, lazy=True), loaded, engine


def engine_file(candidate: Any) -> Path | None:
    """The candidate's path, where it is a TensorRT engine."""
    if not isinstance(candidate, (str, os.PathLike)) or not (path := Path(candidate)).is_file():
        return None
    with opened_regular(path) as file:
        return path if plan_header(file.read(64)) is not None else None


def graph_of(engine: Path, why: str) -> Path:
    """Return the graph that `build` kept of an engine; UsageError where it kept none, with `why` it is needed."""
    load_manifest(engine)  # of one that can't be read, that is the error, not that it names no graph
    if (graph := kept_graph(engine)) is not None:
        return graph
    kept_file = engine.with_suffix(".kept.onnx")  # the model itself is often called as the engine is
    raise UsageError(
        f"{engine} is a TensorRT engine, and its graph is needed {why}; build keeps it with `save_onnx=`: trtopt build "
        f"… --save-onnx {kept_file} -o {engine}, then the same again"
    )


def kinds_of(model: Model, request: Any) -> dict[str, Kind]:
    """Return the kinds of a model's outputs, by a request that may say them or name classes."""
    names = None if request.classes is None else load_classes(request.classes)
    return resolve(model.proto, model.outputs, request.output_kind, names)


# On samples ----------------------------------------------------------------------------------------------------------------


def _compared(
    request: VerifyRequest, sides: _Sides, labels: tuple[int, ...] | None, metric: Metric | None
) -> Agreement:
    """Run both on all samples; the agreement says what the candidate's results came from, and what the metric gives."""
    model = sides[0]
    batches = _batches(request, model.inputs)
    reference = by_samples(OnnxRunner(model, optimize=False, threads=request.threads, gpu=True), model)
    first = list[Arrays]()  # samples, which tensors are compared on
    before, after = list[Arrays](), list[Arrays]()  # results, which only a metric needs

    def run(batch: Arrays) -> Arrays:
        if request.per_layer and (lacking := LAYER_SAMPLES - sum(map(samples_in, first))):
            first.append({name: array[:lacking] for name, array in batch.items()})
        return reference(batch)

    with contextlib.ExitStack() as stack:
        other, place = _candidate(stack, request, sides)
        if sides[2] is not None:
            other = _of_model(other, model)
        runs = (run, other) if metric is None else (_keeping(run, before), _keeping(other, after))
        true = None if metric is not None and metric.takes_labels else labels
        try:
            found = verify_all(runs[0], {"": runs[1]}, batches, true, kinds=kinds_of(model, request))[""]
        except DataError:
            refuse_damaged(model.proto, "the reference")
            raise
    if metric is not None:
        scores = Scores(metric.name, metric(before, before), metric(after, before), request.min)
        found = replace(found, metric=scores)
    layers = layers_beside(sides, list(rebatched(first, LAYER_SAMPLES)), request.reporter) if request.per_layer else ()
    return replace(found, ran=place, layers=layers)


def _candidate(stack: contextlib.ExitStack, request: VerifyRequest, sides: _Sides) -> tuple[Runner, str]:
    """Open the candidate; return it as a function of the model's own inputs, and what an engine's results come from."""
    (model, graph, engine), gpu = sides, probe()
    if engine is not None and gpu:
        tensors = f"; its tensors: another build of {graph.path}, with these as outputs" if request.per_layer else ""
        session = stack.enter_context(Session(engine, contexts=1))
        return session_runner(session), f"{engine} on {gpu.devices[0]}{tensors}"
    if callable(graph):
        return by_samples(graph, model), ""
    preprocessing = embedded_in(graph.proto)
    runner = OnnxRunner(graph, optimize=False, threads=request.threads)
    run = by_samples(runner if preprocessing is None else lambda batch: runner(preprocessing.to_pixels(batch)), model)
    if engine is None:
        return run, ""
    manifest = load_manifest(engine)
    profiles = () if manifest is None or manifest.embedded else manifest.ranges  # if embedded, of pixels

    def within(batch: Arrays) -> Arrays:  # such samples as the engine itself takes
        if problem := outside(profiles, model.inputs, batch):
            raise UsageError(f"{problem}: give others, or build it with other `shapes=`")
        return run(batch)

    return within, f"{graph.path}, the graph that {engine} was built from, in ONNX Runtime: {gpu.reason}"


def session_runner(session: Session) -> Runner:
    """The engine, of the model's own inputs, with samples first in all."""
    return by_samples(lambda batch: session.run_batches(session.taken(batch)), session)


def by_samples(run: Runner, model: Model | Session) -> Runner:
    """`run`, which has this model's inputs and outputs, with samples along all first axes: one at a time where inputs have
    them elsewhere. An output that has none stays as it is."""
    inputs, outputs = model.inputs, model.outputs
    if not alone(inputs):
        counted = [info for info in outputs if info.batch_axis is not None]
        return (lambda batch: samples_first(run(batch), counted)) if alone(counted) else run
    return lambda batch: joined(samples_first(run(laid_out(sample, inputs)), outputs) for sample, _ in chunks(batch, 1))


def _of_model(run: Runner, model: Model) -> Runner:
    """`run` without the tensors that an engine gives besides, as `mark_output=` told it to."""
    own = {info.name for info in model.outputs}
    return lambda batch: {name: array for name, array in run(batch).items() if name in own}


def _keeping(run: Runner, arrays: list[Arrays]) -> Runner:
    def kept(batch: Arrays) -> Arrays:
        arrays.append(run(batch))
        return arrays[-1]

    return kept


def _batches(request: VerifyRequest, inputs: Sequence[TensorInfo]) -> Any:
    """Batches as they are; what else `open_data` takes, opened."""
    batches: Any = request.batches
    if batches is None:
        return open_data(inputs, **samples_of(request), batch=request.batch, reporter=request.reporter)
    if isinstance(batches, (str, os.PathLike, Mapping)) or hasattr(batches, "__array__"):
        return open_data(inputs, data=batches)
    if hasattr(batches, "names"):
        return batches
    return (samples_first(batch, inputs) if alone(inputs) else batch for batch in named_batches(batches, inputs))


# Tensor by tensor ----------------------------------------------------------------------------------------------------------


def layers_beside(sides: _Sides, samples: Sequence[Arrays], reporter: Reporter) -> tuple[LayerAgreement, ...]:
    """Compare tensor by tensor: the graphs; of an engine on a GPU another build of it, with its tensors as outputs."""
    model, candidate, engine = sides
    reference, graph = model.proto, candidate.proto
    if engine is None or not probe():
        return compare_layers(reference, graph, samples)
    manifest, preprocessing = load_manifest(engine), embedded_in(graph)
    assert manifest is not None  # it names the graph
    tensors = tensors_of_engine(reference, graph)
    with scratch() as folder:
        plan = build_with_outputs(manifest, graph, tensors, folder, reporter=reporter)
        with Session(plan, contexts=1, trust=True) as session:  # built just now
            batches = [shape.min[0] for profile in session.profiles for shape in profile.values() if shape.min]

            def run(feed: Arrays) -> Arrays:
                return session.run(session.taken(feed if preprocessing is None else preprocessing.to_pixels(feed)))

            return compare_layers(reference, graph, samples, run, min(batches, default=1))
