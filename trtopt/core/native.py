"""The small C extension (`_native.c`): what runs without Python's GIL, the loop over every value that calibration sees, and
what is said where native code ends the process.

Where it isn't built, plain Python does the first two, slower; `trtopt version` says which.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
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
# Count values: `trtopt.calibration.histogram`. None: not built.
count: Callable[[int, int, int, int, int], tuple[float, float, int]] | None = getattr(_module, "count", None)

_say: Callable[[int, bytes], None] | None = getattr(_module, "last_words", None)
_saying, _lock = list[bytes](), threading.Lock()


@contextlib.contextmanager
def last_words(text: str) -> Iterator[None]:
    """Text that standard error gets if native code ends the process meanwhile, which no exception tells of; of several threads'
    texts the latest. Nothing where the extension isn't built, standard error is no file, or the process handles such signals
    itself (faulthandler)."""
    try:
        stream = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        stream = -1
    if _say is None or stream < 0:
        yield
        return
    said = f"\n{text}\n".encode(errors="backslashreplace")  # a file's name may be no UTF-8
    with _lock:
        _saying.append(said)
        _say(stream, said)
    try:
        yield
    finally:
        with _lock:
            _saying.remove(said)
            _say(stream, _saying[-1] if _saying else b"")
