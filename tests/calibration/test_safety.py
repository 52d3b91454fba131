"""Nodes that FP16 and BF16 spoil are found on samples, where it was planted, and nothing else is kept in FP32."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from half_models import Arrays, cancelling, overflowing, underflowing
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trtopt.calibration.safety import LIMITS, Safety, find_unsafe
from trtopt.core.errors import UsageError
from trtopt.core.values import BuildSpec, Override, Precision
from trtopt.data import open_data
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold

FP16, BF16 = Precision.FP16, Precision.BF16


def _found(
    planted: tuple[ModelProto, Arrays],
    base: Precision = FP16,
    *,
    batch: int = 8,
    limit: int | None = None,
    overrides: tuple[Override, ...] = (),
    **options: Any,
) -> Safety:
    proto, data = planted
    batches = open_data(load_model(proto).inputs, data=data, batch=batch, limit=limit)
    return find_unsafe(fold(proto)[0], BuildSpec(base, overrides=overrides), batches, given=proto, **options)


def test_an_overflow_is_found_with_the_value_seen() -> None:
    found = _found(overflowing())
    assert dict(found.in_fp32) == {
        "up": "gives 576,664 > 65,504, FP16's largest number, in 'h'",
        "relu": "gives 576,664 > 65,504, FP16's largest number, in 'r'",
        "down": "reads 576,664 > 65,504, FP16's largest number, in 'r'",
    }
    assert found.plain_db == -np.inf
    assert found.safe_db is not None and found.safe_db > 60
    assert not found.missed
    assert "3 nodes kept in FP32" in str(found) and "without that not finite" in str(found)


def test_values_near_the_end_are_kept_too_since_other_inputs_may_give_more() -> None:
    proto, data = overflowing()
    largest = 576_664
    near, far = ({"x": data["x"] * np.float32(wanted / largest)} for wanted in (40_000, 32_000))
    found = _found((proto, near))
    assert found.in_fp32["up"].startswith("gives 40,000 > 32,752, half of FP16's largest number")
    assert not _found((proto, far)).in_fp32


def test_an_underflow_is_found_by_what_it_does_to_the_outputs() -> None:
    found = _found(underflowing())
    assert set(found.in_fp32) == {"up", "relu", "grow"}  # folding shrinks the weights of `up`
    assert re.search(r"^in FP16 it.* brings the outputs to [\d.]+ dB$", found.in_fp32["up"])
    assert found.plain_db is not None and found.plain_db < 15
    assert found.safe_db is not None and found.safe_db > 60


def test_bf16_keeps_what_cancels() -> None:
    found = _found(cancelling(), BF16)
    assert set(found.in_fp32) == {"shift", "relu", "back"}
    assert found.plain_db is not None and found.plain_db < 6
    assert found.safe_db is not None and found.safe_db > LIMITS[BF16]


@pytest.mark.parametrize("planted", [overflowing, underflowing])
def test_bf16_has_the_range(planted: Callable[[], tuple[ModelProto, Arrays]]) -> None:
    found = _found(planted(), BF16)
    assert not found.in_fp32
    assert found.safe_db is not None and found.safe_db > 40


def test_the_limit_decides() -> None:
    assert not _found(cancelling(), limit_db=20.0).in_fp32  # 23.8 dB as it is
    found = _found(cancelling(), limit_db=40.0)
    assert set(found.in_fp32) == {"shift", "relu", "back"}
    assert found.limit_db == 40
    with pytest.raises(UsageError, match="a number of dB is needed"):
        _found(cancelling(), limit_db=float("nan"))


def test_a_limit_that_the_users_own_wishes_put_out_of_reach_is_said() -> None:
    wishes = tuple(Override(name, FP16) for name in ("shift", "relu", "back"))
    found = _found(cancelling(), overrides=wishes, limit_db=40.0)
    assert found.missed and not found.in_fp32
    assert "23.8 dB at the outputs, less than the 40 asked for" in str(found)


@pytest.mark.parametrize("planted", [overflowing, underflowing, cancelling])
def test_neither_batches_nor_threads_change_it(planted: Callable[[], tuple[ModelProto, Arrays]]) -> None:
    first = _found(planted(), batch=8, threads=1)
    assert first == _found(planted(), batch=3, threads=4)


def test_the_rarest_sample_counts_for_ranges() -> None:
    proto, data = overflowing()
    data = {"x": data["x"] * np.float32(1e-3)}
    data["x"][-1] *= 1e3
    assert "up" in _found((proto, data)).in_fp32
    assert not _found((proto, {"x": data["x"][:-1]})).in_fp32


def test_masks_of_minus_infinity_are_no_overflow() -> None:
    nodes = [node("Mul", "x low", "mask", "mask"), node("Softmax", "mask", "y", "soft", axis=1)]
    proto = model(
        nodes,
        weights={"low": np.array(np.finfo(np.float32).min, np.float32)},
        inputs={"x": ("n", 8)},
        outputs={"y": ("n", 8)},
    )
    x = (values(40, 8) > 0).astype(np.float32)
    x[:, 0] = 0
    assert not _found((proto, {"x": x})).in_fp32


def test_outputs_that_are_not_floating_leave_the_ranges_alone() -> None:
    proto, data = overflowing()
    proto.graph.node.append(node("ArgMax", "y", "best", "argmax", axis=1, keepdims=0))
    del proto.graph.output[:]
    proto.graph.output.add(name="best").type.tensor_type.elem_type = TensorProto.INT64
    found = _found((proto, data))
    assert set(found.in_fp32) == {"up", "relu", "down"}
    assert found.missed and found.judged == 0
    assert "the outputs weren't compared: no output is floating" in str(found)


def test_outputs_that_are_constant_leave_the_others_to_judge() -> None:
    proto, data = overflowing()
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "version"))
    proto.graph.output.append(helper.make_tensor_value_info("version", TensorProto.FLOAT, [3]))
    found = _found((proto, data))
    assert found.judged > 0 and not found.unjudged and not found.missed


def test_a_model_that_gives_no_numbers_is_said() -> None:
    proto = model([node("Log", "x", "l", "log"), node("Mul", "l l", "y", "square")])
    found = _found((proto, {"x": -np.ones((4, 3, 8, 8), np.float32)}))
    assert "zero, or not finite, in FP32" in found.unjudged
    assert found.missed


def test_a_model_that_cannot_be_run_is_said() -> None:
    proto = model([node("Conv", "x w", "y", "c")], weights={"w": values(4, 5, 1, 1)}, inputs={"x": ["n", "c", 8, 8]})
    found = _found((proto, {"x": np.ones((4, 3, 8, 8), np.float32)}))
    assert "ONNX Runtime can't run the model" in str(found) and found.missed
