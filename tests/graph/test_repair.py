"""Repaired weights: the chosen codes come back, whatever holds the scale, and nobody else's weights change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import points_of, values, written
from hypothesis import given, strategies as st
from onnx import numpy_helper

from trtopt.core.errors import CalibrationError
from trtopt.core.values import Precision
from trtopt.graph.passes.quantize import insert_qdq, quantize_weight, round_scale, weight_scales
from trtopt.graph.passes.repair import Repair, nearest, repair_weights, repaired
from trtopt.graph.view import to_ir, to_proto


def _offsets(weight: Any, axis: int | None, seed: int) -> Any:
    codes, _ = nearest(weight, axis)
    offsets = np.random.default_rng(seed).integers(-1, 2, weight.shape).astype(np.int8)
    offsets[(np.abs(codes) == 127) | (np.abs(codes + offsets.astype(int)) > 127)] = 0
    return offsets


@given(seed=st.integers(0, 200), power=st.integers(-14, 6), axis=st.sampled_from([None, 0, 1]))
def test_codes_come_back_in_every_type_of_scale(seed: int, power: int, axis: int | None) -> None:
    weight = values(12, 17, seed=seed, scale=2.0**power)
    offsets = _offsets(weight, axis, seed)
    codes, _ = nearest(weight, axis)
    changed = repaired(weight, axis, Repair(offsets))
    for base in (Precision.FP32, Precision.FP16, Precision.BF16):
        if base is Precision.FP16 and power < -4:
            continue  # scales among FP16's subnormals are rounded further than half a code
        scale = round_scale(weight_scales(changed, axis, Precision.INT8), base)
        np.testing.assert_array_equal(quantize_weight(changed, scale, axis, Precision.INT8), codes + offsets)


def _twice() -> Any:
    """Two layers of one weight; the second has a bias."""
    text = "(float[n,32] x) => (float[n,32] y) { [m0] h = MatMul (x, w) r = Relu (h) [m1] y = Gemm (r, w, b) }"
    return written(text, w=values(32, 32), b=values(32, seed=1))


def test_one_reader_of_a_weight_is_changed_and_its_bias() -> None:
    proto = _twice()
    weight, points, ir_model = values(32, 32), points_of(proto), to_ir(proto)
    offsets = _offsets(weight, 1, 5)
    found, points = repair_weights(
        ir_model, points, {"m1": Repair(offsets, np.full(32, 0.25, np.float32)), "gone": Repair(offsets)}
    )
    assert found.changes == ["m1"]
    graph = to_proto(insert_qdq(ir_model, points, dict.fromkeys(points.activations, 1.0)).model).graph
    held = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    codes = [array for array in held.values() if array.dtype == np.int8 and array.shape == (32, 32)]
    plain, _ = nearest(weight, 1)
    assert len(codes) == 2
    assert sorted(np.array_equal(item, plain) for item in codes) == [False, True]
    assert any(np.array_equal(item, plain + offsets) for item in codes)
    (gemm,) = [item for item in graph.node if item.name == "m1"]
    np.testing.assert_array_equal(held[gemm.input[2]], values(32, seed=1) + np.float32(0.25))


def test_a_bias_is_added_where_there_is_none() -> None:
    proto = written("(float[n,16,4,4] x) => (float[n,16,4,4] y) { [c] y = Conv (x, w) }", w=values(16, 16, 1, 1))
    ir_model = to_ir(proto)
    repair = Repair(np.zeros((16, 16, 1, 1), np.int8), np.arange(16, dtype=np.float32))
    repair_weights(ir_model, points_of(proto), {"c": repair})
    assert len(to_proto(ir_model).graph.node[0].input) == 3


def test_a_repair_of_another_weight_is_refused() -> None:
    with pytest.raises(CalibrationError, match="made for another model"):
        repaired(values(4, 4), 0, Repair(np.zeros((4, 5), np.int8)))
