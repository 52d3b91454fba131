from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nets import conv_net
from standins import Simulation

import trtopt.trt
import trtopt.trt.loader
from trtopt.cuda.device import DeviceInfo, Probe


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Let the door see a GPU of this compute capability, or none."""

    def see(capability: int | None) -> None:
        gpu = DeviceInfo(0, "Stand-in GPU", capability or 0, 16 << 30)
        found = Probe((gpu,), (13, 0)) if capability else Probe(reason="no NVIDIA driver is installed")
        monkeypatch.setattr(trtopt.trt, "probe", lambda: found)
        monkeypatch.setattr(trtopt.trt.loader, "probe", lambda: found)

    return see


@pytest.fixture
def float_net(tmp_path: Path) -> Path:
    return conv_net(tmp_path / "float.onnx", opset=17)


@pytest.fixture
def stand_in(
    monkeypatch: pytest.MonkeyPatch, with_gpu: Callable[[int | None], None], tmp_path: Path
) -> Callable[[str], tuple[Simulation, trtopt.trt.Generation]]:
    """Install a stand-in of a version as `tensorrt`, with a GPU to build on; give it and what the door makes of it."""
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))  # its timings are nobody else's

    def install(version: str) -> tuple[Simulation, trtopt.trt.Generation]:
        sim = Simulation(version)
        monkeypatch.setitem(sys.modules, "tensorrt", sim.module)
        monkeypatch.setattr("trtopt.trt.lean_library.problem", lambda *_: "")  # the library to embed is there
        with_gpu(90)
        return sim, trtopt.trt.select("tensorrt")

    return install
