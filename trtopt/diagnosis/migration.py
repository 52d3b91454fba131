"""Old shell scripts and command lines: what of them TensorRT 10 and 11 dropped, and trtopt's way. Nothing of them is run."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file, whole
from trtopt.diagnosis.drafts import Option
from trtopt.diagnosis.lines import command_lines, wrapped
from trtopt.diagnosis.old_commands import is_command, translated

LARGEST = 16 << 20  # bytes of a script


@dataclass(frozen=True)
class Replacement:
    """An option of the old way.

    Attributes:
        what: as it stands there, such as "--fp16".
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
        replaced: options that are to be replaced, in their order.
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
    if path.suffix == ".py" or content.startswith(b"#!/usr/bin/env python"):
        raise UsageError(
            f"`migrate=` {path} is Python, and commands and shell scripts are read: docs/manual/from-calibrators.md has every "
            "name that TensorRT's Python module has no more, with trtopt's way"
        )
    commands, replacements = list[str](), list[Replacement]()
    for words, line in _shell_commands(content.decode("utf-8", "replace")):
        try:
            translations, options = translated(words)
        except UsageError as error:
            replacements.append(Replacement(shlex.join(words), line, "", str(error), True))
            continue
        commands += translations
        replacements += [_of_option(option, line) for option in options]
    return Migration(str(path), tuple(dict.fromkeys(commands)), tuple(dict.fromkeys(replacements)))


def _shell_commands(text: str) -> Iterator[tuple[list[str], int]]:
    """Commands of trtexec (and polygraphy, to say so) in a shell's text, and their lines."""
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
