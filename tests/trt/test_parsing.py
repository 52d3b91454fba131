"""What is read off an ONNX file beside the parser."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import written

from trtopt.trt.messages import Messages
from trtopt.trt.parsing import UNEXPLAINED, ask_support, float_products, graph_nodes, parse, parser_issues


def test_products_multiply_in_floating_point_unless_both_operands_are_quantized() -> None:
    graph = written(
        """(float[2,4] x) => (float[4,4] both, float[2,4] weight, float[2,4] activation, float[2,4] behind_sigmoid) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) w = DequantizeLinear(codes, s, z)
        t = Transpose<perm=[1,0]>(w) r = Relu(d) dd = Concat<axis=0>(d, r) g = Sigmoid(d) [no] both = MatMul(dd, t)
        [weight] weight = MatMul(d, float) [activation] activation = MatMul(x, t) [gate] behind_sigmoid = MatMul(g, t) }""",
        s=np.float32(0.1),
        z=np.int8(0),
        codes=np.ones((4, 4), np.int8),
        float=np.ones((4, 4), np.float32),
    )
    assert float_products(graph) == {"weight", "activation", "gate"}
    plain = written("(float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", w=np.ones((4, 4), np.float32))
    assert float_products(plain) == frozenset()  # without quantization there is none to tell


def test_what_a_host_without_a_gpu_adds_to_every_error_is_not_the_reason() -> None:
    cuda = (
        "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at /_src/common/dispatch/"
        "checkMacros.cpp:250 (cudaError 35: CUDA driver version is insufficient for CUDA runtime version))"
    )
    own = "ITensor::getDimensions: Error Code 4: API Usage Error (prelu: slope tensor must be unidirectional broadcastable)"
    error = types.SimpleNamespace(
        node=lambda: 0, node_name=lambda: "prelu", node_operator=lambda: "PRelu", desc=lambda: f"{own}\n{cuda}"
    )
    parser = types.SimpleNamespace(num_errors=1, get_error=lambda index: error)
    (issue,) = parser_issues(parser, [("prelu", "PRelu")])
    assert "unidirectional broadcastable" in issue.reason and "GPU" not in issue.reason
    error.desc = lambda: cuda
    assert "needs a GPU" in parser_issues(parser, [("prelu", "PRelu")])[0].reason


def test_a_complete_network_passes_without_the_library_of_version_compatible_plugins(tmp_path: Path) -> None:
    """8.6's wheels lack it, and its parser asks for it behind each model with RoiAlign."""
    light, absent = written("(float[2,4] x) => (float[2,4] y) { y = Relu (x) }"), "libnvinfer_vc_plugin.so.8"
    onnx.save(light, tmp_path / "m.onnx")

    def parse_from_file(path: str) -> bool:
        raise RuntimeError(f"Unable to open library: {absent} due to {absent}: cannot open shared object file")

    parser = types.SimpleNamespace(
        num_errors=0, parse_from_file=parse_from_file, supports_model=lambda *_: parse_from_file("")
    )
    parse(parser, tmp_path / "m.onnx", light, Messages(), "m.onnx")
    (issue,) = ask_support(parser, tmp_path / "m.onnx", graph_nodes(light))
    assert issue.reason == UNEXPLAINED  # the parser itself is asked then
    absent = "libother.so"
    for ask in (
        lambda: parse(parser, tmp_path / "m.onnx", light, Messages(), "m"),
        lambda: ask_support(parser, tmp_path / "m.onnx", ()),
    ):
        with pytest.raises(RuntimeError, match=r"libother\.so"):
            ask()
