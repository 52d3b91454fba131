"""Quantized models of any maker, as they are taken in, held against themselves in ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import node, values
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from trtopt.graph.io import load_model
from trtopt.graph.lazy_weights import is_lazy
from trtopt.graph.passes.intake import Taken, take_in
from trtopt.graph.proto import all_nodes
from trtopt.ort.sessions import OnnxSession

MS = "com.microsoft"
FLOAT, UINT8, INT8, INT32 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32
X = values(2, 4, 6, 6)
CODES = np.random.default_rng(5)


def made(
    nodes: list[onnx.NodeProto], opset: int = 17, x: Any = X, kind: int = FLOAT, given: int = FLOAT, **held: Any
) -> onnx.ModelProto:
    """x → … → y."""
    graph = helper.make_graph(
        nodes, "test",
        [helper.make_tensor_value_info("x", kind, ["batch", *np.shape(x)[1:]])],
        [helper.make_tensor_value_info("y", given, None)],
        [numpy_helper.from_array(np.asarray(item), name) for name, item in held.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1), helper.make_opsetid("trt", 1)]
    return load_model(helper.make_model(graph, opset_imports=imports, ir_version=10)).proto


def run(proto: onnx.ModelProto, x: NDArray[Any]) -> NDArray[Any]:
    return next(iter(OnnxSession(proto, threads=1, optimize=False)({"x": x}).values()))


def ops(taken: Taken) -> Counter[str]:
    return Counter(item.op_type for item in taken.proto.graph.node)


def q(source: str, target: str, scale: str = "xs", zero: str = "xz", **attributes: Any) -> onnx.NodeProto:
    return node("QuantizeLinear", f"{source} {scale} {zero}", target, **attributes)


def dq(source: str, target: str, scale: str = "xs", zero: str = "xz", **attributes: Any) -> onnx.NodeProto:
    return node("DequantizeLinear", f"{source} {scale} {zero}".strip(), target, **attributes)


def weight(kind: Any, *shape: int) -> NDArray[Any]:
    bounds = np.iinfo(kind)
    return CODES.integers(bounds.min + 8, bounds.max - 8, shape, kind)


SIGNED = {"xs": np.float32(0.03), "xz": np.int8(0), "ys": np.float32(0.05), "yz": np.int8(0)}
UNSIGNED = {"xs": np.float32(0.03), "xz": np.uint8(128), "ys": np.float32(0.05), "yz": np.uint8(128)}
SKEWED = {"xs": np.float32(0.03), "xz": np.uint8(100), "ys": np.float32(0.05), "yz": np.uint8(90)}
TWO = "xq xs xz xq xs xz ys yz"


def linear(
    op: str, inputs: str, held: dict[str, Any], domain: str = MS, shape: Any = None, **attributes: Any
) -> onnx.ModelProto:
    """x quantized → an operator on codes → dequantized."""
    weights = {name: item for name, item in attributes.items() if isinstance(item, (np.ndarray, np.generic))}
    rest = {name: item for name, item in attributes.items() if name not in weights}
    nodes = [q("x", "xq"), node(op, inputs, "yq", domain=domain, **rest), dq("yq", "y", "ys", "yz")]
    return made(nodes, x=X if shape is None else np.zeros(shape), **held, **weights)


CONV = {"w": weight(np.int8, 5, 4, 3, 3), "ws": np.full(5, 0.01, np.float32), "wz": np.zeros(5, np.int8)}
BIAS = CODES.integers(-3000, 3000, 5, np.int32)
CONV_INPUTS = "xq xs xz w ws wz ys yz b"
MATRIX = {"w": weight(np.int8, 6, 5), "ws": np.float32(0.01), "wz": np.int8(0)}
LINEAR: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "conv": ("QLinearConv", CONV_INPUTS, {"domain": "", **CONV, "b": BIAS}, "Conv"),
    "product": ("QLinearMatMul", "xq xs xz w ws wz ys yz", {"domain": "", **MATRIX}, "MatMul"),
    "sum": ("QLinearAdd", TWO, {}, "Add"),
    "factor": ("QLinearMul", TWO, {}, "Mul"),
    "sigmoid": ("QLinearSigmoid", "xq xs xz ys yz", {}, "Sigmoid"),
    "leaky": ("QLinearLeakyRelu", "xq xs xz ys yz", {"alpha": 0.1}, "LeakyRelu"),
    "softmax": ("QLinearSoftmax", "xq xs xz ys yz", {"axis": -1, "opset": 13}, "Softmax"),
    "mean": ("QLinearGlobalAveragePool", "xq xs xz ys yz", {}, "GlobalAveragePool"),
    "pool": ("QLinearAveragePool", "xq xs xz ys yz", {"kernel_shape": [2, 2]}, "AveragePool"),
    "joined": ("QLinearConcat", "ys yz xq xs xz xq xs xz", {"axis": 1}, "Concat"),
}  # fmt: skip


@pytest.mark.parametrize("held", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
@pytest.mark.parametrize("name", LINEAR)
def test_operators_on_codes_become_floating_ones_between_pairs(name: str, held: dict[str, Any]) -> None:
    op, inputs, more, floating = LINEAR[name]
    proto = linear(op, inputs, held, **more)
    taken = take_in(proto)
    assert (taken.refused, taken.exact) == ("", True)
    found = ops(taken)
    assert found[floating] == 1
    assert found["QuantizeLinear"] == 2
    assert f"1 {op}" in "; ".join(taken.changes)
    assert all(item.domain == "" for item in taken.proto.graph.node)
    # A tie is another code, one step away: their sums are of whole numbers, ours of floats.
    assert np.abs(run(taken.proto, X) - run(proto, X)).max() <= 0.0501
    assert np.mean(np.abs(run(taken.proto, X) - run(proto, X)) > 1e-5) < 0.03
    assert zero_points(taken) == {0}


def zero_points(taken: Taken) -> set[int]:
    held = {item.name: numpy_helper.to_array(item) for item in taken.proto.graph.initializer}
    pairs = [item for item in taken.proto.graph.node if item.op_type.endswith("eLinear")]
    return {
        int(zero) for item in pairs for name in item.input[2:] for zero in held[name].astype(np.float32).reshape(-1)
    }


def test_a_gemm_on_codes_gives_codes_or_floats() -> None:
    held = {**SIGNED, **MATRIX, "w": MATRIX["w"].T.copy(), "b": BIAS}
    x = values(3, 6)
    for outputs, last in (("ys yz", [dq("yq", "y", "ys", "yz")]), ("", [node("Identity", "yq", "y")])):
        gemm = node("QGemm", f"xq xs xz w ws wz b {outputs}".strip(), "yq", domain=MS, transB=1, alpha=0.5)
        proto = made([q("x", "xq"), gemm, *last], x=x, **held)
        taken = take_in(proto)
        assert (ops(taken)["Gemm"], taken.exact, taken.refused) == (1, True, "")
        np.testing.assert_allclose(run(taken.proto, x), run(proto, x), rtol=1e-5, atol=0.0501 if outputs else 1e-5)


def test_what_moves_codes_moves_floats_between_two_pairs() -> None:
    nodes = [
        node("Identity", "xs", "s"), q("x", "xq", "s"), node("MaxPool", "xq", "p", kernel_shape=[2, 2]),
        node("Clip", "p  most", "c"), node("Transpose", "c", "t", perm=[0, 2, 3, 1]), node("Pad", "t pads xz", "padded"),
        dq("padded", "y"),
    ]  # fmt: skip
    nodes[3].input[:] = ["p", "", "most"]  # as torch's older exporter writes fewer bits
    for held in (UNSIGNED, SIGNED):
        proto = made(
            nodes, pads=np.array([0, 1, 0, 0, 0, 1, 0, 0]), most=held["xz"] + held["xz"].dtype.type(30), **held
        )
        taken = take_in(proto)
        assert taken.exact
        assert ops(taken)["QuantizeLinear"] == 4
        np.testing.assert_array_equal(run(taken.proto, X), run(proto, X))


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([np.int8, np.uint8]), st.integers(0, 255), st.floats(2**-10, 1, width=32), st.integers(0, 2**32 - 1)
)
def test_activations_keep_their_numbers_or_get_wider_steps(kind: Any, zero: int, scale: float, seed: int) -> None:
    bounds = np.iinfo(kind)
    zero_point = kind(zero + bounds.min)
    held = {"xs": np.float32(scale), "xz": zero_point}
    proto = made([q("x", "xq"), dq("xq", "y")], **held)
    taken = take_in(proto)
    x = values(2, 4, 6, 6, seed=seed, scale=scale * 100)
    wanted, found = run(proto, x), run(taken.proto, x)
    middle = int(zero_point) - bounds.min == 128
    assert taken.exact is middle
    assert zero_points(taken) == {0}
    if middle:
        np.testing.assert_array_equal(found, wanted)
        return
    low, high = (bounds.min - int(zero_point)) * scale, (bounds.max - int(zero_point)) * scale
    step = max(-low / 128, high / 127)
    assert np.abs(found - np.clip(x, low, high)).max() <= step / 2 * 1.001 + 1e-6
    assert found.min() >= low - step / 2 * 1.001
    assert found.max() <= high + step / 2 * 1.001


def test_codes_that_several_read_and_scales_in_fp16() -> None:
    nodes = [q("x", "xq"), dq("xq", "a"), node("QLinearAdd", TWO, "yq", domain=MS), dq("yq", "b", "ys", "yz")]
    nodes.append(node("Add", "a b", "y"))
    for held in (UNSIGNED, SKEWED):
        proto = made(nodes, **held)
        taken = take_in(proto)
        assert ops(taken)["QuantizeLinear"] == 2
        assert np.abs(run(taken.proto, X) - run(proto, X)).max() < (1e-5 if held is UNSIGNED else 0.2)
    split = [
        q("x", "xq"),
        node("Split", "xq", "s1 s2", axis=1),
        dq("s1", "d1"),
        dq("s2", "d2"),
        node("Add", "d1 d2", "y"),
    ]
    proto = made(split, **UNSIGNED)
    np.testing.assert_array_equal(run(take_in(proto).proto, X), run(proto, X))
    half, x = TensorProto.FLOAT16, X.astype(np.float16)
    held = {"xs": np.float16(0.03), "xz": np.uint8(128), "ws": np.float16(0.01), "wz": np.uint8(128)}
    held["w"] = weight(np.uint8, 6, 5)
    nodes = [q("x", "xq"), dq("xq", "xd"), dq("w", "wd", "ws", "wz"), node("MatMul", "xd wd", "y")]
    proto = made(nodes, 21, x=x, kind=half, given=half, **held)
    taken = take_in(proto)
    assert taken.exact and zero_points(taken) == {0}
    np.testing.assert_array_equal(run(taken.proto, x), run(proto, x))


def test_a_relu_that_a_zero_point_stood_for_comes_back_once() -> None:
    held = {"xs": np.float32(0.01), "xz": np.uint8(0)}
    taken = take_in(made([q("x", "xq"), dq("xq", "y")], **held))
    assert ops(taken)["Relu"] == 1
    assert not taken.exact
    assert taken.changes[0].startswith("1 activations with zero points moved to symmetric scales, up to twice as wide")
    assert run(taken.proto, X).min() == 0
    taken = take_in(made([node("Relu", "x", "r"), q("r", "xq"), dq("xq", "y")], **held))
    assert ops(taken)["Relu"] == 1


@pytest.mark.parametrize("both", [True, False])
def test_codes_that_are_bounded_may_have_room_with_their_zero_point(both: bool) -> None:
    """As torch's older exporter writes activations of 7 bits."""
    nodes = [q("x", "xq"), node("Clip", f"xq {'least' if both else ''} most", "c"), dq("c", "y")]
    if not both:
        nodes[1].input[:] = ["xq", "", "most"]
    proto = made(nodes, xs=np.float32([0.02]), xz=np.uint8([40]), least=np.uint8(0), most=np.uint8(127))
    taken = take_in(proto)
    assert taken.exact and ops(taken) == Counter({"Clip": 2 - both, "QuantizeLinear": 1, "DequantizeLinear": 1})
    np.testing.assert_allclose(run(taken.proto, X), run(proto, X), atol=1e-6)


