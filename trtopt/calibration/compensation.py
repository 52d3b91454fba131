"""Weights that are rounded or zeroed one input after the other, each error brought to the inputs that follow.

So a product keeps its values, instead of each weight its own. The error of an output channel is eᵀ C e, e its weights' errors
and C the second moments of the inputs (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", arXiv 2210.17323; Frantar and Alistarh, "SparseGPT", arXiv 2301.00774).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.calibration.rounding import SHRINKAGE, Floats, Moments

_DAMPING = 0.01  # of the mean second moment, added to each
_STEP = 128  # inputs whose errors are brought to the others together


def second_moments(gathered: Moments) -> Floats:
    """K × K second moments of a product's inputs; the fewer samples there are, the less counts what goes together in them."""
    squares, sums, count = gathered
    mean = sums[0] / count
    covariance = squares[0] / count - np.outer(mean, mean)
    share = min(SHRINKAGE, len(mean) / (len(mean) + count))
    shrunk = (1 - share) * covariance + share * np.diag(np.diag(covariance))
    return np.asarray(shrunk + np.outer(mean, mean))


def damped(second: Floats) -> Floats:
    """Moments that can be inverted: an input that nothing moves counts a little."""
    return np.asarray(second + np.eye(len(second)) * (_DAMPING * np.diag(second).mean() or 1.0))


def compensated(
    weight: NDArray[np.floating[Any]],
    second: Floats,
    order: NDArray[np.intp],
    kept: Callable[[int, Floats, Floats], Floats],
) -> Floats | None:
    """Return what becomes of a K × N weight, as float64; None where the moments can't be inverted.

    Args:
        second: K × K, of what is multiplied.
        order: in which the inputs are gone through.
        kept: gives what a row's weights become, from its place in that order, all weights in that order as they are by then,
            and what each row's error is divided by to be a loss. It may look ahead within a step of 128 rows.
    """
    try:
        upper = np.linalg.cholesky(np.linalg.inv(damped(second)[np.ix_(order, order)])).T
    except np.linalg.LinAlgError:
        return None
    left, pivots = np.asarray(weight, np.float64)[order], np.diag(upper)
    made = np.empty_like(left)
    for first in range(0, len(left), _STEP):
        end = min(first + _STEP, len(left))
        errors = np.empty((end - first, left.shape[1]))
        for row in range(first, end):
            made[row] = kept(row, left, pivots)
            errors[row - first] = (left[row] - made[row]) / pivots[row]
            left[row + 1 : end] -= np.outer(upper[row, row + 1 : end], errors[row - first])
        left[end:] -= upper[first:end, end:].T @ errors
    placed = np.empty_like(made)
    placed[order] = made
    return placed
