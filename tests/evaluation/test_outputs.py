"""The measure of each kind of output, in all and by sample, against its formula."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import trtopt
from trtopt.core.errors import DataError
from trtopt.evaluation.measures import MEASURES, NEAR_ZERO, decibels, measure, share
from trtopt.evaluation.outputs import OutputAgreement, OutputSums, sentence, spread
from trtopt.graph.output_kinds import Kind

Array = NDArray[Any]
ROOT = Path(trtopt.__file__).parent.parent
SHAPES = {Kind.CLASSES: (7,), Kind.RANKING: (5,), Kind.BOXES: (6, 9), Kind.MASK: (3, 4, 5)}  # any other: (4, 6)


def agreement(kind: Kind, old: Array, new: Array, sizes: list[int] | None = None) -> OutputAgreement:
    """Compared in batches of these sizes; the rest together."""
    sums = OutputSums("y", kind)
    start = 0
    for size in [*(sizes or []), len(old)]:
        part = slice(start, start + size)
        if len(old[part]):
            sums.add(old[part], new[part], len(old[part]))
        start += size
    return sums.result([f"s{number}" for number in range(len(old))])


def two(kind: Kind, samples: int, seed: int, noise: float) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    old = generator.normal(size=(samples, *SHAPES.get(kind, (4, 6))))
    return old, old + noise * generator.normal(size=old.shape)


def ratio(old: Array, new: Array) -> float:
    return float(10 * np.log10((old**2).sum() / ((old - new) ** 2).sum()))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(Kind)), st.integers(1, 9), st.integers(0, 99), st.lists(st.integers(1, 4), max_size=4))
def test_batches_change_nothing(kind: Kind, samples: int, seed: int, sizes: list[int]) -> None:
    old, new = two(kind, samples, seed, 0.5)
    whole, parts = agreement(kind, old, new), agreement(kind, old, new, sizes)
    flat, other = (json.loads(json.dumps(item.describe(), allow_nan=False)) for item in (whole, parts))
    assert flat.keys() == other.keys()
    assert flat["samples"]["worst"] and [item["name"] for item in flat["samples"]["worst"]] == [
        item["name"] for item in other["samples"]["worst"]
    ]
    for name in ("snr_db", "max_abs", "cosine", "agreement", "overlap", "cosine_mean", "cosine_min"):
        if flat[name] is not None:
            assert other[name] == pytest.approx(flat[name], rel=1e-9), name
    if kind is Kind.BOXES:
        assert other["channels"]["snr_db"] == pytest.approx(flat["channels"]["snr_db"], rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 99), st.floats(0.01, 3))
def test_shares_are_what_is_counted(samples: int, seed: int, noise: float) -> None:
    old, new = two(Kind.CLASSES, samples, seed, noise)
    same = old.argmax(1) == new.argmax(1)
    found = agreement(Kind.CLASSES, old, new)
    assert found.agreement == found.top1 == same.mean()
    assert agreement(Kind.CLASSES, old[:, :, None, None], new[:, :, None, None]).agreement == same.mean()
    old, new = two(Kind.TOKENS, samples, seed, noise)
    same = old.argmax(2) == new.argmax(2)
    found = agreement(Kind.TOKENS, old, new)
    assert found.agreement == same.mean()
    assert found.top1 is None
    if not same.all():
        assert found.spread is not None
        assert found.spread.figure == "agreement"
        assert found.spread.lowest == same.mean(1).min()
    old, new = two(Kind.MASK, samples, seed, noise)
    classes, others = old.argmax(1), new.argmax(1)
    found = agreement(Kind.MASK, old, new)
    assert found.agreement == (classes == others).mean()
    common = np.bincount(classes.ravel()).argmax()
    either = (classes != common) | (others != common)
    assert found.overlap == pytest.approx(((classes == others) & (classes != common)).sum() / either.sum())


def test_every_kind_is_described_measured_and_documented() -> None:
    """A kind is a line of `Kind` and one of `MEASURES`; help and messages take it from there."""
    assert set(MEASURES) == set(Kind)
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| kind \| .*\n\|---.*\n((?:\| .*\n)+)", text, re.M)
    assert set(Kind) == set(re.findall(r"^\| (\w+) \| ", table, re.M))
    assert all(kind.about and (kind.axes or kind is Kind.OTHER) for kind in Kind)
    assert all(kind.shared for kind in (Kind.CLASSES, Kind.MASK, Kind.TOKENS, Kind.RANKING))
    assert not any(kind.shared for kind in (Kind.EMBEDDING, Kind.BOXES, Kind.OTHER))
    for kind in Kind:
        old = np.ones((2, *SHAPES.get(kind, (4, 6)))).cumsum(1)
        assert (agreement(kind, old, old).agreement == 1) == bool(kind.shared)
    assert pickle.loads(pickle.dumps(Kind.RANKING)) is Kind("ranking") is Kind.RANKING


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), st.floats(0.01, 2))
def test_of_several_rows_each_is_classified(samples: int, rows: int, seed: int, noise: float) -> None:
    """Of a graph's nodes the one largest of all was taken: 40 graphs, where 2,020 nodes keep their class."""
    generator = np.random.default_rng(seed)
    old = generator.normal(size=(samples, rows, 7))
    new = old + noise * generator.normal(size=old.shape)
    same = old.argmax(2) == new.argmax(2)
    for shape in (old.shape, (*old.shape, 1)):
        found = agreement(Kind.CLASSES, old.reshape(shape), new.reshape(shape))
        assert (found.agreement, found.parts) == (same.mean(), samples * rows)
    count = f"{samples} sample{'s' * (samples > 1)}" if rows == 1 else f"{samples * rows} rows"
    assert measure(found.describe(), samples) == f"same class for {share(same.mean())} of {count}"
    if rows > 1 and not same.all():
        assert found.spread is not None and found.spread.figure == "agreement"
        assert found.spread.lowest == found.spread.worst[0].agreement == same.mean(1).min()
        assert "another class" not in spread(found.describe())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(2, 12), st.integers(0, 99), st.sampled_from(["int64", "float32"])
)
def test_a_ranking_is_the_overlap_of_its_lists(samples: int, lists: int, k: int, seed: int, dtype: str) -> None:
    generator = np.random.default_rng(seed)
    old, new = (
        np.array([[generator.permutation(3 * k)[:k] for _ in range(lists)] for _ in range(samples)]).astype(dtype)
        for _ in range(2)
    )
    recall = np.array([[len({*a} & {*b}) / k for a, b in zip(*pair)] for pair in zip(old, new)])
    found = agreement(Kind.RANKING, old, new)
    assert found.agreement == pytest.approx(recall.mean()) and found.parts == old.size
    assert agreement(Kind.RANKING, old, old[..., ::-1]).agreement == 1
    assert measure(found.describe(), samples) == f"{share(found.agreement)} of the list entries are found (recall@k)"
    if found.agreement < 1:
        assert found.spread is not None and found.spread.lowest == pytest.approx(recall.mean(1).min())


