"""Check that a model is ONNX: versions, names, cycles, sizes, then onnx's own checker and strict shape inference.

TensorRT's parser accepts an empty file, random bytes, opset 99 and short `pads` without a word (it then builds nothing,
or something else), so every one of them is refused here, by name.
"""

from __future__ import annotations

import graphlib
import math
import re
from collections.abc import Sequence

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from trtopt.core.errors import InvalidModel
from trtopt.graph.proto import (
    LARGE,
    STANDARD,
    Links,
    all_graphs,
    all_tensors,
    attribute,
    dtype_name,
    forget_inner_shapes,
    forget_output_shapes,
    infer_shapes,
    name_nodes,
    node_label,
    node_reads,
    refill,
    skeleton,
    subgraphs,
    tensor_size,
    to_array,
)

OLDEST = 7  # the opset since which operands broadcast as NumPy's do; TensorRT and ONNX Runtime read no older one
RANK = 32  # dimensions of a tensor: older NumPy holds no more, TensorRT 8
_TEXTS = [
    TensorProto.DESCRIPTOR.fields_by_name[name] for name in ("name", "doc_string", "external_data", "metadata_props")
]
_TEXTUAL = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
_BY_PLACES = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND")
_INTEGERS = [getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)]
# ONNX's strict inference refuses valid uses of these (seen with 1.23): STFT's declared one-sided result, and its own function
# body of MeanVarianceNormalization.
_INFERRED_WRONGLY = ("STFT", "MeanVarianceNormalization")


def validate(proto: ModelProto, what: str) -> ModelProto:
    """Refuse a model that isn't valid; sorts its nodes where they aren't.

    Args:
        proto: all weights in memory.
        what: what messages call the model, such as its path.

    Returns:
        a light copy with inferred types and shapes (large initializers are inputs there).

    Raises:
        InvalidModel: naming the node, tensor or value.
    """
    _check_opset(proto, what)
    for body in (proto.graph, *proto.functions):
        for tensor in all_tensors(body):
            _check_tensor(tensor, what)
    _check_graph(proto.graph, frozenset(), what)
    try:
        inferred = _check_onnx(skeleton(proto, LARGE), what)
    except InvalidModel as error:  # sizes that were edited leave what the file says of results behind: the nodes decide
        light = skeleton(proto, LARGE)
        _forget_what_bodies_give(light)
        try:
            inferred = _check_onnx(light, what)
        except InvalidModel:
            raise error from None
        _forget_what_bodies_give(proto)
    _check_constants(inferred, proto, what)
    return inferred


def _forget_what_bodies_give(proto: ModelProto) -> None:
    """Take away all shapes that follow from others: of values in between, and of what an If's or a Loop's graphs give."""
    forget_inner_shapes(proto)
    for body in [*all_graphs(proto.graph)][1:]:
        for value in body.output:
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")


