"""SlotPool: items go round, and those that an interrupted thread lost come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from fake_session import in_threads

from trtopt.core.errors import Busy, DeviceError
from trtopt.runtime.slot_pool import CLOSED, SlotPool


def _in_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def _turns(most: int = 1) -> SlotPool[str]:
    return SlotPool(lambda number: f"item {number}", most)


def test_what_a_thread_lost_is_its_own_when_it_asks_again() -> None:
    turns = _turns()
    item = turns.take()
    assert turns.take() is item  # as after an exception that came before it was given back
    turns.give(item)
    assert turns.close() == [item]


def test_what_a_thread_lost_that_has_ended_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.runtime.slot_pool._LOOK", 0.01)
    turns = _turns()
    _in_a_thread(turns.take)
    item = turns.take(timeout=20)
    with pytest.raises(Busy):  # a thread that is there has not lost it
        _raised(lambda: turns.take(timeout=0.05))
    turns.give(item)
    _in_a_thread(turns.take)
    assert turns.close() == [item]


def _raised(call: Callable[[], object]) -> None:
    """Call in another thread; raise here what it raises."""
    for error in in_threads(1, lambda _: call()):
        raise error


def _by_others(turns: SlotPool[int], accepts: Callable[[int], bool] | None = None) -> int:
    """Take an item in a thread of its own, and hold it for this one."""
    taken: list[int] = []

    def take() -> None:
        taken.append(turns.take(accepts))
        del turns._holders[threading.get_ident()]

    _in_a_thread(take)
    return taken[0]


def _back(turns: SlotPool[int], item: int) -> None:
    turns._holders[threading.get_ident()] = item
    turns.give(item)


def test_an_item_comes_from_the_group_that_has_most_free() -> None:
    turns = SlotPool(lambda number: number, 6, groups=2)
    items = [_by_others(turns) for _ in range(6)]
    for item in (0, 1, 3, 5):  # as after a burst: of the even ones two are busy
        _back(turns, item)
    assert _by_others(turns) == 5, "the last one that was used"
    assert _by_others(turns) == 3
    _back(turns, 2)
    _back(turns, 4)
    assert _by_others(turns) == 4
    assert _by_others(turns) == 2
    assert {_by_others(turns), _by_others(turns)} == {0, 1}
    for item in items:
        _back(turns, item)
    assert sorted(turns.close()) == items
    with pytest.raises(DeviceError, match="closed"):
        turns.take()


def test_one_of_another_group_is_handed_out_where_only_that_will_do() -> None:
    turns = SlotPool(lambda number: number, 4, groups=2)
    for item in [_by_others(turns) for _ in range(4)]:
        _back(turns, item)
    assert [_by_others(turns, lambda item: item % 2 == 1) for _ in range(2)] == [3, 1]
    with pytest.raises(Busy, match="all 4"):
        turns.take(lambda item: item % 2 == 1, timeout=0.01)
    assert turns.take() == 2


def test_an_item_that_was_being_made_is_not_counted() -> None:
    def make(number: int) -> str:
        if interrupted:
            raise interrupted.pop()
        return f"item {number}"

    interrupted: list[BaseException] = [KeyboardInterrupt()]
    turns = SlotPool(make, 1)
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


def test_an_item_that_is_not_wanted_stays_for_others() -> None:
    turns = _turns(2)
    assert turns.take(lambda item: item == "item 1") == "item 1"
    taken: list[str] = []
    _in_a_thread(lambda: taken.append(turns.take(lambda item: item == "item 0", 5)))
    assert taken == ["item 0"]


def _waiting(turns: SlotPool[str], number: int, got: list[object]) -> threading.Thread:
    """A thread that is the next to wait for an item, and gives it back."""

    def wait() -> None:
        try:
            item = turns.take()
        except DeviceError as error:
            got.append(str(error))
        else:
            got.append((number, item))
            turns.give(item)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while len(turns._waiting) <= number:
        time.sleep(0.001)
    return thread


@pytest.mark.parametrize("end", [None, "finish", "refuse"])
def test_who_waits_is_served_in_order_or_told_of_the_end(monkeypatch: pytest.MonkeyPatch, end: str | None) -> None:
    monkeypatch.setattr("trtopt.runtime.slot_pool._LOOK", 60.0)  # at once, not at the next look
    turns, got = _turns(), list[object]()
    item = turns.take()
    threads = [_waiting(turns, number, got) for number in range(3)]
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
def test_what_nobody_keeps_any_more_is_found(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr("trtopt.runtime.slot_pool._LOOK", 0.01)
    turns = _turns()
    item = turns.take()
    release = turns.keep(item)
    with pytest.raises(Busy, match="all 1 are in use and 0 calls wait"):
        turns.take(timeout=0.02)
    if by == "the next":
        release()
    else:
        threading.Timer(0.1, release).start()
    if by != "closing":
        assert turns.take(timeout=20) is item
        turns.give(item)
    assert turns.close() == [item]
    assert turns.all() == []


def test_who_waits_for_another_group_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.runtime.slot_pool._LOOK", 60.0)
    turns, got = SlotPool(lambda number: number, 2, groups=2), list[int]()
    for item in [_by_others(turns) for _ in range(2)]:
        if item == 0:
            _back(turns, item)
    thread = threading.Thread(target=lambda: got.append(turns.take(lambda item: item == 1, 20)))
    thread.start()
    while not turns._waiting:
        time.sleep(0.001)
    before = time.monotonic()
    assert turns.take(timeout=20) == 0
    assert time.monotonic() - before < 15, "only when it looked again"
    turns.give(0)
    _back(turns, 1)
    thread.join(20)
    assert got == [1]