@pytest.mark.parametrize("kind", [Kind.TOKENS, Kind.EMBEDDING, Kind.CLASSES, Kind.RANKING, Kind.OTHER])
def test_padding_counts_for_nothing(kind: Kind) -> None:
    """45 % of an encoder's positions were padding, and judged like the others; what stands there may even be NaN."""
    old, new = two(Kind.TOKENS, 6, 3, 0.5)
    real = np.arange(4) < np.array([1, 2, 4, 3, 2, 4])[:, None]
    new[~real] = np.nan
    sums = OutputSums("y", kind)
    sums.add(old[:2], new[:2], 2, real[:2])
    sums.add(old[2:], new[2:], 4, real[2:])
    found = sums.result([f"s{number}" for number in range(6)])
    assert (found.nonfinite, found.unpadded) == (0, 16 / 24)
    assert found.snr_db == pytest.approx(ratio(old[real], new[real]))
    said = sentence("y", found.describe(), 6)
    assert "of the 66.7% that aren't padding, " in said
    kept_old, kept_new = old[real], new[real]
    if kind in (Kind.TOKENS, Kind.CLASSES):
        assert found.agreement == (kept_old.argmax(1) == kept_new.argmax(1)).mean() and found.parts == 16
    if kind is Kind.EMBEDDING:
        cosines = (kept_old * kept_new).sum(1) / np.linalg.norm(kept_old, axis=1) / np.linalg.norm(kept_new, axis=1)
        assert found.cosine_min == pytest.approx(
            min(np.split(cosines, np.cumsum(real.sum(1))[:-1]), key=np.mean).mean()
        )
    whole = np.array([[5, 6, 0, 0], [5, 6, 7, 0]])
    sums = OutputSums("y", Kind.TOKENS)
    sums.add(whole, whole + np.array([[0, 1, 9, 9], [0, 0, 0, 9]]), 2, whole > 0)
    found = sums.result(["a", "b"])
    assert (found.agreement, found.parts) == (0.8, 5)
    for other in (old[:, 0], old.swapaxes(1, 2), old[:, :, 0]):  # no positions on the second axis, or one number each
        sums = OutputSums("y", Kind.OTHER)
        sums.add(other, other + 1, 6, real)
        assert sums.result(list("abcdef")).unpadded is None
    mask = OutputSums("y", Kind.MASK)
    mask.add(old[:, :, None], old[:, :, None] + 0, 6, real)
    assert mask.result(list("abcdef")).agreement == 1


