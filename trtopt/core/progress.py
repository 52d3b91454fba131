"""Saying what long work is doing: phases with elapsed time and a heartbeat, on a terminal or in a log."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import opened_regular
from trtopt.core.library_output import wanted
from trtopt.core.terminal import styled, visible
from trtopt.core.version import __version__
from trtopt.core.words import spoken

_FIRST = re.compile(rb"[\d:.]{12} trtopt ")  # of a log
HEARTBEAT = 10.0  # seconds between signs of life in a log


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
    """Receives notes, warnings and phases. This base is silent; it is the API's default.

    Attributes:
        flags: of the options that texts name (`trtopt.core.options`), on the command line.
    """

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


@dataclass(frozen=True)
class Duration:
    """Time that a phase took."""

    what: str
    seconds: float


class _Recorder(Reporter):
    """Hands all on, keeps how long phases took that are in no other, and writes all of it into a log."""

    def __init__(self, heard: Reporter, log: TextIO | None) -> None:
        self._heard, self._log, self._depth = heard, log, 0
        self._lock = threading.Lock()
        self.durations: list[Duration] = []

    def _write(self, text: str) -> None:
        if self._log is not None:
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
        self._depth += 1
        started, state = time.monotonic(), "stopped after "
        try:
            with self._heard.phase(name, total) as phase:
                yield phase
            state = ""
        finally:
            seconds = time.monotonic() - started
            self._depth -= 1
            self._write(f"{name}: {state}{seconds:.1f} s")
            if not self._depth:
                self.durations.append(Duration(name, round(seconds, 3)))


@contextlib.contextmanager
def recorded(heard: Reporter, log: str | os.PathLike[str] | None) -> Iterator[_Recorder]:
    """A reporter that hands all on to `heard`, and keeps the durations of phases.

    Args:
        log: a file to write all that is said into, TensorRT's own messages too (the verbose ones with TRTOPT_DEBUG, which
            is `trtopt -v`), as it comes, and the error that ends it. An earlier log is replaced, and nothing else.

    Raises:
        UsageError: something else than a log is there.
        OutputError: the log can't be written.
    """
    if log is None:
        yield _Recorder(heard, None)
        return
    try:
        if Path(log).exists():
            with opened_regular(log) as there:
                if (start := there.read(64)) and not _FIRST.match(start):
                    other = Path(log).with_suffix(".log")
                    free = f", such as `log={str(other)!r}`" * (not other.exists())
                    raise UsageError(
                        f"`log=` {os.fspath(log)} is there and no log of trtopt's: give another name{free}"
                    )
        file = open(log, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115  (closed below)
    except OSError as error:
        raise OutputError(f"can't write the log {os.fspath(log)}: {error.strerror or error}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(_closed, file, heard)
        recorder = _Recorder(heard, file)
        today = datetime.date.today().isoformat()
        recorder._write(f"trtopt {__version__}, Python {platform.python_version()}, {today}")
        try:
            yield recorder
        except BaseException as error:
            recorder._write(f"ended by {type(error).__name__}: {error}")
            raise
        recorder._write("done")


def _closed(log: TextIO, heard: Reporter) -> None:
    try:
        log.close()
    except OSError as error:  # a full disk, which is no reason to lose what was made
        heard.warn(f"the log {log.name} isn't whole: {error.strerror or error}")


class PlainReporter(Reporter):
    """Lines for logs: start, a heartbeat every ten seconds, end with the time taken."""

    def __init__(self, stream: TextIO | None = None, flags: Mapping[str, str] | None = None) -> None:
        self.stream, self.flags = stream or sys.stderr, flags or {}

    def _line(self, text: str) -> None:
        print(self._shown(text), file=self.stream, flush=True)

    def _shown(self, text: str) -> str:
        return visible(spoken(text, self.flags))

    def note(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        phase, state = Phase(name, total), "stopped after "
        try:
            with self._alive(phase):
                yield phase
            state = ""
        finally:
            self._line(f"{phase}: {state}{phase.seconds:.1f} s")

    @contextlib.contextmanager
    def _alive(self, phase: Phase) -> Iterator[None]:
        """Give signs of life."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(HEARTBEAT):
                self._line(f"  {phase}… {phase.seconds:.0f} s")

        thread = threading.Thread(target=beat, name="trtopt-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()  # no sign of life after the end


class RichReporter(PlainReporter):
    """A spinner with elapsed time on a terminal; a finished phase leaves one line."""

    _live: Any = None  # the console that spins now: lines go above the spinner

    def _line(self, text: str) -> None:
        if self._live is None:
            super()._line(text)
        else:
            self._live.print(self._shown(text), markup=False, highlight=False, emoji=False, soft_wrap=True)

    @contextlib.contextmanager
    def _alive(self, phase: Phase) -> Iterator[None]:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        spinner = Spinner("dots")

        def render() -> Spinner:
            spinner.update(text=Text(self._shown(f"{phase}… {phase.seconds:.0f} s")))
            return spinner

        before, console = self._live, Console(file=styled(self.stream))
        try:
            with Live(
                get_renderable=render,
                console=console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,  # it would take them away from `trtopt.core.terminal`
                redirect_stderr=False,
            ):
                self._live = console
                yield
        finally:
            self._live = before


class QuietReporter(PlainReporter):
    """Warnings alone."""

    note, phase = Reporter.note, Reporter.phase


def reporter(stream: TextIO | None = None, flags: Mapping[str, str] | None = None, quiet: bool = False) -> Reporter:
    """The one that fits `stream` (stderr by default): rich on a terminal, plain lines elsewhere; `quiet`: warnings alone."""
    target = stream or sys.stderr
    if quiet:
        return QuietReporter(target, flags)
    return RichReporter(target, flags) if target.isatty() else PlainReporter(target, flags)
