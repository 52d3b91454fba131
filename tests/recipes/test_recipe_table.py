"""The table of measured results is what its rows say, and the rows are of recipes that there are."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import conv_relu

import trtopt
from trtopt.recipes.loader import known_recipes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "recipe_table.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("recipe_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rows(script: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(script.ROWS.read_text(encoding="utf-8"))
    return found


def test_the_table_is_up_to_date(script: Any, rows: list[dict[str, Any]]) -> None:
    content = script.PAGE.read_text(encoding="utf-8")
    assert content == script.page(content, rows), "python scripts/recipe_table.py table"
    assert content.count(script.BEGIN) == content.count(script.END) == 1


def test_every_recipe_has_rows_and_each_the_command_that_made_it(rows: list[dict[str, Any]]) -> None:
    assert {(row["recipe"], row["precision"]) for row in rows if row["gpu"] is None} == {
        (name, precision) for name in known_recipes() for precision in ("int8", "fp16")
    }
    for row in rows:
        assert row["placed"][0] >= 0.95 * row["placed"][1], "layers of which no ONNX node is known"
        words = shlex.split(row["command"])
        if words[1] == "pipeline":
            assert words[:3] == ["trtopt", "pipeline", row["recipe"]]
            assert words[words.index("--precision") + 1] == row["precision"]
        else:
            assert words[:3] == ["trtopt", "build", f"out/{row['recipe']}/{row['recipe']}.onnx"]
            assert f"--{row['precision']}" in words and row["timing"]


def test_a_row_of_another_value_is_another_table(script: Any, rows: list[dict[str, Any]]) -> None:
    content = script.PAGE.read_text(encoding="utf-8")
    changed = [{**row, "engine_bytes": row["engine_bytes"] + 10**6} for row in rows]
    assert script.page(content, changed) != content
    on_gpu = {**rows[0], "gpu": "a GPU", "timing": {"1": 0.25, "32": 1.5}}
    text = script.table([on_gpu])
    assert "| 0.25 ms at batch 1; 1.5 ms at batch 32 |" in text and text.startswith(f"{rows[0]['product']}, a GPU, ")
    layered = {**on_gpu, "profiled": {"layers": 30, "layers_ms": 1.65, "whole_ms": 1.5}}
    assert "1.5 ms at batch 32 (30 layers one by one 1.65, +10%) |" in script.table([layered])
    assert script.merged([rows[0], on_gpu], [layered]) == script.merged([layered], [rows[0]])


@pytest.fixture
def packed(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a pipeline leaves of a recipe `net`; building is real, and what needs a GPU is played."""
    place = tmp_path / "out" / "net"
    place.mkdir(parents=True)
    onnx.save(conv_relu(), place / "net.onnx")
    np.savez(place / "net.npz", x=np.zeros((2, 3, 8, 8), np.float32))
    shapes = "x:1x3x8x8,2x3x8x8,4x3x8x8"
    trtopt.build(place / "net.onnx", place / "net.fp32.engine", shapes=shapes, backend="rtx", target="sm89")
    monkeypatch.setattr(script, "typed", played)
    return tmp_path


def played(folder: Path, command: list[str], seconds: float | None = None) -> dict[str, Any]:
    what, *words = command[1:]
    if what == "build":
        options = {"shapes": words[words.index("--shapes") + 1], "int8": "--int8" in words, "fp16": "--fp16" in words}
        if options["int8"]:
            raise subprocess.CalledProcessError(1, command)
        trtopt.build(folder / words[0], folder / words[-1], **options, backend="rtx", target="sm89")
        return {}
    if what == "verify":
        return {"samples": 2, "snr_db": 40.0, "top1_agreement": None, "outputs": {}}
    spread = {"median": 0.2, "p90": 0.2, "p99": 0.2, "minimum": 0.2}
    sizes = [int(size) for size in words[words.index("--batch") + 1].split(",")]
    if what == "bench":
        return {"rows": [{"batch": size, "gpu": spread} for size in sizes], "notes": ["played"]}
    assert what == "profile"
    return {"batches": [{"batch": size, "gpu": spread, "total_ms": 0.22, "layers": [{}, {}]} for size in sizes]}


def test_engines_are_built_where_there_is_no_pytorch(
    script: Any, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = packed / "rows.json"
    assert not script.gpu(packed, rows, [("net", "int8"), ("net", "fp16")], 1, 2, None, None)
    assert "no row: net int8: " in capsys.readouterr().out  # it is told, and the others are made
    [row] = json.loads(rows.read_text())
    assert (row["recipe"], row["precision"], row["timing"]) == ("net", "fp16", {"1": 0.2, "4": 0.2})
    assert row["profiled"] == {"layers": 2, "layers_ms": 0.22, "whole_ms": 0.2}
    assert (
        row["agreement"]["snr_db"] == 40 and row["engine_bytes"] > 0 and row["layers"] == ["1 of 1 convolutions FP16"]
    )
    engine = "out/net/net.fp16.gpu.engine"
    build = (
        f"trtopt build out/net/net.onnx --fp16 --shapes x:1x3x8x8,2x3x8x8,4x3x8x8 --optimization-level 1 -o {engine}"
    )
    assert row["command"] == f"{build}; trtopt bench {engine} --batch 1,4"
    assert json.loads((packed / f"{engine}.profile.json").read_text())["batches"]


def test_no_build_is_begun_when_the_time_is_over(script: Any, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not script.gpu(packed, packed / "rows.json", [("net", "fp16")], 1, 1, -1.0, None)
    assert capsys.readouterr().out == "no row: net fp16: -1 s were over\n"
    assert not (packed / "rows.json").exists()


def test_an_engine_that_could_not_be_timed_has_a_row_that_says_so(
    script: Any, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_gpu(folder: Path, command: list[str], seconds: float | None = None) -> dict[str, Any]:
        if command[1] in ("bench", "verify"):
            raise subprocess.CalledProcessError(1, command)
        return played(folder, command, seconds)

    monkeypatch.setattr(script, "typed", without_gpu)
    assert not script.gpu(packed, packed / "rows.json", [("net", "fp16")], 1, 1, None, None)
    [row] = json.loads((packed / "rows.json").read_text())
    assert row["timing"] is None and row["agreement"] is None and row["not_run"].startswith("trtopt bench ")
    assert "| not measured | not run |" in script.table([row])
