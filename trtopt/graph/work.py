"""How much arithmetic each convolution and matrix product does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnx import ModelProto, NodeProto

from trtopt.graph.proto import LARGE, all_nodes, infer_shapes, skeleton

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum")


def macs(proto: ModelProto, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Multiply-accumulates of each convolution and matrix product, by node name; those of a loop's body count once.

    Args:
        sizes: of dynamic dimensions by name; others count as 1.
    """
    light = skeleton(proto, LARGE)
    for value in light.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value") or dim.dim_value < 1:
                dim.dim_value = (sizes or {}).get(dim.dim_param, 1)
    del light.graph.value_info[:]
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")  # what it declares names the dimensions that have a size now
    graph = infer_shapes(light).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            shapes[value.name] = tuple(max(1, dim.dim_value) for dim in value.type.tensor_type.shape.dim)
    return {node.name: _macs(node, shapes) for node in all_nodes(proto.graph) if node.op_type in WEIGHTED}


def _macs(node: NodeProto, shapes: Mapping[str, Sequence[int]]) -> int:
    operands = [shapes.get(name, ()) for name in node.input[:2]]
    result = math.prod(shapes.get(node.output[0], ()))
    if len(operands) < 2 or not all(operands):
        return result
    data, weight = operands
    if node.op_type == "Conv":
        return result * math.prod(weight[1:])
    if node.op_type == "ConvTranspose":
        return math.prod(data) * math.prod(weight[1:])
    if node.op_type == "Einsum":
        return _einsum(node, operands) or result
    transposed = any(item.name == "transA" and item.i for item in node.attribute)
    return result * (data[0] if transposed else data[-1])


def _einsum(node: NodeProto, operands: Sequence[Sequence[int]]) -> int:
    equation = next((item.s.decode() for item in node.attribute if item.name == "equation"), "")
    terms = equation.partition("->")[0].replace(" ", "").split(",")
    if "." in equation or len(terms) != 2:
        return 0
    return math.prod(
        {letter: size for term, shape in zip(terms, operands) for letter, size in zip(term, shape)}.values()
    )
