"""What is read off an ONNX file beside the parser."""

from __future__ import annotations

import types

import numpy as np
from graphs import model, node

from trtopt.trt.parsing import float_products, parser_issues


def test_products_multiply_in_floating_point_unless_both_operands_are_quantized() -> None:
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "d"),
        node("DequantizeLinear", "codes s z", "w"),
        node("Transpose", "w", "t", perm=[1, 0]),
        node("Relu", "d", "r"),
        node("Concat", "d r", "dd", axis=0),
        node("Sigmoid", "d", "g"),
        node("MatMul", "dd t", "both"),
        node("MatMul", "d float", "weight"),
        node("MatMul", "x t", "activation"),
        node("MatMul", "g t", "behind_sigmoid"),
    ]
    floats = np.ones((4, 4), np.float32)
    weights = {
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.int8),
        "codes": floats.astype(np.int8),
        "float": floats,
    }
    rest = {"weight": [2, 4], "activation": [2, 4], "behind_sigmoid": [2, 4]}
    graph = model(nodes, inputs={"x": [2, 4]}, outputs={"both": [4, 4], **rest}, weights=weights)
    assert float_products(graph) == {f"MatMul_{name}" for name in rest}


def test_a_graph_without_quantization_has_none_to_tell() -> None:
    weights = {"w": np.ones((4, 4), np.float32)}
    graph = model([node("MatMul", "x w", "y")], inputs={"x": [2, 4]}, outputs={"y": [2, 4]}, weights=weights)
    assert float_products(graph) == frozenset()


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
