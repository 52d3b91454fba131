"""Words that messages have in common, options in them, what of them a terminal gets, and names that belong together."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def first_of(names: Iterable[object], most: int = 3) -> str:
    """The first `most` names, and "…" where there are more: "a, b, c, …"."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def counted(count: int, noun: str) -> str:
    """Count things in words: "1 job", "2 jobs"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def visible(text: str) -> str:
    """On one line, with what isn't printable written out as in Python's own `repr`: control characters, those that change the
    direction of writing, line breaks of all kinds, halves of surrogate pairs. Names out of files must not steer the terminal,
    or look like lines of their own."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


NAMED = re.compile(r"`([a-z][a-z0-9_]*)=([^`]*)`")


def named(name: str, value: Any = None) -> str:
    """An option as messages name it, where the name is a variable: `batch=`, or with its value `int8=True`."""
    return f"`{name}={'' if value is None else repr(value)}`"


def spoken(text: str, flags: Mapping[str, str]) -> str:
    """The text with flags for options.

    Args:
        flags: of each option that there is, such as "-o/--output" or "--compare/--no-compare", or what stands for an argument
            ("MODEL.onnx"). What else stands between backticks is somebody else's.
    """

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in flags:
            return found[0]
        forms = flags[name].split("/")
        yes = next((form for form in forms if form.startswith("--")), "")
        if not yes:
            return " ".join(_typed(value)) if value else flags[name]
        if value in ("", "True"):
            return yes if value or forms[0] == yes else flags[name]
        return forms[-1] if value == "False" else " ".join(f"{yes} {word}" for word in _typed(value))

    return NAMED.sub(flag, text)


def keyed(text: str, others: Collection[str]) -> str:
    """The text with keys of a TOML file for options, but for `others`, which stay as they are."""

    def key(found: re.Match[str]) -> str:
        value = found[2].lower() if found[2] in ("True", "False") else found[2]
        return found[0] if found[1] in others else found[1] + (f" = {value}" if value else "")

    return NAMED.sub(key, text)


def _typed(value: str) -> list[str]:
    """A value, or those of a list or mapping, as a shell takes them; what isn't Python stands for a value (DIR)."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return [value]
    if isinstance(read, dict):
        read = [f"{name}={item}" for name, item in read.items()]
    words = [read] if isinstance(read, str) else read if isinstance(read, (list, tuple)) else [value]
    return [shlex.quote(str(word)) for word in words]
