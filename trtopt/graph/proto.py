"""Questions asked of ONNX messages, and copies light enough for the libraries that serialize them."""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)
from onnx.defs import SchemaError, get_schema

from trtopt.core.operators import Operator, known
from trtopt.core.values import TensorInfo
from trtopt.core.words import grouped
from trtopt.graph.lazy_weights import chunks, is_lazy, read_in

UNKNOWN = "undefined"  # what `dtype_name` calls a type that nobody has said
STANDARD = ("", "ai.onnx")  # the domain of ONNX's own operators
PLUGIN_DOMAIN = "trt.plugins"  # of operators in ONNX's name that it hasn't; PyTorch-TensorRT calls plugins so
LARGE = 1 << 16  # bytes: tensors above this are kept out of the way of the checker and of shape inference
_FLOATING = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
PROPAGATED = 1 << 20  # numbers in inputs of one dimension: ONNX propagates them at some 70 bytes for each, in each node


def skeleton(proto: ModelProto, limit: int, *, external: str | None = None) -> ModelProto:
    """A copy without the content of initializers larger than `limit` bytes, so that it fits one protobuf message.

    They become network inputs (enough for the checker and for shape inference), or, with `external`, references to that
    file. Copies neither the large tensors nor, therefore, gigabytes. What it holds, it holds in memory.
    """
    copy = ModelProto()
    graph, source = copy.graph, proto.graph
    _copy(proto, copy, "graph")
    _copy(source, graph, "initializer")
    inputs = {value.name for value in source.input}
    for tensor in source.initializer:
        if tensor_size(tensor) <= limit or tensor.data_type == TensorProto.STRING:
            held = graph.initializer.add()
            held.CopyFrom(tensor)
            if is_lazy(held):
                read_in(held)
        elif external is not None:
            stub = graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            stub.data_location = TensorProto.EXTERNAL
        elif tensor.name not in inputs:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return copy


def _copy(source: Any, target: Any, but: str) -> None:
    """Copy a message's fields, all but one."""
    for descriptor, value in source.ListFields():
        if descriptor.name == but:
            continue
        if hasattr(value, "MergeFrom"):
            getattr(target, descriptor.name).MergeFrom(value)
        else:
            setattr(target, descriptor.name, value)


def put_back(light: ModelProto, proto: ModelProto) -> None:
    """Give the initializers that `skeleton` made references the content that they have in `proto`."""
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    for tensor in light.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(weights[tensor.name])
            tensor.ClearField("metadata_props")
            tensor.ClearField("doc_string")


def whole_copy(proto: ModelProto) -> ModelProto:
    """A copy with all weights, also those that are stored in files."""
    return skeleton(proto, sys.maxsize)


def in_memory(proto: ModelProto) -> ModelProto:
    """The model itself, or `whole_copy` where weights are stored in files."""
    return whole_copy(proto) if any(map(is_lazy, proto.graph.initializer)) else proto


def model_size(proto: ModelProto) -> int:
    """Bytes a model takes when written. ModelProto.ByteSize fails past 2 GB."""
    large = sum(size for tensor in proto.graph.initializer if (size := tensor_size(tensor)) > LARGE)
    return large + int(skeleton(proto, LARGE).ByteSize())


def fingerprint(proto: ModelProto) -> str:
    """Hexadecimal SHA-256 of a model's content, in memory (see `Model.fingerprint`)."""
    digest = hashlib.sha256(skeleton(proto, LARGE).SerializeToString(deterministic=True))
    for tensor in proto.graph.initializer:
        if tensor_size(tensor) > LARGE and tensor.data_type != TensorProto.STRING:
            digest.update(f"{tensor.name}\0{tensor.data_type}\0{list(tensor.dims)}\0".encode())
            for chunk in tensor_chunks(tensor):
                digest.update(chunk)
    return digest.hexdigest()


# ONNX's inference doesn't know what they give: what they read.
UNINFERRED = ("GroupNormalization", "MeanVarianceNormalization")


def infer_shapes(proto: ModelProto, *, strict: bool = False) -> ModelProto:
    """A light copy (large initializers are inputs) with inferred types and shapes in `graph.value_info`.

    An Identity, of the same type and shape, stands in it for each operator that ONNX's inference doesn't know, unless `strict`.
    """
    light = skeleton(proto, LARGE)
    for node in () if strict else all_nodes(light.graph):
        if node.op_type in UNINFERRED and node.domain in STANDARD and len(node.output) == 1:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    shapes = (value.type.tensor_type.shape.dim for value in light.graph.input)
    short = sum(dims[0].dim_value for dims in shapes if len(dims) == 1) <= PROPAGATED
    infer = functools.partial(
        onnx.shape_inference.infer_shapes,
        check_type=strict,
        strict_mode=strict,
        data_prop=short and not light.functions,
    )
    inferred = infer(light)
    for _ in custom_nodes(proto):  # each may read what another gives
        if not _declare_custom(inferred):
            break
        inferred = infer(inferred)
    return inferred


