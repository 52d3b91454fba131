"""Limits: each kind is judged by its measure, and what is missed is said with the value and the limit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from compared import compare
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.evaluation.limits import Limits, without_share
from trtopt.graph.output_kinds import Kind

Array = NDArray[Any]
random = np.random.default_rng(0)
SCORES = random.normal(size=(20, 10))
CHANGED = SCORES.copy()
CHANGED[np.arange(2), SCORES[:2].argmin(1)] += 100  # two of 20 samples
VECTORS = random.normal(size=(20, 64))
TURNED = VECTORS.copy()
TURNED[3] = -TURNED[3]
BOXES = random.uniform(0, 640, (2, 6, 50))
OFF = BOXES.copy()
OFF[:, 5] *= 0.8
MASK = np.zeros((2, 1, 50, 50))
MASK[:, :, :10, :10] = 1
EMPTY = np.zeros_like(MASK)
WORDS = random.integers(0, 9, (4, 25))
OTHERS = WORDS.copy()
OTHERS[0, :10] += 1
LISTS = np.arange(40).reshape(4, 10)
LOST = LISTS[:, ::-1] + 100 * (np.arange(10) > 8)
VALUES = random.normal(size=(4, 3, 8))
NOISY = VALUES * np.where(np.arange(8) % 2, 1.2, 0.8)


def missed(kind: Kind, old: Array, new: Array, limits: Limits) -> list[str]:
    return limits.missed(compare({"y": old}, {"y": new}, kinds={"y": kind}).describe())


@pytest.mark.parametrize(
    ("kind", "old", "new", "said", "lax"),
    [
        (Kind.CLASSES, SCORES, CHANGED, ["same class for 90.0% of 20 samples, at least 95.0%"], Limits(0.9)),
        (Kind.TOKENS, WORDS, OTHERS, ["90.0% of the values are the same, at least 95.0%"], Limits(0.9)),
        (Kind.RANKING, LISTS, LOST, ["90.0% of the list entries are found (recall@k), at least 95.0%"], Limits(0.9)),
        (Kind.MASK, MASK, EMPTY, ["overlap 0.00 outside the commonest class, at least 0.5"], Limits(0.0)),
        (Kind.BOXES, BOXES, OFF, ["14.0 dB in channel 5, at least 20"], Limits(min_snr=13)),
        (Kind.OTHER, VALUES, NOISY, ["14.0 dB, at least 20"], Limits(min_snr=13)),
        (
            Kind.EMBEDDING,
            VECTORS,
            TURNED,
            [" dB, at least 20", "cosine -1.0000 at the lowest, at least 0.99"],
            Limits(min_snr=5),  # what is asked for replaces both
        ),
    ],
)
def test_each_kind_has_its_limit(kind: Kind, old: Array, new: Array, said: list[str], lax: Limits) -> None:
    found = missed(kind, old, new, Limits())
    assert len(found) == len(said)
    for text, part in zip(found, said):
        assert text.startswith("y: ")
        assert text.endswith(f"{part} is asked for")
    assert missed(kind, old, new, lax) == []
    assert missed(kind, old, old, Limits(1.0, 100)) == []  # equal: "inf" dB


@pytest.mark.parametrize("by", [1e-2, 1e-3, 1e-4])
def test_what_is_missed_by_little_does_not_read_as_if_it_held(by: float) -> None:
    """ "42.5 dB, at least 42.5 is asked for" stood there."""
    snr = float(10 * np.log10((VALUES**2).sum() / ((VALUES - NOISY) ** 2).sum()))
    (said,) = missed(Kind.OTHER, VALUES, NOISY, Limits(min_snr=round(snr + by, 4)))
    shown, asked = map(float, re.findall(r"[\d.]+(?= dB| is asked)", said))
    assert shown < asked
    share = np.zeros((10_000, 2))
    share[:, 1] = 1
    (said,) = missed(Kind.CLASSES, share, np.where(np.arange(10_000)[:, None] < 9_000, share, -share), Limits(0.9 + by))
    shown, asked = map(float, re.findall(r"[\d.]+(?=%)", said))
    assert shown < asked


def test_decibels_that_are_asked_for_hold_for_every_output_with_signal() -> None:
    noisy = SCORES * np.where(np.arange(10) % 2, 1.2, 0.8)
    assert missed(Kind.CLASSES, SCORES, noisy, Limits(0)) == []
    assert missed(Kind.CLASSES, SCORES, noisy, Limits(0, 20)) == ["y: 14.0 dB, at least 20 is asked for"]
    assert missed(Kind.OTHER, np.full((4, 8), 10.0), np.full((4, 8), 9.0), Limits(0, 20)) == []  # exactly 20
    assert missed(Kind.TOKENS, WORDS, OTHERS, Limits(0.9, 90)) == []  # of whole numbers dB say nothing


@pytest.mark.parametrize("kind", [Kind.OTHER, Kind.EMBEDDING, Kind.CLASSES])
def test_decibels_that_are_asked_for_hold_where_the_reference_is_next_to_zero(kind: Kind) -> None:
    """Nothing of it is right, and the difference is as small as the reference: that isn't what was asked for."""
    nothing = np.full((4, 8), 1e-9)
    nothing[:, 3] *= 2
    (said,) = missed(kind, nothing, nothing * 0, Limits(0, 20))
    assert said == (
        "y: 0.0 dB, at least 20 is asked for; the reference is next to zero: give samples where it isn't, or only "
        "`min_agreement=`"
    )
    assert missed(kind, nothing, nothing * 1.05, Limits(0, 20)) == []
    assert missed(kind, nothing, nothing * 0, Limits(0)) == []


