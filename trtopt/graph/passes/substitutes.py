"""Operators that no TensorRT has, in standard ones that compute the same: before anything is folded or calibrated.

**Integers compared by ≤ or ≥** are not greater, or not less: TensorRT-RTX 1.7.1's builder ends the process (a segmentation
fault) at a decoder's step that puts keys and values where `places == position` and attends where `places <= position`.

**A Loop without a condition** gets one that is true: TensorRT-RTX 1.7.1's parser doesn't know it otherwise.

**A sum by scatter** (the messages of a graph network) is a product with a matrix that says which entry goes where. It takes
room for all pairs of entries and places, so that it is written only where a TensorRT refuses the scatter itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from trtopt.graph.passes.result import Line, PassResult
from trtopt.graph.view import Editor, attribute, opset_of, sizes

_FLOAT = ir.DataType.FLOAT


def substitute(model: ir.Model) -> None:
    """Write what can be written otherwise, in every graph whose shapes are inferred; what can't stays."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type in _RULES and not node.domain]
    if not nodes:
        return
    editor = Editor(model)
    for node in nodes:
        line = Line(editor, node)
        if (result := _RULES[node.op_type](line, node)) is not None:
            (old,) = node.outputs
            result.type, result.shape = old.type or result.type, old.shape or result.shape
            ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, [old], [result])


def sum_by_products(model: ir.Model) -> PassResult:
    """Scatters that add, as products; what goes along other axes than one stays as it is."""
    editor, changes = Editor(model), dict[str, str]()
    for node in list(model.graph.all_nodes()):
        if node.domain or attribute(node, "reduction", "none") != "add" or opset_of(model) < 13:
            continue
        line = Line(editor, node)
        rule = {"ScatterND": _scattered_rows, "ScatterElements": _scattered_elements}.get(node.op_type)
        if rule is not None and (result := rule(line, node)) is not None:
            ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, node.outputs, [result])
            changes[str(node.name)] = str(line.nodes[-1].name)
    return PassResult(model, changes)


def _or_equal(line: Line, node: ir.Node) -> ir.Value | None:
    """Compare integers without "or equal"; of floats NaN is neither: they stay."""
    if not all(value is not None and value.dtype is not None and value.dtype.is_integer() for value in node.inputs):
        return None
    return line("Not", line("Greater" if node.op_type == "LessOrEqual" else "Less", *node.inputs))


def _loop(line: Line, node: ir.Node) -> ir.Value | None:
    if len(node.inputs) > 1 and node.inputs[1] is None:
        node.replace_input_with(1, line.number(True, np.bool_))
    return None


def _scattered_rows(line: Line, node: ir.Node) -> ir.Value | None:
    """ScatterND along the first axis."""
    data, indices, updates = node.inputs
    form, places = sizes(data), sizes(indices)
    if form is None or places is None or places[-1] != 1:
        return None
    rows = line("Reshape", indices, line.number([-1], np.int64))
    return line("Add", data, _summed(line, data, rows, updates))


def _scattered_elements(line: Line, node: ir.Node) -> ir.Value | None:
    """ScatterElements whose places are the same along all axes but its own, as `index.expand_as(source)` makes them."""
    data, indices, updates = node.inputs
    form, axis = sizes(data), attribute(node, "axis", 0)
    if form is None or data.shape is None or updates.shape is None:
        return None
    axis %= len(form)
    source = indices
    if len(form) > 1:
        made = indices.producer()
        if made is None or made.op_type != "Expand" or (source := made.inputs[0]) is None:
            return None
        shape = sizes(source)
        # What is 1 along the axis may be made longer, too.
        if not shape or len(shape) != len(form) or any((size == 1) is (at == axis) for at, size in enumerate(shape)):
            return None
        others = [place for place in range(len(form)) if place != axis]
        if any(data.shape[place] != updates.shape[place] or data.shape[place] is None for place in others):
            return None  # a part of the data alone
    rows = line("Reshape", source, line.number([-1], np.int64))
    order = [axis, *(place for place in range(len(form)) if place != axis)]
    turned, moved = (line("Transpose", item, perm=order) for item in (data, updates))
    total = _summed(line, turned, rows, moved)
    return line("Add", data, line("Transpose", total, perm=[int(item) for item in np.argsort(order)]))


def _summed(line: Line, data: ir.Value, rows: ir.Value, updates: ir.Value) -> ir.Value:
    """Return what `updates`, one for each of `rows`, add to each row of `data`, in its shape."""
    shape = line("Shape", data)
    length = line("Gather", shape, line.number([0], np.int64), axis=0)
    count = line("Squeeze", length, line.number([0], np.int64))
    rows = line("Cast", rows, to=int(ir.DataType.INT64))
    rows = line("Where", line("Less", rows, line.number(0, np.int64)), line("Add", rows, count), rows)
    places = line("Range", line.number(0, np.int64), count, line.number(1, np.int64))
    column = line("Unsqueeze", places, line.number([1], np.int64))
    # ONNX's inference, which work is counted by, doesn't find the length of a Range.
    column = line("Expand", column, line("Concat", length, line.number([1], np.int64), axis=0))
    goes = line("Equal", column, line("Unsqueeze", rows, line.number([0], np.int64)))
    flat = line("Concat", line("Shape", rows), line.number([-1], np.int64), axis=0)
    total = line("MatMul", line("Cast", goes, to=int(updates.dtype or _FLOAT)), line("Reshape", updates, flat))
    return line("Reshape", total, shape)


_RULES: dict[str, Callable[[Line, ir.Node], ir.Value | None]] = {
    "LessOrEqual": _or_equal,
    "GreaterOrEqual": _or_equal,
    "Loop": _loop,
}
