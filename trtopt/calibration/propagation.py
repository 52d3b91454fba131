"""Scales carried from tensors that have one to tensors that don't, where that loses nothing.

Exact means: quantizing behind the operator gives the same numbers as quantizing before it, with the same scale.

| operator | output from input | input from output |
|---|---|---|
| Reshape, Flatten, Squeeze, Unsqueeze, Transpose, Identity, Dropout, DepthToSpace, SpaceToDepth, float Cast, Expand, nearest Resize that only enlarges | same values | same values |
| MaxPool, Slice, other nearest Resize | a selection of the same values: TensorRT runs it on the codes | if it is the only reader: what it doesn't pass on doesn't matter |
| Pad with 0, edge or reflection | same values, and 0 has a code in every scale | as above (a negative pad crops) |
| Split | as a selection | the largest of all outputs: they are all of the input |
| Concat | the largest of all inputs | only inside a group that shares one scale, as INT8 Concat does |
| Relu, Clip, where the input is never negative | at most Clip's max | if it is the only reader: what it cuts off doesn't matter |
| Clip with −min = max | at most max | as above |

Not exact, so not done: Relu and Clip forward where the input may be negative (its range counts what they drop), averages,
additions, and everything else that computes.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.view import constant, is_float, read_once, sizes

SAME = frozenset(
    [
        "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Dropout", "DepthToSpace", "SpaceToDepth",
        "Cast", "Expand",
    ]
)  # fmt: skip
SELECTION = frozenset(("MaxPool", "Slice"))
NEVER_NEGATIVE = frozenset(["Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Exp", "Sqrt", "Softplus"])

_PLAIN = {getattr(ir.AttributeType, name) for name in ("FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS")}


@dataclass(frozen=True)
class Known:
    """A tensor's amax, and the cache's tensor (or tensors) that it came from."""

    amax: float
    sources: tuple[str, ...]

    def at_most(self, limit: float) -> Known:
        return self if self.amax <= limit else Known(limit, self.sources)


def largest(items: Sequence[Known]) -> Known:
    sources = dict.fromkeys(source for item in items for source in item.sources)
    return Known(max(item.amax for item in items), tuple(sources))


def propagate(model: ir.Model, known: Mapping[str, Known], groups: Iterable[Sequence[str]] = ()) -> dict[str, Known]:
    """`known`, and what follows from it for the other float tensors of the graph, until nothing more does.

    Args:
        groups: tensors that share one scale.
    """
    found = dict(known)
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    rules = _Rules(found, group_of)
    nodes = list(model.graph)
    twins = _twins(nodes)
    size = -1
    while size != len(found):
        size = len(found)
        for node in nodes:
            rules.forward(node)
        for node in reversed(nodes):
            rules.backward(node)
        for identical in twins:
            rules.equal(identical)
    return found


class _Rules:
    def __init__(self, found: MutableMapping[str, Known], group_of: Mapping[str, int]) -> None:
        self.found, self.group_of = found, group_of
        self._signs: dict[ir.Value, bool] = {}

    def get(self, value: ir.Value | None) -> Known | None:
        """What is known of a tensor; a constant's own largest magnitude."""
        if value is None:
            return None
        if (content := constant(value)) is not None:
            return Known(float(np.abs(np.asarray(content, np.float64)).max(initial=0)), ())
        return self.found.get(str(value.name))

    def give(self, value: ir.Value | None, item: Known | None) -> None:
        if value is None or item is None or item.amax <= 0 or not is_float(value) or constant(value) is not None:
            return
        self.found.setdefault(str(value.name), item)

    def equal(self, values: Sequence[ir.Value]) -> None:
        item = next((item for value in values if (item := self.get(value)) is not None), None)
        for value in values:
            self.give(value, item)

    def forward(self, node: ir.Node) -> None:
        if node.domain or not node.inputs or not is_float(node.inputs[0]):
            return
        source, item = node.inputs[0], self.get(node.inputs[0])
        if node.op_type in SAME or node.op_type in SELECTION or _moves(node) is not None:
            self.give(node.outputs[0], item)
        elif node.op_type == "Split":
            for output in node.outputs:
                self.give(output, item)
        elif node.op_type == "Concat":
            items = [self.get(value) for value in node.inputs]
            if all(part is not None for part in items):
                self.give(node.outputs[0], largest([part for part in items if part is not None]))
        elif item is not None and (limits := _limits(node)) is not None:
            low, high = limits
            # Relu has no upper limit; Clip from above must leave room, or everything is the limit itself.
            if high > 0 and (low == -high or (low <= 0 and source is not None and self.never_negative(source))):
                self.give(node.outputs[0], item.at_most(high))

    def backward(self, node: ir.Node) -> None:
        if node.domain or not node.inputs or not is_float(node.inputs[0]):
            return
        value = node.inputs[0]
        assert value is not None
        alone = read_once(value)
        item, op = self.get(node.outputs[0]), node.op_type
        if op in SAME or _moves(node) is True:
            self.give(value, item)
        elif op == "Split":
            items = [self.get(output) for output in node.outputs]
            if all(part is not None for part in items):
                self.give(value, largest([part for part in items if part is not None]))
        elif op == "Concat":
            group = self.group_of.get(str(node.outputs[0].name), -1)
            for part in node.inputs:
                if part is not None and group >= 0 and self.group_of.get(str(part.name), -2) == group:
                    self.give(part, item)
        elif alone and (op in SELECTION or _moves(node) is False):
            self.give(value, item)
        elif alone and item is not None and (limits := _limits(node)) is not None:
            low, high = limits
            if low <= 0 < high:  # saturating at ±amax and clipping then give the same in either order
                self.give(value, item)

    def never_negative(self, value: ir.Value) -> bool:
        if value not in self._signs:
            self._signs[value] = False
            node = value.producer()
            if node is not None and not node.domain:
                limits = _limits(node)
                if node.op_type in NEVER_NEGATIVE or (limits is not None and limits[0] >= 0):
                    self._signs[value] = True
                elif node.op_type == "Concat":
                    self._signs[value] = all(item is not None and self.never_negative(item) for item in node.inputs)
                elif node.op_type in SAME | SELECTION | {"Split"} or _moves(node) is not None:
                    source = node.inputs[0]
                    self._signs[value] = source is not None and self.never_negative(source)
        return self._signs[value]


