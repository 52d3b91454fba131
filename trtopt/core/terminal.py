"""Text on terminals: names out of files must not steer the terminal, or look like lines of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def visible(text: str) -> str:
    """On one line, with what isn't printable written out as in Python's own `repr`: control characters, those that change the
    direction of writing, line breaks of all kinds, halves of surrogate pairs."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


class Escaped:
    """A stream on which everything is `visible`, its own line feeds aside. `stream` is the one below, for what is escaped
    already and styled: rich's tables and the line that says what is at work."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write("\n".join(map(visible, text.split("\n"))))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def escaped() -> Iterator[None]:
    """Standard output and standard error are `Escaped` meanwhile."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Escaped(before[0]), Escaped(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def styled(stream: Any) -> TextIO:
    """The stream below an `Escaped` one: what is written there must be `visible`."""
    below: TextIO = stream.stream if isinstance(stream, Escaped) else stream
    return below
