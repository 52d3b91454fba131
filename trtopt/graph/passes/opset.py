"""A graph at another opset: newer where a pass writes operators that need it, older where a parser reads no newer one.

Up goes ONNX's own converter. Down it doesn't go from 18 for Pad, Split or the Reduce operators, which today's exporter writes
and TensorRT 8.6, at 17, doesn't read. What changed since 17 in operators that exporters use can be said in 17 exactly, or is
refused by name. Source: the operator changelog of ONNX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from trtopt.core.errors import ModelError
from trtopt.graph.guard import guarded
from trtopt.graph.passes.result import PassResult, Refused, rewrite_nodes, set_input
from trtopt.graph.proto import LARGE, STANDARD, all_nodes, name_nodes, opset_version, put_back, schema_of, skeleton
from trtopt.graph.view import Editor, Slots, attribute, constant, operand, opset_of, sizes, slots, to_ir, to_proto

_CHANNEL_SCALES = 21  # the opset since which GroupNormalization scales channels, and no longer groups
_INSTEAD = "use the model at opset {}, with a generation that reads it"
_IR = {14: 7, 18: 8, 20: 9, 22: 10}  # the newest opset → the IR version that it came with


def lower_opset(model: ir.Model, target: int, instead: str = "") -> PassResult:
    """Rewrite a graph for opset `target`, unless it is that old already; `instead` is what to do where that can't be.

    Raises:
        UnsupportedOperator: an operator, or a way of using one, doesn't exist there; every such node is listed.
    """
    present = opset_of(model)
    if present <= target:
        return PassResult(model)
    rule, instead = functools.partial(_lower, present, target), instead or _INSTEAD.format(present)
    changes = rewrite_nodes(model, rule, f"opset {target} can't express", instead)
    for domain in STANDARD:
        if domain in model.opset_imports:
            model.opset_imports[domain] = target
    model.ir_version = min(model.ir_version, next((version for opset, version in _IR.items() if target <= opset), 10))
    return PassResult(model, changes)


def at_opset(proto: ModelProto, target: int, instead: str = "") -> ModelProto:
    """The same model at opset `target` or older: `lower_opset`, compared with what it was.

    Args:
        instead: what to do where that can't be; by default, to use the model as it is.

    Raises:
        UnsupportedOperator: see `lower_opset`.
        ModelError: what comes out isn't valid, or computes something else.
    """
    if opset_version(proto) <= target:
        return proto
    what, instead = f"opset {target} can't express the model", instead or _INSTEAD.format(opset_version(proto))
    result = lower_opset(to_ir(proto), target, instead)
    if not result.changes:  # it has no operator of ONNX's own, and the number alone is another
        return to_proto(result.model)
    return guarded(proto, result, what, instead)


def to_ir_at(proto: ModelProto, minimum: int) -> ir.Model:
    """`to_ir` of a model, at opset `minimum` or newer, every node named where it was raised.

    Raises:
        ModelError: the converter fails, or see `to_ir`.
    """
    version = opset_version(proto)
    if not 0 < version < minimum:  # 0: nothing in it is of ONNX's own operators
        return to_ir(proto)
    try:
        return to_ir(_upgraded(proto, minimum))
    except Exception as error:  # the converter's errors have no common base
        what = " ".join(str(error).split()).rpartition("failed: ")[2][:300]
        raise ModelError(f"the model of opset {version} can't be raised to {minimum}: {what}") from error


def _upgraded(proto: ModelProto, target: int) -> ModelProto:
    """Write a model at a newer opset by ONNX's own converter, without large weights: it takes what one message holds."""
    import onnx.version_converter

    light = skeleton(proto, LARGE, external="weights")
    for node in all_nodes(light.graph):
        if node.op_type == "GroupNormalization" and opset_version(proto) < _CHANNEL_SCALES <= target:
            raise ModelError(f"{node.name} scales groups, not channels: export it at opset {_CHANNEL_SCALES} or newer")
        # The converter leaves the value of a Pad that doesn't use it, which later ones haven't.
        held = {item.name: item for item in node.attribute}
        if node.op_type == "Pad" and "value" in held and "mode" in held and held["mode"].s != b"constant":
            node.attribute.remove(held["value"])
    converted: ModelProto = onnx.version_converter.convert_version(light, target)
    put_back(converted, proto)
    converted.graph.name = proto.graph.name  # the converter drops it; tools show it
    name_nodes(converted)
    return converted


