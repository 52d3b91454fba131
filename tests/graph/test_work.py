"""Multiply-accumulates."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, values
from onnx import ModelProto, TensorProto, helper

from trtopt.graph.work import macs


def _one(op: str, shape: list[int], *weight: int, **attributes: object) -> ModelProto:
    return model([node(op, "x w", "y", "c", **attributes)], inputs={"x": shape}, weights={"w": values(*weight)})


@pytest.mark.parametrize(
    ("proto", "expected"),
    [
        (_one("Conv", [2, 3, 9, 9], 8, 3, 3, 3, strides=[2, 2]), 2 * 8 * 16 * 27),
        (_one("Conv", [1, 4, 5, 5], 4, 1, 3, 3, group=4), 4 * 9 * 9),
        (_one("ConvTranspose", [1, 3, 4, 4], 3, 5, 2, 2), 48 * 20),
        (_one("Gemm", [6, 4], 7, 4, transB=1), 6 * 7 * 4),
        (_one("Gemm", [4, 6], 4, 7, transA=1), 6 * 7 * 4),
        (_one("MatMul", [2, 3, 5], 5, 7), 2 * 3 * 7 * 5),
        (_one("Einsum", [2, 3, 5], 5, 7, equation="bij,jk->bik"), 2 * 3 * 7 * 5),
    ],
    ids=["conv", "depthwise", "transposed", "gemm", "gemm transA", "matmul", "einsum"],
)
def test_counts(proto: ModelProto, expected: int) -> None:
    assert macs(proto) == {"c": expected}


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers_count_what_each_step_multiplies(op: str, gates: int) -> None:
    proto = model(
        [node(op, "x w r", "y", "c", hidden_size=7, direction="bidirectional")],
        inputs={"x": [9, 2, 5]},
        outputs={"y": [9, 2, 2, 7]},
        weights={"w": values(2, gates * 7, 5), "r": values(2, gates * 7, 7)},
    )
    assert macs(proto) == {"c": 9 * 2 * 2 * gates * 7 * (5 + 7)}


def test_dynamic_sizes_count_as_said_or_one() -> None:
    proto = model(
        [node("MatMul", "x w", "y", "m"), node("Relu", "y", "z")],
        inputs={"x": ["n", 5]},
        outputs={"z": None},
        weights={"w": values(5, 7)},
    )
    assert macs(proto) == {"m": 35}
    assert macs(proto, {"n": 4}) == {"m": 140}


def test_what_is_not_known_is_left_out_and_bodies_are_read() -> None:
    body = [
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], [f"{name}_y"], f"{name}_mm")],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)],
        )
        for name in ("then", "other")
    ]
    proto = model(
        [
            node("If", "flag", "h", "if", then_branch=body[0], else_branch=body[1]),
            node("Reshape", "h shape", "r", "reshape"),
            node("MatMul", "r v", "y", "unknown"),
        ],
        inputs={"x": [4, 8], "flag": [], "shape": [2]},
        weights={"w": np.zeros((8, 16), np.float32), "v": np.zeros((16, 2), np.float32)},
    )
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.BOOL
    proto.graph.input[2].type.tensor_type.elem_type = TensorProto.INT64
    assert macs(proto) == {"then_mm": 4 * 8 * 16, "other_mm": 4 * 8 * 16}
