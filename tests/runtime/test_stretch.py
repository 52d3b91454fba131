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
from trtopt.runtime.stretch import NativeCall, Row, available, calling, copying

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
    stretch = NativeCall([copied(target, source), copied(again, target), calling(ABS, -4)])
    assert not target.any(), "not yet"
    assert stretch.run_without_gil() == 4
    np.testing.assert_array_equal(again, source)


def test_nothing_is_done_after_a_call_that_failed() -> None:
    source, target = np.ones(9), np.zeros(9)
    assert NativeCall([calling(ABS, -201), calling(ABS, -7), copied(target, source)]).run_without_gil() == 201
    assert not target.any()


def test_while_it_runs_other_threads_have_the_gil() -> None:
    thread = threading.Thread(target=NativeCall([calling(SLEEP, 600_000)]).run_without_gil)
    thread.start()
    started, steps = time.monotonic(), 0
    while thread.is_alive() and time.monotonic() - started < 10:
        steps += 1
        time.sleep(0.001)
    thread.join()
    assert steps > 4
