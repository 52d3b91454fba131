"""Count the arithmetic of each convolution, matrix product and recurrent layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto

from trtopt.graph.op_types import MULTIPLYING, RECURRENT
from trtopt.graph.proto import LARGE, all_graphs, all_nodes, attribute, forget_output_shapes, inferred_values, skeleton

GUESSES = (224, 64, 16)  # of open sizes that aren't the batch, as sizes of images or lengths that most models take


def macs(proto: ModelProto, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Multiply-accumulates of each convolution, matrix product and recurrent layer, by node name; of a loop's body once.

    Nodes whose shapes ONNX's inference doesn't find are left out.

    Args:
        sizes: of dynamic dimensions by name; others count as 1.
    """
    shapes = shapes_at(proto, sizes or {}, 1)
    counts = {node.name: node_macs(node, shapes) for node in all_nodes(proto.graph) if node.op_type in MULTIPLYING}
    return {name: count for name, count in counts.items() if count}


def sizes_in(proto: ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Sizes of dynamic dimensions, by name, where the inputs have these shapes; at least 2, to count work at.

    What comes of 1 and a size that ONNX's inference doesn't find isn't found either; of any other size it is that one.
    """
    dims = {value.name: value.type.tensor_type.shape.dim for value in proto.graph.input}
    return {
        dim.dim_param: max(2, size)
        for name, shape in shapes.items()
        for dim, size in zip(dims.get(name, ()), shape)
        if dim.dim_param
    }


def shapes_at(proto: ModelProto, sizes: Mapping[Any, int], other: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of numbers, of bodies too, that are known when each dynamic dimension has a size.

    Args:
        sizes: of dynamic dimensions by name, or by input and axis.
        other: of those without one.
    """
    light = skeleton(proto, LARGE)
    for value in light.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") or dim.dim_value < 0:
                dim.dim_value = sizes.get((value.name, axis), sizes.get(dim.dim_param, other))
    del light.graph.value_info[:]
    forget_output_shapes(light)  # they name the dimensions that have a size now
    weights = (item for graph in all_graphs(proto.graph) for item in graph.initializer)
    shapes = {item.name: tuple(item.dims) for item in weights if item.data_type != TensorProto.STRING}
    for name, value in inferred_values(light).items():
        tensor = value.type.tensor_type
        fixed = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
        if fixed and tensor.elem_type not in (TensorProto.UNDEFINED, TensorProto.STRING):
            shapes[name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    return shapes


def node_macs(node: NodeProto, shapes: Mapping[str, Sequence[int]]) -> int:
    """Multiply-accumulates of one node; 0 where a shape isn't known."""
    operands = [shapes.get(name) for name in node.input[:2]]
    result = shapes.get(node.output[0])
    if node.op_type == "Einsum" and all(operands):
        return _einsum(node, [operand or () for operand in operands])
    data, weight = (*operands, None, None)[:2]
    if not data or not weight:
        return 0
    if node.op_type == "ConvTranspose":
        return math.prod(data) * math.prod(weight[1:])
    if node.op_type in RECURRENT:
        hidden = shapes.get(node.input[2])
        return math.prod(data[:2]) * (math.prod(weight) + math.prod(hidden)) if hidden else 0
    if result is None:
        return 0
    if node.op_type == "Conv":
        return math.prod(result) * math.prod(weight[1:])
    return math.prod(result) * (data[0] if attribute(node, "transA", 0) else data[-1])


def _einsum(node: NodeProto, operands: Sequence[Sequence[int]]) -> int:
    equation = attribute(node, "equation", b"").decode()
    terms = equation.partition("->")[0].replace(" ", "").split(",")
    if "." in equation or len(terms) != 2:
        return 0
    sizes = {letter: size for term, shape in zip(terms, operands) for letter, size in zip(term, shape)}
    return math.prod(sizes.values())
