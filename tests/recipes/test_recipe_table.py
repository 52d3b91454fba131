"""The table of measured results is what its rows say, and the rows are of recipes that there are."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from trtopt.recipes.loader import known_recipes

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "recipes.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("recipes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rows(script: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(script.ROWS.read_text(encoding="utf-8"))
    return found


def test_the_tables_are_up_to_date(script: Any, rows: list[dict[str, Any]]) -> None:
    for path, made in ((script.PAGE, script.table), (script.README, script.short_table)):
        content = path.read_text(encoding="utf-8")
        assert content.count(script.BEGIN) == content.count(script.END) == 1
        assert content == script.page(content, made(rows)), "python benchmarks/recipes.py table"


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
