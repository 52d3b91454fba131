"""How far one set of outputs is from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Difference:
    """How far one set of outputs is from another.

    Attributes:
        absolute: largest |a − b| over all outputs.
        relative: largest |a − b| / max |a| of an output.
        scale: max |a| over all outputs; 0: the reference is all zeros, so that agreement says nothing.
        output: the output with the largest relative difference.
    """

    absolute: float
    relative: float
    scale: float
    output: str

    def within(self, tolerance: float, *, bounded: frozenset[str] = frozenset()) -> bool:
        """At most `tolerance`, relative.

        Args:
            bounded: outputs of a sigmoid or softmax, where what float32 resolves around 1 is accepted too: in the tail of
                one, the largest value may itself be a rounding error.
        """
        return self.relative <= tolerance or (self.output in bounded and self.absolute <= RESOLUTION)

    def __str__(self) -> str:
        return f"largest difference {self.absolute:.3g} (relative {self.relative:.3g}, in {self.output})"


def difference(reference: Mapping[str, NDArray[Any]], actual: Mapping[str, NDArray[Any]]) -> Difference:
    """Compare outputs by name; other shapes, NaN on one side only, or missing outputs count as infinitely far."""
    worst = Difference(0.0, 0.0, 0.0, next(iter(reference), ""))
    for name, expected in reference.items():
        absolute = relative = float("inf")
        if not isinstance(expected, np.ndarray) or expected.dtype.kind in "OUS":
            if _alike(expected, actual.get(name)):
                absolute = relative = 0.0
            worst = Difference(max(worst.absolute, absolute), max(worst.relative, relative), worst.scale, name)
            continue
        finite = np.nan_to_num(expected.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        scale = float(np.abs(finite).max(initial=0.0))
        found = actual.get(name)
        if found is not None and found.shape == expected.shape:
            a, b = expected.astype(np.float64), found.astype(np.float64)
            same = (a == b) | (np.isnan(a) & np.isnan(b))  # also for infinities, whose difference is NaN
            with np.errstate(invalid="ignore"):
                gap = np.where(same, 0.0, np.abs(a - b))
            absolute = float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max(initial=0.0))
            relative = absolute / scale if scale else (float("inf") if absolute else 0.0)
        worst = Difference(
            max(worst.absolute, absolute),
            max(worst.relative, relative),
            max(worst.scale, scale),
            name if relative >= worst.relative else worst.output,
        )
    return worst


def _alike(expected: Any, found: Any) -> bool:
    """Whether two sequences, optionals or arrays of text are the same; arrays of numbers to single precision."""
    if isinstance(expected, (list, tuple)):
        return isinstance(found, (list, tuple)) and len(expected) == len(found) and all(map(_alike, expected, found))
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray) and expected.dtype.kind not in "OUS":
        return expected.shape == found.shape and np.allclose(expected, found, rtol=1e-3, atol=1e-5, equal_nan=True)
    return bool(np.all(np.asarray(expected == found)))
