"""Q/DQ numerics against NumPy and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import conv_relu, photos, points_of, quantized, values, written
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx import numpy_helper

from trtopt.core.errors import CalibrationError
from trtopt.core.values import Override, Precision
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.quantize import is_quantized, quantize_weight, round_scale, weight_scales
from trtopt.ort.sessions import OnnxSession

FORCE = [Override("*", Precision.INT8)]  # small nets are under the size rules


def _quantized(proto: onnx.ModelProto, amax: dict[str, float], base: Precision = Precision.FP32) -> onnx.ModelProto:
    made = quantized(proto, points_of(proto, overrides=FORCE), amax, base)
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


@pytest.mark.parametrize(("op", "shape"), [("MatMul", (32, 16)), ("Gemm", (32, 16)), ("Gemm <transB = 1>", (16, 32))])
def test_matrix_products_compute_what_the_formula_says(op: str, shape: tuple[int, int]) -> None:
    text, weight, x = (
        f"(float[n,32] x) => (float[n,16] y) {{ y = {op} (x, w) }}",
        values(*shape, seed=2),
        values(4, 32, seed=1),
    )
    x, axis = np.clip(x, -2, 2), shape.index(16)
    scale = weight_scales(weight, axis, Precision.INT8)
    reference = written(text, w=_rounded(weight, scale.reshape((1, -1) if axis else (-1, 1))))
    expected = _run(reference, x=_rounded(x, 2.0 / 127))
    np.testing.assert_allclose(
        _run(_quantized(written(text, w=weight), {"x": 2.0}), x=x), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("group", "axis"), [(1, 1), (2, None)])
def test_transposed_convolutions_scale_their_output_channels(group: int, axis: int | None) -> None:
    text = (
        f"(float[n,4,8,8] x) => (float[n,6,16,16] y) {{ y = ConvTranspose <strides = [2, 2], group = {group}> (x, w) }}"
    )
    proto = written(text, w=values(4, 6 // group, 2, 2))
    (weight,) = points_of(proto, overrides=FORCE).weights
    assert weight.axis == axis
    x = values(1, 4, 8, 8, seed=3)
    difference = np.abs(_run(_quantized(proto, {"x": 4.0}), x=x) - _run(proto, x=x))
    assert 0 < difference.max() < 0.2


def test_one_pair_serves_every_reader_and_one_code_tensor_every_layer_with_the_weight() -> None:
    text = "(float[n,4,8,8] x) => (float[n,4,8,8] y) { a = Conv (x, w) b = Conv (x, w) y = Add (a, b) }"
    proto = written(text, w=values(4, 4, 1, 1))
    made = _quantized(proto, {"x": 4.0, "a": 9.0, "b": 9.0})
    operators = [item.op_type for item in made.graph.node]
    names = [item.name for item in made.graph.initializer]
    assert sum(name.startswith("w_quantized") for name in names) == 1
    assert "w" not in names
    assert operators.count("QuantizeLinear") == len(points_of(proto, overrides=FORCE).reads)


def test_a_missing_or_impossible_amax_is_named() -> None:
    proto = conv_relu()
    points = points_of(proto, overrides=FORCE)
    with pytest.raises(
        CalibrationError,
        match=r"no scale for 1 of 1 tensors \(x\).*give those that calibrate was given, or run trtopt calibrate",
    ):
        quantized(proto, points, {"other": 1.0})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(CalibrationError, match="positive and finite"):
            quantized(proto, points, {"x": bad})


def test_fp8_weights_stay_within_its_precision() -> None:
    weight = values(8, 8, seed=4)
    scale = weight_scales(weight, None, Precision.FP8)
    codes = quantize_weight(weight, scale, None, Precision.FP8).astype(np.float32)
    assert np.abs(codes).max() == 448
    np.testing.assert_allclose(codes * scale, weight, rtol=2.0**-4, atol=float(scale) * 2.0**-9)


@settings(deadline=None, max_examples=25)
@given(
    st.floats(2.0**-30, 2.0**10),
    st.sampled_from([Precision.FP32, Precision.FP16, Precision.BF16]),
    st.integers(0, 2**32 - 1),
)
def test_an_activation_comes_back_within_half_a_step(amax: float, base: Precision, seed: int) -> None:
    exact = np.eye(4, dtype=np.float32) * 127  # its codes are
    proto = written("(float[3,4] x) => (float[3,4] y) { y = MatMul (x, w) }", w=exact)
    made = _quantized(proto, {"x": amax}, base)
    (scale,) = (numpy_helper.to_array(item) for item in made.graph.initializer if item.name == "x_scale")
    reach = min(amax, 127 * float(scale))  # a scale rounded down clips the last half step
    x = np.random.default_rng(seed).uniform(-reach, reach, (3, 4)).astype(np.float32)
    difference = np.abs(_run(made, x=x) / 127 - x)
    assert (difference <= float(scale) * 0.501).all()


@settings(deadline=None, max_examples=25)
@given(st.floats(-8, 0), st.sampled_from([Precision.FP16, Precision.BF16]))
def test_weights_keep_their_codes_when_their_scales_are_rounded(exponent: float, base: Precision) -> None:
    """Dequantized, a channel's weights are within half a step of the scale that the graph holds."""
    weight = values(8, 16, seed=3) * np.float32(10.0**exponent)
    proto = written("(float[16,16] x) => (float[16,8] y) { y = Gemm <transB = 1> (x, w) }", w=weight)
    made = _quantized(proto, {"x": 127.0}, base)
    tensors = {item.name: numpy_helper.to_array(item) for item in made.graph.initializer}
    scale = tensors["w_scale"].reshape(-1, 1)
    got = _run(made, x=np.eye(16, dtype=np.float32)).T
    assert np.array_equal(round_scale(scale, base), scale)
    assert (np.abs(got - weight) <= scale * 0.502).all()


