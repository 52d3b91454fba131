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
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.graph.op_types import SAME_RANGE
from trtopt.graph.view import attribute, constant, is_float, operand, read_once, sizes

SELECTION = frozenset(("MaxPool", "Slice"))
ALL, SOME = "all", "some"
NEVER_NEGATIVE = frozenset(["Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Exp", "Sqrt", "Softplus"])

_PLAIN = {getattr(ir.AttributeType, name) for name in ("FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS")}


@dataclass(frozen=True)
class Known:
    """A tensor's amax, and the cache's tensor (or tensors) that it came from."""

    amax: float
    sources: tuple[str, ...]

    def at_most(self, limit: float) -> Known:
        return self if self.amax <= limit else Known(limit, self.sources)


def largest(items: Iterable[Known | None]) -> Known | None:
    """The largest of all; None where one of them isn't known."""
    parts = list(items)
    scaled = [item for item in parts if item is not None]
    if len(scaled) < len(parts):
        return None
    return Known(
        max(item.amax for item in scaled), tuple(dict.fromkeys(name for item in scaled for name in item.sources))
    )


def propagate(model: ir.Model, known: Mapping[str, Known], groups: Iterable[Sequence[str]] = ()) -> dict[str, Known]:
    """`known`, and what follows from it for the other float tensors of the graph, until nothing more does.

    Args:
        groups: tensors that share one scale.
    """
    scales = dict(known)
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    rules = _Rules(scales, group_of)
    twins = _twins(model.graph)
    nodes = [node for node in model.graph if not node.domain and node.inputs and is_float(node.inputs[0])]
    size = -1
    while size != len(scales):
        size = len(scales)
        for node in nodes:
            rules.forward(node)
        for node in reversed(nodes):
            rules.backward(node)
        for identical in twins:
            rules.equal(identical)
    return scales


class _Rules:
    def __init__(self, scales: MutableMapping[str, Known], group_of: Mapping[str, int]) -> None:
        self.scales, self.group_of = scales, group_of
        self._signs: dict[ir.Value, bool] = {}

    def get(self, value: ir.Value | None) -> Known | None:
        """Return what is known of a tensor; of a constant its own largest magnitude."""
        if value is None:
            return None
        if (content := constant(value)) is not None:
            return Known(float(np.abs(np.asarray(content, np.float64)).max(initial=0)), ())
        return self.scales.get(str(value.name))

    def give(self, value: ir.Value | None, item: Known | None) -> None:
        if value is None or item is None or item.amax <= 0 or not is_float(value) or constant(value) is not None:
            return
        self.scales.setdefault(str(value.name), item)

    def equal(self, values: Sequence[ir.Value]) -> None:
        item = next((item for value in values if (item := self.get(value)) is not None), None)
        for value in values:
            self.give(value, item)

    def forward(self, node: ir.Node) -> None:
        source, item = node.inputs[0], self.get(node.inputs[0])
        if _carries(node):
            self.give(node.outputs[0], item)
        elif node.op_type == "Split":
            for output in node.outputs:
                self.give(output, item)
        elif node.op_type == "Concat":
            self.give(node.outputs[0], largest(map(self.get, node.inputs)))
        elif item is not None and (limits := _limits(node)) is not None:
            low, high = limits
            # Relu has no upper limit; Clip from above must leave room, or everything is the limit itself.
            if high > 0 and (low == -high or (low <= 0 and source is not None and self.never_negative(source))):
                self.give(node.outputs[0], item.at_most(high))

    def backward(self, node: ir.Node) -> None:
        value, item, carried = node.inputs[0], self.get(node.outputs[0]), _carries(node)
        alone = value is not None and read_once(value)
        if carried == ALL or (carried == SOME and alone):
            self.give(value, item)
        elif node.op_type == "Split":
            self.give(value, largest(map(self.get, node.outputs)))
        elif node.op_type == "Concat":
            group = self.group_of.get(str(node.outputs[0].name), -1)
            for part in node.inputs:
                if part is not None and group >= 0 and self.group_of.get(str(part.name), -2) == group:
                    self.give(part, item)
        elif alone and not carried and (limits := _limits(node)) is not None and limits[0] <= 0 < limits[1]:
            self.give(value, item)  # saturating at ±amax and clipping give the same in either order

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
                elif node.op_type == "Split" or _carries(node):
                    source = node.inputs[0]
                    self._signs[value] = source is not None and self.never_negative(source)
        return self._signs[value]


def _carries(node: ir.Node) -> str:
    """Return `ALL` or `SOME` where only values of the first input come out, all or some of them; empty where others do."""
    if node.op_type in SAME_RANGE:
        return ALL
    if node.op_type in SELECTION:
        return SOME
    if node.op_type == "Resize":
        # tf_crop_and_resize fills in a value of its own.
        transform = attribute(node, "coordinate_transformation_mode")
        if attribute(node, "mode", "nearest") != "nearest" or transform == "tf_crop_and_resize":
            return ""
        before, after = sizes(node.inputs[0]) or (None,), sizes(node.outputs[0]) or (None,)
        return (
            ALL if all(old is not None and new is not None and new >= old for old, new in zip(before, after)) else SOME
        )
    if node.op_type == "Pad":
        if attribute(node, "mode", "constant") == "constant":
            fill = operand(node, 2)
            content = attribute(node, "value", 0.0) if fill is None else constant(fill)  # an attribute in opset 2
            if content is None or np.any(content):
                return ""
        pads = constant(operand(node, 1))
        return ALL if pads is not None and bool((pads >= 0).all()) else SOME
    return ""


def _limits(node: ir.Node) -> tuple[float, float] | None:
    """Relu's and Clip's lower and upper limit; None for other operators and limits that aren't constant."""
    if node.op_type == "Relu":
        return 0.0, float("inf")
    if node.op_type != "Clip":
        return None
    low, high = operand(node, 1), operand(node, 2)  # attributes in opset 6
    contents: tuple[Any, Any] = (
        attribute(node, "min", float("-inf")) if low is None else constant(low),
        attribute(node, "max", float("inf")) if high is None else constant(high),
    )
    if any(content is None or np.size(content) != 1 for content in contents):
        return None
    least, most = (float(np.ravel(content)[0]) for content in contents)
    return least, most


def _twins(nodes: Iterable[ir.Node]) -> list[list[ir.Value]]:
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
