"""Old scripts and command lines: what of them TensorRT 10 and 11 dropped, and trtopt's way. Nothing of them is run."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtopt.core.documents import converted, read_toml
from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file, whole
from trtopt.diagnosis.drafts import Option
from trtopt.diagnosis.lines import command_lines, wrapped
from trtopt.diagnosis.old_commands import is_command, translated

LARGEST = 16 << 20  # bytes of a script
_LIBRARIES = ("tensorrt", "polygraphy", "torch2trt")
_OWN = ("self", "cls", "args", "opt", "opts", "params", "parser")  # names whose attributes are the script's own


@dataclass(frozen=True)
class Replacement:
    """A name or an option of the old way.

    Attributes:
        what: as it stands there, such as "BuilderFlag.FP16" or "--fp16".
        line: of the script; 0: there is no script.
        gone: the first TensorRT without it, such as "TensorRT 11"; empty: all have it.
        instead: trtopt's way, or why there is none.
        lacking: trtopt has nothing for it.
    """

    what: str
    line: int
    gone: str
    instead: str
    lacking: bool


@dataclass(frozen=True)
class Migration:
    """What became of a script or a command.

    Attributes:
        source: the script's path, or the command.
        commands: trtopt's, in the order to type them.
        replaced: names and options that are to be replaced, in their order.
    """

    source: str
    commands: tuple[str, ...]
    replaced: tuple[Replacement, ...]

    @property
    def ok(self) -> bool:
        """Everything in it works on TensorRT 11, too, and has its counterpart."""
        return not any(item.gone or item.lacking for item in self.replaced)

    @property
    def lines(self) -> Iterator[str]:
        """For a terminal."""
        if self.commands:
            yield "with trtopt:"
        for command in self.commands:
            yield from command_lines(command)
        if self.commands and self.replaced:
            yield ""
        for item in self.replaced:
            where = f"line {item.line}: " if item.line else ""
            since = f" (gone in {item.gone})" if item.gone else ""
            yield from wrapped(f"{where}{item.what}{since}")
            yield from wrapped(f"{'no equivalent: ' * item.lacking}{item.instead}", start=4)
        if not self.replaced and not self.commands:
            yield "nothing in it is of TensorRT's old ways"


@dataclass(frozen=True)
class _Removed:
    """A row of removed.toml."""

    names: tuple[str, ...]
    gone: int
    instead: str
    library: str = "tensorrt"
    exact: bool = False
    stored: bool = False
    lacking: bool = False
    keywords: tuple[str, ...] = ()


@functools.cache
def removed() -> tuple[_Removed, ...]:
    """What TensorRT has dropped, from removed.toml."""
    content = read_toml(Path(__file__).with_name("removed.toml"))
    return tuple(converted(row, _Removed) for row in content["removed"])


def migrated(source: str) -> Migration:
    """What of a script or a command is to be replaced.

    Raises:
        UsageError: no such file, or no command that is known here.
    """
    text = source.strip()
    is_file = os.path.isfile(text)  # noqa: PTH113 (pathlib's raises for a long command, which is no name of a file)
    if "\n" not in text and (is_file or re.fullmatch(r"\S+\.(py|sh|bash)", text)):
        return _script(existing_file(text, "the script"))
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"`migrate=` {text!r} can't be read as a command: {error}") from None
    commands, options = translated(words)
    return Migration(text, tuple(commands), tuple(_of_option(option, 0) for option in options))


def _of_option(option: Option, line: int) -> Replacement:
    generation = f"TensorRT {option.gone}" if option.gone else ""
    return Replacement(option.what, line, generation, option.instead, option.lacking)


def _script(path: Path) -> Migration:
    content = whole(path, LARGEST)
    if path.suffix != ".py" and not content.startswith(b"#!/usr/bin/env python"):
        text = content.decode("utf-8", "replace")
        return _with_commands(str(path), list(_shell_commands(text)), [])
    try:
        tree = ast.parse(content, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"`migrate=` {path} isn't Python that can be read: {error}") from None
    replacements = [*_python(tree)]
    constants = [(item.value, item.lineno) for item in ast.walk(tree) if isinstance(item, ast.Constant)]
    commands = [
        (words, line + number - 1)
        for text, line in constants
        if isinstance(text, str) and ("trtexec" in text or "polygraphy" in text)
        for words, number in _shell_commands(text)
    ]
    return _with_commands(str(path), commands, replacements)


def _with_commands(source: str, old: list[tuple[list[str], int]], replacements: list[Replacement]) -> Migration:
    commands: list[str] = []
    for words, line in old:
        try:
            translations, options = translated(words)
        except UsageError as error:
            replacements.append(Replacement(shlex.join(words), line, "", str(error), True))
            continue
        commands += translations
        replacements += [_of_option(option, line) for option in options]
    by_line = sorted(dict.fromkeys(replacements), key=lambda item: item.line)
    return Migration(source, tuple(dict.fromkeys(commands)), tuple(by_line))


def _shell_commands(text: str) -> Iterator[tuple[list[str], int]]:
    """Commands of trtexec and polygraphy in a shell's text, and their lines."""
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if pending else number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        for part in re.split(r"&&|\|\||;(?=\s|$)|\|", pending):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue
            words = list(itertools.takewhile(lambda word: not re.match(r"(\d|&)?>", word), words))
            if is_command(words) and len(words) > 1:
                yield words, first
        pending = ""


