"""Accuracy of INT8 scales on EfficientNet-Lite0: trtopt's methods beside its peers, same run, same data.

    OMP_NUM_THREADS=2 .venv-test/bin/python benchmarks/accuracy.py FILE.md [--native-cache CACHE]...

CACHE is what TensorRT's own calibrator wrote for model.onnx and calib.npz of scripts/gpu_inputs.
MODELOPT_PYTHON names a Python with nvidia-modelopt[onnx], in an environment of its own, for its dependencies conflict with
trtopt's; without it ModelOpt's rows say so.

Calibrated on 64 crops of seven photos. Every Q/DQ model is run by the same code, in ONNX Runtime with graph optimizations
off, on 240 crops of 20 other photos and on those photos whole. ModelOpt and ONNX Runtime quantize with their own placement;
TensorRT's scales (a text cache of its own calibrator, run on the same 64 crops) go where trtopt puts Q/DQ.

Crops of one photo are alike, so the noise of a difference is estimated from the 20 photos' means: its standard error is
their standard deviation / √20.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
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
from numpy.typing import NDArray

from trtopt.calibration.calibrator import calibrate
from trtopt.core.files import write_bytes
from trtopt.data import open_data
from trtopt.data.samples import load_crops, write_crops
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import find_points
from trtopt.graph.passes.quantize import insert_qdq
from trtopt.graph.passes.repair import repair_weights
from trtopt.graph.passes.smooth import smooth
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.runner import OnnxRunner
from trtopt.recipes.loader import load_recipe

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported

REPAIRED = ", repaired"  # behind a method: calibrate --repair
METHODS = ("auto", f"auto{REPAIRED}", "minmax", "mse", "percentile", "entropy")
BATCH = 20
Made = tuple[str, float]  # the tool with its version, seconds
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """What one set of scales gave.

    Attributes:
        crops, photos: logits for the evaluation crops and for the labelled photos.
        problem: why there are none.
    """

    tool: str
    scales: str
    seconds: float = 0.0
    crops: Logits | None = None
    photos: Logits | None = None
    problem: str = ""


def trtopt_qdq(model: Path, calib: Path, method: str, output: Path) -> Made:
    start = time.perf_counter()
    chosen, repair = method.removesuffix(REPAIRED), method.endswith(REPAIRED)
    table = calibrate(model, data=calib, method=chosen, repair=repair, threads=THREADS, cache=False).table
    folded, _ = fold(load_model(model).proto)
    graph = to_ir(folded)
    smooth(graph, table.smoothed)
    _, points = repair_weights(graph, find_points(graph), table.repairs)
    insert_qdq(graph, points, table.amax)
    save_model(to_proto(graph), output)
    return f"trtopt {importlib.metadata.version('trtopt')}", time.perf_counter() - start


def cache_qdq(model: Path, cache: Path, output: Path) -> Made:
    """TensorRT's own scales, at trtopt's places."""
    table = calibrate(model, import_cache=cache).table
    folded, _ = fold(load_model(model).proto)
    graph = to_ir(folded)
    insert_qdq(graph, find_points(graph), table.amax)
    save_model(to_proto(graph), output)
    header = cache.read_text().splitlines()[0]
    return f"TensorRT ({header})", 0.0


def modelopt_qdq(model: Path, calib: Path, method: str, output: Path) -> Made:
    python = os.environ.get("MODELOPT_PYTHON")
    if not python:
        raise RuntimeError("MODELOPT_PYTHON names no Python with nvidia-modelopt")
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


def measure(folder: Path, caches: list[Path]) -> tuple[Row, list[Row], list[int]]:
    """FP32, every set of scales, and the photos' labels."""
    arrays = prepare(folder)
    model = folder / "model.onnx"
    recipe = load_recipe("efficientnet-lite0")
    write_crops("evaluation-crops", folder / "evaluation")
    opened = open_data(recipe.inputs, images=folder / "evaluation", preprocess=recipe.preprocess)
    crops = np.concatenate([batch["input"] for batch in opened])
    reference = logits(model, crops, optimize=True), logits(model, arrays["photos"], optimize=True)
    rows: list[Row] = []
    runs: list[tuple[str, str, Callable[[Path], Made]]] = [
        (name, method, lambda output, run=run, method=method: run(model, folder / "calib.npz", method, output))
        for name, run, methods in RUNS
        for method in methods
    ]
    runs += [("TensorRT", path.name, lambda output, path=path: cache_qdq(model, path, output)) for path in caches]
    for name, method, run in runs:
        print(f"{name} {method}…", file=sys.stderr, flush=True)
        output = folder / f"{name}-{method}.onnx".replace(" ", "-")
        try:
            tool, seconds = run(output)
        except Exception as error:  # a peer that can't run must not hide the others
            if name == "trtopt":
                raise
            rows.append(Row(name, method, problem=f"not measured here: {error}"))
            continue
        rows.append(Row(tool, method, seconds, logits(output, crops), logits(output, arrays["photos"])))
    if not caches:
        rows.append(Row("TensorRT", "its own", problem="not measured here: give its cache with --native-cache"))
    return Row("FP32", "", 0.0, *reference), rows, arrays["labels"]


