"""build(calibrator="native") from a TensorRT cache instead of data, on stand-ins of 8.6 and 10."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nets
import numpy as np
import pytest
from standins import Simulation

import trtopt
from trtopt.autotune import candidates, selection
from trtopt.calibration.text_cache import read_cache, write_cache
from trtopt.core.errors import CalibrationError, UsageError
from trtopt.core.values import ShapeRange
from trtopt.engine.manifest import load_manifest
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.timing import Spread, Timing
from trtopt.trt.generation import Generation

Install = Callable[[str], tuple[Simulation, Generation]]
OPTIONS: dict[str, Any] = {"int8": True, "calibrator": "native", "backend": "tensorrt", "shapes": "x:1x3x32x32"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return nets.conv_net(tmp_path / "net.onnx", opset=17)


@pytest.mark.parametrize("version", ["8.6.0", "10.16.1"])
def test_a_cache_stands_in_for_data(version: str, stand_in: Install, model: Path, tmp_path: Path) -> None:
    _, generation = stand_in(version)

    def upload(device: int) -> Any:
        raise AssertionError("data was read")

    generation.calibration_upload = upload
    cache = write_cache({"x": 1.0, "y": 2.0}, tmp_path / "old.cache")
    result = trtopt.build(model, tmp_path / "e.engine", calib=cache, **OPTIONS)
    assert not result.cached
    assert result.precision["int8"] > 0
    assert trtopt.build(model, tmp_path / "e.engine", calib=cache, **OPTIONS).cached
    write_cache({"x": 1.5, "y": 2.0}, cache)
    assert not trtopt.build(model, tmp_path / "e.engine", calib=cache, **OPTIONS).cached


def test_what_the_native_calibrator_cannot_read_is_refused(stand_in: Install, model: Path, tmp_path: Path) -> None:
    stand_in("8.6.0")
    table = tmp_path / "t.calib.json"
    table.write_text("{}")
    with pytest.raises(UsageError, match="--export-cache writes"):
        trtopt.build(model, tmp_path / "e.engine", calib=table, **OPTIONS)
    damaged = tmp_path / "damaged.cache"
    damaged.write_text("TRT-8600-EntropyCalibration2\nx: zzz\n")
    with pytest.raises(CalibrationError, match="line 2"):
        trtopt.build(model, tmp_path / "e.engine", calib=damaged, **OPTIONS)
    assert not (tmp_path / "e.engine").exists()


def test_what_the_native_calibrator_wrote_is_kept_where_asked(stand_in: Install, model: Path, tmp_path: Path) -> None:
    stand_in("8.6.0")
    given, kept = write_cache({"x": 1.0, "y": 2.0}, tmp_path / "old.cache"), tmp_path / "kept.cache"
    options = {**OPTIONS, "calib": given, "save_cache": kept}
    assert not trtopt.build(model, tmp_path / "e.engine", **options).cached
    assert read_cache(kept).header == "TRT-8600-EntropyCalibration2"
    assert trtopt.build(model, tmp_path / "e.engine", **options).cached
    kept.unlink()
    assert not trtopt.build(model, tmp_path / "e.engine", **options).cached
    assert kept.is_file()
    with pytest.raises(UsageError, match="add `calibrator='native'`"):
        trtopt.build(model, tmp_path / "f.engine", fp16=True, backend="tensorrt", save_cache=kept)
    with pytest.raises(UsageError, match="would overwrite"):
        trtopt.build(model, tmp_path / "f.engine", **{**options, "save_cache": given})


@pytest.mark.parametrize(("int8", "kept"), [(0.5, "int8"), (0.9, "fp16")])
def test_best_keeps_the_cache_whichever_engine_it_keeps(
    stand_in: Install, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8: float, kept: str
) -> None:
    _, generation = stand_in("8.6.0")
    found = generation.gpu()
    monkeypatch.setattr(candidates, "Device", lambda ordinal: SimpleNamespace(info=found.devices[0]))

    def open_played(engine: Path, device: int, contexts: int, trust_host_code: bool) -> Any:
        assert trust_host_code, "it was built just now"
        manifest = load_manifest(engine)
        assert manifest is not None
        ms = {"int8": int8, "fp16": 0.8}[manifest.spec["precision"]]
        spread = Spread(ms, ms, ms, ms)
        return contextlib.nullcontext(
            SimpleNamespace(
                inputs=load_model(model).inputs,
                outputs=load_model(model).outputs,
                profiles=({"x": ShapeRange(*[(1, 3, 32, 32)] * 3)},),
                time=lambda *_: Timing(spread, spread, 1, True),
                taken=lambda inputs: inputs,
                run_batches=OnnxRunner(model, optimize=True, threads=1),
            )
        )

    monkeypatch.setattr(selection, "Session", open_played)
    given, cache = write_cache({"x": 1.0, "y": 2.0}, tmp_path / "old.cache"), tmp_path / "kept.cache"
    data = {"x": np.linspace(-1, 1, 32 * 3072, dtype=np.float32).reshape(32, 3, 32, 32)}
    request = {**OPTIONS, "calib": given, "data": data, "save_cache": cache, "best": True}
    result = trtopt.build(model, tmp_path / "e.engine", **request)
    assert result.comparison is not None
    assert result.comparison["kept"] == kept
    assert read_cache(cache).header == "TRT-8600-EntropyCalibration2"
    assert trtopt.build(model, tmp_path / "e.engine", **request).cached
    cache.unlink()
    assert not trtopt.build(model, tmp_path / "e.engine", **request).cached
    assert cache.is_file()
    assert not list(tmp_path.glob(".*"))
