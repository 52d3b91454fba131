"""What no TensorRT takes, said by the tensor's or the node's name before a parser is asked."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from graphs import conv_relu, model, node, nodes as graph_nodes
from onnx import ModelProto, TensorProto, helper

from trtopt.graph.limits import issues

TYPES = {"float32", "float64", "float16", "int8", "int32", "int64", "bool", "uint8", "float8_e4m3fn", "int4"}


def found(proto: ModelProto) -> list[tuple[str, str]]:
    return [(item.node, item.reason) for item in issues(proto, TYPES, {"NonMaxSuppression": "nobody runs it"})]


def test_an_ordinary_model_has_none() -> None:
    assert found(conv_relu()) == []


@pytest.mark.parametrize(
    ("kind", "name"), [(TensorProto.UINT16, "uint16"), (TensorProto.STRING, "string"), (TensorProto.INT2, "int2")]
)
def test_types_of_inputs_and_outputs(kind: int, name: str) -> None:
    reasons = dict(found(model([node("Identity", "x", "y")], dtype=kind)))
    assert f"the input is of type {name}" in reasons["x"] and f"the output is of type {name}" in reasons["y"]


def test_types_inside_and_of_constants() -> None:
    nodes = graph_nodes("[to16] a = Cast <to = 5> (x) [add] b = Add (a, c) y = Cast <to = 1> (b)")
    reasons = found(model(nodes, weights={"c": np.zeros(1, np.int16)}))
    assert [name for name, _ in reasons] == ["to16", "add", "add"]
    assert "gives 'a' in type int16" in reasons[0][1]
    assert any("reads the constant 'c' of type int16" in reason for _, reason in reasons)


def test_sequences() -> None:
    value = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)
    graph = helper.make_graph(
        [node("SequenceLength", "x", "y")], "g", [value], [helper.make_tensor_value_info("y", 7, [])]
    )
    assert "of type sequence" in dict(found(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])))["x"]


def test_quantized_types_only_between_q_and_dq() -> None:
    good = [
        node("QuantizeLinear", "x s z", "q", "q"), node("Reshape", "q shape", "r"), node("DequantizeLinear", "r s z", "y", "d"),
    ]  # fmt: skip
    weights = {
        "s": np.array(0.1, np.float32),
        "z": np.zeros((), ml_dtypes.float8_e4m3fn),
        "shape": np.array([-1], np.int64),
    }
    assert found(model(good, weights=weights, opset=19)) == []
    cast = [node("Cast", "x", "f", "narrow", to=TensorProto.FLOAT8E4M3FN), node("Cast", "f", "y", "widen", to=1)]
    assert [name for name, _ in found(model(cast, opset=19))] == ["narrow", "widen"]


def test_int8_constants_are_for_dequantizing() -> None:
    proto = model([node("Add", "x c", "y", "add")], weights={"c": np.ones(1, np.int8)}, dtype=TensorProto.INT8)
    [(name, reason)] = found(proto)
    assert name == "add" and "the int8 constant 'c'" in reason


def test_zero_points_must_be_constant() -> None:
    proto = model(
        [node("QuantizeLinear", "x s z", "q", "q"), node("DequantizeLinear", "q s z", "y", "d")],
        inputs={"x": [2, 3], "s": []},
    )
    proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.INT8, []))
    assert [name for name, _ in found(proto)] == ["q", "d"]
    assert "its zero point 'z' isn't constant" in found(proto)[0][1]


def test_operators_that_nothing_runs() -> None:
    proto = model(
        [node("NonMaxSuppression", "boxes scores", "y", "nms")],
        inputs={"boxes": [1, 4, 4], "scores": [1, 1, 4]},
        outputs={"y": ["n", 3]},
    )
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    assert ("nms", "nobody runs it") in found(proto)


def test_an_output_that_is_an_input_is_named() -> None:
    proto = model([node("Relu", "x", "y")])
    proto.graph.output.append(proto.graph.input[0])
    assert [(item.node, "Identity" in item.reason) for item in issues(proto, TYPES, {})] == [("x", True)]


def test_scales_that_are_none_are_named_with_tensor_and_channel() -> None:
    nodes = [node("QuantizeLinear", "x s z", "q", "q"), node("DequantizeLinear", "q s z", "y", "d")]
    weights = {"s": np.array([0.1, 0, np.inf], np.float32), "z": np.zeros(3, np.int8)}
    assert found(model(nodes, weights=weights))[0] == (
        "q",
        "its scale 's', of 'x', is 0 in channel 1 and others; TensorRT takes positive, finite ones only",
    )


@pytest.mark.parametrize(("k", "refused"), [(3840, False), (3841, True)])
def test_topk_beyond_tensorrts_most(k: int, refused: bool) -> None:
    weights = {"k": np.array([k], np.int64)}
    proto = model([node("TopK", "x k", "y i", "top")], inputs={"x": [1, 9000]}, weights=weights)
    assert [reason for name, reason in found(proto) if name == "top"] == [
        f"takes the best {k}, and TensorRT's at most 3840: export the model with a smaller k"
    ] * refused


def test_a_tensor_that_no_engine_holds_is_named() -> None:
    doubled = [node("Concat", f"c{index} c{index}", f"c{index + 1}", f"join{index}", axis=0) for index in range(33)]
    proto = model([*doubled, node("ReduceMax", "c33", "y", "top")], weights={"c0": np.ones(1, np.float32)})
    assert found(proto) == [
        ("join32", "gives 8,589,934,592 numbers in 'c33'; up to 4,294,967,296 are built: make the sizes smaller")
    ]
