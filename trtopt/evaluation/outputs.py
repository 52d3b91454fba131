"""One output of two models compared by what it means: a measure for each kind, in all and for each sample.

r is the reference, c the candidate, both in FP64; sums are over all values unless said otherwise.

- every kind: 10·log10(Σ r² / Σ (r − c)²) in dB, the largest |r − c|, the cosine Σ rc / √(Σ r² · Σ c²) of all values as one
  vector, and values that are NaN or infinite in the candidate alone.
- classes: share of samples with the same largest class.
- tokens: of integers the share of equal values; of scores the share of positions with the same largest class (last axis).
- mask: share of pixels with the same class: the largest channel; of one channel, the side of 0.5 where the reference stays
  within 0…1, else of 0. Beside it the overlap, intersection over union (Jaccard) of the pixels outside the reference's
  commonest class: Σ [same class, not that one] / Σ [either isn't that one].
- embedding: cosine of each sample's vector, in the mean and the lowest; of three axes, of each position's vector, and a
  sample's is the mean of its positions'. A vector that is zero in the reference has no direction and is left out.
- boxes: dB of each channel, the lowest of those that carry signal. Channels are the axis of 4 if there is one, else the shorter
  of two, of more than three axes the last. A channel carries signal if its largest |r| is at least a tenth of that of the
  strongest score (scores are channels whose reference stays within 0…1), or a thousandth of the strongest other one.
- other: dB.

dB say little where the reference is next to zero: a sample whose largest |r| is under 2⁻¹⁴, FP16's smallest normal number,
below which FP16 loses digits and INT8 has none; or one with less than 10⁻⁶ of the samples' mean Σ r², which is −60 dB. Such a
sample's own dB are taken against that mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import plain
from trtopt.core.errors import DataError, UsageError
from trtopt.core.words import counted
from trtopt.graph.output_kinds import Kind

Floats = NDArray[np.float64]
NEAR_ZERO = 2.0**-14
FAINT = 1e-6
WEAK_SCORE, WEAK_CHANNEL = 0.1, 1e-3
WORST = 3  # samples that are named
_FIGURES = ("snr_db", "max_abs", "agreement", "cosine")  # of a sample
_FEW = 1e-4  # of a mask's pixels: with fewer outside the commonest class, their overlap says little
_BLOCK = 1 << 21  # values that are compared at a time


@dataclass(frozen=True)
class SampleAgreement:
    """One sample's figures.

    Attributes:
        snr_db: dB, against the mean sample where its own reference is `near_zero`. Of boxes, the lowest of the channels, each
            against its mean over the samples.
        agreement: share of its classes, tokens or pixels that are the same; None for other kinds.
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
    """How the samples differ.

    Attributes:
        figure: which of a sample's figures: "snr_db", "agreement" or "cosine"; "max_abs" where the reference has no signal.
        lowest, median: of it.
        worst: the samples that agree least, from the worst; none of them is equal to its reference.
    """

    figure: str
    lowest: float
    median: float
    worst: tuple[SampleAgreement, ...]


@dataclass(frozen=True)
class Channels:
    """dB of each channel of boxes; None for channels that are next to zero in the reference."""

    axis: int
    snr_db: tuple[float | None, ...]

    @property
    def lowest(self) -> int | None:
        """The channel with the lowest; None where none carries signal."""
        pairs = [(value, number) for number, value in enumerate(self.snr_db) if value is not None]
        return min(pairs)[1] if pairs else None


