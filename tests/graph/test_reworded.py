"""Operators that TensorRT computes on codes, and wrong, behind a DequantizeLinear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import values, written
from onnx import ModelProto, TensorProto, load, numpy_helper, parser
from onnx.shape_inference import infer_shapes

from trtopt.builder.construction import build as built
from trtopt.core.values import Precision
from trtopt.graph.guard import invalid
from trtopt.graph.passes.old_parser import with_float_weights
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.reworded import reword, unfuse, unquantize_small
from trtopt.graph.passes.typed import to_typed
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.runner import OnnxRunner

X = {"x": values(2, 8, 6, 6, scale=1.5)}


def _net(text: str, **weights: Any) -> ModelProto:
    start = "[q] c = QuantizeLinear (x, s, z) [dq] d = DequantizeLinear (c, s, z)"
    numbers = {name: np.float32(number) for name, number in {"s": 0.03, "m1": -1, "p1": 1, "zero": 0}.items()}
    return written(f"(float[2,8,6,6] x) => (float y) {{ {start} {text} }}", z=np.int8(0), **numbers, **weights)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("[a] y = Neg (d)", {"Mul"}),
        ("[a] y = Abs (d)", {"Mul", "Max"}),
        ("[a] y = Clip (d, m1, p1)", {"Max", "Min"}),
        ("[a] y = Clip (d, m1)", {"Max"}),
        ("[t] t = Transpose (d) [a] y = Neg (t)", {"Transpose", "Mul"}),
        ("[p] p = MaxPool <kernel_shape = [2, 2]> (d) [r] r = Relu (p) [a] y = Neg (r)", {"MaxPool", "Relu", "Mul"}),
        ("[j] j = Concat <axis = 1> (x, d) [a] y = Abs (j)", {"Concat", "Mul", "Max"}),
        # What TensorRT computes right stays as it is.
        ("[a] y = Clip (d, zero, p1)", {"Clip"}),
        ("[a] y = Clip (d, , p1)", {"Clip"}),
        ("[m] m = Mul (d, p1) [a] y = Neg (m)", {"Mul", "Neg"}),
        ("[a] b = Neg (x) [j] y = Add (d, b)", {"Neg", "Add"}),
    ],
)
def test_what_stands_behind_codes_is_reworded_and_gives_the_same(text: str, left: set[str]) -> None:
    net = _net(text)
    wanted, result = OnnxRunner(net, optimize=False)(X), reword(to_ir(net))
    made = to_proto(result.model)
    assert not invalid(made)
    operators = {item.op_type for item in made.graph.node} - {"QuantizeLinear", "DequantizeLinear"}
    assert operators == left and list(result.changes) == ["a"] * ("a" in result.changes)
    assert np.array_equal(OnnxRunner(made, optimize=False)(X)["y"], wanted["y"])
    assert "a" in {item.name for item in made.graph.node}


def test_8_6_gets_neither_neg_nor_abs_of_floats_anywhere() -> None:
    net = _net("[m] m = Mul (d, p1) [n] n = Neg (m) [b] b = Abs (n) [k] k = Clip (b, m1, p1) y = Add (k, d)")
    wanted, result = OnnxRunner(net, optimize=False)(X), reword(to_ir(net), everywhere=True)
    made = to_proto(result.model)
    assert list(result.changes) == ["n", "b"] and not invalid(made)
    assert np.array_equal(OnnxRunner(made, optimize=False)(X)["y"], wanted["y"])


def test_bodies_that_read_codes_of_outside_are_reworded() -> None:
    net = _net(
        "y = If (yes) <then_branch = t () => (float p) { [a] p = Abs (d) }, else_branch = e () => (float o) { o = Relu (d) }>"
    )
    net.graph.initializer.append(numpy_helper.from_array(np.bool_(True), "yes"))
    wanted, result = OnnxRunner(net, optimize=False)(X), reword(to_ir(net))
    made = to_proto(result.model)
    assert list(result.changes) == ["a"] and not invalid(made) and "Abs" not in str(made.graph)
    assert np.array_equal(OnnxRunner(made, optimize=False)(X)["y"], wanted["y"])


@pytest.mark.parametrize(("least", "left"), [(-1.0, {"Max", "Min"}), (0.0, {"Clip"})])
def test_bounds_that_are_attributes_are_read(tmp_path: Path, least: float, left: set[str]) -> None:
    """As before opset 11."""
    start = (
        '<ir_version: 5, opset_import: ["" : 10]> g (float[2,8] x) => (float[2,8] y) <float s = {0.03}, int8 z = {0}>'
    )
    net = parser.parse_model(
        f"{start} {{ c = QuantizeLinear (x, s, z) d = DequantizeLinear (c, s, z) y = Clip <min = {least}, max = 1.0> (d) }}"
    )
    built(net, tmp_path / "net.engine", save_onnx=tmp_path / "kept.onnx", target="sm89", compare=False)
    operators = {item.op_type for item in load(tmp_path / "kept.onnx").graph.node}
    assert operators - {"QuantizeLinear", "DequantizeLinear", "Constant"} == left


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("opset", [13, 21])
def test_scales_along_an_axis_are_factors_of_codes_of_scale_1(axis: int, opset: int) -> None:
    """Of activations; those of weights, which are constant, stay, and so does what has zero points."""
    size = X["x"].shape[axis]
    net = written(
        f"""(float[2,8,6,6] x) => (float y, float v, float u) {{
        [q] c = QuantizeLinear <axis = {axis}> (x, s, z) [dq] y = DequantizeLinear <axis = {axis}> (c, s, z)
        [wq] a = QuantizeLinear <axis = {axis}> (w, s, z) [wdq] v = DequantizeLinear <axis = {axis}> (a, s, z)
        [uq] b = QuantizeLinear <axis = {axis}> (x, s, t) [udq] u = DequantizeLinear <axis = {axis}> (b, s, t) }}""",
        opset=opset,
        s=np.linspace(0.02, 0.07, size, dtype=np.float32),
        z=np.zeros(size, np.int8),
        t=np.arange(size, dtype=np.int8),
        w=values(2, 8, 6, 6),
    )
    wanted, result = OnnxRunner(net, optimize=False)(X), reword(to_ir(net))
    made = to_proto(result.model)
    assert list(result.changes) == ["q", "dq"] and not invalid(made)
    assert [node.op_type for node in made.graph.node][:4] == ["Div", "QuantizeLinear", "DequantizeLinear", "Mul"]
    for name, found in OnnxRunner(made, optimize=False)(X).items():
        assert np.array_equal(found, wanted[name]), name


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("[a] y = LeakyRelu <alpha = 0.2> (r)", ["a"]),
        ("[a] y = PRelu (r, p)", ["a"]),
        ("[a] g = Sigmoid (r) [o] y = Add (g, g)", ["a"]),
        ("[t] t = DepthToSpace <blocksize = 2> (r) [a] y = Tanh (t)", ["a"]),
        ("[d] d1 = Div (r, k) [e] e = Erf (d1) [m] y = Mul (r, e)", ["d", "m"]),
        (
            "[a] g = Elu (r) [code] q = QuantizeLinear (g, s, z) [o] o = DequantizeLinear (q, s, z) [p] y = Add (o, g)",
            ["a"],
        ),
        ("[a] g = Erf (r) [code] q = QuantizeLinear (g, s, z) [o] y = DequantizeLinear (q, s, z)", ["a"]),
        # What TensorRT computes right stays as it is.
        ("[a] g = Sigmoid (r) [m] y = Mul (r, g)", []),
        ("[a] y = Relu (r)", []),
        ("[a] g = Elu (r) [code] q = QuantizeLinear (g, s, z) [o] y = DequantizeLinear (q, s, z)", []),
        ("[b] b = Add (r, r) [a] y = Tanh (b)", []),
        ("[k2] k2 = DequantizeLinear (u, s, z) [f] f = Conv <group = 8> (d, k2) [a] y = Tanh (f)", []),
    ],
)
def test_what_follows_a_quantized_convolution_is_in_fp32(text: str, wide: list[str]) -> None:
    convolution = "[v] v = DequantizeLinear (w, s, z) [r] r = Conv (d, v)"
    weights = np.random.default_rng(0).integers(-20, 21, (4, 8, 3, 3)).astype(np.int8)
    net = _net(
        f"{convolution} {text}", w=weights, u=weights[:1].reshape(8, 1, 3, 3), p=values(4, 1, 1), k=np.float32(2)
    )
    model = to_ir_at(net, 19)
    to_typed(model, Precision.FP16)
    wanted, result = OnnxRunner(to_proto(model), optimize=False)(X)["y"], unfuse(model, "channels are mixed up")
    made = to_proto(result.model)
    assert not invalid(made) and list(result.changes) == wide == [item.node for item in result.kept]
    types = {value.name: value.type.tensor_type.elem_type for value in infer_shapes(made).graph.value_info}
    named = {item.name: item for item in made.graph.node}
    assert all(types[named[name].output[0]] == TensorProto.FLOAT for name in wide)
    found = OnnxRunner(made, optimize=False)(X)["y"]
    assert np.allclose(found, wanted, atol=2e-3, rtol=2e-3) and (wide or np.array_equal(found, wanted))


@pytest.mark.parametrize(
    ("text", "wide"),
    [("[a] g = Elu (r)", ["a"]), ("[a] h = HardSigmoid (r) [m] g = Mul (h, r)", ["a"]), ("[a] g = Relu (r)", [])],
)
def test_by_the_models_own_codes_what_is_only_quantized_again_is_in_fp32_too(text: str, wide: list[str]) -> None:
    net = _net(
        f"[v] v = DequantizeLinear (w, s, z) [r] r = Conv (d, v) {text} "
        "[code] q = QuantizeLinear (g, s, z) [o] y = DequantizeLinear (q, s, z)",
        w=np.ones((4, 8, 3, 3), np.int8),
    )
    model = to_ir_at(net, 19)
    to_typed(model, Precision.FP16)
    assert list(unfuse(model, "channels are mixed up", whole=True).changes) == wide


def test_behind_a_convolution_in_fp8_nothing_is_widened() -> None:
    zero = np.zeros((), ml_dtypes.float8_e4m3fn)
    net = written(
        """(float[2,8,6,6] x) => (float y) { c = QuantizeLinear (x, s, e) d = DequantizeLinear (c, s, e)
        v = DequantizeLinear (w, s, e) r = Conv (d, v) y = Tanh (r) }""",
        opset=19, w=np.ones((4, 8, 3, 3), zero.dtype), s=np.float32(0.03), e=zero,
    )  # fmt: skip
    model = to_ir(net)
    to_typed(model, Precision.FP16)
    assert not unfuse(model, "channels are mixed up").changes


def test_without_shorter_floats_nothing_is_widened() -> None:
    """In FP32 TensorRT 10.6 is right."""
    net = _net(
        "[v] v = DequantizeLinear (w, s, z) [r] r = Conv (d, v) [a] y = Tanh (r)", w=np.ones((4, 8, 3, 3), np.int8)
    )
    assert not unfuse(to_ir(net), "channels are mixed up").changes


@pytest.mark.parametrize(("scale", "changed"), [(1e-5, ["m"]), (1e-3, [])])
def test_products_of_small_scales_read_floats(scale: float, changed: list[str]) -> None:
    net = _net(
        "[v] v = DequantizeLinear <axis = 1> (w, t, o) [m] h = MatMul (d, v) [n] y = MatMul (h, v)",
        w=np.random.default_rng(0).integers(-127, 128, (6, 6)).astype(np.int8),
        t=np.linspace(scale / 2, scale, 6, dtype=np.float32),
        o=np.zeros(6, np.int8),
    )
    model = with_float_weights(to_ir(net)).model
    result = unquantize_small(model, 2.0**-20, Precision.FP16)
    made = to_proto(result.model)
    assert not invalid(made) and list(result.changes) == changed == [item.node for item in result.kept]
    assert np.array_equal(OnnxRunner(made, optimize=False)(X)["y"], OnnxRunner(net, optimize=False)(X)["y"])
    readers = {item.name: item.input[1] for item in made.graph.node if item.op_type == "MatMul"}
    assert readers["n"] == "v" and (readers["m"] != "v") is bool(changed)
