"""Renaming leaves every name with one value, inside bodies, too, and the results as they were."""

from __future__ import annotations

import numpy as np
import onnx.parser

from trtopt.graph.view import rename_values, to_ir, to_proto
from trtopt.ort.sessions import OnnxSession

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2] in0, bool flag) => (float[2] out0, float[2] out1)
<float[2] m_weight = {1, 2}, float[2] weight = {3, 4}>
{
  add = Add(in0, m_weight)
  image = Mul(add, weight)
  out0 = Identity(image)
  out1 = If (flag) <
    then_branch = yes () => (float[2] a) { a = Add(image, m_weight) },
    else_branch = no () => (float[2] b) { b = Sub(add, in0) }
  >
}
"""


def renamed(proto: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    model = to_ir(proto)
    rename_values(model, names, "m_")
    return to_proto(model)


def test_wished_names_push_others_aside() -> None:
    model = onnx.parser.parse_model(TEXT)
    inputs = {"in0": np.array([1, 5], np.float32), "flag": np.array(True)}
    expected = list(OnnxSession(model)(inputs).values())
    model = renamed(model, {"in0": "image", "out0": "add", "out1": "weight"})
    onnx.checker.check_model(model)
    assert [item.name for item in (*model.graph.input, *model.graph.output)] == ["image", "flag", "add", "weight"]
    assert "m_weight" in {item.name for item in model.graph.initializer}  # without "m_" it would be an output's name
    found = OnnxSession(model)({"image": inputs["in0"], "flag": inputs["flag"]})
    assert all(np.array_equal(one, two) for one, two in zip(expected, found.values()))


def test_weights_lose_the_prefix_where_the_name_is_free() -> None:
    model = onnx.parser.parse_model(TEXT.replace(" weight =", " other =").replace("(add, weight)", "(add, other)"))
    model = renamed(model, {})
    onnx.checker.check_model(model)
    assert {item.name for item in model.graph.initializer} == {"weight", "other"}
