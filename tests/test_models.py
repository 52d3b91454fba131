"""A whole model, another at each commit, from check to FP16 and INT8 engines: every layer runs as asked, or is listed with
its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from commit import turn

import trtopt
from trtopt.data.samples import write_crops
from trtopt.engine.manifest import load_manifest
from trtopt.graph.op_types import WEIGHTED
from trtopt.recipes.loader import Recipe, known_recipes, load_recipe

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
# Recipe → convolutions, transposed convolutions and constant matrix products that stay out of INT8.
KEPT = {
    "deeplabv3_mobilenet_v3_large": 17, "efficientnet-lite0": 0, "minilm": 12, "mobilenet_v3_large": 16, "rapidocr-det": 24,
    "rapidocr-rec": 8, "resnet50": 0, "ssdlite320_mobilenet_v3_large": 21, "vit_b_16": 24,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))


def _data(recipe: Recipe, folder: Path) -> Mapping[str, Any]:
    if recipe.data is not None:
        return {"data": recipe.data, "limit": 8}
    assert recipe.calibration is not None
    write_crops(recipe.calibration, folder)
    return {"images": folder, "preprocess": recipe.preprocess, "limit": 4}


def test_every_recipe_has_its_turn() -> None:
    assert set(KEPT) == set(known_recipes())


@pytest.mark.parametrize("name", [turn(list(KEPT))])
def test_a_model_goes_from_check_to_engines(name: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    recipe, clean = load_recipe(name), tmp_path / "clean.onnx"
    report = trtopt.check(recipe.onnx or exported(name), fix=clean)
    assert report.ok, [item.message for item in report.findings if item.level == "error"]
    graph = onnx.load(clean).graph
    heavy = {node.name for node in graph.node if node.op_type in WEIGHTED}
    common: dict[str, Any] = {"shapes": [dict(recipe.ranges)], "target": "sm89"}
    half = trtopt.build(clean, tmp_path / "half.engine", fp16=True, **common)
    assert half.precision["fp16"] == half.precision["total"] > 0
    result = trtopt.build(clean, tmp_path / "int8.engine", int8=True, **_data(recipe, tmp_path / "images"), **common)
    kept = {item.node for item in result.kept} & heavy
    assert len(kept) == KEPT[name]
    assert all(item.reason for item in result.kept)
    for engine in (half.engine, result.engine):
        manifest = load_manifest(engine)
        assert manifest is not None
        assert all(layer["nodes"] for layer in manifest.layers if layer["kind"] != "other")
        assert heavy <= {node for layer in manifest.layers for node in layer["nodes"]}
    in_int8 = {node for layer in manifest.layers if layer["precision"] == "int8" for node in layer["nodes"]}
    assert heavy - kept <= in_int8
    assert result.precision["int8"] > 0
