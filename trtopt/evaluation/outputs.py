"""One output of two models compared, in all and for each sample: by the measure of its kind (`trtopt.evaluation.measures`).

Of every kind: 10·log10(Σ r² / Σ (r − c)²) in dB, the largest |r − c|, the cosine Σ rc / √(Σ r² · Σ c²) of all values as one
vector, and values that are NaN or infinite in the candidate alone. r is the reference, c the candidate, both in FP64.

Positions that are padding count for nothing (`verify_all` says which are).

dB say little where the reference is next to zero: a sample whose largest |r| is under 2⁻¹⁴, FP16's smallest normal number,
below which FP16 loses digits and INT8 has none; or one with less than 10⁻⁶ of the samples' mean Σ r², which is −60 dB. Such a
sample's own dB are taken against that mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import plain
from trtopt.core.errors import DataError
from trtopt.core.values import Kind
from trtopt.data.difference import in_db
from trtopt.evaluation.measures import (
    MEASURES,
    NEAR_ZERO,
    Channels,
    Floats,
    cosine,
    decibels,
    digits_below,
    measure,
    share,
)

FAINT = 1e-6
WORST = 3  # samples that are named
_FIGURES = ("snr_db", "max_abs", "agreement", "cosine")  # of a sample
_BLOCK = 1 << 21  # values that are compared at a time


@dataclass(frozen=True)
class SampleAgreement:
    """One sample's figures.

    Attributes:
        snr_db: dB, against the mean sample where its own reference is `near_zero`. Of boxes, the lowest of the channels, each
            against its mean over the samples.
        agreement: share of its parts that are the same (`Kind.shared`); None for other kinds.
        cosine: of embeddings; None for other kinds.
    """

    name: str
    snr_db: float
    max_abs: float
    agreement: float | None
    cosine: float | None
    near_zero: bool


@dataclass(frozen=True)
class SampleSpread:
    """The differences between the samples.

    Attributes:
        figure: which of a sample's figures: "snr_db", "agreement" or "cosine"; "max_abs" where the reference has no signal.
        lowest, median: of it.
        worst: the lowest, and then the samples that agree least; none of them is equal to its reference.
    """

    figure: str
    lowest: float
    median: float
    worst: tuple[SampleAgreement, ...]


@dataclass(frozen=True)
class OutputAgreement:
    """One output, over all samples. The module says how each figure is made.

    Attributes:
        snr_db: inf where equal, -inf where nothing is right.
        max_abs: inf with non-finite values.
        cosine: of the two outputs as vectors; nan where one is zero. Not a measure of quality.
        nonfinite: NaN and infinite values of the candidate where the reference has none.
        agreement: share of the `parts` that is the same, of kinds that have one (`Kind.shared`).
        overlap: of masks; None where the rest is less than 10⁻⁴ of the reference's pixels.
        cosine_mean, cosine_min: of embeddings, nan where all are zero in the reference.
        channels: of boxes.
        integers: of whole numbers in both that aren't values, of which dB say nothing.
        unpadded: share of the positions that aren't padding; None: nothing was left out.
        rows: entries of the first axis; near_zero: those whose reference is next to zero.
        spread: over the samples; None where the first axis doesn't count them.
    """

    name: str
    kind: Kind
    snr_db: float
    max_abs: float
    cosine: float
    nonfinite: int
    agreement: float | None = None
    parts: int | None = None
    overlap: float | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    channels: Channels | None = None
    integers: bool = False
    unpadded: float | None = None
    rows: int = 0
    near_zero: int = 0
    spread: SampleSpread | None = None

    @property
    def top1(self) -> float | None:
        """Share of samples with the same largest class; None where the output isn't classes."""
        return self.agreement if self.kind is Kind.CLASSES else None

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values; a number that isn't finite is its name ("inf", "-inf", "nan")."""
        values = plain(self) | {"top1_agreement": self.top1}
        values["samples"] = values.pop("spread")
        del values["name"]
        return dict(values)


# In words, from JSON values (`OutputAgreement.describe()`) -------------------------------------------------------------------


