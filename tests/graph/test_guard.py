"""What a pass gives is looked at before it is used."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import conv_relu, model, node, values, written
from onnx import ModelProto, helper

from trtopt.core.errors import ModelError
from trtopt.graph.guard import fault, guarded, invalid, same
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.result import PassResult
from trtopt.graph.view import to_ir


def changed(proto: ModelProto, operator: str) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(proto)
    copy.graph.node[-1].op_type = operator
    return copy


def test_what_can_not_stand_for_a_model_has_a_fault() -> None:
    proto = conv_relu()
    assert fault(proto, changed(proto, "Relu")) == invalid(proto) == ""
    wrong = changed(proto, "Frobnicate")
    assert "Frobnicate" in fault(proto, wrong) and "Frobnicate" in invalid(wrong)
    other = written("(float[n,3,8,8] x) => (float[] z) { z = Relu (x) }")
    assert fault(proto, other) == "its outputs are z, no longer y"


def test_models_are_the_same_whose_nodes_and_weights_are() -> None:
    proto = conv_relu()
    told = ModelProto.FromString(proto.SerializeToString())
    told.graph.node[0].name, told.graph.node[1].doc_string, told.producer_name = "other", "from line 3", "somebody"
    told.graph.node[0].metadata_props.add(key="trace", value="a.py")
    told.graph.initializer.sort(key=lambda item: item.name)
    assert same(proto, told) and same(told, proto)
    weight, node_, attribute = (ModelProto.FromString(proto.SerializeToString()) for _ in range(3))
    weight.graph.initializer[0].CopyFrom(conv_relu(weights={"w": values(4, 3, 3, 3, seed=7)}).graph.initializer[0])
    node_.graph.node[1].op_type = "Abs"
    attribute.graph.node[0].attribute[0].ints[0] = 2
    assert not any(same(proto, other) or same(other, proto) for other in (weight, node_, attribute))


def test_numbers_that_are_drawn_are_not_taken_for_each_other() -> None:
    """Libraries merge two draws of one shape, and drop a Dropout in training."""
    draws = [node("RandomNormalLike", "x", name, name) for name in ("a", "b")]
    proto = model([*draws, node("Sub", "a b", "y", "sub")])
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


def test_what_a_pass_made_is_used_only_where_it_is_valid() -> None:
    proto = conv_relu(inputs={"x": [1, 3, 8, 8]})
    made = guarded(proto, PassResult(to_ir(changed(proto, "Neg")), {"c": "c"}), "it can't be", "do that")
    assert made is not proto and [item.op_type for item in made.graph.node] == ["Conv", "Neg"]
    assert guarded(proto, PassResult(to_ir(changed(proto, "Neg"))), "it can't be", "do that") is proto
    with pytest.raises(ModelError, match=r"it can't be \(.*Shape.*\); do that"):
        guarded(proto, PassResult(to_ir(changed(proto, "Shape")), {"c": "c"}), "it can't be", "do that")


def test_declared_outputs_stay_as_they_are() -> None:
    proto = conv_relu(inputs={"x": ["n", 3, 8, 8]}, outputs={"y": ["m", 4, 8, "w"]})
    made = guarded(proto, PassResult(to_ir(changed(proto, "Relu")), {"c": "c"}), "", "")
    assert made.graph.output == proto.graph.output and not made.graph.value_info
