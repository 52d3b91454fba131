"""The execution of a build's plan: lower the model, build it, and compare what the engine runs with what was asked for.

Precision is decided once and lowered in one of two ways, as the generation wants it: into the graph's own types
(strongly typed builds), or into builder flags beside an FP32-typed graph (8.6). Q/DQ pairs stand in the graph in both.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from trtopt.builder.lowering import NO_INT4, Lowered, PrecisionReport, judge, lower
from trtopt.builder.plan import BuildPlan
from trtopt.calibration.int4_codes import find_codes
from trtopt.calibration.pruning import Pruned
from trtopt.calibration.safety import Safety, decibels, find_unsafe
from trtopt.core.errors import (
    AccuracyLost,
    BackendError,
    BuildFailed,
    ModelError,
    OutputError,
    PrecisionLost,
    UnsupportedOperator,
    UsageError,
)
from trtopt.core.files import cache_folder, check_writable
from trtopt.core.options import named
from trtopt.core.temporary import scratch
from trtopt.core.values import BuildSpec, Issue, Precision, Profile, TensorInfo, overriding
from trtopt.core.words import first_of
from trtopt.cuda.device import DeviceInfo
from trtopt.graph.fixed_inputs import with_file
from trtopt.graph.io import save_model
from trtopt.graph.op_types import ELEMENTWISE
from trtopt.graph.origin import Origins
from trtopt.graph.passes.expand import written_out
from trtopt.graph.passes.quantize import is_quantized
from trtopt.graph.passes.reworded import starts_at_zero
from trtopt.graph.passes.typed import overflowing, typed_already
from trtopt.graph.traced_batch import find_traced_batch
from trtopt.graph.view import to_ir
from trtopt.graph.work import macs, sizes_in
from trtopt.linting.refusals import explained
from trtopt.linting.rules import fp16_hazards, one_sample, refuse_damaged
from trtopt.ort.folding import proven
from trtopt.trt.generation import BuiltPlan, Generation
from trtopt.trt.layers import HEAVY_OPS, REGION, sparse_kernels
from trtopt.trt.parsing import refusal
from trtopt.trt.profiles import validate_profiles

LEAST_QUANTIZED = 0.1  # of the arithmetic in INT8 or FP8: with less of it an engine is better built without
LEAST_SHARE = 0.5  # of the arithmetic asked for in a precision: an engine that runs less of it so isn't delivered
# Bytes of a timing cache that is kept without being asked for: each build writes all of it, 6 s for 100 MB on 10.6.
MOST_TIMINGS = 32 << 20
PARTS = "part of an operator that TensorRT takes only written out"


def execute(plan: BuildPlan) -> tuple[BuildSpec, Lowered, BuiltPlan, PrecisionReport, Safety | None]:
    """Lower and build the folded model, and judge what the engine runs; nothing is written. Raises as `trtopt.build`.

    Return how it was built (with scales beside the graph TensorRT's own calibrator reads them), the graph, the plan, what that
    runs, and what the samples say of the model.
    """
    spec, inputs, reporter = plan.spec, plan.model.inputs, plan.request.reporter
    folded_model = proven(plan.built, samples=plan.samples or (), profiles=spec.profiles, reporter=reporter)
    folded = folded_model.proto
    if folded_model.report.problem:
        reporter.warn(folded_model.report.warning)
    refuse_damaged(folded, plan.name)
    for finding in one_sample(find_traced_batch(folded), inputs, spec.profiles):
        if finding.level == "error":
            said = with_file(str(finding).removeprefix("error: "), plan.model.path)
            raise ModelError(f"{plan.name} can't be built for several samples: {said}")
    if plan.table is not None and plan.table.model["fingerprint"] != folded_model.fingerprint:
        reporter.warn("the calibration table was made for another model, or for other weights: calibrate this one")
    validate_profiles(inputs, spec.profiles, longest=folded_model.max_lengths)  # folding may have shown them
    safety = _measure(plan, folded)
    if spec.int4 and plan.samples is not None:
        plan = replace(plan, coded=find_codes(folded, plan.samples, spec.base, reporter=reporter))
    unsafe = {} if safety is None else safety.in_fp32
    if plan.beside is None:
        lowered, engine, report = _construct(plan, folded, unsafe)
    else:
        reporter.note(f"{plan.generation} gets the scales beside the graph, without Q/DQ, as it is faster so")
        spec = replace(spec, calibrator="native")
        try:
            lowered, engine, report = _construct(replace(plan, spec=spec, cache=plan.beside), folded, unsafe)
        except (BuildFailed, PrecisionLost, UnsupportedOperator) as error:
            reporter.note(f"with Q/DQ in the graph instead, since with scales beside it: {error}")
            spec = plan.spec
            lowered, engine, report = _construct(plan, folded, unsafe)
    if spec.sparsity != "off":
        lowered = replace(lowered, weights="; ".join(filter(None, [lowered.weights, sparse_kernels(engine.layers)])))
    for warning in [*engine.warnings, *_hazards(folded, spec, lowered)]:
        reporter.warn(warning)
    return spec, lowered, engine, report, safety


def _hazards(folded: onnx.ModelProto, spec: BuildSpec, lowered: Lowered) -> list[str]:
    """Repeat what `check` says of constants beyond FP16, of those that the build didn't keep in FP32."""
    if spec.base is not Precision.FP16:
        return []
    in_fp32 = {item.node for item in lowered.kept if item.precision is Precision.FP32}
    findings = [item for item in fp16_hazards(folded, typed=lowered.typed) if item.node not in in_fp32]
    if not findings:
        return []
    first, others = findings[0], f" ({len(findings)} such nodes)" if len(findings) > 1 else ""
    return [f"{first.node} ({first.op}){others}: {first.message}; {first.hint}"]


def _measure(plan: BuildPlan, folded: onnx.ModelProto) -> Safety | None:
    """Find what has to stay in FP32 by what the samples show; nothing of a model that is FP16 or BF16 already."""
    spec, request, reporter = plan.spec, plan.request, plan.request.reporter
    own = None if spec.precision.quantized or spec.base is Precision.FP32 else typed_already(to_ir(folded))
    if own is not None:
        option = f"`{spec.base}=True`"
        reporter.note(f"the model is {own.upper()} already, and its types stay as they are: {option} changes nothing")
        return None
    if plan.samples is None or spec.precision.quantized:
        return None
    given, limit = plan.built.proto, request.min_snr if plan.pruned is None else None
    safety = find_unsafe(folded, spec, plan.samples, given=given, limit_db=limit, reporter=reporter)
    if safety.missed and limit is not None and not request.best:
        fp32, advice = safety.fp32_db, "without `min_snr=` it is built unjudged"
        if fp32 is not None and fp32 >= limit:
            known = f"FP32 gives {fp32:.0f}" if math.isfinite(fp32) else "FP32 loses nothing"
            advice = f"{known}: drop `{spec.base}=True`, or ask for less as `min_snr=`"
        raise AccuracyLost(f"{safety}. Nothing was written; {advice}")
    (reporter.warn if safety.missed else reporter.note)(str(safety))
    return safety


def _construct(
    plan: BuildPlan, folded: onnx.ModelProto, unsafe: Mapping[str, str]
) -> tuple[Lowered, BuiltPlan, PrecisionReport]:
    """Build the plan; what TensorRT doesn't quantize is left out of INT8 or FP8 in a second build. PrecisionLost where less
    than half of the arithmetic runs as asked for, or what runs isn't known."""
    spec, generation, reporter = plan.spec, plan.generation, plan.request.reporter
    sizes = sizes_in(folded, opt_shapes(plan.model.inputs, spec.profiles))
    folded, apart = _in_parts(folded, spec.write_out)
    with scratch() as folder:
        lowered, engine = _planned(plan, folded, unsafe, apart, folder)
        asked_nodes, arithmetic = lowered.asked, macs(lowered.source or folded, sizes)
        report = judge(engine, lowered, spec, arithmetic, asked_nodes)
        lost = report.lost
        operators = {node.name: node.op_type for node in folded.graph.node}
        named = any(overriding(spec.overrides, node, operators.get(node, "")) is not None for node in lost)
        repairable = bool(lost) and report.share >= LEAST_SHARE and not named
        if repairable and plan.in_graph is not None and not spec.allow_precision_fallback:
            what = f"{len(lost)} of {len(asked_nodes)} quantized layers in floating point ({first_of(lost)})"
            reporter.note(f"{generation} runs {what}: building again with these in {spec.base.upper()}")
            reasons = {node: f"{generation} runs it in {other} when quantized" for node, other in lost.items()} | apart
            lowered, engine = _planned(plan, folded, unsafe, reasons, folder)
            report = judge(engine, lowered, spec, arithmetic, asked_nodes)
    for what, advice in _deviations(plan, report, named):
        if advice and not spec.allow_precision_fallback:
            raise PrecisionLost(Origins(plan.model.proto, folded).explained(f"{what}. Nothing was written; {advice}"))
        reporter.warn(what)
    quantized = spec.precision.quantized
    wanted = [item for item in report.coverage if item is spec.precision or (quantized and item.quantized)]
    share = sum(report.coverage[item] for item in wanted)
    little = share < LEAST_QUANTIZED if quantized else not share
    if report.coverage and little and spec.precision is not Precision.FP32:
        reporter.warn(_other(plan, share, report, lowered, is_quantized(folded)))
    if lowered.weights == NO_INT4:
        said = (f"{item.node}: {item.reason}" for item in lowered.kept if item.op in ("MatMul", "Gemm"))
        why = next(said, "the model multiplies with no constant matrix")
        reporter.warn(f"`int4=True` changed nothing ({why}): build it with `{spec.base}=True`")
    return lowered, engine, report


def _deviations(plan: BuildPlan, report: PrecisionReport, named: bool) -> Iterator[tuple[str, str]]:
    """Yield where the engine isn't as asked for, and what to do where that fails the build, as of a node that is `named`."""
    anyway = "take it as it is with `allow_precision_fallback=True`"
    if report.unknown:
        yield f"what the engine of {plan.generation} runs isn't known: {report.unknown}", anyway
    little = report.share < LEAST_SHARE
    if report.problem or little:
        done = f"{report.share:.0%} of the arithmetic asked for runs as asked"
        what = "; ".join(filter(None, [report.problem, done]))
        if serious := (little or named) and not plan.spec.allow_precision_fallback:
            what = f"{plan.generation} built an engine without the precision asked for: {what}"
        yield what, f"{anyway}, or keep layers out with `precision_override=`" * serious


def _other(plan: BuildPlan, share: float, report: PrecisionReport, lowered: Lowered, quantized: bool) -> str:
    """Say why hardly anything, or nothing, runs in the precision asked for, and what to ask for instead."""
    precision, base = plan.spec.precision, plan.spec.base
    what = f"no convolution or matrix product runs in {precision.upper()}"
    if share:
        what = f"{precision.upper()} does {share:.1%} of the arithmetic"
    if quantized and not precision.quantized:
        return f"{what}: the model is quantized, which `int8=True` says"
    others = " and ".join(item.upper() for item in report.coverage if item is not precision)
    rest = "the rest runs" if share else "they run"
    why = f"{rest} in {others}, because of the model's own types, which are left as they are"
    if lowered.kept:
        why = f"{lowered.kept[0].node}: {lowered.kept[0].reason}"
    other = named(str(Precision.FP16 if base is Precision.FP32 else base), True)
    return f"{what}: {why}" + f"; build it with {other}, which needs no scales and loses less" * precision.quantized


def _planned(
    plan: BuildPlan, graph: onnx.ModelProto, unsafe: Mapping[str, str], unquantized: Mapping[str, str], folder: Path
) -> tuple[Lowered, BuiltPlan]:
    """Lower the graph and build it; operators that TensorRT refuses whole are written out where ONNX has parts for them."""
    spec, generation, path = plan.spec, plan.generation, folder / "model.onnx"
    asked: Mapping[str, Precision] = {}
    if spec.timing_cache is None and "timing_cache" in generation.capabilities.options:
        cache = None if str(plan.request.timing_cache) == "none" else kept_timing(generation, generation.device(spec))
        spec = replace(spec, timing_cache=cache or folder / "timing.cache")  # a second build is then much faster
    try:
        if issues := generation.limits(graph):
            raise refusal(plan.name, issues)
        if plan.table is not None and plan.in_graph is None:
            unsafe = {**unsafe, **overflowing(to_ir(graph), plan.table.beyond_fp16)}
        lowered = lower(
            graph,
            spec,
            generation,
            plan.in_graph,
            unquantized=unquantized,
            measured=unsafe,
            coded=plan.coded,
            embedded=plan.embedded,
        )
        asked = lowered.asked
        if plan.pruned is not None:
            lowered = replace(lowered, weights=_judged(plan, plan.pruned(), lowered.proto))
        save_model(lowered.proto, path)
        engine = generation.build(
            path,
            replace(spec, profiles=plan.engine_interface()[1]),
            quantized=lowered.quantized,
            layer_precision=lowered.layer_precision,
            preferred=lowered.preferred,
            calibration=plan.native,
            calibration_batch=plan.scales.native_batch(plan.model, spec),
            calibration_cache=plan.cache,
            name=plan.name,
            reporter=plan.request.reporter,
        )
        return lowered, engine
    except (UnsupportedOperator, BackendError) as error:
        parts = None
        if isinstance(error, UnsupportedOperator):
            parts = written_out(graph, error.issues, plan.request.reporter)
            if parts is None and error.issues:
                raise explained(error, plan.model, graph) from error
        alone = _suspects(error, graph) & asked.keys() - unquantized.keys()
        if parts is None and plan.in_graph is not None and alone:
            reason = f"{generation} has no implementation of it in {spec.precision.upper()}"
            plan.request.reporter.note(f"{first_of(sorted(alone))}: {reason}; building again")
            return _planned(plan, graph, unsafe, {**unquantized, **dict.fromkeys(alone, reason)}, folder)
        if parts is None:
            unnamed = plan.in_graph is not None and isinstance(error, UnsupportedOperator)
            advice = "; a layer behind it may be why: `precision_override=['LAYER=fp16']`" if unnamed else ""
            raise type(error)(Origins(plan.model.proto, graph).explained(str(error)) + advice) from error
    return _planned(plan, parts, unsafe, {**unquantized, **_new(parts, graph)}, folder)


def _suspects(error: BackendError | UnsupportedOperator, graph: onnx.ModelProto) -> set[str]:
    """Name the nodes that TensorRT may not run quantized, by what it said."""
    said = str(error)
    if "expectedDataType" in said:  # 10.6, of convolutions that read another activation than a Relu or a Clip from 0 on
        read = [(str(node.name), node.inputs[0].producer()) for node in to_ir(graph).graph if node.op_type == "Conv"]
        clips = {name for name, maker in read if maker and maker.op_type == "Clip" and not starts_at_zero(maker)}
        return clips | {
            name for name, maker in read if maker and maker.op_type in ELEMENTWISE - {"Relu", "Add", "Clip"}
        }
    if not isinstance(error, UnsupportedOperator):
        return set()
    if REGION in said:  # 8.6 doesn't say what of it fails; its products are what was quantized
        return {node.name for node in graph.graph.node if HEAVY_OPS.get(node.op_type) == "matmul"}
    return {*re.split(r"[\s+]+", said)}


def _judged(plan: BuildPlan, pruned: Pruned, graph: onnx.ModelProto) -> str:
    """Say what is 2:4 in a graph, and what it loses against the model as given; AccuracyLost where `min_snr=` asks for more."""
    said, limit, found = str(pruned), plan.request.min_snr, -math.inf
    if pruned.snr_db is not None:
        found = pruned.snr_db(graph if plan.embedded is None else pruned.model.proto)  # pixels aren't the samples
        said += f", {decibels(found)} at the outputs on {pruned.judged} samples"
    if limit is not None and not found >= limit:
        why = f"{said}, and `min_snr=` asks for {limit:g}"
        raise AccuracyLost(f"{why}. Nothing was written; ask for less, or drop `sparsity='prune'`")
    return said


def _in_parts(graph: onnx.ModelProto, operators: Sequence[str]) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the graph with the operators that `write_out=` names in parts, and these parts, which no scale is of."""
    made = graph
    for op in operators:
        if (parts := written_out(made, [Issue("", op, "")])) is None:
            raise UsageError(f"`write_out=['{op}']`: the model has none, or ONNX doesn't define it by other operators")
        made = parts
    return made, _new(made, graph)


def _new(parts: onnx.ModelProto, graph: onnx.ModelProto) -> dict[str, str]:
    old = {node.name for node in graph.graph.node}
    return {node.name: PARTS for node in parts.graph.node if node.name not in old}


def kept_timing(generation: Generation, device: DeviceInfo | None) -> Path | None:
    """The timing cache that builds on this GPU by this TensorRT share; None where the cache folder can't be written."""
    gpu = re.sub(r"[^\w]+", "-", str(device)).strip("-")
    try:
        path = cache_folder("timing") / f"{generation.family}-{generation.version}-{gpu}.cache"
        check_writable(path)
    except OutputError:
        return None
    with contextlib.suppress(OSError):
        if path.stat().st_size > MOST_TIMINGS:
            path.unlink()  # nobody knows which of them are still of use
    return path


def opt_shapes(inputs: Sequence[TensorInfo], profiles: Sequence[Profile]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs that the first profile is tuned for."""
    ranges = profiles[0] if profiles else {}
    return {info.name: ranges[info.name].opt if info.name in ranges else info.sizes for info in inputs}
