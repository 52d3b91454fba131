from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from skimage import data as photos

from trtopt.calibration import histogram as module
from trtopt.calibration.histogram import BINS, LOWEST_EXPONENT, Histogram, count, count_in_numpy, merged
from trtopt.core import native

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
    assert found.absmax / 2 < math.ldexp(0.5, found.exponent) <= max(found.absmax, math.ldexp(0.5, LOWEST_EXPONENT))
    assert (found.width * BINS, found.constant) == (math.ldexp(1.0, found.exponent), values.min() == values.max())
    scaled = np.abs(values.astype(np.float64)) * BINS / math.ldexp(1.0, found.exponent)
    assert np.array_equal(found.counts, np.bincount(scaled.astype(np.int64), minlength=BINS))


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
    ends = np.array([1.5 * 2.0**-101, -huge], np.float32)
    assert same(counted(ends), merged([counted(ends[:1]), counted(ends[1:])]))
    assert math.copysign(1, counted(np.array([-0.0], np.float32)).high) == 1  # and -0 is 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_whole(bad: float) -> None:
    found = counted(np.ones(3, np.float32))
    said = f"{int(math.isnan(bad))} NaN and {int(math.isinf(bad))} infinite of 4 values"
    with pytest.raises(FloatingPointError, match=said):
        found.add(np.array([1, 2, bad, 3], np.float32))
    assert found.total == 3


def test_copies_divide_exactly_or_not_at_all() -> None:
    values = np.linspace(0, 5, 77, dtype=np.float32)
    part = counted(np.tile(values, 4)).divided(4)
    assert part is not None
    assert same(part, counted(values))
    assert counted(np.tile(values, 4), values[:1]).divided(4) is None


# The loop in C and in NumPy

Floats = NDArray[np.float32]
any_bits = arrays(np.uint32, st.integers(1, 200)).map(lambda bits: bits.view(np.float32))
some = arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@pytest.fixture(scope="module")
def fast() -> Any:
    if native.count is None:
        pytest.skip("the C extension isn't built: it needs a C compiler when trtopt is installed")
    return count


def same_counts(values: Floats, fast: Any, exponent: int = LOWEST_EXPONENT) -> None:
    before = np.arange(BINS, dtype=np.int64) % 5
    expected, found = before.copy(), before.copy()
    low, high, reached = count_in_numpy(values, exponent, expected)
    again = fast(values, exponent, found)
    assert np.array_equal(found, expected)
    if math.isfinite(low) and math.isfinite(high):
        assert again == (low, high, reached)
        assert found.sum() == before.sum() + values.size
    else:
        assert not (math.isfinite(again[0]) and math.isfinite(again[1]))
        assert np.array_equal(found, before)


@settings(max_examples=300, deadline=None)
@given(values=any_bits | some, exponent=st.integers(LOWEST_EXPONENT, 128))
def test_both_agree_on_every_bit_pattern(fast: Any, values: Floats, exponent: int) -> None:
    same_counts(values, fast, exponent)


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(some, min_size=1, max_size=4), sizes=st.randoms(use_true_random=False))
def test_a_range_that_grows_between_blocks_moves_no_count(fast: Any, parts: list[Floats], sizes: Any) -> None:
    same_counts(np.concatenate([np.resize(part, sizes.randint(1, 3 * module._BLOCK)) for part in parts]), fast)


@pytest.mark.parametrize("size", [module._BLOCK - 1, module._BLOCK, 3 * module._CHUNK + 1])
def test_both_count_large_arrays_the_same(fast: Any, size: int) -> None:
    photo = np.resize(photos.astronaut().astype(np.float32) / 127 - 1, size)
    same_counts(np.maximum(photo, 0), fast)
    same_counts(photo**3 * 1e30, fast)
    same_counts(np.resize(np.float32([0, -0.0, 1e-45, -7.5]), size), fast)
    same_counts(-np.abs(photo) - 1, fast, 3)
    same_counts(np.zeros(size, np.float32), fast)
    same_counts(np.zeros(size, np.float32), fast, 128)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        same_counts(np.append(photo[:-1], np.float32(bad)), fast)


def test_it_counts_without_the_interpreters_lock(fast: Any) -> None:
    """While one long count runs, this thread goes on; with the lock held it would stand still until the end."""
    values, counts, done = np.zeros(1 << 26, np.float32), np.zeros(BINS, np.int64), threading.Event()

    def work() -> None:
        fast(values, 0, counts)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    steps = 0
    while not done.wait(0.001):
        steps += 1
    thread.join()
    assert counts[0] == values.size
    assert steps > 4


def test_numpy_stands_in_where_the_extension_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "count", None)
    values, counts = np.linspace(-3, 3, 100, dtype=np.float32), np.zeros(BINS, np.int64)
    assert count(values, 0, counts) == (-3.0, 3.0, 2)
    assert counts.sum() == 100
