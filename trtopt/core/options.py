"""Requests: what a stage is asked for, in one frozen dataclass. Its fields are the keywords of the stage's public function and
the options of its command, so an option's name, type, default and help stand in one place.

    @dataclass(frozen=True)
    class CheckRequest:
        model: str = field(metadata=about(help="An ONNX model.", metavar="MODEL.onnx"))
        _: KW_ONLY
        backend: str = option("auto", help="auto, tensorrt or rtx.")

    @taking(CheckRequest)
    def check(request: CheckRequest) -> CheckReport: ...  # is called as check("m.onnx", backend="rtx")

Messages name an option as Python takes it, between backticks: `min_snr=` or, with a value, `backend='rtx'`. `spoken` puts the
flags of a command in their place: --min-snr, --backend rtx.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import numbers
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from inspect import Signature, signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from trtopt.core import operators
from trtopt.core.errors import UsageError
from trtopt.core.kept import ENGINE as ENGINE, FILE as FILE, FOLDER as FOLDER, Call, keeping
from trtopt.core.removed import went
from trtopt.core.words import NAMED, keyed as keyed, named as named, spoken as spoken

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ABOUT = "trtopt"  # the key of a field's metadata


@dataclass(frozen=True)
class About:
    """Description of an option on the command line, and how its text is read.

    Attributes:
        help: a line; empty: the option isn't on the command line.
        metavar: what stands for the value in the help.
        typed: what the command line makes of the text, where neither default nor annotation say (`typed_as`); of a path that
            may be a word, str.
        short: one-letter form, such as "-o"; an option without a default is a positional argument unless it has one.
        needed: the command can't do without it, though the function can.
        positional: it is an argument of the command though it has a default.
        least: the smallest number that it may be, or hold; None: any.
        group: the heading that its command's help has above it and all that follow, until the next one.
        beside: the options without any of which it has no effect, as messages name them; of a list, with what it has to hold.
        writes: it names what is written; its name's endings then: `FILE`, `FOLDER`, or `ENGINE` with what lies beside.
        adds_to: it names an input, and the call adds to a file beside it: the endings of that.
    """

    help: str = ""
    metavar: str | None = None
    typed: Any = None
    short: str = ""
    needed: bool = False
    positional: bool = False
    least: int | None = None
    beside: str = ""
    writes: tuple[str, ...] = ()
    adds_to: tuple[str, ...] = ()
    group: str = ""


def about(**given: Any) -> dict[str, About]:
    """Metadata of a field without a default: `field(metadata=about(help=…))`; `About` has the names."""
    return {ABOUT: About(**given)}


def option(default: Any, **given: Any) -> Any:
    """A field with a default; `About` has the further names. `()` is the default of options that may be repeated."""
    return field(default=default, metadata=about(**given))


def options(request: type[Any]) -> dict[str, tuple[Field[Any], About]]:
    """Name → field and description of everything that a request holds, in order."""
    return {item.name: (item, item.metadata.get(ABOUT, About())) for item in fields(request)}


def typed_as(item: Field[Any], said: About) -> Any:
    """Return what the command line makes of an option's text: Path, str, int, float, bool or a list of these."""
    if said.typed or item.default == ():
        return said.typed or list[str]
    if item.default is not None and item.default is not MISSING:
        return type(item.default)
    kinds = str(item.type).split(" | ")
    return Path if "os.PathLike[str]" in kinds else next(kind for kind in (str, int, float) if kind.__name__ in kinds)


def flag_of(item: Field[Any]) -> str:
    """Return an option's flag; one that is on by default has a second form."""
    flag = "--" + item.name.replace("_", "-")
    return f"{flag}/--no-{flag[2:]}" if item.default is True else flag


