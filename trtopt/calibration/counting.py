"""The two loops over every value that calibration sees, compiled by numba where it is installed, else by NumPy.

Both give the same bits. Per value, one core / each of two at once (EPYC Zen 5, 0.8 million values, half of them zeros):
numba 0.54 / 0.51 ns; NumPy 2.4 / 4.2 (bincount holds the interpreter's lock); beside them cv2.calcHist 2.2 / 4.1,
fast-histogram 2.1 / 2.5 and boost-histogram 3.3 / 4.4. numba costs 0.6 s and 45 MB to import; its machine code is kept on
disk, so it compiles once per machine (2 s).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]

_CHUNK = 1 << 16  # values at a time in NumPy: the temporaries stay in the cache
_LANES = 4  # partial histograms in numba: a run of equal values, such as zeros, doesn't wait for its own last count
_SMALL = 1 << 15  # values: below, clearing and adding the lanes costs more than they save


@dataclass(frozen=True)
class Loops:
    """The loops, and who compiled them.

    Attributes:
        extremes: of a flat, contiguous FP32 array that isn't empty: the least and the greatest value; one of them is NaN
            or infinite if any value is.
        count: adds 1 to `counts[⌊|x| × scale⌋]` for each value; the scale is a power of two and all |x| × scale are below
            `counts.size`, at most 65536.
    """

    name: str
    extremes: Callable[[Floats], tuple[float, float]]
    count: Callable[[Floats, np.float32, Counts], None]


@functools.cache
def loops() -> Loops:
    """The fastest there are here."""
    return _compiled() if importlib.util.find_spec("numba") else PLAIN


def _extremes(flat: Floats) -> tuple[float, float]:
    return float(flat.min()), float(flat.max())  # NaN if any value is


def _count(flat: Floats, scale: np.float32, counts: Counts) -> None:
    magnitudes = np.empty(min(_CHUNK, flat.size), np.float32)
    bins = np.empty(magnitudes.size, np.uint16)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        scaled, index = magnitudes[: chunk.size], bins[: chunk.size]
        np.abs(chunk, out=scaled)
        np.multiply(scaled, scale, out=scaled)  # exact: the scale is a power of two
        np.copyto(index, scaled, casting="unsafe")  # truncates, which is floor here
        counts += np.bincount(index, minlength=counts.size)


PLAIN = Loops("NumPy", _extremes, _count)


def _compiled() -> Loops:
    try:
        import numba
    except ImportError:  # installed, but not for this NumPy
        return PLAIN

    def keys(bits: NDArray[np.int32]) -> tuple[Any, Any]:
        # As integers, with the magnitude of negative ones turned round, floats keep their order: -NaN, -inf, …, inf, NaN.
        # Unlike comparisons of floats, these are taken sixteen at a time without leave to ignore NaN.
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for i in range(bits.size):
            key = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            low = min(low, key)
            high = max(high, key)
        return low, high

    def count(flat: Floats, scale: np.float32, counts: Counts) -> None:
        if flat.size < _SMALL:
            for i in range(flat.size):
                counts[np.uint16(np.int32(abs(flat[i]) * scale))] += 1
            return
        lanes = np.zeros((_LANES, counts.size), np.uint32)
        whole = flat.size - flat.size % _LANES
        for i in range(0, whole, _LANES):
            a = np.uint16(np.int32(abs(flat[i]) * scale))
            b = np.uint16(np.int32(abs(flat[i + 1]) * scale))
            c = np.uint16(np.int32(abs(flat[i + 2]) * scale))
            d = np.uint16(np.int32(abs(flat[i + 3]) * scale))
            lanes[0, a] += np.uint32(1)
            lanes[1, b] += np.uint32(1)
            lanes[2, c] += np.uint32(1)
            lanes[3, d] += np.uint32(1)
        for i in range(whole, flat.size):
            lanes[0, np.uint16(np.int32(abs(flat[i]) * scale))] += np.uint32(1)
        for i in range(counts.size):
            counts[i] += np.int64(lanes[0, i]) + lanes[1, i] + lanes[2, i] + lanes[3, i]

    def built(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)  # type: ignore[no-any-return]
        except (RuntimeError, OSError):  # no folder to keep machine code in: once per process, then
            return numba.njit(signature, nogil=True)(function)  # type: ignore[no-any-return]

    ints, floats = (numba.types.Array(kind, 1, "C", readonly=True) for kind in (numba.int32, numba.float32))
    find = built(keys, numba.types.UniTuple(numba.int32, 2)(ints))

    def extremes(flat: Floats) -> tuple[float, float]:
        found = np.array(find(flat.view(np.int32)), np.int32)
        low, high = (found ^ ((found >> 31) & 0x7FFFFFFF)).view(np.float32)
        return float(low), float(high)

    return Loops("numba", extremes, built(count, numba.void(floats, numba.float32, numba.int64[::1])))