def test_whole_numbers_are_compared_as_they_are() -> None:
    old = np.array([[2**60, 5, 7], [1, 2, 3]])
    new = old + np.array([[1, 0, 0], [0, 0, 0]])  # the same in FP64
    found = agreement(Kind.TOKENS, old, new)
    assert found.agreement == pytest.approx(5 / 6) and spread(found.describe()).endswith("worst: s0 (66.7%)")
    found = agreement(Kind.TOKENS, old, old + np.array([[0, 0, 0], [0, 4, 4]]))
    assert sentence("y", found.describe(), 2) == "y (tokens): 66.7% of the values are the same, largest difference 4"
    assert spread(found.describe()) == "per sample: 33.3% at the lowest, 33.3% in the median; worst: s1 (33.3%)"
    for kind in (Kind.CLASSES, Kind.EMBEDDING, Kind.BOXES, Kind.OTHER):  # whole numbers that are said to be values
        found = agreement(kind, old[:, :2] % 100, new[:, :2] % 100)
        assert not found.integers and found.snr_db == pytest.approx(ratio(old[:, :2] % 100, new[:, :2] % 100))
    labels = np.array([[[0, 1], [2, 255]]])
    assert agreement(Kind.MASK, labels, labels - [[[0, 0], [0, 1]]]).agreement == 0.75


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (8.0, -4.0)])  # a sigmoid's values, and logits
def test_one_channel_is_split_in_the_middle_of_its_range(scale: float, shift: float) -> None:
    share = np.array([0.9, 0.6, 0.4, 0.1]).reshape(1, 1, 2, 2)
    other = np.array([0.6, 0.4, 0.45, 0.0]).reshape(1, 1, 2, 2)
    found = agreement(Kind.MASK, share * scale + shift, other * scale + shift)
    assert found.agreement == 0.75
    assert found.overlap == 0.5
    assert agreement(Kind.MASK, (share * scale + shift)[:, 0], (other * scale + shift)[:, 0]).agreement == 0.75


