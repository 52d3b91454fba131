"""The difference between one set of outputs and another: what every comparison of two models goes by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESOLUTION = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Difference:
    """The difference between one set of outputs and another."""

    absolute: float  # largest |a − b| over all outputs
    relative: float  # largest |a − b| / max |a| of an output
    scale: float  # max |a| over all outputs; 0: the reference is all zeros, so that agreement says nothing
    output: str  # the one with the largest relative difference

    def within(self, tolerance: float, *, bounded: frozenset[str] = frozenset()) -> bool:
        """At most `tolerance`, relative. Of the outputs `bounded` by a sigmoid or softmax what float32 resolves around 1 is
        accepted, too: in the tail of one, the largest value may itself be a rounding error."""
        return self.relative <= tolerance or (self.output in bounded and self.absolute <= RESOLUTION)

    def __str__(self) -> str:
        return f"largest difference {self.absolute:.3g} (relative {self.relative:.3g}, in {self.output})"


def difference(reference: Mapping[str, NDArray[Any]], actual: Mapping[str, NDArray[Any]]) -> Difference:
    """Compare outputs by name; other shapes, NaN on one side only, or missing outputs count as infinitely far."""
    far = {name: _far(expected, actual.get(name)) for name, expected in reference.items()}
    absolute, relative, scale = (max(column) for column in zip(*far.values(), (0.0, 0.0, 0.0)))
    output = max(reversed(far), key=lambda name: far[name][1], default="")
    return Difference(absolute, relative, scale, output)


def _far(expected: Any, actual: Any) -> tuple[float, float, float]:
    """Return absolute and relative difference of one output, and the scale."""
    expected, actual = (np.asarray(item) if isinstance(item, np.generic) else item for item in (expected, actual))
    if not isinstance(expected, np.ndarray) or expected.dtype.kind in "OUS":
        gap = 0.0 if _alike(expected, actual) else math.inf
        return gap, gap, 0.0
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    a = expected.astype(wide)
    scale = float(np.abs(np.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0)).max(initial=0.0))
    if not isinstance(actual, np.ndarray) or actual.shape != expected.shape:
        return math.inf, math.inf, scale
    b = actual.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # also for infinities, whose difference is NaN
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(a - b))
    absolute = float(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf).max(initial=0.0))
    return absolute, absolute / scale if scale else (math.inf if absolute else 0.0), scale


def powers(signal: NDArray[Any], result: NDArray[Any]) -> NDArray[np.float64]:
    """Return the powers of the signal and of what is beside it; values that aren't finite in the signal don't count."""
    mask = np.isfinite(signal)
    reference, values = (np.asarray(item, np.float64)[mask] for item in (signal, result))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.array([np.square(reference).sum(), np.square(values - reference).sum()])


def in_db(signal: Any, noise: Any) -> NDArray[np.float64]:
    """Return dB of each; inf without noise, -inf without signal or where the noise isn't finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = 10 * np.log10(signal / noise)
    return np.where(noise == 0, np.inf, np.where((signal == 0) | ~np.isfinite(noise), -np.inf, ratios))


def _alike(expected: Any, actual: Any) -> bool:
    """Return whether two sequences, optionals or arrays of text are the same; arrays of numbers to single precision."""
    if isinstance(expected, (list, tuple)):
        return isinstance(actual, (list, tuple)) and len(expected) == len(actual) and all(map(_alike, expected, actual))
    if isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray) and expected.dtype.kind not in "OUS":
        return expected.shape == actual.shape and np.allclose(expected, actual, rtol=1e-3, atol=1e-5, equal_nan=True)
    if isinstance(expected, Mapping):
        return isinstance(actual, Mapping) and expected.keys() == actual.keys()
    return bool(np.all(np.asarray(expected == actual)))
