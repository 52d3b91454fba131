"""SlotPool: items taken by threads that end, or that are interrupted, come back."""

from __future__ import annotations

import gc
import threading

import pytest

from trtopt.core.errors import Busy, DeviceError
from trtopt.runtime.slot_pool import SlotPool


def _in_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def _turns(most: int = 1, *, owned: bool = True) -> SlotPool[str]:
    return SlotPool(lambda number: f"item {number}", most, owned=owned)


def test_what_a_thread_that_ended_still_held_is_found() -> None:
    turns = _turns()
    _in_a_thread(turns.take)
    gc.collect()
    assert turns.take(timeout=5) == "item 0"
    assert turns.items == 1


def test_what_a_thread_lost_is_its_own_when_it_asks_again() -> None:
    turns = _turns()
    item = turns.take()
    assert turns.take() is item  # as after an exception that came before it was given back
    turns.give(item)
    assert turns.close() == [item]


def test_an_item_comes_from_the_group_that_has_most_free() -> None:
    turns = SlotPool(lambda number: number, 6, groups=2)
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


def test_one_of_another_group_is_handed_out_where_only_that_will_do() -> None:
    turns = SlotPool(lambda number: number, 4, groups=2)
    for item in [turns.take() for _ in range(4)]:
        turns.give(item)
    assert [turns.take(lambda item: item % 2 == 1) for _ in range(2)] == [3, 1]
    with pytest.raises(Busy, match="all 4"):
        turns.take(lambda item: item % 2 == 1, timeout=0.01)
    assert turns.take() == 2


def test_an_item_that_was_being_made_is_not_counted() -> None:
    def make(number: int) -> str:
        if interrupted:
            raise interrupted.pop()
        return f"item {number}"

    interrupted: list[BaseException] = [KeyboardInterrupt()]
    turns = SlotPool(make, 1, owned=True)
    with pytest.raises(KeyboardInterrupt):
        turns.take()
    assert turns.take() == "item 0"


def test_a_thread_that_holds_nothing_can_give_nothing_back() -> None:
    turns = _turns(2)
    item = turns.take()
    failed: list[BaseException] = []

    def give() -> None:
        try:
            turns.give(item)
        except RuntimeError as error:
            failed.append(error)

    _in_a_thread(give)
    assert len(failed) == 1
    turns.give(item)
    assert turns.close() == [item]


def test_items_without_owners_may_be_given_back_by_anybody() -> None:
    turns = _turns(2, owned=False)
    first, second = turns.take(), turns.take()
    assert first != second
    with pytest.raises(Busy):
        turns.take(timeout=0.01)
    _in_a_thread(lambda: turns.give(first))
    assert turns.take(timeout=5) == first
    turns.give(first)
    turns.give(second)
    assert sorted(turns.close()) == [first, second]
    with pytest.raises(DeviceError, match="closed"):
        turns.take()


def test_an_item_that_is_not_wanted_stays_for_others() -> None:
    turns = _turns(2)
    assert turns.take(lambda item: item == "item 1") == "item 1"
    taken: list[str] = []
    _in_a_thread(lambda: taken.append(turns.take(lambda item: item == "item 0", 5)))
    assert taken == ["item 0"]
