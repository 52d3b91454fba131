"""benchmarks/compare_native.py on caches whose ratios are known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.table import Table, choose_all
from trtopt.calibration.text_cache import read_cache, write_cache

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "compare_native.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("compare_native", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["compare_native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table() -> Table:
    """Eleven tensors of a ramp each, |x| evenly over 0 to 1, 2, … 11; f and g share a scale."""
    histograms = {}
    for number in range(11):
        histogram = histograms["abcdefghij|"[number]] = Histogram()
        histogram.add(np.linspace(0, number + 1, 4001, dtype=np.float32))
    groups = (("f", "g"),)
    return Table(choose_all(histograms, groups, "minmax"), groups, {"fingerprint": ""}, {}, "minmax", 4001)


def test_quantiles_and_outliers(script: Any, table: Table, tmp_path: Path) -> None:
    theirs = {name: amax * 1.0 for name, amax in table.amax.items()} | {"elsewhere": 1.0}
    theirs["b"] /= 2
    theirs["g"] *= 4
    theirs["|"] /= 1.2
    del theirs["a"]
    table.save(tmp_path / "t.json")
    cache = write_cache(theirs, tmp_path / "c")
    script.main([str(cache), str(tmp_path / "t.json"), "-o", str(tmp_path / "out.md")])
    assert "entropy against TRT-8600-EntropyCalibration2: 10 tensors" in (tmp_path / "out.md").read_text()
    found = script.compare(read_cache(cache), table, "minmax")
    assert found.absent == ("a",)
    assert len(found.ratios) == 10
    assert found.quantile(0.5) == pytest.approx(1.0, rel=1e-6)
    assert found.quantile(0.1) == pytest.approx(np.quantile([0.25, *[1.0] * 7, 1.2, 2.0], 0.1), rel=1e-6)
    assert found.outliers == ["g", "b"]  # furthest first; 1.2 is none
    text = found.markdown()
    assert "10 tensors" in text
    assert "not in the cache: a" in text
    rows = [line for line in text.splitlines() if line.startswith(("| g |", "| b |"))]
    assert "0.250" in rows[0]
    assert "shares one scale" in rows[0]
    assert "not the same inputs?" in rows[0]
    assert "| 2.000 | 2 | 1 | 2 | 0.00% | 5" in rows[1]  # half of what was seen lies beyond TensorRT's
    assert "ours cuts nothing off" in rows[1]
