"""The small C extension (`_native.c`): what runs without Python's GIL, and the loop over every value that calibration sees.

Where it isn't built, plain Python does both, slower; `trtopt version` says which.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_module: Any
try:
    _module = importlib.import_module("trtopt.core._native")
except ImportError:
    _module = None

# Do rows that lie at an address, so many of them: `trtopt.runtime.stretch`. None: not built.
run: Callable[[int, int], int] | None = getattr(_module, "run", None)
# The same, keeping the GIL. None: not built.
hold: Callable[[int, int], int] | None = getattr(_module, "hold", None)
# Count values within a range: `trtopt.calibration.histogram`. None: not built.
count: Callable[[int, int, int, int, int], tuple[float, float, int]] | None = getattr(_module, "count_within", None)
