"""Mute what foreign libraries log and warn about their internals while they are at work, and what they'd report home.

The filters, loggers and environment are the whole process's: each is changed under one lock by the first thread that asks for
it and put back by the last. Prints are left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
_LIBRARIES = ("onnxscript", "onnx_ir", "torch", "torchvision")


def wanted() -> bool:
    """Tell if the user asked for the libraries' own messages: `trtopt -v`, or TRTOPT_DEBUG in the environment."""
    return bool(os.environ.get("TRTOPT_DEBUG"))


class Shared(AbstractContextManager[None]):
    """A `change` of the process for all threads that are inside: the first one makes it, the last one puts it back."""

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change, self._lock = change, threading.Lock()
        self._inside, self._undo = 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._undo.enter_context(self._change())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._undo.close()


@contextlib.contextmanager
def variable(name: str, value: str | None = None) -> Iterator[None]:
    """Put a variable of the environment back afterwards, whatever a library sets it to; meanwhile it is `value`, unless the
    user has set it. Use it in `Shared`."""
    before = os.environ.get(name)
    if before is None and value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


# Held while onnxscript works on a graph (PyTorch's exporter runs it, too): its rules are objects of the whole process, which
# keep what they matched, and another thread's nodes would be taken for it.
rewriting = threading.RLock()
# Held while the user's own modules are imported and used: what is importable, PyTorch's random numbers, threads and exporter,
# and who may connect to the network are the whole process's.
importing = threading.RLock()
compiler_folder = Shared(lambda: variable("TORCHINDUCTOR_CACHE_DIR"))  # torch sets it when its exporter is first used
loader_path = Shared(lambda: variable("LD_LIBRARY_PATH"))  # OpenCV sets it when it is imported
_telemetry = Shared(lambda: variable(TELEMETRY_OFF, "1"))


def unreported() -> AbstractContextManager[None]:
    """No telemetry from an ONNX Runtime that is imported here, by whichever library; a value that is set is the user's word.

    From 1.29 on its Linux wheels report their use to Microsoft, unless this variable is set when they are imported; it isn't
    read later, so the environment is put back at the end.
    """
    return contextlib.nullcontext() if "onnxruntime" in sys.modules else _telemetry


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


unwarned = Shared(_without_warnings)  # Python's warnings come to nothing meanwhile, also where they are errors


def quiet() -> AbstractContextManager[None]:
    """Drop the libraries' records, and warnings, meanwhile; with TRTOPT_DEBUG all are heard."""
    return unreported() if wanted() else _quiet


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    before = logging.Logger.callHandlers

    def call(logger: logging.Logger, record: logging.LogRecord) -> None:
        if logger.name.partition(".")[0] not in _LIBRARIES:
            before(logger, record)

    with unreported(), unwarned:
        setattr(logging.Logger, "callHandlers", call)  # noqa: B010  (as an assignment it doesn't type-check)
        try:
            yield
        finally:
            setattr(logging.Logger, "callHandlers", before)  # noqa: B010


_quiet = Shared(_muted)
