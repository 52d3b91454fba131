"""What is read off an ONNX file beside the parser."""

from __future__ import annotations

import numpy as np
from graphs import model, node

from trtopt.trt.parsing import float_products


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
