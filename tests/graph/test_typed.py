"""FP16 and BF16 graphs: valid, typed throughout, FP32 where it must stay, and near FP32 in value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import (
    conv_relu,
    model,
    node,
    nodes as graph_nodes,
    photos,
    points_of,
    quantized,
    typed,
    typing,
    values,
    written,
)
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from trtopt.core.values import Override, Precision
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.typed import keep_fp32, raise_guards
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.runner import OnnxRunner
from trtopt.ort.sessions import OnnxSession

ONNX_TYPES = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}


def _typed(proto: onnx.ModelProto, base: Precision = Precision.FP16, **options: Any) -> onnx.ModelProto:
    made = typed(proto, base, **options)
    onnx.checker.check_model(made, full_check=True)
    names = [item.name for item in made.graph.node]
    assert len(set(names)) == len(names)
    return made


def _types(proto: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(proto)
    graph = inferred.graph
    found = {item.name: item.type.tensor_type.elem_type for item in (*graph.value_info, *graph.input, *graph.output)}
    return found | {item.name: item.data_type for item in graph.initializer}


def _reasons(proto: onnx.ModelProto, base: Precision = Precision.FP16) -> dict[str, str]:
    return {item.node: item.reason for item in keep_fp32(to_ir(proto), base)}


@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("fp32_io", [True, False])
def test_every_tensor_has_the_type_and_io_keeps_its_own(base: Precision, fp32_io: bool) -> None:
    proto = conv_relu()
    made = _typed(proto, base, io_fp32=fp32_io)
    types = _types(made)
    io = TensorProto.FLOAT if fp32_io else ONNX_TYPES[base]
    assert (types["x"], types["y"]) == (io, io)
    assert {kind for name, kind in types.items() if name not in "xy"} == {ONNX_TYPES[base]}
    assert [item.name for item in made.graph.input] == ["x"]
    assert [item.name for item in made.graph.output] == ["y"]
    x = values(2, 3, 8, 8, seed=3)
    expected = OnnxSession(proto, threads=1)({"x": x})["y"]
    actual = np.asarray(OnnxRunner(made, optimize=False, threads=1)({"x": x})["y"], np.float32)
    np.testing.assert_allclose(actual, expected, atol={Precision.FP16: 0.02, Precision.BF16: 0.15}[base])


def test_fp32_returns_the_graph_itself() -> None:
    proto = conv_relu()
    result = typing(proto, Precision.FP32)
    assert not result.changes and result.kept == ()


@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16])
def test_quantized_graphs_get_typed_scales_and_keep_their_codes(base: Precision) -> None:
    proto = conv_relu()
    points = points_of(proto, overrides=[Override("*", Precision.INT8)])
    plain = quantized(proto, points, {"x": 4.0}, base=base)
    made = _typed(plain, base)
    tensors = {item.name: item for item in made.graph.initializer}
    scales = [item for name, item in tensors.items() if "_scale" in name]
    assert {item.data_type for item in scales} == {ONNX_TYPES[base]}
    assert {item.data_type for name, item in tensors.items() if "w_quantized" in name} == {TensorProto.INT8}
    x = values(2, 3, 8, 8, seed=3)
    expected = OnnxSession(plain, threads=1, optimize=False)({"x": x})["y"]
    actual = OnnxRunner(made, optimize=False, threads=1)({"x": x})["y"]
    assert np.abs(actual - expected).mean() < 0.02


def test_normalizations_and_squares_stay_fp32_with_what_follows_them() -> None:
    proto = written(
        "(float[n,3,8,8] x) => (float[] y) { [square] squares = Mul (x, x) [mean] mean = ReduceMean <axes = [3]> (squares) "
        "[shift] shifted = Add (mean, eps) [root] root = Sqrt (shifted) [divide] normal = Div (x, root) "
        "[gain] y = Mul (normal, gain) }",
        eps=np.float32(1e-6), gain=np.float32(2),
    )  # fmt: skip
    reasons = _reasons(proto)
    assert set(reasons) == {"square", "mean", "shift", "root", "divide"}
    x = values(1, 3, 8, 8) * 400  # squares pass 65504
    actual = OnnxRunner(_typed(proto), optimize=False, threads=1)({"x": x})["y"]
    expected = OnnxSession(proto, threads=1)({"x": x})["y"]
    np.testing.assert_allclose(actual, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("guard", "least", "reader", "stays"),
    [
        ("Clip", 1e-10, "Log (guarded)", True),
        ("Max", 1e-10, "Reciprocal (guarded)", True),
        ("Add", 1e-8, "Div (x, guarded)", True),
        ("Add", 1e-6, "Log (guarded)", False),  # FP16 holds it
        ("Clip", 1e-10, "Relu (guarded)", False),  # zero makes nothing infinite there
        ("Clip", 1e-12, "Div (x, wide)", True),  # as PyTorch's normalize is exported
        ("Add", 1e-12, "Div (x, root)", True),
    ],
)
def test_what_keeps_values_from_zero_does_so_in_fp16_too(guard: str, least: float, reader: str, stays: bool) -> None:
    between = {"wide": "[wide] wide = Expand (guarded, form)", "root": "[root] root = Sqrt (guarded)"}
    also = [name for name in between if name in reader]
    text = f"[guard] guarded = {guard} (x, least) {' '.join(between[name] for name in also)} [read] y = {reader}"
    proto = written(
        f"(float[n,3,8,8] x) => (float[] y) {{ {text} }}", least=np.float32(least), form=np.int64([1, 3, 8, 8])
    )
    assert set(_reasons(proto)) == ({"guard", "read", *also} if stays else set())
    zeros = np.zeros((1, 3, 8, 8), np.float32)
    assert np.isfinite(OnnxSession(_typed(proto), threads=1)({"x": zeros})["y"]).all()


@pytest.mark.parametrize(
    ("guard", "reader", "raised"),
    [("Clip (x, least)", "Div (x, guarded)", True), ("Max (x, least)", "Div (x, guarded)", True),
     ("Max (x, least)", "Log (guarded)", False), ("Add (x, least)", "Div (x, guarded)", False)],
)  # fmt: skip
def test_divisors_of_weakly_typed_builds_stay_above_zero_in_fp16(guard: str, reader: str, raised: bool) -> None:
    net = written(f"(float[n,8] x) => (float[] y) {{ [g] guarded = {guard} y = {reader} }}", least=np.float32(1e-12))
    result = raise_guards(to_ir(net))
    assert list(result.changes) == ["g"] * raised
    if raised:
        (least,) = to_proto(result.model).graph.initializer
        assert np.float16(numpy_helper.to_array(least)) > 0
        found = [OnnxSession(made, threads=1)({"x": values(4, 8)})["y"] for made in (net, to_proto(result.model))]
        above = values(4, 8) > 1e-6
        assert np.array_equal(found[0][above], found[1][above])


def test_inputs_that_onnx_defines_as_fp32_stay_so() -> None:
    text = '(float[n,3,8,8] x) => (float[] y) { r = Relu (x) y = Resize <mode = "nearest"> (r, , s) }'
    made = _typed(written(text, s=np.array([1, 1, 2, 2], np.float32)))
    (resize,) = [item for item in made.graph.node if item.op_type == "Resize"]
    tensors = {item.name: item for item in made.graph.initializer}
    assert tensors[resize.input[2]].data_type == TensorProto.FLOAT
    assert numpy_helper.to_array(tensors[resize.input[2]]).tolist() == [1, 1, 2, 2]


def test_one_constant_serves_both_types() -> None:
    proto = written("(float[n,3,8,8] x) => (float[] y) { a = Add (x, c) y = Pow (a, c) }", c=np.float32(2))
    assert {item.data_type for item in _typed(proto).graph.initializer} == {TensorProto.FLOAT, TensorProto.FLOAT16}


CHOICE = """total = ReduceSum <keepdims = 0> (r) large = Greater (total, one) [body] h = If (large) <
    then_branch = t () => (float[] a) { a = Neg (r) }, else_branch = e () => (float[] b) { b = Abs (r) }> y = Add (h, r)"""
LOOP = """[body] h = Loop <body = b (int64 step, bool go, float[1,3,8,8] carried) => (bool still, float[1,3,8,8] next) {
    next = Add (carried, r) still = Identity (go) }> (steps, yes, r) y = Sigmoid (h)"""


X, Y = "(float[1,3,8,8] x) =>", "(float[] y)"
SIZE = "shape = Shape (x) [to_float] size = Cast <to = 1> (shape) [halve] halves = Mul (size, half)"
# Nodes, what stays in FP32 for its own sake, and what runs: 2049 and 4099 aren't FP16 numbers, and what FP16 rounds is near.
KEPT: dict[str, tuple[ModelProto, set[str], NDArray[Any]]] = {
    "a constant beyond FP16": (
        written(f"{X} {Y} {{ [scale] y = Mul (x, big) }}", big=np.float32(1e5)), {"scale"}, values(1, 3, 8, 8) * 1e-3,
    ),
    "sizes": (
        written(f"(float[a,b,c,d] x) => {Y} {{ {SIZE} [largest] most = ReduceMax <keepdims = 0> (halves) y = Mul (x, most) }}",
                half=np.float32(0.5)),
        {"to_float", "halve", "largest"}, np.ones((1, 1, 1, 4096), np.float32),
    ),
    "sizes that become integers again": (
        written(f"(float[n] x) => (float[m] y) {{ {SIZE} [down] floor = Floor (halves) length = Cast <to = 7> (floor) "
                "zeros = ConstantOfShape (length) y = Identity (zeros) }", half=np.array([0.5], np.float32)),
        {"to_float", "halve", "down"}, np.zeros(4098, np.float32),
    ),
    "counts and comparisons": (
        written("(float[n] x) => (int64 y, bool over) { [sum] total = ReduceSum <keepdims = 0> (x) y = Cast <to = 7> (total) "
                "over = Greater (total, limit) }", limit=np.float32(4098.5)),
        {"sum"}, np.ones(4099, np.float32),
    ),
    "an output that others read": (
        written(f"{X} (float[1,3,8,8] y, float[1,3,8,8] z) {{ y = Relu (x) z = Sigmoid (y) }}"), set(), values(1, 3, 8, 8)),
    "an input that is an output": (
        written(f"{X} (float[1,3,8,8] y, float[1,3,8,8] same) {{ y = Relu (x) same = Identity (x) }}"),
        set(), values(1, 3, 8, 8),
    ),
    "a choice": (written(f"{X} {Y} {{ r = Relu (x) {CHOICE} }}", one=np.float32(1)), {"body"}, values(1, 3, 8, 8)),
    "a loop": (written(f"{X} (float[1,3,8,8] y) {{ r = Relu (x) {LOOP} }}", steps=3, yes=True), {"body"}, values(1, 3, 8, 8)),
    "minus infinity": (
        written(f"{X} {Y} {{ hidden = Less (x, zero) y = Where (hidden, low, x) }}", zero=np.float32(0),
                low=np.float32(-np.inf)),
        set(), values(1, 3, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_fp16_would_change_stays_fp32_and_all_else_computes_alike(case: str) -> None:
    proto, kept, x = KEPT[case]
    reasons = _reasons(proto)
    assert kept <= set(reasons) and {name for name in reasons if "_" not in name or name in kept} == kept
    expected, made = OnnxSession(proto, threads=1)({"x": x}), _typed(proto)
    actual = OnnxRunner(made, optimize=False, threads=1)({"x": x})
    assert list(actual) == [item.name for item in proto.graph.output]
    for name, wanted in expected.items():
        assert actual[name].dtype == wanted.dtype and actual[name].shape == wanted.shape
        np.testing.assert_allclose(actual[name], wanted, rtol=2e-3, atol=5e-3)
    if case == "a constant beyond FP16":
        assert "1e+05" in reasons["scale"] and _reasons(proto, Precision.BF16) == {}


def test_operators_without_bf16_kernels_stay_fp32() -> None:
    proto = model([node("Relu", "x", "r", "relu"), node("HardSwish", "r", "y", "swish")])
    assert set(_reasons(proto, Precision.BF16)) == {"swish"}
    assert _reasons(proto, Precision.FP16) == {}
    assert _types(_typed(proto, Precision.BF16))["r"] == TensorProto.BFLOAT16


def test_overrides_keep_nodes_in_fp32_by_name() -> None:
    proto = conv_relu()
    result = typing(proto, Precision.FP16, overrides=[Override("c", Precision.FP32)])
    made, kept = to_proto(result.model), result.kept
    assert [(item.node, item.precision) for item in kept] == [("c", Precision.FP32)]
    assert _types(made)["h"] == TensorProto.FLOAT


@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("low", [float(np.finfo(np.float32).min), -1e9, -1e12])
def test_a_row_that_is_masked_whole_makes_no_nan(base: Precision, low: float) -> None:
    proto = model(
        graph_nodes("[gap] gap = Sub (one, x) [mask] mask = Mul (gap, low) y = Softmax <axis = 3> (mask)"),
        weights={"one": np.array(1.0, np.float32), "low": np.array(low, np.float32)},
    )
    assert "mask" not in _reasons(proto)  # the sentinel is clamped: the node itself runs in FP16
    x = np.ones((1, 3, 8, 8), np.float32)
    x[:, :, 4:] = 0  # whole rows; the others meet 0 × low
    x[..., :2, 5:] = 0
    actual = np.asarray(OnnxRunner(_typed(proto, base), optimize=False, threads=1)({"x": x})["y"], np.float32)
    np.testing.assert_allclose(actual, OnnxSession(proto, threads=1)({"x": x})["y"], atol=2e-3)


def test_low_scores_that_are_masked_whole_make_no_nan_and_a_bound_stays_one() -> None:
    """FP16 ends at 65504: what a mask adds to is less than -65520 soon; a Clip's least is as low as it can be."""
    proto = written(
        """(float[1, 2, 4] x) => (float[1, 2, 4] y, float[1, 2, 4] z) { none = Less (x, lowest) all = Not (none)
        mask = Where (all, low, zero) both = Add (mask, mask) t = Add (x, both) y = Softmax <axis = 2> (t)
        u = Add (x, x) z = Max (u, lowest) }""",
        low=np.finfo(np.float32).min,
        lowest=np.finfo(np.float32).min,
        zero=np.float32(0),
    )
    x = np.full((1, 2, 4), -22000, np.float32)
    found = OnnxRunner(_typed(proto), optimize=False, threads=1)({"x": x})
    np.testing.assert_allclose(found["y"], 0.25)
    np.testing.assert_allclose(found["z"], -44000, rtol=1e-3)


