"""A message as linked values and back: shapes are known, weights stay where they are, names stay apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graphs import conv_relu, model, node, values, written
from onnx import TensorProto

from trtopt.core.errors import ModelError
from trtopt.graph.io import load_model, save_model
from trtopt.graph.lazy_weights import is_lazy
from trtopt.graph.view import Editor, attribute, constant, drop_unread, is_constant, sizes, to_ir, to_proto


def test_every_value_has_its_type_and_shape_and_the_message_stays() -> None:
    proto = conv_relu()
    before = proto.SerializeToString()
    graph = to_ir(proto).graph
    assert {value.name: sizes(value) for node in graph for value in node.outputs} == {
        "h": (None, 4, 8, 8),
        "y": (None, 4, 8, 8),
    }
    assert {value.dtype for node in graph for value in node.outputs} == {ir.DataType.FLOAT}
    assert proto.SerializeToString() == before


def test_operators_that_onnx_infers_nothing_of_and_bodies_have_shapes_too() -> None:
    proto = written(
        "(float[batch,3,8,8] x) => (float[] y) { y = If (flag) <then_branch = t () => (float[] z) "
        "{ inner = GroupNormalization <num_groups = 1> (x, s, b) z = Relu (inner) }, "
        "else_branch = e () => (float[] w) { w = Neg (x) }> }",
        21, s=values(3), b=values(3), flag=True,
    )  # fmt: skip
    shapes = {value.name: sizes(value) for item in to_ir(proto).graph.all_nodes() for value in item.outputs}
    assert shapes["inner"] == shapes["z"] == shapes["w"] == (None, 3, 8, 8)


def test_values_without_a_form_are_named() -> None:
    proto = conv_relu()
    proto.graph.node.add(op_type="ZipMap", domain="ai.onnx.ml", input=["y"], output=["maps"])
    proto.graph.output.add(name="maps").type.sequence_type.elem_type.map_type.key_type = TensorProto.INT64
    with pytest.raises(ModelError, match=r"maps; leave these out.*ZipMap.*options=\{'zipmap': False\}"):
        to_ir(proto)
    proto = conv_relu()
    proto.graph.output[0].type.map_type.key_type = TensorProto.INT64
    with pytest.raises(ModelError, match="aren't tensors or sequences of them: y; leave these out"):
        to_ir(proto)


def test_lazy_weights_are_read_where_they_are_asked_for_and_written_as_references(tmp_path: Path) -> None:
    weight = values(160, 160)
    proto = model([node("MatMul", "x w", "y")], inputs={"x": ["n", 160]}, weights={"w": weight})
    save_model(proto, tmp_path / "m.onnx", inline_limit=0)
    lazy = load_model(tmp_path / "m.onnx", lazy=True).proto
    graph = to_ir(lazy)
    (operand,) = graph.graph.initializers.values()
    assert is_constant(operand)
    np.testing.assert_array_equal(constant(operand), weight)
    assert operand.const_value is not None and operand.const_value.tobytes() == weight.tobytes()
    (again,) = to_proto(graph).graph.initializer
    assert is_lazy(again) and again == lazy.graph.initializer[0]


def test_an_editor_takes_no_name_twice_and_unread_constants_go() -> None:
    graph = to_ir(conv_relu())
    editor = Editor(graph)
    first, second = editor.constant("w", [1.0], np.float32), editor.constant("y", 2, np.int64)
    assert (first.name, second.name) == ("w_1", "y_1")
    item = editor.node("Cast", [first], "h", ir.DataType.FLOAT16, to=10)
    assert (item.outputs[0].name, item.name) == ("h_1", "h_1/Cast")
    assert attribute(item, "to") == 10 and attribute(item, "saturate", 1) == 1
    editor.put_behind(graph.graph.inputs[0], [item])
    drop_unread(graph.graph)
    assert sorted(graph.graph.initializers) == ["b", "w", "w_1"]
