"""INT4 codes by samples: never worse than the nearest, and better where inputs go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import values, written
from hypothesis import given, settings, strategies as st

from trtopt import build, verify
from trtopt.calibration import int4_codes
from trtopt.calibration.compensation import second_moments
from trtopt.calibration.int4_codes import channel_errors, rounded
from trtopt.core.values import Precision
from trtopt.graph.passes.int4 import nearest


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([64, 128, 192, 256]), rows=st.integers(1, 300), seed=st.integers(0, 999),
    mean=st.sampled_from([0.0, 3.0]), outliers=st.sampled_from([1.0, 30.0]), dead=st.booleans(),
    base=st.sampled_from([Precision.FP16, Precision.BF16]),
)  # fmt: skip
def test_no_channel_loses_more_than_with_the_nearest_codes(
    size: int, rows: int, seed: int, mean: float, outliers: float, dead: bool, base: Precision
) -> None:
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((rows, 5)) @ generator.standard_normal((5, size)) + mean
    inputs[:, :2] *= outliers
    inputs[:, -3:] *= not dead
    weight = generator.standard_normal((size, 7)).astype(np.float32) * 0.1
    weight[3] *= outliers
    second = second_moments(((inputs.T @ inputs)[None], inputs.sum(0)[None], rows))
    coded = rounded(weight, second, base)
    assert coded.codes.min() >= -8 and coded.codes.max() <= 7 and coded.scale.shape == nearest(weight, base).scale.shape
    losses, plain = (channel_errors(item, weight, second) for item in (coded, nearest(weight, base)))
    assert (losses <= plain * (1 + 1e-9)).all()


def test_inputs_that_go_together_share_the_error_and_none_change_nothing() -> None:
    generator = np.random.default_rng(0)
    mix = generator.standard_normal((24, 256))
    inputs, fresh = generator.standard_normal((4000, 24)) @ mix, generator.standard_normal((500, 24)) @ mix
    weight = values(256, 32, scale=0.1)
    second = second_moments(((inputs.T @ inputs)[None], inputs.sum(0)[None], 4000))
    lost = [
        float(((fresh @ (item.floats() - weight)) ** 2).mean())
        for item in (rounded(weight, second, Precision.FP16), nearest(weight, Precision.FP16))
    ]
    assert np.isfinite(lost).all() and lost[0] < 0.5 * lost[1]
    broken = np.full((256, 256), np.nan)
    assert (rounded(weight, broken, Precision.FP16).codes == nearest(weight, Precision.FP16).codes).all()
    zero = rounded(weight, np.zeros((256, 256)), Precision.FP16)
    assert (zero.codes == nearest(weight, Precision.FP16).codes).all()


def test_a_build_with_samples_is_nearer_to_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a weight that is read twice, one that is transposed, and one pass for each group of moments."""
    monkeypatch.setattr(int4_codes, "_BYTES", 1)
    text = """(float[n,64] x) => (float[n,10] y) { [a] h = MatMul(x, w) [r] i = Relu(h) [b] j = MatMul(i, w)
        [q] k = Relu(j) [c] l = Gemm<transB=1>(k, v, t) [s] m = Softplus(l) [d] y = Gemm<alpha=0.5>(m, u) }"""
    weights = {"w": values(64, 64, scale=0.1), "v": values(64, 64, seed=1, scale=0.1), "t": values(64)}
    proto = written(text, **weights, u=values(64, 10, seed=2, scale=0.1))
    mixed = values(400, 64) @ values(64, 64, seed=3) * (values(64, seed=4) > 0.5) + 1
    found: list[float] = []
    for number, more in enumerate(({}, {"data": {"x": mixed[:300]}})):
        kept = tmp_path / f"{number}.onnx"
        options: dict[str, Any] = {
            "int4": True,
            "backend": "rtx",
            "target": "sm89",
            "shapes": "x:1x64,8x64,8x64",
            **more,
        }
        result = build(proto, tmp_path / f"{number}.engine", save_onnx=kept, **options)
        assert result.precision_summary.startswith("4 of 4 matrix products with INT4 weights")
        found.append(verify(proto, kept, data={"x": mixed[300:]}).outputs[0].snr_db)
    assert found[1] > found[0] + 1
