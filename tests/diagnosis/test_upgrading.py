"""What `certify` keeps of engines of TensorRT-RTX, and, made of these, of other TensorRTs and GPUs, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from typer.testing import CliRunner

import trtopt
from trtopt.cli import app
from trtopt.core.errors import UsageError

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp16.results and int8.results of one model's engines, other.results of another model's."""
    place = tmp_path_factory.mktemp("upgrade")
    text = """(float[n, 3, 8, 8] x) => (float[n, 32, 8, 8] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (c) y = Conv <pads = [1, 1, 1, 1]> (r, v) }"""
    for name, seed in (("net", 0), ("other", 5)):
        weights = {"w": values(32, 3, 3, 3, seed=seed, scale=0.3), "v": values(32, 32, 3, 3, seed=1, scale=0.1)}
        onnx.save(written(text, **weights), place / f"{name}.onnx")
    np.savez(place / "data.npz", x=values(40, 3, 8, 8))
    for name, model, options in (
        ("fp16", "net", {"fp16": True}),
        ("int8", "net", {"int8": True, "data": place / "data.npz"}),
        ("other", "other", {"fp16": True}),
    ):
        engine, kept = place / f"{name}.engine", place / f"{name}.kept.onnx"
        trtopt.build(place / f"{model}.onnx", engine, target="sm89", backend="rtx", save_onnx=kept, **options)
        found = trtopt.certify(
            place / f"{model}.onnx", engine, data=place / "data.npz", limit=4, save=place / f"{name}.results"
        )
        assert found.ok, str(found)
    return place


def _edited(source: Path, target: Path, edit: Edit) -> Path:
    content = json.loads(source.read_text())
    edit(content)
    target.write_text(json.dumps(content))
    return target


def _on_gpu(version: str, ms: float, shape: str = "8x3x8x8", **more: Any) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        content["manifest"]["generation"] |= {"product": "TensorRT", "version": version, "gpu": "NVIDIA H200"} | more
        content["times"] = [{"shapes": {"x": shape}, "gpu_ms": ms}]
        content["certificate"]["on_gpu"] = True

    return edit


def _kinds(result: trtopt.Upgrade) -> dict[str, bool]:
    return {item.kind: item.gate for item in result.changes}


def test_a_move_that_changes_nothing_passes(folder: Path, tmp_path: Path) -> None:
    old = _edited(folder / "int8.results", tmp_path / "old", _on_gpu("8.6.0", 0.4))
    new = _edited(folder / "int8.results", tmp_path / "new", _on_gpu("10.6.0", 0.4))
    result = trtopt.upgrade([old, new], fail_on=["wrong", "slower=5%", "larger=5%", "precision"])
    assert result.ok and not result.changes
    assert [row[:4] for row in result.rows] == [
        ("old", "TensorRT 8.6.0", "NVIDIA H200", "yes"),
        ("new", "TensorRT 10.6.0", "NVIDIA H200", "yes"),
    ]
    assert all("2 of 2 convolutions INT8" in row[8] and row[5] == "0.4" for row in result.rows)


@pytest.mark.parametrize(
    ("ms", "gate", "fails"), [(0.5, "slower=5%", True), (0.41, "slower=5%", False), (0.3, "slower", False)]
)
def test_time_is_compared_on_one_gpu(folder: Path, tmp_path: Path, ms: float, gate: str, fails: bool) -> None:
    old = _edited(folder / "int8.results", tmp_path / "old", _on_gpu("8.6.0", 0.4))
    new = _edited(folder / "int8.results", tmp_path / "new", _on_gpu("10.6.0", ms))
    result = trtopt.upgrade([old, new], fail_on=[gate])
    (change,) = result.changes
    assert change.kind == "slower" and change.gate is fails and result.ok is not fails
    assert change.text == f"at x 8x3x8x8 it takes {ms / 0.4:.2f} times old's time ({ms:.4g}, 0.4 ms)"
    other = _edited(new, tmp_path / "other", _on_gpu("10.6.0", ms, gpu="NVIDIA L4"))
    assert _kinds(trtopt.upgrade([old, other], fail_on=[gate])) == {"times": True}
    assert _kinds(trtopt.upgrade([old, other], fail_on=["wrong"])) == {"times": False}


