"""The loop over every value that calibration sees: the C extension's where it is built, else NumPy's, to the same bits."""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

from trtopt.core import native

BINS = 16384  # over 8192 of them lie within the largest magnitude: 64 or more to one INT8 step
LOWEST_EXPONENT = -100  # magnitudes are scaled by BINS / 2**exponent, which FP32 must hold

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]

_CHUNK = 1 << 16  # values at a time in NumPy: the temporaries stay in the cache
# As in `_native.c`: values at a time, and bytes for their bins and for counts.
_BLOCK = 1 << 11
_SCRATCH = (BINS + 64) * 4 + _BLOCK * 2
_own = threading.local()


def count(flat: Floats, exponent: int, counts: Counts) -> tuple[float, float, int]:
    """Count a flat, contiguous array that isn't empty.

    Args:
        exponent: at least `LOWEST_EXPONENT`.
        counts: so far, of |x| in `BINS` equal bins over [0, 2**exponent); added to.

    Returns:
        The least and the greatest value, and the exponent that the counts then have: the smallest, not below the one given,
        that has all |x| below 2**exponent. If any value isn't finite, neither is one of the extremes (it may be NaN), and the
        counts stay as they are. A zero may have either sign.
    """
    if native.count is None:
        return plain(flat, exponent, counts)
    if not hasattr(_own, "scratch"):
        _own.scratch = np.empty(_SCRATCH, np.uint8)
    return native.count(flat.ctypes.data, flat.size, exponent, counts.ctypes.data, _own.scratch.ctypes.data)


def plain(flat: Floats, exponent: int, counts: Counts) -> tuple[float, float, int]:
    """`count` in NumPy."""
    low, high = float(flat.min()), float(flat.max())  # NaN if any value is
    if not (math.isfinite(low) and math.isfinite(high)):
        return low, high, exponent
    needed = math.frexp(max(high, -low))[1]
    if (low or high) and needed > exponent:
        counts[:] = coarser(counts, needed - exponent)
        exponent = needed
    scale = np.float32(BINS / math.ldexp(1.0, exponent))
    magnitudes = np.empty(min(_CHUNK, flat.size), np.float32)
    bins = np.empty(magnitudes.size, np.uint16)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        scaled, index = magnitudes[: chunk.size], bins[: chunk.size]
        np.abs(chunk, out=scaled)
        np.multiply(scaled, scale, out=scaled)  # exact: the scale is a power of two
        np.copyto(index, scaled, casting="unsafe")  # truncates, which is floor here
        counts += np.bincount(index, minlength=BINS)
    return low, high, exponent


def coarser(counts: Counts, doublings: int) -> Counts:
    """The counts of the same values over a range 2**doublings as wide."""
    if doublings == 0:
        return counts
    step = 1 << min(doublings, BINS.bit_length() - 1)
    result = np.zeros_like(counts)
    result[: BINS // step] = counts.reshape(-1, step).sum(1)
    return result
