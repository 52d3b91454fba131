from __future__ import annotations

import importlib.util
import math
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from skimage import data as photos

from trtopt.calibration import counting, histogram
from trtopt.calibration.counting import PLAIN, Loops, loops
from trtopt.calibration.histogram import BINS, Histogram

any_bits = arrays(np.uint32, st.integers(1, 200)).map(lambda bits: bits.view(np.float32))
finite = arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@pytest.fixture(scope="module")
def compiled() -> Loops:
    if importlib.util.find_spec("numba") is None:
        pytest.skip("numba isn't installed")
    found = loops()
    assert found.name == "numba"
    return found


@settings(max_examples=300, deadline=None)
@given(values=any_bits)
def test_extremes_agree_on_every_bit_pattern(compiled: Loops, values: NDArray[np.float32]) -> None:
    found, expected = compiled.extremes(values), PLAIN.extremes(values)
    if all(map(math.isfinite, expected)):
        assert found == expected
    else:
        assert not all(map(math.isfinite, found))


@settings(max_examples=200, deadline=None)
@given(values=finite)
def test_both_count_the_same(compiled: Loops, values: NDArray[np.float32]) -> None:
    same(values, compiled)


@pytest.mark.parametrize("size", [counting._SMALL - 1, counting._SMALL, counting._SMALL + 3, 3 * counting._CHUNK + 1])
def test_both_count_large_arrays_the_same(compiled: Loops, size: int) -> None:
    photo = np.resize(photos.astronaut().astype(np.float32) / 127 - 1, size)
    same(np.maximum(photo, 0), compiled)
    same(photo**3 * 1e30, compiled)
    same(np.resize(np.float32([0, -0.0, 1e-45, -7.5]), size), compiled)


def same(values: NDArray[np.float32], compiled: Loops) -> None:
    exponent = max(math.frexp(float(np.abs(values).max()))[1], -100)
    scale = np.float32(BINS / math.ldexp(1.0, exponent))
    plain, fast = np.ones(BINS, np.int64), np.ones(BINS, np.int64)
    PLAIN.count(values, scale, plain)
    compiled.count(values, scale, fast)
    assert plain.sum() == BINS + values.size
    assert np.array_equal(plain, fast)


def test_histograms_are_the_same_with_either(compiled: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chosen in (compiled, PLAIN):
        monkeypatch.setattr(histogram, "loops", lambda chosen=chosen: chosen)
        seen = Histogram()
        for photo in (photos.camera(), photos.astronaut(), photos.coffee()):
            seen.add(photo.astype(np.float32) / 100 - 1)
        found.append((seen.counts.tobytes(), seen.exponent, seen.low, seen.high, seen.total))
    assert found[0] == found[1]


def test_views_that_may_not_be_written_are_counted(compiled: Loops) -> None:
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    values.flags.writeable = False
    same(values, compiled)
    assert compiled.extremes(values) == (-1, 1)


def test_it_counts_without_the_interpreters_lock(compiled: Loops) -> None:
    """While one long count runs, this thread goes on; with the lock held it would stand still until the end."""
    values, counts, done = np.zeros(1 << 28, np.float32), np.zeros(BINS, np.int64), threading.Event()

    def work() -> None:
        compiled.count(values, np.float32(1), counts)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    steps = 0
    while not done.wait(0.001):
        steps += 1
    thread.join()
    assert counts[0] == values.size
    assert steps > 4


def test_numpy_stands_in_where_numba_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert counting._compiled() is PLAIN


def test_without_a_folder_for_machine_code_it_compiles_for_this_process(
    compiled: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numba

    real, asked = numba.njit, []

    def njit(*args: Any, cache: bool = False, **options: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert counting._compiled().name == "numba"
    assert asked == [True, False] * 2
