"""Operators that no TensorRT has, written in standard ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.ort.sessions import OnnxSession


def same(proto: ModelProto, **feed: NDArray[Any]) -> set[str]:
    """The operators that are left, after both graphs gave the same in ONNX Runtime."""
    model = load_model(proto).proto
    folded, report = fold(model)
    assert not report.problem
    wanted, found = OnnxSession(model)(feed), OnnxSession(folded)(feed)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)
    return {node.op_type for node in folded.graph.node}


@pytest.mark.parametrize(("op", "other"), [("LessOrEqual", "Greater"), ("GreaterOrEqual", "Less")])
def test_integers_are_compared_without_or_equal(op: str, other: str) -> None:
    """TensorRT-RTX's builder ends the process at some decoders' steps with it."""
    kept = [node(op, "a b", "c"), node("Cast", "c", "y", to=TensorProto.FLOAT)]
    places, floats = np.arange(12, dtype=np.int64).reshape(3, 4), values(3, 4)
    floats[0, 0] = np.nan
    proto = model(kept, inputs={"a": ["n", 4], "b": ["n", 1]})
    assert op in same(proto, a=floats, b=floats[:, :1]), "NaN is neither greater nor less"
    for value in proto.graph.input:
        value.type.tensor_type.elem_type = TensorProto.INT64
    operators = same(proto, a=places, b=np.array([[2], [4], [99]]))
    assert operators == {other, "Not", "Cast"}


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize(
    "lengths", [np.int64(2), np.int64(3), np.array([1, 3], np.int64)], ids=["even", "uneven", "all"]
)
def test_a_list_of_parts_is_split(opset: int, lengths: NDArray[np.int64]) -> None:
    nodes = [
        node("SplitToSequence", "x n", "s", axis=1),
        node("SequenceAt", "s zero", "a"),
        node("SequenceAt", "s last", "b"),
        node("Concat", "b a", "y", axis=1),
    ]
    weights = {"n": np.asarray(lengths), "zero": np.array(0), "last": np.array(-1)}
    proto = model(nodes, weights=weights, inputs={"x": ["batch", 4, 5]}, opset=opset)
    assert same(proto, x=values(2, 4, 5)) == {"Split", "Concat"}
