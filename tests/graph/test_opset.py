"""Lowering the opset keeps the outputs, or names what it can't express."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import model, node, values, written
from numpy.typing import NDArray
from onnx import ModelProto
from onnx.parser import parse_model

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
    proto = parse_model(
        '<ir_version: 8, opset_import: ["mine": 1]> g (float[1] x) => (float[1] y) { y = mine.Own (x) }'
    )
    assert [item.op_type for item in to_ir_at(proto, 19).graph] == ["Own"]


def image(text: str, opset: int = 18, **weights: Any) -> ModelProto:
    return written(f"(float[batch,3,8,8] x) => (float[] y) {{ {text} }}", opset, **weights)


TWO, NONE = np.array([1, 1, 2, 2], np.float32), np.zeros(0, np.float32)
CASES: dict[str, ModelProto] = {
    "reduce": image("y = ReduceMean <keepdims = 0> (x, a)", a=ints(2, 3)),
    "reduce all": image("y = ReduceMax <keepdims = 1> (x)"),
    "split uneven": image("a, b = Split <num_outputs = 2, axis = 1> (x) y = Concat <axis = 1> (b, a)"),
    "split sizes": image("a, b = Split <axis = 1> (x, s) y = Concat <axis = 1> (b, a)", s=ints(1, 2)),
    "pad": image("y = Pad (x, p)", 19, p=ints(0, 0, 1, 1, 0, 0, 1, 1)),
    "cast": image("h = Cast <to = 10> (x) y = Cast <to = 1> (h)", 19),
    "resize": image('y = Resize <mode = "nearest", antialias = 0> (x, r, s)', r=NONE, s=TWO),
    "average pool": image("y = AveragePool <kernel_shape = [2, 2], dilations = [1, 1]> (x)", 19),
    "scatter": image('y = ScatterND <reduction = "add"> (x, i, u)', i=[[0]], u=values(1, 3, 8, 8)),
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
        (image("[m] y = Mish (x)"), "m (Mish): came with opset 18"),
        (written("(float[2,3] x, int64[1] a) => (float[] y) { y = ReduceMean (x, a) }", 18), "aren't constant"),
        (image("a, b = Split <num_outputs = 2> (x) y = Add (a, b)"), "dynamic dimension"),
        (image("y = Pad (x, p, , a)", p=ints(1, 2, 0, 3), a=ints(-1, 2)), "has 4 inputs, opset 13 takes 3"),
        (image("y = Resize <axes = [2, 3]> (x, r, s)", r=NONE, s=TWO[2:]), "axes"),
        (image("y = AveragePool <kernel_shape = [2, 2], dilations = [2, 2]> (x)", 19), "dilations"),
        (
            image("[c] a = Cast <to = 17> (x) y = Cast <to = 1> (a)", 19),
            "c (Cast): its output 'a' is tensor(float8e4m3fn), which came later",
        ),
        (image('y = Pad <mode = "wrap"> (x, p)', 19, p=ints(*[0, 0, 1, 1] * 2)), 'its mode "wrap" came with opset 19'),
        (
            written(
                '(float[1,1,4,4,4] x, float[1,2,2,2,3] g) => (float[] y) { y = GridSample <mode = "linear"> (x, g) }',
                20,
            ),
            "images of 4 dimensions",
        ),
        (
            image("y = AveragePool <kernel_shape = [2, 2], ceil_mode = 1> (x)", 19),
            "which meant something else before",
        ),
    ],
)
def test_what_an_opset_cannot_express_is_named(proto: ModelProto, word: str) -> None:
    with pytest.raises(ModelError) as caught:
        at_opset(proto, 17)
    assert word in str(caught.value)


def test_a_type_that_the_older_operator_has_too_stays() -> None:
    proto = written('(uint8[4] x) => (uint8[] y) { y = BitShift <direction = "LEFT"> (x, x) }', 18)
    assert load_model(at_opset(proto, 17)).opset == 17


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


def test_scales_of_groups_are_refused_where_channels_have_them() -> None:
    proto = image("[g] y = GroupNormalization <num_groups = 1> (x, s, s)", s=values(1))
    assert opset_version(to_proto(to_ir_at(proto, 19))) == 19
    with pytest.raises(ModelError, match=r"opset 18 can't be raised to 21: g scales groups"):
        to_ir_at(proto, 21)


def test_what_onnx_cannot_raise_says_why() -> None:
    proto = model([node("Upsample", "x", "y", "up", scales=[1.0, 1.0, 2.0, 2.0])], opset=7)
    proto.graph.node[0].op_type = "ScatterElement"
    with pytest.raises(ModelError, match=r"the model of opset 7 can't be raised to 13: .*ScatterElement"):
        to_ir_at(proto, 13)
