"""Turns at Python's GIL that threads wait for awake.

A thread whose GPU work is done wants the GIL back. If another has it, it sleeps, and is woken when that one lets it go: tens of
microseconds in which nobody has it, and the more threads wait, the deeper they sleep. Here it first waits for a baton, in
machine code that looks again and again: who has the baton finds the GIL free. On an H200's host with 32 cores, twelve threads
on two GPUs (EfficientNet-Lite0, batches of 1 to 8, pinned arrays): 6,800 calls a second without, 11,900 with it.

It is a hint only. A call that ends can't know when its thread lets the GIL go, so it doesn't give the baton back but marks it
as left: the thread's next call goes on with it, and if none comes within `GRACE`, or another thread calls, it is anybody's.
Who has waited for `PATIENCE` takes it whatever its holder does, so one that got lost costs that once.
Waiting takes half of the cores at the most: threads beyond sleep, as without a baton. (On 2 cores all of 16 awake gained
nothing and took twice the processor time, the GPU simulated.)
numba compiles it ('trtopt[fast]'); without it threads sleep.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import platform
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from trtopt.machine import cores
from trtopt.runtime.device import address_of

PATIENCE = 2_000_000  # nanoseconds: several threads' turns; after 0.1 ms many went on to sleep, and little was gained
GRACE = 50_000  # nanoseconds: about what it costs to wake the thread that would fall asleep at the GIL otherwise
_LOOKS = 32  # at the baton, before a waiter looks at the clock and offers its core to others: about a microsecond
_ROOM = 32  # calls that a thread can line up
_CALLS = [struct.Struct("4q" * count) for count in range(_ROOM + 1)]  # each a function's address and three arguments
_FIRST, _SIZE = 16, _CALLS[1].size  # bytes: a timespec; a call
_COPY, _STREAM = 0, 1  # in a function's place
_LARGE = 256 << 10  # bytes; less than this leaves most of a core's cache as it was
_AHEAD = 1024  # bytes: what a streaming copy fetches beforehand
_MONOTONIC = 1  # CLOCK_MONOTONIC
_THREAD = "trtopt-baton"

Wait = Callable[[int, int, int], int]


class _Own(threading.local):
    """What a thread brings along: a timespec and calls that are lined up. Its number is the address of that: even, not 0."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(_FIRST + _SIZE * _ROOM)
        self.number = ctypes.addressof(self.memory)
        self.calls: list[int] = []


class Baton:
    """One for the process, as the GIL is.

    Args:
        wait: see `compiled`.
        most: threads that wait awake at the same time.
    """

    def __init__(self, wait: Wait, most: int) -> None:
        self._wait, self._own = wait, _Own()
        libc = ctypes.CDLL(None)
        self._line = (ctypes.c_int64 * 24)()  # what is written gets a cache line of its own
        self._line[16:20] = [most, *(address_of(f) for f in (libc.clock_gettime, libc.sched_yield, libc.memcpy))]
        self._word, self._left = (ctypes.c_int64.from_buffer(self._line, at) for at in (64, 80))
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
        calls += (_STREAM if stream and nbytes >= _LARGE else _COPY, to, source, nbytes)
        return True

    def during(self) -> int:
        """Make the calls that are lined up, without the GIL and the baton; then take the baton, and the GIL. What the last call
        gave, as an int32; the first that gives something else than 0 is the last, copies aside."""
        own = self._own
        calls, own.calls = own.calls, []
        count = len(calls) // 4
        if not count:
            return 0
        _CALLS[count].pack_into(own.memory, _FIRST, *calls)
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


