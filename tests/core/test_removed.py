"""A name that went says what to use instead, on the command line and in Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trtopt
from trtopt.cli import main
from trtopt.core.removed import AT_URL, WENT


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., str]:
    """Types a command that is refused; gives what it said."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["trtopt", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return str(capsys.readouterr().err)

    return run


@pytest.mark.parametrize("command", ["bundle", "sign"])
def test_a_command_that_went_says_what_to_use_instead(command: str, typed: Callable[..., str]) -> None:
    said = typed(command, "model.engine")
    assert WENT[command] in said and len(said.splitlines()) == 1
    with pytest.raises(AttributeError) as refused:
        getattr(trtopt, command)
    assert str(refused.value) == WENT[command]


def test_an_option_that_went_says_what_to_use_instead(typed: Callable[..., str], tmp_path: Path) -> None:
    for command in ("run", "bench", "profile"):
        said = typed(command, "m.engine", "--trusted-keys", "key.pem")
        assert said == f"error: {WENT['trusted_keys']}; try 'trtopt {command} -h'\n"
    for call in (trtopt.Session, trtopt.run, trtopt.bench, trtopt.profile):
        with pytest.raises(TypeError) as refused:
            call(tmp_path / "m.engine", trusted_keys=["key.pem"])  # type: ignore[operator]
        assert WENT["trusted_keys"] in str(refused.value)


def test_a_store_at_a_url_is_refused_before_the_work(
    typed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = tmp_path / "absent.onnx"  # of which nothing is said, since it isn't looked at yet
    assert WENT[AT_URL] in typed("store", "list", "--store", "s3://team/engines")
    assert WENT[AT_URL] in typed(
        "build", str(nothing), "-o", str(tmp_path / "m.engine"), "--store", "s3://team/engines"
    )
    monkeypatch.setenv("TRTOPT_STORE", "s3://team/engines")
    said = typed("tune", str(nothing), "-o", str(tmp_path / "m.engine"), "--min-snr", "20")
    assert WENT[AT_URL] in said and "$TRTOPT_STORE is s3://team/engines" in said
    with pytest.raises(trtopt.UsageError, match="stores at URLs went"):
        trtopt.Session.for_model(nothing, backend="onnxruntime")
