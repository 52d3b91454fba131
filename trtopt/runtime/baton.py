"""Turns at Python's GIL that threads wait for awake.

A thread whose GPU work is done wants the GIL back. If another has it, it sleeps, and is woken when that one lets it go: tens of
microseconds in which nobody has it, and the more threads wait, the deeper they sleep. Here it first waits for a baton, in
machine code that looks again and again: who has the baton finds the GIL free. What needs no Python in between, as copies, a
launch and waiting for it, is lined up and done in one stretch. On an H200's host with 32 cores, twelve threads on two GPUs
(EfficientNet-Lite0, batches of 1 to 8, pinned arrays): 6,800 calls a second without, 11,900 with it (in one run; more since).

It is a hint only. A call that ends can't know when its thread lets the GIL go, so it doesn't give the baton back but marks it
as left: the thread's next call goes on with it, and if none comes within `GRACE`, or another thread calls, it is anybody's.
Who has waited for `PATIENCE` takes it whatever its holder does, so one that got lost costs that once.
Waiting takes half of the cores at the most: threads beyond sleep, as without a baton. (On 2 cores all of 16 awake gained
nothing and took twice the processor time, the GPU simulated.)
numba compiles it (the extra fast); without it threads sleep.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

from trtopt.core.host import cores
from trtopt.cuda.driver import address_of
from trtopt.runtime.machinecode import (
    CLOCK,
    COPY,
    LEFT,
    MEMCPY,
    MOST,
    SAME,
    STREAM,
    TIME,
    WAITING,
    WIDTH,
    YIELD,
    Wait,
    compiled,
)

_LARGE = 256 << 10  # bytes; copying less leaves most of a core's cache as it was
_THREAD = "trtopt-baton"

Row = tuple[int, int, int, int]


def calling(function: int, a: int, b: int = 0, c: int = 0) -> Row:
    """A call of the C function at that address, of up to three integers or pointers, that gives 0 if all is well."""
    return function, a, b, c


def copying(to: int, source: int, nbytes: int, *, stream: bool = False) -> Row:
    """A copy from address to address.

    Args:
        stream: past the core's caches, if it is large: for what nobody reads there. It would drive out what Python needs when
            the thread has the GIL again.
    """
    return STREAM if stream and nbytes >= _LARGE else COPY, to, source, nbytes


def same(at: int, value: int) -> Row:
    """Fails unless the word at that address is `value`."""
    return SAME, at, value, 0


class Stretch:
    """Rows that `Turn.during` does one after another; for one thread at a time.

    Attributes:
        words: the rows' numbers, in a row; those can be changed.
    """

    __slots__ = ("at", "count", "words")

    def __init__(self, rows: Sequence[Row]) -> None:
        self.count = len(rows)
        self.words = (ctypes.c_int64 * (WIDTH * self.count))(*[word for row in rows for word in row])
        self.at = ctypes.addressof(self.words)


class Turn:
    """What a thread can do with the baton. Its number is the address of a timespec: even, not 0."""

    __slots__ = ("_baton", "_memory", "_wait", "_word_at", "number")

    def __init__(self, baton: Baton) -> None:
        self._memory = ctypes.create_string_buffer(TIME)
        self.number = ctypes.addressof(self._memory)
        self._baton, self._wait, self._word_at = baton, baton.wait, ctypes.addressof(baton.word)

    def during(self, stretch: Stretch) -> int:
        """Without the GIL and the baton do what the stretch says; then take the baton, and the GIL. What its last call gave, as
        an int32; the first that gives something else than 0 is the last, and nothing is copied after it."""
        return self._wait(self._word_at, self.number, stretch.at, stretch.count)

    def copy(self, to: int, source: int, nbytes: int, *, stream: bool = False) -> None:
        """Copy from address to address; as `copying`."""
        self.during(Stretch([copying(to, source, nbytes, stream=stream)]))

    def leave(self) -> None:
        """Mark it as left if the caller has it, who goes on with the GIL."""
        baton = self._baton
        if baton.word.value == self.number:
            baton.left.value = time.monotonic_ns()
            baton.word.value |= 1


class _Own(threading.local):
    def __init__(self, baton: Baton) -> None:
        self.turn = Turn(baton)


class Baton:
    """One for the process, as the GIL is.

    Args:
        wait: from `compiled`.
        most: threads that wait awake at the same time.
    """

    def __init__(self, wait: Wait, most: int) -> None:
        self.wait = wait
        libc = ctypes.CDLL(None)
        shared = ctypes.create_string_buffer(192)  # a cache line before: the next is the word's alone
        self.word, self.waiting, self.left, *rest = (
            ctypes.c_int64.from_buffer(shared, 64 + place) for place in (0, WAITING, LEFT, MOST, CLOCK, YIELD, MEMCPY)
        )
        for field, value in zip(rest, (most, *map(address_of, (libc.clock_gettime, libc.sched_yield, libc.memcpy)))):
            field.value = value
        self._last = 0
        self._own = _Own(self)

    def apart(self) -> Turn:
        """A turn at a baton of its own, for stretches of one thread that nobody waits for."""
        return Turn(Baton(self.wait, 0))

    # This and `Turn.leave` run with the GIL. They aren't atomic beside machine code that runs without; two holders at once do
    # no harm.

    def taken(self) -> Turn | None:
        """Begin a call: take it, unless another thread uses it; the caller has the GIL, so nobody else should look for it now.

        Returns: None if no other thread has begun a call since this one did; then it isn't taken, as nobody else wants it.
        """
        turn = self._own.turn
        number = turn.number
        last, self._last = self._last, number
        if last == number:
            return None
        holder = self.word.value
        if not holder or holder & 1:
            self.word.value = number
        return turn


_lock = threading.Lock()
_made: list[Baton | None] = []


def baton() -> Baton | None:
    """The process's; None before `prepare` was called and done, or where there can be none."""
    return _made[0] if _made else None


def prepare() -> None:
    """Compile it, in a thread beside, for some 2 s. Later calls do nothing."""
    if _lock.acquire(blocking=False):  # and never released: once
        threading.Thread(target=_prepare, name=_THREAD).start()  # no daemon: ending inside LLVM might crash


def prepared(timeout: float | None = None) -> None:
    """Wait until what `prepare` began is done, at most so many seconds."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(timeout)


def _prepare() -> None:
    wait = compiled()
    _made.append(None if wait is None else Baton(wait, cores() // 2))
