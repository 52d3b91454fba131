"""One output of two models compared by what it means: a measure for each kind, in all and for each sample.

r is the reference, c the candidate, both in FP64; sums are over all values unless said otherwise.

- every kind: 10·log10(Σ r² / Σ (r − c)²) in dB, the largest |r − c|, the cosine Σ rc / √(Σ r² · Σ c²) of all values as one
  vector, and values that are NaN or infinite in the candidate alone.
- classes: share of samples with the same largest class; of three axes, as of one sample as a whole with a row for each node of
  a graph, share of rows (last axis).
- tokens: of integers the share of equal values; of scores the share of positions with the same largest class (last axis).
- ranking: share of the reference's entries that are in the candidate's list (last axis) at any place: recall@k.
- mask: share of pixels with the same class: the largest channel; of one channel, the side of 0.5 where the reference stays
  within 0…1, else of 0. Beside it the overlap, intersection over union (Jaccard) of the pixels outside the reference's
  commonest class: Σ [same class, not that one] / Σ [either isn't that one].
- embedding: cosine of each sample's vector, in the mean and the lowest; of three axes, of each position's vector, and a
  sample's is the mean of its positions'. A vector that is zero in the reference has no direction and is left out.
- boxes: dB of each channel, the lowest of those that carry signal. Channels are the axis of 4 if there is one, else the shorter
  of two, of more than three axes the last. A channel carries signal if its largest |r| is at least a tenth of that of the
  strongest score (scores are channels whose reference stays within 0…1), or a thousandth of the strongest other one.
- other: dB.

Positions that are padding count for nothing (`verify` says which are).

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
from trtopt.data.difference import in_db
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
        if self.channels is not None:
            values["channels"]["lowest"] = self.channels.lowest
        return dict(values)


# In words ----------------------------------------------------------------------------------------------------------------
# All from JSON values (`OutputAgreement.describe()`), as a manifest has them too.


def measure(output: Mapping[str, Any], samples: int, least: float = 1.0) -> str:
    """Say the measure of the output's kind, such as "same class for 97.0% of 64 samples"; "" for other values.

    Args:
        least: see `share`.
    """
    said = share(output["agreement"], least) if output["agreement"] is not None else ""
    rows, channels, unpadded = output.get("parts") or samples, output["channels"] or {}, output.get("unpadded")
    match Kind(output["kind"]):
        case Kind.CLASSES:
            text = f"same class for {said} of {counted(samples, 'sample') if rows == samples else f'{rows:,} rows'}"
        case Kind.MASK:
            text = f"same class for {said} of the pixels"
        case Kind.TOKENS:
            text = f"{said} of the {'values are the same' if output['integers'] else 'positions have the same largest class'}"
        case Kind.RANKING:
            text = f"{said} of the list entries are found (recall@k)"
        case Kind.EMBEDDING:
            text = f"cosine {cosine(output['cosine_mean'])} in the mean, {cosine(output['cosine_min'])} at the lowest"
        case Kind.BOXES if channels.get("lowest") is not None:
            values, lowest = channels["snr_db"], channels["lowest"]
            text = f"{decibels(values[lowest])} in channel {lowest}, the lowest of {len(values)}"
            text += f" ({silent} left out: next to zero in the reference)" if (silent := values.count(None)) else ""
        case _:
            text = ""
    left = "" if unpadded is None else f"of the {100 * unpadded:.3g}% that aren't padding"
    return ", ".join(filter(None, [text, left]))


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


def share(value: Any, least: float = 1.0) -> str:
    """Return a share in per cent; less than `least` never as that: 3 pixels of a million that differ aren't 100 %."""
    digits = digits_below(100 * float(value), 100 * least, 1)
    return f"{float(value):.{digits}%}" if digits < 5 else f"<{100 * least:g}%"


def cosine(value: Any) -> str:
    """Return a cosine with as many digits as it takes to tell it from 1."""
    return f"{float(value):.4f}" if float(value) < 0.99995 else f"{float(value):.7f}"


def decibels(value: Any, least: float = -math.inf) -> str:
    """Return dB in words; of the figure or its name in JSON. Less than `least` never as that."""
    return f"{float(value):.{digits_below(float(value), least, 1)}f} dB"


def digits_below(value: float, least: float, digits: int) -> int:
    """Return so many digits, or up to four more, as it takes to tell a value that is below another from that one."""
    if not value < least:
        return digits
    return next((number for number in range(digits, digits + 4) if round(value, number) < least), digits + 4)


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
        same = samples.get("agreement", np.ones(1))
        if (same < 1).any() and (self._integers or samples["parts"].max() > 1):
            figure = "agreement"
        elif near_zero.all():
            figure = "max_abs"
        values = samples[figure]
        keys = [samples["snr_db"], -values if figure == "max_abs" else values]  # the last one decides first
        if "agreement" in samples:
            keys.append(same)
        differs = values < 1 if figure == "agreement" else samples["max_abs"] > 0
        numbers = values[~np.isnan(values)]
        lowest, median = (float(numbers.min()), _median(numbers)) if numbers.size else (math.nan, math.nan)
        worst = []
        order = [int(row) for row in np.lexsort(keys) if differs[row]]
        if figure != "max_abs":
            order.sort(key=lambda row: values[row] != lowest)  # the one that is named as the lowest comes first
        for row in order[:WORST]:
            own = {name: float(samples[name][row]) if name in samples else None for name in _FIGURES}
            worst.append(SampleAgreement(names[row], **own, near_zero=bool(near_zero[row])))  # type: ignore[arg-type]
        return SampleSpread(figure, lowest, median, tuple(worst))


