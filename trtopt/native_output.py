"""What native libraries write past Python: TensorRT, Myelin, libpng and ONNX Runtime print on the process's own streams.

Only the command line uses this, whose process is its own: a library must leave its host's streams alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from typing import IO, Any

_kept: IO[bytes] | None = None


def keep_apart() -> None:
    """From here on Python's prints go where they went, and what native code writes to descriptors 1 and 2 into a file.

    TensorRT prints warnings on standard output, where `--json` promises one object and nothing else. Nothing happens where
    Python's streams aren't the process's own (tests), or are closed.
    """
    global _kept
    own: list[Any] = [sys.__stdout__, sys.__stderr__]
    if _kept is not None or [sys.stdout, sys.stderr] != own:
        return
    try:
        if [stream.fileno() for stream in own] != [1, 2]:
            return
        streams = [_copy(stream) for stream in own]
        kept = tempfile.TemporaryFile()  # noqa: SIM115  (for the life of the process)
    except (AttributeError, OSError, ValueError):
        return
    for stream in own:
        stream.flush()
    sys.stdout, sys.stderr = streams
    for descriptor in (1, 2):
        os.dup2(kept.fileno(), descriptor)
    _kept = kept


def _copy(stream: Any) -> Any:
    """The same stream under a descriptor of its own."""
    return open(
        os.dup(stream.fileno()),
        "w",
        buffering=1 if stream.line_buffering else -1,
        encoding=stream.encoding,
        errors=stream.errors,
    )


def lines() -> list[str]:
    """What was kept so far, line by line, control characters made visible."""
    if _kept is None:
        return []
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)  # what C's own buffers hold
    _kept.seek(0)
    text = _kept.read().decode(errors="backslashreplace")
    _kept.seek(0, os.SEEK_END)
    return ["".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in line) for line in text.splitlines()]
