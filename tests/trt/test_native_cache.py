"""build(calibrator="native") from a TensorRT cache instead of data, on stand-ins of 8.6 and 10."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import pytest
from standins import Simulation

import trtopt
from trtopt.calibration.text_cache import read_cache, write_cache
from trtopt.core.errors import CalibrationError, UsageError
from trtopt.trt.generation import Generation

Install = Callable[[str], tuple[Simulation, Generation]]
OPTIONS: dict[str, Any] = {"int8": True, "calibrator": "native", "backend": "tensorrt", "shapes": "x:1x3x32x32"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return nets.conv_net(tmp_path / "net.onnx", opset=17)


@pytest.mark.parametrize("version", ["8.6.0", "10.16.1"])
def test_a_cache_stands_in_for_data(
    version: str, stand_in: Install, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(version)

    def upload(device: int) -> Any:
        raise AssertionError("data was read")

    monkeypatch.setattr("trtopt.trt.weak.device_upload", upload)
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
