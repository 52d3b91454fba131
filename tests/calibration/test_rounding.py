"""Rounding by the covariance of a layer's inputs: what it foretells is what the layer does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from hypothesis import given, settings, strategies as st
from onnx import NodeProto

from trtopt.calibration.rounding import moments, rounded, unsupported
from trtopt.graph.passes.repair import nearest, repaired
from trtopt.ort.sessions import open_session

Array = np.ndarray[Any, Any]


def _outputs(op: NodeProto, weight: Array, array: Array) -> Array:
    """Run the node without a bias."""
    proto = model([op], weights={"w": weight}, inputs={"x": array.shape}, outputs={"y": [None] * array.ndim})  # type: ignore[list-item]
    result: Array = open_session(proto, threads=1).run(None, {"x": array})[0]
    return result.astype(np.float64)


@settings(max_examples=40)
@given(
    groups=st.sampled_from([1, 2, 4]), kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=st.integers(1, 2),
    dilation=st.integers(1, 2), pads=st.tuples(*[st.integers(0, 2)] * 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_error_of_a_convolution_is_foretold(
    groups: int, kernel: tuple[int, int], stride: int, dilation: int, pads: tuple[int, ...], seed: int
) -> None:
    array = values(2, 4, 9, 8, seed=seed) + 0.5
    weight, change = values(8, 4 // groups, *kernel, seed=seed + 1), values(8, 4 // groups, *kernel, seed=seed + 2)
    op = node("Conv", "x w", "y", "c", group=groups, strides=[stride] * 2, dilations=[dilation] * 2, pads=pads)
    squares, sums, count = moments(op, weight.shape, array)
    error = _outputs(op, weight + change, array) - _outputs(op, weight, array)
    rows = change.reshape(groups, 8 // groups, -1).astype(np.float64)
    foretold = np.einsum("gok,gkl,gol->go", rows, squares, rows).reshape(-1)
    np.testing.assert_allclose((error**2).sum((0, 2, 3)), foretold, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        error.sum((0, 2, 3)), np.einsum("gok,gk->go", rows, sums).reshape(-1), rtol=1e-2, atol=2e-2
    )
    assert count == error.size // 8


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transposed"])
def test_the_error_of_a_matrix_product_falls(op: str) -> None:
    generator = np.random.default_rng(0)
    mixed = generator.standard_normal((400, 12)) @ generator.standard_normal((12, 48)) + 1  # inputs that go together
    array, weight = mixed.astype(np.float32), values(48, 20, seed=3)
    transposed = op == "Gemm transposed"
    weight = np.ascontiguousarray(weight.T) if transposed else weight
    axis = 0 if transposed else 1
    product = node(op.split()[0], "x w", "y", "m", **({"transB": 1} if transposed else {}))
    assert not unsupported(product, 1, 2)
    seen = moments(product, weight.shape, array)
    codes, scale = nearest(weight, axis)
    plain = _outputs(product, codes * scale, array) - _outputs(product, weight, array)
    for corrects in (False, True):
        found = rounded(product, weight, axis, seen, corrects)
        error = _outputs(product, repaired(weight, axis, found), array) - _outputs(product, weight, array)
        if found.bias is not None:
            error += found.bias
            assert np.abs(error.mean(0)).max() < 1e-4 * np.abs(plain).max() + 1e-5
        assert (error**2).sum() < 0.4 * (plain**2).sum()
        assert corrects == (found.bias is not None)
        chosen = codes.astype(int) + found.offsets
        assert np.abs(chosen * scale - weight).max() < scale.max()  # the code below or above, never further
        assert (found.offsets[np.abs(codes) == 127] == 0).all() and np.abs(chosen).max() == 127


def test_few_samples_are_not_believed_too_much() -> None:
    generator = np.random.default_rng(1)
    mixing = generator.standard_normal((24, 96))

    def rows(count: int) -> Array:
        return np.asarray(
            generator.standard_normal((count, 24)) @ mixing + 3 * generator.standard_normal((count, 96)), np.float32
        )

    product, weight = node("MatMul", "x w", "y", "m"), values(96, 32)
    found = rounded(product, weight, 1, moments(product, weight.shape, rows(40)), False)
    codes, scale = nearest(weight, 1)
    others = rows(4000)
    errors = [((others @ (changed - weight)) ** 2).sum() for changed in (codes * scale, repaired(weight, 1, found))]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize(
    ("op", "slot", "weight"),
    [
        (node("Conv", "x w", "y", auto_pad="SAME_UPPER"), 1, values(4, 4, 3, 3)),
        (node("ConvTranspose", "x w", "y"), 1, values(4, 4, 3, 3)),
        (node("MatMul", "w x", "y"), 0, values(4, 4)),
        (node("MatMul", "x w", "y"), 1, values(2, 4, 4)),
        (node("Gemm", "x w", "y", alpha=0.5), 1, values(4, 4)),
        (node("Gemm", "x w", "y", transA=1), 1, values(4, 4)),
    ],
)
def test_what_is_not_rounded_says_why(op: NodeProto, slot: int, weight: Array) -> None:
    assert unsupported(op, slot, weight.ndim)
