"""Accuracy of INT8 scales on EfficientNet-Lite0: trtopt's methods beside its peers, same run, same data.

Every Q/DQ model is run by the same code on the same 20 labelled photos, in ONNX Runtime with graph optimizations off.
Peers quantize with their own placement. See scripts/bench_accuracy for how to start it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lite0_inputs import THREADS, prepare

from trtopt.calibration.calibrator import calibrate
from trtopt.files import write_bytes
from trtopt.graph.fold import fold
from trtopt.graph.io import load_model, save_model
from trtopt.graph.placement import find_points
from trtopt.graph.quantize import insert_qdq
from trtopt.measure.verify import verify

METHODS = ("entropy", "mse", "minmax", "auto")
Made = tuple[str, float]  # the tool with its version, seconds


@dataclass(frozen=True)
class Row:
    tool: str
    scales: str
    figures: tuple[str, ...]


def trtopt_qdq(model: Path, calib: Path, method: str, output: Path) -> Made:
    start = time.perf_counter()
    table = calibrate(model, data=calib, method=method, threads=THREADS, cache=False).table
    folded, _ = fold(load_model(model).proto)
    save_model(insert_qdq(folded, find_points(folded), table.amax), output)
    return f"trtopt {importlib.metadata.version('trtopt')}", time.perf_counter() - start


def modelopt_qdq(model: Path, calib: Path, method: str, output: Path) -> Made:
    python = os.environ.get("MODELOPT_PYTHON")
    if not python:
        raise RuntimeError(os.environ.get("MODELOPT_REASON") or "MODELOPT_PYTHON names no Python with nvidia-modelopt")
    worker = Path(__file__).with_name("modelopt_quantize.py")
    command = [python, str(worker), str(model), str(calib), method, str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    version, seconds = done.stdout.split()[-2:]
    return f"ModelOpt {version}", float(seconds)


def onnxruntime_qdq(model: Path, calib: Path, method: str, output: Path) -> Made:
    import onnxruntime
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static, shape_inference
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            with np.load(calib) as arrays:
                images = arrays["input"]
            self.batches: Iterator[dict[str, Any]] = iter(
                [{"input": images[start : start + 8]} for start in range(0, len(images), 8)]
            )

        def get_next(self) -> dict[str, Any] | None:
            return next(self.batches, None)

    start = time.perf_counter()
    cleaned = output.with_suffix(".cleaned.onnx")
    shape_inference.quant_pre_process(str(model), str(cleaned), skip_symbolic_shape=True)
    quantize_static(
        str(cleaned),
        str(output),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method={"entropy": CalibrationMethod.Entropy, "minmax": CalibrationMethod.MinMax}[method],
        # What TensorRT takes: zero points 0, no INT32 biases.
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
    )
    return f"ONNX Runtime {onnxruntime.__version__}", time.perf_counter() - start


RUNS: tuple[tuple[str, Callable[[Path, Path, str, Path], Made], tuple[str, ...]], ...] = (
    ("trtopt", trtopt_qdq, METHODS),
    ("ModelOpt", modelopt_qdq, ("entropy", "max")),
    ("ONNX Runtime", onnxruntime_qdq, ("entropy", "minmax")),
)


def measure(folder: Path) -> list[Row]:
    arrays = prepare(folder)
    batches = [{"input": arrays["photos"]}]
    rows: list[Row] = []
    for name, run, methods in RUNS:
        for method in methods:
            print(f"{name} {method}…", file=sys.stderr, flush=True)
            output = folder / f"{name}-{method}.onnx".replace(" ", "-")
            try:
                tool, seconds = run(folder / "model.onnx", folder / "calib.npz", method, output)
                found = verify(folder / "model.onnx", output, batches, arrays["labels"], threads=THREADS)
            except Exception as error:  # a peer that can't run must not hide the others
                if run is trtopt_qdq:
                    raise
                rows.append(Row(name, method, (f"not measured here: {error}", "", "", "", "")))
                continue
            assert found.candidate_accuracy is not None
            accuracy = found.candidate_accuracy
            figures = (f"{found.snr_db:.2f}", *(f"{item:.2f}" for item in (found.top1, accuracy.top1, accuracy.top5)))
            rows.append(Row(tool, method, (*figures, f"{seconds:.1f}")))
    return rows


def table(rows: list[Row]) -> str:
    packages = ("onnxruntime", "onnx", "numpy", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    today, python = datetime.date.today().isoformat(), platform.python_version()
    lines = [
        "# INT8 accuracy on EfficientNet-Lite0",
        "",
        "Real ImageNet weights; 64 crops of photos to calibrate, 20 labelled photos to compare the logits with FP32,",
        "both from installed packages. Every Q/DQ model runs in ONNX Runtime with graph optimizations off. Peers use",
        "their own placement of Q/DQ. Seconds are one calibration and quantization, without imports.",
        "",
        f"{today}, Python {python}, {versions}, {THREADS} threads; `scripts/bench_accuracy FILE`",
        "",
        "| tool | scales | logits, dB | same class as FP32 | top-1 | top-5 | seconds |",
        "|---|---|---|---|---|---|---|",
        *(f"| {row.tool} | {row.scales} | {' | '.join(row.figures)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: scripts/bench_accuracy FILE.md")
    with tempfile.TemporaryDirectory(prefix="trtopt-bench-") as folder:
        text = table(measure(Path(folder)))
    write_bytes(sys.argv[1], text.encode())
    print(text)


if __name__ == "__main__":
    main()