def test_bounds_beyond_what_codes_hold_leave_theirs() -> None:
    held = {"xs": np.float32(0.01), "xz": np.uint8(40), "least": np.float32(-9), "most": np.float32(9)}
    taken = take_in(proto := made([node("Clip", "x least most", "c"), q("c", "xq"), dq("xq", "y")], **held))
    assert abs(run(taken.proto, X).min() - run(proto, X).min()) < 0.01


def test_codes_of_four_and_sixteen_bits() -> None:
    for kind, opset in ((ml_dtypes.int4, 21), (ml_dtypes.uint4, 21)):
        held = {"xs": np.float32(0.3), "xz": np.asarray(3, kind)}
        proto = made([q("x", "xq"), dq("xq", "y")], opset, **held)
        taken = take_in(proto)
        assert taken.exact
        np.testing.assert_array_equal(run(taken.proto, X), run(proto, X))
    proto = made([q("x", "xq"), dq("xq", "y")], 21, xs=np.float32(0.0001), xz=np.uint16(0))
    taken = take_in(proto)
    assert "1 activations left in floating point" in "; ".join(taken.changes)
    assert ops(taken)["QuantizeLinear"] == 0
    np.testing.assert_allclose(run(taken.proto, X), run(proto, X), atol=0.0001)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([np.int8, np.uint8]), st.integers(0, 255), st.booleans(), st.sampled_from(["MatMul", "Conv", "Gemm"]),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_weights_keep_their_numbers_or_get_scales_by_channel(
    kind: Any, zero: int, each: bool, op: str, seed: int
) -> None:
    bounds, random = np.iinfo(kind), np.random.default_rng(seed)
    shape, axis, x = {
        "MatMul": ((6, 5), 1, values(2, 4, 6, 6)), "Conv": ((5, 4, 3, 3), 0, X), "Gemm": ((5, 6), 0, values(3, 6))
    }[op]  # fmt: skip
    codes = random.integers(bounds.min, bounds.max + 1, shape, kind)
    zero_point = np.full(5, zero + bounds.min, kind) if each else kind(zero + bounds.min)
    scale = random.uniform(0.001, 0.1, 5).astype(np.float32) if each else np.float32(0.01)
    attributes = {"axis": axis} if each else {}
    nodes = [q("x", "xq"), dq("xq", "xd"), dq("w", "wd", "ws", "wz", **attributes),
             node(op, "xd wd", "y", **({"transB": 1} if op == "Gemm" else {}))]  # fmt: skip
    proto = made(nodes, x=x, w=codes, ws=scale, wz=zero_point, xs=np.float32(0.03), xz=np.int8(0))
    taken = take_in(proto)
    assert zero_points(taken) == {0}
    shifted = codes.astype(int) - int(np.ravel(zero_point)[0])
    exact = shifted.min() >= -128 and shifted.max() <= 127
    assert taken.exact == exact
    wanted, found = run(proto, x), run(taken.proto, x)
    terms = np.prod(shape) / 5
    step = float(np.max(scale))
    atol = (
        1e-4 * float(np.abs(wanted).max())
        if exact
        else step * min(terms / 2, 1.5 * np.sqrt(terms)) * float(np.abs(x).max()) + 1e-4
    )
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=0)
    assert ops(taken)["DequantizeLinear"] == 2


