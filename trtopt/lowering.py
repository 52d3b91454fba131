"""One precision plan, lowered the way a generation takes it, and compared with what its engine really runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from trtopt.calibration.importing import NO_SCALE, left_out, without_scales
from trtopt.calibration.table import Table
from trtopt.errors import PrecisionLost, UsageError
from trtopt.graph.opset import lower_opset
from trtopt.graph.placement import WEIGHTED, Points, find_points
from trtopt.graph.proto import forget_placeholders
from trtopt.graph.quantize import insert_qdq, is_quantized
from trtopt.graph.rearrange import rearrange
from trtopt.graph.typed import keep_fp32, to_typed
from trtopt.manifest import HEAVY, lost_precision
from trtopt.progress import Reporter
from trtopt.spec import BuildSpec, Kept, LayerInfo, Precision, overriding
from trtopt.trt import Generation


@dataclass(frozen=True)
class Lowered:
    """A graph ready for one generation, and what was decided on the way.

    Attributes:
        asked: node → the precision its layer must be found in.
        kept: nodes that stay in a higher precision, with the reason.
        quantized: the graph holds Q/DQ.
        layer_precision: node → precision, for weakly typed builds.
        merged: node → the one that computes it as well (`graph.rearrange`).
    """

    proto: onnx.ModelProto
    asked: Mapping[str, Precision]
    kept: tuple[Kept, ...]
    quantized: bool
    layer_precision: Mapping[str, Precision]
    merged: Mapping[str, str]


def lower(folded: onnx.ModelProto, spec: BuildSpec, generation: Generation, table: Table | None) -> Lowered:
    """Write `spec` into the graph (typed generations) or into a graph and layer precisions (8.6, native calibration).

    Raises:
        UsageError: an override matches no node.
        CalibrationError: `table` lacks a tensor that the placement needs.
        ModelError: the model can't be written in an opset that this generation reads.
    """
    for override in spec.overrides:
        if not any(override.matches(node.name, node.op_type) for node in folded.graph.node):
            raise UsageError(
                f"--precision-override {override.pattern}={override.precision} matches no node: give a node's name "
                "(shell patterns such as '*/conv1*' work) or an operator, as trtopt check --fix OUT writes them"
            )
    typed, can = generation.typed(spec), generation.capabilities
    if can.max_opset is not None:
        folded = lower_opset(folded, can.max_opset)
    named = {
        node.name: wanted
        for node in folded.graph.node
        if (wanted := overriding(spec.overrides, node.name, node.op_type)) is not None
    }
    proto, points = folded, Points({})
    merged: Mapping[str, str] = {}
    if table is not None:
        overrides = (*spec.overrides, *left_out(table, spec.base))
        points = find_points(folded, spec.precision, base=spec.base, overrides=overrides, excluded=can.float_only)
        left = set(without_scales(table))
        kept = (replace(item, reason=NO_SCALE) if item.node in left else item for item in points.kept)
        points = replace(points, kept=tuple(kept))
        base = spec.base if typed else Precision.FP32
        proto = insert_qdq(folded, points, table.amax, base=base)
        if generation.rearranges(spec):
            proto, merged = rearrange(proto, folded, fixed=named)
    layer_precision: dict[str, Precision] = {}
    if typed:
        proto, in_fp32 = to_typed(proto, spec.base, io_fp32=spec.io_fp32, overrides=spec.overrides)
    else:
        in_fp32 = () if spec.base is Precision.FP32 else keep_fp32(proto, spec.base, spec.overrides)
        layer_precision = {item.node: Precision.FP32 for item in in_fp32}
        layer_precision |= {node: wanted for node, wanted in named.items() if not wanted.quantized}
    asked = {name: spec.precision for name in points.quantized if name not in merged}
    if typed and not spec.precision.quantized:
        out = {item.node for item in in_fp32}
        heavy = (node.name for node in folded.graph.node if node.op_type in WEIGHTED)
        asked = {name: spec.base for name in heavy if name not in out}
    asked |= named
    forget_placeholders(proto)
    return Lowered(proto, asked, (*points.kept, *in_fp32), is_quantized(proto), layer_precision, merged)


def judge(
    layers: Sequence[LayerInfo], lowered: Lowered, spec: BuildSpec, generation: Generation, reporter: Reporter
) -> None:
    """Compare what the engine runs with what was asked for.

    Raises:
        PrecisionLost: it isn't there, and fallback wasn't allowed.
    """
    if not layers or spec.precision is Precision.FP32:
        return
    lost = lost_precision(layers, lowered.asked)
    heavy = [layer for layer in layers if layer.kind in HEAVY]
    # Weakly typed builds ask for no node by name, but all of them can't have been passed over.
    wanted = not lowered.asked or spec.precision in lowered.asked.values()
    if lost:
        some = ", ".join(f"{node} ({lowered.asked[node]} → {found})" for node, found in list(lost.items())[:5])
        more = ", …" if len(lost) > 5 else ""
        what = f"{len(lost)} of {len(lowered.asked)} layers don't run in the precision asked for: {some}{more}"
    elif heavy and wanted and not any(layer.precision is spec.precision for layer in heavy):
        what = f"none of its {len(heavy)} convolutions and matrix products runs in {spec.precision}"
        if lowered.kept:
            what += f" (kept: {lowered.kept[0].node}: {lowered.kept[0].reason})"
    else:
        return
    if spec.allow_precision_fallback:
        reporter.warn(what)
        return
    raise PrecisionLost(
        f"{generation} built an engine without the precision asked for: {what}. Nothing was written. "
        "Take it as it is with --allow-precision-fallback, or keep these layers out with --precision-override"
    )
