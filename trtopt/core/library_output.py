"""Mute what foreign libraries print, log and warn about their internals while they are at work, and what they'd report home.

The streams, filters, loggers and environment are the whole process's: each is changed under one lock by the first thread that
asks for it and put back by the last, and what is written meanwhile is dropped by the thread that it comes from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
_AFTERWARDS = ("torch", "torchvision")  # they set their loggers up when they are imported, which isn't to be undone
_LIBRARIES = ("onnxscript", "onnx_ir", *_AFTERWARDS)


def wanted() -> bool:
    """Tell if the user asked for the libraries' own messages: `trtopt -v`, or TRTOPT_DEBUG in the environment."""
    return bool(os.environ.get("TRTOPT_DEBUG"))


class Shared(AbstractContextManager[None]):
    """A change of the process for all threads that are inside: the first one makes it, the last one puts it back.

    Args:
        change: makes it on entering, and puts it back on leaving.
    """

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
def variable(name: str, value: str) -> Iterator[None]:
    """The environment with a variable that isn't set; one that is set is the user's word, and stays. Use it in `Shared`."""
    ours = name not in os.environ
    if ours:
        os.environ[name] = value
    try:
        yield
    finally:
        if ours and os.environ.get(name) == value:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _kept(name: str) -> Iterator[None]:
    """A variable of the environment stays as it was, whatever a library sets it to."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


# Held while onnxscript works on a graph (PyTorch's exporter runs it, too): its rules are objects of the whole process, which
# keep what they matched, and another thread's nodes would be taken for it.
rewriting = threading.RLock()
# Held while the user's own modules are imported and used: what is importable, PyTorch's random numbers, threads and exporter,
# and who may connect to the network are the whole process's.
importing = threading.RLock()
compiler_folder = Shared(lambda: _kept("TORCHINDUCTOR_CACHE_DIR"))  # torch sets it when its exporter is first used
loader_path = Shared(lambda: _kept("LD_LIBRARY_PATH"))  # OpenCV sets it when it is imported
_telemetry = Shared(lambda: variable(TELEMETRY_OFF, "1"))


def unreported() -> AbstractContextManager[None]:
    """No telemetry from an ONNX Runtime that is imported here, by whichever library; a value that is set is the user's word.

    From 1.29 on its Linux wheels report their use to Microsoft, unless this variable is set when they are imported; it isn't
    read later, so the environment is put back at the end.
    """
    return contextlib.nullcontext() if "onnxruntime" in sys.modules else _telemetry


_quiet_threads: Counter[int] = Counter()
_unwarned_threads: Counter[int] = Counter()


@contextlib.contextmanager
def _counted(threads: Counter[int]) -> Iterator[None]:
    thread = threading.get_ident()
    threads[thread] += 1  # no other thread changes this count
    try:
        yield
    finally:
        threads[thread] -= 1
        if not threads[thread]:
            del threads[thread]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' output away in this thread; other threads are heard. With TRTOPT_DEBUG it goes to stderr instead."""
    with _muting, unreported(), _counted(_quiet_threads):
        yield


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Python's warnings come to nothing in this thread, also where they are errors."""
    with _filtering, _counted(_unwarned_threads):
        yield


def _dropped() -> bool:
    """Tell if what this thread says is dropped."""
    return threading.get_ident() in _quiet_threads and not wanted()


class _Muted:
    """Python's stdout or stderr without what the quiet threads write; what users want of it goes to stderr."""

    def __init__(self, stream: Any, errors: Any) -> None:
        self.stream, self.errors = stream, errors

    def write(self, text: str) -> int:
        if threading.get_ident() not in _quiet_threads:
            return int(self.stream.write(text))
        return int(self.errors.write(text)) if wanted() else len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Passing(logging.Handler):
    """A logger's own handlers, for all threads but the quiet ones."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._own = logging.Logger(logger.name)
        self._own.handlers, self._own.propagate, self._own.parent = logger.handlers, logger.propagate, logger.parent

    def handle(self, record: logging.LogRecord) -> bool:
        if not _dropped():
            self._own.callHandlers(record)
        return True


class _FromQuietThreads:
    """A pattern for a filter of `warnings`, which matches any text in the threads whose warnings are dropped."""

    @staticmethod
    def match(_: str) -> bool:
        return _dropped() or threading.get_ident() in _unwarned_threads


@contextlib.contextmanager
def _filtered() -> Iterator[None]:
    with warnings.catch_warnings():
        filters: Any = warnings.filters
        filters.insert(
            0, ("ignore", _FromQuietThreads(), Warning, None, 0)
        )  # the second is asked like a compiled pattern
        yield


_filtering = Shared(_filtered)


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for logger in _loggers():
            undo.callback(_restore, logger, logger.level, logger.handlers, logger.propagate)
            logger.handlers, logger.propagate = [_Passing(logger)], False
        errors = _own(sys.stderr)
        for name in ("stdout", "stderr"):
            muted = _muted_stream(_own(getattr(sys, name)), errors)
            undo.callback(_unmute, name, muted)
            setattr(sys, name, muted)
        undo.enter_context(_filtering)
        yield


_muting = Shared(_muted)


def _loggers() -> list[logging.Logger]:
    """The libraries' loggers; of those below them, the ones that don't leave their records to the one above."""
    imported = [name for name in _LIBRARIES if name in sys.modules or name not in _AFTERWARDS]
    loggers = [logging.getLogger(name) for name in imported]
    for name, logger in list(logging.root.manager.loggerDict.items()):
        below = "." in name and name.partition(".")[0] in imported
        if below and isinstance(logger, logging.Logger) and (logger.handlers or not logger.propagate):
            loggers.append(logger)
    return loggers


def _restore(logger: logging.Logger, level: int, handlers: list[logging.Handler], propagate: bool) -> None:
    if logger.level != level:
        logger.setLevel(level)
    logger.handlers, logger.propagate = handlers, propagate


# CPython's print() before 3.13.3 uses sys.stdout without holding it: freed while another thread prints, it is a crash.
_lately_muted: deque[_Muted] = deque(maxlen=32)


def _muted_stream(stream: Any, errors: Any) -> _Muted:
    """The one for these streams that was used before, or a new one. It outlives the muting."""
    for muted in _lately_muted:
        if muted.stream is stream and muted.errors is errors:
            return muted
    _lately_muted.append(_Muted(stream, errors))
    return _lately_muted[-1]


def _own(stream: Any) -> Any:
    """A stream as it is without us: somebody who took it over meanwhile may have put a muted one back."""
    while isinstance(stream, _Muted):
        stream = stream.stream
    return stream


def _unmute(name: str, muted: _Muted) -> None:
    if getattr(sys, name) is muted:  # else somebody else took it over meanwhile
        setattr(sys, name, muted.stream)
