"""What a TensorRT can't take whatever its parser says, read off the graph before the parser is asked.

Its parser answers types that it hasn't with an assertion of its own source, without the tensor's name; other uses pass it and
fail after minutes in the builder. The rules are those of TensorRT-RTX 1.7, each seen there (docs/results/zoo.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trtopt.core.values import Issue
from trtopt.graph.proto import all_nodes, dtype_name, infer_shapes, subgraphs, tensor_info, tensor_size

# Types that hold quantized numbers: TensorRT makes them by QuantizeLinear and lets nothing but DequantizeLinear compute.
_QUANTIZED_ONLY = frozenset(("float8_e4m3fn", "int4", "float4_e2m1fn"))
_MOVING = ("Concat", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape")
# A Clip's bounds become its own numbers; the parser refuses integer arithmetic itself.
_OWN_REFUSALS = (
    "Constant",
    "Clip",
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
    "MatMulInteger",
    "DynamicQuantizeLinear",
)
UNKNOWN = "undefined"  # what `dtype_name` calls a type that nobody has said
CONSTANT = 1 << 29  # bytes of all that are computed: folding leaves none in a model that means it
_OUTSIDE = "convert it outside the network, or export the model with float32, int32 or int64 there"


def issues(proto: ModelProto, types: Collection[str], absent: Mapping[str, str]) -> tuple[Issue, ...]:
    """Everything in a folded graph that can't be built.

    Args:
        types: tensor types that this TensorRT has, as NumPy and ml_dtypes name them.
        absent: operator → why it has no implementation, though the parser takes it.
    """
    inferred = infer_shapes(proto).graph
    constants, kinds, types = {tensor.name for tensor in proto.graph.initializer}, _types(inferred), {*types, UNKNOWN}
    found = [*_ends(inferred, constants, types), *_inside(proto.graph, kinds, types)]
    nodes = (node for node in all_nodes(proto.graph) if node.domain in ("", "ai.onnx"))
    found += [Issue(node.name, node.op_type, absent[node.op_type]) for node in nodes if node.op_type in absent]
    found += _quantized(proto, kinds)
    found += _constants(inferred, constants)
    return tuple(dict.fromkeys(found))


def _constants(graph: GraphProto, known: set[str]) -> Iterator[Issue]:
    """What folding left because of its size, TensorRT would compute while it builds."""
    sizes: dict[str, int] = {}
    for value in (*graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        dims = [dim.dim_value for dim in tensor.shape.dim]
        sizes[value.name] = tensor_size(TensorProto(data_type=tensor.elem_type or TensorProto.FLOAT, dims=dims))
    total = 0
    for node in graph.node:
        if node.input and known.issuperset(filter(None, node.input)):
            known.update(node.output)
            total += sum(sizes.get(name, 0) for name in node.output)
            if total > CONSTANT:
                text = f"with it, constants that are computed take {total >> 20} MiB; allowed: {CONSTANT >> 20}"
                yield Issue(node.name, node.op_type, f"{text}: make them smaller, or inputs")
                return


def _types(graph: GraphProto) -> dict[str, str]:
    types = {value.name: tensor_info(value).dtype for value in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.name: dtype_name(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        for body in subgraphs(node):
            types |= _types(body)
    return types


def _ends(graph: GraphProto, constants: Collection[str], types: Collection[str]) -> Iterator[Issue]:
    inputs = {value.name for value in graph.input} - set(constants)
    for value in graph.output:
        if value.name in inputs:
            text = "the output is an input, too, and TensorRT's have different names"
            yield Issue(value.name, "", f"{text}: leave it out, or give it a name of its own by an Identity")
    for side, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            kind = tensor_info(value).dtype
            if kind not in types and value.name not in constants:
                yield Issue(value.name, "", f"the {side} is of type {kind}, which TensorRT hasn't; {_OUTSIDE}")


def _inside(graph: GraphProto, kinds: Mapping[str, str], types: Collection[str]) -> Iterator[Issue]:
    ends = {value.name for value in (*graph.input, *graph.output)}
    constants = {tensor.name: dtype_name(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        for name in node.input:
            if name in constants and constants[name] not in types:
                text = f"reads the constant {name!r} of type {constants[name]}, which TensorRT hasn't; {_OUTSIDE}"
                yield Issue(node.name, node.op_type, text)
        for name in node.output:
            if name not in ends and (kind := kinds.get(name, UNKNOWN)) not in types:
                text = f"gives {name!r} in type {kind}, which TensorRT hasn't; {_OUTSIDE}"
                yield Issue(node.name, node.op_type, text)
        for body in subgraphs(node):
            yield from _inside(body, kinds, types)


def _quantized(proto: ModelProto, kinds: Mapping[str, str]) -> Iterator[Issue]:
    """Quantized types where TensorRT doesn't take them, and zero points that aren't constant."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    for node in all_nodes(proto.graph):
        if node.op_type == "Constant":
            constants.update(node.output)
    for node in all_nodes(proto.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = node.input[2] if len(node.input) > 2 else ""
            if zero and zero not in constants and not kinds.get(zero, "").startswith("float"):
                text = f"its zero point {zero!r} isn't constant, which TensorRT needs"
                yield Issue(node.name, node.op_type, f"{text}; quantize with constant parameters")
            continue
        if node.op_type in (*_MOVING, *_OWN_REFUSALS):
            continue
        yield from _computing(node, kinds, constants)


def _computing(node: NodeProto, kinds: Mapping[str, str], constants: Collection[str]) -> Iterator[Issue]:
    instead = "TensorRT has it for quantized values only: use QuantizeLinear and DequantizeLinear, or another type"
    for side, names in (("reads", node.input), ("gives", node.output)):
        for name in names:
            kind = kinds.get(name, "")
            if kind in _QUANTIZED_ONLY or (kind == "int8" and side == "reads" and name in constants):
                what = "the int8 constant " if kind == "int8" else ""
                yield Issue(node.name, node.op_type, f"{side} {what}{name!r} in type {kind}; {instead}")
                return
