"""Stretches of rows, on C's own functions."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from trtopt.cuda.arrays import start
from trtopt.cuda.driver import address_of
from trtopt.runtime.stretch import Row, Stretch, available, calling, copying, same

pytestmark = pytest.mark.skipif(
    not available(), reason="the C extension isn't built: it needs a C compiler when trtopt is installed"
)
LIBC = ctypes.CDLL(None)
SLEEP, ABS = address_of(LIBC.usleep), address_of(LIBC.abs)


def copied(target: NDArray[np.float64], source: NDArray[np.float64]) -> Row:
    return copying(start(target), start(source), source.nbytes)


def test_rows_are_done_in_their_order() -> None:
    source, target = np.random.default_rng(0).normal(size=(40, 999)), np.zeros((40, 999))
    again = np.zeros_like(target)
    stretch = Stretch([copied(target, source), copied(again, target), calling(ABS, -4)])
    assert not target.any(), "not yet"
    assert stretch.run() == 4
    np.testing.assert_array_equal(again, source)


def test_rows_are_done_the_same_while_the_gil_is_kept() -> None:
    for way in (Stretch.run, Stretch.hold):
        source, target = np.ones(9), np.zeros(9)
        assert way(Stretch([copied(target, source), calling(ABS, -7), copied(target, source * 2)])) == 7
        np.testing.assert_array_equal(target, source)
    steps, over = list[float](), threading.Event()

    def step() -> None:
        while not over.wait(0.001):
            steps.append(time.monotonic())

    thread = threading.Thread(target=step)
    thread.start()
    Stretch([calling(SLEEP, 200_000)]).hold()
    seen = len(steps)
    over.set()
    thread.join()
    assert seen < 5, "other threads had the GIL"


def test_a_row_can_be_changed_and_done_again() -> None:
    sources, target = np.random.default_rng(1).normal(size=(3, 50)), np.zeros(50)
    stretch = Stretch([calling(ABS, 0), copied(target, sources[0])])
    for source in sources:
        stretch.words[4 + 2] = start(source)
        assert stretch.run() == 0
        np.testing.assert_array_equal(target, source)


def test_nothing_is_done_after_a_call_that_failed() -> None:
    source, target = np.ones(9), np.zeros(9)
    assert Stretch([calling(ABS, -201), calling(ABS, -7), copied(target, source)]).run() == 201
    assert not target.any()


def test_a_word_that_is_another_ends_it() -> None:
    word, target = ctypes.c_int64(5), np.zeros(9)
    at = ctypes.addressof(word)
    assert Stretch([same(at, 6), calling(ABS, -7), copied(target, np.ones(9))]).run() != 0
    assert not target.any()
    four = np.full(9, 4.0)
    assert Stretch([same(at, 5), calling(ABS, 0), copied(target, four)]).run() == 0
    assert (target == 4).all()


def test_while_it_runs_other_threads_have_the_gil() -> None:
    thread = threading.Thread(target=Stretch([calling(SLEEP, 600_000)]).run)
    thread.start()
    started, steps = time.monotonic(), 0
    while thread.is_alive() and time.monotonic() - started < 10:
        steps += 1
        time.sleep(0.001)
    thread.join()
    assert steps > 4