@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16])
def test_operators_that_onnx_defines_in_fp32_only_stay_fp32(base: Precision) -> None:
    proto = written(
        "(float[1,3,8,8] x) => (float[] y) { [range] ramp = Range (zero, eight, one) "
        "[noise] noise = RandomNormal <shape = [1, 3, 8, 8], seed = 1.0> () [celu] c = Celu (x) d = Add (c, ramp) "
        "y = Add (d, noise) }",
        zero=np.float32(0), eight=np.float32(8), one=np.float32(1),
    )  # fmt: skip
    assert {item.node for item in typing(proto, base).kept} == {"range", "noise", "celu"}
    assert set(_reasons(proto, base)) <= {"celu"}  # a weakly typed build chooses among the types that TensorRT has
    _typed(proto, base)


def test_an_override_outranks_the_rules_of_thumb() -> None:
    proto = model(
        graph_nodes("[power] p = Pow (x, two) [mean] m = ReduceMean <axes = [3]> (p) [root] y = Sqrt (m)"),
        weights={"two": np.array(2.0, np.float32)},
    )
    assert set(_reasons(proto)) == {"power", "mean", "root"}
    kept = keep_fp32(to_ir(proto), Precision.FP16, [Override("root", Precision.FP16)])
    assert [item.node for item in kept] == ["power", "mean"]


