"""TensorRT 8.6's parser is given nothing that it passes over."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, values
from onnx import ModelProto, TensorProto, helper

from trtopt.errors import UnsupportedOperator
from trtopt.graph.compare import OnnxSession
from trtopt.graph.io import load_model
from trtopt.graph.old_parser import readable


def _shapes(proto: ModelProto) -> list[set[str]]:
    return [{item.name for item in node.attribute} for node in proto.graph.node if node.op_type == "Shape"]


@pytest.mark.parametrize("bounds", [{"end": 1}, {"start": 1}, {"start": -2}, {"start": 1, "end": -1}, {"end": 9}])
def test_a_part_of_a_shape_is_cut_out_afterwards(bounds: dict[str, int]) -> None:
    """PyTorch's exporter asks for the batch so: the parser would give all four sizes."""
    proto = model(
        [node("Shape", "x", "s", "sizes", **bounds), node("ConstantOfShape", "s", "c"), node("ReduceSum", "c", "y")],
        outputs={"y": [1] * 4},
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    proto.graph.node[1].attribute.append(
        helper.make_attribute("value", helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]))
    )
    made = load_model(readable(proto, 17)).proto
    assert _shapes(made) == [set()]
    assert [item.op_type for item in made.graph.node if item.name in ("sizes", "sizes_part")] == ["Shape", "Slice"]
    x = {"x": values(2, 3, 8, 8)}
    np.testing.assert_array_equal(OnnxSession(made)(x)["y"], OnnxSession(proto)(x)["y"])


def test_bodies_are_read_too_and_other_models_stay_as_they_are() -> None:
    then, other = (
        helper.make_graph(
            [helper.make_node("Shape", ["x"], [f"{name}_s"], f"{name}_shape", **bounds)],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_s", TensorProto.INT64, [1])],
        )
        for name, bounds in (("then", {"end": 1}), ("other", {"start": -1}))
    )
    proto = model(
        [
            node("If", "flag", "s", "if", then_branch=then, else_branch=other),
            node("Cast", "s", "y", "cast", to=1),
        ],
        inputs={"x": ["n", 3, 8, 8], "flag": []},
        outputs={"y": [1]},
    )
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.BOOL
    made = load_model(readable(proto, 17)).proto
    for flag in (True, False):
        inputs = {"x": values(2, 3, 8, 8), "flag": np.array(flag)}
        np.testing.assert_array_equal(OnnxSession(made)(inputs)["y"], OnnxSession(proto)(inputs)["y"])
    plain = model([node("Shape", "x", "s"), node("Reshape", "x s", "y")])
    assert readable(plain, 17) is plain
    assert readable(proto, None) is proto  # later generations read it


def test_what_the_parser_would_compute_otherwise_is_refused_by_name() -> None:
    added = model(
        [node("ScatterND", "x i u", "y", "accumulate", reduction="add")],
        weights={"i": np.zeros((1, 1), np.int64), "u": values(1, 3, 8, 8)},
        inputs={"x": [2, 3, 8, 8]},
    )
    with pytest.raises(UnsupportedOperator, match=r"accumulate \(ScatterND\): its reduction 'add' isn't read"):
        readable(added, 17)
    replaced = ModelProto.FromString(added.SerializeToString())
    replaced.graph.node[0].attribute[0].s = b"none"
    assert readable(replaced, 17) is replaced
    recurrent = model(
        [node("GRU", "x w r", "h", "gru", hidden_size=4, layout=1), node("Relu", "h", "y")],
        inputs={"x": [2, 5, 3]},
        outputs={"y": [2, 5, 1, 4]},
        weights={"w": values(1, 12, 3), "r": values(1, 12, 4)},
    )
    with pytest.raises(UnsupportedOperator, match=r"gru \(GRU\): its layout 1"):
        readable(recurrent, 17)
