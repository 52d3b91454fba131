"""Tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from trtopt.cli.application import told
from trtopt.core.terminal import visible

SHORT, ROOM = 12, 20  # characters of what isn't broken in tables; what another column needs, its gap too


def print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, width: int = 200) -> None:
    """Print a table; where it doesn't fit the terminal, each row line by line.

    Args:
        width: in columns, where the output is no terminal; what is longer is continued on the next line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = width  # a log has no width of its own: don't cut names short
    names = [visible(name) for name in columns]
    cells = [[visible(told(cell)) for cell in row] for row in rows]
    short = {
        number: max(map(len, (*column, *names[number].split())))
        for number, column in enumerate(zip(*cells))
        if all(len(cell) <= SHORT and " " not in cell for cell in column)
    }
    if console.is_terminal and sum(short.values()) + 2 * len(short) + ROOM * (len(names) - len(short)) > console.width:
        print(visible(title))
        for row in cells:
            print()
            for line in (f"{name}: {cell}" if name else cell for name, cell in zip(names, row) if cell):
                print(fill(line, console.width, subsequent_indent="  ", break_on_hyphens=False))
        return
    table = Table(title=visible(title), title_justify="left", show_edge=False, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, name in enumerate(names):
        no_wrap = number in short
        high = no_wrap and console.is_terminal
        table.add_column(name.replace(" ", "\n") if high else name, overflow="fold", no_wrap=no_wrap)
    for row in cells:
        table.add_row(*row)
    console.print(table)