@pytest.mark.parametrize("name", ["efficientnet-lite0", "minilm"])
def test_real_networks_stay_near_fp32(name: str, exported: Callable[[str], Path]) -> None:
    folded, _ = fold(load_model(exported(name)).proto)
    feeds: dict[str, Any]
    if name == "minilm":
        feeds = {item.name: np.ones((2, 16), np.int64) for item in folded.graph.input}
        feeds["input_ids"] = np.random.default_rng(0).integers(1000, 20000, (2, 16))
        feeds["attention_mask"][1, 9:] = 0
    else:
        feeds = {folded.graph.input[0].name: photos(224, 2)}
    expected = OnnxSession(folded, threads=1)(feeds)
    actual = OnnxRunner(_typed(folded), optimize=False, threads=1)(feeds)
    for output, reference in expected.items():
        difference = np.abs(np.asarray(actual[output], np.float32) - reference).max()
        assert 0 < difference <= 0.02 * np.abs(reference).max(), output


def test_what_onnx_infers_nothing_of_is_typed_all_the_same() -> None:
    """ONNX's inference has no rule for GroupNormalization, and so none for what follows it."""
    proto = written(
        "(float[batch,3,8,8] x) => (float[] y) { [conv] c = Conv <pads = [1, 1, 1, 1]> (x, w) "
        "[norm] n = GroupNormalization <num_groups = 2> (c, s, b) [next] y = Conv <pads = [1, 1, 1, 1]> (n, v) }",
        21, w=values(4, 3, 3, 3), v=values(3, 4, 3, 3), s=values(4), b=values(4, seed=2),
    )  # fmt: skip
    made = typing(proto, Precision.FP16)
    assert {"conv", "next"} <= set(made.changes)
    assert [item.node for item in made.kept] == ["norm"]


def test_a_recurrent_layer_may_omit_outputs_and_takes_what_moves_its_input_along() -> None:
    proto = written(
        "(float[2,5,3] x) => (float[] y) { [moved] t = Transpose <perm = [1, 0, 2]> (x) "
        "[gru] , h = GRU <hidden_size = 4> (t, w, r) y = Relu (h) }",
        w=values(1, 12, 3), r=values(1, 12, 4),
    )  # fmt: skip
    assert "gru" in typing(proto, Precision.FP16).changes
    kept = {item.node: item.reason for item in typing(proto, Precision.BF16).kept}
    assert set(kept) == {"gru", "moved"}
    assert "moves what gru reads" in kept["moved"]
