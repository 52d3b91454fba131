"""Scales carried from tensors that have one to tensors that don't, where that loses nothing.

Exact means: quantizing behind the operator gives the same numbers as quantizing before it, with the same scale.

| operator | output from input | input from output |
|---|---|---|
| Reshape, Flatten, Squeeze, Unsqueeze, Transpose, Identity, Dropout, DepthToSpace, SpaceToDepth, float Cast, Expand, nearest Resize that only enlarges | same values | same values |
| MaxPool, Slice, other nearest Resize | a selection of the same values: TensorRT runs it on the codes | if it is the only reader: what it doesn't pass on doesn't matter |
| Pad with 0, edge or reflection | same values, and 0 has a code in every scale | as above (a negative pad crops) |
| Split | as a selection | the largest of all outputs: they are all of the input |
| Concat | the largest of all inputs | only inside a group that shares one scale, as INT8 Concat does |
| Relu, Clip | – (its range counts what they drop) | if it is the only reader: what it cuts off doesn't matter |

Not exact, so not done: averages, additions, and everything else that computes.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trtopt.graph.op_types import SAME_RANGE
from trtopt.graph.view import attribute, constant, is_float, operand, read_once, sizes

SELECTION = frozenset(("MaxPool", "Slice"))
ALL, SOME = "all", "some"


def largest(amax: Iterable[float | None]) -> float | None:
    """The largest of all; None where one of them isn't known."""
    parts = list(amax)
    return None if None in parts else max(item for item in parts if item is not None)


def propagate(model: ir.Model, known: Mapping[str, float], groups: Iterable[Sequence[str]] = ()) -> dict[str, float]:
    """The amax of tensors that are known, and what follows for the other float tensors of the graph, until nothing more does.

    Args:
        groups: tensors that share one scale.
    """
    scales = dict(known)
    group_of = {name: number for number, group in enumerate(groups) for name in group}

    def get(value: ir.Value | None) -> float | None:
        """Return what is known of a tensor; of a constant its own largest magnitude."""
        if value is None:
            return None
        if (content := constant(value)) is not None:
            return float(np.abs(np.asarray(content, np.float64)).max(initial=0))
        return scales.get(str(value.name))

    def give(amax: float | None, *values: ir.Value | None) -> None:
        for value in values:
            if amax and value is not None and is_float(value) and constant(value) is None:
                scales.setdefault(str(value.name), amax)

    def forward(node: ir.Node) -> None:
        if _carries(node):
            give(get(node.inputs[0]), node.outputs[0])
        elif node.op_type == "Split":
            give(get(node.inputs[0]), *node.outputs)
        elif node.op_type == "Concat":
            give(largest(map(get, node.inputs)), node.outputs[0])

    def backward(node: ir.Node) -> None:
        value, item, carried = node.inputs[0], get(node.outputs[0]), _carries(node)
        alone = value is not None and read_once(value)
        if carried == ALL or (carried == SOME and alone):
            give(item, value)
        elif node.op_type == "Split":
            give(largest(map(get, node.outputs)), value)
        elif node.op_type == "Concat":
            group = group_of.get(str(node.outputs[0].name), -1)
            give(
                item, *(part for part in node.inputs if part is not None and group == group_of.get(str(part.name), -2))
            )
        elif alone and not carried and _keeps_zero(node):
            give(item, value)  # saturating at ±amax and clipping give the same in either order

    nodes = [node for node in model.graph if not node.domain and node.inputs and is_float(node.inputs[0])]
    size = -1
    while size != len(scales):
        size = len(scales)
        for node in nodes:
            forward(node)
        for node in reversed(nodes):
            backward(node)
    return scales


def _carries(node: ir.Node) -> str | None:
    """Return `ALL` or `SOME` where only values of the first input come out, all or some of them; None where others do."""
    if node.op_type in SAME_RANGE:
        return ALL
    if node.op_type in SELECTION:
        return SOME
    if node.op_type == "Resize":
        # tf_crop_and_resize fills in a value of its own.
        transform = attribute(node, "coordinate_transformation_mode")
        if attribute(node, "mode", "nearest") != "nearest" or transform == "tf_crop_and_resize":
            return None
        pairs = zip(sizes(node.inputs[0]) or (None,), sizes(node.outputs[0]) or (None,))
        return ALL if all(old is not None and new is not None and new >= old for old, new in pairs) else SOME
    if node.op_type == "Pad":
        fill, pads = operand(node, 2), constant(operand(node, 1))
        content = attribute(node, "value", 0.0) if fill is None else constant(fill)  # an attribute in opset 2
        if attribute(node, "mode", "constant") == "constant" and (content is None or np.any(content)):
            return None
        return ALL if pads is not None and bool((pads >= 0).all()) else SOME
    return None


def _keeps_zero(node: ir.Node) -> bool:
    """Return whether it is a Relu, or a Clip whose constant limits are 0 or less and more than 0."""
    # Both are attributes in opset 6.
    limits = (
        attribute(node, name, end) if (value := operand(node, slot)) is None else constant(value)
        for slot, name, end in ((1, "min", -np.inf), (2, "max", np.inf))
    )
    low, high = (np.nan if item is None or np.size(item) != 1 else float(np.ravel(item)[0]) for item in limits)
    return node.op_type == "Relu" or (node.op_type == "Clip" and low <= 0 < high)
