"""Timing caches that builds share unless told not to, and TensorRT's own calibration caches, against stand-ins."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from standins import VERSIONS, Simulation
from world import Heard

import trtopt
from trtopt.builder import execute
from trtopt.builder.construction import build
from trtopt.calibration.text_cache import read_cache, write_cache
from trtopt.core.errors import BuildFailed, CalibrationError, UsageError
from trtopt.engine.manifest import load_manifest
from trtopt.trt.generation import Generation

Install = Callable[[str], tuple[Simulation, Generation]]
SHAPES = "x:1x3x32x32,8x3x32x32,32x3x32x32"
NATIVE: dict[str, Any] = {"int8": True, "calibrator": "native", "backend": "tensorrt", "shapes": "x:1x3x32x32"}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "timing"


def _build(model: Path, output: Path, **options: Any) -> Any:
    return build(model, output, shapes=SHAPES, backend="tensorrt", allow_precision_fallback=True, **options)


@pytest.mark.parametrize("version", VERSIONS)
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
    shutil.rmtree(kept)
    for name, own in (("none", "none"), ("c.engine", tmp_path / "own.cache")):  # the first is no file's name here
        _build(float_net, tmp_path / name, timing_cache=own)
    assert not kept.exists() and (tmp_path / "own.cache").read_bytes()


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


# build(calibrator="native") from a TensorRT cache instead of data


@pytest.mark.parametrize("version", ["8.6.0", "10.16.1"])
def test_a_cache_stands_in_for_data(
    version: str, stand_in: Install, float_net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(version)

    def upload(device: int) -> Any:
        raise AssertionError("data was read")

    monkeypatch.setattr("trtopt.trt.weak.device_upload", upload)
    cache = write_cache({"x": 1.0, "y": 2.0}, tmp_path / "old.cache")
    result = trtopt.build(float_net, tmp_path / "e.engine", calib=cache, **NATIVE)
    assert not result.cached
    assert result.precision["int8"] > 0
    assert trtopt.build(float_net, tmp_path / "e.engine", calib=cache, **NATIVE).cached
    write_cache({"x": 1.5, "y": 2.0}, cache)
    assert not trtopt.build(float_net, tmp_path / "e.engine", calib=cache, **NATIVE).cached


def test_what_the_native_calibrator_cannot_read_is_refused(stand_in: Install, float_net: Path, tmp_path: Path) -> None:
    stand_in("8.6.0")
    table = tmp_path / "t.calib.json"
    table.write_text("{}")
    with pytest.raises(UsageError, match="--export-cache writes"):
        trtopt.build(float_net, tmp_path / "e.engine", calib=table, **NATIVE)
    damaged = tmp_path / "damaged.cache"
    damaged.write_text("TRT-8600-EntropyCalibration2\nx: zzz\n")
    with pytest.raises(CalibrationError, match="line 2"):
        trtopt.build(float_net, tmp_path / "e.engine", calib=damaged, **NATIVE)
    assert not (tmp_path / "e.engine").exists()


def test_what_the_native_calibrator_wrote_is_kept_where_asked(
    stand_in: Install, float_net: Path, tmp_path: Path
) -> None:
    stand_in("8.6.0")
    given, kept = write_cache({"x": 1.0, "y": 2.0}, tmp_path / "old.cache"), tmp_path / "kept.cache"
    options = {**NATIVE, "calib": given, "save_cache": kept}
    assert not trtopt.build(float_net, tmp_path / "e.engine", **options).cached
    assert read_cache(kept).header == "TRT-8600-EntropyCalibration2"
    assert trtopt.build(float_net, tmp_path / "e.engine", **options).cached
    kept.unlink()
    assert not trtopt.build(float_net, tmp_path / "e.engine", **options).cached
    assert kept.is_file()
    with pytest.raises(UsageError, match="add `calibrator='native'`"):
        trtopt.build(float_net, tmp_path / "f.engine", fp16=True, backend="tensorrt", save_cache=kept)
    with pytest.raises(UsageError, match="would overwrite"):
        trtopt.build(float_net, tmp_path / "f.engine", **{**options, "save_cache": given})


# Scales of trtopt beside the graph


def _gated(folder: Path) -> Path:
    text = """(float[n,3,32,32] x) => (float[n,8,30,30] y) {
        [first] c = Conv(x, w) a = Relu(c) m = GlobalAveragePool(a) [squeeze] s = Conv(m, v) r = Relu(s)
        [excite] e = Conv(r, v) g = Sigmoid(e) p = Mul(a, g) [last] y = Conv(p, v) }"""
    model = folder / "gated.onnx"
    onnx.save(written(text, w=values(8, 3, 3, 3), v=values(8, 8, 1, 1)), model)
    return model


@pytest.mark.parametrize("version", VERSIONS)
def test_squeeze_and_excite_has_its_scales_beside_the_graph_on_10_alone(
    version: str, stand_in: Install, tmp_path: Path
) -> None:
    stand_in(version)
    model, data, kept = _gated(tmp_path), tmp_path / "d.npz", tmp_path / "built.onnx"
    np.savez(data, x=values(8, 3, 32, 32))
    common: dict[str, Any] = {"int8": True, "backend": "tensorrt", "shapes": SHAPES, "allow_precision_fallback": True}
    heard = Heard()
    result = build(model, tmp_path / "e.engine", data=data, save_onnx=kept, **common, reporter=heard)
    pairs = sum(node.op_type == "QuantizeLinear" for node in onnx.load(kept).graph.node)
    beside = version.startswith("10.")
    assert (pairs == 0) == beside == any("beside the graph" in note for note in heard.notes)
    assert result.table is not None and load_manifest(result.engine).calibration is not None
    if not beside:
        return
    assert {"x", "a", "m", "s", "e", "g", "p", "y"} <= result.table.tensors.keys()
    # What a cache can't say, and tables of before, go into the graph.
    few = replace(result.table, tensors={name: result.table.tensors[name] for name in ("x", "p")})
    for table, more in (
        (replace(result.table, left_out={"last": "noise"}), {}),
        (few, {}),
        (result.table, {"refit": True}),
    ):
        build(model, tmp_path / "f.engine", calib=table, save_onnx=kept, **common, **more)
        assert any(node.op_type == "QuantizeLinear" for node in onnx.load(kept).graph.node)


def test_a_table_can_say_that_its_scales_stand_beside_the_graph(
    stand_in: Install, float_net: Path, tmp_path: Path
) -> None:
    stand_in("10.16.1")
    data, kept, heard = {"x": values(8, 3, 32, 32)}, tmp_path / "built.onnx", Heard()
    whole = trtopt.calibrate(float_net, data=data, all_tensors=True).table
    few = trtopt.calibrate(float_net, data=data).table
    assert few.tensors.keys() < whole.tensors.keys() and few.amax.items() <= whole.amax.items()
    options: dict[str, Any] = {"backend": "tensorrt", "shapes": SHAPES, "allow_precision_fallback": True}
    for table, beside in ((whole, False), (replace(whole, beside=True), True), (replace(few, beside=True), False)):
        build(float_net, tmp_path / "e.engine", int8=True, calib=table, save_onnx=kept, reporter=heard, **options)
        assert any(node.op_type == "QuantizeLinear" for node in onnx.load(kept).graph.node) != beside
    assert any("`all_tensors=True`" in text for text in heard.warnings)


def test_where_nothing_runs_in_int8_with_scales_beside_the_graph_they_go_into_it(
    stand_in: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("10.16.1")
    model, kept, heard, real = _gated(tmp_path), tmp_path / "built.onnx", Heard(), Generation.build

    def refused(self: Generation, path: Path, spec: Any, **options: Any) -> Any:
        if spec.calibrator == "native":
            raise BuildFailed("no implementation")
        return real(self, path, spec, **options)

    monkeypatch.setattr(Generation, "build", refused)
    data = {"x": values(8, 3, 32, 32)}
    made: dict[str, Any] = {
        "int8": True,
        "backend": "tensorrt",
        "shapes": SHAPES,
        "allow_precision_fallback": True,
        "data": data,
    }
    result = build(model, tmp_path / "e.engine", save_onnx=kept, reporter=heard, **made)
    assert any("with Q/DQ in the graph instead" in note and "no implementation" in note for note in heard.notes)
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(kept).graph.node)
    assert load_manifest(result.engine).spec["calibrator"] == "trtopt"
    assert build(model, tmp_path / "e.engine", save_onnx=kept, **made).cached