def preprocess_words(given: Any) -> list[str]:
    """Return what to type for a `preprocess` of a call: a preset, a file, or a mapping of keys."""
    keys = given if isinstance(given, Mapping) else {} if given is None else {"preset": given}
    words = list[str]()
    for name, value in keys.items():
        mark = "x" if name == "size" else ","
        words.append("--preprocess" if name == "preset" else f"--{name}")
        words.append(mark.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return words


def without(request: R, *names: str) -> R:
    """The request with these options as if they hadn't been given."""
    found = {item.name: item.default for item in fields(request) if item.name in names}  # type: ignore[arg-type]
    assert len(found) == len(names) and MISSING not in found.values(), names
    return replace(request, **found)  # type: ignore[type-var]


def call_of(request: Any) -> Call:
    """Return what a request reads and writes."""
    reads, targets, added_to = dict[str, Any](), list[tuple[str, str, str]](), set[Path]()
    for name, (_, said) in options(type(request)).items():
        value = getattr(request, name)
        given = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
        if not said.writes:
            reads[name] = value
            added_to |= {Path(given + ending) for ending in said.adds_to if given is not None}
        elif given not in (None, "none"):
            targets += [(name, given, ending) for ending in said.writes]
    return Call(reads, targets, frozenset(added_to))


def taking(request: Callable[P, R], *, writes: bool = True) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Turn a function of a request into one of the request's fields, as positional arguments and keywords.

    It raises TypeError for an unknown name (near ones are told), and UsageError for a value of another type or too small, for
    an option that has no effect beside the others, and for a file to write that is one of those to read
    (`trtopt.core.kept`); not with `writes=False`, for what names nothing of the user's.
    """
    known = signature(request)

    def made(work: Callable[[R], T]) -> Callable[P, T]:
        @functools.wraps(work)
        def public(*arguments: P.args, **keywords: P.kwargs) -> T:
            try:
                known.bind(*arguments, **keywords)
            except TypeError as error:
                wrong = next((name for name in keywords if name not in known.parameters), "")
                near = difflib.get_close_matches(wrong, known.parameters, 1) if wrong else []
                hint = f"; {went(wrong)}" if went(wrong) else f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{work.__name__}(): {error}{hint}") from None
            made_request = fitting(request(*arguments, **keywords))
            for problem in idle(made_request).values():
                raise UsageError(problem)
            operators.load(made_request)
            with keeping(call_of(made_request)) if writes else contextlib.nullcontext():
                return work(made_request)

        result = work.__annotations__.get("return", Signature.empty)
        public.__signature__ = known.replace(return_annotation=result)  # type: ignore[attr-defined]
        public.__annotations__ = {name: item.annotation for name, item in known.parameters.items()} | {"return": result}
        return public

    return made


def typed(work: Callable[P, T]) -> Callable[P, T]:
    """The function, which raises UsageError for an argument of another type than it says; classes and functions aren't looked
    at."""
    known = signature(work)

    @functools.wraps(work)
    def public(*arguments: P.args, **keywords: P.kwargs) -> T:
        if gone := next((went(name) for name in keywords if name not in known.parameters and went(name)), ""):
            raise TypeError(gone)
        with contextlib.suppress(TypeError):  # which the call itself will raise
            for name, value in known.bind(*arguments, **keywords).arguments.items():
                item = known.parameters[name]
                plain = item.kind is not item.VAR_KEYWORD and isinstance(item.annotation, str)
                if plain and value is not item.default:
                    _refuse_other(name, value, item.annotation)
        return work(*arguments, **keywords)

    return public


def fitting(request: R) -> R:
    """The request; one text or path in place of what may be repeated made a list of it, and an iterator for a list, too.
    UsageError where a value isn't of the field's type or too small, or a path is empty."""
    changes = {}
    for name, (item, said) in options(request).items():  # type: ignore[arg-type]
        value = getattr(request, name)
        path = Path in (said.typed, *get_args(said.typed)) or "os.PathLike[str]" in str(item.type)
        for text in value if isinstance(value, (list, tuple)) else (value,):
            if path and isinstance(text, (str, os.PathLike)) and not os.fspath(text):
                raise UsageError(f"{named(name)} is '': a path is needed")
        if item.default == () and isinstance(value, (str, os.PathLike)):
            changes[name] = value = (value,)
        elif isinstance(value, Iterator) and "Sequence" in str(item.type):
            changes[name] = value = tuple(value)
        if value is item.default:
            continue
        _refuse_other(name, value, str(item.type))
        for number in () if said.least is None else value if isinstance(value, Sequence) else (value,):
            if number is not None and number < said.least:
                raise UsageError(f"{named(name)} is {number}; at least {said.least} is needed")
    return replace(request, **changes) if changes else request  # type: ignore[type-var]


def idle(request: Any) -> dict[str, str]:
    """Name → what is wrong, of each option that is given and has no effect, as none is that it belongs to (`About.beside`)."""
    known = options(type(request))
    problems = {}
    for name, (item, said) in known.items():
        value = getattr(request, name)
        as_default = value is item.default or (isinstance(value, (int, str, float)) and value == item.default)
        if said.beside and not as_default:
            others = [(getattr(request, found[1]), found[2]) for found in NAMED.finditer(said.beside)]
            if not any(_is_on(other, wanted) for other, wanted in others):
                this = named(name, value if isinstance(value, bool) else None)
                add = f"add {'one of them' if len(others) > 1 else 'that'}"
                problems[name] = f"{this} has no effect without {said.beside}: {add}, or drop it"
    return problems


def _is_on(value: Any, wanted: str) -> bool:
    """Tell if an option is given, and not as False; a list with what is wanted of it."""
    if value is None or value is False or (isinstance(value, (list, tuple)) and not value):
        return False
    return not wanted.startswith("[") or set(ast.literal_eval(wanted)) <= set(value)


def _refuse_other(name: str, value: Any, written: str) -> None:
    """Raise UsageError for a value of another type than the annotation's, where that is one that can be told."""
    kinds = _kinds(written)
    if not any(fits(value) for _, fits in kinds):
        words = sorted((word for word, _ in kinds if word), key=lambda word: word.startswith("a list"))
        needed = " or ".join(word for word in words if word != "a text" or "a path" not in words)
        shown = repr(value) if isinstance(value, (str, numbers.Number)) else type(value).__name__
        hint = next((f": {_INSTEAD[base.__name__]}" for base in type(value).__mro__ if base.__name__ in _INSTEAD), "")
        raise UsageError(f"{named(name)} is {shown}; {needed} is needed{hint}")


# Class of a value → what is right in its place.
_INSTEAD = {
    "Module": "trtopt.export(module, 'model.onnx', inputs=…) makes an ONNX model of it",
    "ExportedProgram": "its .module() is one, with the sizes that it was exported with",
    "CalibrateResult": "its .table is one",
}


# Types of fields, as they are written ---------------------------------------------------------------------------------------

_Allowed = tuple[str, Callable[[Any], bool]]  # words for what an annotation allows, and if a value is that


def _whole(value: Any) -> bool:
    try:
        return -(2**63) <= operator.index(value) < 2**63
    except TypeError:
        return False


def _is_one(name: str) -> Callable[[Any], bool]:
    return lambda value: any(kind.__name__ == name for kind in type(value).__mro__)


# Scalars of other libraries (NumPy's) count as those of Python: by what they can do, since this module imports none; classes by
# their names.
_PLAIN: dict[str, _Allowed] = {
    "int": ("a whole number", _whole),
    "float": ("a number", lambda value: isinstance(value, numbers.Real) or _whole(value)),
    "bool": ("True or False", lambda value: type(value).__name__ in ("bool", "bool_") or _whole(value)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "os.PathLike[str]": ("a path", lambda value: isinstance(value, (str, os.PathLike))),
    "GivenProfile": ("a mapping of inputs to their shapes", lambda value: isinstance(value, Mapping)),
    "Runner": ("function", lambda value: callable(value) and not _is_one("Module")(value)),  # from arrays to arrays
    "None": ("", lambda value: value is None),
    "Reporter": ("a trtopt.Reporter", _is_one("Reporter")),
    "Session": ("a trtopt.Session", _is_one("Session")),
    "Table": ("Table", _is_one("Table")),
    "ModelProto": ("ModelProto", _is_one("ModelProto")),
    "Module": ("torch.nn.Module", _is_one("Module")),
}
_LISTS = {"Iterable": (str, bytes, Mapping), "Sequence": (str, bytes, Mapping, Set, Iterator)}  # and what is none


@functools.cache
def _kinds(written: str) -> list[_Allowed]:
    """Return each alternative of an annotation; a value is of each that isn't looked at."""
    kind = ast.parse(written, mode="eval").body
    if isinstance(kind, ast.BinOp):
        return _kinds(ast.unparse(kind.left)) + _kinds(ast.unparse(kind.right))
    if written in _PLAIN or not isinstance(kind, ast.Subscript):
        name = written.rpartition(".")[2]
        return [_PLAIN.get(written) or _PLAIN.get(name) or (name, lambda value: True)]
    outer = ast.unparse(kind.value)
    within = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    inner = [_kinds(ast.unparse(item)) for item in within]
    words = [" or ".join(word for word, _ in item) for item in inner]

    def each(values: Iterable[Any], kinds: list[_Allowed]) -> bool:
        return all(any(fits(value) for _, fits in kinds) for value in values)

    def mapped(value: Any) -> bool:
        return isinstance(value, Mapping) and each(value, inner[0]) and each(value.values(), inner[1])

    def listed(value: Any) -> bool:
        items = value if isinstance(value, Collection) else ()  # what gives its items only once isn't looked into
        return isinstance(value, Iterable) and not isinstance(value, _LISTS[outer]) and each(items, inner[0])

    if outer == "Mapping":
        return [(f"a mapping of {words[0]} to {words[1]}", mapped)]
    return [(f"a list, each {words[0]},", listed if outer in _LISTS else lambda value: True)]
