"""SlotPool: items go round, in order."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable

import pytest

from trtopt.core.errors import Busy, DeviceError
from trtopt.runtime.slot_pool import CLOSED, SlotPool


def _turns(most: int = 1, groups: int = 1) -> SlotPool[int]:
    return SlotPool(
        [functools.partial(next, itertools.count(group, groups)) for group in range(groups)], most // groups
    )


def test_an_item_comes_from_the_group_that_has_most_free() -> None:
    turns = _turns(6, groups=2)
    items = [turns.take() for _ in range(6)]
    for item in (0, 1, 3, 5):  # as after a burst: of the even ones two are busy
        turns.give(item)
    assert turns.take() == 5, "the last one that was used"
    assert turns.take() == 3
    turns.give(2)
    turns.give(4)
    assert turns.take() == 4
    assert turns.take() == 2
    assert {turns.take(), turns.take()} == {0, 1}
    for item in items:
        turns.give(item)
    assert sorted(turns.close()) == items
    with pytest.raises(DeviceError, match="closed"):
        turns.take()


def test_one_of_another_group_is_handed_out_where_only_that_will_do() -> None:
    turns = _turns(4, groups=2)
    for item in [turns.take() for _ in range(4)]:
        turns.give(item)
    assert [turns.take(1) for _ in range(2)] == [3, 1]
    with pytest.raises(Busy, match="all 4"):
        turns.take(1, timeout=0.01)
    assert turns.take() == 2


def test_an_item_that_was_being_made_is_not_counted() -> None:
    def make() -> int:
        if interrupted:
            raise interrupted.pop()
        return 0

    interrupted: list[BaseException] = [KeyboardInterrupt()]
    turns = SlotPool([make], 1)
    with pytest.raises(KeyboardInterrupt):
        turns.take()
    assert turns.take() == 0


def _waiting(turns: SlotPool[int], number: int, work: Callable[[], object]) -> threading.Thread:
    """A thread that is the next to wait for an item."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while len(turns._waiting) <= number:
        time.sleep(0.001)
    return thread


@pytest.mark.parametrize("end", [None, "finish", "refuse"])
def test_who_waits_is_served_in_order_or_told_of_the_end(monkeypatch: pytest.MonkeyPatch, end: str | None) -> None:
    monkeypatch.setattr("trtopt.runtime.slot_pool._LOOK", 60.0)  # at once, not at the next look
    turns, got = _turns(), list[object]()
    item = turns.take()

    def wait(number: int) -> None:
        try:
            taken = turns.take()
        except DeviceError as error:
            got.append(str(error))
        else:
            got.append((number, taken))
            turns.give(taken)

    threads = [_waiting(turns, number, lambda number=number: wait(number)) for number in range(3)]  # type: ignore[misc]
    assert turns.waits == 3
    if end is not None:
        threads.append(threading.Thread(target=turns.close, args=(end == "finish",)))
        threads[-1].start()
        while not turns._closed:
            time.sleep(0.001)
    turns.give(item)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert got == ([CLOSED] * 3 if end == "refuse" else [(number, item) for number in range(3)])


@pytest.mark.parametrize("by", ["the next", "who waits", "closing"])
def test_what_the_garbage_collector_gives_back_is_found(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr("trtopt.runtime.slot_pool._LOOK", 0.01)
    turns = _turns()
    item = turns.take()
    with pytest.raises(Busy, match="all 1 are in use and 0 calls wait"):
        turns.take(timeout=0.02)
    threading.Timer(0 if by == "the next" else 0.1, turns.drop, (item,)).start()
    if by != "closing":
        assert turns.take(timeout=20) is item
        turns.give(item)
    assert turns.close() == [item]
    assert turns.all() == []
    turns = _turns(2)
    lost, item = turns.take(), turns.take()  # the first by an interrupt
    turns.give(item)
    assert turns.close() == [item] != [lost]


def test_who_waits_for_another_group_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.runtime.slot_pool._LOOK", 60.0)
    turns, got = _turns(2, groups=2), list[int]()
    assert [turns.take(), turns.take()] == [0, 1]
    turns.give(0)
    thread = _waiting(turns, 0, lambda: got.append(turns.take(1, 20)))
    before = time.monotonic()
    assert turns.take(timeout=20) == 0
    assert time.monotonic() - before < 15, "only when it looked again"
    turns.give(0)
    turns.give(1)
    thread.join(20)
    assert got == [1]
