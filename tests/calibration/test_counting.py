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

from trtopt.calibration import counting
from trtopt.calibration.counting import BINS, LOWEST_EXPONENT, count, plain
from trtopt.core import native

Floats = NDArray[np.float32]
any_bits = arrays(np.uint32, st.integers(1, 200)).map(lambda bits: bits.view(np.float32))
finite = arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@pytest.fixture(scope="module")
def fast() -> Any:
    if native.count is None:
        pytest.skip("the C extension isn't built: it needs a C compiler when trtopt is installed")
    return count


def same(values: Floats, fast: Any, exponent: int = LOWEST_EXPONENT) -> None:
    before = np.arange(BINS, dtype=np.int64) % 5
    expected, found = before.copy(), before.copy()
    low, high, reached = plain(values, exponent, expected)
    again = fast(values, exponent, found)
    assert np.array_equal(found, expected)
    if math.isfinite(low) and math.isfinite(high):
        assert again == (low, high, reached)
        assert found.sum() == before.sum() + values.size
    else:
        assert not (math.isfinite(again[0]) and math.isfinite(again[1]))
        assert np.array_equal(found, before)


@settings(max_examples=300, deadline=None)
@given(values=any_bits, exponent=st.integers(LOWEST_EXPONENT, 128))
def test_both_agree_on_every_bit_pattern(fast: Any, values: Floats, exponent: int) -> None:
    same(values, fast, exponent)


@settings(max_examples=200, deadline=None)
@given(values=finite, exponent=st.integers(LOWEST_EXPONENT, 128))
def test_both_count_the_same(fast: Any, values: Floats, exponent: int) -> None:
    same(values, fast, exponent)


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(finite, min_size=1, max_size=4), sizes=st.randoms(use_true_random=False))
def test_a_range_that_grows_between_blocks_moves_no_count(fast: Any, parts: list[Floats], sizes: Any) -> None:
    same(np.concatenate([np.resize(part, sizes.randint(1, 3 * counting._BLOCK)) for part in parts]), fast)


@pytest.mark.parametrize("size", [counting._BLOCK - 1, counting._BLOCK, 3 * counting._CHUNK + 1])
def test_both_count_large_arrays_the_same(fast: Any, size: int) -> None:
    photo = np.resize(photos.astronaut().astype(np.float32) / 127 - 1, size)
    same(np.maximum(photo, 0), fast)
    same(photo**3 * 1e30, fast)
    same(np.resize(np.float32([0, -0.0, 1e-45, -7.5]), size), fast)
    same(-np.abs(photo) - 1, fast, 3)
    same(np.zeros(size, np.float32), fast)
    same(np.zeros(size, np.float32), fast, 128)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nothing_is_counted_of_an_array_that_is_not_finite(fast: Any, bad: float) -> None:
    values = np.linspace(-1, 1, 2 * counting._BLOCK + 7, dtype=np.float32)
    values[-1] = bad
    same(values, fast)


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