@pytest.mark.parametrize("stored", [True, False])
def test_scales_of_0_are_positive_and_what_they_scale_is_0(stored: bool) -> None:
    """Quantizers give them to channels of zeros, and TensorRT refuses them."""
    w = values(5, 4, 3, 3)
    w[1] = 0
    scale = (np.abs(w).max((1, 2, 3)) / 127).astype(np.float32)
    codes = np.rint(w / np.where(scale, scale, 1).reshape(-1, 1, 1, 1)).astype(np.int8)
    first = [] if stored else [q("w", "wq", "ws", "wz", axis=0)]
    nodes = [*first, dq("w" if stored else "wq", "wd", "ws", "wz", axis=0), node("Conv", "x wd", "y")]
    taken = take_in(made(nodes, w=codes if stored else w, ws=scale, wz=np.zeros(5, np.int8)))
    content = {item.name: numpy_helper.to_array(item) for item in taken.proto.graph.initializer}
    (found,) = (item for item in taken.proto.graph.node if item.op_type == "DequantizeLinear")
    assert (content[found.input[1]] > 0).all()
    made_of = (content[found.input[0]].astype(np.float32) * content[found.input[1]].reshape(-1, 1, 1, 1))[1]
    assert taken.exact and not made_of.any()
    one = take_in(
        made(
            [dq("w", "wd", "s", "z"), node("Conv", "x wd", "y")], w=np.zeros_like(codes), s=np.float32(0), z=np.int8(0)
        )
    )
    assert not run(one.proto, X).any()
    strange = made([dq("w", "wd", "s", "", axis=7), node("Conv", "x wd", "y")], w=codes, s=np.zeros(4, np.float32))
    assert take_in(strange).proto is strange
    uneven = made(
        [dq("w", "wd", "s", "z", axis=0), node("Conv", "x wd", "y")],
        w=codes,
        s=np.ones(5, np.float32),
        z=np.int8([1, 2]),
    )
    assert take_in(uneven).proto is uneven


