"""build(device=): on stand-ins of TensorRT, with two GPUs of tests/fake_cuda.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeEngine
from standins import Simulation
from world import samples

import trtopt
import trtopt.trt.generation
import trtopt.trt.loader
from trtopt.autotune import candidates
from trtopt.core.errors import DeviceError, UsageError
from trtopt.cuda import device as devices
from trtopt.cuda.device import Device, DeviceInfo, Probe
from trtopt.cuda.driver import Driver
from trtopt.engine.manifest import manifest_path, read_manifest
from trtopt.trt.generation import Generation
from trtopt.trt.plans import LoadedEngine

Install = Callable[[str], tuple[Simulation, Generation]]
GPUS = (DeviceInfo(0, "First GPU", 90, 16 << 30), DeviceInfo(1, "Second GPU", 89, 8 << 30))
OPTIONS: dict[str, Any] = {"backend": "tensorrt", "shapes": "x:1x3x32x32"}


class Gpus:
    """What the door and the driver are made to see; a build notes which device is current where it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.cuda = monkeypatch, FakeCuda(devices=2)

        def fails(*_: Any) -> int:
            return 3

        functions = self.cuda.get_current, self.cuda.set_current
        self.driver = Driver(fails, *functions, 0, 0, 0, 0)
        monkeypatch.setattr(devices.Driver, "load", lambda: self.driver)
        monkeypatch.setattr(devices, "primary_context", lambda ordinal: 100 + ordinal if ordinal < 2 else None)

    def see(self, *gpus: DeviceInfo) -> None:
        probe = Probe(gpus, (13, 0)) if gpus else Probe(reason="no NVIDIA driver is installed")
        for module in (trtopt.trt, trtopt.trt.loader):
            self.patch.setattr(module, "probe", lambda: probe)

    def noted(self, sim: Simulation) -> list[int | None]:
        current: list[int | None] = []
        sim.block = lambda: current.append(self.driver.current())
        return current


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize("before", [None, 100, 101])
@pytest.mark.parametrize("version", ["8.6.0", "11.4.0"])
def test_the_build_is_on_that_gpu_and_the_caller_stays_on_its_own(
    version: str, before: int | None, stand_in: Install, gpus: Gpus, float_net: Path, tmp_path: Path
) -> None:
    sim, _ = stand_in(version)
    gpus.see(*GPUS)
    current = gpus.noted(sim)
    gpus.cuda.set_current(before)
    result = trtopt.build(float_net, tmp_path / "m.engine", device=1, **OPTIONS)
    assert current == [101]
    assert gpus.driver.current() == before
    manifest = read_manifest(manifest_path(result.engine))
    assert (manifest.generation["gpu"], manifest.compute_capabilities) == (str(GPUS[1]), [89])
    assert "device" not in manifest.spec


def test_gpus_that_are_not_there_are_refused_before_any_work(
    stand_in: Install, gpus: Gpus, float_net: Path, tmp_path: Path
) -> None:
    sim, _ = stand_in("8.6.0")
    gpus.see(*GPUS)
    with pytest.raises(DeviceError, match=r"`device=2`: this machine's GPUs are 0 to 1"):
        trtopt.build(float_net, tmp_path / "m.engine", device=2, **OPTIONS)
    with pytest.raises(UsageError, match=r"`device=` is -1; at least 0 is needed"):
        trtopt.build(float_net, tmp_path / "m.engine", device=-1, **OPTIONS)
    gpus.see(*GPUS, DeviceInfo(2, "Third GPU", 90, 1 << 30))
    with pytest.raises(DeviceError, match="the NVIDIA driver can't use GPU 2"):
        trtopt.build(float_net, tmp_path / "m.engine", device=2, **OPTIONS)
    assert sim.configs == []
    assert not (tmp_path / "m.engine").exists()


def test_an_engine_for_another_gpu_is_built_again_and_for_a_like_one_not(
    stand_in: Install, gpus: Gpus, float_net: Path, tmp_path: Path
) -> None:
    stand_in("8.6.0")
    gpus.see(*GPUS, DeviceInfo(2, "Second GPU", 89, 8 << 30))
    gpus.patch.setattr(devices, "primary_context", lambda ordinal: 100 + ordinal)
    cached = [
        trtopt.build(float_net, tmp_path / "m.engine", device=number, **OPTIONS).cached for number in (0, 1, 2, 0)
    ]
    assert cached == [False, False, True, False]


@pytest.mark.parametrize("calibrator", ["trtopt", "native"])
def test_what_runs_on_a_gpu_meanwhile_runs_on_that_one(
    calibrator: str, stand_in: Install, gpus: Gpus, float_net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are timed there, and TensorRT's own calibrator gets its data there."""
    _, generation = stand_in("8.6.0")
    gpus.see(*GPUS)
    cuda, uploads = gpus.cuda, list[int]()

    def upload(device: int) -> Any:
        uploads.append(device)
        return lambda name, array: 1

    def load(plan: bytes, name: str, **_: Any) -> LoadedEngine:
        shapes = {"x": ((1, 3, 32, 32), "INPUT"), "y": ((1, 3), "OUTPUT")}
        tensors = {key: ("FLOAT", "float32", *item, "DEVICE") for key, item in shapes.items()}
        results = lambda _: {"y": (1, 3)}, lambda _: {"y": np.zeros((1, 3), np.float32)}
        engine = FakeEngine(cuda, tensors, [{"x": (shapes["x"][0],) * 3}], *results)
        return LoadedEngine(SimpleNamespace(IOutputAllocator=object), engine, None)

    def opened(ordinal: int) -> Device:
        return Device(functions=cuda, info=GPUS[ordinal])

    monkeypatch.setattr("trtopt.trt.weak.device_upload", upload)
    runs = SimpleNamespace(
        family="tensorrt8", product="TensorRT", version=generation.version, load=load, unread=lambda _: ""
    )
    monkeypatch.setattr(devices.Driver, "load", lambda: gpus.driver)
    monkeypatch.setattr("trtopt.runtime.gpu_engine.probe", lambda: Probe(GPUS, (13, 0)))
    monkeypatch.setattr("trtopt.runtime.gpu_engine.plan_loader", lambda *_: runs)
    monkeypatch.setattr("trtopt.runtime.gpu_engine.Device", opened)
    monkeypatch.setattr(candidates, "Device", opened)
    data = {"x": samples(16)}
    options = {**OPTIONS, "int8": True, "data": data, "calibrator": calibrator, "batch": 1}
    result = trtopt.build(float_net, tmp_path / "m.engine", device=1, **options)
    assert result.not_measured == ""
    assert result.comparison is not None and result.comparison["gpu"] == str(GPUS[1])
    assert cuda.used == {1}
    assert uploads == ([1] if calibrator == "native" else [])