def _moves(node: ir.Node) -> bool | None:
    """Resize and Pad: True if every input value comes out, False if some may not, None if new values do."""
    if node.op_type == "Resize":
        mode = node.attributes.get("mode")
        if mode is not None and mode.as_string() != "nearest":
            return None
        transform = node.attributes.get("coordinate_transformation_mode")
        if transform is not None and transform.as_string() == "tf_crop_and_resize":
            return None  # it fills in a value of its own
        before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
        return (
            before is not None
            and after is not None
            and all(old is not None and new is not None and new >= old for old, new in zip(before, after))
        )
    if node.op_type == "Pad":
        mode = node.attributes.get("mode")
        if mode is None or mode.as_string() == "constant":
            fill = node.inputs[2] if len(node.inputs) > 2 else None
            content = constant(fill)
            attribute = node.attributes.get("value")  # opset 2
            if (fill is not None and (content is None or content.any())) or (attribute and attribute.as_float() != 0):
                return None
        pads = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        return pads is not None and bool((np.asarray(pads) >= 0).all())
    return None


def _limits(node: ir.Node) -> tuple[float, float] | None:
    """Relu's and Clip's lower and upper limit; None for other operators and limits that aren't constant."""
    if node.op_type == "Relu":
        return 0.0, float("inf")
    if node.op_type != "Clip":
        return None
    limits = []
    for slot, name, default in ((1, "min", float("-inf")), (2, "max", float("inf"))):
        attribute = node.attributes.get(name)  # opset 6
        value = node.inputs[slot] if len(node.inputs) > slot else None
        if attribute is not None:
            limits.append(attribute.as_float())
        elif value is None:
            limits.append(default)
        elif (content := constant(value)) is not None and content.size == 1:
            limits.append(float(content.reshape(-1)[0]))
        else:
            return None
    return limits[0], limits[1]


def _twins(nodes: Sequence[ir.Node]) -> list[list[ir.Value]]:
    """First outputs of nodes that compute the same from the same inputs (folding keeps one of them)."""
    groups: dict[object, list[ir.Value]] = {}
    for node in nodes:
        plain = all(attribute.type in _PLAIN for attribute in node.attributes.values())
        if not node.inputs or not plain or "Random" in node.op_type or node.op_type in ("Bernoulli", "Multinomial"):
            continue
        attributes = tuple(sorted(f"{attribute.name}={attribute.value!r}" for attribute in node.attributes.values()))
        key = (node.domain, node.op_type, tuple(map(id, node.inputs)), attributes)
        groups.setdefault(key, []).append(node.outputs[0])
    return [group for group in groups.values() if len(group) > 1]