@dataclass(frozen=True)
class OutputAgreement:
    """One output, over all samples. The module says how each figure is made.

    Attributes:
        kind: what it holds.
        snr_db: dB; inf where equal, -inf where nothing is right.
        max_abs: the largest absolute difference; inf with non-finite values.
        cosine: of the two outputs as vectors; nan where one is zero. Not a measure of quality.
        nonfinite: NaN and infinite values of the candidate where the reference has none.
        agreement: of classes, tokens and masks; None for other kinds.
        overlap: of masks outside the reference's commonest class; None for other kinds, and where the rest is less than 10⁻⁴ of
            the reference's pixels.
        cosine_mean, cosine_min: of embeddings; None for other kinds, nan where all are zero in the reference.
        channels: of boxes; None for other kinds.
        integers: tokens or a mask of whole numbers, of which dB say nothing.
        rows: how many samples it holds (entries of the first axis); near_zero: those whose reference is next to zero.
        spread: over the samples; None where the first axis doesn't count them.
    """

    name: str
    kind: Kind
    snr_db: float
    max_abs: float
    cosine: float
    nonfinite: int
    agreement: float | None = None
    overlap: float | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    channels: Channels | None = None
    integers: bool = False
    rows: int = 0
    near_zero: int = 0
    spread: SampleSpread | None = None

    @property
    def top1(self) -> float | None:
        """Share of samples with the same largest class; None where the output isn't classes."""
        return self.agreement if self.kind is Kind.CLASSES else None

    def describe(self) -> dict[str, Any]:
        """As plain JSON values; a number that isn't finite is its name ("inf", "-inf", "nan")."""
        values = plain(self) | {"top1_agreement": self.top1}
        values["samples"] = values.pop("spread")
        del values["name"]
        if self.channels is not None:
            values["channels"]["lowest"] = self.channels.lowest
        return dict(values)


# In words ----------------------------------------------------------------------------------------------------------------
# All from JSON values (`OutputAgreement.describe()`), as a manifest has them too.


def measure(output: Mapping[str, Any], samples: int, least: float = 1.0) -> str:
    """What the output's kind is measured by, such as "same class for 97.0% of 64 samples"; "" for other values.

    Args:
        least: see `share`.
    """
    kind, agreement = Kind(output["kind"]), output["agreement"]
    if kind is Kind.CLASSES:
        return f"same class for {share(agreement, least)} of {counted(samples, 'sample')}"
    if kind is Kind.MASK:
        return f"same class for {share(agreement, least)} of the pixels"
    if kind is Kind.TOKENS:
        what = "of the values are the same" if output["integers"] else "of the positions have the same largest class"
        return f"{share(agreement, least)} {what}"
    if kind is Kind.EMBEDDING:
        return f"cosine {cosine(output['cosine_mean'])} in the mean, {cosine(output['cosine_min'])} at the lowest"
    channels = output["channels"]
    lowest = channels["lowest"] if channels else None
    if lowest is None:
        return ""
    values = channels["snr_db"]
    silent_channels = values.count(None)
    others = f" ({silent_channels} left out: next to zero in the reference)" if silent_channels else ""
    return f"{decibels(values[lowest])} in channel {lowest}, the lowest of {len(values)}{others}"


def sentence(name: str, output: Mapping[str, Any], samples: int) -> str:
    """An output in one line."""
    start = f"{name} ({output['kind']}):"
    if float(output["max_abs"]) == 0 and output["agreement"] in (None, 1):  # FP64 can't tell all whole numbers apart
        return f"{start} equal"
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
    """How the samples differ, and the worst by name; "" where that says nothing."""
    samples = output["samples"]
    if samples is None or output["rows"] < 2 or not samples["worst"]:
        return ""
    figure = samples["figure"]
    worst = f"worst: {', '.join(_named(item, figure, output['kind']) for item in samples['worst'])}"
    if figure == "max_abs":
        return worst
    lowest, median = (_figure(figure, samples[name]) for name in ("lowest", "median"))
    return f"per sample: {'cosine ' * (figure == 'cosine')}{lowest} at the lowest, {median} in the median; {worst}"


def _named(sample: Mapping[str, Any], figure: str, kind: str) -> str:
    remarks = [_figure(figure, sample[figure])]
    if kind == Kind.CLASSES and sample["agreement"] == 0:
        remarks.append("another class")
    if sample["near_zero"] and figure == "snr_db":
        remarks.append(f"next to zero in the reference, difference {float(sample['max_abs']):.3g}")
    return f"{sample['name']} ({', '.join(remarks)})"


def _figure(name: str, value: Any) -> str:
    words = {"agreement": share, "cosine": cosine, "snr_db": decibels}
    return words[name](value) if name in words else f"difference {float(value):.3g}"


