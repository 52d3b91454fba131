"""Loops of a known number of steps become their steps, with the same results."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import values
from onnx import ModelProto, numpy_helper

from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.unrolled import NODES, unrolled
from trtopt.ort.sessions import OnnxSession

BODY = """
    less = Mul(old, half)
    counted = Cast <to = 1> (turn)
    some = Add(less, counted)
    positive = Greater(counted, half)
    new = If (positive) <then_branch = a () => (float[n,4] p) { p = Add(some, x) }, else_branch = b () => (float[n,4] q) { q = Relu(some) }>
    seen = ReduceSum <keepdims = 0> (new)
"""  # noqa: E501


def looped(going: str = "on = Identity(go)", condition: str = "yes", steps: int | None = 3) -> ModelProto:
    """A value that is carried, one that is gathered, the number of the step, an If that takes values from outside."""
    count = "" if steps is None else f", int64 turns = {{{steps}}}"
    given = ", int64 turns" if steps is None else ""
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x{given}, bool some_flag) => (float[n,4] y, float[k] all)
        <bool yes = {{1}}, float half = {{0.5}}{count}> {{
            flag = Identity(some_flag)
            y, all = Loop (turns, {condition}, x) <body = step (int64 turn, bool go, float[n,4] old)
                => (bool on, float[n,4] new, float seen) {{
                {BODY}
                {going}
            }}>
        }}"""
    )


FEED = {"x": values(2, 4), "some_flag": np.array(True)}


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("going", ["on = Identity(go)", "on = Identity(yes)", "on = Constant <value = bool {1}> ()"])
@pytest.mark.parametrize("conditional", [True, False])
def test_the_results_stay(steps: int, going: str, conditional: bool) -> None:
    proto = looped(going, steps=steps)
    if not conditional:
        (loop,) = (node for node in proto.graph.node if node.op_type == "Loop")
        loop.input[1] = ""
    proto = load_model(proto).proto
    result = unrolled(proto)
    onnx.checker.check_model(result)
    assert all(node.op_type != "Loop" for node in result.graph.node)
    expected, found = OnnxSession(proto)(FEED), OnnxSession(result)(FEED)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)
    folded, report = fold(proto)
    assert not report.problem and all(node.op_type != "Loop" for node in folded.graph.node)
    np.testing.assert_allclose(OnnxSession(folded)(FEED)["y"], expected["y"], rtol=1e-5)


@pytest.mark.parametrize(
    "proto",
    [
        looped(steps=None),
        looped(condition="flag"),
        looped("on = Less(counted, half)"),
        looped("on = Identity(flag)"),
        looped(steps=0),  # what is gathered has no entry
        looped(steps=NODES),
    ],
    ids=["steps by an input", "condition by an input", "ends by itself", "ends from outside", "no step", "too many"],
)
def test_what_is_not_known_or_too_much_stays(proto: ModelProto) -> None:
    assert unrolled(proto) is proto


def test_a_loop_of_no_steps_gives_what_it_began_with() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y) <bool yes = {1}, int64 turns = {0}> {
            y = Loop (turns, yes, x) <body = step (int64 turn, bool go, float[n,4] old) => (bool on, float[n,4] new) {
                new = Relu(old)
                on = Identity(go)
            }>
        }"""
    )
    np.testing.assert_array_equal(OnnxSession(unrolled(proto))({"x": FEED["x"]})["y"], FEED["x"])


def test_two_loops_of_one_body_keep_their_own_values() -> None:
    body = """<body = step (int64 turn, bool go, float[n,4] old) => (bool on, float[n,4] new) <float[4] add = {1, 2, 3, 4}> {
        new = Add(old, add)
        on = Identity(go)
    }>"""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y)
        <bool yes = {{1}}, int64 two = {{2}}, int64 three = {{3}}> {{
            once = Loop (two, yes, x) {body}
            y = Loop (three, yes, once) {body}
        }}"""
    )
    other = numpy_helper.from_array(np.full(4, 10, np.float32), "add")
    [node for node in proto.graph.node if node.op_type == "Loop"][1].attribute[0].g.initializer[0].CopyFrom(other)
    found = OnnxSession(unrolled(proto))({"x": FEED["x"]})["y"]
    np.testing.assert_allclose(found, FEED["x"] + 2 * np.arange(1, 5, dtype=np.float32) + 30, rtol=1e-6)
