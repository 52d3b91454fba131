"""Text and commands in lines of a terminal's width."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator

WIDTH, LEAST = 80, 40
_WORDS = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")


def width() -> int:
    """Of a line: the terminal's, `WIDTH` columns at most."""
    return max(LEAST, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def wrapped(text: str, indent: int = 4, start: int = 0) -> list[str]:
    """Lines that fit; all but the first are indented."""
    return textwrap.wrap(
        text,
        width(),
        initial_indent=" " * start,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def command_lines(command: str) -> Iterator[str]:
    """A command, indented, in lines that a shell takes as one; a word longer than a line stays whole."""
    line = "    $"
    for word in _WORDS.findall(command):
        if len(line) + len(word) + 3 > width() and line != "    $":
            yield f"{line} \\"
            line = "     "
        line += f" {word}"
    yield line
