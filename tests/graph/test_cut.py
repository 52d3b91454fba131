"""Models that end at tensors inside."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import values, written
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from trtopt.core.errors import UsageError
from trtopt.graph.cut import cut, ends_before
from trtopt.graph.io import load_model


def detector() -> ModelProto:
    """Boxes and scores of x, an NMS that reads both and another input, and an output without a part in it."""
    return written(
        "(float[1,5,4] x, int64[1] most) => (float[] out, float[1,5,4] raw) { h = MatMul (x, w) boxes = Relu (h) "
        "flat = Sigmoid (h) scores = Transpose <perm = [0, 2, 1]> (flat) found = NonMaxSuppression (boxes, scores, most) "
        "out = Cast <to = 1> (found) raw = Neg (boxes) }",
        w=values(4, 4),
    )


def test_what_the_ends_need_stays_and_computes_the_same() -> None:
    found = load_model(cut(detector(), "boxes, scores"))
    assert [item.name for item in found.inputs] == ["x"]
    assert [(item.name, item.shape) for item in found.outputs] == [("boxes", (1, 5, 4)), ("scores", (1, 4, 5))]
    assert [item.op_type for item in found.proto.graph.node] == ["MatMul", "Relu", "Sigmoid", "Transpose"]
    x = values(1, 5, 4, seed=1)
    expected = x @ values(4, 4)
    boxes, scores = ReferenceEvaluator(found.proto).run(None, {"x": x})
    np.testing.assert_allclose(boxes, np.maximum(expected, 0), rtol=1e-5)
    np.testing.assert_allclose(scores, (1 / (1 + np.exp(-expected))).transpose(0, 2, 1), rtol=1e-5)


@pytest.mark.parametrize(("name", "told"), [("boxs", "there are boxes"), ("x", "no node gives such a tensor")])
def test_names_that_no_node_gives(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        cut(detector(), [name])


def test_the_ends_before_an_operator_are_what_it_reads_and_other_outputs() -> None:
    assert ends_before(detector(), {"NonMaxSuppression"}) == ["boxes", "scores", "raw"]
    assert ends_before(detector(), {"MatMul"}) == []  # nothing is left before it