def test_without_signal_the_difference_decides() -> None:
    nothing = np.zeros((4, 8))
    assert missed(Kind.OTHER, nothing, nothing + 1e-6, Limits(min_snr=20)) == []
    for kind in (Kind.OTHER, Kind.EMBEDDING, Kind.BOXES):
        (said,) = missed(kind, nothing, nothing + 0.9, Limits())
        assert said == "y: the reference is next to zero, the difference up to 0.9"


@pytest.mark.parametrize(
    ("kinds", "limits", "said"),
    [
        ([Kind.CLASSES, Kind.RANKING], Limits(0.9), "at least 90.0% of the classes and list entries the same"),
        ([Kind.CLASSES, Kind.OTHER], Limits(0.9), "at least 90.0% of the classes the same, 20 dB"),
        ([Kind.EMBEDDING], Limits(), "at least 20 dB, a cosine of 0.99"),
        ([Kind.EMBEDDING, Kind.TOKENS], Limits(0.97, 30), "at least 97.0% of the tokens the same, 30 dB"),
        ([Kind.TOKENS], Limits(0.999), "at least 99.9% of the tokens the same"),
    ],
)
def test_what_is_asked_of_outputs_is_said_by_their_kinds(kinds: list[Kind], limits: Limits, said: str) -> None:
    named = {f"y{number}": kind for number, kind in enumerate(kinds)}
    arrays = dict.fromkeys(named, SCORES)
    assert limits.kept(compare(arrays, arrays, kinds=named).describe()) == said


def test_values_that_are_not_finite_are_always_outside() -> None:
    new = SCORES.copy()
    new[4, np.argmin(new[4])] = np.nan
    said = "of y, 1 value is NaN or infinite, where the reference's are finite"
    assert missed(Kind.CLASSES, SCORES, new, Limits(0)) == [said]
    new[5, np.argmin(new[5])] = np.inf
    assert missed(Kind.CLASSES, SCORES, new, Limits(0)) == [said.replace("1 value is", "2 values are")]


def test_a_share_may_be_a_percentage_and_limits_that_can_not_be_right_are_refused() -> None:
    assert Limits.of("99%", None) == Limits.of("0.99", None) == Limits.of(0.99, None) == Limits(0.99)
    assert Limits.of(" 97.5 % ", 30) == Limits(0.975, 30)
    assert without_share([Kind.OTHER, Kind.MASK]) == "" and "(20 dB unless given) does" in without_share([Kind.OTHER])
    assert Limits.of(None, 30) == Limits(min_snr=30) and Limits.of(None, None) is None
    for wrong in ("101%", "99", "-1%", "much", "", "%", "nan"):
        with pytest.raises(UsageError, match=f"`min_agreement=` is {wrong}; a share from 0 to 1 is needed"):
            Limits.of(wrong, None)
    for limits in ({"min_agreement": 95}, {"min_agreement": -0.1}, {"min_snr": float("nan")}):
        with pytest.raises(UsageError, match="is needed, such as"):
            Limits(**limits)
