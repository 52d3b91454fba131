"""No pass may change what a model computes: what one gives is looked at before anybody uses it.

It must be valid ONNX, draw as many random numbers and name the same outputs. Values are held against the model's own where
samples are run (`ort.folding`, `verify`).
"""

from __future__ import annotations

from onnx import ModelProto

from trtopt.core.errors import InvalidModel, ModelError
from trtopt.graph.op_types import RANDOM
from trtopt.graph.passes.result import PassResult
from trtopt.graph.proto import LARGE, Links, all_nodes, forget_inner_shapes, refill, skeleton, to_array
from trtopt.graph.validity import validate
from trtopt.graph.view import to_proto


def fault(before: ModelProto, after: ModelProto) -> str:
    """Return why `after` can't stand for `before`, a valid model; empty: nothing speaks against it.

    Sorts the nodes of `after` where they aren't in order.
    """
    if problem := invalid(after, "the result"):
        return problem
    if (was := drawn(before)) != (now := drawn(after)):
        return f"it draws random numbers {now} times, no longer {was}"
    before_ends, after_ends = ([value.name for value in proto.graph.output] for proto in (before, after))
    renamed = before_ends != after_ends
    return f"its outputs are {', '.join(after_ends)}, no longer {', '.join(before_ends)}" if renamed else ""


def guarded(before: ModelProto, result: PassResult, what: str, instead: str) -> ModelProto:
    """Return what a pass made of a model, whose declared outputs stay as they are; `before` itself where it changed nothing.

    Raises:
        ModelError: "WHAT (why); INSTEAD" where it can't stand for `before`.
    """
    if not result.changes:
        return before
    after = to_proto(result.model)
    forget_inner_shapes(after)
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


def same(before: ModelProto, after: ModelProto) -> bool:
    """Tell whether two models have the same nodes and weights, in any order and whatever is told of their origin."""
    weights, others = ({item.name: item for item in proto.graph.initializer} for proto in (before, after))
    return _nodes(before) == _nodes(after) and weights == others


def _nodes(proto: ModelProto) -> list[bytes]:
    light = skeleton(proto, LARGE)
    for node in all_nodes(light.graph):
        for field in ("name", "doc_string", "metadata_props"):
            node.ClearField(field)
    return sorted(node.SerializeToString(deterministic=True) for node in light.graph.node)


def invalid(proto: ModelProto, what: str = "the graph") -> str:
    """Return why what a pass made isn't valid ONNX; empty: it is. Sorts its nodes where they aren't in order."""
    try:
        validate(proto, what)
    except InvalidModel as error:
        return str(error)
    return ""
