"""Lowering the opset keeps the outputs, or names what it can't express."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from trtopt.core.errors import ModelError
from trtopt.graph.io import load_model
from trtopt.graph.passes.opset import lower_opset
from trtopt.ort.difference import difference
from trtopt.ort.sessions import OnnxSession


def ints(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


CASES: dict[str, ModelProto] = {
    "reduce": model([node("ReduceMean", "x a", "y", keepdims=0)], weights={"a": ints(2, 3)}, opset=18),
    "reduce all": model([node("ReduceMax", "x", "y", keepdims=1)], opset=18),
    "split uneven": model(
        [node("Split", "x", "a b", num_outputs=2, axis=1), node("Concat", "b a", "y", axis=1)], opset=18
    ),
    "split sizes": model(
        [node("Split", "x s", "a b", axis=1), node("Concat", "b a", "y", axis=1)], weights={"s": ints(1, 2)}, opset=18
    ),
    "pad axes": model(
        [node("Pad", "x p v a", "y")],
        weights={"p": ints(1, 2, 0, 3), "v": np.float32(0.5).reshape(()), "a": ints(-1, 2)},
        opset=18,
    ),
    "pad": model([node("Pad", "x p", "y")], weights={"p": ints(0, 0, 1, 1, 0, 0, 1, 1)}, opset=19),
    "cast": model([node("Cast", "x", "h", to=10), node("Cast", "h", "y", to=1)], opset=19),
    "resize": model(
        [node("Resize", "x  s".replace("  ", " r "), "y", mode="nearest", antialias=0)],
        weights={"r": np.zeros(0, np.float32), "s": np.array([1, 1, 2, 2], np.float32)},
        opset=18,
    ),
    "average pool": model([node("AveragePool", "x", "y", kernel_shape=[2, 2], dilations=[1, 1])], opset=19),
    "scatter": model(
        [node("ScatterND", "x i u", "y", reduction="add")],
        weights={"i": ints(0).reshape(1, 1), "u": values(1, 3, 8, 8)},
        opset=18,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_stay(name: str) -> None:
    proto = CASES[name]
    before = proto.SerializeToString()
    lowered = load_model(lower_opset(proto, 17))
    assert lowered.opset == 17 and lowered.proto.ir_version == 8
    assert proto.SerializeToString() == before
    for batch in (1, 3):
        inputs = {"x": values(batch, 3, 8, 8)}
        expected = OnnxSession(proto, threads=1)(inputs)
        gap = difference(expected, OnnxSession(lowered.proto, threads=1)(inputs))
        assert gap.scale > 0 and gap.relative < 1e-6


def test_an_old_model_is_given_back_as_it_is() -> None:
    proto = model([node("Relu", "x", "y")])
    assert lower_opset(proto, 17) is proto


@pytest.mark.parametrize(
    ("proto", "word"),
    [
        (model([node("Mish", "x", "y", "m")], opset=18), "m (Mish): came with opset 18"),
        (model([node("ReduceMean", "x a", "y", "r")], inputs={"x": [2, 3], "a": [1]}, opset=18), "aren't constant"),
        (
            model([node("Split", "x", "a b", "s", num_outputs=2), node("Add", "a b", "y")], opset=18),
            "dynamic dimension",
        ),
        (
            model(
                [node("Resize", "x r s", "y", "z", axes=[2, 3])],
                weights={"r": np.zeros(0, np.float32), "s": np.array([2, 2], np.float32)},
                opset=18,
            ),
            "axes",
        ),
        (
            model([node("AveragePool", "x", "y", "p", kernel_shape=[2, 2], dilations=[2, 2])], opset=19),
            "dilations",
        ),
    ],
)
def test_what_an_opset_cannot_express_is_named(proto: ModelProto, word: str) -> None:
    if "aren't" in word:
        proto.graph.input[1].type.tensor_type.elem_type = 7
    with pytest.raises(ModelError) as caught:
        lower_opset(proto, 17)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("proto", "word"),
    [
        (model([node("BitShift", "x x", "y", "b", direction="LEFT")], opset=18, dtype=TensorProto.UINT8), ""),
        (
            model(
                [node("Cast", "x", "a", "c", to=TensorProto.FLOAT8E4M3FN), node("Cast", "a", "y", "d", to=1)], opset=19
            ),
            "c (Cast): its output 'a' is tensor(float8e4m3fn), which came later",
        ),
        (
            model(
                [node("Pad", "x p", "y", "p", mode="wrap")],
                weights={"p": np.array([0, 0, 1, 1] * 2, np.int64)},
                opset=19,
            ),
            'its mode "wrap" came with opset 19',
        ),
        (
            model(
                [node("GridSample", "x g", "y", "g", mode="linear")],
                inputs={"x": [1, 1, 4, 4, 4], "g": [1, 2, 2, 2, 3]},
                opset=20,
            ),
            "images of 4 dimensions",
        ),
        (
            model([node("AveragePool", "x", "y", "a", kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1)], opset=19),
            "",
        ),
        (
            model(
                [node("AveragePool", "x", "y", "a", kernel_shape=[1, 1], strides=[3, 3], ceil_mode=1)],
                inputs={"x": [1, 1, 9, 9]},
                opset=19,
            ),
            "its last window would start behind the data",
        ),
        (
            model(
                [node("AveragePool", "x", "y", "a", kernel_shape=[2, 2], ceil_mode=1)],
                inputs={"x": ["n", 1, "h", 9]},
                opset=19,
            ),
            "its input's size is dynamic",
        ),
    ],
    ids=["old type", "new type", "wrap", "volume", "window inside", "window behind", "size unknown"],
)
def test_types_and_values_that_an_older_opset_lacks(proto: ModelProto, word: str) -> None:
    if not word:
        assert load_model(lower_opset(proto, 17)).opset == 17
        return
    with pytest.raises(ModelError) as caught:
        lower_opset(proto, 17)
    assert word in str(caught.value)


def test_every_problem_is_listed() -> None:
    proto: Any = model([node("Mish", "x", "a", "m1"), node("Mish", "a", "y", "m2")], opset=18)
    with pytest.raises(ModelError, match="2 node") as caught:
        lower_opset(proto, 17)
    assert "m1" in str(caught.value) and "m2" in str(caught.value)