def test_a_mask_that_loses_its_objects_shows_in_the_overlap() -> None:
    old = np.zeros((4, 1, 100, 100))
    old[1, 0, :10, :10] = 1  # 100 of 40000 pixels
    found = agreement(Kind.MASK, old, np.zeros_like(old))
    assert (found.agreement, found.overlap) == (0.9975, 0)
    said = sentence("y", found.describe(), 4)
    assert "same class for 99.8% of the pixels, overlap 0.00 outside the commonest class" in said
    assert found.spread is not None and [item.name for item in found.spread.worst] == ["s1"]
    half, less = np.full((1, 1, 100, 100), -1.0), np.full((1, 1, 100, 100), -1.0)
    half[..., :50] = less[..., :50] = 1
    less[..., 0, 0] = -1
    said = sentence("y", agreement(Kind.MASK, half, less).describe(), 1)
    assert "for 99.99% of the pixels" in said and "overlap 0.9998 outside" in said  # what isn't whole doesn't read so
    old[1, 0, :10, :10] = 0
    old[1, 0, 0, :3] = 1
    assert agreement(Kind.MASK, old, np.zeros_like(old)).overlap is None  # 3 pixels of 40000 say nothing
    old[1, 0, 0, :4] = 1
    assert agreement(Kind.MASK, old, old).overlap == 1  # and 4 do


@settings(max_examples=60, deadline=None)
@given(st.floats(0, math.pi), st.floats(1e-3, 1e3), st.integers(2, 40), st.integers(1, 6))
def test_a_turned_vector_has_the_cosine_of_its_angle(angle: float, scale: float, width: int, samples: int) -> None:
    old = np.random.default_rng(width).normal(size=(samples, width))
    aside = np.random.default_rng(width + 1).normal(size=old.shape)
    aside -= old * ((aside * old).sum(1) / (old**2).sum(1))[:, None]
    aside *= (np.linalg.norm(old, axis=1) / np.linalg.norm(aside, axis=1))[:, None]
    new = old.copy()
    new[-1] = scale * (old[-1] * math.cos(angle) + aside[-1] * math.sin(angle))
    found = agreement(Kind.EMBEDDING, old, new)
    assert found.cosine_min == pytest.approx(math.cos(angle), abs=1e-9)
    assert found.cosine_mean == pytest.approx((samples - 1 + math.cos(angle)) / samples, abs=1e-9)
    positions = agreement(Kind.EMBEDDING, old[None], new[None])  # the same vectors as positions of one sample
    assert positions.cosine_mean == positions.cosine_min == pytest.approx(found.cosine_mean, abs=1e-9)


@pytest.mark.filterwarnings("error")
def test_vectors_without_direction_are_left_out_and_lost_ones_count() -> None:
    old = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    found = agreement(Kind.EMBEDDING, old, np.array([[3.0, 4.0], [5.0, 5.0], [0.0, 0.0]]))
    assert (found.cosine_mean, found.cosine_min) == (0.5, 0.0)
    assert math.isnan(agreement(Kind.EMBEDDING, np.zeros((2, 3)), np.ones((2, 3))).cosine_min or 0)
    broken = agreement(Kind.EMBEDDING, old[:1], np.array([[np.nan, 1.0]]))
    assert (broken.cosine_min, broken.nonfinite, broken.snr_db) == (0.0, 1, -math.inf)
    assert sentence("y", broken.describe(), 1).endswith(", 1 values not finite")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Kind.CLASSES, (3,)), (Kind.TOKENS, (2, 3)), (Kind.MASK, (3, 2, 2)), (Kind.MASK, (1, 2, 2))],
    ids=["classes", "tokens", "mask", "mask of one channel"],
)
def test_what_is_nan_is_no_class(kind: Kind, shape: tuple[int, ...]) -> None:
    """NumPy's argmax gives the first NaN, so that NaN everywhere agreed with all samples of class 0."""
    old = np.full((4, *shape), -1.0)
    old[:, 0] = 0 if kind is not Kind.MASK or shape[0] > 1 else -1
    old[..., 0] += 0.5 if kind is Kind.TOKENS else 0
    new = old.copy()
    new[:3] = np.nan
    found = agreement(kind, old, new)
    assert found.agreement == 0.25 and found.spread is not None
    assert [item.agreement for item in found.spread.worst] == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.floats(-20, 60), st.integers(0, 5), st.booleans())