def _check_constants(inferred: ModelProto, proto: ModelProto, what: str) -> None:
    """Constants are such as a node can compute with: ONNX's inference doesn't look, and TensorRT gives something."""
    links = Links(proto.graph)
    values = (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
    shapes |= {name: list(tensor.dims) for name, tensor in links.constants.items()}
    for node in proto.graph.node:
        held, problem = links.constants.get(node.input[1]) if len(node.input) > 1 else None, ""
        if held is None or node.domain not in STANDARD:
            continue
        if node.op_type in ("Div", "Mod") and held.data_type in _INTEGERS and not to_array(held).all():
            problem = f"divides integers by {node.input[1]}, in which there is a 0"
        elif node.op_type in _BY_PLACES and (form := shapes.get(node.input[0])) and math.prod(held.dims):
            problem = _outside(node, form, to_array(held))
        if problem:
            raise InvalidModel(f"{what}: {node_label(node)} {problem}: export it again")


def _outside(node: NodeProto, form: Sequence[int], indices: NDArray[np.integer]) -> str:
    """Say which constant place a node takes, or writes to, that isn't there; empty: none, or a size is open."""
    axis = attribute(node, "axis", 0)
    if node.op_type.endswith("ND"):
        sizes, indices = form[attribute(node, "batch_dims", 0) :], indices.reshape(-1, indices.shape[-1])
    else:
        sizes, indices = form[axis:][:1] if axis >= -len(form) else (), indices.reshape(-1, 1)
    for size, column in zip(sizes, indices.T):
        if size and not -size <= column.min() <= column.max() < size:
            far = column.min() if column.min() < -size else column.max()
            whole = node.op_type == "Gather"  # which takes whole entries along its axis
            place = f"({node.input[0]}, axis {axis})" if whole else f"in {node.input[0]}"
            return f"takes {'entry' if whole else 'place'} {far} of {size} {place}"
    return ""


def _check_opset(proto: ModelProto, what: str) -> None:
    newest = onnx.defs.onnx_opset_version()
    opset = next((entry.version for entry in proto.opset_import if entry.domain in STANDARD), OLDEST)
    if not OLDEST <= opset <= newest:
        raise InvalidModel(
            f"{what} has opset {opset}; allowed: {OLDEST} to {newest} (onnx {onnx.__version__}): export it again with another, "
            "pip install -U onnx if it is newer, or try onnx.version_converter.convert_version(model, 13) if it is older"
        )


def check_text(message: Message, what: str) -> None:
    """Refuse text that isn't UTF-8, which protobuf gives as bytes where somebody reads it.

    Raises:
        InvalidModel: some isn't.
    """
    # Of tensors not all fields: weights aren't text, and reading them takes long.
    fields = [(field, getattr(message, field.name)) for field in _TEXTS] if isinstance(message, TensorProto) else None
    for field, value in message.ListFields() if fields is None else fields:
        for item in (value,) if isinstance(value, (str, bytes, Message)) else value if field.type in _TEXTUAL else ():
            if isinstance(item, Message):
                check_text(item, what)
            elif isinstance(item, bytes) and field.type == field.TYPE_STRING:
                raise InvalidModel(f"{what} has text that isn't UTF-8 ({item[:40]!r}): export the model again")


def _check_tensor(tensor: TensorProto, what: str) -> None:
    """A weight holds what its shape and type say; onnx's checker sees neither large ones nor how much is in them."""
    dims, kind, problem = list(tensor.dims), dtype_name(tensor.data_type), ""
    needed = held = 0
    if len(dims) > RANK or any(size < 0 for size in dims):
        problem = f"has {len(dims)} dimensions ({str(dims[:8])[1:-1]}…); allowed: at most {RANK}, none negative"
    elif kind == "undefined":
        problem = f"is of type {tensor.data_type}, which ONNX hasn't"
    elif kind == "string":  # not as an array, in which all of them take as much as the longest
        needed, held = math.prod(dims), len(tensor.string_data)
    elif tensor.HasField("raw_data"):
        needed, held = tensor_size(tensor), len(tensor.raw_data)
    elif tensor.data_location != TensorProto.EXTERNAL:
        try:
            numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            problem = f"of shape {dims}, {kind}, holds something else ({error})"
    if needed != held:
        unit = "strings" if kind == "string" else "bytes"
        problem = f"of shape {dims}, {kind}, needs {needed} {unit}, {held} are there"
    if problem:
        raise InvalidModel(f"{what}: the weight {tensor.name!r} {problem}: export it again")


def _check_graph(graph: GraphProto, outer: frozenset[str], what: str) -> None:
    """Inputs defined somewhere, no cycle; then sorts the nodes, as TensorRT and ONNX Runtime do."""
    if not graph.output:
        raise InvalidModel(f"{what} has no outputs, so there is nothing to compute: export it again with output names")
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {tensor.values.name for tensor in graph.sparse_initializer}
    defined = {value.name for value in graph.input} | constants
    producer = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    known = outer | defined | producer.keys()
    needs: list[set[int]] = []
    for node in graph.node:
        reads = node_reads(node)
        for name in reads:
            if name not in known:
                raise InvalidModel(
                    f"{what}: {node_label(node)} reads the tensor {name!r}, which no node, input or initializer defines"
                )
        needs.append({producer[name] for name in reads if name in producer})
    for value in graph.output:
        if value.name not in known:
            raise InvalidModel(f"{what}: the output {value.name!r} is computed by no node")
    if any(index <= max(before, default=-1) for index, before in enumerate(needs)):
        try:
            order = list(graphlib.TopologicalSorter(dict(enumerate(needs))).static_order())
        except graphlib.CycleError as error:
            # With the data, the first node also last.
            cycle = [node_label(graph.node[index]) for index in error.args[1]]
            raise InvalidModel(f"{what} is cyclic: {' → '.join(cycle)}") from None
        refill(graph.node, [NodeProto.FromString(graph.node[index].SerializeToString()) for index in order])
    for node in graph.node:
        for body in subgraphs(node):
            _check_graph(body, frozenset(known), f"{what}: the body of {node_label(node)}")


def _check_onnx(light: ModelProto, what: str) -> ModelProto:
    """onnx's own checker and strict shape inference; gives the light model with inferred shapes."""
    for value in light.graph.input:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            raise InvalidModel(
                f"{what}: the input {value.name!r} has no shape, not even a number of dimensions, which TensorRT needs: export "
                "the model with one (sizes may be open)"
            )
    name_nodes(light)  # so that a message can say which
    weights = {tensor.name: tensor.dims for tensor in light.graph.initializer}
    try:
        for value in light.graph.output:  # the checker wants a shape, any one: TensorRT and ONNX Runtime don't
            if not value.type.tensor_type.HasField("shape") and value.type.WhichOneof("value") in (None, "tensor_type"):
                value.type.tensor_type.shape.SetInParent()
                for size in weights.get(value.name, ()):
                    value.type.tensor_type.shape.dim.add(dim_value=size)
        onnx.checker.check_model(light)
        forget_output_shapes(light)
        inferred = infer_shapes(light, strict=all(node.op_type not in _INFERRED_WRONGLY for node in light.graph.node))
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise InvalidModel(f"{what} isn't valid ONNX: {_essence(str(error))}: export it again") from error
    except MemoryError as error:
        raise InvalidModel(f"{what}: too little memory to infer its shapes: export a smaller one") from error
    return inferred


def _essence(message: str) -> str:
    """onnx's message on one line, without its C++ paths, repeated prefixes and dumps of the graph."""
    text = re.sub(r"\s+", " ", message.partition("==> Context")[0]).strip()
    text = re.sub(r"\S*/onnx/[\w/]+\.\w+:\d+:? ?(\w+: )?", "", text)
    text = re.sub(r"(\[\w+\] ?)+", "", text)
    return text[:500].strip().rstrip(".")
