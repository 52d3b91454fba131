"""Saying what long work is doing: phases with elapsed time and a heartbeat, on a terminal or in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from trtopt.core.options import spoken
from trtopt.core.terminal import styled, visible

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
    """Receives notes, warnings and phases. This base is silent; it is the API's default."""

    def note(self, text: str) -> None:
        """Something the user may want to know."""

    def warn(self, text: str) -> None:
        """Something the user should know."""

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        yield Phase(name, total)


SILENT = Reporter()


class PlainReporter(Reporter):
    """Lines for logs: start, a heartbeat every ten seconds, end with the time taken.

    Args:
        flags: of the options that texts name (`trtopt.core.options`), on the command line.
    """

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


def reporter(stream: TextIO | None = None, flags: Mapping[str, str] | None = None) -> Reporter:
    """The one that fits `stream` (stderr by default): rich on a terminal, plain lines elsewhere; `flags` as for these."""
    chosen = stream or sys.stderr
    return RichReporter(chosen, flags) if chosen.isatty() else PlainReporter(chosen, flags)
