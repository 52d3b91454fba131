"""TensorRT's calibration caches on real TensorRT: ours taken without data, its own covering what INT8 needs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from compared import compare
from lite0 import Builds, Inputs, rows

from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import TextCache, read_cache
from trtopt.cuda.device import Device
from trtopt.evaluation.agreement import Agreement
from trtopt.runtime.session import Session
from trtopt.trt import weak
from trtopt.trt.generation import Generation

OURS, THEIRS = Builds.FROM_CACHES
SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "compare_native.py"


@pytest.fixture(scope="module")
def native(generation: Generation, builds: Builds) -> TextCache:
    """What TensorRT's own calibrator wrote."""
    if not generation.capabilities.native_calibrator:
        pytest.skip(f"{generation} has no calibrator of its own")
    return read_cache(builds.written_cache())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the calibrator that TensorRT makes in this test."""
    calls: list[str] = []
    make, following = weak.NativeCalibration._make, weak.NativeCalibration._next

    def counted(self: Any, trt: Any) -> Any:
        calibrator = make(self, trt)
        kind = type(calibrator)
        read = kind.read_calibration_cache

        def reading(*arguments: Any) -> Any:
            calls.append("read_calibration_cache")
            return read(*arguments)

        kind.read_calibration_cache = reading
        return calibrator

    def batch(self: Any, names: list[str]) -> Any:
        calls.append("get_batch")
        return following(self, names)

    monkeypatch.setattr(weak.NativeCalibration, "_make", counted)
    monkeypatch.setattr(weak.NativeCalibration, "_next", batch)
    return calls


def _agreement(generation: Generation, gpu: Device, engine: Path, inputs: Inputs) -> Agreement:
    photos = inputs.photos["input"]
    with Session(engine) as session:
        outputs = [session.run({"input": photos[start : start + 10]})["logits"] for start in range(0, len(photos), 10)]
    return compare(inputs.reference, {"logits": np.concatenate(outputs)}, inputs.labels)


def test_our_cache_is_taken_and_no_batch_is_asked_for(
    generation: Generation, builds: Builds, inputs: Inputs, asked: list[str], tmp_path: Path
) -> None:
    if not generation.capabilities.native_calibrator:
        pytest.skip(f"{generation} has no calibrator of its own")
    # Never an engine kept from an earlier run: this one's calls are looked at.
    fresh = Builds(inputs, tmp_path, native=True)
    if (builds.folder / "timing.cache").is_file():
        (tmp_path / "timing.cache").write_bytes((builds.folder / "timing.cache").read_bytes())
    result = fresh[OURS]
    assert not result.cached
    assert "read_calibration_cache" in asked
    assert asked.count("get_batch") == 0
    lacking = [text for text in result.warnings if "Missing scale" in text]
    rows.append(
        ("calls of get_batch with our cache", str(asked.count("get_batch")), f"{len(asked)} of the cache's reader")
    )
    rows.append(("tensors without a scale in our cache", str(len(lacking)), "; ".join(lacking)[:300]))
    assert lacking == []
    assert result.precision["int8"] >= 49


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_engines_from_caches_agree_with_fp32(
    generation: Generation, gpu: Device, builds: Builds, inputs: Inputs, native: TextCache, name: str
) -> None:
    found = _agreement(generation, gpu, builds[name].engine, inputs)
    rows.append((f"{name}: logits against FP32", f"{found.snr_db:.1f} dB", f"same class {found.top1:.2f}"))
    assert found.top1 is not None
    assert found.top1 >= 0.85
    assert found.snr_db >= 11.0  # TensorRT's own entropy thresholds give 14 here


def test_tensorrts_own_cache_covers_every_needed_tensor(native: TextCache, builds: Builds, inputs: Inputs) -> None:
    coverage = calibrate(inputs.model, import_cache=builds.written_cache()).coverage
    assert coverage is not None
    parts = {name: len(getattr(coverage, name)) for name in ("exact", "folding", "propagated")}
    rows.append(
        (
            f"needed tensors in {native.header}",
            f"{coverage.needed - len(coverage.missing)} of {coverage.needed}",
            f"{parts}; {coverage.entries} entries, {len(native.unusable)} unusable, {len(coverage.strange)} of no tensor",
        )
    )
    assert coverage.missing == ()
    assert coverage.needed == len(Table.load(inputs.table).tensors)


def test_our_cache_names_what_tensorrt_names(native: TextCache, inputs: Inputs) -> None:
    ours = read_cache(inputs.cache).amax
    absent = [name for name in native.amax if name not in ours]
    rows.append(("TensorRT's entries that our cache lacks", str(len(absent)), ", ".join(absent)[:300]))
    named = {name for node in onnx.load(inputs.model).graph.node for name in node.output}
    assert named.isdisjoint(absent)  # those left are of layers that the parser itself adds


def test_thresholds_beside_tensorrts_own(native: TextCache, inputs: Inputs) -> None:
    """The comparison for docs/results; TRTOPT_GPU_COMPARISON names a file for its Markdown."""
    spec = importlib.util.spec_from_file_location("compare_native", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules["compare_native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.compare(native, Table.load(inputs.table), "entropy")
    p10, median, p90 = (found.quantile(share) for share in (0.1, 0.5, 0.9))
    rows.append(
        (
            "our entropy amax over TensorRT's",
            f"median {median:.3f}",
            f"p10 {p10:.3f}, p90 {p90:.3f}; {len(found.outliers)} of {len(found.ratios)} outside 0.8 to 1.25",
        )
    )
    if path := os.environ.get("TRTOPT_GPU_COMPARISON"):
        Path(path).write_text(found.markdown(), encoding="utf-8")
    assert 0.8 <= median <= 1.25
