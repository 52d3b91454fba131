"""INT8 against FP16 on real TensorRT: what build reports, and what --best keeps, by EfficientNet-Lite0's real accuracy.

Each test of --best makes three engines (INT8, FP16, and FP32 as the reference where ONNX Runtime isn't installed), with
the timing cache that the other GPU tests have filled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compared import compare
from lite0 import Builds, Inputs, rows

import trtopt
from trtopt.autotune.selection import Comparison
from trtopt.core.documents import converted
from trtopt.cuda.device import Device
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.limits import Limits
from trtopt.runtime.session import Session

LOW, HIGH = 10.0, 30.0  # dB; observed on an H200: INT8 19.2, FP16 44.9
QUICK = 1.2  # INT8 is at least so many times as fast as FP16 at batch 32; observed on an H200: 1.64


def test_int8_is_measured_against_fp16(gpu: Device, builds: Builds, inputs: Inputs) -> None:
    """Only FP16 is built here: INT8 is there."""
    built = builds["int8 Q/DQ"]
    request: dict[str, Any] = {"int8": True, "calib": inputs.table, **builds.common}
    result = trtopt.build(inputs.model, built.engine, **request)
    assert result.not_measured == ""
    assert result.cached
    found = result.comparison
    assert found is not None
    rows.append(("INT8 against FP16", f"{found['speedup']:.2f} times as fast", found["why"]))
    assert found["kept"] == "int8"
    assert found["speedup"] > QUICK
    assert str(gpu.info) == found["gpu"]
    for candidate in found["candidates"]:
        (times,) = candidate["times"]
        assert times["shapes"] == {"input": "32x3x224x224"}
        assert times["gpu_ms"] > 0
    manifest = load_manifest(built.engine)
    assert manifest is not None
    assert manifest.comparison is not None
    manifest.check_plan(built.engine)
    again = trtopt.build(inputs.model, built.engine, **request)
    assert again.cached
    assert again.comparison == manifest.comparison  # not measured again


@pytest.mark.parametrize(("limit", "kept"), [(LOW, "int8"), (HIGH, "fp16")], ids=["low limit", "high limit"])
def test_best_keeps_the_fastest_within_the_limit(
    gpu: Device, builds: Builds, inputs: Inputs, tmp_path: Path, limit: float, kept: str
) -> None:
    request: dict[str, Any] = {
        "best": True,
        "calib": inputs.table,
        "data": {"input": inputs.photos["input"]},
        "min_snr": limit,
        **builds.common,
    }
    result = trtopt.build(inputs.model, tmp_path / "best.engine", **request)
    found = converted(dict(result.comparison or {}), Comparison)
    rows.append((f"--best --min-snr {limit:g}", found.kept, f"{found.why}; against {found.reference}"))
    assert found.kept == kept
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["best.engine", "best.engine.json"]
    assert result.precision[kept] > result.precision["total"] / 2
    assert found.judged(Limits(min_snr=LOW)).kept == "int8"
    assert found.judged(Limits(min_snr=HIGH)).kept == "fp16"
    with Session(result.engine) as session:
        logits = session.run_batches({"input": inputs.photos["input"]})
    candidate = next(item for item in found.candidates if item.precision == kept)
    assert candidate.accuracy is not None
    own = compare(inputs.reference, logits).snr_db  # the FP32 model in ONNX Runtime, on another machine
    assert own == pytest.approx(candidate.accuracy["snr_db"], abs=3)
    assert trtopt.build(inputs.model, tmp_path / "best.engine", **request).cached