def share(value: Any, least: float = 1.0) -> str:
    """In per cent; less than `least` never as that: 3 pixels of a million that differ aren't 100 %."""
    digits = digits_below(100 * float(value), 100 * least, 1)
    return f"{float(value):.{digits}%}" if digits < 5 else f"<{100 * least:g}%"


def cosine(value: Any) -> str:
    """With as many digits as it takes to tell it from 1."""
    return f"{float(value):.4f}" if float(value) < 0.99995 else f"{float(value):.7f}"


def decibels(value: Any, least: float = -math.inf) -> str:
    """In words; of the figure or its name in JSON. Less than `least` never as that."""
    return f"{float(value):.{digits_below(float(value), least, 1)}f} dB"


def digits_below(value: float, least: float, digits: int) -> int:
    """So many, or up to four more, as it takes to tell a value that is below another from that one."""
    if not value < least:
        return digits
    return next((number for number in range(digits, digits + 4) if round(value, number) < least), digits + 4)


# Sums --------------------------------------------------------------------------------------------------------------------


class OutputSums:
    """Adds up one output, batch by batch. Of each sample a few figures are kept."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.kind = name, kind
        self._part, self._measured = _MEASURES[kind]
        # Of each block: signal, noise, the candidate's energy, product, largest difference, peak; and what its measure keeps.
        self._rows: list[Floats] = []
        self._parts: list[Any] = []
        self._nonfinite = 0
        self._counts_samples, self._integers = True, kind in (Kind.TOKENS, Kind.MASK)

    def add(self, reference: NDArray[Any], candidate: NDArray[Any], samples: int) -> None:
        """Add a batch of `samples`: two arrays of one shape, of any numeric type.

        Raises:
            DataError: a reference value isn't finite.
            UsageError: the channels of boxes aren't as many as before.
        """
        old, new = (array if array.ndim else array.reshape(1) for array in (reference, candidate))
        self._counts_samples = self._counts_samples and len(old) == samples
        self._integers = self._integers and old.dtype.kind in "iub" and new.dtype.kind in "iub"
        step = max(1, _BLOCK * len(old) // max(1, old.size))
        for start in range(0, len(old) if old.size else 0, step):
            self._block(old[start : start + step], new[start : start + step])

    def _block(self, old: NDArray[Any], new: NDArray[Any]) -> None:
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
            self._rows.append(
                np.stack(
                    [
                        *(np.square(values).sum(1) for values in (a, difference, b)),
                        (a * b).sum(1),
                        np.where(np.isnan(largest), np.inf, largest),
                        np.abs(a).max(1, initial=0.0),
                    ]
                )
            )
            if self._integers:
                exact, other = old, new
            self._parts.append(self._part(exact, other, self._parts))

    def result(self, names: Sequence[str]) -> OutputAgreement:
        """What was found; `names` are the samples'."""
        if not self._rows:
            return OutputAgreement(self.name, self.kind, math.inf, 0.0, math.nan, 0, integers=self._integers)
        signal, noise, energy, product, largest, peak = np.concatenate(self._rows, axis=1)
        size = math.sqrt(signal.sum()) * math.sqrt(energy.sum()) if energy.sum() >= 0 else math.nan
        near_zero = ((peak < NEAR_ZERO) | (signal < FAINT * signal.mean())) & (not self._integers)
        ratios = in_db(np.where(near_zero, signal.mean(), signal), noise)
        figures, samples = self._measured(self._parts)
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
            rows=len(signal),
            near_zero=int(near_zero.sum()),
            spread=self._spread(names, samples, near_zero) if named else None,
            **figures,
        )

    def _spread(
        self, names: Sequence[str], samples: Mapping[str, Floats], near_zero: NDArray[np.bool_]
    ) -> SampleSpread:
        figure = "cosine" if "cosine" in samples else "snr_db"
        if self.kind in (Kind.TOKENS, Kind.MASK) and (samples["agreement"] < 1).any():
            figure = "agreement"
        elif near_zero.all():
            figure = "max_abs"
        values = samples[figure]
        keys = [samples["snr_db"], -values if figure == "max_abs" else values]  # the last one decides first
        if self.kind is Kind.CLASSES:
            keys.append(samples["agreement"])
        differs = values < 1 if figure == "agreement" else samples["max_abs"] > 0
        worst = []
        for row in [int(row) for row in np.lexsort(keys) if differs[row]][:WORST]:
            own = {name: float(samples[name][row]) if name in samples else None for name in _FIGURES}
            worst.append(SampleAgreement(names[row], **own, near_zero=bool(near_zero[row])))  # type: ignore[arg-type]
        numbers = values[~np.isnan(values)]
        lowest, median = (float(numbers.min()), _median(numbers)) if numbers.size else (math.nan, math.nan)
        return SampleSpread(figure, lowest, median, tuple(worst))


