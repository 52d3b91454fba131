"""The nodes of a folded graph and what an INT8 build makes of each: the names that --precision-override takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onnx import ModelProto

from trtopt.core.values import Precision
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.passes.quantize import is_quantized
from trtopt.graph.passes.typed import keep_fp32
from trtopt.graph.proto import infer_shapes, tensor_info


@dataclass(frozen=True)
class ListedNode:
    """A node of the folded graph.

    Attributes:
        shape: of its first result, for people; empty: not known.
        precision: what `build --int8` asks for: "int8", "fp16", "fp32", or the type of a result that isn't floating.
        reason: why not INT8, where it could have been asked for, or why not FP16.
    """

    name: str
    op: str
    shape: str
    precision: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def listed(proto: ModelProto, float_only: Mapping[str, str] | None = None, grouped: str = "") -> tuple[ListedNode, ...]:
    """The nodes of the main graph in their order.

    Args:
        float_only, grouped: what the target can't run quantized, see `trt.Capabilities`.
    """
    inferred = infer_shapes(proto).graph
    values = {item.name: tensor_info(item) for item in [*inferred.value_info, *inferred.output]}
    points = Points({}) if is_quantized(proto) else find_points(proto, excluded=float_only, grouped=grouped)
    said = {item.node: (str(item.precision), item.reason) for item in points.kept}
    said |= {item.node: (str(item.precision), item.reason) for item in keep_fp32(proto, Precision.FP16)}
    said |= {name: ("int8", "reads it quantized") for readers in points.reads.values() for name, _ in readers}
    said |= dict.fromkeys(points.quantized, ("int8", ""))
    codes = {name for node in proto.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    found = []
    for node in proto.graph.node:
        info = values.get(node.output[0]) if node.output else None
        precision, reason = said.get(node.name, ("fp16", ""))
        if codes.intersection(node.input):
            precision, reason = "int8", "its Q/DQ in the model say so"
        elif info is not None and info.dtype and info.dtype != "float32":
            precision, reason = {"float16": "fp16", "bfloat16": "bf16"}.get(info.dtype, info.dtype), ""
        found.append(ListedNode(node.name, node.op_type, info.dims if info is not None else "", precision, reason))
    return tuple(found)
