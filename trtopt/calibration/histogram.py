"""Streaming histograms of magnitudes that don't depend on how the data was cut into batches.

The range is [0, 2^e). When a larger value arrives, e grows and neighbouring bins are added in pairs: both the bin of a value
(its exponent and leading mantissa bits) and the sums are exact, so any order, batch size or sharding gives the same counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 8192
_CHUNK = 1 << 16  # values at a time: the temporaries stay in the cache


@dataclass
class Histogram:
    """Counts of |x| in `BINS` equal bins over [0, 2**exponent).

    Attributes:
        absmax: the largest magnitude seen, exactly.
        minimum, maximum: of the values themselves.
        total: values seen.
    """

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    exponent: int | None = None
    absmax: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    total: int = 0

    @property
    def width(self) -> float:
        """Of one bin."""
        return math.ldexp(1.0, (self.exponent or 0)) / BINS

    def add(self, values: NDArray[Any]) -> None:
        """Count an array of any shape.

        Raises:
            FloatingPointError: it holds NaN or infinite values (none of it is counted).
        """
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise FloatingPointError(f"{int(np.count_nonzero(~np.isfinite(flat)))} of {flat.size} values aren't finite")
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self._reach(max(high, -low))
        self.total += flat.size
        if self.exponent is None:  # only zeros so far
            self.counts[0] += flat.size
            return
        scale = np.float32(math.ldexp(BINS, -self.exponent))
        work = np.empty(min(_CHUNK, flat.size), np.float32)
        bins = np.empty(work.size, np.uint16)
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            magnitudes, index = work[: chunk.size], bins[: chunk.size]
            np.abs(chunk, out=magnitudes)
            np.multiply(magnitudes, scale, out=magnitudes)  # a power of two: exact
            np.copyto(index, magnitudes, casting="unsafe")  # truncates, as floor does for what isn't negative
            self.counts += np.bincount(index, minlength=BINS)

    def merge(self, other: Histogram) -> None:
        """Add another shard's counts; the same as having seen its values here."""
        self._reach(other.absmax)
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        self.total += other.total
        if other.exponent is None or self.exponent is None:  # zeros only: they lie in the first bin of any range
            self.counts += other.counts
        else:
            self.counts += _coarser(other.counts, self.exponent - other.exponent)

    def _reach(self, magnitude: float) -> None:
        """Grow the range until `magnitude` lies inside."""
        if magnitude <= self.absmax:
            return
        self.absmax = magnitude
        # Subnormal magnitudes share the range of the smallest normal one: 2**-126 / BINS is still exact to scale by.
        exponent = max(math.frexp(magnitude)[1], -112)
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _coarser(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _coarser(counts: NDArray[np.int64], doublings: int) -> NDArray[np.int64]:
    """The same values counted over a range 2**doublings as wide."""
    if doublings == 0:
        return counts
    step = 1 << min(doublings, BINS.bit_length() - 1)
    merged = np.zeros_like(counts)
    merged[: BINS // step] = counts.reshape(-1, step).sum(1)
    return merged
