"""What foreign libraries print, log and warn about their internals while they are at work, and what they'd report home."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
_LOGGERS = ("onnxslim", "onnxscript", "onnx_ir")


def wanted() -> bool:
    """Whether the user asked for the libraries' own messages: `trtopt -v`, or TRTOPT_DEBUG in the environment."""
    return bool(os.environ.get("TRTOPT_DEBUG"))


class _Muted:
    """Standard output without what the quiet threads write; the others' goes through."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if _quiet_threads[threading.get_ident()] else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_lock = threading.Lock()
_quiet_threads: Counter[int] = Counter()
_undo = contextlib.ExitStack()
_imports, _environment = 0, threading.Lock()


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """No telemetry from an ONNX Runtime that is imported here, by whichever library; a value that is set is the user's word.

    From 1.29 on its Linux wheels report their use to Microsoft, unless this variable is set when they are imported; it isn't
    read later, so the environment is put back at the end.
    """
    global _imports
    with _environment:
        ours = _imports > 0 or TELEMETRY_OFF not in os.environ
        if ours:
            _imports += 1
            os.environ[TELEMETRY_OFF] = "1"
    try:
        yield
    finally:
        if ours:
            with _environment:
                _imports -= 1
                if not _imports:
                    os.environ.pop(TELEMETRY_OFF, None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' output away in this thread; any number of threads may be inside, the last one puts all back."""
    thread = threading.get_ident()
    with _lock:
        if not _quiet_threads.total():
            _mute()
        _quiet_threads[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _quiet_threads[thread] -= 1
            if not _quiet_threads.total():
                _quiet_threads.clear()
                _undo.close()


def _mute() -> None:
    for name in _LOGGERS:  # records of their modules' own loggers pass through these, too
        logger = logging.getLogger(name)
        _undo.callback(_restore, logger, logger.level, logger.handlers, logger.propagate)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    muted = _Muted(sys.stdout)
    _undo.callback(_unmute, muted)
    sys.stdout = muted
    _undo.enter_context(unreported())
    _undo.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")


def _restore(logger: logging.Logger, level: int, handlers: list[logging.Handler], propagate: bool) -> None:
    logger.setLevel(level)  # onnxslim sets its own
    logger.handlers, logger.propagate = handlers, propagate


def _unmute(muted: _Muted) -> None:
    if sys.stdout is muted:  # else somebody else took it over meanwhile
        sys.stdout = muted.stream