def test_scales_that_are_dropped_leave_bounds_and_the_weights_that_codes_stand_for() -> None:
    held = {
        "w": weight(np.int8, 5, 4, 3, 3),
        "ws": np.float32(0.01),
        "wz": np.int8(0),
        "xs": np.float32(0.02),
        "xz": np.uint8(0),
    }
    nodes = [q("x", "xq"), dq("xq", "xd"), dq("w", "wd", "ws", "wz"), node("Conv", "xd wd", "y")]
    proto = made(nodes, **held)
    taken = take_in(proto, drop=True)
    assert ops(taken) == Counter({"Clip": 1, "Identity": 1, "Conv": 1, "Constant": 1})
    for x in (X, 9 * X):  # beyond what codes reach, too
        wanted = run(proto, x)
        assert np.abs(run(taken.proto, x) - wanted).max() < 0.02 * np.abs(wanted).max()


def test_biases_and_constants_become_floats() -> None:
    nodes = [q("x", "xq"), dq("xq", "xd"), dq("w", "wd", "ws", "wz", axis=0), dq("b", "bd", "bs", "", axis=0),
             node("Conv", "xd wd bd", "c"), dq("a", "ad", "as", "az"), node("Add", "c ad", "y")]  # fmt: skip
    held = {**SIGNED, **CONV, "b": BIAS, "bs": np.full(5, 0.0003, np.float32), "a": weight(np.uint8, 5, 1, 1)}
    proto = made(nodes, **held, **{"as": np.float32(0.02), "az": np.uint8(7)})
    taken = take_in(proto)
    assert (taken.exact, ops(taken)["DequantizeLinear"]) == (True, 2)
    np.testing.assert_allclose(run(taken.proto, X), run(proto, X), rtol=1e-5, atol=1e-5)


def test_weights_with_pairs_of_their_own_are_coded_where_those_are_skewed() -> None:
    w = values(6, 5)
    for zero, pairs in ((np.int8(0), 2), (np.uint8(128), 1), (np.uint8(90), 1)):
        nodes = [q("x", "xq", "xs", "z"), dq("xq", "xd", "xs", "z"), q("w", "wq", "ws", "wz"), dq("wq", "wd", "ws", "wz"),
                 node("MatMul", "xd wd", "y")]  # fmt: skip
        proto = made(nodes, w=w, ws=np.float32(0.02), wz=zero, xs=np.float32(0.03), z=np.int8(0))
        taken = take_in(proto)
        assert ops(taken)["QuantizeLinear"] == pairs
        np.testing.assert_allclose(run(taken.proto, X), run(proto, X), atol=1e-5 if int(zero) != 90 else 0.2)


