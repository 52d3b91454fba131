"""The measure of each kind of output: what is counted, and the words for it. `Kind` has what is known of it without arrays.

r is the reference, c the candidate, both in FP64; sums are over all values unless said otherwise.

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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.core.values import Kind
from trtopt.core.words import counted
from trtopt.data.difference import in_db

Array = NDArray[Any]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
NEAR_ZERO = 2.0**-14  # FP16's smallest normal number
WEAK_SCORE, WEAK_CHANNEL = 0.1, 1e-3
_FEW = 1e-4  # of a mask's pixels: with fewer outside the commonest class, their overlap says little

Figures = tuple[Mapping[str, Any], Mapping[str, Floats]]
"""Fields of `OutputAgreement`, and for each sample those of `SampleAgreement` and its `parts`."""


@dataclass(frozen=True)
class Measure:
    """The comparison of outputs of a kind, and its words.

    Attributes:
        part: what is kept of some samples: of reference and candidate (in FP64, or both in their own type where they are
            integers), of which positions aren't padding (samples × positions, or × 1), and of what was kept before.
        figures: what follows from all that was kept.
        words: an output (`OutputAgreement.describe()`) in words: of the share that is the same, and the number of samples.
        integers: whole numbers aren't values, so that dB say nothing of them.
    """

    part: Callable[[Array, Array, Bools, Sequence[Any]], Any] = lambda *_: None
    figures: Callable[[Sequence[Any]], Figures] = lambda _: ({}, {})
    words: Callable[[Mapping[str, Any], str, int], str] = lambda *_: ""
    integers: bool = False


@dataclass(frozen=True)
class Channels:
    """dB of each channel of boxes; None for channels that are next to zero in the reference.

    Attributes:
        lowest: the channel with the lowest; None where none carries signal.
    """

    axis: int
    snr_db: tuple[float | None, ...]
    lowest: int | None


def measure(output: Mapping[str, Any], samples: int, least: float = 1.0) -> str:
    """Say the measure of the output's kind, such as "same class for 97.0% of 64 samples"; "" for other values.

    Args:
        output: as JSON has it (`OutputAgreement.describe()`); a manifest has it too.
        least: see `share`.
    """
    said = "" if output["agreement"] is None else share(output["agreement"], least)
    unpadded = output.get("unpadded")
    left = "" if unpadded is None else f"of the {100 * unpadded:.3g}% that aren't padding"
    return ", ".join(filter(None, [MEASURES[Kind(output["kind"])].words(output, said, samples), left]))


# Figures in words --------------------------------------------------------------------------------------------------------


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


# Classes, tokens, lists --------------------------------------------------------------------------------------------------


def _counted(same: Bools, real: Bools) -> NDArray[np.int64]:
    """Count the parts of each sample that are the same, and all; padding is none."""
    if same.shape[1:2] != real.shape[1:]:
        real = np.ones((len(same), 1), np.bool_)
    parts = same.reshape(len(same), real.shape[1], -1)
    return np.stack([(parts & real[:, :, None]).sum((1, 2)), real.sum(1) * parts.shape[2]])


def _shares(counts: Sequence[NDArray[np.int64]]) -> Figures:
    same, parts = np.concatenate(counts, axis=1)
    share_of_all = float(same.sum() / parts.sum()) if parts.any() else 1.0
    figures = {"agreement": share_of_all, "parts": int(parts.sum())}
    return figures, {"agreement": np.where(parts, same / np.maximum(parts, 1), 1.0), "parts": parts}


def _largest(values: Array, axis: int) -> NDArray[np.int64]:
    """Return which one is; where one of them is NaN none is: -1, which the reference never has."""
    return np.where(np.isnan(values).any(axis), -1, values.argmax(axis))


def rows_of(scores: Array) -> Array:
    """Scores of classes as samples × rows × classes: of three axes that aren't 1 at the end, a row for each of the second."""
    while scores.ndim > 2 and scores.shape[-1] == 1:
        scores = scores[..., 0]
    return scores if scores.ndim == 3 else scores.reshape(len(scores), 1, -1)


def _same_classes(old: Array, new: Array, real: Bools, _: Any) -> NDArray[np.int64]:
    a, b = rows_of(old), rows_of(new)
    return _counted(a.argmax(-1) == _largest(b, -1), real)


def _in_rows(output: Mapping[str, Any], said: str, samples: int) -> str:
    rows = output.get("parts") or samples
    return f"same class for {said} of {counted(samples, 'sample') if rows == samples else f'{rows:,} rows'}"


def _same_tokens(old: Array, new: Array, real: Bools, _: Any) -> NDArray[np.int64]:
    return _counted(old == new if old.dtype.kind in "iub" else old.argmax(-1) == _largest(new, -1), real)


def _in_positions(output: Mapping[str, Any], said: str, _: int) -> str:
    return f"{said} of the {'values are the same' if output['integers'] else 'positions have the same largest class'}"


