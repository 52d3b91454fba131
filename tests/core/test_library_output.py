"""Libraries' own messages are kept away from users while they work, and only theirs."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import sys
import threading
import warnings
import weakref

import pytest

from trtopt.core.library_output import quiet


def test_prints_warnings_and_records_are_muted_and_all_is_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    logger, stream, filters = logging.getLogger("onnxscript"), sys.stdout, list(warnings.filters)
    state = (logger.level, list(logger.handlers), logger.propagate)
    with quiet():
        print("inside")
        print("inside", file=sys.stderr)
        sys.stdout.writelines(["inside\n"])
        logger.error("inside")
        logging.getLogger("onnxscript.core").error("inside")
        warnings.warn("inside", stacklevel=1)
        with quiet():
            print("deeper")
        print("inside still")
        logger.setLevel(logging.DEBUG)  # as libraries do
    assert (logger.level, list(logger.handlers), logger.propagate) == state
    assert sys.stdout is stream
    assert warnings.filters == filters
    print("outside")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("outside\n", "")


def test_other_threads_are_heard_meanwhile(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    inside, spoken = threading.Event(), threading.Event()

    def speak(text: str) -> None:
        print(text)
        warnings.warn(text, UserWarning, stacklevel=1)
        logging.getLogger("onnx_ir.passes").error(text)

    def work() -> None:
        with quiet():
            speak("muted")
            inside.set()
            assert spoken.wait(10)

    thread = threading.Thread(target=work)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        thread.start()
        assert inside.wait(10)
        speak("heard")
        spoken.set()
        thread.join()
    assert capsys.readouterr().out == "heard\n"
    assert [str(item.message) for item in warned] == ["heard"]
    assert caplog.messages == ["heard"]


def test_loggers_with_handlers_of_their_own_are_muted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, handler = logging.getLogger("onnxscript.own"), Handler()
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [handler])
    with quiet():
        logger.error("inside")
    logger.error("outside")
    assert records == ["outside"] and logger.handlers == [handler]


def test_users_who_want_it_see_it_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTOPT_DEBUG", "1")
    with quiet(), pytest.warns(UserWarning, match="said"):
        print("said")
        warnings.warn("said", stacklevel=1)
    written = capsys.readouterr()
    assert (written.out, written.err) == ("", "said\n")


def test_a_muted_stream_that_somebody_put_back_is_never_dead_and_goes(capsys: pytest.CaptureFixture[str]) -> None:
    stream, theirs = sys.stdout, io.StringIO()
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with quiet():
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    with contextlib.redirect_stdout(theirs):  # what it puts back is the muted one
        leave.set()
        thread.join()
    print("heard")
    with quiet():
        print("muted")
    assert sys.stdout is stream
    assert (capsys.readouterr().out, theirs.getvalue()) == ("heard\n", "")


def test_a_stream_that_somebody_else_took_over_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = io.StringIO()
    with quiet():
        monkeypatch.setattr(sys, "stdout", theirs)
    assert sys.stdout is theirs


def test_a_thread_that_still_prints_keeps_its_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """CPython's print() holds no reference to sys.stdout: freed meanwhile, the process crashes."""
    seen = []
    for _ in range(2):
        with quiet():
            seen.append(weakref.ref(sys.stdout))
        gc.collect()
        stream = seen[-1]()
        assert stream is not None
        print("still here", file=stream)
    assert seen[0]() is seen[1]()
    assert capsys.readouterr().out == "still here\n" * 2