def sentence(name: str, output: Mapping[str, Any], samples: int) -> str:
    """An output in one line."""
    start = f"{name} ({output['kind']}):"
    if float(output["max_abs"]) == 0 and output["agreement"] in (None, 1):  # FP64 can't tell all whole numbers apart
        nothing = bool(output["near_zero"] == output["rows"] > 0)
        return f"{start} equal" + ", but next to zero on every sample: they say nothing of it" * nothing
    parts = [part for part in (measure(output, samples),) if part]
    if output["overlap"] is not None:
        digits = digits_below(output["overlap"], 1.0, 2)
        parts.append(f"overlap {output['overlap']:.{digits}f} outside the commonest class")
    near, rows = output["near_zero"], output["rows"]
    remark = "the reference is next to zero" + f" on {near} of {rows} samples" * (rows > 1)
    difference = f"largest difference {float(output['max_abs']):.3g}"
    if near == rows:
        parts.append(f"{remark}: {decibels(output['snr_db'])} says little; {difference}")
    else:
        if not output["integers"]:
            parts.append(decibels(output["snr_db"]) + " in all" * (output["channels"] is not None))
        parts += [difference, remark] if near else [difference]
    if output["nonfinite"]:
        parts.append(f"{output['nonfinite']} values not finite")
    return f"{start} {', '.join(parts)}"


def spread(output: Mapping[str, Any]) -> str:
    """Say how the samples differ, and the worst by name; "" where that says nothing."""
    samples = output["samples"]
    if samples is None or output["rows"] < 2 or not samples["worst"]:
        return ""
    figure = samples["figure"]
    worst = f"worst: {', '.join(_named(item, figure) for item in samples['worst'])}"
    if figure == "max_abs":
        return worst
    lowest, median = (_figure(figure, samples[name]) for name in ("lowest", "median"))
    return f"per sample: {'cosine ' * (figure == 'cosine')}{lowest} at the lowest, {median} in the median; {worst}"


def _named(sample: Mapping[str, Any], figure: str) -> str:
    remarks = [_figure(figure, sample[figure])]
    if sample["agreement"] == 0 and figure != "agreement":
        remarks.append("another class")
    if sample["near_zero"] and figure == "snr_db":
        remarks.append(f"next to zero in the reference, difference {float(sample['max_abs']):.3g}")
    return f"{sample['name']} ({', '.join(remarks)})"


def _figure(name: str, value: Any) -> str:
    words = {"agreement": share, "cosine": cosine, "snr_db": decibels}
    return words[name](value) if name in words else f"difference {float(value):.3g}"


# Sums --------------------------------------------------------------------------------------------------------------------


