"""A message as linked values and back: shapes are known, weights stay where they are, names stay apart."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from graphs import conv_relu, values, written
from onnx import TensorProto

from trtopt.core.errors import ModelError
from trtopt.graph.view import sizes, to_ir


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
