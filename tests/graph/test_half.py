"""FP16 models in FP32 types: the same ends, the same arithmetic, islands known."""

from __future__ import annotations

import numpy as np
import onnx
from graphs import conv_relu, values, written
from half_models import half
from onnx import ModelProto, TensorProto

from trtopt.graph.half import fp32_typed, has_half, widen
from trtopt.graph.passes.typed import typed_already
from trtopt.graph.view import to_ir
from trtopt.ort.sessions import OnnxSession


def _with_an_island() -> ModelProto:
    """FP16, with a softmax between casts that its author keeps in FP32."""
    proto = written(
        "(float16[batch,3,8,8] x) => (float16[] y) { c = Conv (x, w) wide = Cast <to = 1> (c) "
        "[softmax] s = Softmax <axis = 1> (wide) t = Cast <to = 10> (s) y = Conv (t, v) }",
        w=values(4, 3, 1, 1).astype(np.float16), v=values(4, 4, 1, 1, seed=1).astype(np.float16),
    )  # fmt: skip
    return onnx.shape_inference.infer_shapes(proto)


def test_ends_keep_their_types_and_casts_within_go() -> None:
    proto = _with_an_island()
    made, islands = fp32_typed(proto)
    onnx.checker.check_model(made, full_check=True)
    assert list(islands) == ["softmax"]
    assert [item.op_type for item in made.graph.node] == ["Cast", "Conv", "Softmax", "Conv", "Cast"]
    ends = (*made.graph.input, *made.graph.output)
    assert [(item.name, item.type.tensor_type.elem_type) for item in ends] == [("x", 10), ("y", 10)]
    assert {item.data_type for item in made.graph.initializer} == {TensorProto.FLOAT}
    x = values(2, 3, 8, 8).astype(np.float16)
    expected, found = (OnnxSession(item, threads=1)({"x": x})["y"] for item in (proto, made))
    assert found.dtype == np.float16
    np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=5e-3)


def test_a_model_is_typed_by_most_of_its_products() -> None:
    assert str(typed_already(to_ir(half(conv_relu())))) == "fp16"
    assert str(typed_already(to_ir(_with_an_island()))) == "fp16"
    assert typed_already(to_ir(conv_relu())) is None
    mixed = written(
        "(float[n,3,8,8] x) => (float[] y) { a = Conv (x, w) b = Conv (a, w) h = Cast <to = 10> (b) c = Conv (h, v) "
        "y = Cast <to = 1> (c) }",
        w=values(3, 3, 1, 1), v=values(3, 3, 1, 1).astype(np.float16),
    )  # fmt: skip
    assert has_half(mixed)
    assert typed_already(to_ir(mixed)) is None


def test_inputs_are_rounded_to_their_type_too() -> None:
    wide = widen(written("(float16[n,3,8,8] x) => (float16[n,3,8,8] y) { y = Mul (x, s) }", s=np.float16(0.5)))
    onnx.checker.check_model(wide, full_check=True)
    x = np.full((1, 3, 8, 8), 2049.0, np.float32)  # FP16 holds 2048 and 2050
    x[0, 0, 0, :2] = 65504.0, 70000.0
    (found,) = OnnxSession(wide, threads=1)({"x": x}).values()
    assert found[0, 0, 0, :3].tolist() == [32752.0, np.inf, 1024.0]


def test_a_model_in_fp32_or_with_control_flow_is_given_back() -> None:
    half = "float16[n,3]"
    proto = written(
        f"({half} x, bool c) => ({half} y) {{ y = If (c) <then_branch = t () => ({half} a) {{ a = Neg (x) }}, "
        f"else_branch = e () => ({half} b) {{ b = Relu (x) }}> }}"
    )
    for given in (proto, conv_relu()):
        assert widen(given) is given and fp32_typed(given) == (given, {})
