"""Hostile models end in a clear error or a result: no signal, no hang, no internal error, at most 2 GB, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hostile_models
import pytest

MIB = 2048
# Where running the model is what is hostile, `check --fix` compares it, too.
RUN = (
    "div",
    "mod",
    "loop",
    "fill",
    "doubled",
    "data",
    "string",
    "input",
    "far",
    "scan",
    "power",
    "nonzero",
    "split",
    "nested",
)
COMPARED = sorted(name for name in hostile_models.CASES if name.startswith(RUN))
CHECKED = sorted(hostile_models.CASES.keys() - set(COMPARED))
BUILT = [
    *("fill_3gb", "outer_MatMul", "doubled", "split_sequence", "many_constants", "data_dependent", "string_repeat"),
    *("weights_nan", "weights_inf", "not_utf8_input", "weight_without_data", "input_0", "input_2e31", "input_string"),
    *("external_link", "function_tree", "div_64_minus_one_constant", "loop_forever", "weight_1000_dims"),
]


def told(folder: Path, command: str, names: list[str]) -> list[str]:
    """What is wrong with how the cases ended."""
    script = str(Path(hostile_models.__file__))
    run = subprocess.run(
        [sys.executable, script, str(folder), command, *names], capture_output=True, text=True, check=False, timeout=900
    )
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [item["name"] for item in found] == names, run.stderr
    allowed = {"check": set(), "fix": {"out/clean.onnx"}, "build": {"out/m.engine", "out/m.engine.json"}}[command]
    wrong = []
    for item in found:
        fine = item["status"] in (0, 1, 2) and item["mib"] <= MIB and set(item["left"]) <= allowed
        if not fine or "Traceback" in item["said"] or "Warning:" in item["said"]:
            wrong.append(str(item))
    return wrong


def test_check(tmp_path: Path) -> None:
    assert told(tmp_path, "check", CHECKED) == []


def test_check_and_fix(tmp_path: Path) -> None:
    assert told(tmp_path, "fix", COMPARED) == []


@pytest.mark.usefixtures("rtx")
def test_build(tmp_path: Path) -> None:
    assert told(tmp_path, "build", BUILT) == []


def test_there_are_many() -> None:
    assert len(COMPARED) >= 40 and len(CHECKED) >= 120