def custom_nodes(proto: ModelProto) -> list[NodeProto]:
    """Return the main graph's nodes whose operator is neither ONNX's nor a function of the model's own, unless there is a
    reference for it: a plugin of it is to compute what the function does."""
    keys = ((function.domain, function.name) for function in proto.functions)
    own = {key for key in keys if known(*key) is None}
    return [node for node in proto.graph.node if node.domain not in STANDARD and (node.domain, node.op_type) not in own]


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Return a node's attributes as a reference takes them: texts as str, tensors as arrays."""
    found: dict[str, Any] = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    for name, value in found.items():
        if isinstance(value, bytes):
            found[name] = value.decode()
        elif isinstance(value, list) and value and isinstance(value[0], bytes):
            found[name] = [item.decode() for item in value]
        elif isinstance(value, TensorProto):
            found[name] = to_array(value)
    return found


def operators_in(proto: ModelProto) -> list[Operator]:
    """Return what is known of the model's custom operators."""
    found = (known(node.domain, node.op_type) for node in custom_nodes(proto))
    return [item for item in found if item is not None]


def _declare_custom(proto: ModelProto) -> bool:
    """Declare what custom operators give, as far as is known of them; tell whether something new was."""
    graph, declared = proto.graph, False
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    held = {tensor.name: tensor for tensor in graph.initializer}
    for node in custom_nodes(proto):
        operator = known(node.domain, node.op_type)
        inputs = [_seen(values.get(name), held.get(name)) for name in node.input]
        if operator is None or not inputs:
            continue
        given = [shape for _, shape in inputs if shape is not None]
        shapes = operator.shapes_of(given, attributes_of(node)) if len(given) == len(inputs) else ()
        floating = next((kind for kind, _ in inputs if kind in _FLOATING), 0)
        for slot, name in enumerate(node.output):
            said = operator.outputs[slot] if slot < len(operator.outputs) else ""
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(said)) if said else floating
            shape = shapes[slot] if slot < len(shapes) else None
            old_kind, old_shape = _seen(values.get(name), None)
            if kind and (not old_kind or (old_shape is None and shape is not None)):
                declared = True
                info = helper.make_tensor_value_info(name, old_kind or kind, old_shape if shape is None else shape)
                if name not in values:
                    values[name] = graph.value_info.add()
                values[name].CopyFrom(info)
    return declared


def _seen(value: ValueInfoProto | None, held: TensorProto | None) -> tuple[int, tuple[int | str, ...] | None]:
    """Return a tensor's type (0: not known) and shape (None: not known)."""
    if held is not None:
        return held.data_type, tuple(held.dims)
    if value is None or not value.type.HasField("tensor_type"):
        return 0, None
    tensor = value.type.tensor_type
    sizes = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim)
    return tensor.elem_type, tuple(sizes) if tensor.HasField("shape") else None


def inferred_values(proto: ModelProto) -> dict[str, ValueInfoProto]:
    """Map every tensor, of bodies too, to its type and shape, as far as they are declared or inferred."""
    graphs = all_graphs(infer_shapes(proto).graph)
    return {value.name: value for graph in graphs for value in (*graph.input, *graph.value_info, *graph.output)}


def schema_of(op: str, opset: int, domain: str = "") -> Any:
    """ONNX's `OpSchema` of an operator; None: it has none of that name there."""
    try:
        return get_schema(op, opset, domain)
    except SchemaError:
        return None


def opset_version(proto: ModelProto) -> int:
    return next((entry.version for entry in proto.opset_import if entry.domain in STANDARD), 0)


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The bodies of If, Loop and Scan."""
    for item in node.attribute:
        if item.type == AttributeProto.GRAPH:
            yield item.g
        yield from item.graphs


def node_reads(node: NodeProto) -> list[str]:
    """The node's inputs, and what its bodies take from outside."""
    names = [name for name in node.input if name]
    for body in subgraphs(node):
        own = {item.name for item in (*body.input, *body.initializer)}
        own.update(name for inner in body.node for name in inner.output)
        inner_reads = [name for inner in body.node for name in node_reads(inner)]
        names += [name for name in (*inner_reads, *(value.name for value in body.output)) if name not in own]
    return names


