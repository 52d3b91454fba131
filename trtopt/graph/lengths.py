"""How long an input may be: as long as the constants that are cut to its length, such as a transformer's positions.

Beyond that a Slice gives less than the length that what it is added to has, and a Gather reads past its table.
"""

from __future__ import annotations

import math

from onnx import ModelProto, NodeProto

from trtopt.graph.proto import Links, attribute, to_array

_CARRIED = (
    "Cast",
    "Expand",
    "Identity",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
)  # what they give has the values of what they read


def longest(proto: ModelProto) -> dict[tuple[str, int], int]:
    """Input and axis → the largest size that the model has constants for, where that is found."""
    links = Links(proto.graph)
    inputs = {value.name for value in proto.graph.input} - links.constants.keys()
    found: dict[tuple[str, int], int] = {}
    for node in links.nodes:
        table = links.constants.get(node.input[0]) if node.op_type in ("Slice", "Gather") else None
        if table is None:
            continue
        axis, size = _cut(links, node) if node.op_type == "Slice" else _looked_up(links, node)
        place = _place(links, size) if size else None
        if place is not None and place[0] in inputs and axis is not None and -len(table.dims) <= axis < len(table.dims):
            found[place] = min(found.get(place, table.dims[axis]), table.dims[axis])
    return found


def _cut(links: Links, node: NodeProto) -> tuple[int | None, str]:
    """The one axis that a Slice cuts from its beginning on, and the number that it is cut to."""
    start, end, *axes = node.input[1:4] if len(node.input) > 2 else ("", "")  # attributes say it before opset 10
    return _number(links, axes[0]) if axes else 0, end if _number(links, start) == 0 else ""


def _looked_up(links: Links, node: NodeProto) -> tuple[int, str]:
    """The axis that a Gather reads along, and the number up to which it does, from 0 on."""
    maker = _maker(links, node.input[1])
    counts = maker is not None and maker.op_type == "Range" and _number(links, maker.input[0]) == 0
    return attribute(node, "axis", 0), maker.input[1] if maker is not None and counts else ""


def _place(links: Links, name: str) -> tuple[str, int] | None:
    """The tensor and axis whose size this number is."""
    shape, axis = _maker(links, name), None
    if shape is not None and shape.op_type == "Gather":
        axis, shape = _number(links, shape.input[1]), links.makers.get(shape.input[0])
    elif shape is not None and attribute(shape, "end", None) == attribute(shape, "start", 0) + 1:
        axis = attribute(shape, "start", 0)
    if shape is None or shape.op_type != "Shape" or axis is None:
        return None
    return shape.input[0], axis


def _maker(links: Links, name: str) -> NodeProto | None:
    """What makes these values."""
    maker = links.makers.get(name)
    while maker is not None and maker.op_type in _CARRIED:
        maker = links.makers.get(maker.input[0])
    return maker


def _number(links: Links, name: str) -> int | None:
    """A constant that is one whole number."""
    tensor = links.constants.get(name)
    return int(to_array(tensor).reshape(())) if tensor is not None and math.prod(tensor.dims) == 1 else None
