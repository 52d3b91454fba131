"""Values that no honest file holds, and documents with one of them in each place."""

from __future__ import annotations

import dataclasses
import json
import random
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from trtopt.core.documents import AnyNumber, AnyText, Rule
from trtopt.core.errors import UsageError

DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]
TERMINAL = "\x1b]0;PWNED\x07\x1b[31mred\x1b[2J\x9b31m\x85\u2028\u202eleft\u2066\r\nerror: forged\x00\x7f"
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    5000,
    0.0,
    -0.5,
    1e308,
    -1e308,
    1e-320,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "..",
    "../../../../etc/passwd",
    "/dev/zero",
    "/etc/passwd",
    "x" * 5000,
    "**x/[",
    "a;b:c",
    "nul\x00nul",
    TERMINAL,
    "\ud800",
    "fp64",
    "1x2x" * 300,
    "9" * 5000,
    [],
    [[]],
    [None],
    [1, "a", {}],
    [[1, 2, 3]],
    {},
    {"": {}},
    {TERMINAL: TERMINAL},
    {"a": [{"b": None}]},
    DEEP,
)
MISSING = object()


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a document, itself aside; of a list's first two items alone."""
    items: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list):
        items = list(enumerate(document))[:2]
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place, or without that place (`MISSING`)."""
    key, rest = path[0], path[1:]
    copy: Any = dict(document) if isinstance(document, dict) else list(document)
    if rest:
        copy[key] = changed(document[key], rest, value)
    elif value is MISSING:
        del copy[key]
    else:
        copy[key] = value
    return copy


def mutants(document: Any, count: int, *, seed: int = 16) -> Iterator[tuple[str, Any]]:
    """What was done, and the document with it done: `count` times, every place in turn, with drawn values."""
    drawn, everywhere = random.Random(seed), list(places(document))
    for number in range(count):
        path = everywhere[number % len(everywhere)]
        value = drawn.choice((*HOSTILE, MISSING))
        said = (
            "nothing"
            if value is MISSING
            else f"{type(value).__name__} {ascii(value)[:40]}"
            if value is not DEEP
            else "deep"
        )
        yield f"{'.'.join(map(ascii, path))} = {said}", changed(document, path, value)


def toml(value: Any) -> str:
    """A document as TOML, in inline tables; what TOML can't say (null) is left out."""
    if isinstance(value, dict):
        pairs = (f"{toml(str(key))} = {toml(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in value if item is not None)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return f"{'-' if value < 0 else ''}{hex(abs(value))}" if abs(value) >= 2**63 else str(value)
    return str(value)  # nan and inf are TOML's own words


def toml_file(document: dict[str, Any]) -> bytes:
    lines = (f"{toml(str(key))} = {toml(item)}\n" for key, item in document.items() if item is not None)
    return "".join(lines).encode("utf-8", "surrogatepass")


# Values of the right type that are impossible -----------------------------------------------------------------------------

RIGHT_TYPE: dict[Any, tuple[Any, ...]] = {
    int: (-1, 0, 7, 10**4, 2**40, -(2**40)),
    float: (-1, 7, 0.5, -0.5, 1e308, -1e-300),
    str: ("", " ", "text", "-1", "..", "9" * 300, "a\0b"),
    list: ([], [1] * 9999),
    dict: ({"": 1}, {}),
}
FREE = {get_args(kind)[1] for kind in (AnyText, AnyNumber)}


def impossible(
    document: Any, schema: Any, path: tuple[Any, ...] = (), rules: Sequence[Rule] = (), *, but: Collection[str] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Of every value in a document of a schema, `but` some fields: (path, an impossible one), as its rules say; of a list's
    items the first. A number or text without a rule, a rule that refuses nothing, and a record or list that the document lacks
    fail."""
    origin, inner = get_origin(schema), get_args(schema)
    said = f"{path}: {schema}"
    if schema is Any:
        return
    if origin is Annotated:
        shapes = [item for item in inner[1:] if not isinstance(item, Rule)]
        more = [item for item in inner[1:] if isinstance(item, Rule)]
        yield from impossible(document, shapes[0] if shapes else inner[0], path, [*rules, *more])
    elif origin in (Union, types.UnionType):
        for kind in inner:
            if kind is not type(None) and (document is None or _holds(kind) == isinstance(document, (dict, list))):
                yield from impossible(document, kind, path, rules)
    elif dataclasses.is_dataclass(schema) or is_typeddict(schema):
        hints = get_type_hints(schema, include_extras=True)
        assert isinstance(document, dict), f"{said} isn't in the document"
        for name in set(hints) - set(but):
            yield from impossible(document.get(name), hints[name], (*path, name))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from _refused(dict, path, rules, said) if rules else ()
        keys = get_args(inner[0])[1:]
        for bad in [key for key in RIGHT_TYPE[str] if not _allowed(key, keys)] if keys and document else ():
            yield path, dict.fromkeys([bad], next(iter(document.values())))
        assert document or inner[1] is Any, f"{said} isn't in the document"
        for name, value in document.items() if document else ():
            yield from impossible(value, inner[1], (*path, name))
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        yield from _refused(list, path, rules, said) if rules else ()
        assert document or inner[0] is Any, f"{said} has no item"
        yield from impossible(document[0], inner[0], (*path, 0)) if document else ()
    elif schema in (int, float, str):
        assert rules, f"{said} has no rule for its values"
        yield from _refused(schema, path, rules, said) if FREE.isdisjoint(rules) else ()
    elif isinstance(schema, type) and schema is not bool:  # an enumeration
        yield path, "text"


def _holds(kind: Any) -> bool:
    """Whether values of this kind hold others."""
    if get_origin(kind) is Annotated:
        return any(map(_holds, get_args(kind)))
    is_record = dataclasses.is_dataclass(kind) and not isinstance(kind, Rule)
    return get_origin(kind) is not None or is_record or is_typeddict(kind)


def _refused(kind: type, path: tuple[Any, ...], rules: Sequence[Rule], said: str) -> Iterator[Any]:
    found = [value for value in RIGHT_TYPE[kind] if not _allowed(value, rules)]
    assert found, f"{said}: its rule refuses nothing"
    for value in found:
        yield path, value


def _allowed(value: Any, rules: Sequence[Rule]) -> bool:
    try:
        return all(rule.holds(value) for rule in rules)
    except UsageError:
        return False
