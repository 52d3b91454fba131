"""A histogram of a tensor's magnitudes, which doesn't depend on how the data arrived.

The range is [0, 2**exponent). A larger value doubles it, and neighbouring bins are added in pairs. Bin edges are integers
times a power of two, so a value's bin is exact in floating point, counts are integers, and any batch size, order or
sharding of the same samples gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.calibration.counting import BINS, LOWEST_EXPONENT, coarser, count


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
