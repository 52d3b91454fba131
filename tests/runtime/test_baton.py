"""The baton that threads wait for before Python's GIL: real machine code, on C's own functions."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from fake_session import in_threads
from numpy.typing import NDArray

from trtopt.cuda.arrays import start
from trtopt.cuda.driver import address_of
from trtopt.runtime import baton as module
from trtopt.runtime.baton import Baton, Row, Stretch, Turn, calling, copying, same
from trtopt.runtime.machinecode import GRACE, PATIENCE, WIDTH, compiled

pytestmark = pytest.mark.skipif(compiled() is None, reason="numba can't be imported here: pip install 'trtopt[fast]'")
LIBC = ctypes.CDLL(None)
LOST = 123456  # somebody's number, who will not come back
SLEEP, ABS = address_of(LIBC.usleep), address_of(LIBC.abs)


@pytest.fixture
def baton() -> Baton:
    wait = compiled()
    assert wait is not None
    return Baton(wait, 16)


def holder(baton: Baton) -> int:
    return baton.word.value


def mine(baton: Baton) -> int:
    return baton._own.turn.number


def take(baton: Baton) -> Turn:
    baton._last = LOST  # another thread has begun a call meanwhile
    turn = baton.taken()
    assert turn is not None
    return turn


def during(baton: Baton, function: int, argument: int) -> int:
    return baton._own.turn.during(Stretch([calling(function, argument)]))


def copied(target: NDArray[np.float64], source: NDArray[np.float64]) -> Row:
    return copying(start(target), start(source), source.nbytes)


def test_a_function_is_called_and_the_baton_taken_after_it(baton: Baton) -> None:
    assert during(baton, ABS, -7) == 7
    assert holder(baton) == mine(baton) != 0
    take(baton).leave()
    assert holder(baton) == mine(baton) + 1, "left, but its thread goes on with the GIL"


def test_while_a_function_runs_the_baton_and_the_gil_are_free(baton: Baton) -> None:
    thread = threading.Thread(target=during, args=(baton, SLEEP, 600_000))
    thread.start()
    started = time.monotonic()
    while time.monotonic() - started < 0.05:  # the GIL isn't held meanwhile, or this wouldn't get to run
        assert holder(baton) == 0
    take(baton)
    assert holder(baton) == mine(baton)
    during(baton, SLEEP, 1)
    thread.join()


def test_only_one_of_many_threads_has_it(baton: Baton) -> None:
    had = [0] * 4

    def work(number: int) -> None:
        for _ in range(200):
            during(baton, SLEEP, 10)
            had[number] += holder(baton) == mine(baton)  # or, on a busy machine, somebody lost patience
            baton._own.turn.leave()

    assert in_threads(4, work) == []
    assert holder(baton) & 1, "left"
    assert sum(had) > 600


def test_one_that_got_lost_is_taken_when_patience_ends(baton: Baton) -> None:
    baton.word.value = LOST
    started = time.perf_counter_ns()
    assert during(baton, ABS, 3) == 3
    assert time.perf_counter_ns() - started >= PATIENCE
    assert holder(baton) == mine(baton)


def test_one_that_was_left_is_taken_when_its_thread_has_had_time_to_come_back(baton: Baton) -> None:
    started = time.perf_counter_ns()
    baton.word.value, baton.left.value = LOST + 1, time.monotonic_ns()
    assert during(baton, ABS, 3) == 3
    assert time.perf_counter_ns() - started >= GRACE
    assert holder(baton) == mine(baton)


def test_nobody_waits_for_one_that_was_left_long_ago(baton: Baton) -> None:
    took: list[int] = []
    for _ in range(50):
        baton.word.value, baton.left.value = LOST + 1, time.monotonic_ns() - 2 * GRACE
        started = time.perf_counter_ns()
        assert during(baton, ABS, 3) == 3
        took.append(time.perf_counter_ns() - started)
        assert holder(baton) == mine(baton)
    assert min(took) < GRACE


def test_a_thread_that_calls_again_goes_on_with_the_one_it_left_or_another_did(baton: Baton) -> None:
    for number in (mine(baton), LOST):
        baton.word.value = number + 1
        take(baton)
        assert holder(baton) == mine(baton)


def test_who_waits_gets_it_when_the_thread_that_left_it_lets_the_gil_go(baton: Baton) -> None:
    """And not before, or it would fall asleep at the GIL."""
    monday: list[int] = []
    turn = take(baton)
    thread = threading.Thread(target=lambda: monday.append(during(baton, ABS, 5)))
    thread.start()
    time.sleep(0.05)  # it has long been waiting for the baton
    turn.leave()
    take(baton)
    assert during(baton, SLEEP, 50_000) == 0
    thread.join()
    assert monday == [5]


def test_no_more_wait_awake_than_may() -> None:
    wait = compiled()
    assert wait is not None
    baton = Baton(wait, 1)
    baton.word.value = LOST
    waited: list[float] = []

    def work(_: int) -> None:
        started = time.perf_counter_ns()
        assert during(baton, ABS, 3) == 3
        waited.append(time.perf_counter_ns() - started)
        if baton.word.value == mine(baton):
            baton.word.value = LOST  # as if it got lost again

    for _ in range(20):
        assert in_threads(2, work) == []
    assert len(waited) == 40
    slow = sum(time >= PATIENCE for time in waited)
    assert 20 <= slow < 40, "two at a time, and only one of them waits"
    assert baton.waiting.value == 0, "nobody waits any more"


def test_who_does_not_have_it_takes_and_leaves_nothing(baton: Baton) -> None:
    baton.word.value = LOST
    take(baton).leave()
    assert holder(baton) == LOST


def test_who_calls_alone_does_not_want_it(baton: Baton) -> None:
    assert baton.taken(), "nobody knows yet"
    baton.word.value = 0
    assert not baton.taken()
    assert holder(baton) == 0, "not needed, so not taken"
    other = threading.Thread(target=lambda: take(baton).leave())
    other.start()
    other.join()
    assert baton.taken()
    assert holder(baton) == mine(baton)
    assert not baton.taken()


def test_rows_are_done_in_their_order(baton: Baton) -> None:
    source, target = np.random.default_rng(0).normal(size=(40, 999)), np.zeros((40, 999))
    again = np.zeros_like(target)
    stretch = Stretch([copied(target, source), copied(again, target), calling(ABS, -4)])
    assert not target.any(), "not yet"
    assert baton._own.turn.during(stretch) == 4
    np.testing.assert_array_equal(again, source)


def test_a_row_can_be_changed_and_done_again(baton: Baton) -> None:
    sources, target = np.random.default_rng(1).normal(size=(3, 50)), np.zeros(50)
    stretch = Stretch([calling(ABS, 0), copied(target, sources[0])])
    for source in sources:
        stretch.words[WIDTH + 2] = start(source)
        assert baton._own.turn.during(stretch) == 0
        np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 200_000, 262_144, 262_207, 3_000_001])
def test_streamed_copies_touch_nothing_around_them(baton: Baton, nbytes: int) -> None:
    room = np.random.default_rng(nbytes).integers(0, 256, nbytes + 300, np.uint8)
    for shift in (0, 1, 3, 8, 31, 63):
        target = np.full(nbytes + 400, 7, np.uint8)
        aligned = -start(target) % 64
        to = aligned + 64 + shift
        source = room[shift : shift + nbytes]
        baton._own.turn.copy(start(target) + to, start(source), nbytes, stream=True)
        np.testing.assert_array_equal(target[to : to + nbytes], source)
        assert (target[:to] == 7).all() and (target[to + nbytes :] == 7).all()


def test_nothing_is_done_after_a_call_that_failed(baton: Baton) -> None:
    source, target = np.ones(9), np.zeros(9)
    assert baton._own.turn.during(Stretch([calling(ABS, -201), calling(ABS, -7), copied(target, source)])) == 201
    assert not target.any()


def test_a_word_that_is_another_ends_it(baton: Baton) -> None:
    word, target = ctypes.c_int64(5), np.zeros(9)
    at = ctypes.addressof(word)
    assert baton._own.turn.during(Stretch([same(at, 6), calling(ABS, -7), copied(target, np.ones(9))])) != 0
    assert baton._own.turn.during(Stretch([same(at, 5), calling(ABS, 0), copied(target, np.full(9, 4.0))])) == 0
    assert (target == 4).all()


def test_a_turn_apart_waits_for_nobody(baton: Baton) -> None:
    baton.word.value = LOST
    apart = baton.apart()
    start_ns = time.monotonic_ns()
    for number in range(100):
        assert apart.during(Stretch([calling(ABS, -number)])) == number
    assert time.monotonic_ns() - start_ns < 100 * PATIENCE / 2
    assert holder(baton) == LOST


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_made", [])
    monkeypatch.setattr(module, "_lock", threading.Lock())
    yield
    module.prepared(60)


@pytest.mark.usefixtures("fresh")
def test_it_is_compiled_once_beside() -> None:
    assert module.baton() is None
    module.prepare()
    module.prepare()
    module.prepared(60)
    assert isinstance(module.baton(), Baton)
    assert len(module._made) == 1


@pytest.mark.usefixtures("fresh")
def test_without_numba_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "compiled", compiled.__wrapped__)
    module.prepare()
    module.prepared(60)
    assert module._made == [None]
    assert module.baton() is None
