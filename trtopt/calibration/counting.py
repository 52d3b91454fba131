"""The loop over every value that calibration sees, compiled by numba where it is installed, else by NumPy.

Both give the same bits. Per value, one core / each of two at once (EPYC Zen 5, 0.8 million values, half of them zeros):
numba 0.4 / 0.4 ns; NumPy 2.4 / 4.2 (bincount holds the interpreter's lock); beside them cv2.calcHist 2.2 / 4.1,
fast-histogram 2.1 / 2.5 and boost-histogram 3.3 / 4.4. numba takes 45 MB, and 1.3 s to import and
set up; its machine code is kept on disk, so it compiles once per machine (2 s).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 16384  # over 8192 of them lie within the largest magnitude: 64 or more to one INT8 step
LOWEST_EXPONENT = -100  # magnitudes are scaled by BINS / 2**exponent, which FP32 must hold

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]

_lock = threading.Lock()
_CHUNK = 1 << 16  # values at a time in NumPy: the temporaries stay in the cache
_BLOCK = 1 << 14  # values at a time in numba: read from memory once, for both loops
_SMALL = 1 << 13  # values: up to here, clearing and adding more than one partial histogram costs more than it saves
_LANES = 4  # partial histograms in numba: a run of equal values, such as zeros, doesn't wait for its own last count


Count = Callable[[Floats, int, Counts], tuple[float, float, int]]
"""Counts a flat, contiguous FP32 array that isn't empty.

Args: the array; an exponent, at least `LOWEST_EXPONENT`; and the counts so far of |x| in `BINS` equal bins over
[0, 2**exponent), int64, which are added to.

Returns: the least and the greatest value, and the exponent that the counts then have: the smallest, not below the one given,
that has all |x| below 2**exponent. If any value isn't finite, neither is one of the extremes (it may be NaN), and the counts
stay as they are. A zero may have either sign.
"""


def counter() -> Count:
    """The fastest there is here. The first call loads it; others wait for that."""
    with _lock:
        return _fastest()


@functools.cache
def _fastest() -> Count:
    return (compiled() if importlib.util.find_spec("numba") else None) or plain


def plain(flat: Floats, exponent: int, counts: Counts) -> tuple[float, float, int]:
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


@functools.cache
def compiled() -> Count | None:
    """By numba; None where it can't be imported."""
    try:
        import numba
    except ImportError:  # perhaps installed, but not for this NumPy
        return None
    sign, magnitude, infinite = np.int32(31), np.int32(0x7FFFFFFF), np.int32(0x7F800000)
    one, shift, all_doublings = np.uint32(1), np.uint64(16), BINS.bit_length() - 1

    # bits: the array's, as integers. Of any content: lanes, `_LANES` x `BINS`; bins, `_BLOCK` long, and the same in fours,
    # each loaded at once.
    def run(
        flat: Floats, bits: Any, exponent: int, counts: Counts, lanes: Any, bins: Any, fours: Any
    ) -> tuple[Any, Any, int]:
        used = _LANES if flat.size > _SMALL else 1
        lanes[:used] = 0
        before = exponent
        # As integers, with the magnitude of negative ones turned round, floats keep their order: -NaN, -inf, …, inf, NaN.
        # Unlike comparisons of floats, these are taken sixteen at a time without leave to ignore NaN.
        least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for start in range(0, flat.size, _BLOCK):
            block = flat[
                start : start + _BLOCK
            ]  # with loops from 0: indices may not look negative, or they cost double
            words = bits[start : start + _BLOCK]
            low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
            for i in range(words.size):
                key = words[i] ^ ((words[i] >> sign) & magnitude)
                low = min(low, key)
                high = max(high, key)
            least, most = min(least, low), max(most, high)
            largest = max(high, np.int32(0))
            if low < 0:
                largest = max(largest, (low ^ magnitude) & magnitude)
            if largest >= infinite:
                return np.int32(least), np.int32(most), before
            needed = (int(largest) >> 23) - 126  # as frexp's, of all but subnormals, which are below the lowest anyway
            if needed > exponent:
                step = 1 << min(needed - exponent, all_doublings)
                for lane in range(used):
                    for i in range(BINS // step):
                        total = np.uint32(0)
                        for j in range(i * step, i * step + step):
                            total += lanes[lane, j]
                        lanes[lane, i] = total
                    lanes[lane, BINS // step :] = 0
                exponent = needed
            scale = np.float32(math.ldexp(float(BINS), -exponent))  # a power of two: products are exact
            for i in range(block.size):
                bins[i] = np.uint16(np.int32(abs(block[i]) * scale))
            whole = block.size // 4 if used > 1 else 0
            for i in range(whole):
                word = fours[i]
                lanes[0, np.uint16(word)] += one
                lanes[1, np.uint16(word >> shift)] += one
                lanes[2, np.uint16(word >> (shift + shift))] += one
                lanes[3, np.uint16(word >> (shift + shift + shift))] += one
            for i in range(4 * whole, block.size):
                lanes[0, bins[i]] += one
        if exponent > before:
            step = 1 << min(exponent - before, all_doublings)
            for i in range(BINS // step):
                counts[i] = counts[i * step : i * step + step].sum()
            counts[BINS // step :] = 0
        for lane in range(used):
            for i in range(BINS):
                counts[i] += lanes[lane, i]
        return least, most, exponent

    floats, ints = (numba.types.Array(kind, 1, "C", readonly=True) for kind in (numba.float32, numba.int32))
    result = numba.types.Tuple((numba.int32, numba.int32, numba.int64))
    signature = result(
        floats, ints, numba.int64, numba.int64[::1], numba.uint32[:, ::1], numba.uint16[::1], numba.uint64[::1]
    )
    try:
        made = numba.njit(signature, nogil=True, cache=True)(run)
    except (RuntimeError, OSError):  # no folder to keep machine code in: once per process, then
        made = numba.njit(signature, nogil=True)(run)
    own = threading.local()

    def count(flat: Floats, exponent: int, counts: Counts) -> tuple[float, float, int]:
        if not hasattr(own, "lanes"):
            own.lanes, own.bins = np.empty((_LANES, BINS), np.uint32), np.empty(_BLOCK, np.uint16)
        bits, fours = flat.view(np.int32), own.bins.view(np.uint64)
        least, most, reached = made(flat, bits, exponent, counts, own.lanes, own.bins, fours)
        keys = np.array([least, most], np.int32)
        low, high = (keys ^ ((keys >> sign) & magnitude)).view(np.float32)
        return float(low), float(high), reached

    return count
