"""Libraries' own messages are kept away from users while they work, and only theirs."""

from __future__ import annotations

import logging
import sys
import threading
import warnings

import pytest

from trtopt.core.library_output import quiet


def test_prints_warnings_and_records_are_muted_and_all_is_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    logger, stream, filters = logging.getLogger("onnxslim"), sys.stdout, list(warnings.filters)
    state = (logger.level, list(logger.handlers), logger.propagate)
    with quiet():
        print("inside")
        logger.error("inside")
        warnings.warn("inside", stacklevel=1)
        with quiet():
            print("deeper")
        print("inside still")
        logger.setLevel(logging.DEBUG)  # as onnxslim does
    assert (logger.level, list(logger.handlers), logger.propagate) == state
    assert sys.stdout is stream
    assert warnings.filters == filters
    print("outside")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("outside\n", "")


def test_other_threads_are_heard_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    inside, spoken = threading.Event(), threading.Event()

    def work() -> None:
        with quiet():
            print("muted")
            inside.set()
            assert spoken.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    print("heard")
    spoken.set()
    thread.join()
    assert capsys.readouterr().out == "heard\n"


def test_a_stream_that_somebody_else_took_over_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    theirs = io.StringIO()
    with quiet():
        monkeypatch.setattr(sys, "stdout", theirs)
    assert sys.stdout is theirs
