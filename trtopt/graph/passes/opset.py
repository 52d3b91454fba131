"""Rewrite a graph for an older opset: TensorRT 8.6 reads 17, today's exporter writes 18.

onnx's own version converter has no way down from 18 for Pad, Split or the Reduce operators (it raises "No Adapter"),
and onnxscript's only goes up. What changed since 17 in operators that exporters use can be said in 17 exactly, or is
refused by name. Source: the operator changelog of ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnx.defs import OpSchema, SchemaError, get_schema

from trtopt.core.errors import ModelError, UnsupportedOperator
from trtopt.core.values import Issue
from trtopt.graph.guard import fault
from trtopt.graph.proto import all_nodes, infer_shapes, name_nodes, node_label, opset_version, subgraphs

_BROADCASTING = 7  # the opset since which operands broadcast as NumPy's do
_INSTEAD = "use the model at opset {}, with a generation that reads it"
_IR = {opset: ir for ir, opset in ((7, 14), (8, 18), (9, 20), (10, 22))}


def lower_opset(proto: ModelProto, target: int) -> ModelProto:
    """The same model at opset `target` or older; a copy, unless it is that old already.

    Raises:
        UnsupportedOperator: an operator, or a way of using one, doesn't exist there; every such node is listed.
        ModelError: what comes out isn't valid, or computes something else.
    """
    if opset_version(proto) <= target:
        return proto
    lowered = ModelProto()
    lowered.CopyFrom(proto)
    context = _Context(lowered)
    problems = []
    for node in all_nodes(lowered.graph):
        if node.domain in ("", "ai.onnx"):
            reason = _lower(node, opset_version(proto), target, context)
            if reason:
                problems.append(Issue(node.name or node_label(node), node.op_type, reason))
    if problems:
        what = f"opset {target} can't express {len(problems)} node(s)"
        raise UnsupportedOperator(what, problems, _INSTEAD.format(opset_version(proto)))
    for entry in lowered.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = target
    lowered.ir_version = min(lowered.ir_version, next((ir for opset, ir in sorted(_IR.items()) if target <= opset), 10))
    used = {name for node in all_nodes(lowered.graph) for name in node.input}
    used |= {value.name for value in lowered.graph.output}
    kept = [tensor for tensor in lowered.graph.initializer if tensor.name in used]
    del lowered.graph.initializer[:]
    lowered.graph.initializer.extend(kept)
    if problem := fault(proto, lowered):
        raise ModelError(f"opset {target} can't express the model ({problem}); {_INSTEAD.format(opset_version(proto))}")
    return lowered


def upgraded(proto: ModelProto, minimum: int) -> ModelProto:
    """`proto` itself if its opset is at least `minimum`, else converted to it by ONNX's own converter, every node named.

    Raises:
        ModelError: the converter fails.
    """
    import onnx.version_converter

    version = opset_version(proto) or 1
    if version >= minimum:
        return proto
    try:
        converted: ModelProto = onnx.version_converter.convert_version(proto, minimum)
    except Exception as error:  # the converter's errors have no common base
        what = " ".join(str(error).split()).rpartition("failed: ")[2][:300]
        raise ModelError(f"the model of opset {version} can't be raised to {minimum}: {what}") from error
    converted.graph.name = proto.graph.name  # the converter drops it; tools show it
    if version < _BROADCASTING <= minimum:
        _widen_slopes(converted)
    name_nodes(converted)
    return converted


def _widen_slopes(proto: ModelProto) -> None:
    """One slope a channel for PRelu: before opset 7 of shape (C,), which since then stands for the last axis."""
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*proto.graph.input, *infer_shapes(proto).graph.value_info)
    }
    slopes = {node.input[1]: ranks.get(node.input[0], 0) for node in proto.graph.node if node.op_type == "PRelu"}
    for tensor in proto.graph.initializer:
        if slopes.get(tensor.name, 0) > 2 and len(tensor.dims) == 1 and tensor.dims[0] > 1:
            tensor.dims.extend([1] * (slopes[tensor.name] - 2))
            declared = next((value for value in proto.graph.input if value.name == tensor.name), None)
            if declared is not None:
                proto.graph.input.remove(declared)
                proto.ir_version = max(proto.ir_version, 4)  # since when initializers needn't be inputs


class _Context:
    """What rules ask: constants by name, shapes by name, a fresh initializer."""

    def __init__(self, proto: ModelProto) -> None:
        self.proto = proto
        self.constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        for node in all_nodes(proto.graph):
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        self.values: dict[str, ValueInfoProto] = {}
        self._read(infer_shapes(proto).graph)

    def _read(self, graph: GraphProto) -> None:
        self.values.update({value.name: value for value in (*graph.input, *graph.value_info, *graph.output)})
        for node in graph.node:
            for body in subgraphs(node):
                self._read(body)

    def kind(self, name: str) -> str:
        """A value's type as schemas write it, such as "tensor(float16)"; empty where it isn't known."""
        if name in self.constants:
            return _tensor_kind(self.constants[name].data_type)
        value = self.values.get(name)
        if value is None or value.type.WhichOneof("value") != "tensor_type":
            return ""
        return _tensor_kind(value.type.tensor_type.elem_type)

    def integers(self, name: str) -> list[int] | None:
        tensor = self.constants.get(name)
        return None if tensor is None else [int(value) for value in np.ravel(numpy_helper.to_array(tensor))]

    def shape(self, name: str) -> list[int | None] | None:
        if name in self.constants:
            return list(self.constants[name].dims)
        value = self.values.get(name)
        if value is None or not value.type.tensor_type.HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]

    def add(self, name: str, values: Sequence[int]) -> str:
        taken = {tensor.name for tensor in self.proto.graph.initializer}
        unique, number = name, 0
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        self.proto.graph.initializer.append(numpy_helper.from_array(np.asarray(values, np.int64), unique))
        return unique


def _tensor_kind(data_type: int) -> str:
    return f"tensor({TensorProto.DataType.Name(data_type).lower()})" if data_type else ""


def _lower(node: NodeProto, present: int, target: int, context: _Context) -> str:
    """Rewrite one node in place; gives the reason it can't be, or ""."""
    try:
        now = get_schema(node.op_type, present, "")
    except SchemaError:
        return "isn't a standard operator"
    if now.since_version <= target:
        return ""
    try:
        old = get_schema(node.op_type, target, "")
    except SchemaError:
        return f"came with opset {now.since_version}"
    rule = _RULES.get("Reduce" if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" else node.op_type)
    reason = rule(node, context) if rule else ""
    return reason or _fits(node, now, old) or _types_fit(node, old, context)


def _types_fit(node: NodeProto, old: OpSchema, context: _Context) -> str:
    """Why the older operator can't take the node's types, or give them; an empty string if it can."""
    allowed = {item.type_param_str: set(item.allowed_type_strs) for item in old.type_constraints}
    for side, names, formal in (("input", node.input, old.inputs), ("output", node.output, old.outputs)):
        for index, name in enumerate(names):
            kind = context.kind(name) if name and formal else ""
            wanted = formal[min(index, len(formal) - 1)].type_str if kind else ""
            if kind and kind not in allowed.get(wanted, {wanted}):
                return f"its {side} {name!r} is {kind}, which came later"
    return ""


def _fits(node: NodeProto, now: OpSchema, old: OpSchema) -> str:
    """Drop attributes the older operator lacks where they only repeat the default; refuse what it can't take."""
    for attribute in list(node.attribute):
        if attribute.name not in old.attributes:
            default = now.attributes[attribute.name].default_value
            value = helper.get_attribute_value(attribute)
            neutral = attribute.name == "dilations" and set(value) == {1}  # its default isn't in the schema
            if not neutral and (not default.type or helper.get_attribute_value(default) != value):
                return f"the attribute {attribute.name} came with opset {now.since_version}"
            node.attribute.remove(attribute)
    if len(node.input) > old.max_input:
        return f"has {len(node.input)} inputs, opset {old.since_version} takes {old.max_input}"
    return ""


def _take(node: NodeProto, name: str, default: int) -> int:
    """The value of an integer attribute, which is removed."""
    for attribute in list(node.attribute):
        if attribute.name == name:
            node.attribute.remove(attribute)
            return int(attribute.i)
    return default


def _text(node: NodeProto, name: str) -> str:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), "")