class OutputSums:
    """Adds up one output, batch by batch. Of each sample a few figures are kept."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.kind = name, kind
        self._measure = MEASURES[kind]
        # Of each block: signal, noise, the candidate's energy, product, largest difference, peak; and what its measure keeps.
        self._rows: list[Floats] = []
        self._parts: list[Any] = []
        self._nonfinite = 0
        self._counts_samples, self._integers = True, self._measure.integers
        self._positions = np.zeros(2, np.int64)  # that aren't padding, and all

    def add(
        self, reference: NDArray[Any], candidate: NDArray[Any], samples: int, real: NDArray[np.bool_] | None = None
    ) -> None:
        """Add a batch of `samples`: two arrays of one shape, of any numeric type. `real` are samples × positions that aren't
        padding, for outputs with positions on the second axis."""
        old, new = (array if array.ndim else array.reshape(1) for array in (reference, candidate))
        self._counts_samples = self._counts_samples and len(old) == samples
        self._integers = self._integers and old.dtype.kind in "iub" and new.dtype.kind in "iub"
        sequences = old.ndim > 2 or (old.ndim == 2 and old.dtype.kind in "iub")
        if real is None or not sequences or real.shape != old.shape[:2]:
            real = np.ones((len(old), 1), np.bool_)
        else:
            self._positions += real.sum(), real.size
            keep = real.reshape(real.shape + (1,) * (old.ndim - 2))
            old, new = (np.where(keep, array, array.dtype.type(0)) for array in (old, new))
        step = max(1, _BLOCK * len(old) // max(1, old.size))
        for start in range(0, len(old) if old.size else 0, step):
            part = slice(start, start + step)
            self._block(old[part], new[part], real[part])

    def _block(self, old: NDArray[Any], new: NDArray[Any], real: NDArray[np.bool_]) -> None:
        exact, other = old.astype(np.float64), new.astype(np.float64)
        nonfinite = int(exact.size - np.isfinite(exact).sum())
        if nonfinite:
            raise DataError(
                f"the reference gives {nonfinite} values that aren't finite in output {self.name!r}; there is nothing to "
                "compare with: check the inputs' preprocessing"
            )
        self._nonfinite += int(other.size - np.isfinite(other).sum())
        a, b = exact.reshape(len(exact), -1), other.reshape(len(other), -1)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(a - b)
            largest = difference.max(1, initial=0.0)
            largest = np.where(np.isnan(largest), np.inf, largest)
            sums = [np.square(values).sum(1) for values in (a, difference, b)]
            self._rows.append(np.stack([*sums, (a * b).sum(1), largest, np.abs(a).max(1, initial=0.0)]))
            if self._integers:
                exact, other = old, new
            self._parts.append(self._measure.part(exact, other, real, self._parts))

    def result(self, names: Sequence[str]) -> OutputAgreement:
        """Sum up; `names` are the samples'."""
        if not self._rows:
            return OutputAgreement(self.name, self.kind, math.inf, 0.0, math.nan, 0, integers=self._integers)
        signal, noise, energy, product, largest, peak = np.concatenate(self._rows, axis=1)
        size = math.sqrt(signal.sum()) * math.sqrt(energy.sum()) if energy.sum() >= 0 else math.nan
        near_zero = ((peak < NEAR_ZERO) | (signal < FAINT * signal.mean())) & (not self._integers)
        left, every = self._positions
        ratios = in_db(np.where(near_zero, signal.mean(), signal), noise)
        figures, samples = self._measure.figures(self._parts)
        samples = {"snr_db": ratios, "max_abs": largest, **samples}
        named = self._counts_samples and len(names) == len(signal)
        return OutputAgreement(
            self.name,
            self.kind,
            float(in_db(signal.sum(), noise.sum())),
            float(largest.max()),
            float(product.sum()) / size if size else math.nan,
            self._nonfinite,
            integers=self._integers,
            unpadded=float(left / every) if left < every else None,
            rows=len(signal),
            near_zero=int(near_zero.sum()),
            spread=self._spread(names, samples, near_zero) if named else None,
            **figures,
        )

    def _spread(
        self, names: Sequence[str], samples: Mapping[str, Floats], near_zero: NDArray[np.bool_]
    ) -> SampleSpread:
        figure = "cosine" if "cosine" in samples else "snr_db"
        same = samples.get("agreement", np.ones(len(near_zero)))
        if (same < 1).any() and (self._integers or samples["parts"].max() > 1):
            figure = "agreement"
        elif near_zero.all():
            figure = "max_abs"
        values = samples[figure]
        keys = [samples["snr_db"], -values if figure == "max_abs" else values, same]  # the last one decides first
        differs = values < 1 if figure == "agreement" else samples["max_abs"] > 0
        numbers = values[~np.isnan(values)].tolist() or [math.nan]
        lowest, median = min(numbers), statistics.median_low(numbers)  # the middle's mean would be NaN for -inf and inf
        worst = []
        order = [int(row) for row in np.lexsort(keys) if differs[row]]
        if figure != "max_abs":
            order.sort(key=lambda row: values[row] != lowest)  # the one that is named as the lowest comes first
        for row in order[:WORST]:
            own = {name: float(samples[name][row]) if name in samples else None for name in _FIGURES}
            worst.append(SampleAgreement(names[row], **own, near_zero=bool(near_zero[row])))  # type: ignore[arg-type]
        return SampleSpread(figure, lowest, median, tuple(worst))
