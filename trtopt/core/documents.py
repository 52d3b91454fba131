"""JSON and TOML from anywhere: read within limits, and of the types that the code behind them counts on.

Their numbers fit in 64 bits, as TOML says of integers, and are finite; no document of trtopt's is nested deeper than `DEPTH`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from trtopt.core.errors import UsageError
from trtopt.core.files import WHOLE, whole

DEPTH = 64
JSON_LIMIT, TOML_LIMIT = WHOLE, 1 << 20  # bytes of a file

Kind = TypeVar("Kind")
Given = TypeVar("Given")


class Damaged(Exception):
    """The fault of a document, and where in it."""


# msgspec's words → those of messages
_WORDS = {
    "null | ": "",
    " | null": "",
    " | ": " or ",
    "`": "",
    " of length <=": " of at most",
    " of length >=": " of at least",
    " of length": " of",
    "<=": "of at most",
    ">=": "of at least",
    ">": "above",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
}
_NEEDED = dict[str, str]()  # what it says of a text that doesn't match a pattern → what is needed


def spelled(needed: str, pattern: str) -> Meta:
    """Allow texts that match a pattern, from the beginning to the end: `Annotated[str, spelled("…", r"…")]`."""
    anchored = rf"\A(?:{pattern})\Z"
    _NEEDED[f"`str` matching regex {anchored!r}"] = needed
    return Meta(pattern=anchored)


def one_of(names: Collection[str]) -> Meta:
    return spelled(" or ".join(names), "|".join(map(re.escape, names)))


AnyText = str  # may be empty, too
Name = Annotated[str, spelled("a text that isn't blank", r"[\s\S]*\S[\s\S]*")]
TypeName = Annotated[str, spelled("a type such as float32", r"(bool|string|u?int\d+|b?float\d+)(_\w+)?")]
Digest = Annotated[str, spelled("64 hexadecimal digits", "[0-9a-f]{64}")]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Duration = Annotated[float, Meta(ge=0)]  # in seconds
Share = Annotated[float, Meta(ge=0, le=1)]


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; Damaged where it can't be read, isn't JSON, or is beyond the limits."""
    return parsed_json(_content(path, JSON_LIMIT))


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON that has been read, within `read_json`'s limits."""
    return _within_limits("JSON", json.loads, text)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file; Damaged where it can't be read, isn't TOML, or is beyond the limits."""
    content = _content(path, TOML_LIMIT)
    # editors add a mark
    return cast("dict[str, Any]", _within_limits("TOML", lambda text: tomllib.loads(text.decode("utf-8-sig")), content))


def _content(path: str | os.PathLike[str], limit: int) -> bytes:
    try:
        return whole(path, limit)
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from None


def _within_limits(language: str, parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        content = parse(text)
        _check_limits(content, "", DEPTH)
    except RecursionError:
        raise Damaged(f"nested deeper than {DEPTH} levels") from None
    except ValueError as error:  # JSONDecodeError, TOMLDecodeError and UnicodeDecodeError among them
        raise Damaged(f"not {language}: {error}") from None
    return content


def _check_limits(value: Any, where: str, depth: int) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Damaged(f"{where or 'it'} is a whole number that doesn't fit in 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise Damaged(f"{where or 'it'} is the number {value}")
    if depth < 0:
        raise RecursionError
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_limits(inner, f"{where}.{name}".strip("."), depth - 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_limits(inner, f"{where}[{number}]", depth - 1)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses as mappings, sequences as lists, paths and members of enumerations as text,
    and a number that isn't finite as its name ("inf", "-inf", "nan")."""
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    named = isinstance(value, (Path, enum.Enum)) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if named else value


class Plain:
    """A result that JSON has all fields of."""

    def to_json(self) -> dict[str, Any]:
        return dict(plain(self))


class Described:
    """A part of a result, that JSON has all fields of."""

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dict(plain(self))


def converted(value: Any, kind: type[Kind], where: str = "") -> Kind:
    """Convert a value out of a document into what it is meant to be; Damaged, with place, value and what is needed, where it
    isn't.

    Args:
        kind: a dataclass or another type that msgspec knows. What a dataclass doesn't have, as from a newer trtopt, is left
            out; what it lacks takes its default. `Annotated[type, Meta(…)]` says which values of the type are allowed.
        where: what messages call it.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise _damaged(str(error), value, where) from None


def checked(value: Any, kind: type[Kind], where: str = "") -> Kind:
    """Return the value as it is, with what `kind` (a TypedDict) doesn't name, once it is seen to be `converted`'s."""
    converted(value, kind, where)
    return cast(Kind, value)


def parsed(value: Given, parse: Callable[[Given], Kind], where: str) -> Kind:
    """Parse a value out of a document; Damaged in place of its UsageError, and with the place."""
    try:
        return parse(value)
    except (UsageError, Damaged) as error:
        raise Damaged(f"{where}: {error}") from None


def _path(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str) and value.strip():
        return Path(value)
    raise ValueError("Expected a path" if kind is Path else f"Expected {kind}")


def _damaged(said: str, value: Any, where: str) -> Damaged:
    """Put msgspec's error in words for people: its text is all that it gives of what is wrong, and where."""
    problem, _, place = said.replace("[...]", "[…]").partition(" - at ")
    in_keys = place.startswith("`key` in ")
    path = place.removeprefix("`key` in ").strip("`$")
    name = "a name in " * in_keys + ((where + path).removeprefix(".") or "it")
    if lacking := re.search("required field `(.*)`", problem):
        return Damaged(f"{name} lacks {lacking[1]!r}")
    problem = problem.removeprefix("Expected ").partition(", got ")[0]
    words = _NEEDED.get(problem) or re.sub("|".join(map(re.escape, _WORDS)), lambda found: _WORDS[found[0]], problem)
    needed = f"{'another value' if 'Invalid' in problem else words} is needed"
    try:
        for key, index in re.findall(r"\.([^.[]+)|\[(.+?)\]", path):
            value = value[int(index) if index else key]
    except (LookupError, TypeError, ValueError):  # within a mapping, whose key isn't told
        return Damaged(f"{name}: {needed}")
    shown = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
    return Damaged(f"{name}: {needed}" if in_keys else f"{name} is {shown[:60]}; {needed}")
