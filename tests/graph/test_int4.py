"""INT4 weights of matrix products in the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import values, written
from onnx import ModelProto, TensorProto, numpy_helper
from world import Heard, has

from trtopt import UsageError, build
from trtopt.builder.asked import spec_of
from trtopt.builder.request import BuildRequest
from trtopt.core.values import BuildSpec, Precision
from trtopt.engine.manifest import load_manifest
from trtopt.graph.guard import invalid
from trtopt.graph.passes.int4 import int4_weights, nearest
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.result import PassResult
from trtopt.graph.proto import to_array
from trtopt.graph.view import to_proto
from trtopt.ort.sessions import open_session
from trtopt.trt import select


def _products() -> ModelProto:
    text = """(float[n,256] x) => (float[n,100] y) { [fc1] a = MatMul(x, w1) [r] b = Relu(a)
        [fc2] c = Gemm<transB=1>(b, w2, b2) [fc3] d = MatMul(c, w3) [fc4] y = MatMul(d, w4) }"""
    shapes = {"w1": (256, 192), "w2": (100, 192), "b2": (100,), "w3": (100, 128), "w4": (128, 100)}
    return written(text, **{name: values(*shape, seed=len(shape), scale=0.1) for name, shape in shapes.items()})


def _int4(proto: ModelProto, **left_out: str) -> tuple[PassResult, ModelProto]:
    result = int4_weights(to_ir_at(proto, 21), Precision.FP16, left_out, {})
    return result, to_proto(result.model)


def test_blocks_are_as_large_as_the_inputs_allow_and_others_keep_their_weights() -> None:
    result, proto = _int4(_products(), fc4="said so")
    assert list(result.changes) == ["fc1", "fc2"]
    reasons = {item.node: item.reason for item in result.kept}
    assert reasons["fc4"] == "said so" and reasons["fc3"].startswith("it has 100 inputs, no multiple of 64")
    assert not invalid(proto)
    held = {item.name: item for item in proto.graph.initializer}
    assert held["w1_int4"].data_type == TensorProto.INT4 and list(held["w1_int4"].dims) == [256, 192]
    assert list(held["w1_scale"].dims) == [2, 192] and list(held["w2_scale"].dims) == [
        3,
        100,
    ]  # blocks of 128 and of 64
    assert list(held["w2_int4"].dims) == [192, 100]  # turned, K × N
    assert "w1" not in held and "w2" not in held


@pytest.mark.parametrize(
    "text",
    [
        "[fc] y = Gemm <transB = 1> (x, w, b)",
        "[fc] y = Gemm <transB = 1> (x, w)",
        "[t] t = Transpose (x) [fc] y = Gemm <transA = 1, transB = 1, alpha = 0.5, beta = 2.0> (t, w, b)",
    ],
)
def test_a_gemm_becomes_a_matmul(text: str) -> None:
    """TensorRT 10.6 ends the process at one with INT4 weights."""
    net = written(f"(float[5,128] x) => (float[5,96] y) {{ {text} }}", w=values(96, 128), b=values(96, seed=1))
    result, proto = _int4(net)
    assert list(result.changes) == ["fc"] and not invalid(proto)
    assert [item.op_type for item in proto.graph.node if item.name == "fc"] == ["MatMul"]
    x = values(5, 128, seed=2)
    held = {item.name: to_array(item) for item in proto.graph.initializer}
    weight = held["w_int4"].astype(np.float32) * held["w_scale"]
    wanted = x @ weight * (0.5 if "alpha" in text else 1) + ("b)" in text) * values(96, seed=1) * (
        2 if "beta" in text else 1
    )
    found = open_session(proto, threads=1, optimize=False).run(None, {"x": x})[0]
    assert np.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("inputs", [64, 128, 256])
def test_one_output_of_one_block_stays_floating(inputs: int) -> None:
    """TensorRT-RTX takes its one scale for none of blocks."""
    net = written(f"(float[n,{inputs}] x) => (float[n,1] y) {{ [head] y = MatMul(x, w) }}", w=values(inputs, 1))
    result, _ = _int4(net)
    assert list(result.changes) == ["head"] * (inputs == 256)
    assert all("one INT4 scale" in item.reason for item in result.kept)


def test_the_graph_computes_with_the_nearest_codes() -> None:
    given = _products()
    _, proto = _int4(given)
    x = {"x": values(5, 256)}
    weights = {item.name: to_array(item) for item in given.graph.initializer}
    for name, content in weights.items():
        turned = name == "w2"
        if name in ("w1", "w2", "w4"):
            coded = nearest(content.T if turned else content, Precision.FP16)
            scale = np.abs(content.T if turned else content).reshape(-1, coded.block, coded.codes.shape[1]).max(1) / 7
            np.testing.assert_allclose(coded.scale, scale, rtol=1e-3)
            assert np.abs(coded.codes).max() == 7
            error = np.abs(coded.floats() - (content.T if turned else content))
            assert (error <= np.repeat(coded.scale, coded.block, 0) * 0.505).all()
            weights[name] = coded.floats().T if turned else coded.floats()
    for item in given.graph.initializer:
        item.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weights[item.name]), item.name))
    expected, found = (open_session(item, threads=1, optimize=False).run(None, x)[0] for item in (given, proto))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (np.full((64, 4), np.nan, np.float32), "its weights reach nan"),
        (np.full((64, 4), 7e4, np.float32), "its weights reach 7e+04; FP16 ends"),
        (values(2, 64, 4), "its weights have 3 axes"),
        (np.zeros((0, 4), np.float32), "it has 0 inputs"),
    ],
)
def test_weights_that_cant_be_coded_stay(weight: Any, reason: str) -> None:
    size = weight.shape[-2]
    result, _ = _int4(written(f"(float[2,2,{size}] x) => (float[2,2,4] y) {{ [m] y = MatMul(x, w) }}", w=weight))
    assert not result.changes
    assert result.kept[0].reason.startswith(reason)


def test_two_products_share_the_codes_of_a_shared_weight_and_zeros_stay_zero() -> None:
    text = "(float[n,64] x) => (float[n,64] y) { [a] h = MatMul(x, w) [b] y = MatMul(h, w) }"
    weight = values(64, 64)
    weight[:, 3] = 0
    result, proto = _int4(written(text, w=weight))
    assert list(result.changes) == ["a", "b"] and len(proto.graph.initializer) == 2
    assert (nearest(weight, Precision.FP16).floats()[:, 3] == 0).all()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"int8": True}, "`int8=True` are both given: INT4 rounds weights alone"),
        ({"fp8": True}, "`fp8=True` are both given"),
        ({"best": True}, "`best=True` are both given"),
        ({"min_snr": 20.0}, "no limit chooses INT4 weights: drop it"),
        ({"refit": True}, "INT4 codes can't be put in later"),
    ],
)
def test_what_doesnt_go_with_int4_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        spec_of(BuildRequest("m.onnx", "m.engine", int4=True, **other))


@pytest.mark.parametrize("bf16", [False, True])
def test_rtx_keeps_four_bits_a_weight(tmp_path: Any, bf16: bool) -> None:
    text = "(float[n,1024] x) => (float[n,1024] y) { [a] h = MatMul(x, w) [r] i = Relu(h) [b] y = MatMul(i, v) }"
    proto = written(text, w=values(1024, 1024, scale=0.03), v=values(1024, 1024, seed=1, scale=0.03))
    sizes = {}
    for int4 in (False, True):
        options = {"int4": int4, "bf16": bf16, "fp16": not bf16 and not int4, "shapes": "x:8x1024", "target": "sm89"}
        result = build(proto, tmp_path / f"{int4}.engine", backend="rtx", **options)
        sizes[int4] = result.engine.stat().st_size
    assert result.precision_summary.startswith("2 of 2 matrix products with INT4 weights; 2 of 2 matrix products ")
    assert not result.kept and result.coverage == {"bf16" if bf16 else "fp16": 1.0}
    assert sizes[True] < 0.4 * sizes[False]


@pytest.mark.parametrize(
    ("asked", "level"), [({"int4": True}, 1), ({"int4": True, "optimization_level": 3}, 3), ({}, None)]
)
def test_int4_is_built_at_a_level_that_doesnt_end_the_process(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], level: int | None
) -> None:
    """TensorRT 10.6 aborts at 2 to 4 ("LLVM ERROR: out of memory"), where a bias is added and no activation follows."""
    generation, heard = select("rtx"), Heard()
    monkeypatch.setattr(generation, "capabilities", replace(generation.capabilities, int4_level=1))
    proto = written("(float[2,128] x) => (float[2,64] y) { [a] y = MatMul(x, w) }", w=values(128, 64, scale=0.1))
    build(proto, tmp_path / "m.engine", target="sm89", backend="rtx", reporter=heard, **asked)
    manifest = load_manifest(tmp_path / "m.engine")
    assert manifest is not None and manifest.spec["optimization_level"] == level
    assert any("at optimization level 1" in line for line in heard.notes) is (level == 1)


def test_a_product_that_is_named_for_a_floating_type_keeps_its_weights(tmp_path: Any) -> None:
    proto = written("(float[2,128] x) => (float[2,64] y) { [a] h = MatMul(x, w) [b] y = MatMul(h, v) }",
                    w=values(128, 128, scale=0.1), v=values(128, 64, seed=1, scale=0.1))  # fmt: skip
    options = {"int4": True, "target": "sm89", "backend": "rtx", "precision_override": ["b=fp16"]}
    result = build(proto, tmp_path / "m.engine", **options)
    assert result.precision_summary.startswith("1 of 2 matrix products with INT4 weights")
    assert [(item.node, item.reason) for item in result.kept] == [("b", "`precision_override=` asks for fp16")]


def test_a_build_says_that_no_weights_suit_int4_and_what_to_build_instead(tmp_path: Any) -> None:
    proto = written("(float[2,40] x) => (float[2,64] y) { [a] y = MatMul(x, w) }", w=values(40, 64))
    heard = Heard()
    result = build(proto, tmp_path / "m.engine", int4=True, target="sm89", backend="rtx", reporter=heard)
    assert result.precision_summary.startswith(
        "no matrix product with INT4 weights; 1 of 1 matrix products FP16; 1 node"
    )
    has(heard.warnings[0], "`int4=True` changed nothing (a: it has 40 inputs", "build it with `fp16=True`")


@pytest.mark.parametrize("name", ["precision", "remainder"])
def test_no_layer_computes_in_int4(name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}=` is '?int4"):
        BuildSpec(**{name: Precision.INT4})
