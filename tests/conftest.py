from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> World:
    from world import World  # here: tests/gpu run on hosts without its photo packages

    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRTOPT_DEBUG", raising=False)
    return World(tmp_path, monkeypatch, capfd)


@pytest.fixture
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
