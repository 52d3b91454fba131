"""Operators that ONNX defines as functions, written out: what a parser has no kernel for it often takes in parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx.inliner
from onnx import ModelProto

from trtopt.core.errors import ModelError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Issue
from trtopt.graph.guard import fault, guarded
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.substitutes import sum_by_products
from trtopt.graph.proto import LARGE, STANDARD, name_nodes, opset_version, put_back, schema_of, skeleton
from trtopt.graph.view import to_ir


def written_out(graph: ModelProto, issues: Sequence[Issue], reporter: Reporter = SILENT) -> ModelProto | None:
    """A graph with the refused operators written out and folded; None where ONNX defines none of them by others."""
    if (summed := _summed(graph, issues)) is not None:
        reporter.note("sums by scatter written as products: this TensorRT has scatters that replace alone")
        return summed
    operators = expandable(graph, {issue.op for issue in issues})
    if not operators:
        return None
    try:
        made, _ = fold(expand(graph, operators))
    except ModelError:
        return None
    if any(node.op_type in operators for node in made.graph.node):  # folding made it whole again
        return None
    reporter.note(f"{', '.join(operators)} written out by ONNX's own definition: this TensorRT takes it only in parts")
    return made


def _summed(graph: ModelProto, issues: Sequence[Issue]) -> ModelProto | None:
    """The graph with its sums by scatter as products; None where none was refused, or none has that form."""
    if not any(issue.op.startswith("Scatter") for issue in issues):
        return None
    try:
        made = guarded(graph, sum_by_products(to_ir(graph)), "sums by scatter can't be written as products", "")
        return None if made is graph else fold(made)[0]
    except ModelError:
        return None


def expandable(proto: ModelProto, operators: Collection[str]) -> tuple[str, ...]:
    """Those of `operators` that stand in the main graph of a model and that ONNX defines by others."""
    present = {node.op_type for node in proto.graph.node if node.domain in STANDARD}
    schemas = {op: schema_of(op, opset_version(proto)) for op in sorted({*operators} & present)}
    return tuple(op for op, it in schemas.items() if it and (it.has_function or it.has_context_dependent_function))


def expand(proto: ModelProto, operators: Collection[str]) -> ModelProto:
    """A copy with every node of these operators replaced by the nodes that ONNX defines it by.

    Raises:
        ModelError: ONNX fails to write them out, or what it writes isn't the same.
    """
    light = skeleton(proto, LARGE, external="weights")
    try:
        made = onnx.inliner.inline_selected_functions(
            light, [("", op) for op in operators], inline_schema_functions=True
        )
    except Exception as error:  # the inliner's errors have no common base
        raise ModelError(
            f"{', '.join(operators)} can't be written out: {' '.join(str(error).split())[:300]}"
        ) from error
    put_back(made, proto)
    name_nodes(made)
    if problem := fault(proto, made):
        raise ModelError(f"{', '.join(operators)} can't be written out: {problem}")
    return made
