"""Operators that no TensorRT has, in standard ones that compute the same: before anything is folded or calibrated.

**Integers compared by ≤ or ≥** are not greater, or not less: TensorRT-RTX 1.7.1's builder ends the process (a segmentation
fault) at a decoder's step that puts keys and values where `places == position` and attends where `places <= position`.

**A sum by scatter** (the messages of a graph network) is a product with a matrix that says which entry goes where. It takes
room for all pairs of entries and places, so that it is written only where a TensorRT refuses the scatter itself.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph.passes.result import Line, PassResult
from trtopt.graph.view import Editor, attribute, opset_of, sizes

_FLOAT = ir.DataType.FLOAT
_INVERSE = {"LessOrEqual": "Greater", "GreaterOrEqual": "Less"}


def substitute(model: ir.Model) -> None:
    """Compare integers without "or equal", in every graph whose shapes are inferred; of floats NaN is neither: they stay."""
    editor = Editor(model)
    for node in [node for node in model.graph.all_nodes() if node.op_type in _INVERSE and not node.domain]:
        if all(value is not None and value.dtype is not None and value.dtype.is_integer() for value in node.inputs):
            line = Line(editor, node)
            result = line("Not", line(_INVERSE[node.op_type], *node.inputs))
            ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, node.outputs, [result])


def sum_by_products(model: ir.Model) -> PassResult:
    """Scatters that add, as products; what goes along other axes than one stays as it is."""
    editor, changes = Editor(model), list[str]()
    for node in list(model.graph.all_nodes()):
        if node.domain or attribute(node, "reduction", "none") != "add" or opset_of(model) < 13:
            continue
        line = Line(editor, node)
        rule = {"ScatterND": _scattered_rows, "ScatterElements": _scattered_elements}.get(node.op_type)
        if rule is not None and (result := rule(line, node)) is not None:
            ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, node.outputs, [result])
            changes.append(str(node.name))
    return PassResult(model, changes)


def _scattered_rows(line: Line, node: ir.Node) -> ir.Value | None:
    """ScatterND along the first axis."""
    data, indices, updates = node.inputs
    form, places = sizes(data), sizes(indices)
    if form is None or places is None or places[-1] != 1:
        return None
    rows = line("Reshape", indices, line.integers([-1]))
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
    rows = line("Reshape", source, line.integers([-1]))
    order = [axis, *(place for place in range(len(form)) if place != axis)]
    turned, moved = (line("Transpose", item, perm=order) for item in (data, updates))
    total = _summed(line, turned, rows, moved)
    return line("Add", data, line("Transpose", total, perm=[int(item) for item in np.argsort(order)]))


def _summed(line: Line, data: ir.Value, rows: ir.Value, updates: ir.Value) -> ir.Value:
    """Return what `updates`, one for each of `rows`, add to each row of `data`, in its shape."""
    shape = line("Shape", data)
    length = line("Gather", shape, line.integers([0]), axis=0)
    count = line("Squeeze", length, line.integers([0]))
    rows = line("Cast", rows, to=int(ir.DataType.INT64))
    rows = line("Where", line("Less", rows, line.integers(0)), line("Add", rows, count), rows)
    places = line("Range", line.integers(0), count, line.integers(1))
    column = line("Unsqueeze", places, line.integers([1]))
    # ONNX's inference, which work is counted by, doesn't find the length of a Range.
    column = line("Expand", column, line("Concat", length, line.integers([1]), axis=0))
    goes = line("Equal", column, line("Unsqueeze", rows, line.integers([0])))
    flat = line("Concat", line("Shape", rows), line.integers([-1]), axis=0)
    total = line("MatMul", line("Cast", goes, to=int(updates.dtype or _FLOAT)), line("Reshape", updates, flat))
    return line("Reshape", total, shape)
