"""The search for what stays out: few tries, nothing that needn't, and an end where nothing does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trtopt.autotune.search import Budget, search
from trtopt.core.progress import SILENT

RANKED = [f"l{number}" for number in range(24)]


def _searched(judge: Callable[[Sequence[str]], bool], *, deadline: float = math.inf, **options: Any) -> Any:
    """What is found, and how many choices were judged."""
    tried: set[frozenset[str]] = set()

    def counted(names: Sequence[str]) -> bool:
        tried.add(frozenset(names))
        return judge(names)

    given: dict[str, Any] = {"first": 2, "step": 4, "all_too": False, "may_fit": lambda *_: True, **options}
    found = search(
        RANKED, counted, put_back=lambda names: names[::-1], budget=Budget(deadline), reporter=SILENT, **given
    )
    return found, len(tried)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 22, 23])
@pytest.mark.parametrize(("first", "step"), [(2, 4), (12, 1), (23, 1), (99, 1)])
def test_as_many_of_the_first_stay_out_as_it_takes(count: int, first: int, step: int) -> None:
    found, tried = _searched(lambda names: set(RANKED[:count]) <= set(names), first=first, step=step)
    assert found == tuple(RANKED[:count])
    assert tried <= count + 9  # a binary search, and each of them tried inside


def test_what_need_not_stay_out_is_put_back() -> None:
    needed = {"l1", "l6"}
    assert _searched(lambda names: needed <= set(names))[0] == ("l1", "l6")
    kept = _searched(lambda names: needed <= set(names), may_fit=lambda name, _: name != "l3")[0]
    assert kept == ("l1", "l3", "l6")


def test_nothing_is_found_where_nothing_does_or_the_time_is_over() -> None:
    assert _searched(lambda _: False)[0] is None
    assert _searched(lambda names: len(names) == len(RANKED))[0] is None
    assert _searched(lambda names: len(names) == len(RANKED), all_too=True)[0] == tuple(RANKED)
    found, tried = _searched(lambda _: True, deadline=time.monotonic() - 1)
    assert (found, tried) == (None, 0)
