"""Clocks and throttling, with an NVML that is played."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trtopt.cuda.clocks import Clocks, clocks


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    def unsupported(*_: Any) -> Any:
        raise NVMLError("Not Supported")

    played = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: played.shut.append(True),
        nvmlDeviceGetHandleByIndex=lambda index: ("index", index),
        nvmlDeviceGetHandleByUUID=lambda name: ("uuid", name),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda device: 0x24,
        nvmlDeviceGetUtilizationRates=unsupported,
        nvmlDeviceGetClockInfo=lambda device, kind: 1665,
        nvmlDeviceGetMaxClockInfo=lambda device, kind: 1980,
        shut=[],
    )
    monkeypatch.setitem(sys.modules, "pynvml", played)
    monkeypatch.setattr("trtopt.cuda.clocks._LOADED", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return played


def test_clocks_under_load(nvml: SimpleNamespace) -> None:
    calls: list[int] = []
    found = clocks(2, lambda: calls.append(1))
    assert found == Clocks(1665, 1980, None, ("power cap", "temperature (software)"))
    assert str(found) == "SM clock 1665 of 1980 MHz, held back by power cap, temperature (software)"
    assert (str(Clocks()), str(Clocks(unknown="no NVML"))) == ("SM clock ? of ? MHz", "no NVML")
    assert calls and nvml.shut


def test_idling_is_no_throttling(nvml: SimpleNamespace) -> None:
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda device: 1
    nvml.nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=93)
    assert clocks() == Clocks(1665, 1980, 93, ())


def test_an_nvml_that_cant_be_asked_is_quoted(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise NVMLError("Driver/library version mismatch")

    nvml.nvmlDeviceGetHandleByIndex = failing
    assert "knows no GPU 0 (Driver/library" in clocks().unknown and nvml.shut
    nvml.nvmlInit = failing
    assert "can't be asked (Driver/library" in clocks().unknown
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in clocks().unknown


def test_gpus_are_counted_as_cuda_counts_them(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    nvml.nvmlDeviceGetClockInfo = lambda device, kind: asked.append(device)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc,3")
    clocks(0), clocks(1)
    assert asked == [("uuid", "GPU-abc"), ("index", 3)]
