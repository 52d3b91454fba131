"""Tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.application import told
from trtopt.core.words import visible

SHORT, ROOM = 12, 20  # characters of what isn't broken in tables; what another column needs, its gap too


def print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, width: int = 200) -> None:
    """Print a table, wider than a terminal that has no room for its figures.

    Args:
        width: in columns, where the output is no terminal; what is longer is continued on the next line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    names = [visible(name) for name in columns]
    cells = [[visible(told(cell)) for cell in row] for row in rows]
    table = Table(title=visible(title), title_justify="left", show_edge=False, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    least = 0
    for name, column in zip(names, zip(*cells)):
        short = all(len(cell) <= SHORT and " " not in cell for cell in column)
        high = short and console.is_terminal
        table.add_column(name.replace(" ", "\n") if high else name, overflow="fold", no_wrap=short)
        least += max(map(len, (*column, *name.split()))) + 2 if short else ROOM
    # A log has no width of its own: don't cut names short.
    console.width = max(console.width, least) if console.is_terminal else width
    for row in cells:
        table.add_row(*row)
    console.print(table)