def test_the_channel_that_is_off_is_named_with_its_decibels(decibels: float, channel: int, turned: bool) -> None:
    old, _ = two(Kind.BOXES, 8, channel, 0)
    old[:, :4] *= 300  # pixels; beside them an error of the scores is nothing
    noise = np.random.default_rng(1).normal(size=(8, 9))
    noise *= np.linalg.norm(old[:, channel]) / np.linalg.norm(noise) * 10 ** (-decibels / 20)
    new = old.copy()
    new[:, channel] += noise
    if turned:
        old, new = old.swapaxes(1, 2), new.swapaxes(1, 2)
    found = agreement(Kind.BOXES, old, new)
    assert found.channels is not None
    assert found.channels.axis == (2 if turned else 1)
    assert found.channels.lowest == channel
    values = list(found.channels.snr_db)
    assert values.pop(channel) == pytest.approx(decibels, abs=1e-3)
    assert values == [math.inf] * 5


def test_channels_without_signal_are_left_out_and_said() -> None:
    old = np.zeros((2, 8, 50))
    old[:, 7] = np.linspace(-0.3, 0, 50)  # no score, and little beside coordinates
    old[:, :4] = np.random.default_rng(0).uniform(0, 640, (2, 4, 50))
    old[:, 4] = np.linspace(0, 0.9, 50)  # a class that is there
    old[:, 5] = np.linspace(0, 0.05, 50)  # one that isn't: a tail of the sigmoid
    new = old + 0.01 * np.where(np.arange(50) % 2, 1, -1)
    found = agreement(Kind.BOXES, old, new)
    assert found.channels is not None
    assert [value is None for value in found.channels.snr_db] == [False] * 5 + [True] * 3
    assert found.channels.lowest == 4
    said = measure(found.describe(), 2)
    assert (
        said
        == f"{ratio(old[:, 4], new[:, 4]):.1f} dB in channel 4, the lowest of 8 (3 left out: next to zero in the reference)"
    )
    silent = agreement(Kind.BOXES, np.zeros((2, 4)), np.ones((2, 4)))
    assert silent.channels is not None and silent.channels.lowest is None
    for shape, axis in [
        ((2, 6), 1),
        ((2, 9, 4), 2),
        ((2, 4, 3), 1),
        ((2, 84, 85), 1),
        ((2, 90, 85), 2),
        ((2, 3, 8, 8, 85), 4),
    ]:
        channels = agreement(Kind.BOXES, np.ones(shape), np.ones(shape)).channels
        assert channels is not None and (channels.axis, len(channels.snr_db)) == (axis, shape[axis])


def test_nothing_to_compare_is_equal() -> None:
    for shape in ((0, 4), (2, 0)):
        said = agreement(Kind.OTHER, np.zeros(shape), np.zeros(shape)).describe()
        assert [said[name] for name in ("rows", "near_zero", "nonfinite", "samples")] == [
            0,
            0,
            0,
            None,
        ] and "name" not in said
        assert (sentence("y", said, 0), spread(said)) == ("y (other): equal", "")
    assert (share(0.95, 0.95), decibels(20, 20)) == ("95.0%", "20.0 dB")  # not below: no more digits


# Samples -----------------------------------------------------------------------------------------------------------------


def test_the_worst_samples_are_named_in_order() -> None:
    old = np.random.default_rng(0).normal(size=(5, 40))
    error = np.array([0.1, 0.0, 0.4, 0.2, 0.05])[:, None] * np.where(np.arange(40) % 2, 1, -1)
    found = agreement(Kind.OTHER, old, old + error)
    assert found.spread is not None
    assert [item.name for item in found.spread.worst] == ["s2", "s3", "s0"]
    by_sample = [ratio(old[row], old[row] + error[row]) for row in (0, 2, 3, 4)]
    assert found.spread.lowest == pytest.approx(min(by_sample)) == found.spread.worst[0].snr_db
    assert found.spread.median == pytest.approx(sorted(by_sample)[2])
    assert found.spread.worst[0].max_abs == pytest.approx(0.4)
    few = agreement(Kind.OTHER, old[1:2], old[1:2])
    assert few.spread is not None and few.spread.worst == ()
    assert sentence("y", few.describe(), 1) == "y (other): equal"
    sums = OutputSums("y", Kind.OTHER)  # its first axis doesn't count samples
    for array in (np.ones((5, 2)), np.float32(3)):
        sums.add(array, array - 1, 5)
    whole = sums.result([f"s{number}" for number in range(10)])
    assert (whole.spread, whole.max_abs, spread(whole.describe())) == (None, 1, "")


