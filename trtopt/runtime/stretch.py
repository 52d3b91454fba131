"""Copies and calls in a row that a thread does without Python's GIL: a whole call between two looks of Python at it.

A row is four words: a C function's address and up to three arguments, or what `_native.c` does itself. A stretch ends at the
first row that gives something else than 0. Only where the C extension is built (`available`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from trtopt.core import native

_COPY, _SAME = 0, 1
WIDTH, TO, SOURCE = 4, 1, 2  # words of a row, and of a copy's row

Row = tuple[int, int, int, int]


def available() -> bool:
    return native.run is not None and native.hold is not None


def calling(function: int, a: int, b: int = 0) -> Row:
    """A call of the C function at that address, of one or two integers or pointers, that gives 0 if all is well."""
    return function, a, b, 0


def copying(to: int, source: int, nbytes: int) -> Row:
    """A copy from address to address."""
    return _COPY, to, source, nbytes


def same(at: int, value: int) -> Row:
    """Fails unless the word at that address is `value`."""
    return _SAME, at, value, 0


class NativeCall:
    """Rows, done one after another; for one thread at a time.

    Attributes:
        words: the rows' numbers, in a row; those can be changed.
    """

    __slots__ = ("_at", "_count", "words")

    def __init__(self, rows: Sequence[Row]) -> None:
        self._count = len(rows)
        self.words = (ctypes.c_int64 * (WIDTH * self._count))(*[word for row in rows for word in row])
        self._at = ctypes.addressof(self.words)

    def run_without_gil(self) -> int:
        """Do them. What the last one gave, an int32: 0, or why the rows behind it weren't done."""
        assert native.run is not None
        return native.run(self._at, self._count)

    def run_with_gil(self) -> int:
        """The same without letting the GIL go: for a launch, which takes less time than other threads may keep it."""
        assert native.hold is not None
        return native.hold(self._at, self._count)
