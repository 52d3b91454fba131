"""Nodes that do nothing, and pairs of nodes that one does.

A rule holds for any values: it takes constants as they are, and sizes only where inference knows them. Operator forms are the
model's own.
"""

from __future__ import annotations

import math
import string

import numpy as np
import onnx_ir as ir

from trtopt.graph.op_types import RESHAPING, SELECTING
from trtopt.graph.passes.result import become, set_input
from trtopt.graph.view import Editor, attribute, constant, made_by, operand, opset_of, read_once, sizes

_NEUTRAL = {"Mul": 1, "Div": 1, "Add": 0, "Sub": 0}
_HALVES, _INTEGERS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), (ir.DataType.INT32, ir.DataType.INT64)
_SHORT = 64  # numbers of a shape
_LEAST_FACTOR = 2.0**-10
_DEPTH = 8  # nodes between a shape and its reader
_Number = int | str | tuple[ir.Value, int] | None  # of a shape: itself, by its name, a value's along an axis, unknown


def tidy(model: ir.Model) -> None:
    """Rewrite every graph of a model whose shapes are inferred; what does nothing becomes an Identity."""
    editor, opset = Editor(model), opset_of(model)
    for node in list(model.graph.all_nodes()):
        if node.domain or not node.inputs or node.inputs[0] is None:
            continue
        if node.op_type in ("Reshape", "Flatten"):
            _reshape(node, editor)
        elif node.op_type == "Concat":
            _concat(node)
        elif node.op_type == "Einsum":
            _spell(node)
        elif node.op_type == "MatMul":
            _scale_once(node, editor)
        elif (before := node.inputs[0].producer()) is not None and before.op_type == node.op_type and not before.domain:
            _join(before, node, editor, opset)
        if (given := _given(node, editor)) is not None:
            become(node, "Identity", [given])


def _spell(node: ir.Node) -> None:
    """Write an Einsum in small letters: TensorRT's parser takes no capitals. Without "->" their order is the result's."""
    equation = attribute(node, "equation", "")
    letters = sorted(filter(str.isalpha, {*equation}))
    if any(map(str.isupper, letters)) and len(letters) <= len(string.ascii_lowercase):
        small = str.maketrans(dict(zip(letters, string.ascii_lowercase)))
        node.attributes["equation"] = ir.AttrString("equation", equation.translate(small))


def _scale_once(node: ir.Node, editor: Editor) -> None:
    """Give a product's left operand the constant factors of both: exporters scale attention's query and key, a kernel each.

    Only where none makes values larger, and both together are far from FP16's least number.
    """
    left, right = map(_scaled, node.inputs)
    if left is None or right is None or left[0] is right[0]:
        return
    (scaling, slot, factor), (other, place, more) = left, right
    if max(abs(factor), abs(more)) <= 1 and abs(factor * more) >= _LEAST_FACTOR:
        number = editor.constant(f"{scaling.outputs[0].name}/factor", factor * more, np.float32)
        scaling.replace_input_with(slot, number)
        node.replace_input_with(1, other.inputs[1 - place])


def _scaled(value: ir.Value | None) -> tuple[ir.Node, int, float] | None:
    """Return the Mul that gives one reader an FP32 tensor times one number, the number's slot and the number; else None."""
    node = made_by(value, "Mul")
    if node is None or value is None or value.dtype != ir.DataType.FLOAT or not read_once(value):
        return None
    slot = int(constant(node.inputs[0]) is None)
    number, form = constant(node.inputs[slot]), sizes(node.inputs[1 - slot])
    known = number is not None and number.size == 1 and number.ndim <= len(form or ())
    return (node, slot, number.item()) if number is not None and known else None


