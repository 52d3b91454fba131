"""SlotPool: items come back from threads that end or are interrupted, and go to who waits in their order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trtopt.core.errors import Busy, DeviceError
from trtopt.runtime.slot_pool import Lease, SlotPool


def _in_a_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _pool(most: int = 1) -> SlotPool[str]:
    return SlotPool(lambda number: f"item {number}", most)


def test_what_nobody_refers_to_any_more_comes_back() -> None:
    pool = _pool()
    _in_a_thread(pool.take)
    for _ in range(3):
        assert pool.take(timeout=5).item == "item 0"  # as after an exception that came before it was given back
    assert pool.close() == ["item 0"]


def test_what_is_dropped_goes_to_who_waits_already() -> None:
    pool, taken = _pool(), list[Any]()
    lease = pool.take()
    waiting = threading.Thread(target=lambda: taken.append(pool.take(timeout=20).item))
    waiting.start()
    while not pool._waiting:
        pass
    lease.drop()
    lease.drop()  # once
    waiting.join(20)
    assert taken == ["item 0"]
    assert pool.close() == ["item 0"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Busy])
def test_who_is_interrupted_while_waiting_leaves_the_queue(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool()
    lease = pool.take()
    if error is KeyboardInterrupt:

        def serve() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "_serve", serve)
    with pytest.raises(error):
        pool.take(timeout=0.01)
    monkeypatch.undo()
    assert not pool._waiting and pool.waits == 1
    pool.give(lease)
    assert pool.close() == ["item 0"]


def test_an_item_comes_from_the_group_that_has_most_free() -> None:
    pool = SlotPool(lambda number: number, 6, groups=2)
    leases = {lease.item: lease for lease in [pool.take() for _ in range(6)]}

    def take() -> int:
        lease = pool.take()
        leases[lease.item] = lease
        return lease.item  # type: ignore[no-any-return]

    for item in (0, 1, 3, 5):  # as after a burst: of the even ones two are busy
        pool.give(leases[item])
    assert take() == 5, "the last one that was used"
    assert take() == 3
    pool.give(leases[2])
    pool.give(leases[4])
    assert take() == 4
    assert take() == 2
    assert {take(), take()} == {0, 1}
    for lease in leases.values():
        pool.give(lease)
    assert sorted(pool.close()) == sorted(leases)


def test_one_of_another_group_is_handed_out_where_only_that_will_do() -> None:
    pool, kept = SlotPool(lambda number: number, 4, groups=2), list[Lease[int]]()
    for lease in [pool.take() for _ in range(4)]:
        pool.give(lease)
    for wanted in (3, 1):
        kept.append(pool.take(lambda item: item % 2 == 1))
        assert kept[-1].item == wanted
    with pytest.raises(Busy, match="all 4"):
        pool.take(lambda item: item % 2 == 1, timeout=0.01)
    assert pool.take().item == 2


def test_an_item_that_was_being_made_is_not_counted() -> None:
    def make(number: int) -> str:
        if interrupted:
            raise interrupted.pop()
        return f"item {number}"

    interrupted: list[BaseException] = [KeyboardInterrupt()]
    pool = SlotPool(make, 1)
    with pytest.raises(KeyboardInterrupt):
        pool.take()
    assert pool.take().item == "item 0"


def test_an_item_that_is_not_wanted_stays_for_others() -> None:
    pool = _pool(2)
    lease = pool.take(lambda item: item == "item 1")
    assert lease.item == "item 1"
    taken: list[str] = []
    _in_a_thread(lambda: taken.append(pool.take(lambda item: item == "item 0", 5).item))
    assert taken == ["item 0"]


def test_any_thread_may_give_back_and_nothing_is_handed_out_after_close() -> None:
    pool = _pool(2)
    first, second = pool.take(), pool.take()
    with pytest.raises(Busy):
        pool.take(timeout=0.01)
    _in_a_thread(lambda: pool.give(first))
    pool.give(second)
    assert sorted(pool.close()) == ["item 0", "item 1"]
    with pytest.raises(DeviceError, match="closed"):
        pool.take()