@functools.cache
def compiled() -> Wait | None:
    """`wait(word, mine, count)`: give the baton in `word` back if it is `mine`, make `count` calls, and look for the baton
    until it is `mine`; as `Baton.during`.

    Behind `word`: how many look for the baton, and when it was left; a cache line further how many may look, and the addresses
    of clock_gettime, sched_yield and memcpy. At `mine`: room for a timespec, and the calls, each a function's address and three
    arguments.

    None where there is no numba, or no such clock."""
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

    @intrinsic  # type: ignore[untyped-decorator]
    def looked(_: Any, at: Any) -> Any:
        """The word at `at` as it is now. On x86 and Arm the core then rests for some tens of cycles."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            word = builder.load_atomic(builder.inttoptr(given[0], word_type.as_pointer()), "acquire", 8)
            nothing, int_type = ir.VoidType(), ir.IntType(32)
            if platform.machine() in ("x86_64", "AMD64"):
                rest = builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(nothing, []))
                builder.call(rest, [])
            elif platform.machine() in ("aarch64", "arm64"):
                rest = builder.module.declare_intrinsic("llvm.aarch64.hint", (), ir.FunctionType(nothing, [int_type]))
                builder.call(rest, [int_type(1)])
            return word

        return int64(int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def streamed(_: Any, to: Any, source: Any) -> Any:
        """Copy 64 bytes to an address divisible by 64, past the caches."""

        def emit(context: Any, builder: Any, __: Any, given: Any) -> Any:
            byte, number, line = ir.IntType(8).as_pointer(), ir.IntType(32), ir.VectorType(word_type, 8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            fetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
            ahead = builder.inttoptr(builder.add(given[1], word_type(_AHEAD)), byte)  # behind the end it does nothing
            builder.call(fetch, [ahead, number(0), number(0), number(1)])  # to read, once, data
            chunk = builder.load(builder.inttoptr(given[1], line), align=1)
            store = builder.store(chunk, builder.inttoptr(given[0], line), align=64)
            store.set_metadata("nontemporal", builder.module.add_metadata([number(1)]))
            return context.get_dummy_value()

        return numba.types.void(int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def fenced(_: Any) -> Any:
        """What was streamed is in memory before what comes after."""

        def emit(context: Any, builder: Any, __: Any, ___: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return numba.types.void(), emit

    def wait(word: int, mine: int, count: int) -> int:
        most, clock, pause, memcpy = loaded(word + 64), loaded(word + 72), loaded(word + 80), loaded(word + 88)
        swapped(word, mine, 0)
        result: int = int32(0)
        for row in range(mine + _FIRST, mine + _FIRST + _SIZE * count, _SIZE):
            function, a, b, c = loaded(row), loaded(row + 8), loaded(row + 16), loaded(row + 24)
            if function == _COPY:
                called(memcpy, a, b, c)
            elif function == _STREAM:
                first = -a & 63
                last = first + ((c - first) & ~63)
                called(memcpy, a, b, first)
                for at in range(first, last, 64):
                    streamed(a + at, b + at)
                called(memcpy, a + last, b + last, c - last)
                fenced()
            else:
                result = called(function, a, b, c)
                if result != 0:
                    break
        if swapped(word, 0, mine):
            return result
        if added(word + 8, 1) < most:
            called(clock, _MONOTONIC, mine, 0)
            now = loaded(mine) * 1_000_000_000 + loaded(mine + 8)
            end = now + PATIENCE
            while True:
                there = looked(word)
                late = now > end or (there & 1 and now - looked(word + 16) > GRACE)
                if late and swapped(word, there, mine):
                    break
                # A swap takes the cache line from its holder, also one that fails: look first.
                for _ in range(_LOOKS):
                    if there == 0:
                        break
                    there = looked(word)
                if there == 0:
                    if swapped(word, 0, mine):
                        break
                    continue
                called(pause, 0, 0, 0)
                called(clock, _MONOTONIC, mine, 0)
                now = loaded(mine) * 1_000_000_000 + loaded(mine + 8)
        added(word + 8, -1)
        return result

    signature = int32(int64, int64, int64)
    try:
        made: Wait = numba.njit(signature, nogil=True, cache=True)(wait)
    except (RuntimeError, OSError):  # no folder to keep machine code in
        made = numba.njit(signature, nogil=True)(wait)
    return made
