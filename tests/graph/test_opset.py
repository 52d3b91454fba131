"""Lowering the opset keeps the outputs, or names what it can't express."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

from trtopt.core.errors import ModelError
from trtopt.data.difference import difference
from trtopt.graph.io import load_model, save_model
from trtopt.graph.lazy_weights import is_lazy
from trtopt.graph.passes.opset import at_opset, to_ir_at
from trtopt.graph.proto import opset_version, whole_copy
from trtopt.graph.view import to_proto
from trtopt.ort.sessions import OnnxSession


def ints(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def test_a_model_of_other_operators_alone_needs_no_raising() -> None:
    proto = helper.make_model(
        helper.make_graph(
            [helper.make_node("Own", ["x"], ["y"], "own", domain="mine")],
            "g",
            [helper.make_tensor_value_info("x", 1, [1])],
            [helper.make_tensor_value_info("y", 1, [1])],
        ),
        opset_imports=[helper.make_opsetid("mine", 1)],
    )
    assert [item.op_type for item in to_ir_at(proto, 19).graph] == ["Own"]


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
    lowered = load_model(at_opset(proto, 17))
    assert lowered.opset == 17 and lowered.proto.ir_version == 8
    assert proto.SerializeToString() == before
    for batch in (1, 3):
        inputs = {"x": values(batch, 3, 8, 8)}
        expected = OnnxSession(proto, threads=1)(inputs)
        gap = difference(expected, OnnxSession(lowered.proto, threads=1)(inputs))
        assert gap.scale > 0 and gap.relative < 1e-6


def test_an_old_model_is_given_back_as_it_is() -> None:
    proto = model([node("Relu", "x", "y")])
    assert at_opset(proto, 17) is proto


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
        at_opset(proto, 17)
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
            model([node("AveragePool", "x", "y", "a", kernel_shape=[2, 2], ceil_mode=1)], opset=19),
            "which meant something else before",
        ),
    ],
    ids=["old type", "new type", "wrap", "volume", "window"],
)
def test_types_and_values_that_an_older_opset_lacks(proto: ModelProto, word: str) -> None:
    if not word:
        assert load_model(at_opset(proto, 17)).opset == 17
        return
    with pytest.raises(ModelError) as caught:
        at_opset(proto, 17)
    assert word in str(caught.value)


def test_what_the_target_says_alike_stays() -> None:
    """Axes are an input from 18 on: the rule for that is for older targets alone."""
    proto = model([node("ReduceMax", "x a", "y", keepdims=0)], weights={"a": ints(2, 3)}, opset=20)
    lowered = at_opset(proto, 18)
    assert opset_version(lowered) == 18
    assert list(lowered.graph.node[0].input) == ["x", "a"]


def test_every_problem_is_listed() -> None:
    proto: Any = model([node("Mish", "x", "a", "m1"), node("Mish", "a", "y", "m2")], opset=18)
    with pytest.raises(ModelError, match="2 node") as caught:
        at_opset(proto, 17)
    assert "m1" in str(caught.value) and "m2" in str(caught.value)


@pytest.mark.parametrize(("old", "new"), [(11, 13), (11, 22), (18, 19), (18, 22)])
def test_raising_keeps_outputs_names_and_weights_in_their_files(old: int, new: int, tmp_path: Path) -> None:
    weight = values(64, 64, 3, 3, scale=0.05)
    nodes = [node("Conv", "x w", "h", "c", pads=[1] * 4), node("Relu", "h", "r", "a"), node("Relu", "r", "y", "b")]
    proto = model(nodes, inputs={"x": ["n", 64, 6, 6]}, weights={"w": weight}, opset=old)
    save_model(proto, tmp_path / "m.onnx", inline_limit=0)
    lazy = load_model(tmp_path / "m.onnx", lazy=True).proto
    raised = to_proto(to_ir_at(lazy, new))
    assert opset_version(raised) == new
    assert [item.name for item in raised.graph.node] == ["c", "a", "b"]
    (stub,) = raised.graph.initializer
    assert is_lazy(stub) and not stub.raw_data
    inputs = {"x": values(2, 64, 6, 6)}
    expected = OnnxSession(proto, threads=1)(inputs)
    assert difference(expected, OnnxSession(whole_copy(raised), threads=1)(inputs)).relative < 1e-6


def test_scales_of_groups_become_scales_of_channels_or_are_refused() -> None:
    """onnxscript's converter passes over a GroupNormalization whose channels it doesn't know."""
    weights = {"s": values(2), "b": values(2, seed=1)}

    def grouped(channels: int | str) -> ModelProto:
        nodes = [node("GroupNormalization", "x s b", "y", "g", num_groups=2)]
        return model(nodes, inputs={"x": [2, channels, 4, 4]}, weights=weights, opset=18)

    known = grouped(6)
    raised = to_proto(to_ir_at(known, 21))
    inputs = {"x": values(2, 6, 4, 4)}
    expected, found = (ReferenceEvaluator(item).run(None, inputs)[0] for item in (known, raised))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match=r"opset 18 can't be raised to 21: g scales groups"):
        to_ir_at(grouped("c"), 21)


def test_what_onnx_cannot_raise_says_why() -> None:
    proto = model([node("Upsample", "x", "y", "up", scales=[1.0, 1.0, 2.0, 2.0])], opset=7)
    proto.graph.node[0].op_type = "ScatterElement"
    with pytest.raises(ModelError, match=r"the model of opset 7 can't be raised to 13: .*ScatterElement"):
        to_ir_at(proto, 13)
