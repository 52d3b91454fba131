"""The benchmark of engines that take pixels runs, and says when classes differ."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from world import crops, net

import trtopt
from trtopt.data.preprocess import PRESETS
from trtopt.graph.io import load_model

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")

_SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("wrong", [False, True])
def test_it_measures_each_way_and_judges_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: bool
) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    spec = importlib.util.spec_from_file_location("embed", _SCRIPTS / "embed.py")
    assert spec
    assert spec.loader
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)

    onnx.save(net(), tmp_path / "model.onnx")
    prepare = PRESETS["efficientnet-lite"].fitted(load_model(tmp_path / "model.onnx").inputs[0])
    samples = np.stack([prepare(image) for image in crops(24)])
    np.savez(tmp_path / "photos.npz", x=samples[:5], labels=np.zeros(5))
    np.savez(tmp_path / "calib.npz", x=samples[5:])
    trtopt.calibrate(tmp_path / "model.onnx", tmp_path / "calib.json", data={"x": samples})
    if wrong:
        run = trtopt.Session.run

        def shifted(session: Any, inputs: Any) -> Any:
            turned = session.embedded is not None
            return {name: -array if turned else array for name, array in run(session, inputs).items()}

        monkeypatch.setattr(trtopt.Session, "run", shifted)
    options = "--backend onnxruntime --target sm89 --threads 1,2 --batch 4 --seconds 0.02 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["embed.py", str(tmp_path), *options.split()])
    assert bench.main() == int(wrong)
    out = capsys.readouterr().out
    assert ("0 of 24 images" if wrong else "| int8, same class | 24 of 24 images") in out
    figures = json.loads((tmp_path / "embed.json").read_text())
    assert set(figures) == {"int8", "fp16"}
    assert set(figures["int8"]["images_per_s_2_threads"]) == {"floats", "pixels", "prepared"}
    assert min(figures["int8"]["images_per_s_2_threads"].values()) > 0
