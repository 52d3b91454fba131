"""Words that messages of several rooms have in common."""

from __future__ import annotations

from collections.abc import Iterable


def first_of(names: Iterable[object], most: int = 3) -> str:
    """The first `most` names, and "…" where there are more: "a, b, c, …"."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def counted(count: int, noun: str) -> str:
    """How many of what: "1 job", "2 jobs"."""
    return f"{count} {noun}{'s' * (count != 1)}"
