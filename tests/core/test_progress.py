"""Messages of long work: lines in a log, nothing in the API."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest
from world import Terminal

from trtopt.core.errors import OutputError, UsageError
from trtopt.core.progress import SILENT, StreamReporter, recorded


def test_a_log_gets_a_heartbeat_and_the_time_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamReporter, "interval", 0.01)
    stream = io.StringIO()
    beats = threading.Event()
    with StreamReporter(stream).phase("calibrate", 4) as phase:
        phase.advance(3)
        phase.detail("image 3")
        for _ in range(1000):
            if "calibrate 3/4 (image 3)…" in stream.getvalue():
                break
            assert not beats.wait(0.01)
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("calibrate 3/4 (image 3): 0.")
    assert lines[0].strip().endswith(" s")


def test_a_phase_that_fails_says_that_it_stopped() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), StreamReporter(stream).phase("build"):
        raise KeyboardInterrupt
    assert stream.getvalue().startswith("build: stopped after 0.")


def test_a_terminal_has_a_moving_line_in_its_own_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is for results, such as `--json | jq` reads."""
    terminal = Terminal()
    told = StreamReporter(terminal)
    with told.phase("build") as phase:
        for _ in range(1000):
            if "build…" in terminal.getvalue():
                break
            time.sleep(0.01)
        phase.detail("image 3")
        told.note("kept")
        print("the user's own")
    shown = terminal.getvalue()
    assert "build…" in shown and "kept\n" in shown and "build (image 3): 0." in shown
    assert capsys.readouterr() == ("the user's own\n", "")


def test_a_log_replaces_a_log_and_nothing_else(tmp_path: Path) -> None:
    mine, log = tmp_path / "notes.txt", tmp_path / "b.log"
    mine.write_text("12:00 trtopt is fine\n")
    with pytest.raises(UsageError, match="no log of trtopt's: give another name"):
        recorded(SILENT, mine).__enter__()
    assert mine.read_text() == "12:00 trtopt is fine\n"
    log.touch()
    for _ in range(2):
        with recorded(SILENT, log):
            pass
    assert log.read_text().count("done") == 1


@pytest.mark.parametrize("verbose", ["", "1"])
def test_a_log_holds_all_that_is_said_and_the_libraries_own_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: str
) -> None:
    monkeypatch.setenv("TRTOPT_DEBUG", verbose)
    log, stream = tmp_path / "b.log", io.StringIO()
    with recorded(StreamReporter(stream, {"calib": "--calib"}), log) as told:
        told.note("give `calib='F'`")
        with told.phase("build"), told.phase("parse"):
            told.library("INFO", "a message\x1b[31m\nof two lines\n")
            told.library("VERBOSE", "a tactic")
        told.warn("few samples")
        assert "build…" in log.read_text()  # as it comes
    lines = [line.partition(" ")[2] for line in log.read_text().splitlines()]
    assert lines[0].startswith("trtopt ") and lines[-1] == "done"
    assert lines[1:4] == ["give --calib F", "build…", "parse…"]
    assert "TensorRT info: a message" in lines[4] and "\x1b" not in log.read_text()
    assert ("TensorRT verbose: a tactic" in log.read_text()) is bool(verbose) and "warning: few samples" in lines
    assert stream.getvalue().endswith("warning: few samples\n")


def test_a_log_ends_with_the_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError), recorded(SILENT, tmp_path / "none" / "b.log"):
        raise AssertionError("the work began")
    log = tmp_path / "b.log"
    with pytest.raises(UsageError), recorded(SILENT, log) as told, told.phase("build"):
        raise UsageError("no such shape")
    lines = log.read_text().splitlines()
    assert "build: stopped after" in lines[-2] and lines[-1].endswith("ended by UsageError: no such shape")
