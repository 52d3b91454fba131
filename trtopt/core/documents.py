"""JSON and TOML from anywhere: read within limits, and of the types that the code behind them counts on.

Their numbers fit in 64 bits, as TOML says of integers, and are finite; deeper nesting than `DEPTH` or more values than `VALUES`
are in no document of trtopt's, and would cost stack, time or memory.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import functools
import json
import math
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from trtopt.core.errors import UsageError
from trtopt.core.files import WHOLE, whole

DEPTH = 64
VALUES = 4_000_000  # of a JSON document; each takes at most some 250 bytes
JSON_LIMIT, TOML_LIMIT = WHOLE, 1 << 20  # bytes of a file
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
# So many dotted parts of a key; tomllib takes the square of their number in time.
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEPTH}}}""")

Kind = TypeVar("Kind")


class Damaged(Exception):
    """What is wrong with a document, and where in it."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which values of a type a field may have: `Annotated[float, Rule("0 or more", lambda value: value >= 0)]`.

    Attributes:
        needed: the allowed values, for messages.
        holds: whether a value, of the right type already, is one of them; a UsageError that it raises says why not.
    """

    needed: str
    holds: Callable[[Any], object] = lambda _: True


def least(number: int) -> Rule:
    return Rule(f"{number} or more", lambda value: value >= number)


def one_of(names: Collection[Any]) -> Rule:
    return Rule(" or ".join(map(str, names)), lambda value: value in names)


def read_by(parse: Callable[[Any], object]) -> Rule:
    """What `parse` takes; the rest is refused in the words of its UsageError."""
    return Rule("", lambda value: parse(value) is not None)


def spelled(needed: str, pattern: str) -> Rule:
    return Rule(needed, lambda value: re.fullmatch(pattern, value))


AnyText = Annotated[str, Rule("a text")]  # may be empty, too
AnyNumber = Annotated[float, Rule("a number")]
Name = Annotated[str, Rule("a text that isn't blank", lambda value: value.strip())]
TypeName = Annotated[str, spelled("a type such as float32", r"(bool|string|u?int\d+|b?float\d+)(_\w+)?")]
Digest = Annotated[str, spelled("64 hexadecimal digits", "[0-9a-f]{64}")]
Count = Annotated[int, least(0)]
Positive = Annotated[int, least(1)]
Duration = Annotated[float, least(0)]  # in seconds
Share = Annotated[float, Rule("0 to 1", lambda value: 0 <= value <= 1)]


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds.

    Raises:
        Damaged: it can't be read, isn't JSON, or is beyond the limits.
    """
    return parsed_json(read_document(path))


def read_document(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a JSON file.

    Raises:
        Damaged: it can't be read, or is beyond the limit.
    """
    return _content(path, JSON_LIMIT)


def parsed_json(text: str | bytes) -> Any:
    """As `read_json`, of JSON that has been read."""
    marks = ("[", "{", ",") if isinstance(text, str) else (b"[", b"{", b",")
    if sum(map(text.count, marks)) > VALUES:  # type: ignore[arg-type]
        raise Damaged(f"more than {VALUES} values")
    try:
        content = json.loads(text)
    except RecursionError:
        raise Damaged(f"nested deeper than {DEPTH} levels") from None
    except ValueError as error:
        raise Damaged(f"not JSON: {error}") from None
    return _bounded(content)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a TOML file holds.

    Raises:
        Damaged: it can't be read, isn't TOML, or is beyond the limits.
    """
    try:
        text = _content(path, TOML_LIMIT).decode("utf-8-sig")  # editors add a mark
        if _LONG_KEY.search(text):
            raise Damaged(f"nested deeper than {DEPTH} levels")
        content = tomllib.loads(text)
    except RecursionError:
        raise Damaged(f"nested deeper than {DEPTH} levels") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError among them
        raise Damaged(f"not TOML: {error}") from None
    return cast("dict[str, Any]", _bounded(content))


def _content(path: str | os.PathLike[str], limit: int) -> bytes:
    try:
        return whole(path, limit)
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from None


def _bounded(content: Any) -> Any:
    """The same, once all of it is seen to be within the limits; by levels, not by recursion."""
    level = [("", content)]
    for _ in range(DEPTH + 1):
        for where, value in level:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise Damaged(f"{where or 'it'} is a whole number that doesn't fit in 64 bits")
            if isinstance(value, float) and not math.isfinite(value):
                raise Damaged(f"{where or 'it'} is the number {value}")
        level = [
            item
            for where, value in level
            for item in (
                ((f"{where}.{name}".strip("."), inner) for name, inner in value.items())
                if isinstance(value, dict)
                else ((f"{where}[{number}]", inner) for number, inner in enumerate(value))
                if isinstance(value, list)
                else ()
            )
        ]
        if not level:
            return content
    raise Damaged(f"nested deeper than {DEPTH} levels")


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses as mappings, sequences as lists, paths and members of enumerations as text, and a
    number that isn't finite as its name ("inf", "-inf", "nan")."""
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
    """The same of what is a part of results."""

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dict(plain(self))


