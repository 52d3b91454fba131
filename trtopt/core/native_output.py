"""Divert what native libraries write past Python: TensorRT, Myelin, libpng and ONNX Runtime print on the process's own streams.

Only the command line uses this, whose process is its own: a library must leave its host's streams alone.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import os
import sys
import tempfile
from typing import IO, Any

from trtopt.core.terminal import visible

_kept: IO[bytes] | None = None


class _Messages(io.TextIOWrapper):
    """Standard error; what can't be written there is lost, and the work goes on."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def open_closed() -> None:
    """Keep the descriptors 0, 1 and 2 from being those of files that are opened later, and printed into."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # always the lowest number that is free
        pass
    os.close(descriptor)


def keep_apart() -> None:
    """From here on Python's prints go where they went, and what native code writes to descriptors 1 and 2 into a file.

    TensorRT prints warnings on standard output, where `--json` promises one object and nothing else. Nothing happens where
    Python's streams aren't the process's own (tests). A stream that is closed becomes /dev/null, and what its encoding
    doesn't have is written as an escape sequence.
    """
    global _kept
    streams: list[Any] = [sys.__stdout__, sys.__stderr__]
    if _kept is not None or [sys.stdout, sys.stderr] != streams:
        return
    open_closed()
    try:
        own = [stream or os.fdopen(number, "w", encoding="utf-8") for number, stream in zip((1, 2), streams)]
        if [stream.fileno() for stream in own] != [1, 2]:
            return
        for stream in own:
            stream.flush()
        sys.stdout, sys.stderr = _copy(own[0], io.TextIOWrapper), _copy(own[1], _Messages)
        diverted = tempfile.TemporaryFile()  # noqa: SIM115  (for the life of the process)
    except (AttributeError, OSError, ValueError):
        return
    for descriptor in (1, 2):
        os.dup2(diverted.fileno(), descriptor)
    _kept = diverted


def _copy(stream: Any, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """Copy a stream under a descriptor of its own."""
    complete = codecs.lookup(stream.encoding).name == "utf-8" and stream.errors != "strict"
    return kind(
        open(os.dup(stream.fileno()), "wb"),
        encoding=stream.encoding,
        errors=stream.errors if complete else "backslashreplace",
        line_buffering=stream.line_buffering,
    )


def lines() -> list[str]:
    """Return what was kept so far, line by line, control characters made visible."""
    if _kept is None:
        return []
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)  # what C's own buffers hold
    _kept.seek(0)
    text = _kept.read().decode(errors="backslashreplace")
    _kept.seek(0, os.SEEK_END)
    return [visible(line) for line in text.splitlines()]
