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
numba compiles it ('trtopt[fast]'); without it threads sleep.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time

from trtopt.machine import cores
from trtopt.runtime.device import address_of
from trtopt.runtime.machinecode import (
    CLOCK,
    COPY,
    FIRST,
    LEFT,
    MEMCPY,
    MOST,
    SIZE,
    STREAM,
    WAITING,
    YIELD,
    Wait,
    compiled,
)

_ROOM = 32  # calls that a thread can line up
_CALLS = [struct.Struct("4q" * count) for count in range(_ROOM + 1)]
_LARGE = 256 << 10  # bytes; copying less leaves most of a core's cache as it was
_THREAD = "trtopt-baton"


class _Own(threading.local):
    """What a thread brings along: a timespec and calls that are lined up. Its number is the address of that: even, not 0."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(FIRST + SIZE * _ROOM)
        self.number = ctypes.addressof(self.memory)
        self.calls: list[int] = []


class Baton:
    """One for the process, as the GIL is.

    Args:
        wait: from `compiled`.
        most: threads that wait awake at the same time.
    """

    def __init__(self, wait: Wait, most: int) -> None:
        self._wait, self._own = wait, _Own()
        libc = ctypes.CDLL(None)
        shared = ctypes.create_string_buffer(192)  # a cache line before: the next is the word's alone
        self._word, self._waiting, self._left, *rest = (
            ctypes.c_int64.from_buffer(shared, 64 + place) for place in (0, WAITING, LEFT, MOST, CLOCK, YIELD, MEMCPY)
        )
        for field, value in zip(rest, (most, *map(address_of, (libc.clock_gettime, libc.sched_yield, libc.memcpy)))):
            field.value = value
        self._at = ctypes.addressof(self._word)
        self._last = 0

    # These run with the GIL. They aren't atomic beside machine code that runs without; two holders at once do no harm.

    def taken(self) -> bool:
        """Begin a call: take it, unless another thread uses it; the caller has the GIL, so nobody else should look for it now.
        Nothing is lined up then.

        Returns: whether another thread has begun a call since this one did; if not, it isn't taken, as nobody else wants it.
        """
        own = self._own
        number = own.number
        last, self._last = self._last, number
        if last == number:
            return False
        holder = self._word.value
        if not holder or holder & 1:
            self._word.value = number
        own.calls = []  # an exception may have come before they were made
        return True

    def leave(self) -> None:
        """Mark it as left if the caller has it, who goes on with the GIL."""
        if self._word.value == self._own.number:
            self._left.value = time.monotonic_ns()
            self._word.value |= 1

    def then(self, function: int, a: int, b: int = 0, c: int = 0) -> None:
        """Line up a call of the C function at that address, of up to three integers or pointers, for the next `during`."""
        self._own.calls += (function, a, b, c)

    def copy(self, to: int, source: int, nbytes: int, *, stream: bool = False) -> bool:
        """Line up a copy from address to address; unless there is no room for it beside two calls.

        Args:
            stream: past the core's caches, if it is large: for what nobody reads there. It would drive out what Python needs
                when the thread has the GIL again.
        """
        calls = self._own.calls
        if len(calls) > 4 * (_ROOM - 3):
            return False
        calls += (STREAM if stream and nbytes >= _LARGE else COPY, to, source, nbytes)
        return True

    def during(self) -> int:
        """Make the calls that are lined up, without the GIL and the baton; then take the baton, and the GIL. What the last call
        gave, as an int32; the first that gives something else than 0 is the last, copies aside."""
        own = self._own
        calls, own.calls = own.calls, []
        count = len(calls) // 4
        if not count:
            return 0
        _CALLS[count].pack_into(own.memory, FIRST, *calls)
        return self._wait(self._at, own.number, count)


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