def path_in(folder: Path, text: str) -> Path:
    """A path that a document in `folder` names, there or not.

    Raises:
        Damaged: no system could have such a path.
    """
    path = folder / text
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise Damaged(f"{text[:40]!r}… can't be a path: {error.strerror}") from None
    except ValueError as error:  # a NUL
        raise Damaged(f"{text[:40]!r} can't be a path: {error}") from None
    return path


def converted(value: Any, kind: type[Kind], where: str = "") -> Kind:
    """A value out of a document as what it is meant to be.

    Args:
        kind: a dataclass or TypedDict, of such and of plain JSON's types, sequences, mappings, literals, enumerations and
            `X | Y`. What a dataclass doesn't have, as from a newer trtopt, is left out; what it lacks takes its default. An
            `Annotated[type, Shape]` is checked as `Shape` and stays as it is; `Annotated[type, Rule(…)]` says which values
            of the type are allowed.
        where: what messages call it.

    Raises:
        Damaged: a value of another type, or that its rule doesn't allow; its place, the value and what is needed are named.
    """
    return cast(Kind, _converted(value, kind, where))


def _converted(value: Any, kind: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _annotated(value, inner, where)
    if origin in (Union, types.UnionType):
        return _one_of(value, inner, where)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        allowed = inner if origin is Literal else tuple(item.value for item in kind)
        if not isinstance(value, str) or value not in allowed:
            raise _other(value, " or ".join(map(str, allowed)), where)
        return value if origin is Literal else kind(value)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        fixed = origin is tuple and inner[-1] is not Ellipsis
        if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(inner)):
            raise _other(value, f"a list of {len(inner)}" if fixed else "a list", where)
        kinds = inner if fixed else (inner[0],) * len(value)
        items = [_converted(item, part, f"{where}[{number}]") for number, (item, part) in enumerate(zip(value, kinds))]
        return tuple(items) if origin is tuple else items
    if origin is not None or dataclasses.is_dataclass(kind) or is_typeddict(kind):
        if not isinstance(value, dict):
            raise _other(value, "a mapping", where)
        if origin is not None:
            if inner[0] is not str:
                for name in value:
                    _converted(name, inner[0], f"a name in {where or 'it'}")
            return {name: _converted(item, inner[1], f"{where}.{name}".strip(".")) for name, item in value.items()}
        return _record(value, kind, where)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise _other(value, _WORDS[kind], where)
    return float(value) if kind is float else value


def _annotated(value: Any, inner: Sequence[Any], where: str) -> Any:
    """`inner`: the type and, in any order, rules for its values and what a value that stays as it is is checked as."""
    rules = [item for item in inner[1:] if isinstance(item, Rule)]
    shapes = [item for item in inner[1:] if not isinstance(item, Rule)]
    found = _converted(value, shapes[0] if shapes else inner[0], where)
    for rule in rules:
        try:
            if rule.holds(found):
                continue
        except UsageError as error:
            raise Damaged(f"{where or 'it'}: {error}") from None
        raise _other(value, rule.needed, where)
    return value if shapes else found


def _one_of(value: Any, kinds: Sequence[Any], where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    problem = Damaged()
    for kind in kinds:
        if kind is not type(None):
            try:
                return _converted(value, kind, where)
            except Damaged as error:
                problem = error
    raise problem


def _record(value: Mapping[str, Any], kind: Any, where: str) -> Any:
    hints = _hints(kind)
    found = {
        name: _converted(value[name], hint, f"{where}.{name}".strip("."))
        for name, hint in hints.items()
        if name in value
    }
    if is_typeddict(kind):
        needed = kind.__required_keys__
    else:
        fields = dataclasses.fields(kind)
        none = dataclasses.MISSING
        needed = {item.name for item in fields if item.default is none and item.default_factory is none}
    if lacking := sorted(needed - set(found)):
        raise Damaged(f"{where or 'it'} lacks {lacking[0]!r}")
    return {**value, **found} if is_typeddict(kind) else kind(**found)


@functools.lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _other(value: Any, needed: str, where: str) -> Damaged:
    said = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
    return Damaged(f"{where or 'it'} is {said[:60]}; {needed} is needed")
