"""Values that no honest file holds, documents with one of them in each place, and what reads such files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trtopt.core.errors import TrtoptError

DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
TERMINAL = "\x1b]0;PWNED\x07\x1b[31mred\x1b[2J\x9b31m\x85\u2028\u202eleft\u2066\r\nerror: forged\x7f"
NAN, INFINITE = float("nan"), float("inf")
NUMBERS = (True, 0, -1, 2**31, 2**63, 10**400, 0.0, -0.5, 1e308, -1e308, 1e-320, NAN, INFINITE, -INFINITE)
TEXTS = ("", " ", "..", "../../../etc/passwd", "/dev/zero", "**x/[", "a;b:c", "fp64", TERMINAL, "1x2x" * 50, "9" * 200)
OTHERS = ([], [[]], [None], [1, "a", {}], [[1, 2, 3]], {}, {"": {}}, {TERMINAL: TERMINAL}, {"a": [{"b": None}]}, DEEP)
HOSTILE: tuple[Any, ...] = (None, *NUMBERS, *TEXTS, *OTHERS)
MISSING = object()


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a document, itself aside; of a list's first two items alone."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:2])
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at a place, or without that place (`MISSING`)."""
    key, rest = path[0], path[1:]
    copy: Any = dict(document) if isinstance(document, dict) else list(document)
    if rest:
        copy[key] = changed(document[key], rest, value)
    elif value is MISSING:
        del copy[key]
    else:
        copy[key] = value
    return copy


def mutants(document: Any, count: int) -> Iterator[Any]:
    """Yield `count` documents, each with one value changed: every place in turn, with drawn values."""
    drawn, everywhere = random.Random(16), list(places(document))
    for number in range(count):
        yield changed(document, everywhere[number % len(everywhere)], drawn.choice((*HOSTILE, MISSING)))


def toml(value: Any) -> str:
    """Write a document as TOML, in inline tables; what TOML can't say (null) is left out."""
    if isinstance(value, dict):
        pairs = (f"{toml(str(key))} = {toml(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in value if item is not None)}]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"{'-' if value < 0 else ''}{hex(abs(value))}"
    return str(value).lower()  # nan and inf are TOML's own words


def toml_file(document: dict[str, Any]) -> bytes:
    lines = (f"{toml(str(key))} = {toml(item)}\n" for key, item in document.items() if item is not None)
    return "".join(lines).encode()


def answers(read: Callable[[Path], str | None], files: Iterable[Path]) -> dict[str, str]:
    """Read each file: for its name "used", "refused" or what `read` told; another error than trtopt's is raised."""
    found = {}
    for path in files:
        try:
            found[path.name] = read(path) or "used"
        except TrtoptError:  # noqa: PERF203
            found[path.name] = "refused"
    return found
