"""Inputs by argument name or in order; outputs flat and named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo
from trtopt.frontend.exporter import leaves, output_names
from trtopt.frontend.inputs import Arguments


class Two:
    def forward(self, image: Any, meta: Any, scale: Any = None, *, mask: Any = None) -> None: ...


class Free:
    def forward(self, *tensors: Any) -> None: ...


class Single:
    def forward(self, image: Any) -> None: ...


def _order(module: Any, *names: str) -> tuple[list[str], tuple[str, ...]]:
    infos, keywords = Arguments(module()).order([TensorInfo(name, "float32", (1,)) for name in names], "net")
    return [info.name for info in infos], keywords


@pytest.mark.parametrize(
    ("module", "names", "order", "keywords"),
    [
        (Two, "meta image", "image meta", ()),
        (Two, "mask meta image", "image meta mask", ("mask",)),
        (Two, "mask scale meta image", "image meta scale mask", ("mask",)),
        (Two, "second first", "second first", ()),
        (Free, "b a c", "b a c", ()),
        (Single, "images", "images", ()),
    ],
)
def test_names_of_arguments_count_in_any_order_and_new_ones_in_theirs(
    module: Any, names: str, order: str, keywords: tuple[str, ...]
) -> None:
    assert _order(module, *names.split()) == (order.split(), keywords)


@pytest.mark.parametrize(
    ("module", "names", "words"),
    [
        (Two, ["image"], ["needs meta, too", "`inputs='meta:"]),
        (Two, ["image", "met"], ["no argument 'met'", "takes: image, meta, scale (optional), mask (optional)"]),
        (Two, ["a", "b", "c", "d"], ["4 inputs are given (a, b, c, d)", "image, meta"]),
        (Two, ["image", "image"], ["'image' is given twice"]),
    ],
)
def test_wrong_missing_and_surplus_names(module: Any, names: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        _order(module, *names)
    assert all(word in str(caught.value) for word in words), caught.value


class Pair(NamedTuple):
    boxes: int
    scores: int


@dataclass
class Result:
    logits: int
    pair: Pair
    loss: None = None


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (1, ["output"]),
        ((1, [2, 3]), ["output_0", "output_1_0", "output_1_1"]),
        ({"out": 1, "aux": None, 3: 4}, ["out", "aux", "3"]),
        (Result(1, Pair(2, 3)), ["logits", "pair_boxes", "pair_scores", "loss"]),
        ([], []),
    ],
)
def test_results_are_flat_with_names_of_their_own(value: Any, names: list[str]) -> None:
    assert [name for name, _ in leaves(value)] == names


def test_output_names_are_plain_and_differ() -> None:
    assert output_names(["a b", "a/b", "x", "x\x1b[2J"], (), ["x"], "net") == ["a_b", "a_b_2", "x_2", "x__2J"]
    assert output_names(["a", "b"], ["p", "q"], ["x"], "net") == ["p", "q"]
    for wrong in (["p"], ["p", "q", "r"], ["p", "p"], ["p", "x"]):
        with pytest.raises(UsageError, match=r"gives 2 outputs \(a, b\), .*input \(x\)"):
            output_names(["a", "b"], wrong, ["x"], "net")