def test_what_tensorrt_runs_stays_as_it_is() -> None:
    nodes = [q("x", "xq"), dq("xq", "xd"), dq("w", "wd", "ws", "wz"), node("MatMul", "xd wd", "y")]
    proto = made(nodes, **MATRIX, **SIGNED)
    taken = take_in(proto)
    assert taken.proto is proto
    assert taken.changes == ()
    floating = made([node("Relu", "x", "y")])
    assert take_in(floating).proto is floating


def test_one_scale_is_a_number_and_no_list_of_one() -> None:
    """With lists TensorRT-RTX 1.7.1 runs the layer in FP16."""
    held = {name: np.reshape(item, 1) for name, item in SIGNED.items()}
    nodes = [q("x", "xq"), dq("xq", "xd"), dq("w", "wd", "ws", "wz"), node("Conv", "xd wd", "y")]
    proto = made(nodes, w=CONV["w"], ws=np.float32([0.01]), wz=np.int8([0]), **held)
    taken = take_in(proto)
    content = {item.name: numpy_helper.to_array(item) for item in taken.proto.graph.initializer}
    pairs = [item for item in taken.proto.graph.node if item.op_type.endswith("eLinear")]
    assert {content[name].shape for item in pairs for name in item.input[1:]} == {()}
    assert taken.exact
    np.testing.assert_array_equal(run(taken.proto, X), run(proto, X))


def test_inputs_and_outputs_in_codes() -> None:
    x = weight(np.uint8, 2, 4, 6, 6)
    for zero in (128, 90):
        held = {"xs": np.float32(0.02), "xz": np.uint8(zero)}
        proto = made([node("Transpose", "x", "t", perm=[0, 3, 1, 2]), dq("t", "d"), node("Relu", "d", "r"), q("r", "y")],
                     x=x, kind=UINT8, given=UINT8, **held)  # fmt: skip
        taken = take_in(proto)
        step = 0 if zero == 128 else 2
        assert np.abs(run(taken.proto, x).astype(int) - run(proto, x).astype(int)).max() <= step
        assert run(taken.proto, x).dtype == np.uint8
        assert zero_points(taken) == {0}


