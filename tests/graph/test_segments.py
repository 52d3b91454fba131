"""A graph in parts computes what it computed whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import conv_relu, values, written
from onnx import ModelProto, TensorProto, helper

from trtopt.core.errors import ModelError
from trtopt.graph.segments import divided, joined
from trtopt.ort.sessions import open_session


def _run(proto: ModelProto, feed: dict[str, Any]) -> dict[str, Any]:
    session = open_session(proto, threads=1, optimize=False)
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, feed)))


def _in_parts(proto: ModelProto, ends: list[str], feed: dict[str, Any]) -> dict[str, Any]:
    held = dict(feed)
    for segment in divided(proto, ends, {}):
        held |= _run(segment.proto, {name: held[name] for name in segment.inputs})
    return {value.name: held[value.name] for value in proto.graph.output}


def _skips() -> ModelProto:
    """Two outputs, one of them read again; a skip over two segments; a body that reads from outside."""
    return written(
        "(float[n,3,8,8] x) => (float[n,3,8,8] y, float[n,3,8,8] b) { [c0] a = Conv <pads = [1, 1, 1, 1]> (x, w) "
        "b = Relu (a) [c1] c = Conv <pads = [1, 1, 1, 1]> (b, v) d = If (which) <then_branch = t () => (float[] z) "
        "{ z = Add (a, b) }, else_branch = e () => (float[] z) { z = Sub (a, b) }> y = Add (c, d) }",
        w=values(3, 3, 3, 3), v=values(3, 3, 3, 3, seed=1), which=True,
    )  # fmt: skip


@pytest.mark.parametrize("ends", [["b"], ["a", "b", "c", "d"], ["x", "y"]])
def test_segments_in_turn_compute_what_the_whole_does(ends: list[str]) -> None:
    proto, feed = _skips(), {"x": values(2, 3, 8, 8, seed=2)}
    whole, parts = _run(proto, feed), _in_parts(proto, ends, feed)
    assert len(divided(proto, ends, {})) == 1 + len({"a", "b", "c", "d"}.intersection(ends))
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array, err_msg=name)


@pytest.mark.parametrize("start", [0, 2])
def test_the_rest_as_one_model_computes_what_its_segments_do(start: int) -> None:
    proto, held = _skips(), {"x": values(2, 3, 8, 8, seed=2)}
    segments, whole = divided(proto, ["a", "b", "c"], {}), _run(proto, held)
    for segment in segments[:start]:
        held |= _run(segment.proto, {name: held[name] for name in segment.inputs})
    rest = joined(segments[start:], list(whole), {})
    held |= _run(rest.proto, {name: held[name] for name in rest.inputs})
    for name, array in whole.items():
        np.testing.assert_array_equal(held[name], array, err_msg=name)


def test_an_input_of_one_node_can_have_a_value_of_its_own() -> None:
    proto = _skips()
    (last,) = divided(proto, ["b"], {("c1", 0): "b/other"})[1:]
    assert set(last.inputs) == {"a", "b", "b/other"}
    (first,) = divided(proto, [], {("c0", 0): "x/other"})
    assert first.inputs == ("x/other",)


def test_an_input_that_two_segments_have_is_joined_once() -> None:
    """Where the tensor that it stands for is made inside, it is that tensor; else one input."""
    text = "(float[n,4] x) => (float[n,4] y) { h = MatMul (x, w) [m1] i = MatMul (h, w) [m2] y = Add (h, i) }"
    proto, x = written(text, w=values(4, 4)), values(2, 4, seed=1)
    segments = divided(proto, ["h", "i"], {("m1", 0): "h/other", ("m2", 0): "h/other"})
    assert [(part.inputs, part.outputs) for part in segments] == [
        (("x",), ("h",)), (("h/other",), ("i",)), (("h/other", "i"), ("y",))
    ]  # fmt: skip
    assert [len(part.proto.graph.initializer) for part in segments] == [1, 1, 0]
    shapes = [value.type.tensor_type.shape for part in segments for value in part.proto.graph.input]
    assert {len(shape.dim) for shape in shapes} == {2} and not any(dim.dim_param for s in shapes for dim in s.dim)
    whole, y = joined(segments, ["y"], {"h/other": "h"}), _run(proto, {"x": x})["y"]
    assert (whole.inputs, whole.outputs) == (("x",), ("y",))
    np.testing.assert_array_equal(_run(whole.proto, {"x": x})["y"], y)
    rest = joined(segments[1:], ["y", "i"], {"h/other": "h"})
    assert (rest.inputs, rest.outputs) == (("h/other",), ("i", "y"))
    np.testing.assert_array_equal(_run(rest.proto, {"h/other": x @ values(4, 4)})["y"], y)
    assert joined(segments[2:], ["y"], {}).inputs == ("h/other", "i")


def test_a_tensor_of_unknown_type_is_named() -> None:
    proto = conv_relu()
    proto.graph.node.insert(1, helper.make_node("Strange", ["h"], ["s"], "s", domain="there"))
    proto.graph.node[2].input[0] = "s"
    proto.opset_import.append(helper.make_opsetid("there", 1))
    with pytest.raises(ModelError, match="the type of the tensor 's'"):
        divided(proto, ["s"], {})
    assert divided(proto, ["h"], {})[0].proto.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