def test_a_scale_that_the_base_cannot_hold_names_its_tensor() -> None:
    proto = conv_relu()
    points = points_of(proto, overrides=FORCE)
    with pytest.raises(CalibrationError, match=r"x reaches 1e\+08.*FP16.*`bf16=True`"):
        quantized(proto, points, {"x": 1e8}, base=Precision.FP16)
    assert is_quantized(quantized(proto, points, {"x": 1e8}, base=Precision.BF16))
    heavy = conv_relu(weights={"w": values(4, 3, 3, 3, scale=1e8)})
    points = points_of(heavy, overrides=FORCE)
    with pytest.raises(CalibrationError, match=r"weight w of c reaches .*FP16.*`precision_override='c=fp32'`"):
        quantized(heavy, points, {"x": 1.0}, base=Precision.FP16)
    assert is_quantized(quantized(heavy, points, {"x": 1.0}, base=Precision.BF16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    weight = values(4, 3, 3, 3)
    weight[1, 0, 0, 0] = bad
    proto = conv_relu(weights={"w": weight})
    with pytest.raises(CalibrationError, match="the weight w of c holds NaN or infinity"):
        quantized(proto, points_of(proto, overrides=FORCE), {"x": 3.0})


def test_a_real_network_stays_near_fp32(exported: Callable[[str], Path]) -> None:
    folded, _ = fold(load_model(exported("efficientnet-lite0")).proto)
    points, images = points_of(folded), photos(224, 2)
    probe = onnx.ModelProto()
    probe.CopyFrom(folded)
    name = folded.graph.input[0].name
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=item) for item in points.reads if item != name)
    amax = {item: float(np.abs(value).max()) for item, value in OnnxSession(probe, threads=1)({name: images}).items()}
    amax[name] = float(np.abs(images).max())
    made = quantized(folded, points, amax)
    onnx.checker.check_model(made, full_check=True)
    expected, actual = _run(folded, **{name: images}), _run(made, **{name: images})
    error, signal = float(np.square(actual - expected).sum()), float(np.square(expected).sum())
    assert 10 * np.log10(signal / error) > 12
    assert (actual.argmax(1) == expected.argmax(1)).all()
    kernels = [item for item in made.graph.node if item.op_type == "Conv"]
    assert all("kernel_shape" in {attribute.name for attribute in item.attribute} for item in kernels)
