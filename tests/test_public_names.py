"""Names that `trtopt` gives: functions, everything that they take and return, and every error to catch."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import trtopt
from trtopt.core import errors

PUBLIC = {name: getattr(trtopt, name) for name in trtopt.__all__ if not name.startswith("_")}


FOUND = [
    item
    for module in sorted(name for name in sys.modules if name.startswith("trtopt."))
    for item in vars(sys.modules[module]).items()
    if (isinstance(item[1], type) and item[1].__module__.startswith("trtopt.")) or get_args(item[1])
]
# Of trtopt, by name, and what stands for several; of a name with two meanings nothing is known.
CLASSES = {name: value for name, value in FOUND if all(other is value for also, other in FOUND if also == name)}


def _classes(annotation: Any) -> Iterator[type]:
    """trtopt's classes in an annotation, through aliases, unions and type arguments."""
    if isinstance(annotation, type) and not get_args(annotation):
        if annotation.__module__.startswith("trtopt."):
            yield annotation
        return
    for item in get_args(annotation):
        yield from _classes(item)
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "")
    for name in re.findall(r"\w+", text):
        yield from _classes(CLASSES.get(name))


def _annotated(value: Any) -> Iterator[tuple[str, Any]]:
    """Place and annotation of a function's parameters and result, or of a class's public attributes and methods.

    Not of class methods: they are other ways to make an object, such as `JobResult.of`, which the job lists use.
    """
    if inspect.isfunction(value):
        yield from ((f"{value.__qualname__}({name})", kind) for name, kind in value.__annotations__.items())
        return
    for base in value.__mro__:
        if not base.__module__.startswith("trtopt."):
            continue
        for name, kind in vars(base).get("__annotations__", {}).items():
            if not name.startswith("_"):
                yield f"{value.__name__}.{name}", kind
        for name, member in vars(base).items():
            found = getattr(member, "fget", None) or getattr(member, "func", None) or member  # of properties
            if inspect.isfunction(found) and (name == "__init__" or not name.startswith("_")):
                yield from ((f"{value.__name__}.{name}: {place}", kind) for place, kind in _annotated(found))


def _reached(value: Any) -> dict[type, str]:
    """Each class that can be reached from a public function or class, and the first place that names it."""
    places: dict[type, str] = {}
    pending = [value]
    wrapped = inspect.unwrap(value)
    if wrapped is not value:  # takes the keywords of an object that its caller never sees
        pending += [found for _, kind in _annotated(wrapped) for found in _classes(kind)]
    while pending:
        for place, kind in _annotated(pending.pop()):
            for found in _classes(kind):
                if found not in places and not found.__name__.startswith("_"):
                    places[found] = place
                    pending.append(found)
    return places


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_what_a_function_or_class_takes_and_gives_is_public(name: str) -> None:
    public = {value for value in PUBLIC.values() if isinstance(value, type)}
    lacking = {f"{found.__module__}.{found.__name__}": place for found, place in _reached(PUBLIC[name]).items()
               if found not in public}  # fmt: skip
    assert lacking == {}, "export these from trtopt/__init__.py"


def test_every_error_is_public() -> None:
    tree = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TrtoptError)
    }
    assert len(tree) >= 20
    assert {name: PUBLIC.get(name) for name in tree} == tree
    assert [name for name, value in tree.items() if not value.__doc__] == []


def test_python_finds_each_name_where_type_checkers_do() -> None:
    stub = ast.parse(Path(str(trtopt.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [(item.module, alias) for item in stub.body if isinstance(item, ast.ImportFrom) for alias in item.names]
    assert {alias.asname: module for module, alias in imports} == trtopt._HOME
    assert all(alias.name == alias.asname for _, alias in imports) and len(imports) == len(trtopt._HOME) > 100
    assert trtopt.__all__ == sorted(trtopt._HOME)
