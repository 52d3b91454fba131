"""Tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from trtopt.cli.application import told
from trtopt.core.terminal import styled, visible

NARROW = 60  # columns of a terminal below which a row of a table is written line by line
NARROW_TEXT = 110  # the same of tables with as many columns as a finding has, several of them texts
SHORT, ROOM = 12, 10  # characters of what isn't broken in tables; what another column needs, its gap too


def print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, width: int = 200) -> None:
    """Print a table.

    Args:
        width: in columns, where the output is no terminal; what is longer is continued on the next line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=styled(sys.stdout), highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = width  # a log has no width of its own: don't cut names short
    names = [visible(name) for name in columns]
    cells = [[visible(told(cell)) for cell in row] for row in rows]
    texts = [column for column in zip(*cells) if any(len(cell) > 2 * SHORT for cell in column)]
    least = NARROW_TEXT if len(names) >= 5 and len(texts) > 1 else NARROW
    if console.is_terminal and console.width < least:  # columns of a few letters can't be read
        print(visible(title))
        for row in cells:
            print()
            for line in (f"{name}: {cell}" if name else cell for name, cell in zip(names, row) if cell):
                print(fill(line, console.width, subsequent_indent="  ", break_on_hyphens=False))
        return
    whole = _whole(names, cells, console.width)
    table = Table(title=visible(title), title_justify="left", show_edge=False)
    if whole.close:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    for number, name in enumerate(names):
        no_wrap = number in whole.columns
        table.add_column(name.replace(" ", "\n") if no_wrap and whole.high else name, overflow="fold", no_wrap=no_wrap)
    for row in cells:
        table.add_row(*row)
    console.print(table)


@dataclass(frozen=True)
class _Whole:
    """Columns of a table that aren't to be broken; for that, headings may have to be high, and columns close together."""

    columns: frozenset[int] = frozenset()
    high: bool = False
    close: bool = False


def _whole(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> _Whole:
    """Those of figures and other short words, where they leave the others enough room."""
    short = {
        number: max(map(len, cells))
        for number, cells in enumerate(zip(*rows))
        if all(len(cell) <= SHORT and " " not in cell for cell in cells)
    }
    others = ROOM * (len(names) - len(short))
    for gap, high, close in ((3, False, False), (3, True, False), (2, True, True)):
        headings = {
            number: max(map(len, names[number].split() if high else [names[number]]), default=0) for number in short
        }
        if others + sum(max(short[number], headings[number]) + gap for number in short) <= width:
            return _Whole(frozenset(short), high, close)
    return _Whole()