def _found(old: Array, new: Array, real: Bools, _: Any) -> NDArray[np.int64]:
    lists = np.stack([item.reshape(-1, item.shape[-1]) for item in (old, new)])
    codes = np.unique(lists, return_inverse=True)[1].reshape(lists.shape)
    codes += np.arange(lists.shape[1])[:, None] * lists.size  # no list has an entry of another one
    return _counted(np.isin(*codes).reshape(old.shape), real)


# Masks -------------------------------------------------------------------------------------------------------------------

_Split = tuple[NDArray[np.int64], "NDArray[np.int64] | None"]


def _same_pixels(old: Array, new: Array, real: Bools, _: Any) -> tuple[bool, list[_Split]]:
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


def _mask(parts: Sequence[tuple[bool, Sequence[_Split]]]) -> Figures:
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


# Embeddings --------------------------------------------------------------------------------------------------------------


def _cosines(old: Array, new: Array, *_: Any) -> Floats:
    shape = old.shape if old.ndim == 3 else (len(old), 1, -1)
    a, b = old.reshape(shape), new.reshape(shape)
    with np.errstate(all="ignore"):
        size = np.linalg.norm(a, axis=2)
        cosines = np.clip((a * b).sum(2) / (size * np.linalg.norm(b, axis=2)), -1, 1)
        cosines = np.where(np.isfinite(cosines), cosines, 0.0)  # zero, or not finite, in the candidate alone
        mean: Floats = np.where(size > 0, cosines, 0.0).sum(1) / (size > 0).sum(1)
    return mean


def _embedding(parts: Sequence[Floats]) -> Figures:
    cosines = np.concatenate(parts)
    numbers = cosines[~np.isnan(cosines)]
    mean, lowest = (float(numbers.mean()), float(numbers.min())) if numbers.size else (math.nan, math.nan)
    return {"cosine_mean": mean, "cosine_min": lowest}, {"cosine": cosines}


def _in_cosines(output: Mapping[str, Any], *_: Any) -> str:
    return f"cosine {cosine(output['cosine_mean'])} in the mean, {cosine(output['cosine_min'])} at the lowest"


# Boxes -------------------------------------------------------------------------------------------------------------------

_Box = tuple[int, Floats, Floats]


def _of_channels(old: Array, new: Array, _: Any, before: Sequence[_Box]) -> _Box:
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


def _boxes(parts: Sequence[_Box]) -> Figures:
    sums, noise = np.stack([part[1] for part in parts]), np.concatenate([part[2] for part in parts])
    energy, low, high = sums[:, 0].sum(0), sums[:, 1].min(0), sums[:, 2].max(0)
    peak = np.maximum(np.abs(low), np.abs(high))
    scores = (low >= 0) & (high <= 1)
    carries = (peak >= NEAR_ZERO) & np.isfinite(peak)
    for group, weak in ((scores, WEAK_SCORE), (~scores, WEAK_CHANNEL)):
        carries &= ~group | (peak >= weak * peak[group].max(initial=0.0))
    values = tuple(float(value) if live else None for value, live in zip(in_db(energy, noise.sum(0)), carries))
    ratios = in_db(energy[carries] / len(noise), noise[:, carries])
    lowest = min(((value, number) for number, value in enumerate(values) if value is not None), default=(0.0, None))[1]
    return {"channels": Channels(parts[0][0], values, lowest)}, {"snr_db": ratios.min(1)} if carries.any() else {}


def _channel_axis(shape: tuple[int, ...]) -> int:
    """Return which axis of boxes holds coordinates and scores."""
    if len(shape) == 2 or len(shape) > 3:
        return len(shape) - 1
    if 4 in shape[1:]:
        return 2 if shape[2] == 4 else 1
    return 1 if shape[1] < shape[2] else 2


def _in_channels(output: Mapping[str, Any], *_: Any) -> str:
    channels = output["channels"] or {}
    if (lowest := channels.get("lowest")) is None:
        return ""
    values = channels["snr_db"]
    silent = values.count(None)
    left_out = f" ({silent} left out: next to zero in the reference)" if silent else ""
    return f"{decibels(values[lowest])} in channel {lowest}, the lowest of {len(values)}{left_out}"


MEASURES: Mapping[Kind, Measure] = {
    Kind.CLASSES: Measure(_same_classes, _shares, _in_rows),
    Kind.EMBEDDING: Measure(_cosines, _embedding, _in_cosines),
    Kind.BOXES: Measure(_of_channels, _boxes, _in_channels),
    Kind.MASK: Measure(_same_pixels, _mask, lambda _, said, __: f"same class for {said} of the pixels", integers=True),
    Kind.TOKENS: Measure(_same_tokens, _shares, _in_positions, integers=True),
    Kind.RANKING: Measure(
        _found, _shares, lambda _, said, __: f"{said} of the list entries are found (recall@k)", integers=True
    ),
    Kind.OTHER: Measure(),
}
