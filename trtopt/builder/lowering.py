"""One precision plan, lowered the way a generation takes it, and compared with what its engine really runs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx
import onnx_ir as ir

from trtopt.calibration.importing import NO_SCALE, kept_out, without_scales
from trtopt.calibration.table import Table
from trtopt.core.errors import ModelError, UsageError
from trtopt.core.values import BuildSpec, Kept, Precision, check_overrides, overriding
from trtopt.core.words import first_of
from trtopt.data.embedded import Embedded
from trtopt.engine.manifest import HEAVY, lost_precision
from trtopt.graph.guard import invalid
from trtopt.graph.half import fp32_typed, has_half
from trtopt.graph.op_types import MULTIPLYING, WEIGHTED
from trtopt.graph.passes import embed
from trtopt.graph.passes.int4 import Coded, int4_weights
from trtopt.graph.passes.old_parser import as_read, readable, with_float_weights
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.passes.quantize import FORMATS, insert_qdq, is_quantized
from trtopt.graph.passes.repair import repair_weights
from trtopt.graph.passes.result import PassResult
from trtopt.graph.passes.reworded import reword, unfuse, unquantize_small
from trtopt.graph.passes.smooth import smooth
from trtopt.graph.passes.typed import keep_fp32, overflowing, raise_guards, to_typed, typed_already, typed_opset
from trtopt.graph.proto import all_nodes, dtype_name, forget_placeholders, inferred_values, whole_copy
from trtopt.graph.view import to_ir, to_proto
from trtopt.trt.capabilities import precisions
from trtopt.trt.generation import BuiltPlan, Generation
from trtopt.trt.layers import HEAVY_OPS, REGION

_TYPES = {"float32": Precision.FP32, "float16": Precision.FP16, "bfloat16": Precision.BF16}
NO_INT4 = "no matrix product with INT4 weights"
# What TensorRT 8.6 computes beside convolutions, and left to itself in FP32 in places (docs/results/zoo.md).
_MEANS = ("ReduceMean", "GlobalAveragePool")
_ELEMENTWISE = {
    "Add", "Clip", "Div", "Elu", "Erf", "HardSigmoid", "HardSwish", "Mish", "Mul", "Sigmoid", "Softplus", "Sub", "Tanh",
}  # fmt: skip


@dataclass(frozen=True)
class Lowered:
    """A graph ready for one generation, and what was decided on the way.

    Attributes:
        asked: node → the precision its layer must be found in.
        kept: nodes that stay in a higher precision, with the reason.
        quantized: the graph holds Q/DQ.
        layer_precision: node → precision, for weakly typed builds.
        preferred: node → precision to compute in where that can be built, for weakly typed builds.
        typed: the graph carries its precisions itself.
        source: the graph that it was made of.
        weights: how many are INT4 or 2:4, in words; empty: that wasn't asked for.
    """

    proto: onnx.ModelProto
    asked: Mapping[str, Precision]
    kept: tuple[Kept, ...]
    quantized: bool
    layer_precision: Mapping[str, Precision]
    preferred: Mapping[str, Precision] = field(default_factory=dict)
    typed: bool = True
    source: onnx.ModelProto | None = None
    weights: str = ""


def lower(
    folded: onnx.ModelProto,
    spec: BuildSpec,
    generation: Generation,
    table: Table | None,
    *,
    unquantized: Mapping[str, str] | None = None,
    embedded: Embedded | None = None,
    measured: Mapping[str, str] | None = None,
    coded: Mapping[str, Coded] | None = None,
) -> Lowered:
    """Write `spec` into the graph (typed generations) or into a graph and layer precisions (8.6, native calibration).

    Args:
        unquantized: nodes to leave out of INT8 or FP8, with the reason.
        embedded: preprocessing to put in front of an input.
        coded: INT4 codes that samples have chosen, by node.
        measured: nodes that samples say must stay in FP32, with the reason; those of `table` come to them.

    Raises: UsageError, CalibrationError, ModelError, where an override, the table or the model doesn't fit.
    """
    check_overrides(spec.overrides, folded.graph.node)
    typed, can, unsafe = generation.typed(spec), generation.capabilities, dict(measured or {})
    if table is not None and has_half(folded):
        folded, islands = in_fp32_types(folded)
        unsafe = {**islands, **unsafe}
    model = to_ir_at(folded, _opset(folded, spec, typed, table, embedded))
    if table is not None and spec.base is Precision.FP16:
        unsafe |= overflowing(model, table.beyond_fp16)
    passes = [readable(model, can.max_opset)]
    source = as_read(folded, passes[0])
    passes.append(reword(model, everywhere=spec.precision is Precision.INT8 and not typed))
    named = ((str(node.name), overriding(spec.overrides, str(node.name), node.op_type)) for node in model.graph)
    overrides = {name: precision for name, precision in named if precision is not None}
    left_out = {**unsafe, **(unquantized or {})}
    points = Points({}) if table is None else _quantize(model, spec, generation, table, left_out, passes)
    asked = dict.fromkeys(points.quantized, spec.precision) | overrides
    weights, pinned, preferred = "", dict[str, Precision](), dict[str, Precision]()
    if typed:
        heavy = _floating_layers(model)
        if spec.int4:
            found, weights = _int4(model, spec.base, overrides, unsafe, coded or {})
            passes.append(found)
        passes.append(to_typed(model, spec.base, io_fp32=spec.io_fp32, overrides=spec.overrides, measured=unsafe))
        if not spec.precision.quantized:
            asked = {name: spec.base for name in heavy if name in passes[-1].changes} | overrides
        if can.mixes_channels:
            passes.append(unfuse(model, can.mixes_channels, whole=table is None))
    else:
        in_fp32 = () if spec.base is Precision.FP32 else keep_fp32(model, spec.base, spec.overrides, unsafe)
        passes.append(PassResult(model, kept=in_fp32))
        if spec.base is Precision.FP16:
            passes.append(raise_guards(model))
        pinned = {item.node: Precision.FP32 for item in in_fp32}
        pinned |= {node: precision for node, precision in overrides.items() if not precision.quantized}
        if table is not None and spec.base is not Precision.FP32:
            preferred = dict.fromkeys(sorted(_light(model, asked) - pinned.keys()), spec.base)
    if not can.stored_codes:
        passes.append(with_float_weights(model))
    if can.least_scale:
        passes.append(unquantize_small(model, can.least_scale, spec.base))
        asked = {name: precision for name, precision in asked.items() if name not in passes[-1].changes}
    if embedded is not None:
        passes.append(embed.embed(model, embedded))
    proto = _written(model, spec) if any(item.changes for item in passes) else folded
    forget_placeholders(proto)
    proto = _with_outputs(proto, spec.mark_output)
    if embedded is not None and not typed and spec.base is not Precision.FP32:
        pinned |= dict.fromkeys(embed.arithmetic(proto), Precision.FP32)
    kept = [item for item in points.kept if item.node not in unsafe]  # of the others a pass says it
    kept += (item for result in passes for item in result.kept)
    return Lowered(proto, asked, tuple(kept), is_quantized(proto), pinned, preferred, typed, source, weights)


def _opset(
    folded: onnx.ModelProto, spec: BuildSpec, typed: bool, table: Table | None, embedded: Embedded | None
) -> int:
    """Return the least opset that what is written into the graph needs."""
    needed = [FORMATS[precision].opset for precision in precisions(spec) & FORMATS.keys()]
    needed.append(11 if is_quantized(folded) else 1)  # `reword` reads bounds that are inputs
    if embedded is not None:
        needed.append(embed.OPSET)
    if typed:
        needed.append(typed_opset(spec.base, table is not None or is_quantized(folded)))
    return max(needed)


def _int4(
    model: ir.Model,
    base: Precision,
    overrides: Mapping[str, Precision],
    unsafe: Mapping[str, str],
    coded: Mapping[str, Coded],
) -> tuple[PassResult, str]:
    """Write weights of matrix products as INT4 codes, but for overridden and `unsafe` nodes; say how many."""
    floating = {node: f"`precision_override=` asks for {kind}" for node, kind in overrides.items()}
    found = int4_weights(model, base, {**floating, **unsafe}, coded)
    in_fp32 = {*unsafe, *(node for node, kind in overrides.items() if kind is Precision.FP32)}  # `to_typed` says these
    total, count = len(found.changes) + len(found.kept), len(found.changes)
    said = f"{count} of {total} matrix products with INT4 weights" if count else NO_INT4
    return replace(found, kept=tuple(item for item in found.kept if item.node not in in_fp32)), said


def _written(model: ir.Model, spec: BuildSpec) -> onnx.ModelProto:
    """Return the graph as a message; ModelError where it isn't valid."""
    proto = to_proto(model)
    if problem := invalid(proto):
        why = f"the model can't be written in {spec.precision}: {problem}"
        raise ModelError(f"{why}; build it in fp32, and please report the model")
    return proto