def _given(node: ir.Node, editor: Editor) -> ir.Value | None:
    """The input that a node gives as it is, or the constant that it always gives; None: it does something."""
    op, before, after = node.op_type, sizes(node.inputs[0]), sizes(node.outputs[0])
    unknown = before.count(None) if before is not None and before == after else _SHORT
    idle: object = False
    if op in _NEUTRAL:
        for slot in (0, 1) if op in ("Mul", "Add") else (1,):
            array, other = constant(node.inputs[slot]), sizes(node.inputs[1 - slot]) or ()
            if array is not None and array.ndim <= len(other) and (array == _NEUTRAL[op]).all():
                ends = zip(reversed(array.shape), reversed(other))
                idle = all(size in (1, length) for size, length in ends)  # else the result is larger
                return node.inputs[1 - slot] if idle else None
    elif op == "Where":
        return node.inputs[2] if _guards_nothing(node) else None
    elif op in ("Gather", "Slice") and after is not None and node.outputs[0].dtype == ir.DataType.INT64:
        known = [number for number in _numbers(node.outputs[0]) or [None] if isinstance(number, int)]
        if known and len(known) == math.prod(size or 0 for size in after):
            return editor.constant(f"{node.outputs[0].name}/sizes", np.reshape(known, after), np.int64)
    elif op in RESHAPING:
        idle = unknown < 2  # as many values, so that the open size is the same, too
    elif op in ("Expand", "Slice"):
        steps = constant(operand(node, 4))
        idle = unknown == 0 and (operand(node, 4) is None or (steps is not None and (steps > 0).all()))
    elif op == "Pad":
        amounts = attribute(node, "pads", constant(operand(node, 1)))  # before opset 11: an attribute
        idle = amounts is not None and not np.any(amounts)
    elif op == "Transpose":
        idle = (order := _permutation(node)) is not None and order == sorted(order)
    elif op == "Dropout":  # before opset 12; later ones are the library's
        idle = len(node.inputs) == 1 and not any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    elif op == "Split":
        idle = len(node.outputs) == 1
    return node.inputs[0] if idle else None


def _guards_nothing(node: ir.Node) -> bool:
    """Tell whether a Where takes NaN out of a Softmax that makes none, as PyTorch's exporter writes attention: it makes some of
    rows that are -inf throughout, and a finite mask leaves finite scores finite. TensorRT 10 fuses no attention with it."""
    softmax, test = made_by(node.inputs[2], "Softmax"), made_by(node.inputs[0], "IsNaN")
    if softmax is None or test is None or test.inputs[0] is not node.inputs[2]:
        return False
    masked = made_by(softmax.inputs[0], "Add")
    return masked is not None and any(map(_finite, masked.inputs))


def _finite(value: ir.Value | None, depth: int = _DEPTH) -> bool:
    """Tell whether a value is one of constants that are finite, wherever they are."""
    held, node = constant(value), None if value is None else value.producer()
    if held is not None or node is None or not depth:
        return held is not None and bool(np.isfinite(held).all())
    read = node.inputs[1:] if node.op_type == "Where" else node.inputs[:1] if node.op_type in SELECTING else ()
    return not node.domain and bool(read) and all(_finite(item, depth - 1) for item in read)


def _permutation(node: ir.Node) -> list[int] | None:
    form = sizes(node.inputs[0])
    order: list[int] | None = attribute(node, "perm", None if form is None else [*range(len(form))][::-1])
    return order


def _numbers(value: ir.Value | None, depth: int = _DEPTH) -> list[_Number] | None:
    """Return what a short list of integers holds; None: not even how many there are is known."""
    held, form = constant(value), sizes(value)
    if held is not None:
        return [*map(int, held.reshape(-1))] if held.dtype.kind == "i" and held.size <= _SHORT else None
    node = None if value is None or value.dtype not in _INTEGERS else value.producer()
    source = node.inputs[0] if node is not None and not node.domain and node.inputs and depth else None
    if node is not None and source is not None:
        if node.op_type == "Shape" and sizes(source) is not None:
            whole = _sizes(source)
            return whole[attribute(node, "start", 0) : attribute(node, "end", len(whole))]
        if node.op_type == "Concat" and form is not None and (form[0] or _SHORT) < _SHORT:
            parts = [_numbers(item, depth - 1) for item in node.inputs if sizes(item) != (0,)]
            return None if None in parts else [number for part in parts for number in part or ()]
        if node.op_type in ("Cast", "Squeeze", "Unsqueeze", "Gather", "Slice"):
            before = _numbers(source, depth - 1)
            if before is not None and node.op_type in ("Gather", "Slice"):
                before = _picked(before, node)
            if before is not None:
                return before
    return [None] if form in ((), (1,)) else None


def _sizes(value: ir.Value) -> list[_Number]:
    """Return the size of each axis; an open one goes by its name, which inference hands on, or else by the axis."""
    dims = list(enumerate(value.shape or ()))
    return [size if isinstance(size, int) else size.value or (value, axis) for axis, size in dims]


def _picked(numbers: list[_Number], node: ir.Node) -> list[_Number] | None:
    """Return what a Gather or Slice by constants takes from a list."""
    held = [item for value in node.inputs[1:] if (item := constant(value)) is not None]
    if len(held) < len(node.inputs) - 1 or not held:
        return None
    if node.op_type == "Slice":
        if any(item.shape != (1,) for item in held):
            return None
        start, end, step = (int(item[0]) for item in (held[0], held[1], held[3] if len(held) > 3 else [1]))
        return numbers[start:end:step] if step > 0 else None
    inside = (held[0] >= -len(numbers)).all() and (held[0] < len(numbers)).all()
    return [numbers[place] for place in held[0].reshape(-1)] if inside else None


