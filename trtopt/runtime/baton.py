"""Turns at Python's GIL that threads wait for awake.

A thread whose GPU work is done wants the GIL back. If another has it, it sleeps, and is woken when that one lets it go: tens of
microseconds in which nobody has it, and the more threads wait, the deeper they sleep. Here it first waits for a baton, in
machine code that looks again and again: who has the baton finds the GIL free. On an H200's host with 32 cores, twelve threads
on two GPUs (EfficientNet-Lite0, batches of 1 to 8, pinned arrays): 6,800 calls a second without, 11,900 with it.

It is a hint only. Who has waited for `PATIENCE` takes the baton whatever its holder does, so one that got lost costs that once.
Waiting takes half of the cores at the most: threads beyond sleep, as without a baton. (On 2 cores all of 16 awake gained
nothing and took twice the processor time, the GPU simulated.)
numba compiles it ('trtopt[fast]'); without it threads sleep.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from trtopt.machine import cores
from trtopt.runtime.device import address_of

PATIENCE = 2_000_000  # nanoseconds: several threads' turns; after 0.1 ms many went on to sleep, and little was gained
_MONOTONIC = 1  # CLOCK_MONOTONIC
_THREAD = "trtopt-baton"

Wait = Callable[[int, int, int, int, int, int, int], int]


class _Own(threading.local):
    """What a thread brings along: a number that isn't 0, and room for a time."""

    def __init__(self) -> None:
        self.time = (ctypes.c_int64 * 2)()
        self.number = ctypes.addressof(self.time)


class Baton:
    """One for the process, as the GIL is.

    Args:
        wait: see `compiled`.
        most: threads that wait awake at the same time.
    """

    def __init__(self, wait: Wait, most: int) -> None:
        self._wait, self._own, self._most = wait, _Own(), most
        self._line = (ctypes.c_int64 * 16)()  # a cache line of its own
        self._word = ctypes.c_int64.from_buffer(self._line, 64)
        self._at = ctypes.addressof(self._word)
        self._last = 0
        self._copy = address_of(ctypes.CDLL(None).memcpy)

    # These run with the GIL. They aren't atomic beside machine code that runs without; two holders at once do no harm.

    def wanted(self) -> bool:
        """Whether another thread has asked since this one did: who calls alone does without."""
        last, self._last = self._last, self._own.number
        return last != self._last

    def take(self) -> None:
        """Take it if it is free: the caller has the GIL, so nobody else should look for it now."""
        if not self._word.value:
            self._word.value = self._own.number

    def leave(self) -> None:
        """Give it back if the caller has it."""
        if self._word.value == self._own.number:
            self._word.value = 0

    def during(self, function: int, a: int, b: int = 0, c: int = 0) -> int:
        """Call a C function of up to three integers or pointers at that address, without the GIL and the baton; then take
        the baton, and the GIL. What the function gives, as an int32."""
        return self._wait(function, a, b, c, self._at, self._own.number, self._most)

    def copy(self, to: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy between contiguous arrays of the same size and type, as `during`."""
        self.during(self._copy, _address(to), _address(source), source.nbytes)


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


@functools.cache
def compiled() -> Wait | None:
    """`wait(function, a, b, c, word, mine, most)`: give the baton in `word` back if it is `mine`, call the C function, and look
    for the baton until it is `mine`, unless `most` others do; then what the function gave. The word behind `word` counts those
    who look. `mine` is the address of room for a timespec. None where there is no numba, or no such clock."""
    if not sys.platform.startswith("linux") or importlib.util.find_spec("numba") is None:
        return None
    try:
        import numba
        from llvmlite import ir
        from numba.extending import intrinsic
    except ImportError:  # perhaps installed, but not for this NumPy
        return None
    int32, int64 = numba.types.int32, numba.types.int64
    word_type = ir.IntType(64)

    @intrinsic  # type: ignore[untyped-decorator]
    def swapped(_: Any, at: Any, old: Any, new: Any) -> Any:
        """Whether the word at `at` was `old`; then it is `new`. One step, atomic."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            pointer = builder.inttoptr(given[0], word_type.as_pointer())
            return builder.extract_value(builder.cmpxchg(pointer, given[1], given[2], "seq_cst", "seq_cst"), 1)

        return numba.types.boolean(int64, int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def added(_: Any, at: Any, number: Any) -> Any:
        """What the word at `at` was; then it is that much more. One step, atomic."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            return builder.atomic_rmw("add", builder.inttoptr(given[0], word_type.as_pointer()), given[1], "seq_cst")

        return int64(int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def called(_: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
        """What a C function gives. Those of fewer arguments don't look at the registers of the others."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [word_type] * 3)
            return builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])

        return int32(int64, int64, int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def loaded(_: Any, at: Any) -> Any:
        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            return builder.load(builder.inttoptr(given[0], word_type.as_pointer()))

        return int64(int64), emit

    def wait(
        function: int, a: int, b: int, c: int, word: int, mine: int, most: int, clock: int, pause: int, patience: int
    ) -> int:
        swapped(word, mine, 0)
        result: int = called(function, a, b, c)
        if swapped(word, 0, mine):
            return result
        if added(word + 8, 1) < most:
            called(clock, _MONOTONIC, mine, 0)
            end = loaded(mine) * 1_000_000_000 + loaded(mine + 8) + patience
            while not swapped(word, 0, mine):
                called(pause, 0, 0, 0)
                called(clock, _MONOTONIC, mine, 0)
                if loaded(mine) * 1_000_000_000 + loaded(mine + 8) > end:
                    swapped(word, loaded(word), mine)
                    break
        added(word + 8, -1)
        return result

    signature = int32(*[int64] * 10)
    try:
        made = numba.njit(signature, nogil=True, cache=True)(wait)
    except (RuntimeError, OSError):  # no folder to keep machine code in
        made = numba.njit(signature, nogil=True)(wait)
    clock, pause = (address_of(getattr(ctypes.CDLL(None), name)) for name in ("clock_gettime", "sched_yield"))
    return lambda function, a, b, c, word, mine, most: int(
        made(function, a, b, c, word, mine, most, clock, pause, PATIENCE)
    )


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
