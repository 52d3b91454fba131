"""The table of measured results is what its rows say, and the rows are of recipes that there are."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

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
    assert {(row["recipe"], row["precision"]) for row in rows} == {
        (name, precision) for name in known_recipes() for precision in ("int8", "fp16")
    }
    for row in rows:
        words = shlex.split(row["command"])
        assert words[:3] == ["trtopt", "pipeline", row["recipe"]]
        assert words[words.index("--precision") + 1] == row["precision"]


def test_a_row_of_another_value_is_another_table(script: Any, rows: list[dict[str, Any]]) -> None:
    content = script.PAGE.read_text(encoding="utf-8")
    changed = [{**row, "engine_bytes": row["engine_bytes"] + 10**6} for row in rows]
    assert script.page(content, changed) != content
    on_gpu = {**rows[0], "gpu": "a GPU", "timing": {"gpu": {"median": 0.25}}}
    text = script.table([on_gpu])
    assert "| 0.25 ms |" in text and text.startswith(f"{rows[0]['product']}, a GPU, ")
