"""A histogram of a tensor's magnitudes, which doesn't depend on how the data arrived.

The range is [0, 2**exponent). A larger value doubles it, and neighbouring bins are added in pairs. Bin edges are integers
times a power of two, so a value's bin is exact in floating point, counts are integers, and any batch size, order or
sharding of the same samples gives the same bits. The loop over the values is the C extension's where it is built, else NumPy's,
to the same bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core import native

BINS = 16384  # over 8192 of them lie within the largest magnitude: 64 or more to one INT8 step
LOWEST_EXPONENT = -100  # magnitudes are scaled by BINS / 2**exponent, which FP32 must hold

Counts = NDArray[np.int64]

_CHUNK = 1 << 16  # values at a time in NumPy: the temporaries stay in the cache
# As in `_native.c`: values at a time, and bytes for their bins and for counts.
_BLOCK = 1 << 11
_SCRATCH = (BINS + 64) * 4 + _BLOCK * 2
_own = threading.local()


def count(flat: NDArray[np.float32], exponent: int, counts: Counts) -> tuple[float, float, int]:
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
        return count_in_numpy(flat, exponent, counts)
    if not hasattr(_own, "scratch"):
        _own.scratch = np.empty(_SCRATCH, np.uint8)
    while True:
        found = native.count(flat.ctypes.data, flat.size, exponent, counts.ctypes.data, _own.scratch.ctypes.data)
        if found[2] == exponent:
            return found
        counts[:] = coarser(counts, found[2] - exponent)  # a few times at most for a tensor: it was counted in vain
        exponent = found[2]


def count_in_numpy(flat: NDArray[np.float32], exponent: int, counts: Counts) -> tuple[float, float, int]:
    low, high = float(flat.min()), float(flat.max())  # NaN if any value is
    if not (math.isfinite(low) and math.isfinite(high)):
        return low, high, exponent
    needed = math.frexp(max(high, -low))[1]
    if (low or high) and needed > exponent:
        counts[:] = coarser(counts, needed - exponent)
        exponent = needed
    scale = np.float32(BINS / math.ldexp(1.0, exponent))
    for start in range(0, flat.size, _CHUNK):
        scaled = np.abs(flat[start : start + _CHUNK]) * scale  # exact: the scale is a power of two
        counts += np.bincount(scaled.astype(np.uint16), minlength=BINS)  # truncates, which is floor here
    return low, high, exponent


def coarser(counts: Counts, doublings: int) -> Counts:
    """The counts of the same values over a range 2**doublings as wide."""
    if doublings == 0:
        return counts
    step = 1 << min(doublings, BINS.bit_length() - 1)
    result = np.zeros_like(counts)
    result[: BINS // step] = counts.reshape(-1, step).sum(1)
    return result


@dataclass(eq=False)
class Histogram:
    """Counts of |x| in `BINS` equal bins over [0, 2**exponent), with exact extremes.

    Attributes:
        counts: int64, `BINS` of them.
        exponent: of the range; None while nothing but zeros was seen.
        low, high: the least and the greatest value (not magnitude).
        total: values seen.
    """

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64), repr=False)
    exponent: int | None = None
    low: float = math.inf
    high: float = -math.inf
    total: int = 0

    @property
    def absmax(self) -> float:
        """The largest magnitude, exactly; 0 before anything was seen."""
        return max(self.high, -self.low, 0.0)

    @property
    def width(self) -> float:
        """The width of a bin; every bin edge is an integer times it, exactly."""
        return math.ldexp(1.0, self.exponent or 0) / BINS

    @property
    def constant(self) -> bool:
        """True where all values are the same one."""
        return self.low >= self.high

    def add(self, values: NDArray[Any]) -> None:
        """Count an array of any shape and floating type (as FP32).

        Raises:
            FloatingPointError: it holds NaN or infinity; the text says how many. Nothing of it is counted.
        """
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not flat.size:
            return
        known = LOWEST_EXPONENT if self.exponent is None else self.exponent
        low, high, exponent = count(flat, known, self.counts)
        if not (math.isfinite(low) and math.isfinite(high)):
            nans, infinities = int(np.isnan(flat).sum()), int(np.isinf(flat).sum())
            raise FloatingPointError(f"{nans} NaN and {infinities} infinite of {flat.size} values")
        self.low, self.high = min(self.low, low + 0.0), max(self.high, high + 0.0)  # + 0: -0 counts as 0
        self.total += flat.size
        if self.absmax:  # zeros alone are in the first bin of any range
            self.exponent = exponent

    def merge(self, other: Histogram) -> None:
        """Add what another one counted, as if its values had been added here."""
        reached = max((item.exponent for item in (self, other) if item.exponent is not None), default=0)
        parts = [
            coarser(part.counts, 0 if part.exponent is None else reached - part.exponent) for part in (self, other)
        ]
        self.counts = parts[0] + parts[1]
        self.exponent = None if self.exponent is None and other.exponent is None else reached
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total += other.total

    def divided(self, copies: int) -> Histogram | None:
        """Return what one of `copies` equal parts counted; None where the counts can't be so many equal parts."""
        parts, rest = np.divmod(self.counts, copies)
        return None if rest.any() else Histogram(parts, self.exponent, self.low, self.high, self.total // copies)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """One histogram of what several counted; they stay as they are."""
    result = Histogram()
    for histogram in histograms:
        result.merge(histogram)
    return result
