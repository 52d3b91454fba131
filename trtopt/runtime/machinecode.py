"""Machine code for what threads do without Python's GIL: calls in a row, large copies, and waiting awake for the baton.

numba compiles it. It knows addresses only; `trtopt.runtime.baton` says what they mean.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
from collections.abc import Callable
from typing import Any

PATIENCE = 2_000_000  # nanoseconds: several threads' turns; after 0.1 ms many went on to sleep, and little was gained
GRACE = 50_000  # nanoseconds: about what it costs to wake the thread that would fall asleep at the GIL otherwise
# Bytes behind the baton's word: how many look for it, and when it was left; a cache line further, as that doesn't change, how
# many may look, and the addresses of C's functions.
WAITING, LEFT = 8, 16
MOST, CLOCK, YIELD, MEMCPY = 64, 72, 80, 88
# A row is four words: a function's address, or `COPY`, `STREAM` or `SAME`, and its arguments.
WIDTH = 4
COPY, STREAM, SAME = 0, 1, 2
TIME = 16  # bytes of the timespec at a thread's number
_LOOKS = 32  # at the baton, before a waiter looks at the clock and offers its core to others: about a microsecond
_AHEAD = 1024  # bytes: what a streaming copy fetches beforehand
_MONOTONIC = 1  # CLOCK_MONOTONIC

Wait = Callable[[int, int, int, int], int]


@functools.cache
def compiled() -> Wait | None:
    """`wait(word, number, rows, count)`: give the baton in `word` back if it is that thread's, do what so many rows say, and
    look for the baton until it is that thread's; as `Turn.during`. None where there is no numba, or no such clock."""
    if not sys.platform.startswith("linux") or importlib.util.find_spec("numba") is None:
        return None
    try:
        import numba
        from llvmlite import ir
        from numba.extending import intrinsic
    except ImportError:  # perhaps installed, but not for this NumPy
        return None
    int32, int64 = numba.types.int32, numba.types.int64
    int_type, word_type, nothing = ir.IntType(32), ir.IntType(64), ir.VoidType()
    pointer_type = word_type.as_pointer()

    @intrinsic  # type: ignore[untyped-decorator]
    def swapped(_: Any, at: Any, old: Any, new: Any) -> Any:
        """Whether the word at `at` was `old`; then it is `new`. One step, atomic."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            pointer = builder.inttoptr(given[0], pointer_type)
            return builder.extract_value(builder.cmpxchg(pointer, given[1], given[2], "seq_cst", "seq_cst"), 1)

        return numba.types.boolean(int64, int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def added(_: Any, at: Any, more: Any) -> Any:
        """What the word at `at` was; then it is that much more. One step, atomic."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            return builder.atomic_rmw("add", builder.inttoptr(given[0], pointer_type), given[1], "seq_cst")

        return int64(int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def called(_: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
        """What a C function gives. Those of fewer arguments don't look at the registers of the others."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            kind = ir.FunctionType(int_type, [word_type] * 3)
            return builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])

        return int32(int64, int64, int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def loaded(_: Any, at: Any) -> Any:
        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            return builder.load(builder.inttoptr(given[0], pointer_type))

        return int64(int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def looked(_: Any, at: Any) -> Any:
        """The word at `at` as it is now. On x86 and Arm the core then rests for some tens of cycles."""

        def emit(_: Any, builder: Any, __: Any, given: Any) -> Any:
            word = builder.load_atomic(builder.inttoptr(given[0], pointer_type), "acquire", 8)
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
            byte, line = ir.IntType(8).as_pointer(), ir.VectorType(word_type, 8).as_pointer()
            kind = ir.FunctionType(nothing, [byte, int_type, int_type, int_type])
            fetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
            ahead = builder.inttoptr(builder.add(given[1], word_type(_AHEAD)), byte)  # behind the end it does nothing
            builder.call(fetch, [ahead, int_type(0), int_type(0), int_type(1)])  # to read, once, data
            chunk = builder.load(builder.inttoptr(given[1], line), align=1)
            store = builder.store(chunk, builder.inttoptr(given[0], line), align=64)
            store.set_metadata("nontemporal", builder.module.add_metadata([int_type(1)]))
            return context.get_dummy_value()

        return numba.types.void(int64, int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def fenced(_: Any) -> Any:
        """What was streamed is in memory before what comes after."""

        def emit(context: Any, builder: Any, __: Any, ___: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return numba.types.void(), emit

    def wait(word: int, number: int, rows: int, count: int) -> int:
        clock, memcpy = loaded(word + CLOCK), loaded(word + MEMCPY)
        swapped(word, number, 0)
        result: int = int32(0)
        for row in range(rows, rows + 8 * WIDTH * count, 8 * WIDTH):
            function, a, b, c = loaded(row), loaded(row + 8), loaded(row + 16), loaded(row + 24)
            if function == COPY:
                called(memcpy, a, b, c)
            elif function == STREAM:
                first = -a & 63
                last = first + ((c - first) & ~63)
                called(memcpy, a, b, first)
                for at in range(first, last, 64):
                    streamed(a + at, b + at)
                called(memcpy, a + last, b + last, c - last)
                fenced()
            elif function == SAME:
                result = int32(loaded(a) != b)
            else:
                result = called(function, a, b, c)
            if result != 0:
                break
        if swapped(word, 0, number):
            return result
        if added(word + WAITING, 1) < loaded(word + MOST):
            called(clock, _MONOTONIC, number, 0)
            now = loaded(number) * 1_000_000_000 + loaded(number + 8)
            end = now + PATIENCE
            while True:
                there = looked(word)
                late = now > end or (there & 1 and now - looked(word + LEFT) > GRACE)
                if late and swapped(word, there, number):
                    break
                # A swap takes the cache line from its holder, also one that fails: look first.
                for _ in range(_LOOKS):
                    if there == 0:
                        break
                    there = looked(word)
                if there == 0:
                    if swapped(word, 0, number):
                        break
                    continue
                called(loaded(word + YIELD), 0, 0, 0)
                called(clock, _MONOTONIC, number, 0)
                now = loaded(number) * 1_000_000_000 + loaded(number + 8)
        added(word + WAITING, -1)
        return result

    signature = int32(int64, int64, int64, int64)
    try:
        made: Wait = numba.njit(signature, nogil=True, cache=True)(wait)
    except (RuntimeError, OSError):  # no folder to keep machine code in
        made = numba.njit(signature, nogil=True)(wait)
    return made
