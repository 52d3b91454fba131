"""The batcher's benchmark runs, and says when results are wrong."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import conv_relu

import trtopt

_PATH = Path(__file__).parents[2] / "benchmarks" / "batcher.py"
_spec = importlib.util.spec_from_file_location("bench_batcher", _PATH)
assert _spec and _spec.loader
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


@pytest.mark.parametrize("wrong", [False, True])
def test_it_prints_a_row_for_each_way_and_judges_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: bool
) -> None:
    onnx.save(conv_relu(), tmp_path / "net.onnx")
    options = ["--backend", "onnxruntime", "--callers", "4", "--batch", "4", "--seconds", "0.05", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["batcher.py", str(tmp_path / "net.onnx"), *options])
    if wrong:
        run = trtopt.Session.run

        def shifted(session: Any, inputs: Any) -> Any:
            return {name: array + (len(array) > 1) for name, array in run(session, inputs).items()}

        monkeypatch.setattr(trtopt.Session, "run", shifted)
    assert bench.main() == int(wrong)
    rows = re.findall(r"^\| (.*?) \| (\d+) \| ([\d.]+)× \| ([\d.]+)× \|", capsys.readouterr().out, re.M)
    assert [row[0].split(",")[0] for row in rows] == ["one thread", "4 threads", "4 threads", "4 tasks"]
    assert all(int(row[1]) > 0 for row in rows)
    assert rows[0][2] == rows[1][3] == "1.000"
