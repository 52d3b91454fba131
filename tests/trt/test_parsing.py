"""What is read off an ONNX file beside the parser."""

from __future__ import annotations

import types

import numpy as np
from graphs import written

from trtopt.trt.parsing import float_products, parser_issues


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