def _reduce(node: NodeProto, context: _Context) -> str:
    """18: axes became an input."""
    axes = context.integers(node.input[1]) if len(node.input) > 1 and node.input[1] else []
    if axes is None:
        return "its axes aren't constant"
    empty_is_noop = _take(node, "noop_with_empty_axes", 0)
    if not axes and empty_is_noop:
        return "reduces no axis"
    del node.input[1:]
    if axes:
        node.attribute.append(helper.make_attribute("axes", axes))
    return ""


def _split(node: NodeProto, context: _Context) -> str:
    """18: num_outputs, which also allows a smaller last part."""
    parts = _take(node, "num_outputs", 0)
    if not parts or (len(node.input) > 1 and node.input[1]):
        return ""
    axis = next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)
    shape = context.shape(node.input[0])
    size = shape[axis] if shape else None
    if size is None:
        return f"splits a dynamic dimension into {parts}"
    part = -(-size // parts)
    del node.input[1:]
    node.input.append(context.add(f"{node.output[0]}_split", [part] * (parts - 1) + [size - part * (parts - 1)]))
    return ""


def _pad(node: NodeProto, context: _Context) -> str:
    """18: axes; 19: the mode "wrap"."""
    if _text(node, "mode") == "wrap":
        return 'its mode "wrap" came with opset 19'
    if len(node.input) < 4 or not node.input[3]:
        return ""
    pads, axes, shape = context.integers(node.input[1]), context.integers(node.input[3]), context.shape(node.input[0])
    if pads is None or axes is None or shape is None:
        return "its pads or axes aren't constant"
    rank = len(shape)
    full = [0] * (2 * rank)
    for index, axis in enumerate(axes):
        full[axis % rank], full[axis % rank + rank] = pads[index], pads[index + len(axes)]
    del node.input[3:]
    node.input[1] = context.add(f"{node.output[0]}_pads", full)
    while not node.input[-1]:
        del node.input[-1]
    return ""


def _grid_sample(node: NodeProto, context: _Context) -> str:
    """20: modes renamed, volumes."""
    if (shape := context.shape(node.input[0])) is None or len(shape) != 4:
        return "samples other than images of 4 dimensions, which came with opset 20"
    for attribute in node.attribute:
        if attribute.name == "mode":
            attribute.s = {b"linear": b"bilinear", b"cubic": b"bicubic"}.get(attribute.s, attribute.s)
    return ""


def _scatter(node: NodeProto, context: _Context) -> str:
    """18: reductions min and max."""
    for attribute in node.attribute:
        if attribute.name == "reduction" and attribute.s in (b"min", b"max"):
            return f"the reduction {attribute.s.decode()} came with opset 18"
    return ""


def _resize(node: NodeProto, context: _Context) -> str:
    """19: half_pixel_symmetric."""
    mode = _text(node, "coordinate_transformation_mode")
    return f"its coordinate mode {mode} came with opset 19" if mode == "half_pixel_symmetric" else ""


def _pool(node: NodeProto, context: _Context) -> str:
    """19 (AveragePool), 22 (MaxPool): with ceil_mode, a window that would start behind the data is left out."""
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if not values.get("ceil_mode"):
        return ""
    kernel, shape = values["kernel_shape"], context.shape(node.input[0])
    rank = len(kernel)
    strides, dilations = values.get("strides", [1] * rank), values.get("dilations", [1] * rank)
    pads = values.get("pads", [0] * 2 * rank)
    for axis, size in enumerate(shape[2:] if shape else [None] * rank):
        if size is None:
            return (
                "rounds the size of its result up, which meant something else before, and its input's size is dynamic"
            )
        covered = size + pads[axis] + pads[axis + rank] - (dilations[axis] * (kernel[axis] - 1) + 1)
        last = -(-covered // strides[axis]) * strides[axis]
        if last >= size + pads[axis]:
            return "its last window would start behind the data, which counted before"
    return ""


_RULES: dict[str, Callable[[NodeProto, _Context], str]] = {
    "Reduce": _reduce,
    "Split": _split,
    "Pad": _pad,
    "GridSample": _grid_sample,
    "Resize": _resize,
    "AveragePool": _pool,
    "MaxPool": _pool,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
}
