"""Models that hold FP16 or BF16, written in FP32: with the rounding of their types, or without."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trtopt.graph.proto import all_tensors, forget_inner_shapes, inferred_values, refill, subgraphs, to_array

EXACT = "/exact"  # behind the name of a tensor in a widened model: before it is rounded to its half type
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_NARROW = {TensorProto.FLOAT, *_HALVES}


def has_half(proto: ModelProto) -> bool:
    """Return whether anything in it is FP16 or BF16."""
    kinds = {tensor.data_type for tensor in proto.graph.initializer}
    kinds.update(value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output))
    return not kinds.isdisjoint(_HALVES) or any(_cast_to(node) in _HALVES for node in proto.graph.node)


def _cast_to(node: onnx.NodeProto) -> int | None:
    return next((item.i for item in node.attribute if item.name == "to"), None) if node.op_type == "Cast" else None


def widen(proto: ModelProto) -> ModelProto:
    """The same arithmetic in FP32: every FP16 or BF16 tensor is held in FP32, rounded to its type where it is made.

    As Tensor Cores do: products and sums in FP32, results rounded. Gives a new model, inputs and outputs FP32, and what is read
    of an input rounded to its type; the model itself where it has no FP16 and BF16, or control flow.
    """
    if (started := _in_fp32(proto)) is None:
        return proto
    widened, types = started
    graph = widened.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if types[value.name] in _HALVES and value.name not in weights]
    held, nodes = {name: f"{name}/held" for name in inputs}, list[onnx.NodeProto]()
    for name, short in held.items():
        nodes += _rounding(name, short, types[name])
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for given, node in zip(proto.graph.node, graph.node):
        source = next((types[name] for name in node.input if types.get(name) in _HALVES), None)
        cast = _cast_to(given)
        node.input[:] = [held.get(name, name) for name in node.input]
        nodes.append(node)
        for index, name in enumerate(node.output):
            target = cast or types.get(name, source)  # without an inferred type: what goes in comes out
            if name and target in _HALVES:
                types[name] = target
                node.output[index] = f"{name}{EXACT}"
                nodes += _rounding(node.output[index], name, target)
    refill(graph.node, nodes)
    return widened


def _rounding(name: str, rounded: str, target: int) -> list[onnx.NodeProto]:
    """To a half type, and back to FP32."""
    short = f"{rounded}/rounded"
    return [
        helper.make_node("Cast", [name], [short], to=target),
        helper.make_node("Cast", [short], [rounded], to=TensorProto.FLOAT),
    ]


def fp32_typed(proto: ModelProto) -> tuple[ModelProto, dict[str, str]]:
    """A model that is FP16 or BF16 as one that computes in FP32, and its nodes that were FP32 already, each with that reason.

    Its inputs and outputs keep their types, with casts inside. A model without half types, or with control flow, whose types
    can't be followed here, is given back as it is.
    """
    if (started := _in_fp32(proto)) is None:
        return proto, {}
    typed, types = started
    graph = typed.graph
    renamed = {value.name: f"{value.name}/fp32" for value in graph.input if types[value.name] in _HALVES}
    ends = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    nodes: list[onnx.NodeProto] = [
        helper.make_node("Cast", [name], [wide], f"{wide}/Cast", to=TensorProto.FLOAT) for name, wide in renamed.items()
    ]
    islands: dict[str, str] = {}
    for given, node in zip(proto.graph.node, graph.node):
        cast, kinds = _cast_to(given), {types.get(name) for name in node.input}
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if cast in _NARROW and kinds <= _NARROW and node.output[0] not in ends:  # it casts nothing any more
            renamed[node.output[0]] = node.input[0]
            continue
        if cast is None and any(types.get(name) == TensorProto.FLOAT for name in node.output):
            islands[node.name] = "FP32 in the model, whose other types are FP16 or BF16"
        nodes.append(node)
        for index, name in enumerate(node.output):
            if ends.get(name) in _HALVES:
                renamed[name] = node.output[index] = f"{name}/fp32"
    nodes += [
        helper.make_node("Cast", [renamed[name]], [name], f"{name}/Cast", to=kind)
        for name, kind in ends.items()
        if kind in _HALVES and name in renamed
    ]
    refill(graph.node, nodes)
    return typed, islands


def _in_fp32(proto: ModelProto) -> tuple[ModelProto, dict[str, int]] | None:
    """A copy whose constants and casts of a half type are FP32, and each tensor's type before, as far as inference knows it.

    None: it has no half types, or control flow.
    """
    if not has_half(proto) or any(any(subgraphs(node)) for node in proto.graph.node):
        return None
    types = {name: value.type.tensor_type.elem_type for name, value in inferred_values(proto).items()}
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    copy = ModelProto()
    copy.CopyFrom(proto)
    for tensor in all_tensors(copy.graph):
        if tensor.data_type in _HALVES:
            tensor.CopyFrom(numpy_helper.from_array(to_array(tensor).astype(np.float32), tensor.name))
    for item in (item for node in copy.graph.node for item in node.attribute):
        if item.name in ("to", "dtype", "output_dtype") and item.i in _HALVES:
            item.i = TensorProto.FLOAT
    forget_inner_shapes(copy)
    for value in copy.graph.value_info:
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    return copy, types