def logits(model: Path, images: NDArray[Any], *, optimize: bool = False) -> Logits:
    runner = OnnxRunner(model, optimize=optimize, threads=THREADS)
    parts = [runner({"input": images[start : start + BATCH]})["logits"] for start in range(0, len(images), BATCH)]
    return np.concatenate(parts)


def decibels(reference: Logits, found: Logits) -> NDArray[np.float64]:
    """Signal over noise of each sample's logits."""
    signal = (reference.astype(np.float64) ** 2).sum(1)
    return np.asarray(10 * np.log10(signal / ((reference.astype(np.float64) - found) ** 2).sum(1)))


def agreement(reference: Logits, found: Logits) -> NDArray[np.float64]:
    """1 for each sample that gets the class it gets with FP32, else 0."""
    return np.asarray(found.argmax(1) == reference.argmax(1), np.float64)


def by_photo(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over the crops of each photo: crop n is of photo n modulo their number."""
    photos = len(load_crops("evaluation-crops").photos)
    return np.array([values[start::photos].mean() for start in range(photos)])


def figures(row: Row, reference: Row, best: Row, labels: list[int]) -> list[str]:
    if row.crops is None or row.photos is None:
        return [row.problem, "", "", "", "", ""]
    assert reference.crops is not None and best.crops is not None and reference.photos is not None
    levels = decibels(reference.crops, row.crops)
    gap = by_photo(levels - decibels(reference.crops, best.crops))
    error = float(gap.std(ddof=1)) / math.sqrt(gap.size)
    same = agreement(reference.crops, row.crops)
    change = by_photo(same - agreement(reference.crops, best.crops))
    whole = decibels(reference.photos, row.photos).mean()
    right = float((row.photos.argmax(1) == np.array(labels)).mean())
    noise = float(change.std(ddof=1)) / math.sqrt(change.size)
    against = "" if row is best else f"{gap.mean():+.2f} ± {error:.2f}"
    classes = f"{same.mean():.3f}" + ("" if row is best else f" ({change.mean():+.3f} ± {noise:.3f})")
    return [f"{levels.mean():.2f}", against, classes, f"{whole:.2f}", f"{right:.2f}", f"{row.seconds:.1f}"]


def table(reference: Row, rows: list[Row], labels: list[int]) -> str:
    packages = ("onnxruntime", "onnx", "numpy", "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    today, python = datetime.date.today().isoformat(), platform.python_version()
    best = next(row for row in rows if row.tool.startswith("trtopt") and row.scales == "auto")
    lines = [
        "# INT8 accuracy on EfficientNet-Lite0",
        "",
        "Real ImageNet weights. Calibrated on 64 crops of seven photos, compared with FP32 on 240 crops of 20 other photos and",
        "on these 20 labelled photos whole; all from installed packages. Every Q/DQ model runs in ONNX Runtime with graph",
        "optimizations off. ModelOpt and ONNX Runtime use their own placement of Q/DQ, TensorRT's scales are put where trtopt",
        "puts its own. dB: signal over noise of a sample's logits, mean over samples. Against auto, and in parentheses:",
        "the difference from auto ± its standard error over the 20 photos. Seconds are one calibration and quantization,",
        "without imports.",
        "",
        f"{today}, Python {python}, {versions}, {THREADS} threads; `benchmarks/accuracy.py FILE`",
        "",
        "| tool | scales | 240 crops, dB | against auto | same class as FP32 | 20 photos, dB | top-1 | seconds |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {row.tool} | {row.scales} | {' | '.join(figures(row, reference, best, labels))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/accuracy.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", metavar="FILE.md", type=Path)
    parser.add_argument(
        "--native-cache",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a text cache that TensorRT's calibrator wrote for this model and these crops (scripts/gpu_inputs); repeatable",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trtopt-bench-") as folder:
        text = table(*measure(Path(folder), given.native_cache))
    write_bytes(given.output, text.encode())
    print(text)


if __name__ == "__main__":
    main()
