"""Find the largest length of an input: that of the constants that are cut to it, such as a transformer's positions.

Beyond that a Slice gives less than the length that what it is added to has, and a Gather reads past its table. Positions are
counted by a Range, or, as RoBERTa's, by adding up what isn't padding, with an offset: of 514 rows 512 are then for tokens.
"""

from __future__ import annotations

import math

from onnx import ModelProto, NodeProto

from trtopt.graph.op_types import COMPARING, RESHAPING
from trtopt.graph.proto import Links, attribute, to_array

Place = tuple[str, int]  # an input and one of its axes
_CARRIED = (*RESHAPING, "Cast", "Expand", "Identity")  # what they give has the values of what they read


def max_input_lengths(proto: ModelProto) -> dict[Place, int]:
    """Input and axis → the largest size that the model has constants for, where that is found.

    With padding a longer input may stay within a table; one that is filled doesn't.
    """
    links = Links(proto.graph)
    inputs = {value.name for value in proto.graph.input} - links.constants.keys()
    found: dict[Place, int] = {}
    for node in links.nodes:
        table = links.constants.get(node.input[0]) if node.op_type in ("Slice", "Gather") else None
        if table is None:
            continue
        axis: int | None = 0
        if node.op_type == "Slice":  # along one axis from its beginning on; attributes say it before opset 10
            start, end, *axes = node.input[1:4] if len(node.input) > 2 else ("", "")
            axis = _number(links, axes[0]) if axes else 0
            place, offset = _place(links, end) if _number(links, start) == 0 else None, -1
        else:
            axis = attribute(node, "axis", 0)
            place, offset = _reached(links, node.input[1]) or (None, 0)
        if place is None or place[0] not in inputs or axis is None or not -len(table.dims) <= axis < len(table.dims):
            continue
        most = table.dims[axis] - 1 - offset
        if most > 0:
            found[place] = min(found.get(place, most), most)
    return found


def _reached(links: Links, name: str) -> tuple[Place, int] | None:
    """The largest of these whole numbers where the input is filled: the size of its axis, and what is added to that."""
    maker = _maker(links, name)
    if maker is None or maker.op_type not in ("Range", "CumSum", "Mul", "Add", "Sub"):
        return None
    one, other = maker.input[:2]
    if maker.op_type == "Range":
        place = _place(links, other) if _number(links, one) == 0 else None
        return (place, -1) if place is not None else None
    if maker.op_type == "CumSum":
        mask, axis = _mask(links, one), _number(links, other)
        return None if not mask or axis is None or axis < 0 else ((mask, axis), -attribute(maker, "exclusive", 0))
    for varying, fixed in ((one, other), (other, one)) if maker.op_type != "Sub" else ((one, other),):
        added, reached = _number(links, fixed), _reached(links, varying)
        if reached is not None and maker.op_type == "Mul":
            return reached if _mask(links, fixed) else None
        if reached is not None and added is not None:
            return reached[0], reached[1] + (added if maker.op_type == "Add" else -added)
    return None


def _mask(links: Links, name: str) -> str:
    """The tensor that these zeros and ones are made of by a comparison, or an input that is called a mask; empty: neither."""
    certain = False
    while (maker := links.makers.get(name)) is not None and maker.op_type in (*COMPARING, *_CARRIED):
        certain |= maker.op_type in COMPARING
        varying = [item for item in maker.input if _number(links, item) is None]
        if maker.op_type in COMPARING and len(varying) != 1:
            break
        name = varying[0]
    return name if certain or "mask" in name.lower() else ""


def _place(links: Links, name: str) -> Place | None:
    """The tensor and axis whose size this number is."""
    shape, axis = _maker(links, name), None
    if shape is not None and shape.op_type == "Gather":
        axis, shape = _number(links, shape.input[1]), links.makers.get(shape.input[0])
    elif shape is not None and attribute(shape, "end", None) == attribute(shape, "start", 0) + 1:
        axis = attribute(shape, "start", 0)
    return None if shape is None or shape.op_type != "Shape" or axis is None else (shape.input[0], axis)


def _maker(links: Links, name: str) -> NodeProto | None:
    """Return what makes these values."""
    maker = links.makers.get(name)
    while maker is not None and maker.op_type in _CARRIED:
        maker = links.makers.get(maker.input[0])
    return maker


def _number(links: Links, name: str) -> int | None:
    """A constant that is one whole number."""
    tensor = links.constants.get(name)
    return int(to_array(tensor).reshape(())) if tensor is not None and math.prod(tensor.dims) == 1 else None