def _median(values: Floats) -> float:
    """Of an even number the lower one in the middle: the mean of the two would be NaN for -inf and inf."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def in_db(signal: Any, noise: Any) -> Floats:
    """dB of each; inf without noise, -inf without signal or where the noise isn't finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = 10 * np.log10(signal / noise)
    return np.where(noise == 0, np.inf, np.where((signal == 0) | ~np.isfinite(noise), -np.inf, ratios))


# The measure of each kind: what is kept of some samples (in FP64, or both in their own type where they are integers; the third
# argument is what was kept of those before), and what follows from all that was kept.


_Measured = tuple[Mapping[str, Any], Mapping[str, Floats]]
"""What `OutputAgreement` has of a kind's measure, and what each sample has, in the fields of `SampleAgreement`."""


def _counted(same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Of each sample: how many of its parts are the same, and how many there are."""
    parts = same.reshape(len(same), -1)
    return np.stack([parts.sum(1), np.full(len(parts), parts.shape[1])])


def _shares(counts: Sequence[NDArray[np.int64]]) -> _Measured:
    same, parts = np.concatenate(counts, axis=1)
    share_of_all = float(same.sum() / parts.sum()) if parts.any() else 1.0
    return {"agreement": share_of_all}, {"agreement": np.where(parts, same / np.maximum(parts, 1), 1.0)}


def _largest(values: NDArray[Any], axis: int) -> NDArray[np.int64]:
    """Which one is; where one of them is NaN none is: -1, which the reference never has."""
    return np.where(np.isnan(values).any(axis), -1, values.argmax(axis))


def _same_classes(old: NDArray[Any], new: NDArray[Any], _: Any) -> NDArray[np.int64]:
    a, b = old.reshape(len(old), -1), new.reshape(len(new), -1)
    return _counted(a.argmax(1) == _largest(b, 1))


def _same_tokens(old: NDArray[Any], new: NDArray[Any], _: Any) -> NDArray[np.int64]:
    return _counted(old == new if old.dtype.kind in "iub" else old.argmax(-1) == _largest(new, -1))


_Split = tuple[NDArray[np.int64], "NDArray[np.int64] | None"]


def _same_pixels(old: NDArray[Any], new: NDArray[Any], _: Any) -> tuple[bool, list[_Split]]:
    """Whether the reference stays within 0…1, and the ways of taking classes: of one channel both sides of 0 and of 0.5, since
    which it is shows when all was seen. Of each: the counts, and by class the pixels in the reference and those that are the
    same in both."""
    if old.dtype.kind in "iub":  # the classes themselves
        return False, [(_counted(old == new), None)]
    if old.ndim > 3 and old.shape[1] > 1:
        within, classes, pairs = False, old.shape[1], [(old.argmax(1), _largest(new, 1))]
    else:
        within, classes = bool(((old >= 0) & (old <= 1)).all()), 2
        sides = ((old > middle, np.where(np.isnan(new), -1, new > middle)) for middle in (0, 0.5))
        pairs = [(a.astype(np.int64), b.astype(np.int64)) for a, b in sides]
    return within, [
        (_counted(a == b), np.stack([np.bincount(item.ravel(), minlength=classes) for item in (a, a[a == b])]))
        for a, b in pairs
    ]


def _mask(parts: Sequence[tuple[bool, Sequence[_Split]]]) -> _Measured:
    within = all(inside for inside, _ in parts)
    splits = [splits[within] for _, splits in parts]
    figures, samples = _shares([counts for counts, _ in splits])
    pixels = [pixels for _, pixels in splits if pixels is not None]
    if not pixels:
        return figures, samples
    reference, both = np.sum(pixels, axis=0)
    background = reference.argmax()
    foreground = reference.sum() - reference[background]
    either = reference.sum() - both[background]  # pixels that aren't background in both
    if not foreground or foreground < _FEW * reference.sum():
        return figures, samples
    return {**figures, "overlap": float((both.sum() - both[background]) / either)}, samples


def _cosines(old: NDArray[Any], new: NDArray[Any], _: Any) -> Floats:
    shape = old.shape if old.ndim == 3 else (len(old), 1, -1)
    a, b = old.reshape(shape), new.reshape(shape)
    with np.errstate(all="ignore"):
        size = np.linalg.norm(a, axis=2)
        cosines = np.clip((a * b).sum(2) / (size * np.linalg.norm(b, axis=2)), -1, 1)
        cosines = np.where(np.isfinite(cosines), cosines, 0.0)  # zero, or not finite, in the candidate alone
        mean: Floats = np.where(size > 0, cosines, 0.0).sum(1) / (size > 0).sum(1)
    return mean


def _embedding(parts: Sequence[Floats]) -> _Measured:
    cosines = np.concatenate(parts)
    numbers = cosines[~np.isnan(cosines)]
    mean, lowest = (float(numbers.mean()), float(numbers.min())) if numbers.size else (math.nan, math.nan)
    return {"cosine_mean": mean, "cosine_min": lowest}, {"cosine": cosines}


_Box = tuple[int, Floats, Floats]


def _of_channels(old: NDArray[Any], new: NDArray[Any], before: Sequence[_Box]) -> _Box:
    """The channels' axis; of each channel Σ r², lowest r, highest r; Σ (r − c)² by sample and channel."""
    axis = before[0][0] if before else _channel_axis(old.shape)
    a, b = (np.moveaxis(item, axis, 1).reshape(len(old), old.shape[axis], -1) for item in (old, new))
    if before and a.shape[1] != before[0][2].shape[1]:
        raise UsageError(
            f"an output of boxes has {before[0][2].shape[1]} channels (axis {axis}), and then {a.shape[1]}: say "
            "`output_kind=['NAME=other']`"
        )
    low, high = a.min((0, 2), initial=np.inf), a.max((0, 2), initial=-np.inf)
    return axis, np.stack([np.square(a).sum((0, 2)), low, high]), np.square(a - b).sum(2)


def _boxes(parts: Sequence[_Box]) -> _Measured:
    sums, noise = np.stack([part[1] for part in parts]), np.concatenate([part[2] for part in parts])
    energy, low, high = sums[:, 0].sum(0), sums[:, 1].min(0), sums[:, 2].max(0)
    peak = np.maximum(np.abs(low), np.abs(high))
    scores = (low >= 0) & (high <= 1)
    carries = (peak >= NEAR_ZERO) & np.isfinite(peak)
    for group, weak in ((scores, WEAK_SCORE), (~scores, WEAK_CHANNEL)):
        carries &= ~group | (peak >= weak * peak[group].max(initial=0.0))
    values = tuple(float(value) if live else None for value, live in zip(in_db(energy, noise.sum(0)), carries))
    ratios = in_db(energy[carries] / len(noise), noise[:, carries])
    return {"channels": Channels(parts[0][0], values)}, {"snr_db": ratios.min(1)} if carries.any() else {}


def _channel_axis(shape: tuple[int, ...]) -> int:
    """Which axis of boxes holds coordinates and scores."""
    if len(shape) == 2 or len(shape) > 3:
        return len(shape) - 1
    if 4 in shape[1:]:
        return 2 if shape[2] == 4 else 1
    return 1 if shape[1] < shape[2] else 2


_MEASURES: Mapping[Kind, tuple[Callable[[Any, Any, Any], Any], Callable[[Any], _Measured]]] = {
    Kind.CLASSES: (_same_classes, _shares),
    Kind.EMBEDDING: (_cosines, _embedding),
    Kind.BOXES: (_of_channels, _boxes),
    Kind.MASK: (_same_pixels, _mask),
    Kind.TOKENS: (_same_tokens, _shares),
    Kind.OTHER: (lambda *_: None, lambda _: ({}, {})),
}
