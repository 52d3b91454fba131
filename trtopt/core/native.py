"""The small C extension (`_native.c`): what runs without Python's GIL, and the loop over every value that calibration sees.

Where it isn't built, plain Python does both, slower; `trtopt version` says which.
"""

from __future__ import annotations

from collections.abc import Callable

try:
    from trtopt.core import _native  # type: ignore[attr-defined]
except ImportError:
    _native = None

# Do rows that lie at an address, so many of them: `trtopt.runtime.stretch`. None: not built.
run: Callable[[int, int], int] | None = getattr(_native, "run", None)
# The same, keeping the GIL. None: not built.
hold: Callable[[int, int], int] | None = getattr(_native, "hold", None)
# Count values within a range: `trtopt.calibration.histogram`. None: not built.
count: Callable[[int, int, int, int, int], tuple[float, float, int]] | None = getattr(_native, "count_within", None)
