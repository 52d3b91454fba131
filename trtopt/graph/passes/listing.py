"""The nodes of a folded graph and what an INT8 build makes of each: the names that --precision-override takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.core.documents import Plain
from trtopt.core.values import Precision, TensorInfo
from trtopt.graph.op_types import QDQ
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.passes.typed import keep_fp32
from trtopt.graph.proto import tensor_info


@dataclass(frozen=True)
class ListedNode(Plain):
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


def listed(
    model: ir.Model, float_only: Mapping[str, str] | None = None, between: Mapping[str, str] | None = None
) -> tuple[ListedNode, ...]:
    """The nodes of the main graph in their order.

    Args:
        float_only, between: what the target can't run quantized, see `trt.Capabilities`.
    """
    quantized = any(node.op_type in QDQ for node in model.graph)
    points = Points({}) if quantized else find_points(model, excluded=float_only, between=between)
    precisions = {item.node: (str(item.precision), item.reason) for item in points.kept}
    precisions |= {item.node: (str(item.precision), item.reason) for item in keep_fp32(model, Precision.FP16)}
    precisions |= {name: ("int8", "reads it quantized") for readers in points.reads.values() for name, _ in readers}
    precisions |= dict.fromkeys(points.quantized, ("int8", ""))
    nodes = []
    for node in model.graph:
        precision, reason = precisions.get(str(node.name), ("fp16", ""))
        producers = (value.producer() for value in node.inputs if value is not None)
        known = bool(node.outputs) and node.outputs[0].type is not None
        info = tensor_info(ir.to_proto(node.outputs[0])) if known else TensorInfo("", "")
        dtype, shape = info.dtype, info.dims if known else ""
        if any(producer is not None and producer.op_type == "DequantizeLinear" for producer in producers):
            precision, reason = "int8", "its Q/DQ in the model say so"
        elif dtype and dtype != "float32":
            precision, reason = {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, dtype), ""
        nodes.append(ListedNode(str(node.name), node.op_type, shape, precision, reason))
    return tuple(nodes)
