"""Thresholds of a histogram of magnitudes: amax, the magnitude that the largest INT8 code stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trtopt.calibration.histogram import Histogram
from trtopt.core.errors import CalibrationError
from trtopt.core.values import METHODS, choice

ENTROPY_BINS = 2048
LEVELS = 128  # magnitudes that INT8 tells apart in the entropy search
CODES = 127  # largest INT8 code used: symmetric
PERCENTILE = 99.99
# Without a margin "auto" would be "mse", which has the least error by construction. But clipping is the part of the error
# that grows on inputs that calibration didn't show, and it has one sign, so that a layer's sums don't average it away:
# some of a tensor's own error is worth that room (docs/results/calibration-rules.md).
AUTO_TIE = 0.10
LEAST = 1 / 256  # of absmax: mse looks no lower
_KL_TIE = 1e-10  # above the rounding error of the prefix sums, below any difference that data makes
_MSE_TIE = 1e-9
_ROWS = 128  # of the entropy search at a time: its arrays stay in the cache, and take no new pages from the system

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TableEntry:
    """One tensor: its threshold, the method that gave it, and what was seen (None: the threshold came without data)."""

    amax: float
    method: str
    histogram: Histogram | None = field(default=None, repr=False)


def choose(histogram: Histogram, method: str) -> TableEntry:
    """The threshold for one tensor, or for several that share a scale and a merged histogram.

    Args:
        method: "entropy", "mse", "minmax", "percentile", or "auto": of their four thresholds the one of least expected
            squared quantization error (`quantization_error`), where up to `AUTO_TIE` more counts as equal, and of equals
            the one that clips least.
    """
    choice(method, METHODS, "`method=`")
    if histogram.absmax <= 0:
        raise CalibrationError("only zeros were seen, which give no scale")
    if method != "auto":
        return TableEntry(FINDERS[method](histogram), method)
    candidates = [TableEntry(FINDERS[name](histogram), name) for name in CANDIDATES]
    errors = quantization_error(histogram, np.array([item.amax for item in candidates]))
    good = [item for item, error in zip(candidates, errors) if error <= errors.min() * (1 + AUTO_TIE)]
    return max(good, key=lambda item: min(item.amax, histogram.absmax))  # the first of those that don't clip: minmax


def percentile(histogram: Histogram) -> float:
    """The first bin edge that at least `PERCENTILE` percent of the magnitudes lie below; at most the largest magnitude."""
    below = np.cumsum(histogram.counts)
    edge = int(np.searchsorted(below, PERCENTILE / 100 * histogram.total)) + 1
    return min(edge * histogram.width, histogram.absmax)


def mse(histogram: Histogram) -> float:
    """The threshold of least `quantization_error`: a sweep in steps of 4 % over coarse bins, then two finer ones."""
    sweep = np.asarray(histogram.absmax * np.geomspace(1.0, LEAST, 142), np.float64)
    grid, edges, mass = sweep, *_bins(histogram, 1024)
    for _ in range(3):
        errors = _mean_error(edges, mass, grid)
        best = int(np.flatnonzero(errors <= errors.min() * (1 + _MSE_TIE))[0])  # the largest: grids descend
        found = float(grid[best])
        ends = grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)]
        grid = np.unique(np.append(np.linspace(*ends, 17), [found, histogram.absmax]))[::-1]
        edges, mass = _bins(histogram, 4096)
    return found


def quantization_error(histogram: Histogram, amax: Floats) -> Floats:
    """Expected (x − dequantized x)² with each of the thresholds `amax` (1-D), clipping included.

    Magnitudes are taken as spread evenly within their bin, over which the error is integrated exactly; 64 or more bins
    make one step at amax = absmax, so what a spike inside a bin would change is at most 1/64 of a step, squared.
    """
    return _mean_error(*_bins(histogram), amax)


def entropy(histogram: Histogram) -> float:
    """The threshold that loses least information, as TensorRT's EntropyCalibration2 searches it.

    S. Migacz, "8-bit Inference with TensorRT", GTC 2017; see `divergences`. The first bin is limited to the second: the
    spike of exact zeros that a ReLU leaves would outweigh all else, and taken literally the search then clips ResNet-50 to
    a median of 1/8 of absmax. amax lies half a bin above the last bin kept (TensorRT gives 6.0015 for a ReLU6). Equal
    divergences, which empty bins make, go to the largest threshold.
    """
    counts = entropy_bins(histogram)
    counts[0] = min(counts[0], counts[1])
    found = divergences(counts)
    kept = int(np.flatnonzero(found <= found.min() + _KL_TIE)[-1]) + LEVELS
    return (kept + 0.5) * histogram.absmax / ENTROPY_BINS


def entropy_bins(histogram: Histogram) -> Floats:
    """The magnitudes in 2048 equal bins over [0, absmax], as a two-pass search would count them.

    A bin that straddles an edge is split in proportion. Giving it whole to one side keeps integers but makes neighbours
    differ where the density is flat, which moves thresholds (docs/results/calibration-rules.md). Both are functions of the
    final counts, so neither depends on batches.
    """
    edges, mass = _bins(histogram)
    below = np.concatenate([[0.0], np.cumsum(mass)])
    return np.diff(np.interp(np.linspace(0, edges[-1], ENTROPY_BINS + 1), edges, below))


def divergences(counts: Floats) -> Floats:
    """KL(P‖Q) for keeping the first 128, 129, … N of N bins; infinite where outliers would fall into an empty bin.

    P is the first i bins with the outliers' mass added to the last of them. Q is the same bins without the outliers, bin j
    merged into level ⌊128 j / i⌋ and each level spread evenly over its bins that aren't empty. Both are normalised; empty
    bins are left out. With h the bins, m the sum and n the filled bins of the level, o the outliers and T, t the sums of
    P and Q:

        T · KL = Σ p ln p − Σ m ln(m/n) − o ln(m/n of the last level) − T ln T + T ln t

    where all sums over bins are differences of running sums.
    """
    total = float(counts.sum())
    filled = counts > 0
    logs = np.zeros_like(counts)
    np.log(counts, out=logs, where=filled)
    sums = (np.cumsum(item, dtype=np.float64) for item in (counts, filled, counts * logs))
    below, filled_below, own_below = (np.concatenate([[0.0], item]) for item in sums)
    kept = np.arange(LEVELS, counts.size + 1)
    ends = np.minimum(np.arange(counts.size) + np.arange(1, -(-counts.size // LEVELS) + 1)[:, None], counts.size)
    mass, bins = below[ends] - below[:-1], filled_below[ends] - filled_below[:-1]  # of each level that there may be
    log_density = np.zeros_like(mass)
    np.log(mass / np.maximum(bins, 1), out=log_density, where=bins > 0)
    levels, terms = _levels(counts.size), (mass * log_density).reshape(-1)
    spread, level = np.empty(kept.size), log_density.reshape(-1)[levels[:, -1]]
    for start in range(0, kept.size, _ROWS):
        rows = slice(start, start + _ROWS)
        spread[rows] = terms[levels[rows]].sum(1)
    last, inside = counts[kept - 1], below[kept]
    outliers = np.where(kept == counts.size, 0.0, total - inside)
    impossible = (inside <= 0) | ((last <= 0) & (outliers > 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        end = np.where(last > 0, (last + outliers) * np.log(last + outliers) - last * logs[kept - 1], 0.0)
        found: Floats = (own_below[kept] + end - (spread + outliers * level)) / total - np.log(total) + np.log(inside)
    found[impossible] = np.inf
    return found


@functools.lru_cache(maxsize=2)
def _levels(size: int) -> NDArray[np.int64]:
    """Return the bins of each level, one row for every number of kept bins: bin j is in level ⌊128 j / i⌋.

    A level of w bins from bin s on is (w - 1) * size + s: there are far fewer of them than levels in all rows, which take
    their logarithms from each other.
    """
    kept = np.arange(LEVELS, size + 1)[:, None]
    edges = -(-np.arange(LEVELS + 1) * kept // LEVELS)
    return np.asarray((np.diff(edges, axis=1) - 1) * size + edges[:, :-1], np.int64)


def _bins(histogram: Histogram, most: int | None = None) -> tuple[Floats, Floats]:
    """Edges (n + 1) and counts (n) of the bins up to absmax, where the last one ends; merged to about `most`."""
    step = 1 if most is None else max(1, histogram.counts.size // most)
    used = min(int(histogram.absmax / histogram.width), histogram.counts.size - 1) // step + 1
    mass = histogram.counts[: used * step].reshape(-1, step).sum(1).astype(np.float64)
    edges = np.arange(used + 1, dtype=np.float64) * (step * histogram.width)
    # Never narrower than 1/64 of a bin: a spike at absmax, such as ReLU6's, may lie exactly on the bin's lower edge.
    edges[-1] = max(histogram.absmax, edges[-2] + histogram.width / 64)
    return edges, mass


def _mean_error(edges: Floats, mass: Floats, amax: Floats) -> Floats:
    """Mean squared error for each threshold, the counts `mass` spread evenly between `edges`.

    From the antiderivative of the squared error of rounding to multiples of s, k the nearest (at most 127) and r = x − k s:
    k s³ / 12 + r³ / 3.
    """
    step = np.asarray(amax, np.float64)[:, None] / CODES
    codes = np.minimum(np.rint(edges / step), CODES)
    rest = edges - codes * step
    integral = codes * (step * step * step / 12) + rest * rest * rest / 3  # products: x**3 takes ten times as long
    return np.asarray(np.diff(integral, axis=1) @ (mass / np.diff(edges)) / mass.sum())


CANDIDATES = ("minmax", "percentile", "mse", "entropy")  # of "auto"; of equals that clip as little it takes the first
FINDERS: dict[str, Callable[[Histogram], float]] = {
    "minmax": lambda histogram: histogram.absmax,
    "percentile": percentile,
    "mse": mse,
    "entropy": entropy,
}
