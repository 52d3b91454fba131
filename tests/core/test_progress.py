"""What long work says: lines in a log, nothing in the API."""

from __future__ import annotations

import io
import threading

import pytest

from trtopt.core import progress
from trtopt.core.progress import SILENT, PlainReporter, RichReporter, reporter


def test_a_log_gets_a_heartbeat_and_the_time_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT", 0.01)
    stream = io.StringIO()
    beats = threading.Event()
    with PlainReporter(stream).phase("calibrate", 4) as phase:
        phase.advance(3)
        phase.detail("image 3")
        while "calibrate 3/4 (image 3)…" not in stream.getvalue():
            assert not beats.wait(0.01)
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("calibrate 3/4 (image 3): 0.")
    assert lines[0].strip().endswith(" s")


def test_a_phase_that_fails_says_that_it_stopped() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), PlainReporter(stream).phase("build"):
        raise KeyboardInterrupt
    assert stream.getvalue().startswith("build: stopped after 0.")


def test_notes_and_warnings_are_lines() -> None:
    stream = io.StringIO()
    PlainReporter(stream).note("kept")
    PlainReporter(stream).warn("few samples")
    assert stream.getvalue() == "kept\nwarning: few samples\n"


def test_the_stream_decides_how() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert type(reporter(io.StringIO())) is PlainReporter
    terminal = Terminal()
    assert isinstance(reporter(terminal), RichReporter)
    with reporter(terminal).phase("build"):
        pass
    assert "build: 0." in terminal.getvalue()


def test_the_api_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    SILENT.note("a")
    SILENT.warn("b")
    with SILENT.phase("c") as phase:
        phase.advance()
    assert phase.done == 1
    assert capsys.readouterr() == ("", "")
