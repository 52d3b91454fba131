"""EfficientNet-Lite0 with its real weights on real TensorRT: builds, precision found, outputs against FP32, speed."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from compared import compare
from lite0 import Builds, Inputs, rows

from trtopt.core.errors import UsageError
from trtopt.cuda.device import Device
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.agreement import Agreement
from trtopt.runtime.session import Session

# Least agreement with FP32 in ONNX Runtime: top-1 and dB of the logits. Observed on an H200 with TensorRT 8.6: entropy
# 0.95 and 14.2, min-max 1.00 and 18.5; FP32 may use TF32.
LIMITS = {"fp32": (1.0, 45.0), "fp16": (1.0, 35.0), "int8 Q/DQ": (0.95, 16.0), "int8 native": (0.85, 11.0)}
FLAT = 2 << 20  # bytes: a page of the driver's own


def _agreement(session: Session, inputs: Inputs) -> Agreement:
    photos = inputs.photos["input"]
    batches = [photos[start : start + 7] for start in range(0, len(photos), 7)]  # the last one is smaller
    outputs = [session.run({"input": batch})["logits"] for batch in batches]
    return compare(inputs.reference, {"logits": np.concatenate(outputs)}, inputs.labels)


@pytest.mark.parametrize("name", list(Builds.OPTIONS))
def test_outputs_agree_with_fp32(generation: Any, gpu: Device, builds: Builds, inputs: Inputs, name: str) -> None:
    with Session(builds[name].engine) as session:
        found = _agreement(session, inputs)
    assert found.candidate_accuracy is not None
    accuracy = f"top-1 {found.candidate_accuracy.top1:.2f}, top-5 {found.candidate_accuracy.top5:.2f}"
    note = f"same class {found.top1:.2f}, {accuracy}, {found.samples} photos"
    rows.append((f"{name}: logits against FP32", f"{found.snr_db:.1f} dB", note))
    top1, decibels = LIMITS[name]
    assert found.top1 is not None
    assert found.top1 >= top1
    assert found.snr_db >= decibels


def test_every_convolution_of_the_qdq_engine_is_int8(builds: Builds) -> None:
    manifest = load_manifest(builds["int8 Q/DQ"].engine)
    assert manifest is not None
    convolutions = [layer for layer in manifest.layers if layer["kind"] == "convolution"]
    assert len(convolutions) >= 49
    assert [layer["name"] for layer in convolutions if layer["precision"] != "int8"] == []


def test_native_calibration_gives_mostly_int8(builds: Builds) -> None:
    counts = builds["int8 native"].precision
    assert counts["int8"] > counts["total"] / 2


def test_reduced_precision_is_really_there(builds: Builds) -> None:
    assert builds["fp32"].precision["fp32"] == builds["fp32"].precision["total"] > 0
    assert (
        builds["fp16"].precision["fp16"] > 0.9 * builds["fp16"].precision["total"]
    )  # it may take FP32 where that is faster


@pytest.mark.parametrize("batch", [1, 32])
def test_speed(generation: Any, gpu: Device, builds: Builds, inputs: Inputs, batch: int) -> None:
    """Rows for the table; a shared GPU makes any limit on them fragile, so only the measurement itself is checked."""
    photos = inputs.photos["input"]
    images = np.concatenate([photos] * -(-batch // len(photos)))[:batch]
    medians: dict[str, float] = {}
    for name in builds.available:
        with Session(builds[name].engine) as session:
            timing = session.time({"input": images}, iterations=200, warmup=50)
        assert timing.gpu.minimum > 0
        assert timing.cuda_graph, timing.note
        medians[name] = timing.gpu.median
        note = f"p90 {timing.gpu.p90:.3f}, p99 {timing.gpu.p99:.3f}; host {timing.host.median:.3f} ms"
        rows.append((f"{name}, batch {batch}", f"{timing.gpu.median:.3f} ms", note))
    for name in builds.available[2:]:
        rows.append((f"{name} over fp16, batch {batch}", f"{medians['fp16'] / medians[name]:.2f}×", "GPU time"))


def test_inputs_outside_the_profile_are_refused_and_the_engine_goes_on(
    generation: Any, gpu: Device, builds: Builds, inputs: Inputs
) -> None:
    image = inputs.photos["input"][:1]
    with Session(builds["fp16"].engine) as session:
        first = session.run({"input": image})["logits"]
        with pytest.raises(UsageError, match="1x3x224x224 to 32x3x224x224"):
            session.run({"input": np.concatenate([image] * 33)})
        with pytest.raises(UsageError, match="'input' is float64"):
            session.run({"input": image.astype(np.float64)})
        np.testing.assert_array_equal(session.run({"input": image})["logits"], first)


def test_memory_is_flat_over_many_calls_and_comes_back(
    generation: Any, gpu: Device, builds: Builds, inputs: Inputs
) -> None:
    photos = inputs.photos["input"]
    gc.collect()
    before = gpu("cudaMemGetInfo")[0]
    with Session(builds["fp16"].engine) as session:
        opened, settled = gpu("cudaMemGetInfo")[0], 0
        for index in range(400):
            if index == 100:  # by then every shape that keeps a context and a graph of its own has them
                settled = gpu("cudaMemGetInfo")[0]
                rows.append(
                    ("GPU memory for 20 shapes", f"{(opened - settled) >> 20} MiB", "and the first call's kernels")
                )
            session.run({"input": photos[: 1 + index % 20]})
        assert gpu("cudaMemGetInfo")[0] >= settled - FLAT
    gc.collect()
    assert gpu("cudaMemGetInfo")[0] >= before - (64 << 20)  # CUDA keeps the kernels that it loaded


def test_memory_is_flat_where_shapes_give_way_to_others(
    generation: Any, gpu: Device, builds: Builds, inputs: Inputs
) -> None:
    photos = inputs.photos["input"]
    with Session(builds["fp16"].engine, graphs=2) as session:
        settled = 0
        for number in range(8):
            if number == 2:
                settled = gpu("cudaMemGetInfo")[0]
            for batch in range(1, 9):
                for _ in range(40):  # long enough for the oldest of the two to go
                    session.run({"input": photos[:batch]})
        stats = session.stats()
        assert stats.evictions + stats.graphs >= 8 * 8, "each shape's graph every time"
        assert gpu("cudaMemGetInfo")[0] >= settled - FLAT
