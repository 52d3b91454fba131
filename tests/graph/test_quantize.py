"""Q/DQ numerics against NumPy and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import conv_relu, model, node, values
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx import numpy_helper

from trtopt.errors import CalibrationError
from trtopt.graph.compare import OnnxSession
from trtopt.graph.placement import find_points
from trtopt.graph.quantize import insert_qdq, is_quantized, quantize_weight, round_scale, weight_scales
from trtopt.spec import Override, Precision

FORCE = [Override("*", Precision.INT8)]  # small nets are under the size rules


def _quantized(proto: onnx.ModelProto, amax: dict[str, float], base: Precision = Precision.FP32) -> onnx.ModelProto:
    made = insert_qdq(proto, find_points(proto, overrides=FORCE), amax, base=base)
    onnx.checker.check_model(made, full_check=True)
    return made


def _run(proto: onnx.ModelProto, **inputs: NDArray[Any]) -> NDArray[Any]:
    return next(iter(OnnxSession(proto, threads=1, optimize=False)(inputs).values()))


def _rounded(array: NDArray[Any], scale: NDArray[Any] | float, limit: int = 128) -> NDArray[np.float32]:
    return (np.clip(np.rint(array / scale), -limit, 127) * scale).astype(np.float32)


floats = st.floats(-1e3, 1e3, width=32)


@settings(deadline=None, max_examples=60)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 7)), elements=floats), st.sampled_from([0, 1, None])
)
def test_weights_come_back_within_half_a_step_and_symmetric(weight: NDArray[np.float32], axis: int | None) -> None:
    scale = weight_scales(weight, axis, Precision.INT8)
    codes = quantize_weight(weight, scale, axis, Precision.INT8)
    shape = [1, 1]
    if axis is not None:
        shape[axis] = -1
    steps = scale.reshape(shape)
    assert codes.dtype == np.int8
    assert int(np.abs(codes.astype(int)).max(initial=0)) <= 127
    assert (np.abs(codes * steps - weight) <= steps * (0.5 + 1e-5)).all()
    assert (scale > 0).all()


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-12, 1e4), st.sampled_from([Precision.FP16, Precision.BF16, Precision.FP32]))
def test_scales_are_what_the_typed_graph_can_hold_and_never_zero(scale: float, base: Precision) -> None:
    held = round_scale(np.array([scale]), base)
    assert held.dtype == np.float32
    assert held[0] > 0
    assert np.array_equal(round_scale(held, base), held)
    smallest = {Precision.FP16: 2.0**-14, Precision.BF16: 2.0**-126, Precision.FP32: 2.0**-126}[base]
    tolerance = {Precision.FP16: 2.0**-11, Precision.BF16: 2.0**-8, Precision.FP32: 2.0**-23}[base]
    if scale > smallest:
        assert abs(held[0] - scale) <= tolerance * scale


def test_a_zero_channel_gets_a_harmless_scale() -> None:
    weight = np.stack([np.zeros(4), np.ones(4)]).astype(np.float32)
    assert weight_scales(weight, 0, Precision.INT8).tolist() == pytest.approx([1.0, 1 / 127])


@pytest.mark.parametrize("base", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_convolutions_compute_what_the_formula_says(base: Precision) -> None:
    proto = conv_relu()
    made = _quantized(proto, {"x": 3.0}, base)
    x = np.clip(values(2, 3, 8, 8, seed=5), -3, 3)
    weight = {item.name: numpy_helper.to_array(item) for item in proto.graph.initializer}["w"]
    scale = round_scale(weight_scales(weight, 0, Precision.INT8), base).reshape(-1, 1, 1, 1)
    reference = conv_relu(weights={"w": _rounded(weight, scale)})
    expected = _run(reference, x=_rounded(x, round_scale(np.asarray(3.0 / 127), base)))
    np.testing.assert_allclose(_run(made, x=x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "shape", "axis", "attributes"),
    [
        ("MatMul", (32, 16), 1, {}),
        ("Gemm", (32, 16), 1, {}),
        ("Gemm", (16, 32), 0, {"transB": 1}),
    ],
)
def test_matrix_products_compute_what_the_formula_says(
    op: str, shape: tuple[int, int], axis: int, attributes: dict[str, int]
) -> None:
    weight = values(*shape, seed=2)
    build = {"inputs": {"x": ["batch", 32]}, "outputs": {"y": ["batch", 16]}}
    proto = model([node(op, "x w", "y", **attributes)], weights={"w": weight}, **build)
    x = np.clip(values(4, 32, seed=1), -2, 2)
    scale = weight_scales(weight, axis, Precision.INT8)
    rounded = _rounded(weight, scale.reshape((1, -1) if axis else (-1, 1)))
    reference = model([node(op, "x w", "y", **attributes)], weights={"w": rounded}, **build)
    expected = _run(reference, x=_rounded(x, 2.0 / 127))
    np.testing.assert_allclose(_run(_quantized(proto, {"x": 2.0}), x=x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("group", "axis"), [(1, 1), (2, None)])
def test_transposed_convolutions_scale_their_output_channels(group: int, axis: int | None) -> None:
    proto = model(
        [node("ConvTranspose", "x w", "y", strides=[2, 2], group=group)],
        inputs={"x": ["batch", 4, 8, 8]},
        outputs={"y": ["batch", 6, 16, 16]},
        weights={"w": values(4, 6 // group, 2, 2)},
    )
    (weight,) = find_points(proto, overrides=FORCE).weights
    assert weight.axis == axis
    x = values(1, 4, 8, 8, seed=3)
    difference = np.abs(_run(_quantized(proto, {"x": 4.0}), x=x) - _run(proto, x=x))
    assert 0 < difference.max() < 0.2


def test_one_pair_serves_every_reader_and_one_code_tensor_every_layer_with_the_weight() -> None:
    proto = model(
        [node("Conv", "x w", "a", "c1"), node("Conv", "x w", "b", "c2"), node("Add", "a b", "y", "sum")],
        inputs={"x": ["batch", 4, 8, 8]},
        outputs={"y": ["batch", 4, 8, 8]},
        weights={"w": values(4, 4, 1, 1)},
    )
    made = _quantized(proto, {"x": 4.0, "a": 9.0, "b": 9.0})
    operators = [item.op_type for item in made.graph.node]
    names = [item.name for item in made.graph.initializer]
    assert sum(name.startswith("w_quantized") for name in names) == 1
    assert "w" not in names
    assert operators.count("QuantizeLinear") == len(find_points(proto, overrides=FORCE).reads)


def test_quantized_convolutions_name_their_kernel() -> None:
    made = _quantized(conv_relu(), {"x": 3.0})
    (convolution,) = [item for item in made.graph.node if item.op_type == "Conv"]
    assert {item.name: list(item.ints) for item in convolution.attribute}["kernel_shape"] == [3, 3]


def test_a_missing_or_impossible_amax_is_named() -> None:
    proto = conv_relu()
    points = find_points(proto, overrides=FORCE)
    with pytest.raises(CalibrationError, match=r"no scale for 1 of 1 tensors \(x\).*trtopt calibrate"):
        insert_qdq(proto, points, {"other": 1.0})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(CalibrationError, match="positive and finite"):
            insert_qdq(proto, points, {"x": bad})


def test_fp8_weights_stay_within_its_precision() -> None:
    weight = values(8, 8, seed=4)
    scale = weight_scales(weight, None, Precision.FP8)
    codes = quantize_weight(weight, scale, None, Precision.FP8).astype(np.float32)
    assert np.abs(codes).max() == 448
    np.testing.assert_allclose(codes * scale, weight, rtol=2.0**-4, atol=float(scale) * 2.0**-9)


def test_the_original_is_not_changed() -> None:
    proto = conv_relu()
    before = proto.SerializeToString(deterministic=True)
    assert is_quantized(_quantized(proto, {"x": 3.0}))
    assert not is_quantized(proto)
    assert proto.SerializeToString(deterministic=True) == before
