"""Text on terminals: names out of files must not steer the terminal, or look like lines of their own."""

from __future__ import annotations


def visible(text: str) -> str:
    """On one line, with what isn't printable written out as in Python's own `repr`: control characters, those that change the
    direction of writing, line breaks of all kinds, halves of surrogate pairs."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)