def all_nodes(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Every node, those of nested bodies after the node that holds them."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def all_graphs(graph: GraphProto | FunctionProto) -> Iterator[GraphProto]:
    """The graph itself, then the bodies in it."""
    if isinstance(graph, GraphProto):
        yield graph
    for node in graph.node:
        for body in subgraphs(node):
            yield from all_graphs(body)


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """An attribute's value; `default` where the node has none of that name."""
    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


class Links:
    """Makers and readers of the tensors of a graph, bodies included.

    Attributes:
        nodes: as `all_nodes`.
        makers: tensor → the node that gives it.
        readers: tensor → the nodes that read it, as often as they do.
        constants: tensor → its content: initializers, and the tensors of Constant nodes.
    """

    def __init__(self, graph: GraphProto) -> None:
        self.nodes = list(all_nodes(graph))
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.readers = grouped((name, node) for node in self.nodes for name in node.input)
        self.constants = {tensor.name: tensor for body in all_graphs(graph) for tensor in body.initializer}
        for node in self.nodes:
            if node.op_type == "Constant" and (tensor := attribute(node, "value", None)) is not None:
                self.constants[node.output[0]] = tensor


def dtype_name(data_type: int) -> str:
    """A TensorProto data type as NumPy (or ml_dtypes) names it; "string", or "undefined"."""
    if data_type == TensorProto.STRING:
        return "string"
    try:
        return str(np.dtype(helper.tensor_dtype_to_np_dtype(data_type)).name)
    except (KeyError, TypeError, ValueError):
        return UNKNOWN


def tensor_info(value: ValueInfoProto) -> TensorInfo:
    """Name, dtype and shape of a network input or output; dtype "sequence", "optional"… where it isn't a tensor."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorInfo(value.name, (kind or "undefined").removesuffix("_type"))
    tensor = value.type.tensor_type
    sizes = list[int | str]()
    for dim in tensor.shape.dim:
        known = dim.HasField("dim_value") and dim.dim_value >= 0
        sizes.append(dim.dim_param.strip("?") or (int(dim.dim_value) if known else -1))  # see forget_placeholders
    return TensorInfo(value.name, dtype_name(tensor.elem_type), tuple(sizes))


def forget_placeholders(proto: ModelProto) -> None:
    """Take away the names that are none. Paddle writes "?" for every unknown size, and TensorRT takes all "?" as equal."""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and not dim.dim_param.strip("?"):
                dim.ClearField("dim_param")


def forget_inner_shapes(proto: ModelProto) -> None:
    """Take away what the file says of the values between its inputs and outputs, which ONNX's inference finds out; of what
    custom operators give, it can't."""
    kept = {name for node in custom_nodes(proto) for name in node.output}
    for graph in all_graphs(proto.graph):
        refill(graph.value_info, [value for value in graph.value_info if value.name in kept])


def forget_output_shapes(proto: ModelProto) -> None:
    """Take away the shapes that outputs declare, so that inference says what follows from the inputs; weights keep theirs."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.output:
        if value.type.HasField("tensor_type") and value.name not in weights:
            value.type.tensor_type.ClearField("shape")


def tensor_size(tensor: TensorProto) -> int:
    """Bytes that a tensor's content takes, packed as ONNX packs it (two 4-bit values a byte)."""
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    if dtype_name(tensor.data_type) == UNKNOWN:
        return len(tensor.raw_data)
    bits: int = ir.DataType(tensor.data_type).bitwidth
    return (int(math.prod(tensor.dims)) * bits + 7) // 8


def tensor_chunks(tensor: TensorProto) -> Iterator[bytes | memoryview]:
    """A tensor's content in ONNX's little-endian layout, wherever it is held; a chunk is gone when the next one comes."""
    if is_lazy(tensor):
        yield from chunks(tensor)
    elif tensor.HasField("raw_data"):
        yield tensor.raw_data
    else:
        yield numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data


def to_array(tensor: TensorProto) -> NDArray[Any]:
    """A tensor's content, wherever it is held."""
    if is_lazy(tensor):
        held = TensorProto()
        held.CopyFrom(tensor)
        read_in(held)
        tensor = held
    return numpy_helper.to_array(tensor)


def refill(field: Any, items: Iterable[Any]) -> None:
    """Put these in place of all that a message's repeated field holds; they may be some of that."""
    content = list(items)
    del field[:]
    field.extend(content)


def name_nodes(proto: ModelProto) -> None:
    """Give nodes without a name one that is made from what they give."""
    names = {node.name for node in all_nodes(proto.graph)}
    for node in all_nodes(proto.graph):
        if not node.name:
            node.name = unique(f"{node.op_type}_{next(iter(node.output), '')}", names)


def unique(wished: str, names: set[str]) -> str:
    """A name, or that name with a number where it is taken; from now on it is."""
    name, number = wished, 1
    while name in names:
        name, number = f"{wished}_{number}", number + 1
    names.add(name)
    return name


def all_tensors(graph: GraphProto | FunctionProto) -> Iterator[TensorProto]:
    """Initializers of the graph itself first."""
    for body in all_graphs(graph):
        yield from body.initializer
    for item in (item for node in all_nodes(graph) for item in node.attribute):
        if item.type == AttributeProto.TENSOR:
            yield item.t
        yield from item.tensors


def node_label(node: NodeProto) -> str:
    """Return how messages name a node: its name, else its first output."""
    return f"{node.op_type} {node.name}" if node.name else f"{node.op_type} → {next(iter(node.output), '?')!r}"
