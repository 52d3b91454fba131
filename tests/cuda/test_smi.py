"""nvidia-smi, played by a script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtopt.cuda import smi


def _play(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_clocks_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(tmp_path, monkeypatch, "sleep 0.2; echo '1665, 1980, 93, 0x0000000000000024'")
    calls: list[int] = []
    found = smi.clocks(2, lambda: calls.append(1))
    assert (found.sm, found.sm_most, found.utilization) == (1665, 1980, 93)
    assert found.throttled == ("power cap", "temperature (software)")
    assert "held back by power cap" in str(found)
    assert calls
    assert "-i 2" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize("active", ["0x0000000000000001", "0x0000000000000000", "[N/A]"])
def test_idling_is_no_throttling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, active: str) -> None:
    _play(tmp_path, monkeypatch, f"echo '345, 1980, [N/A], {active}'")
    assert smi.clocks() == smi.Clocks(345, 1980, None, ())


def test_the_new_name_of_the_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(
        tmp_path,
        monkeypatch,
        'case "$1" in *throttle*) echo "Field \\"clocks_throttle_reasons.active\\" is not valid"; exit 2;; esac\n'
        "echo '1980, 1980, 5, 0x0'",
    )
    assert smi.clocks().sm == 1980


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "isn't there" in smi.clocks().unknown
    assert smi.others() == ()


def test_a_failing_one_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(tmp_path, monkeypatch, "echo 'Failed to initialize NVML'; exit 9")
    assert "Failed to initialize NVML" in smi.clocks().unknown


def test_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(tmp_path, monkeypatch, f"echo '41, /usr/bin/python, a, 512'; echo '{os.getpid()}, me, 9'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc,3")
    assert smi.others(1) == ("41 /usr/bin/python, a (512 MiB)",)
    assert "-i 3" in (tmp_path / "asked").read_text()