def _lower(present: int, target: int, node: ir.Node, editor: Editor) -> bool:
    """Rewrite one node in place."""
    if node.domain not in STANDARD:
        return False
    now, old = schema_of(node.op_type, present), schema_of(node.op_type, target)
    if now is not None and now.since_version > target:
        if old is None:
            raise Refused(f"came with opset {now.since_version}")
        name, newer, since = _NEWER.get(node.op_type, ("", (), 0))
        if target < since and (value := attribute(node, name)) in newer:
            raise Refused(f'its {name} "{value}" came with opset {since}')
        reduces = node.op_type.startswith("Reduce") and node.op_type != "ReduceSum"
        since, rule = _RULES.get("Reduce" if reduces else node.op_type, (0, None))
        if rule is not None and target < since:
            rule(node, editor)
        _fit(node, now, old)
        _fit_types(node, slots(node, target))
    return True


def _fit(node: ir.Node, now: Any, old: Any) -> None:
    """Drop attributes the older operator lacks where they only repeat the default; refuse what it can't take."""
    for name in [name for name in node.attributes if name not in old.attributes]:
        default, value = now.attributes[name].default_value, attribute(node, name)
        neutral = name == "dilations" and set(value) == {1}  # its default isn't in the schema
        if not neutral and (not default.type or ir.serde.deserialize_attribute(default).value != value):
            raise Refused(f"the attribute {name} came with opset {now.since_version}")
        node.attributes.pop(name)
    if len(node.inputs) > old.max_input:
        raise Refused(f"has {len(node.inputs)} inputs, opset {old.since_version} takes {old.max_input}")


def _fit_types(node: ir.Node, old: Slots | None) -> None:
    """Refuse types that the older operator can't take or give."""
    assert old is not None
    for side, values, kinds in (("input", node.inputs, old.inputs), ("output", node.outputs, old.outputs)):
        for value, kind in zip(values, kinds):
            if value is not None and isinstance(value.type, ir.TensorType) and not old.takes(kind, value.type.dtype):
                dtype = value.type.dtype.name.lower()
                raise Refused(f"its {side} {value.name!r} is tensor({dtype}), which came later")


def _reduce(node: ir.Node, editor: Editor) -> None:
    """Axes became an input."""
    axes = constant(operand(node, 1))
    if axes is None and operand(node, 1) is not None:
        raise Refused("its axes aren't constant")
    named = axes is not None and axes.size
    if attribute(node, "noop_with_empty_axes", 0) and not named:
        raise Refused("reduces no axis")
    node.attributes.pop("noop_with_empty_axes", None)
    node.resize_inputs(1)
    if axes is not None and named:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.ravel().tolist())


def split_by_lengths(node: ir.Node, editor: Editor) -> None:
    """Give a Split lengths in place of `num_outputs`, which allows a smaller last part; Refused: its size is open."""
    parts = attribute(node, "num_outputs", 0)
    node.attributes.pop("num_outputs", None)
    if not parts or operand(node, 1) is not None:
        return
    shape = sizes(node.inputs[0])
    size = shape[attribute(node, "axis", 0)] if shape else None
    if size is None:
        raise Refused(f"splits a dynamic dimension into {len(node.outputs)}")
    part = -(-size // parts)
    lengths = [part] * (parts - 1) + [size - part * (parts - 1)]
    set_input(node, 1, editor.constant(f"{node.name or node.outputs[0].name}_split", lengths, np.int64))


def _grid_sample(node: ir.Node, editor: Editor) -> None:
    """Modes renamed, volumes."""
    if (shape := sizes(node.inputs[0])) is None or len(shape) != 4:
        raise Refused("samples other than images of 4 dimensions, which came with opset 20")
    older = {"linear": "bilinear", "cubic": "bicubic"}.get(attribute(node, "mode", ""))
    if older:
        node.attributes["mode"] = ir.AttrString("mode", older)


def _pool(node: ir.Node, editor: Editor) -> None:
    """Windows that would start behind the data are left out with ceil_mode since, and counted before."""
    if attribute(node, "ceil_mode", 0):
        raise Refused("rounds the size of its result up (ceil_mode), which meant something else before")


# Operator → the opset that changed it, and how to say the same before.
_RULES: dict[str, tuple[int, Callable[[ir.Node, Editor], None]]] = {
    "Reduce": (18, _reduce),
    "Split": (18, split_by_lengths),
    "GridSample": (20, _grid_sample),
    "AveragePool": (19, _pool),
    "MaxPool": (22, _pool),
}
# Values of attributes that came later: operator → the attribute, the values, and since which opset.
_NEWER = {
    "Pad": ("mode", ("wrap",), 19),
    "Resize": ("coordinate_transformation_mode", ("half_pixel_symmetric",), 19),
    "ScatterElements": ("reduction", ("min", "max"), 18),
    "ScatterND": ("reduction", ("min", "max"), 18),
}
