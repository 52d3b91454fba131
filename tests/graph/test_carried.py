"""Where ONNX's inference may follow values, and where it would take gigabytes."""

from __future__ import annotations

import hostile_models
import numpy as np
import pytest
from graphs import model, node, rapidocr
from onnx import ModelProto

from trtopt.graph.carried import carries_little
from trtopt.graph.io import load_model
from trtopt.graph.proto import LARGE, skeleton


def computed(*nodes: str) -> ModelProto:
    """A length that is 2³⁰ once it is computed, then what takes it, such as "Range zero length one"."""
    powers = [node("Mul", f"m{index} two", f"m{index + 1}") for index in range(30)]
    made = [node(*text.split(" ", 1), f"n{index}") for index, text in enumerate(nodes)]
    last = f"n{len(nodes) - 1}"
    proto = model(
        [*powers, *made, node("Cast", last, "c", to=7), node("Cast", "c", "y", to=1)],
        weights={"m0": np.array([1]), "two": np.array([2]), "axis": np.array([0])},
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


@pytest.mark.parametrize(
    "proto",
    [
        hostile_models.doubled(34),
        hostile_models.doubled_shape(34),
        hostile_models.doubled_gather(34),
        hostile_models.function_doubling(34),
        hostile_models.sized(2**31),
        computed("ConstantOfShape m30"),
        computed("Expand two m30"),
        computed("Squeeze m30 axis", "Squeeze two axis", "Range n1 n0 n1"),
    ],
)
def test_long_values_are_not_followed(proto: ModelProto) -> None:
    assert not carries_little(proto)


@pytest.mark.parametrize("part", ["det", "rec", "cls"])
def test_real_models_with_dynamic_sizes_are(part: str) -> None:
    assert carries_little(skeleton(load_model(rapidocr(part)).proto, LARGE))


def test_positions_of_a_dynamic_length_are() -> None:
    """As a language model numbers its tokens: the length is the input's, beside a size that is known."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s one", "length"),
        node("Range", "zero length one", "positions"),
        node("Unsqueeze", "positions axis", "row"),
        node("Cast", "row", "y", to=1),
    ]
    weights = {"zero": np.int64(0), "one": np.int64(1), "axis": np.array([0])}
    assert carries_little(model(nodes, inputs={"x": ["batch", "length", 768]}, weights=weights))
