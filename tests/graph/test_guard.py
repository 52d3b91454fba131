"""What a pass gives is looked at before it is used."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import conv_relu, model, node, values, written
from onnx import ModelProto, helper, numpy_helper

from trtopt.core.errors import ModelError
from trtopt.graph.guard import _equal, cheap, fault, guarded, invalid
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.result import PassResult
from trtopt.graph.view import to_ir


def changed(proto: ModelProto, operator: str) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(proto)
    copy.graph.node[-1].op_type = operator
    return copy


IMAGE = "(float[1,3,8,8] x) => (float[] y)"
SHAPED = written("(float[2,3] x) => (float[] y) { y = Reshape (x, s) }", s=[3, 2])
WRONG = written("(float[2,3] x) => (float[] y) { y = Reshape (x, s) }", s=[4, 2])
CODES = written(
    f"{IMAGE} {{ q = QuantizeLinear (x, s, z) h = DequantizeLinear (q, s, z) y = Relu (h) }}",
    13,
    s=np.float32(1),
    z=np.int8(0),
)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (written(f"{IMAGE} {{ y = Relu (x) }}"), "Relu", ""),
        (written(f"{IMAGE} {{ y = Relu (x) }}"), "Neg", "output 'y' has other values"),
        (conv_relu(inputs={"x": [1, 3, 640, 640]}), "Neg", ""),  # costs much
        (conv_relu(), "Frobnicate", "Frobnicate"),
        (
            written(f"{IMAGE} {{ y = Relu (x) }}"),
            written(f"{IMAGE.replace('y', 'z')} {{ z = Relu (x) }}"),
            "outputs are z, no longer y",
        ),
        (SHAPED, WRONG, "doesn't run any more"),
        # Numbers that are drawn, text, no numbers, and what the evaluator can't run.
        (written(f"{IMAGE} {{ y = RandomNormalLike <seed = 1.0> (x) }}"), "RandomNormalLike", ""),
        (written(f"{IMAGE} {{ y = Bernoulli <seed = 1.0> (x) }}"), "Bernoulli", ""),
        (model([node("Identity", "x", "y")], inputs={"x": [2]}, dtype=8), "Identity", ""),
        (model([node("Identity", "x", "y")], inputs={"x": [2]}, dtype=14), "Identity", ""),
        (written(f"{IMAGE} {{ n = Neg (x) l = Log (n) r = Sqrt (n) h = Add (l, r) y = Relu (h) }}"), "Relu", ""),
        (written("(float[0] x) => (float[] y) { y = Identity (x) }"), "Identity", ""),
        (CODES, "Neg", ""),
    ],
)
def test_what_can_not_stand_for_a_model_has_a_fault(
    before: ModelProto, after: ModelProto | str, told: str, recwarn: pytest.WarningsRecorder
) -> None:
    after = changed(before, after) if isinstance(after, str) else after
    found = fault(before, after)
    assert told in found if told else found == "", found
    assert invalid(before) == "" and (told != "Frobnicate" or told in invalid(after))
    assert not recwarn.list


@pytest.mark.parametrize(("off", "noticed"), [(1e-5, False), (5e-4, False), (3e-3, True)])
def test_small_differences_of_rounding_are_none(off: float, noticed: bool) -> None:
    proto = conv_relu(inputs={"x": [1, 3, 8, 8]})
    near = ModelProto()
    near.CopyFrom(proto)
    for weight in near.graph.initializer:
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1 + off), weight.name))
    assert bool(fault(proto, near)) is noticed


def test_what_costs_much_or_is_not_known_is_not_run() -> None:
    """Each is just beyond one limit, and just within it the difference is seen."""

    def seen(proto: ModelProto) -> bool:
        return fault(proto, changed(proto, "Neg")) != ""

    def chain(count: int) -> ModelProto:
        names = ["x", *(f"t{index}" for index in range(count - 1)), "y"]
        return model([node("Relu", *names) for names in pairwise(names)], inputs={"x": [2]})

    assert seen(chain(256)) and not seen(chain(257))
    within, beyond = (model([node("Relu", "x", "y")], inputs={"x": ["n", size]}) for size in (4096, 4097))
    assert seen(within) and not seen(beyond)  # two of them, read and given
    text = "(float[1,8,%d,23] x) => (float[] y) { h = Conv (x, w) y = Relu (h) }"
    within, beyond = (written(text % size, w=values(8, 8, 8, 8)) for size in (23, 24))
    assert seen(within) and not seen(beyond) and cheap(beyond) is False
    assert cheap(chain(256)) is True and cheap(chain(257)) is False
    assert not seen(written("(float[2,2] x) => (float[] y) { n = NonZero (x) f = Cast <to = 1> (n) y = Relu (f) }"))


def test_numbers_that_are_drawn_are_not_taken_for_each_other() -> None:
    """Libraries merge two draws of one shape, and drop a Dropout in training."""
    draws = [node("RandomNormalLike", "x", name, name) for name in ("a", "b")]
    proto = model([*draws, node("Sub", "a b", "y", "sub")])
    once = model([draws[0], node("Sub", "a a", "y", "sub")])
    assert fault(proto, once) == "it draws random numbers 1 times, no longer 2"
    made, report = fold(proto)
    assert [item.op_type for item in made.graph.node].count("RandomNormalLike") == 2
    assert "draws random numbers" in report.problem or not report.problem
    training = model([node("Dropout", "x r t", "y", "drop")], weights={"r": np.float32(0.5), "t": np.array(True)})  # type: ignore[dict-item]
    assert [item.op_type for item in fold(training)[0].graph.node] == ["Dropout"]
    assert fault(training, model([node("Identity", "x", "y")])) == "it draws random numbers 0 times, no longer 1"
    for ratio, mode in ((0.0, True), (0.5, False)):  # draws nothing
        silent = model([node("Dropout", "x r t", "y", "drop")], weights={"r": np.float32(ratio), "t": np.array(mode)})  # type: ignore[dict-item]
        assert fault(silent, model([node("Identity", "x", "y")])) == ""
    told = helper.make_node("Dropout", ["x", "r", "t"], ["y"], "drop")
    open_mode = model([told], weights={"r": np.float32(0.5)})  # type: ignore[dict-item]
    open_mode.graph.input.append(helper.make_tensor_value_info("t", 9, []))
    assert "no longer 1" in fault(open_mode, model([node("Identity", "x", "y")]))


def test_what_a_pass_made_is_used_only_where_it_is_the_same() -> None:
    proto = conv_relu(inputs={"x": [1, 3, 8, 8]})
    made = guarded(proto, PassResult(to_ir(changed(proto, "Relu")), {"c": "c"}), "it can't be", "do that")
    assert made is not proto and [item.op_type for item in made.graph.node] == ["Conv", "Relu"]
    assert guarded(proto, PassResult(to_ir(changed(proto, "Neg"))), "it can't be", "do that") is proto
    with pytest.raises(ModelError, match=r"it can't be \(its output 'y' has other values .*\); do that"):
        guarded(proto, PassResult(to_ir(changed(proto, "Neg")), {"c": "c"}), "it can't be", "do that")


def test_functions_are_looked_into() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[2] x) => (float[2] y) {y = own.twice(x)}
    <domain: "own", opset_import: ["": 17]> twice (a) => (b) {OPERATION}"""
    bodies = ("b = Add(a, a)", "c = Neg(a) b = Add(c, a)", "b = RandomNormalLike(a)")
    once, other, random = (onnx.parser.parse_model(text.replace("OPERATION", it)) for it in bodies)
    assert "has other values" in fault(once, other) and fault(once, once) == ""
    assert "draws" not in fault(random, random) and fault(random, random) == ""


