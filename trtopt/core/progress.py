"""Saying what long work is doing: phases with elapsed time and a heartbeat, on a terminal or in a log."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import opened_regular
from trtopt.core.library_output import wanted
from trtopt.core.version import __version__
from trtopt.core.words import spoken, visible

_FIRST = re.compile(rb"[\d:.]{12} trtopt ")  # of a log
HEARTBEAT, SPIN = 10.0, 0.125  # seconds between signs of life in a log, and on a terminal
_CLEAR = "\r\x1b[K"  # the line that the cursor is in


class Phase:
    """One piece of long work. `advance` counts steps where a total is known; `detail` names the current step."""

    def __init__(self, name: str, total: int | None = None) -> None:
        self.name, self.total, self.done, self.text = name, total, 0, ""
        self.started = time.monotonic()

    def advance(self, steps: int = 1) -> None:
        self.done += steps

    def detail(self, text: str) -> None:
        self.text = text

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def __str__(self) -> str:
        count = f" {self.done}/{self.total}" if self.total else (f" {self.done}" if self.done else "")
        return f"{self.name}{count}{f' ({self.text})' if self.text else ''}"


class Reporter:
    """Receives notes, warnings and phases, with `flags` for the options that they name. This base is silent; it is the API's
    default."""

    flags: Mapping[str, str] = {}

    def note(self, text: str) -> None:
        """Something the user may want to know."""

    def warn(self, text: str) -> None:
        """Something the user should know."""

    def library(self, severity: str, text: str) -> None:
        """A message of TensorRT's own, as it is; from any thread."""

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        yield Phase(name, total)


SILENT = Reporter()


class _Recorder(Reporter):
    """Hands all on, and writes it into a log."""

    def __init__(self, heard: Reporter, log: TextIO) -> None:
        self._heard, self._log, self._lock = heard, log, threading.Lock()

    def _write(self, text: str) -> None:
        now = datetime.datetime.now().strftime("%H:%M:%S.%f")[:-3]
        with self._lock, contextlib.suppress(OSError, ValueError):  # a full disk; a message after the end
            self._log.write(f"{now} {visible(spoken(text.rstrip(), self._heard.flags))}\n")

    def note(self, text: str) -> None:
        self._write(text)
        self._heard.note(text)

    def warn(self, text: str) -> None:
        self._write(f"warning: {text}")
        self._heard.warn(text)

    def library(self, severity: str, text: str) -> None:
        if severity != "VERBOSE" or wanted():  # tens of thousands of lines a build
            self._write(f"TensorRT {severity.lower()}: {text}")
        self._heard.library(severity, text)

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        self._write(f"{name}…")
        state = "stopped after "
        with self._heard.phase(name, total) as phase:
            try:
                yield phase
                state = ""
            finally:
                self._write(f"{name}: {state}{phase.seconds:.1f} s")


@contextlib.contextmanager
def recorded(heard: Reporter, log: str | os.PathLike[str] | None) -> Iterator[Reporter]:
    """A reporter that hands all on to `heard`, and writes it into the file `log`, TensorRT's own messages too (the verbose ones
    with TRTOPT_DEBUG, which is `trtopt -v`), as it comes, and the error that ends it. An earlier log is replaced, and nothing
    else: UsageError where something else is there."""
    if log is None:
        yield heard
        return
    try:
        if Path(log).exists():
            with opened_regular(log) as there:
                if (start := there.read(64)) and not _FIRST.match(start):
                    raise UsageError(f"`log=` {os.fspath(log)} is there and no log of trtopt's: give another name")
        file = open(log, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise OutputError(f"can't write the log {os.fspath(log)}: {error.strerror or error}") from error
    recorder = _Recorder(heard, file)
    recorder._write(f"trtopt {__version__}, Python {platform.python_version()}, {datetime.date.today().isoformat()}")
    try:
        yield recorder
        recorder._write("done")
    except BaseException as error:
        recorder._write(f"ended by {type(error).__name__}: {error}")
        raise
    finally:
        with contextlib.suppress(OSError):  # a full disk is no reason to lose what was made
            file.close()


class StreamReporter(Reporter):
    """Lines in a stream: the start, a heartbeat every ten seconds, the end with the time taken. On a terminal what is at work
    says so in a line in place, and leaves one at its end."""

    interval = HEARTBEAT  # seconds between signs of life

    def __init__(self, stream: TextIO | None = None, flags: Mapping[str, str] | None = None) -> None:
        self.stream, self.flags = stream or sys.stderr, flags or {}
        self.terminal = self.stream.isatty()
        self._at_work = list[Phase]()

    def _line(self, text: str) -> None:
        self.stream.write(_CLEAR * self.terminal)
        print(visible(spoken(text, self.flags)), file=self.stream, flush=True)

    def note(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        phase, state, over = Phase(name, total), "stopped after ", threading.Event()

        def beat() -> None:
            while not over.wait(SPIN if self.terminal else self.interval):
                self._beat(phase)

        thread = threading.Thread(target=beat, name="trtopt-heartbeat", daemon=True)
        self._at_work.append(phase)
        thread.start()
        try:
            yield phase
            state = ""
        finally:
            over.set()
            thread.join()  # no sign of life after the end
            self._at_work.remove(phase)
            self._line(f"{phase}: {state}{phase.seconds:.1f} s")

    def _beat(self, phase: Phase) -> None:
        text = f"{phase}… {phase.seconds:.0f} s"
        if not self.terminal:
            self._line(f"  {text}")
        elif self._at_work[-1:] == [phase]:  # the innermost
            mark = "|/-\\"[int(phase.seconds / SPIN) % 4]
            shown = visible(spoken(f"{mark} {text}", self.flags))[: shutil.get_terminal_size().columns - 1]
            self.stream.write(f"{_CLEAR}{shown}")
            self.stream.flush()


class Warnings(Reporter):
    """Keeps warnings as `texts`."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


class QuietReporter(StreamReporter):
    """Warnings alone."""

    note, phase = Reporter.note, Reporter.phase
