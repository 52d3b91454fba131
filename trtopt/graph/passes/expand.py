"""Refused operators in others: sums by scatter as products, and what ONNX defines as functions written out, since a parser
often takes in parts what it has no kernel for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx.inliner
import onnx_ir as ir
from onnx import FunctionProto, ModelProto, NodeProto, helper

from trtopt.core.errors import ModelError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Issue
from trtopt.graph.guard import fault, guarded
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.result import Line, PassResult
from trtopt.graph.proto import (
    LARGE,
    STANDARD,
    all_graphs,
    all_nodes,
    inferred_values,
    name_nodes,
    opset_version,
    put_back,
    refill,
    schema_of,
    skeleton,
)
from trtopt.graph.view import Editor, attribute, opset_of, sizes, to_ir

_OWN = "trtopt.written_out"  # the domain of the definitions, until they are put in place


def written_out(graph: ModelProto, issues: Sequence[Issue], reporter: Reporter = SILENT) -> ModelProto | None:
    """A graph with the refused operators written out and folded; None where ONNX defines none of them by others."""
    refused = {issue.op for issue in issues}
    try:
        if any(op.startswith("Scatter") for op in refused):
            summed = guarded(graph, sum_by_products(to_ir(graph)), "sums by scatter can't be written as products", "")
            if summed is not graph:
                reporter.note("sums by scatter written as products: this TensorRT has scatters that replace alone")
                return fold(summed)[0]
        if not (operators := expandable(graph, refused)):
            return None
        made, _ = fold(expand(graph, operators))
    except ModelError:
        return None
    if any(node.op_type in operators for node in all_nodes(made.graph)):  # folding made it whole again
        return None
    reporter.note(f"{', '.join(operators)} written out by ONNX's own definition: this TensorRT takes it only in parts")
    return made


def expandable(proto: ModelProto, operators: Collection[str]) -> tuple[str, ...]:
    """Return those of `operators` that stand in a model and that ONNX defines by others."""
    present = {node.op_type for node in all_nodes(proto.graph) if node.domain in STANDARD}
    schemas = {op: schema_of(op, opset_version(proto)) for op in sorted({*operators} & present)}
    return tuple(op for op, it in schemas.items() if it and (it.has_function or it.has_context_dependent_function))


def expand(proto: ModelProto, operators: Collection[str]) -> ModelProto:
    """A copy with every node of these operators, those of bodies too, replaced by the nodes that ONNX defines it by.

    Raises:
        ModelError: ONNX fails to write them out, or what it writes isn't the same.
    """
    what = f"{', '.join(operators)} can't be written out"
    light, opset = skeleton(proto, LARGE, external="weights"), opset_version(proto)
    types = {name: value.type.SerializeToString() for name, value in inferred_values(proto).items()}
    for tensor in (tensor for graph in all_graphs(light.graph) for tensor in graph.initializer):
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims).SerializeToString()
    light.opset_import.append(helper.make_opsetid(_OWN, 1))
    try:
        for node in all_nodes(light.graph):
            if node.op_type in operators and node.domain in STANDARD:
                # Nothing: left out, which ONNX's own inliner can't.
                given = [types.get(name, b"") for name in node.input]
                body = light.functions.add()
                body.CopyFrom(_definition(node, given, opset))
                body.domain, body.name = _OWN, f"{node.op_type}{len(light.functions)}"
                node.domain, node.op_type = body.domain, body.name
        made = onnx.inliner.inline_local_functions(light)
    except Exception as error:  # ONNX's errors have no common base
        raise ModelError(f"{what}: {' '.join(str(error).split())[:300]}") from error
    refill(made.opset_import, [entry for entry in made.opset_import if entry.domain != _OWN])
    put_back(made, proto)
    name_nodes(made)
    if problem := fault(proto, made):
        raise ModelError(f"{what}: {problem}")
    return made


def _definition(node: NodeProto, types: Sequence[bytes], opset: int) -> FunctionProto:
    """The function that a node calls, in operators of that opset."""
    schema = schema_of(node.op_type, opset)
    if schema.has_context_dependent_function:
        version = max(it for it in schema.context_dependent_function_opset_versions if it <= opset)
        body = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
    else:
        body = schema.get_function_with_opset_version(max(it for it in schema.function_opset_versions if it <= opset))
    function: FunctionProto = FunctionProto.FromString(body)
    refill(function.opset_import, [helper.make_opsetid("", opset)])
    return function


def sum_by_products(model: ir.Model) -> PassResult:
    """Scatters that add (the messages of a graph network), as products with a matrix that says which entry goes where: it takes
    room for all pairs of entries and places. What goes along other axes than one stays as it is."""
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
    source, others = indices, [place for place in range(len(form)) if place != axis]
    if len(form) > 1:
        made = indices.producer()
        if made is None or made.op_type != "Expand" or (source := made.inputs[0]) is None:
            return None
        shape = sizes(source)
        # What is 1 along the axis may be made longer, too.
        if not shape or len(shape) != len(form) or any((size == 1) is (at == axis) for at, size in enumerate(shape)):
            return None
        if any(data.shape[place] != updates.shape[place] or data.shape[place] is None for place in others):
            return None  # a part of the data alone
    rows = line("Reshape", source, line.integers([-1]))
    order = [axis, *others]
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
    total = line(
        "MatMul", line("Cast", goes, to=int(updates.dtype or ir.DataType.FLOAT)), line("Reshape", updates, flat)
    )
    return line("Reshape", total, shape)