def test_a_gate_of_times_closes_where_the_shapes_are_others(folder: Path, tmp_path: Path) -> None:
    old = _edited(folder / "int8.results", tmp_path / "old", _on_gpu("8.6.0", 0.4))
    new = _edited(folder / "int8.results", tmp_path / "new", _on_gpu("10.6.0", 0.4, shape="4x3x8x8"))
    result = trtopt.upgrade([old, new], fail_on=["slower=5%"])
    (change,) = result.changes
    assert change.gate and change.text == "times aren't compared at x 4x3x8x8, at which old wasn't timed"


def test_a_wrong_engine_less_precision_and_a_larger_plan_are_told(folder: Path, tmp_path: Path) -> None:
    def wrong(content: dict[str, Any]) -> None:
        trial = {"name": "equal rows", "output": "y", "batch": 8, "worst_db": "-inf", "limit_db": 88.0, "sample": "s"}
        content["certificate"] |= {"ok": False, "failed": [trial]}
        content["manifest"]["plan"]["bytes"] *= 8

    new = _edited(folder / "fp16.results", tmp_path / "new", wrong)
    result = trtopt.upgrade(
        [folder / "int8.results", new], fail_on=["wrong", "larger=50%", "precision"], output=tmp_path / "p.html"
    )
    assert not result.ok
    assert _kinds(result) == {"wrong": True, "times": False, "larger": True, "precision": True}
    assert result.lines()[0] == "FAILS: new: isn't right: equal rows (y: -inf dB, 88.0 dB wanted)"
    assert result.rows[1][3] == "NO: equal rows (its graph)"
    page = (tmp_path / "p.html").read_text()
    assert page.count('<tr><td class="l">') == 2 and "FAILS: new: isn&#39;t right" in page


def test_what_the_new_one_has_not_is_told_with_what_to_type(folder: Path, tmp_path: Path) -> None:
    """As of 8.6 with its own calibrator, moved to a TensorRT that has none."""

    def native(content: dict[str, Any]) -> None:
        content["manifest"]["spec"]["calibrator"] = "native"

    result = trtopt.upgrade([_edited(folder / "int8.results", tmp_path / "old", native), folder / "int8.results"])
    (text,) = [item.text for item in result.changes if item.kind == "option"]
    assert text.startswith(
        "old was asked for what isn't there: `calibrator='native'`: TensorRT-RTX 1.7.1.116 has no calibrator"
    )
    assert text.endswith("; drop it: trtopt's calibrator gives the scales")


def test_files_that_do_not_go_together_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two files or more"):
        trtopt.upgrade(folder / "int8.results")
    with pytest.raises(UsageError, match=r"different models: .*net.onnx and .*other.onnx differ in content"):
        trtopt.upgrade([folder / "int8.results", folder / "other.results"])
    with pytest.raises(UsageError, match=r"fail_on=` has 'slower=much'; of wrong, slower=5%"):
        trtopt.upgrade([folder / "int8.results", folder / "int8.results"], fail_on=["slower=much"])
    for content in ("{}", "no JSON", json.dumps({"format": "trtopt.certified/1", "manifest": {}})):
        (tmp_path / "damaged").write_text(content)
        with pytest.raises(UsageError, match=r"damaged isn't what trtopt certify `save=` writes"):
            trtopt.upgrade([folder / "int8.results", tmp_path / "damaged"])
    with pytest.raises(UsageError, match="give a plan as the engine"):
        trtopt.certify(folder / "net.onnx", folder / "net.onnx", save=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_command(folder: Path) -> None:
    paths = [str(folder / "int8.results"), str(folder / "fp16.results")]
    shown = CliRunner().invoke(app, ["upgrade", *paths, "--fail-on", "wrong,precision"])
    assert shown.exit_code == 1 and "FAILS: fp16.results: 0.0% of the arithmetic runs in INT8 or FP8" in shown.stdout
    said = CliRunner().invoke(app, ["upgrade", *paths, "--json"])
    assert said.exit_code == 0 and json.loads(said.stdout)["ok"]
