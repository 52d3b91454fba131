"""No pass may change what a model computes: what one gives is looked at before anybody uses it.

It must be valid ONNX, and where running both costs next to nothing, its outputs must equal those of the graph before it, on
made-up inputs, in ONNX's own reference evaluator (which is always there and can't end the process). What may not be cheap isn't
run: sizes that depend on values, loops, text.
"""

from __future__ import annotations

import math
from typing import Any

import onnx.inliner
from onnx import ModelProto

from trtopt.core.errors import InvalidModel, ModelError
from trtopt.core.library_output import quiet
from trtopt.data.difference import difference
from trtopt.graph.budget import misjudged
from trtopt.graph.op_types import RANDOM
from trtopt.graph.passes.result import PassResult
from trtopt.graph.proto import Links, all_nodes, opset_version, refill, tensor_info, to_array, whole_copy
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.graph.validity import validate
from trtopt.graph.view import to_proto
from trtopt.graph.work import macs, shapes_at

NODES = 256  # the most that are run
ELEMENTS = 1 << 14  # of all tensors together
MACS = 1 << 20
TOLERANCE = 1e-3  # of the largest value: passes round differently
_UNCOMPARED = (*RANDOM, "Dropout", "Loop", "Scan", "SequenceMap")  # nothing says how often a loop runs


def fault(before: ModelProto, after: ModelProto) -> str:
    """Return why `after` can't stand for `before`, a valid model; empty: nothing speaks against it.

    Sorts the nodes of `after` where they aren't in order.
    """
    if problem := invalid(after, "the result"):
        return problem
    if (was := drawn(before)) != (now := drawn(after)):
        return f"it draws random numbers {now} times, no longer {was}"
    before_ends, after_ends = ([value.name for value in proto.graph.output] for proto in (before, after))
    if before_ends != after_ends:
        return f"its outputs are {', '.join(after_ends)}, no longer {', '.join(before_ends)}"
    return _difference(before, after) if cheap(before) and cheap(after) else ""


def guarded(before: ModelProto, result: PassResult, what: str, instead: str) -> ModelProto:
    """Return what a pass made of a model, whose declared outputs stay as they are; `before` itself where it changed nothing.

    Raises:
        ModelError: "WHAT (why); INSTEAD" where it can't stand for `before`.
    """
    if not result.changed:
        return before
    after = to_proto(result.model)
    del after.graph.value_info[:]
    refill(after.graph.output, before.graph.output)
    if problem := fault(before, after):
        raise ModelError(f"{what} ({problem}); {instead}")
    return after


def drawn(proto: ModelProto) -> int:
    """Return how many operators draw random numbers; a Dropout does in training."""
    links, count = Links(proto.graph), 0
    for node in links.nodes:
        if node.op_type == "Dropout":  # nothing where the mode is off, or the ratio 0
            sizes = [links.constants[name] for name in node.input[1:3] if name in links.constants]
            count += bool("".join(node.input[2:])) and all(to_array(tensor).any() for tensor in sizes)
        else:
            count += node.op_type in RANDOM
    return count


def invalid(proto: ModelProto, what: str = "the graph") -> str:
    """Return why what a pass made isn't valid ONNX; empty: it is. Sorts its nodes where they aren't in order."""
    try:
        validate(proto, what)
    except InvalidModel as error:
        return str(error)
    return ""


def cheap(proto: ModelProto) -> bool:
    """Return whether all that it computes is known before, and little."""
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    nodes, opset = list(all_nodes(proto.graph)), opset_version(proto)
    barred = (node.op_type in _UNCOMPARED or misjudged(node, opset) for node in nodes)
    if len(nodes) > NODES or any(barred):
        return False
    shapes = shapes_at(proto, {}, 2)  # 2: as `synthetic_inputs` makes it
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    known = all(name in sizes for node in nodes for name in (*node.input, *node.output) if name)
    return known and sum(sizes.values()) <= ELEMENTS and sum(macs(proto).values()) <= MACS


def _difference(before: ModelProto, after: ModelProto) -> str:
    from onnx.reference import ReferenceEvaluator

    weights = {tensor.name for tensor in before.graph.initializer}
    inputs = [tensor_info(value) for value in before.graph.input if value.name not in weights]
    try:
        feed = synthetic_inputs(inputs, {})
    except ModelError:  # one isn't a tensor of numbers
        return ""
    with quiet():
        try:
            expected = ReferenceEvaluator(whole_copy(before)).run(None, feed)
        except Exception:  # it has no such operator, or the made-up inputs don't fit: nothing to compare with
            return ""
        try:
            actual = ReferenceEvaluator(whole_copy(after)).run(None, feed)
        except Exception as error:
            return f"it doesn't run any more ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    for value, old, new in zip(before.graph.output, expected, actual):
        if not _equal(old, new):
            return f"its output {value.name!r} has other values on made-up inputs"
    return ""


def _equal(old: Any, new: Any) -> bool:
    """Return whether an output has the same type, shape and values, but for rounding."""
    same_type = getattr(old, "dtype", None) == getattr(new, "dtype", None)
    return same_type and difference({"": old}, {"": new}).within(TOLERANCE)
