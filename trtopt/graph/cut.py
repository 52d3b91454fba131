"""Models that end earlier than they came: at tensors inside, such as the boxes that an NMS reads."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from onnx import ModelProto

from trtopt.core.errors import UsageError
from trtopt.graph.proto import UNKNOWN, all_graphs, inferred_values, node_reads, refill, tensor_info, whole_copy

_LISTED = 3  # names that a message proposes


def cut(proto: ModelProto, ends: Sequence[str]) -> ModelProto:
    """A copy that gives these tensors alone, without the nodes, weights and inputs that they don't need.

    Args:
        ends: names, several in one with commas between.

    Raises:
        UsageError: no node gives one of them (near names are told), or its type isn't known.
    """
    result = whole_copy(proto)
    made = {name: node for node in result.graph.node for name in node.output if name}
    split = ([text] if text in made else text.split(",") for text in ([ends] if isinstance(ends, str) else ends))
    names = list(dict.fromkeys(name.strip() for part in split for name in part))
    values = inferred_values(proto)
    for name in names:
        if name not in made:
            near = difflib.get_close_matches(name, made, _LISTED, 0.5) or list(made)[-_LISTED:]
            raise UsageError(f"`outputs=` {name!r}: no node gives such a tensor; there are {', '.join(near)}")
        if name not in values or tensor_info(values[name]).dtype == UNKNOWN:
            raise UsageError(
                f"`outputs=` {name!r}: its type isn't known, as {made[name].op_type} gives it: name a tensor before that"
            )
    needed, kept = set(names), []
    for node in reversed(result.graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(node_reads(node))
            kept.append(node)
    refill(result.graph.node, kept[::-1])
    for field in (result.graph.input, result.graph.initializer):
        refill(field, [item for item in field if item.name in needed])
    refill(result.graph.value_info, [item for item in result.graph.value_info if item.name in needed.difference(names)])
    refill(result.graph.output, [values[name] for name in names])
    return result


def ends_before(proto: ModelProto, operators: Collection[str]) -> list[str]:
    """Return where to end so as to do without these operators: what they read, and the outputs that they have no part in."""
    weights = {tensor.name for graph in all_graphs(proto.graph) for tensor in graph.initializer}
    inputs = {value.name for value in proto.graph.input} - weights
    computed, spoilt, read = set[str](), set[str](), list[str]()
    for node in proto.graph.node:
        reads = set(node_reads(node))
        if node.op_type in operators:
            read += node.input
        if node.op_type in operators or not reads.isdisjoint(spoilt):
            spoilt.update(node.output)
        elif not reads.isdisjoint(computed | inputs):
            computed.update(node.output)
    ends = [name for name in (*read, *(value.name for value in proto.graph.output)) if name in computed]
    return list(dict.fromkeys(ends)) if computed.intersection(read) else []