def test_declared_outputs_stay_as_they_are() -> None:
    proto = conv_relu(inputs={"x": ["n", 3, 8, 8]}, outputs={"y": ["m", 4, 8, "w"]})
    made = guarded(proto, PassResult(to_ir(changed(proto, "Relu")), {"c": "c"}), "", "")
    assert made.graph.output == proto.graph.output and not made.graph.value_info


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (np.ones((2, 3)), np.ones((2, 3)), True),
        (np.ones(3), np.ones((1, 3)), False),
        (np.ones(3, np.float32), np.ones(3, np.float64), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array([1 + 1j]), np.array([1 + 5j]), False),
        (np.array([np.nan, 1]), np.array([np.nan, 1]), True),
        (np.array([np.nan, 1]), np.array([0, 1]), False),
        (np.array([np.inf, 1]), np.array([-np.inf, 1]), False),
        (np.array([1000.0, 0.0]), np.array([1000.0, 0.5]), True),  # of the largest value
        (np.array([1000.0, 0.0]), np.array([1000.0, 1.5]), False),
        (np.array([1e6, 1.0, np.inf]), np.array([1e6, 1.5, np.inf]), True),
        (np.array(["a", "b"]), np.array(["a", "c"]), False),
        ([np.ones(2), np.ones(3)], [np.ones(2), np.zeros(3)], False),
        ([np.ones(2)], [np.ones(2), np.ones(2)], False),
        (None, np.ones(1), False),
        ({1: 2.0}, {1: 2.0}, True),
        ({1: 2.0}, None, False),
    ],
)
def test_values_are_the_same_in_type_shape_and_content(old: Any, new: Any, same: bool) -> None:
    assert _equal(old, new) is same


def test_the_evaluator_is_not_believed_where_it_is_wrong() -> None:
    """Of opset 9 to 13 it mixes the batch's statistics into BatchNormalization: folding would be refused for that."""
    weights = {"w": values(4, 3, 1, 1), "s": values(4, seed=1), "b": values(4, seed=2), "m": values(4, seed=3)}
    nodes = [node("Conv", "x w", "h"), node("BatchNormalization", "h s b m v", "y")]
    for opset in (9, 11, 13, 15):
        proto = model(nodes, inputs={"x": [1, 3, 4, 4]}, weights={**weights, "v": np.ones(4, np.float32)}, opset=opset)
        made, report = fold(proto)
        assert not report.problem and [item.op_type for item in made.graph.node] == ["Conv"]
