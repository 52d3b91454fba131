"""Text and commands in lines of a terminal's width."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

WIDTH = 80
_WORDS = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")


def wrapped(text: str, indent: int = 4, start: int = 0) -> list[str]:
    """Lines of at most `WIDTH` columns; all but the first are indented."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * start,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )


def command_lines(command: str) -> Iterator[str]:
    """A command, indented, in lines that a shell takes as one; a word longer than a line stays whole."""
    line = "    $"
    for word in _WORDS.findall(command):
        if len(line) + len(word) + 3 > WIDTH and line != "    $":
            yield f"{line} \\"
            line = "     "
        line += f" {word}"
    yield line
