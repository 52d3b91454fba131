"""How a benchmark ends: its figures as JSON in a file, if one is named, and its rows as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def tell(
    columns: Sequence[str], rows: Iterable[Sequence[str]], figures: Mapping[str, Any], file: str | Path | None
) -> None:
    if file:
        Path(file).write_text(json.dumps(figures, indent=1) + "\n")
    for line in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(line)} |")
