"""Operators that ONNX defines as functions, written out: what a parser has no kernel for it often takes in parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx.inliner
from onnx import FunctionProto, ModelProto, NodeProto, helper

from trtopt.core.errors import ModelError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Issue
from trtopt.graph.guard import fault, guarded
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.substitutes import sum_by_products
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
from trtopt.graph.view import to_ir

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