def _median(values: Floats) -> float:
    """Return the median, of an even number the lower one in the middle: the mean of the two would be NaN for -inf and inf."""
    return float(np.sort(values)[(len(values) - 1) // 2])


# The measure of each kind -------------------------------------------------------------------------------------------------


_Measured = tuple[Mapping[str, Any], Mapping[str, Floats]]
"""Fields of `OutputAgreement`, and for each sample those of `SampleAgreement` and its `parts`."""


@dataclass(frozen=True)
class Measure:
    """The functions that compare outputs of a kind; `Kind` has what is known of it without arrays.

    Attributes:
        part: what is kept of some samples: of reference and candidate (in FP64, or both in their own type where they are
            integers), of which positions aren't padding (samples × positions, or × 1), and of what was kept before.
        figures: what follows from all that was kept.
        integers: whole numbers aren't values, so that dB say nothing of them.
    """

    part: Callable[[NDArray[Any], NDArray[Any], NDArray[np.bool_], Sequence[Any]], Any] = lambda *_: None
    figures: Callable[[Sequence[Any]], _Measured] = lambda _: ({}, {})
    integers: bool = False


def _counted(same: NDArray[np.bool_], real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count the parts of each sample that are the same, and all; padding is none."""
    if same.shape[1:2] != real.shape[1:]:
        real = np.ones((len(same), 1), np.bool_)
    parts = same.reshape(len(same), real.shape[1], -1)
    return np.stack([(parts & real[:, :, None]).sum((1, 2)), real.sum(1) * parts.shape[2]])


def _shares(counts: Sequence[NDArray[np.int64]]) -> _Measured:
    same, parts = np.concatenate(counts, axis=1)
    share_of_all = float(same.sum() / parts.sum()) if parts.any() else 1.0
    figures = {"agreement": share_of_all, "parts": int(parts.sum())}
    return figures, {"agreement": np.where(parts, same / np.maximum(parts, 1), 1.0), "parts": parts}


def _largest(values: NDArray[Any], axis: int) -> NDArray[np.int64]:
    """Return which one is; where one of them is NaN none is: -1, which the reference never has."""
    return np.where(np.isnan(values).any(axis), -1, values.argmax(axis))


def rows_of(scores: NDArray[Any]) -> NDArray[Any]:
    """Scores of classes as samples × rows × classes: of three axes that aren't 1 at the end, a row for each of the second."""
    while scores.ndim > 2 and scores.shape[-1] == 1:
        scores = scores[..., 0]
    return scores if scores.ndim == 3 else scores.reshape(len(scores), 1, -1)


def _same_classes(old: NDArray[Any], new: NDArray[Any], real: NDArray[np.bool_], _: Any) -> NDArray[np.int64]:
    a, b = rows_of(old), rows_of(new)
    return _counted(a.argmax(-1) == _largest(b, -1), real)


def _same_tokens(old: NDArray[Any], new: NDArray[Any], real: NDArray[np.bool_], _: Any) -> NDArray[np.int64]:
    return _counted(old == new if old.dtype.kind in "iub" else old.argmax(-1) == _largest(new, -1), real)


def _found(old: NDArray[Any], new: NDArray[Any], real: NDArray[np.bool_], _: Any) -> NDArray[np.int64]:
    lists = np.stack([item.reshape(-1, item.shape[-1]) for item in (old, new)])
    codes = np.unique(lists, return_inverse=True)[1].reshape(lists.shape)
    codes += np.arange(lists.shape[1])[:, None] * lists.size  # no list has an entry of another one
    return _counted(np.isin(*codes).reshape(old.shape), real)


_Split = tuple[NDArray[np.int64], "NDArray[np.int64] | None"]


def _same_pixels(old: NDArray[Any], new: NDArray[Any], real: NDArray[np.bool_], _: Any) -> tuple[bool, list[_Split]]:
    """Return whether the reference is within 0…1, and ways of taking classes: of one channel both sides of 0 and of 0.5: which
    it is shows when all was seen. Of each: the counts, and by class the pixels in the reference and those that are the
    same in both."""
    if old.dtype.kind in "iub":  # the classes themselves
        return False, [(_counted(old == new, real), None)]
    if old.ndim > 3 and old.shape[1] > 1:
        within, classes, pairs = False, old.shape[1], [(old.argmax(1), _largest(new, 1))]
    else:
        within, classes = bool(((old >= 0) & (old <= 1)).all()), 2
        sides = ((old > middle, np.where(np.isnan(new), -1, new > middle)) for middle in (0, 0.5))
        pairs = [(a.astype(np.int64), b.astype(np.int64)) for a, b in sides]
    return within, [
        (_counted(a == b, real), np.stack([np.bincount(item.ravel(), minlength=classes) for item in (a, a[a == b])]))
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


def _cosines(old: NDArray[Any], new: NDArray[Any], *_: Any) -> Floats:
    shape = old.shape if old.ndim == 3 else (len(old), 1, -1)
    a, b = old.reshape(shape), new.reshape(shape)
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


def _of_channels(old: NDArray[Any], new: NDArray[Any], _: Any, before: Sequence[_Box]) -> _Box:
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
    """Return which axis of boxes holds coordinates and scores."""
    if len(shape) == 2 or len(shape) > 3:
        return len(shape) - 1
    if 4 in shape[1:]:
        return 2 if shape[2] == 4 else 1
    return 1 if shape[1] < shape[2] else 2


MEASURES: Mapping[Kind, Measure] = {
    Kind.CLASSES: Measure(_same_classes, _shares),
    Kind.EMBEDDING: Measure(_cosines, _embedding),
    Kind.BOXES: Measure(_of_channels, _boxes),
    Kind.MASK: Measure(_same_pixels, _mask, integers=True),
    Kind.TOKENS: Measure(_same_tokens, _shares, integers=True),
    Kind.RANKING: Measure(_found, _shares, integers=True),
    Kind.OTHER: Measure(),
}
