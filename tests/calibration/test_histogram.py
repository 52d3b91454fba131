from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from trtopt.calibration.counting import BINS
from trtopt.calibration.histogram import Histogram, merged

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
samples = arrays(np.float32, st.integers(1, 300), elements=finite)


def counted(*parts: NDArray[Any]) -> Histogram:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    return histogram


def same(a: Histogram, b: Histogram) -> bool:
    return np.array_equal(a.counts, b.counts) and [a.exponent, a.low, a.high, a.total] == [
        b.exponent, b.low, b.high, b.total
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(samples, st.integers(1, 20), st.randoms(use_true_random=False))
def test_any_cut_and_order_gives_the_same_bits(values: NDArray[np.float32], pieces: int, random: Any) -> None:
    parts = np.array_split(values, pieces)
    random.shuffle(parts)
    assert same(counted(values), counted(*parts))
    shards = [counted(*parts[start::3]) for start in range(3)]
    random.shuffle(shards)
    assert same(counted(values), merged(shards))


@settings(max_examples=200, deadline=None)
@given(samples)
def test_every_value_is_in_its_exact_bin(values: NDArray[np.float32]) -> None:
    found = counted(values)
    assert found.total == values.size == found.counts.sum()
    assert found.absmax == np.abs(values.astype(np.float64)).max()
    if found.exponent is None:
        assert not values.any()
        return
    assert found.absmax < math.ldexp(1.0, found.exponent)
    scaled = np.abs(values.astype(np.float64)) * BINS / math.ldexp(1.0, found.exponent)
    assert np.array_equal(found.counts, np.bincount(scaled.astype(np.int64), minlength=BINS))


def test_over_half_of_the_bins_lie_within_the_largest_magnitude() -> None:
    for largest in (1.0, 1.5, 2.0, 255.0, 1e-9, 3e38):
        found = counted(np.array([largest, 0.0], np.float32))
        assert 0.5 <= found.absmax / (found.width * BINS) < 1


def test_zeros_before_the_first_value_fall_into_the_first_bin() -> None:
    zeros = np.zeros(10, np.float32)
    assert counted(zeros).exponent is None
    found = counted(zeros, np.array([1.5], np.float32), zeros)
    assert found.counts[0] == 20
    assert same(found, merged([counted(zeros), counted(np.array([1.5], np.float32)), counted(zeros)]))
    assert same(counted(zeros, zeros), merged([counted(zeros), counted(zeros)]))


def test_extremes_of_fp32_stay_exact() -> None:
    tiny, huge = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    found = counted(np.array([tiny, -huge], np.float32))
    assert (found.absmax, found.counts[0], found.counts[-1]) == (float(huge), 1, 1)
    assert counted(np.array([tiny], np.float32)).counts[0] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_whole(bad: float) -> None:
    found = counted(np.ones(3, np.float32))
    with pytest.raises(FloatingPointError, match="of 4 values"):
        found.add(np.array([1, 2, bad, 3], np.float32))
    assert found.total == 3


def test_copies_divide_exactly_or_not_at_all() -> None:
    values = np.linspace(0, 5, 77, dtype=np.float32)
    part = counted(np.tile(values, 4)).divided(4)
    assert part is not None
    assert same(part, counted(values))
    assert counted(np.tile(values, 4), values[:1]).divided(4) is None
