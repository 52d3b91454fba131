"""Libraries' own messages are kept away from users while they work, and only theirs."""

from __future__ import annotations

import logging
import os
import threading
import warnings

import pytest

from trtopt.core.library_output import Shared, quiet, variable


def _speak(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=1)
    logging.getLogger("onnx_ir.passes").error(text)
    logging.getLogger("torch").error(text)


def test_warnings_and_records_are_muted_and_all_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    handlers, filters = logging.Logger.callHandlers, list(warnings.filters)
    with quiet():
        _speak("inside")
        with quiet():
            _speak("deeper")
        _speak("inside still")
        logging.getLogger("host").error("the host's own")
    assert (logging.Logger.callHandlers, list(warnings.filters)) == (handlers, filters)
    with pytest.warns(UserWarning, match="outside"):
        _speak("outside")
    assert caplog.messages == ["the host's own", "outside", "outside"]


def test_users_who_want_it_see_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_DEBUG", "1")
    with quiet(), pytest.warns(UserWarning, match="said"):
        _speak("said")
    assert caplog.messages == ["said", "said"]


def test_a_shared_change_is_made_once_and_put_back_by_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TRTOPT_TEST_SHARED"
    shared = Shared(lambda: variable(name, "1"))
    inside, go = threading.Event(), threading.Event()

    def stay() -> None:
        with shared:
            inside.set()
            assert go.wait(10)

    thread = threading.Thread(target=stay)
    with shared:
        thread.start()
        assert inside.wait(10)
    assert os.environ[name] == "1"  # the other is inside still
    go.set()
    thread.join()
    assert name not in os.environ
    monkeypatch.setenv(name, "the user's")
    with shared:
        assert os.environ[name] == "the user's"
    with variable(name):
        os.environ[name] = "a library's"
    assert os.environ[name] == "the user's"
