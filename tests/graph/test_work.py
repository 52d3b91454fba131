"""Multiply-accumulates."""

from __future__ import annotations

import pytest
from graphs import model, node, values, written
from onnx import ModelProto

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
    text = f'(float[9,2,5] x) => (float[9,2,2,7] y) {{ [c] y = {op} <hidden_size = 7, direction = "bidirectional"> (x, w, r) }}'
    proto = written(text, w=values(2, gates * 7, 5), r=values(2, gates * 7, 7))
    assert macs(proto) == {"c": 9 * 2 * 2 * gates * 7 * (5 + 7)}


def test_dynamic_sizes_count_as_said_or_one() -> None:
    proto = written("(float[n,5] x) => (float[] z) { [m] y = MatMul (x, w) z = Relu (y) }", w=values(5, 7))
    assert macs(proto) == {"m": 35}
    assert macs(proto, {"n": 4}) == {"m": 140}


def test_what_is_not_known_is_left_out_and_bodies_are_read() -> None:
    proto = written(
        "(float[4,8] x, bool flag, int64[2] shape) => (float[] y) { h = If (flag) <then_branch = t () => (float[] a) "
        "{ [one] a = MatMul (x, w) }, else_branch = e () => (float[] b) { [two] b = MatMul (x, w) }> "
        "r = Reshape (h, shape) [unknown] y = MatMul (r, v) }",
        w=values(8, 16), v=values(16, 2),
    )  # fmt: skip
    assert macs(proto) == {"one": 4 * 8 * 16, "two": 4 * 8 * 16}
