"""Operators that no TensorRT has, in standard ones that compute the same: before anything is folded or calibrated.

**An Einsum** of activations and a constant is a product where only the activations' last axes are summed.

**Integers compared by ≤ or ≥** are not greater, or not less: TensorRT-RTX 1.7.1's builder ends the process (a segmentation
fault) at a decoder's step that puts keys and values where `places == position` and attends where `places <= position`.

**A Loop without a condition** gets one that is true: TensorRT-RTX 1.7.1's parser doesn't know it otherwise.

**A sum by scatter** (the messages of a graph network) is a product with a matrix that says which entry goes where. It takes
room for all pairs of entries and places, so that it is written only where a TensorRT refuses the scatter itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from trtopt.graph.passes.result import Line, PassResult
from trtopt.graph.view import Editor, attribute, is_constant, opset_of, sizes

# Opset that a rule writes for, where not 13; from 7 on operands broadcast as NumPy's do.
_OLDEST = {"Einsum": 12, "LessOrEqual": 12, "GreaterOrEqual": 12, "Loop": 7}
_FLOAT = ir.DataType.FLOAT


def substitute(model: ir.Model) -> None:
    """Write what can be written otherwise, in every graph whose shapes are inferred; what can't stays."""
    if not any((node.domain, node.op_type) in _RULES for node in model.graph.all_nodes()):
        return
    if not opset_of(model):
        model.opset_imports[""] = 17
    editor = Editor(model)
    for node in list(model.graph.all_nodes()):
        rule = _RULES.get((node.domain, node.op_type))
        if rule is None or opset_of(model) < _OLDEST.get(node.op_type, 13):
            continue
        line = Line(editor, node)
        result = rule(line, node)
        if result is not None:
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


def _einsum(line: Line, node: ir.Node) -> ir.Value | None:
    """A sum over the last axes of one operand and a constant: a product, which INT8 has."""
    left, arrow, result = attribute(node, "equation", "").replace(" ", "").partition("->")
    operands = list(zip(left.split(","), node.inputs))
    if len(operands) != 2 or not arrow or any("." in term or len({*term}) < len(term) for term, _ in operands):
        return None
    if is_constant(operands[0][1]):
        operands.reverse()
    (own, value), (other, weight) = operands
    shape = sizes(weight)
    if is_constant(value) or not is_constant(weight) or shape is None or len(shape) != len(other):
        return None
    free = [letter for letter in own if letter not in other]
    summed, added = own[len(free) :], [letter for letter in result if letter not in own]
    if (
        not free
        or not summed
        or {*other} != {*summed, *added}
        or [*result] != [*free, *added]
        or own != "".join(free) + summed
    ):
        return None
    order = [other.index(letter) for letter in (*summed, *added)]
    if order != sorted(order):
        weight = line("Transpose", weight, perm=order)
    rows, columns = ([int(shape[other.index(letter)] or 0) for letter in letters] for letters in (summed, added))
    if len(rows) > 1 or len(columns) != 1:
        weight = line("Reshape", weight, line.number([math.prod(rows), math.prod(columns)], np.int64))
    if len(rows) > 1:
        value = line("Reshape", value, line.number([*[0] * len(free), math.prod(rows)], np.int64))
    product = line("MatMul", value, weight)
    if len(columns) != 1:
        product = line("Reshape", product, line.number([*[0] * len(free), *columns], np.int64))
    return product


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


_RULES: dict[tuple[str, str], Callable[[Line, ir.Node], ir.Value | None]] = {
    ("", "Einsum"): _einsum,
    ("", "LessOrEqual"): _or_equal,
    ("", "GreaterOrEqual"): _or_equal,
    ("", "Loop"): _loop,
}
