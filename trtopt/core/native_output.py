"""Divert what native libraries write past Python: TensorRT, Myelin, libpng and ONNX Runtime print on the process's own streams.

Only the command line uses this, whose process is its own: a library must leave its host's streams alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import sys
from typing import Any, BinaryIO

from trtopt.core.words import visible

_kept: BinaryIO | None = None
_own = list[Any]()  # for the life of the process: a file must not get a closed stream's descriptor, and be printed into


def keep_apart() -> None:
    """From here on Python's prints go where they went, and what native code writes to descriptors 1 and 2 into memory.

    TensorRT prints warnings on standard output, where `--json` promises one object and nothing else. Nothing happens where
    Python's streams aren't the process's own (tests). A stream that is closed becomes /dev/null, and what its encoding
    doesn't have is written as an escape sequence. Where native code ends the process, Python says where it stood.
    """
    global _kept
    own = [stream or open(os.devnull, "w") for stream in (sys.__stdout__, sys.__stderr__)]  # noqa: SIM115
    if _kept is not None or (sys.stdout, sys.stderr) != (sys.__stdout__, sys.__stderr__):
        return
    diverted = open(os.memfd_create("native"), "w+b")  # noqa: SIM115  (for the life of the process)
    for stream in own:
        stream.flush()
    sys.stdout, sys.stderr = map(_copy, own)
    for descriptor in (1, 2):
        os.dup2(diverted.fileno(), descriptor)
    _kept, _own[:] = diverted, own
    faulthandler.enable(sys.stderr)


def _copy(stream: Any) -> io.TextIOWrapper:
    """Copy a stream under a descriptor of its own."""
    descriptor = os.dup(stream.fileno())
    buffering = 1 if stream.line_buffering else -1
    return open(descriptor, "w", buffering, encoding=stream.encoding, errors="backslashreplace")


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
