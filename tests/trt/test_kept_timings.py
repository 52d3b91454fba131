"""The timing cache that builds share unless told not to: where it lies, who may write it, and that it stays within bounds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import pytest
from standins import Simulation

from trtopt.builder import execute
from trtopt.builder.construction import build
from trtopt.trt.generation import Generation

Install = Callable[[str], tuple[Simulation, Generation]]
SHAPES = "x:1x3x32x32,8x3x32x32,32x3x32x32"
WITH_TIMINGS = ("8.6.0", "10.16.1", "11.4.0")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "timing"


@pytest.fixture
def float_net(tmp_path: Path) -> Path:
    return nets.conv_net(tmp_path / "float.onnx", opset=17)


def _build(model: Path, output: Path, **options: Any) -> Any:
    return build(model, output, shapes=SHAPES, backend="tensorrt", allow_precision_fallback=True, **options)


@pytest.mark.parametrize("version", WITH_TIMINGS)
def test_builds_share_one_for_each_gpu_and_tensorrt(
    version: str, stand_in: Install, float_net: Path, tmp_path: Path, kept: Path
) -> None:
    sim, generation = stand_in(version)
    read: list[bytes] = []
    create = sim.module.IBuilderConfig.create_timing_cache
    sim.module.IBuilderConfig.create_timing_cache = lambda self, content: (
        read.append(bytes(content)) or create(self, content)
    )
    first = _build(float_net, tmp_path / "a.engine")
    [path] = kept.iterdir()
    assert path.name == f"{generation.family}-{generation.version}-Stand-in-GPU-sm90-16-GiB.cache"
    assert set(read) == {b""}
    read.clear()
    _build(float_net, tmp_path / "b.engine")
    assert read[0] == path.read_bytes() == f"timings of {sim.version}\n".encode()
    assert not any("timing cache" in warning for warning in first.warnings)
    assert _build(float_net, tmp_path / "a.engine", timing_cache="none").cached  # no part of what an engine is
    assert [item.name for item in kept.iterdir()] == [path.name]  # no lock is left


def test_none_is_none(stand_in: Install, float_net: Path, tmp_path: Path, kept: Path) -> None:
    stand_in("8.6.0")
    _build(float_net, tmp_path / "none", timing_cache="none")  # which is no file's name here
    assert not kept.exists()
    _build(float_net, tmp_path / "b.engine", timing_cache=tmp_path / "own.cache")
    assert not kept.exists()
    assert (tmp_path / "own.cache").read_bytes()


def test_it_begins_anew_where_it_has_grown_large(
    stand_in: Install, float_net: Path, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim, _ = stand_in("8.6.0")
    _build(float_net, tmp_path / "a.engine")
    [path] = kept.iterdir()
    path.write_bytes(path.read_bytes() + b"many\n" * 100)
    monkeypatch.setattr(execute, "MOST_TIMINGS", 100)
    _build(float_net, tmp_path / "b.engine")
    assert path.read_bytes() == f"timings of {sim.version}\n".encode()


def test_one_that_cannot_be_written_fails_no_build(
    stand_in: Install, float_net: Path, tmp_path: Path, kept: Path
) -> None:
    sim, _ = stand_in("8.6.0")
    sim.block = lambda: shutil.rmtree(kept, ignore_errors=True)
    built = _build(float_net, tmp_path / "a.engine")
    assert built.engine.is_file() and any("timing cache isn't kept" in warning for warning in built.warnings)
    shutil.rmtree(kept, ignore_errors=True)
    kept.write_bytes(b"")  # where a folder is to be
    assert _build(float_net, tmp_path / "b.engine").engine.is_file()
