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

from trtopt.runtime import baton as module
from trtopt.runtime.baton import PATIENCE, Baton, compiled
from trtopt.runtime.device import address_of

pytestmark = pytest.mark.skipif(compiled() is None, reason="numba can't be imported here: pip install 'trtopt[fast]'")
LIBC = ctypes.CDLL(None)
SLEEP, ABS = address_of(LIBC.usleep), address_of(LIBC.abs)


@pytest.fixture
def baton() -> Baton:
    wait = compiled()
    assert wait is not None
    return Baton(wait, 16)


def holder(baton: Baton) -> int:
    return baton._word.value


def test_a_function_is_called_and_the_baton_taken_after_it(baton: Baton) -> None:
    assert baton.during(ABS, -7) == 7
    assert holder(baton) == baton._own.number != 0
    baton.leave()
    assert holder(baton) == 0


def test_while_a_function_runs_the_baton_and_the_gil_are_free(baton: Baton) -> None:
    baton.take()
    thread = threading.Thread(target=baton.during, args=(SLEEP, 600_000))
    baton.leave()
    thread.start()
    started = time.monotonic()
    while time.monotonic() - started < 0.05:  # the GIL isn't held meanwhile, or this wouldn't get to run
        assert holder(baton) == 0
    baton.take()
    assert holder(baton) == baton._own.number
    baton.during(SLEEP, 1)
    thread.join()


def test_only_one_of_many_threads_has_it(baton: Baton) -> None:
    had = [0] * 4

    def work(number: int) -> None:
        for _ in range(200):
            baton.during(SLEEP, 10)
            had[number] += holder(baton) == baton._own.number  # or, on a busy machine, somebody lost patience
            baton.leave()

    assert in_threads(4, work) == []
    assert holder(baton) == 0
    assert sum(had) > 600


def test_one_that_got_lost_is_taken_when_patience_ends(baton: Baton) -> None:
    baton._word.value = 12345
    started = time.perf_counter_ns()
    assert baton.during(ABS, 3) == 3
    assert time.perf_counter_ns() - started >= PATIENCE
    assert holder(baton) == baton._own.number


def test_no_more_wait_awake_than_may() -> None:
    wait = compiled()
    assert wait is not None
    baton = Baton(wait, 1)
    baton._word.value = 12345
    waited: list[float] = []

    def work(_: int) -> None:
        started = time.perf_counter_ns()
        assert baton.during(ABS, 3) == 3
        waited.append(time.perf_counter_ns() - started)
        if baton._word.value == baton._own.number:
            baton._word.value = 12345  # as if it got lost again

    for _ in range(20):
        assert in_threads(2, work) == []
    assert len(waited) == 40
    slow = sum(time >= PATIENCE for time in waited)
    assert 20 <= slow < 40, "two at a time, and only one of them waits"
    assert baton._line[9] == 0, "nobody waits any more"


def test_who_does_not_have_it_takes_and_leaves_nothing(baton: Baton) -> None:
    baton._word.value = 12345
    baton.take()
    baton.leave()
    assert holder(baton) == 12345


def test_who_calls_alone_does_not_want_it(baton: Baton) -> None:
    baton.wanted()
    assert not baton.wanted()
    other = threading.Thread(target=baton.wanted)
    other.start()
    other.join()
    assert baton.wanted()
    assert not baton.wanted()


def test_arrays_are_copied(baton: Baton) -> None:
    source, target = np.random.default_rng(0).normal(size=(40, 999)), np.zeros((40, 999))
    baton.copy(target, source)
    np.testing.assert_array_equal(target, source)


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
