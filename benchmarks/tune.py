"""trtopt tune on EfficientNet-Lite0, beside other quantizers and a search that takes one node at a time.

    OMP_NUM_THREADS=2 .venv-test/bin/python benchmarks/tune.py FILE.md [--native-cache CACHE]

2 cores, about 15 minutes; nothing else should run. CACHE and MODELOPT_PYTHON: see benchmarks/accuracy.py.

Everything is chosen on 64 crops of seven photos, and judged on 240 crops of 20 other photos, by the code of
benchmarks/accuracy.py. The search to compare with ranks nodes as tools without a ledger do: for each one a calibration and a
run of the whole graph with that node alone in INT8; then the worst are left out, as many as `tune` left out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import (
    RUNS,
    Logits,
    agreement,
    by_photo,
    cache_qdq,
    decibels,
    logits,
)
from lite0_inputs import THREADS, prepare

import trtopt
from trtopt.calibration.importing import kept_out
from trtopt.core.files import write_bytes
from trtopt.data import open_data
from trtopt.data.samples import write_crops
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import find_points
from trtopt.graph.passes.quantize import insert_qdq
from trtopt.graph.view import to_ir, to_proto
from trtopt.graph.work import macs
from trtopt.recipes.loader import load_recipe

LIMITS = (20.0, 26.4, 28.1)  # dB, on crops of the seven photos
OTHERS = {"trtopt": ("auto",), "ModelOpt": ("max", "entropy"), "ONNX Runtime": ("minmax", "entropy")}
HEADERS = ("what", "INT8's share of the arithmetic", "240 crops, dB", "± over photos", "same class as FP32", "seconds")


def tuned(model: Path, calib: Path, limit: float, folder: Path) -> tuple[Path, Any, float]:
    start = time.perf_counter()
    graph = folder / f"tuned-{limit:g}.onnx"
    result = trtopt.tune(model, folder / "tuned.engine", data=calib, min_snr=limit, target="sm89", save_onnx=graph)
    return graph, result.tuning, time.perf_counter() - start


def one_at_a_time(model: Path, calib: Path, count: int, images: Any, folder: Path) -> tuple[Path, float, float]:
    """The graph without the `count` nodes that lose most alone; the share of the arithmetic in it; seconds."""
    start = time.perf_counter()
    folded, _ = fold(load_model(model).proto)
    heavy = find_points(to_ir(folded)).quantized
    reference = logits(model, images, optimize=True)
    loss = {}
    graph = folder / "one.onnx"
    for node in heavy:
        table = trtopt.calibrate(model, data=calib, threads=THREADS, cache=False).table
        _write(folded, table, [other for other in heavy if other != node], graph)
        loss[node] = float(decibels(reference, logits(graph, images)).mean())
    worst = sorted(heavy, key=lambda node: loss[node])[:count]
    _write(folded, table, worst, graph)
    work = macs(folded)
    share = 1 - sum(work.get(node, 0) for node in worst) / sum(work.values())
    return graph, share, time.perf_counter() - start


def _write(folded: Any, table: Any, left_out: Any, path: Path) -> None:
    graph = to_ir(folded)
    insert_qdq(graph, find_points(graph, overrides=kept_out(left_out)), table.amax)
    save_model(to_proto(graph), path)


def row(what: str, share: float, reference: Logits, found: Logits, seconds: float) -> tuple[str, ...]:
    levels = decibels(reference, found)
    photos = by_photo(levels)
    error = float(photos.std(ddof=1)) / np.sqrt(photos.size)
    same = agreement(reference, found).mean()
    return what, f"{share:.1%}", f"{levels.mean():.2f}", f"{error:.2f}", f"{same:.3f}", f"{seconds:.1f}"


def measure(folder: Path, cache: Path | None) -> list[tuple[str, ...]]:
    prepare(folder)
    model, calib = folder / "model.onnx", folder / "calib.npz"
    recipe = load_recipe("efficientnet-lite0")
    write_crops("evaluation-crops", folder / "evaluation")
    opened = open_data(recipe.inputs, images=folder / "evaluation", preprocess=recipe.preprocess)
    crops = np.concatenate([batch["input"] for batch in opened])
    with np.load(calib) as arrays:
        images = arrays["input"].astype(np.float32)
    reference = logits(model, crops, optimize=True)
    rows = []
    for name, run, _ in RUNS:
        for method in OTHERS[name]:
            output = folder / f"{name}-{method}.onnx".replace(" ", "-")
            try:
                tool, seconds = run(model, calib, method, output)
                rows.append(row(f"{tool}, {method}", 1.0, reference, logits(output, crops), seconds))
            except Exception as error:  # a peer that can't run must not hide the others
                rows.append((f"{name}, {method}: not measured here: {error}", "", "", "", "", ""))
    if cache is not None:
        output = folder / "native.onnx"
        tool, seconds = cache_qdq(model, cache, output)
        rows.append(row(f"{tool}, its own calibrator", 1.0, reference, logits(output, crops), seconds))
    tuning = None
    for limit in LIMITS:
        print(f"tune to {limit:g} dB…", file=sys.stderr, flush=True)
        graph, tuning, seconds = tuned(model, calib, limit, folder)
        what = f"trtopt tune, {limit:g} dB: {len(tuning.left_out)} layers out, {tuning.tried} choices"
        rows.append(row(what, tuning.chosen.share, reference, logits(graph, crops), seconds))
    assert tuning is not None
    print("one node at a time…", file=sys.stderr, flush=True)
    graph, share, seconds = one_at_a_time(model, calib, len(tuning.left_out), images, folder)
    what = f"one node at a time: {len(tuning.left_out)} layers out"
    rows.append(row(what, share, reference, logits(graph, crops), seconds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/tune.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", metavar="FILE.md", type=Path)
    parser.add_argument("--native-cache", metavar="CACHE", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trtopt-bench-") as folder:
        os.environ["TRTOPT_CACHE"] = f"{folder}/cache"  # nothing that an earlier run kept
        rows = measure(Path(folder), given.native_cache)
    packages = ("onnxruntime", "onnx", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    today, python = datetime.date.today().isoformat(), platform.python_version()
    lines = [
        f"{today}, Python {python}, {versions}, {THREADS} threads; `benchmarks/tune.py FILE`.",
        "The second and third tuning find the repairs that the first one kept.",
        "",
        f"| {' | '.join(HEADERS)} |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(item)} |" for item in rows),
    ]
    text = "\n".join(lines) + "\n"
    write_bytes(given.output, text.encode())
    print(text)


if __name__ == "__main__":
    main()
