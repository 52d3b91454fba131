"""What benchmarks share: trtopt from this checkout, and how they end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")


def tell(
    columns: Sequence[str], rows: Iterable[Sequence[str]], figures: Mapping[str, Any], file: str | Path | None
) -> None:
    """Write the figures as JSON into a file, if one is named, and print the rows as a table."""
    if file:
        Path(file).write_text(json.dumps(figures, indent=1) + "\n")
    for line in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(line)} |")
