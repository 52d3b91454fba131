"""What a pass gives is looked at before it is used."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import conv_relu, model, node, values
from onnx import ModelProto, numpy_helper

from trtopt.graph.guard import fault, invalid
from trtopt.graph.passes.fold import fold


def changed(proto: ModelProto, operator: str) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(proto)
    copy.graph.node[-1].op_type = operator
    return copy


def test_the_same_model_has_no_fault() -> None:
    proto = conv_relu(inputs={"x": [1, 3, 8, 8]})
    assert fault(proto, changed(proto, "Relu")) == "" == invalid(proto)


def test_other_values_are_a_fault_where_comparing_costs_little() -> None:
    small = conv_relu(inputs={"x": [1, 3, 8, 8]})
    assert "output 'y' has other values" in fault(small, changed(small, "Neg"))
    large = conv_relu(inputs={"x": [1, 3, 640, 640]})
    assert fault(large, changed(large, "Neg")) == ""


def test_small_differences_of_rounding_are_none() -> None:
    proto = conv_relu(inputs={"x": [1, 3, 8, 8]})
    near = ModelProto()
    near.CopyFrom(proto)
    weight = near.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1 + 1e-5), weight.name))
    assert fault(proto, near) == ""


def test_invalid_graphs_are_named() -> None:
    proto = conv_relu()
    assert "Frobnicate" in fault(proto, changed(proto, "Frobnicate"))
    assert "Frobnicate" in invalid(changed(proto, "Frobnicate"))


def test_outputs_keep_their_names() -> None:
    proto = conv_relu()
    other = ModelProto()
    other.CopyFrom(proto)
    other.graph.node[-1].output[0] = other.graph.output[0].name = "z"
    assert "its outputs are z, no longer y" in fault(proto, other)


def test_a_graph_that_no_longer_runs_is_a_fault() -> None:
    proto = model([node("Reshape", "x s", "y")], inputs={"x": [2, 3]}, weights={"s": np.array([3, 2], np.int64)})
    other = ModelProto()
    other.CopyFrom(proto)
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([4, 2], np.int64), "s"))
    found = fault(proto, other)
    assert "doesn't run any more" in found or "isn't valid" in found


@pytest.mark.parametrize("operator", ["RandomNormalLike", "Bernoulli"])
def test_random_numbers_are_not_compared(operator: str) -> None:
    proto = model([node(operator, "x", "y", seed=1.0)], inputs={"x": [2, 3]})
    assert fault(proto, changed(proto, operator)) == ""


def test_text_is_not_made_up() -> None:
    proto = model([node("Identity", "x", "y")], inputs={"x": [2]}, dtype=8)
    assert fault(proto, changed(proto, "Identity")) == ""
    assert values(1).size


def test_numbers_that_are_drawn_are_not_taken_for_each_other() -> None:
    """onnxslim merges two draws of one shape, and drops a Dropout in training."""
    draws = [node("RandomNormalLike", "x", name, name) for name in ("a", "b")]
    proto = model([*draws, node("Sub", "a b", "y", "sub")])
    made, report = fold(proto)
    assert [item.op_type for item in made.graph.node].count("RandomNormalLike") == 2
    assert "draws random numbers" in report.problem or not report.problem
    training = model([node("Dropout", "x r t", "y", "drop")], weights={"r": np.float32(0.5), "t": np.array(True)})  # type: ignore[dict-item]
    assert [item.op_type for item in fold(training)[0].graph.node] == ["Dropout"]
    assert "draws random numbers" in fault(training, model([node("Identity", "x", "y")]))