DYNAMIC = [
    node("DynamicQuantizeLinear", "x", "c s z"), node("MatMulInteger", "c w z wz", "i"), node("Cast", "i", "f", to=FLOAT),
    node("Mul", "s ws", "t"), node("Mul", "f t", "y"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["standard", "moved", "one", "whole", "conv"])
def test_of_quantization_by_each_inputs_range_the_float_weights_stay(kind: str) -> None:
    w = weight(np.uint8, 6, 5)
    held: dict[str, Any] = {"w": w, "ws": np.float32(0.01), "wz": np.uint8(120), "b": values(5)}
    nodes = {
        "standard": DYNAMIC,
        "moved": [DYNAMIC[0], node("Reshape", "c shape", "r"), node("MatMulInteger", "r w z wz", "i"), *DYNAMIC[2:]],
        "one": [DYNAMIC[0], node("MatMulIntegerToFloat", "c w s ws z wz b", "y", domain=MS)],
        "whole": [node("DynamicQuantizeMatMul", "x w ws wz b", "y", domain=MS)],
        "conv": [DYNAMIC[0], node("ConvInteger", "c w z wz", "i", pads=[1, 1, 1, 1]), *DYNAMIC[2:]],
    }[kind]
    if kind == "moved":
        held["shape"] = np.array([-1, 6])
    if kind == "conv":
        held["w"] = weight(np.uint8, 5, 4, 3, 3)
    proto = made(nodes, **held)
    taken = take_in(proto)
    assert not taken.exact
    assert set(ops(taken)) <= {"MatMul", "Conv", "Cast", "Mul", "Add", "Identity", "Reshape", "Constant"}
    assert "`int8=True` with samples (`images=`, `data=`) quantizes them anew" in "; ".join(taken.changes)
    wanted = run(proto, X)
    assert np.abs(run(taken.proto, X) - wanted).max() < 0.03 * np.abs(wanted).max()


def packed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes of each row in bytes, low bits first."""
    each = codes.reshape(*codes.shape[:-1], -1, 8 // bits).astype(np.uint32) << np.arange(0, 8, bits)
    return each.sum(-1).astype(np.uint8)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("zero", [None, 8, 5])
@pytest.mark.parametrize(("bits", "inputs"), [(4, 64), (4, 40), (8, 64)])
def test_products_with_weights_of_few_bits_in_blocks(bits: int, inputs: int, zero: int | None, negative: bool) -> None:
    outputs, block = 6, 32
    count = -(-inputs // block)
    held: dict[str, Any] = {
        "w": packed(CODES.integers(0, 1 << bits, (outputs, count, block), np.uint8), bits),
        "s": np.abs(values(outputs * count, scale=0.1)) + 0.01, "b": values(outputs),
    }  # fmt: skip
    if negative:  # ONNX Runtime's own quantizer gives the largest number of a block the code -8
        held["s"][::3] *= -1
    if zero is not None:
        padded = np.full((outputs, count + count % 2 * (bits == 4)), zero, np.uint8)
        held["z"] = packed(padded, bits).reshape(-1)
    names = "x w s" + (" z" if zero is not None else "")
    x = values(2, 3, inputs)
    product = node("MatMulNBits", names, "p", domain=MS, K=inputs, N=outputs, bits=bits, block_size=block)
    proto = made([product, node("Add", "p b", "y")], x=x, **held)
    taken = take_in(proto)
    kept, more = bits == 4 and inputs == 64, 0
    if kept:
        more = 1 + (zero == 5 or negative)
    assert ops(taken) == Counter(
        {"MatMul": 2 * more - 1 if more else 1, "Add": max(more, 1), "DequantizeLinear": 1}
        if kept
        else {"MatMul": 1, "Add": 1}
    )
    assert taken.exact is kept
    np.testing.assert_allclose(run(taken.proto, x), run(proto, x), rtol=1e-4, atol=1e-4)


def test_weights_of_four_bits_in_blocks_become_signed() -> None:
    codes, x = CODES.integers(0, 16, (64, 6)).astype(ml_dtypes.uint4), values(2, 64)
    for zero, stays in ((8, True), (6, False)):
        nodes = [dq("w", "d", "s", "z", axis=0, block_size=32), node("MatMul", "x d", "y")]
        held = {"s": np.full((2, 6), 0.1, np.float32), "z": np.full((2, 6), zero).astype(ml_dtypes.uint4)}
        proto = made(nodes, 21, x=x, w=codes, **held)
        taken = take_in(proto)
        assert ("DequantizeLinear" in ops(taken)) is stays
        np.testing.assert_allclose(run(taken.proto, x), run(proto, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32])
def test_codes_that_come_with_a_scale_for_each_channel_are_floats(dtype: Any, axis: int) -> None:
    limits, kind = np.iinfo(dtype), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = CODES.integers(max(limits.min, -30_000), min(limits.max, 60_000), (2, 4, 3, 4)).astype(dtype)
    scale, zero = CODES.uniform(0.01, 0.1, 4).astype(np.float32), CODES.integers(0, 99, 4).astype(dtype)
    held = {"s": scale, "z": zero if dtype is not np.int32 else np.zeros_like(zero)}
    nodes = [node("DequantizeLinear", "x s z", "d", axis=axis), node("Relu", "d", "y")]
    proto = made(nodes, 21, x, kind, **held)
    taken = take_in(proto)
    assert taken.exact and "DequantizeLinear" not in ops(taken)
    np.testing.assert_array_equal(run(taken.proto, x), run(proto, x))


def test_modelopts_fp8_becomes_the_standards() -> None:
    nodes = [helper.make_node("TRT_FP8QuantizeLinear", ["x", "s"], ["c"], "q", domain="trt"),
             helper.make_node("TRT_FP8DequantizeLinear", ["c", "s"], ["y"], "d", domain="trt")]  # fmt: skip
    taken = take_in(made(nodes, s=np.float32(0.01)))
    found = run(taken.proto, X)
    np.testing.assert_array_equal(
        found, (X / np.float32(0.01)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.01)
    )


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([node("DynamicQuantizeLSTM", "x x x", "y", "steps", domain=MS)], "steps (DynamicQuantizeLSTM): it has no form"),
        (
            [q("x", "xq"), node("QLinearSoftmax", "xq xs xz ys yz", "yq", "old", domain=MS, axis=1, opset=12),
             dq("yq", "y", "ys", "yz")],
            "old (QLinearSoftmax): before opset 13 it is over all axes",
        ),
        ([node("DynamicQuantizeLinear", "x", "c y z", "range")], "range (DynamicQuantizeLinear): its codes, or their scale,"),
        ([DYNAMIC[0], node("Cast", "c", "y", to=FLOAT)], "DynamicQuantizeLinear): what reads it has no floating form"),
        (
            [DYNAMIC[0], node("MatMulInteger", "c c z z", "i", "product"), node("Add", "i i", "j"),
             node("Cast", "j", "y", to=FLOAT)],
            "product (MatMulInteger): its sums are used as whole numbers",
        ),
        (
            [q("x", "xq"), node("QLinearGlobalAveragePool", "xq xs xz ys yz", "yq", "mean", domain=MS, channels_last=1),
             dq("yq", "y", "ys", "yz")],
            "mean (QLinearGlobalAveragePool): its channels are on the last axis",
        ),
    ],
)  # fmt: skip
def test_what_has_no_other_form_is_named(nodes: list[onnx.NodeProto], said: str) -> None:
    proto = made(nodes, **SIGNED)
    taken = take_in(proto)
    assert said in taken.refused
    assert "give the float model" in taken.refused
    assert taken.proto is proto


PAIR = """<opset_import: ["": 17], domain: "own"> Pair (x, s, z) => (y) { q = QuantizeLinear(x, s, z)
    y = DequantizeLinear(q, s, z) }"""
RANGED = """<opset_import: ["": 17], domain: "own"> Ranged (x, w) => (y) { c, s, z = DynamicQuantizeLinear(x)
    i = MatMulInteger(c, w, z) f = Cast<to = 1>(i) y = Mul(f, s) }"""
TWICE = """<opset_import: ["": 17, "own": 1], domain: "own"> Twice (x, s, z) => (y) { a = own.Pair(x, s, z) b = Neg(a)
    y = own.Pair(b, s, z) }"""
CHOSEN = """y = If(yes) <then_branch = a () => (float[2, 8] t) { %s }, else_branch = b () => (float[2, 8] e) { e = Neg(x) }>"""


@pytest.mark.parametrize(
    ("nodes", "functions"),
    [
        ("y = own.Pair(x, s, z)", PAIR),
        ("a = own.Twice(x, s, z) y = own.Twice(a, s, z)", PAIR + TWICE),
        ("y = own.Ranged(x, w)", RANGED),
        (CHOSEN % "t = own.Pair(x, s, z)", PAIR),
        (CHOSEN % "q = QuantizeLinear(x, s, z) t = DequantizeLinear(q, s, z)", ""),
    ],
    ids=["function", "nested", "integer", "branch", "body"],
)
def test_what_stands_in_functions_and_bodies_is_taken_in(nodes: str, functions: str) -> None:
    head = '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[2, 8] x) => (float[2, 8] y)'
    proto = onnx.parser.parse_model(f"{head} {{ {nodes} }} {functions}")
    held = {"s": np.float32(0.03), "z": np.uint8(90), "w": weight(np.int8, 8, 8), "yes": np.bool_(True)}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(item), name) for name, item in held.items())
    taken, x = take_in(load_model(proto).proto), values(2, 8)
    assert taken.changes and not taken.refused
    found = {item.op_type for item in all_nodes(taken.proto.graph)}
    assert not taken.proto.functions and zero_points(taken) <= {0}
    assert found <= {
        "If",
        "QuantizeLinear",
        "DequantizeLinear",
        "Clip",
        "Neg",
        "MatMul",
        "Mul",
        "Cast",
        "Identity",
        "Constant",
    }
    wanted = run(proto, x)
    assert np.abs(run(taken.proto, x) - wanted).max() < 0.03 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("zero", [0, 3, 128])
@pytest.mark.parametrize("given", ["same", "none"])
@pytest.mark.parametrize("op", ["MatMulInteger", "ConvInteger"])
def test_integer_products_read_codes_by_a_scale_or_from_an_input(op: str, given: str, zero: int, kind: Any) -> None:
    """Sums may be read as whole numbers, too; no cast to uint8 stays, which TensorRT has at outputs alone."""
    zero -= 128 * (kind is np.int8 and zero == 128)
    w = weight(np.int8, 5, 4, 3, 3) if op == "ConvInteger" else weight(np.int8, 6, 5)
    held = {"xs": np.float32(0.03), "z": kind(zero), "w": w, "b": np.int32(7)}
    product = node(op, "c w z" if given == "same" else "c w", "i")
    for last, kinds in (([node("Cast", "i", "y", to=FLOAT)], FLOAT), ([node("Add", "i b", "y")], INT32)):
        proto = made([q("x", "c", "xs", "z"), product, *last], given=kinds, **held)
        taken = take_in(proto)
        assert not taken.refused and zero_points(taken) == {0}
        assert not any(item.attribute[0].i == UINT8 for item in taken.proto.graph.node if item.op_type == "Cast")
        wanted = run(proto, X)
        atol = 0 if taken.exact else 0.05 * np.abs(wanted).max()
        np.testing.assert_allclose(run(taken.proto, X), wanted, rtol=1e-6, atol=atol)
    product.input[0] = "x"
    codes = weight(kind, 2, 4, 6, 6)
    proto = made([product, node("Identity", "i", "y")], x=codes, kind=helper.np_dtype_to_tensor_dtype(np.dtype(kind)),
                 given=INT32, **held)  # fmt: skip
    taken = take_in(proto)
    assert not taken.refused
    wanted = run(proto, codes)
    assert np.abs(run(taken.proto, codes) - wanted).max() <= (0 if taken.exact else 0.05 * np.abs(wanted).max())


def test_a_zero_point_for_each_channel_of_an_activation_is_named() -> None:
    held = {"s": np.full(4, 0.02, np.float32), "z": np.array([9, 0, 3, 128], np.uint8)}
    nodes = [node("QuantizeLinear", "x s z", "c", axis=1), node("DequantizeLinear", "c s z", "y", axis=1)]
    assert take_in(made(nodes, **held)).refused.startswith("x is quantized with a zero point for each channel")


def test_the_model_itself_stays_as_it_is() -> None:
    """Its fingerprint is that of its file; reading it for a rewrite names constants that have no name."""
    nameless = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.float32(2)))
    nodes = [q("x", "c"), dq("c", "d"), nameless, node("Mul", "d k", "y")]
    proto = made(nodes, **UNSIGNED)
    before = proto.SerializeToString(deterministic=True)
    assert take_in(proto).changes and proto.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("opset", [11, 17])
def test_large_weights_are_not_read_before_they_are_needed(tmp_path: Path, opset: int) -> None:
    codes = weight(np.uint8, 300, 300)
    nodes = [
        q("x", "c"),
        dq("c", "d"),
        node("MatMul", "d v", "e"),
        dq("w", "f", "ws", "wz"),
        node("MatMul", "e f", "y"),
    ]
    x, held = values(2, 300), {"w": codes, "ws": np.float32(0.01), "wz": np.uint8(128)}
    proto = made(nodes, opset, x, v=values(300, 300), **UNSIGNED, **held)
    wanted = run(proto, x)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=1 << 16)
    lazy = take_in(load_model(tmp_path / "m.onnx", lazy=True).proto)
    assert lazy.exact and [item.name for item in lazy.proto.graph.initializer if is_lazy(item)] == ["v"]
    taken = take_in(load_model(tmp_path / "m.onnx").proto)
    np.testing.assert_allclose(run(taken.proto, x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "zero", "drop"),
    [
        (np.int16, 0, False),
        (np.uint16, 32768, False),
        (np.uint16, 0, False),
        (np.int8, 3, True),
        (np.uint8, 131, True),
        (np.uint8, 0, True),
    ],
)
def test_what_codes_bounded_stays_bounded_where_they_go(kind: Any, zero: int, drop: bool) -> None:
    """Makers leave Relu and Clip to the codes."""
    scale = np.float32(0.5 / (np.iinfo(kind).max - np.iinfo(kind).min))
    net = made([q("x", "c"), dq("c", "y")], 21, 3 * X, xs=scale, xz=kind(zero))
    taken = take_in(net, drop=drop)
    assert not taken.refused and "QuantizeLinear" not in ops(taken)
    assert np.abs(run(taken.proto, 3 * X) - run(net, 3 * X)).max() <= scale


@pytest.mark.parametrize(("kind", "wider"), [(np.uint8, 255 / 127), (np.uint16, 1), (np.int16, 1), (ml_dtypes.int4, 1)])
def test_scales_by_channel_bound_as_well(kind: Any, wider: float) -> None:
    scales = np.array([0.01, 0.02, 0.03, 0.04], np.float32) / (300 if np.dtype(kind).itemsize > 1 else 1)
    net = made([q("x", "c", axis=1), dq("c", "y", axis=1)], 21, 3 * X, xs=scales, xz=np.zeros(4, kind))
    taken = take_in(net)
    apart = np.abs(run(taken.proto, 3 * X) - run(net, 3 * X)).max(axis=(0, 2, 3))
    assert not taken.refused and (apart <= scales * (wider + 1) / 2 + 1e-6).all()


@pytest.mark.parametrize("factor", [np.float32(1e-5), np.linspace(1e-5, 2e-5, 5, dtype=np.float32)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_of_codes_stay_in_fp16s_range(factor: Any, dynamic: bool) -> None:
    """The factor behind them is their weight's scale."""
    x, codes = 100 * values(3, 2048), CODES.integers(90, 127, (2048, 5), np.int8)
    first = node("DynamicQuantizeLinear", "x", "c xs xz") if dynamic else q("x", "c")
    nodes = [first, node("MatMulInteger", "c w xz", "p"), node("Cast", "p", "f", to=FLOAT)]
    nodes += [node("Mul", "xs k", "both"), node("Mul", "f both", "y")] if dynamic else [node("Mul", "k f", "y")]
    held = {} if dynamic else {"xs": np.float32(3), "xz": np.uint8(128)}
    net = made(nodes, 17, x, w=codes, k=factor, **held)
    taken = take_in(net)
    wanted, found = run(net, x), run(taken.proto, x)
    assert not taken.refused and np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()
    (product,) = [item.output[0] for item in taken.proto.graph.node if item.op_type == "MatMul"]
    taken.proto.graph.output.append(helper.make_tensor_value_info(product, FLOAT, None))
    sums = OnnxSession(taken.proto, threads=1, optimize=False)({"x": x})[product]
    assert np.abs(sums).max() < 65504 / 100


@pytest.mark.parametrize(
    ("nodes", "held", "said"),
    [
        (
            [node("DynamicQuantizeLinear", "x", "c s z"), node("MatMulInteger", "c w z", "p"), node("Cast", "p", "f", to=FLOAT),
             node("Mul", "f s", "m"), node("Mul", "x s", "n"), node("Add", "m n", "y")],
            {"w": CODES.integers(-9, 9, (6, 6), np.int8)},
            "its scale, which each input has its own of, multiplies more than sums",
        ),
        (
            [q("x", "c"), node("MatMulInteger", "c w xz wz", "p"), node("Cast", "p", "y", to=FLOAT)],
            {**UNSIGNED, "w": CODES.integers(-9, 9, (4, 6, 6), np.int8), "wz": np.zeros((4, 1, 6), np.int8)},
            "its zero points are of more than one axis",
        ),
    ],
)  # fmt: skip
def test_what_has_no_fixed_scale_is_refused(nodes: list[onnx.NodeProto], held: dict[str, Any], said: str) -> None:
    assert said in take_in(made(nodes, **held)).refused
