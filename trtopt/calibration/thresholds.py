"""From a histogram of magnitudes to amax: entropy, mse, percentile, minmax, and auto, which takes the best of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtopt.calibration.histogram import Histogram
from trtopt.errors import CalibrationError

ENTROPY_BINS = 2048
LEVELS = 128  # of an INT8 magnitude
PERCENTILE = 99.99
_CODES = 127.0
_TIE = 1e-9  # KL divergences and errors this close are equal: the summation order, not the data, tells them apart
_LOWEST = 1 / 64  # of absmax: no threshold below it is tried for the least error


@dataclass(frozen=True)
class Choice:
    """amax, and the method that gave it."""

    amax: float
    method: str


def choose(histogram: Histogram, method: str) -> Choice:
    """The threshold for one tensor.

    "auto" computes every method's threshold and takes the one with the least expected squared quantization error over the
    histogram; equal ones go to the one that clips least.

    Raises:
        CalibrationError: nothing but zeros was seen.
    """
    if histogram.absmax <= 0:
        raise CalibrationError("only zeros were seen: there is no scale to measure")
    if method != "auto":
        return Choice(_METHODS[method](histogram), method)
    candidates = [Choice(find(histogram), name) for name, find in _METHODS.items()]
    errors = expected_error(histogram, np.array([item.amax for item in candidates]))
    best = errors.min()
    return max(
        (item for item, error in zip(candidates, errors) if error <= best * (1 + _TIE)), key=lambda item: item.amax
    )


def minmax(histogram: Histogram) -> float:
    """The largest magnitude: nothing is clipped."""
    return histogram.absmax


def percentile(histogram: Histogram, share: float = PERCENTILE) -> float:
    """The upper edge of the bin below which `share` percent of the magnitudes lie; at most the largest."""
    reached = np.cumsum(histogram.counts) >= share / 100 * histogram.total
    return min(float(np.argmax(reached) + 1) * histogram.width, histogram.absmax)


def expected_error(histogram: Histogram, amax: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean squared error of rounding to INT8 with each of the thresholds `amax` (1-D).

    Values are taken at their bin's centre. A bin is narrower than 1/32 of a quantization step at every threshold above
    absmax/64, so what happens inside one adds the same small constant everywhere.
    """
    used = np.flatnonzero(histogram.counts)
    centres = (used + 0.5) * histogram.width
    weights = histogram.counts[used] / histogram.total
    scale = amax[:, None] / _CODES
    codes = np.minimum(np.rint(centres / scale), _CODES)
    return np.asarray(np.square(centres - codes * scale) @ weights)


def mse(histogram: Histogram) -> float:
    """The threshold of least expected squared error: a logarithmic sweep, then a finer one around its best."""
    grid = np.geomspace(_LOWEST, 1.0, 97) * histogram.absmax
    for _ in range(2):
        errors = expected_error(histogram, grid)
        best = int(np.flatnonzero(errors <= errors.min() * (1 + _TIE))[-1])
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)]
        found = float(grid[best])
        grid = np.unique(np.append(np.linspace(low, high, 33), found))
    errors = expected_error(histogram, grid)
    return float(grid[np.flatnonzero(errors <= errors.min() * (1 + _TIE))[-1]])


def entropy_bins(histogram: Histogram) -> NDArray[np.int64]:
    """The counts in 2048 equal bins over [0, absmax].

    Each of the finer bins (over 4096 of them lie inside) goes whole to the bin its centre falls in: integer arithmetic on the
    final counts, so the result doesn't depend on batches either.
    """
    used = np.flatnonzero(histogram.counts)
    centres = (used + 0.5) * histogram.width
    index = np.minimum((centres * (ENTROPY_BINS / histogram.absmax)).astype(np.int64), ENTROPY_BINS - 1)
    return np.bincount(index, weights=histogram.counts[used], minlength=ENTROPY_BINS).astype(np.int64)


def divergences(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """KL(P‖Q) for keeping the first 128, 129, … 2048 bins; infinite where outliers would land in an empty bin.

    S. Migacz, "8-bit Inference with TensorRT", GTC 2017: P is the first i bins with the outliers added to the last; Q is those
    bins without the outliers, merged into 128 levels and spread back over the bins that aren't empty; both normalised. With
    H the counts, S the sum and n the filled bins of the level a bin belongs to, and T the sums of P and of Q,

        KL = (Σ P log P − Σ P log(S/n)) / T_P − log T_P + log T_Q,

    whose sums over levels come from prefix sums at the level boundaries: no loop over bins.
    """
    h = counts.astype(np.float64)
    total = h.sum()
    logs = np.zeros_like(h)
    np.log(h, out=logs, where=h > 0)
    before = np.concatenate([[0.0], np.cumsum(h)])  # counts before a bin
    filled = np.concatenate([[0], np.cumsum(h > 0)])
    own = np.concatenate([[0.0], np.cumsum(h * logs)])  # Σ H log H before a bin
    i = np.arange(LEVELS, ENTROPY_BINS + 1)
    # Bin j belongs to level floor(j · 128 / i): level g starts at ceil(g · i / 128).
    edges = -(-np.arange(LEVELS + 1)[None, :] * i[:, None] // LEVELS)
    sums, count = np.diff(before[edges], axis=1), np.diff(filled[edges], axis=1)
    mean_log = np.zeros_like(sums)
    np.log(sums / np.maximum(count, 1), out=mean_log, where=sums > 0)
    kept = before[i]
    outliers = total - kept
    last = h[i - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        plogp = own[i] - last * logs[i - 1] + np.where(last > 0, (last + outliers) * np.log(last + outliers), 0.0)
        plogq = (sums * mean_log).sum(1) + outliers * mean_log[:, -1]
        found = (plogp - plogq) / total - np.log(total) + np.log(kept)
    found[(kept == 0) | ((last == 0) & (outliers > 0))] = np.inf
    return found


def entropy(histogram: Histogram) -> float:
    """The threshold that keeps most information (`divergences`), as TensorRT's EntropyCalibration2 chooses it.

    The first bin is limited to the second: the spike of zeros that a ReLU leaves would otherwise outweigh everything else.
    Ties go to the largest threshold. TensorRT's amax lies half a bin above the last one kept (it reports 6.0015 for ReLU6).
    """
    counts = entropy_bins(histogram)
    counts[0] = min(counts[0], counts[1])
    if not counts.any():
        return histogram.absmax  # every other bin is empty too: one value, nothing to weigh
    found = divergences(counts)
    best = int(np.flatnonzero(found <= found.min() + _TIE)[-1]) + LEVELS
    return (best + 0.5) * histogram.absmax / ENTROPY_BINS


_METHODS = {"minmax": minmax, "mse": mse, "percentile": percentile, "entropy": entropy}