# Python ------------------------------------------------------------------------------------------------------------------


def _python(tree: ast.Module) -> list[Replacement]:
    libraries, aliases = _imports(tree), _aliases(tree)
    nodes = list(ast.walk(tree))
    references = [item for item in nodes if isinstance(item, (ast.Attribute, ast.Name))]
    calls = {id(item.func): {word.arg for word in item.keywords} for item in nodes if isinstance(item, ast.Call)}
    replacements = []
    for item in sorted(references, key=lambda item: (item.lineno, item.end_col_offset or 0)):
        first, *members = _chain(item)
        chain, stored = [aliases.get(first, first), *members], isinstance(item.ctx, ast.Store)
        rows = [
            (name, row)
            for row in removed()
            if row.library in libraries
            and (not row.keywords or calls.get(id(item), set()) & set(row.keywords))
            and (stored or not row.stored)
            and (name := _matched(row, chain, libraries[row.library])) is not None
        ]
        if rows:  # a member's name may be of two classes: what it is asked of tells, else the later generation's
            name, row = max(rows, key=lambda pair: (_is_of(pair[0], chain), pair[1].gone))
            replacements.append(Replacement(name, item.lineno, f"TensorRT {row.gone}", row.instead, row.lacking))
    return replacements


def _is_of(name: str, chain: list[str]) -> bool:
    """Whether "ICudaEngine.num_bindings" is what `engine.num_bindings` means."""
    owner = name.partition(".")[0].lower()
    return len(chain) > 1 and owner.endswith(chain[-2].lower().strip("_"))


def _imports(tree: ast.Module) -> dict[str, set[str]]:
    """Library → names by which the script knows it, or that it took from it."""
    names: dict[str, set[str]] = {}
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            for alias in item.names:
                if (top := alias.name.partition(".")[0]) in _LIBRARIES:
                    names.setdefault(top, set()).add(alias.asname or top)
        elif isinstance(item, ast.ImportFrom) and not item.level:
            top = (item.module or "").partition(".")[0]
            if top in _LIBRARIES:
                names.setdefault(top, set()).update(alias.name for alias in item.names)
    return names


def _aliases(tree: ast.Module) -> dict[str, str]:
    """What the script calls a name that it took from a library otherwise → that name."""
    return {
        alias.asname: alias.name
        for item in ast.walk(tree)
        if isinstance(item, ast.ImportFrom) and not item.level and (item.module or "").partition(".")[0] in _LIBRARIES
        for alias in item.names
        if alias.asname
    }


def _chain(item: ast.AST) -> list[str]:
    """Of `trt.BuilderFlag.FP16`, its parts; "" for what is computed before a dot."""
    parts: list[str] = []
    while isinstance(item, ast.Attribute):
        parts.append(item.attr)
        item = item.value
    return [item.id if isinstance(item, ast.Name) else "", *parts[::-1]]


def _matched(row: _Removed, chain: list[str], names: set[str]) -> str | None:
    """The row's name that stands here."""
    candidates = []
    for name in row.names:
        owner, _, member = name.rpartition(".")
        if not owner:  # a class or function of the module
            if chain[-1] == name and (chain == [name] if name in names else len(chain) > 1 and chain[0] in names):
                return name
        elif chain[-1] == member and len(chain) > 1:
            constant = member.isupper() or row.exact
            if chain[-2] == owner or not (constant or chain[-2] in _OWN):
                candidates.append(name)
    return max(candidates, key=lambda name: _is_of(name, chain), default=None)
