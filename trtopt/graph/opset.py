"""Rewrite a graph for an older opset: TensorRT 8.6 reads 17, today's exporter writes 18.

onnx's own version converter has no way down from 18 for Pad, Split or the Reduce operators (it raises "No Adapter"),
and onnxscript's only goes up. What changed since 17 in operators that exporters use can be said in 17 exactly, or is
refused by name. Source: the operator changelog of ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper
from onnx.defs import OpSchema, SchemaError, get_schema

from trtopt.errors import ModelError
from trtopt.graph.proto import all_nodes, infer_shapes, node_label, opset_version

_IR = {opset: ir for ir, opset in ((7, 14), (8, 18), (9, 20), (10, 22))}


def lower_opset(proto: ModelProto, target: int) -> ModelProto:
    """The same model at opset `target` or older; a copy, unless it is that old already.

    Raises:
        ModelError: an operator, or a way of using one, doesn't exist there; every such node is listed.
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
                problems.append(f"{node_label(node)}: {reason}")
    if problems:
        raise ModelError(
            f"opset {target} can't express {len(problems)} node(s):\n  " + "\n  ".join(problems) + "\n"
            f"use the model at opset {opset_version(proto)}, with a generation that reads it"
        )
    for entry in lowered.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = target
    lowered.ir_version = min(lowered.ir_version, next((ir for opset, ir in sorted(_IR.items()) if target <= opset), 10))
    used = {name for node in all_nodes(lowered.graph) for name in node.input}
    used |= {value.name for value in lowered.graph.output}
    kept = [tensor for tensor in lowered.graph.initializer if tensor.name in used]
    del lowered.graph.initializer[:]
    lowered.graph.initializer.extend(kept)
    return lowered


class _Context:
    """What rules ask: constants by name, shapes by name, a fresh initializer."""

    def __init__(self, proto: ModelProto) -> None:
        self.proto = proto
        self.constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        for node in all_nodes(proto.graph):
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        inferred = infer_shapes(proto).graph
        self.values: dict[str, ValueInfoProto] = {
            value.name: value for value in [*inferred.input, *inferred.value_info, *inferred.output]
        }

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
    return reason or _fits(node, now, old)


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
    """18: axes."""
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
    """20: modes renamed."""
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


_RULES: dict[str, Callable[[NodeProto, _Context], str]] = {
    "Reduce": _reduce,
    "Split": _split,
    "Pad": _pad,
    "GridSample": _grid_sample,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
}