def _reshape(node: ir.Node, editor: Editor) -> None:
    """Reshape by a constant, where at most one size is open, and of what wasn't reshaped before; Flatten becomes one."""
    held, after = constant(operand(node, 1)), sizes(node.outputs[0]) or ()
    target = None if held is None else held.tolist()
    if node.op_type == "Flatten" and attribute(node, "axis", 1) == 1:
        target = [-1, after[1]] if after[1:] and after[1] else [0, -1]  # the batch stays open
    elif target is None and after and after.count(None) < 2 and 0 not in after:
        target = [-1 if size is None else size for size in after]
    elif target is None and node.op_type == "Reshape" and not attribute(node, "allowzero", 0):
        asked, kept = _numbers(node.inputs[1]) or [None, None], [*_sizes(node.inputs[0]), *[None] * _SHORT]
        stays = [size is not None and size == before for size, before in zip(asked, kept)]
        target = [size if isinstance(size, int) else -int(not same) for size, same in zip(asked, stays)]
    if target is None or target.count(-1) > 1:
        return
    if held is None:
        become(node, "Reshape", [node.inputs[0], editor.constant(f"{node.outputs[0].name}/shape", target, np.int64)])
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    if before is not None and _views(before) and 0 not in target:
        node.replace_input_with(0, before.inputs[0])


def _views(node: ir.Node) -> bool:
    """Return whether it gives the same values in the same order; a Transpose does where it moves axes of size 1 only."""
    form, order = sizes(node.inputs[0]), _permutation(node) if node.op_type == "Transpose" else None
    long = [axis for axis in order or () if form is not None and form[axis] != 1]
    return not node.domain and (node.op_type in RESHAPING or (bool(order and form) and long == sorted(long)))


def _concat(node: ir.Node) -> None:
    """Write out parts that are Concats along the same axis."""
    wanted, parts = ("Concat", "", node.graph, attribute(node, "axis")), list[ir.Value]()
    for value in node.inputs:
        before = value.producer() if read_once(value) else None
        found = before and (before.op_type, before.domain, before.graph, attribute(before, "axis"))
        parts += before.inputs if before is not None and found == wanted else [value]
    if len(parts) > len(node.inputs):
        node.resize_inputs(len(parts))
        for slot, part in enumerate(parts):
            node.replace_input_with(slot, part)


def _join(before: ir.Node, node: ir.Node, editor: Editor, opset: int) -> None:
    """Two Transposes as one, two Slices of different axes, two Unsqueezes, two Casts of which the first is to FP32."""
    merged, order = list[object](), (_permutation(before), _permutation(node))
    held = [[item for value in part.inputs[1:] if (item := constant(value)) is not None] for part in (before, node)]
    known = len(held[0]) + len(held[1]) == len(before.inputs) + len(node.inputs) - 2
    first, second, after = sizes(before.inputs[0]), sizes(node.inputs[0]), sizes(node.outputs[0])
    if node.op_type == "Transpose" and order[0] and order[1]:
        node.attributes["perm"] = ir.AttrInt64s("perm", [order[0][axis] for axis in order[1]])
    elif node.op_type == "Cast" and attribute(before, "to") == ir.DataType.FLOAT and attribute(node, "to") in _HALVES:
        pass
    elif opset < 13 or not known or second is None or after is None:
        return
    elif node.op_type == "Unsqueeze":
        added = {int(axis) % len(after) for axis in held[1][0]}
        places = [axis for axis in range(len(after)) if axis not in added]
        merged = [sorted([*added, *(places[axis] for axis in held[0][0])])]
    elif node.op_type == "Slice" and first:
        full = [[*part, *[np.arange(part[0].size), np.ones(part[0].size)][len(part) - 2 :]] for part in held]
        axes = [np.asarray(part[2], np.int64) % len(first) for part in full]
        if np.isin(axes[0], axes[1]).any():
            return
        merged = [np.concatenate([part[slot] for part in full]) for slot in (0, 1)]
        merged += [np.concatenate(axes), np.concatenate([part[3] for part in full])]
    else:
        return
    node.replace_input_with(0, before.inputs[0])
    for slot, content in enumerate(merged, 1):
        set_input(node, slot, editor.constant(f"{node.outputs[0].name}/{slot}", content, np.int64))