def _with_outputs(proto: onnx.ModelProto, tensors: Collection[str]) -> onnx.ModelProto:
    """Return the graph with tensors besides its outputs, across which TensorRT can't fuse then."""
    if not tensors:
        return proto
    made, values = whole_copy(proto), inferred_values(proto)
    computed = {name for node in proto.graph.node for name in node.output} & values.keys()
    for name in tensors:
        if name not in computed:
            near = ", ".join(difflib.get_close_matches(name, computed, 3, 0))
            raise UsageError(f"`mark_output=['{name}']` is no tensor of the graph that TensorRT gets; near: {near}")
        if all(name != value.name for value in made.graph.output):
            made.graph.output.append(values[name])
    return made


def _floating_layers(model: ir.Model) -> list[str]:
    """Name the layers with products but those that read 8 bits of the model's own."""
    codes = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    integer = {reader for node in codes for reader in node.successors()}
    return [str(node.name) for node in model.graph if node.op_type in WEIGHTED and node not in integer]


def in_fp32_types(folded: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A model with FP16 or BF16 types in FP32's, which are those that scales are of; and node → why it must stay in FP32, of
    those that a model in these types computes so itself."""
    own = typed_already(to_ir(folded))
    fp32_model, islands = fp32_typed(folded)
    return fp32_model, islands if own is not None else {}


def _quantize(
    model: ir.Model,
    spec: BuildSpec,
    generation: Generation,
    table: Table,
    left_out: Mapping[str, str],
    passes: list[PassResult],
) -> Points:
    """Smooth and repair the weights and insert Q/DQ, as the table says; each step's result comes to `passes`."""
    int8, capabilities = spec.precision is Precision.INT8, generation.capabilities
    if table.smoothed and int8:
        passes.append(smooth(model, table.smoothed))
    reasons = {**dict.fromkeys(without_scales(table), NO_SCALE), **(table.left_out if int8 else {}), **left_out}
    points = find_points(
        model,
        spec.precision,
        base=spec.base,
        overrides=(*spec.overrides, *kept_out(reasons, spec.base)),
        excluded=capabilities.floating(spec.precision, spec.optimization_level),
        between=capabilities.quantized_between if int8 else None,
        gates=table.gates if int8 else (),
    )
    kept = (replace(item, reason=reasons.get(item.node, item.reason)) for item in points.kept)
    points = replace(points, kept=tuple(kept))
    if int8:
        repairs, points = repair_weights(model, points, table.repairs)
        passes.append(repairs)
    passes.append(insert_qdq(model, points, table.amax, base=spec.base if generation.typed(spec) else Precision.FP32))
    return points


def _light(model: ir.Model, asked: Collection[str]) -> set[str]:
    """Name what a weakly typed build would compute in FP32 where that saves it a conversion: layers with products that aren't
    `asked` for, elementwise nodes that lead to these or follow them with no other operator between, and means everywhere."""
    nodes = {str(node.name) for node in model.graph if node.op_type in WEIGHTED} - set(asked)
    beside = nodes | {str(node.name) for node in model.graph if node.op_type in _MEANS}
    for step in (ir.Node.predecessors, ir.Node.successors):
        pending, reached = [node for node in model.graph if node.name in nodes], set[ir.Node]()
        while pending:
            light = [node for node in step(pending.pop()) if node.op_type in _ELEMENTWISE and node not in reached]
            reached.update(light)
            pending += light
        beside.update(str(node.name) for node in reached)
    return beside


@dataclass(frozen=True)
class PrecisionReport:
    """The precision that an engine runs in against what was asked for.

    Attributes:
        lost: node → what it runs in; empty: nothing was lost.
        unknown: why what it runs isn't known; empty: it is.
        share: of the multiply-accumulates that were asked for, those that run as asked.
        problem: what to tell the user; empty: nothing.
        coverage: precision → share of all multiply-accumulates that run in it; empty where that isn't known.
        hidden: which layers hide nodes that were asked for; empty: none. It is told, and never fails a build by itself.
    """

    lost: Mapping[str, Precision]
    unknown: str
    share: float
    problem: str
    coverage: Mapping[Precision, float]
    hidden: str = ""


def judge(
    engine: BuiltPlan, lowered: Lowered, spec: BuildSpec, work: Mapping[str, int], asked_nodes: Collection[str]
) -> PrecisionReport:
    """Compare what the engine runs with what was asked for.

    Args:
        work: multiply-accumulates by node.
        asked_nodes: those that were asked for at first, before a repair left some out.
    """
    lost = lost_precision(engine.layers, lowered.asked)
    named_nodes = {node for layer in engine.layers for node in layer.nodes}
    unnamed_nodes = [node for node in lowered.asked if node not in named_nodes]
    heavy = [layer for layer in engine.layers if layer.kind in HEAVY]
    # Where the work of a node isn't known, all count the same.
    weight = work if work.keys() >= {*asked_nodes, *lowered.asked} else dict.fromkeys((*asked_nodes, *lowered.asked), 1)
    total = sum(weight[node] for node in asked_nodes)
    unknown = engine.unread if not engine.layers or unnamed_nodes else ""
    hidden = _hidden(engine, lowered, spec, named_nodes)
    count = len(lowered.asked)
    if not unknown and not hidden and engine.layers and 2 * sum(weight[node] for node in unnamed_nodes) > total:
        unknown = f"its layers name {count - len(unnamed_nodes)} of the {count} nodes asked for"
    kept_work = sum(weight[node] for node in lowered.asked if node not in lost)
    share = min(1.0, kept_work / total) if total else 1.0
    problem = ""
    if lost:
        some = first_of((f"{node} ({lowered.asked[node]} → {precision})" for node, precision in lost.items()), 5)
        problem = f"{len(lost)} of {count} layers don't run in the precision asked for: {some}"
    elif heavy and not (lowered.typed or count or hidden or any(item.precision is spec.precision for item in heavy)):
        # Weakly typed builds ask for no node by name, but all of them can't have been passed over.
        problem = f"none of its {len(heavy)} convolutions and matrix products runs in {spec.precision}"
        share = 0.0
    return PrecisionReport(lost, unknown, share, problem, _coverage(engine, lowered, work), hidden)


def _hidden(engine: BuiltPlan, lowered: Lowered, spec: BuildSpec, named_nodes: Collection[str]) -> str:
    """Name the layers that TensorRT says nothing more of, where nodes that were asked for are in them; else nothing."""
    regions = [layer.name for layer in engine.layers if REGION in layer.name]
    if not regions or spec.precision is Precision.FP32:
        return ""
    asked_nodes = lowered.asked or [node.name for node in lowered.proto.graph.node if node.op_type in HEAVY_OPS]
    count = sum(node not in named_nodes for node in asked_nodes)
    if not count:
        return ""
    return (
        f"what {count} of {len(asked_nodes)} nodes run in isn't known: TensorRT says nothing of what is in "
        f"{first_of(regions, 2)}; that alone is no reason to refuse the engine"
    )


def _coverage(engine: BuiltPlan, lowered: Lowered, work: Mapping[str, int]) -> dict[Precision, float]:
    """Shares of the work; nothing where it isn't known of more than a tenth of the nodes, or of a tenth of it where it runs.

    TensorRT cuts recurrent layers into products without their name. Those, as all else that isn't quantized, run in the types
    that a typed graph gives them.
    """
    graph = lowered.proto.graph
    nodes = {node.name: node for node in all_nodes(graph) if node.op_type in MULTIPLYING}
    found: dict[str, Precision] = {}
    if lowered.typed:
        typed_values = (*graph.value_info, *graph.output)
        types = {value.name: dtype_name(value.type.tensor_type.elem_type) for value in typed_values}
        given = {name: _TYPES.get(types.get(node.output[0], "")) for name, node in nodes.items()}
        found = {name: kind for name, kind in given.items() if kind and not lowered.asked.get(name, kind).quantized}
    naming = [layer for layer in engine.layers if layer.kind in HEAVY or not nodes.keys().isdisjoint(layer.nodes)]
    for layer in sorted(naming, key=lambda layer: layer.kind not in HEAVY)[::-1]:  # the first one's wins, of those
        found |= dict.fromkeys(layer.nodes, layer.precision) if layer.precision else {}
    known = sum(work[node] for node in found if node in work)
    if 10 * len(nodes.keys() - work.keys()) > len(nodes) or 10 * known < 9 * sum(work.values()):
        return {}
    shares = {item: sum(work.get(node, 0) for node, kind in found.items() if kind is item) for item in Precision}
    return {item: count / known for item, count in shares.items() if count}