def test_the_lowest_comes_first_and_a_changed_class_before_lower_decibels() -> None:
    """16.9 dB stood there at the lowest, and the first of the worst had 21.8."""
    old = np.array([[9.0, 0.0], [0.1, 0.11], [5.0, 4.0], [8.0, 0.0]])
    new = np.array([[5.0, 0.0], [0.11, 0.1], [5.0, 4.0], [6.0, 0.0]])
    found = agreement(Kind.CLASSES, old, new)
    assert found.spread is not None
    assert [item.name for item in found.spread.worst] == ["s0", "s1", "s3"]
    said = spread(found.describe())
    assert said.startswith("per sample: 7.0 dB at the lowest, ")
    assert said.endswith("worst: s0 (7.0 dB), s1 (20.4 dB, another class), s3 (12.0 dB)")


def test_a_sample_next_to_zero_is_taken_against_the_others() -> None:
    old = np.ones((4, 8))
    old[2] = 1e-5  # FP16 has no digits left for it
    old[3] = 2e-4  # more than 60 dB under the others
    new = old + np.array([0.1, 0.0, 0.3, 1e-9])[:, None]
    found = agreement(Kind.OTHER, old, new)
    assert found.near_zero == 2
    assert found.spread is not None
    first, second, third = found.spread.worst
    assert (first.name, second.name, third.name) == ("s2", "s0", "s3")
    assert first.snr_db == pytest.approx(10 * math.log10((old**2).sum() / 4 / (8 * 0.09)))
    assert first.near_zero
    assert third.snr_db > 150
    assert "the reference is next to zero on 2 of 4 samples" in sentence("y", found.describe(), 4)
    assert "s2 (7.4 dB, next to zero in the reference, difference 0.3)" in spread(found.describe())


def test_a_reference_without_signal_is_said_in_words() -> None:
    old = np.full((8, 1, 2, 2), 1e-7)
    new = old.copy()
    new[5, 0, 0, 0] = 0.943
    found = agreement(Kind.OTHER, old, new).describe()
    assert sentence("det", found, 8) == (
        "det (other): the reference is next to zero on 8 of 8 samples: -124.4 dB says little; largest difference 0.943"
    )
    assert spread(found) == "worst: s5 (difference 0.943)"
    almost = agreement(Kind.OTHER, np.full((1, 4), NEAR_ZERO), np.full((1, 4), 2.0))
    assert almost.near_zero == 0


def test_equal_outputs_without_signal_are_no_proof() -> None:
    said = agreement(Kind.OTHER, np.zeros((4, 3)), np.zeros((4, 3))).describe()
    assert sentence("y", said, 4) == "y (other): equal, but next to zero on every sample: they say nothing of it"


def test_a_large_output_is_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = two(Kind.MASK, 9, 3, 0.5)
    whole = agreement(Kind.MASK, old, new)
    monkeypatch.setattr("trtopt.evaluation.outputs._BLOCK", 2 * old[0].size)
    pieces = agreement(Kind.MASK, old, new)
    assert pieces.agreement == whole.agreement
    assert pieces.overlap == whole.overlap
    assert pieces.snr_db == pytest.approx(whole.snr_db, abs=1e-9)
    old[8, 0, 0, 0] = np.inf
    with pytest.raises(DataError, match="1 values that aren't finite in output 'y'"):
        agreement(Kind.MASK, old, new)
