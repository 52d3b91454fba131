"""EfficientNet-Lite0 and real inputs for it, as files: what scripts/gpu_inputs and benchmarks/accuracy.py start from.

    python benchmarks/lite0_inputs.py FOLDER

writes model.onnx, calib.npz (64 crops of photos), calib.json and lite0.cache (their table, and the same as a TensorRT cache),
photos.npz (20 labelled photos) and reference.npz (the FP32 outputs for them in ONNX Runtime). All from installed packages;
the same on every run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.calibration.calibrator import calibrate
from trtopt.core.progress import StreamReporter
from trtopt.data import open_data
from trtopt.data.samples import write_crops
from trtopt.frontend.exporter import export
from trtopt.ort.runner import OnnxRunner
from trtopt.recipes.loader import Recipe, load_recipe

THREADS = 2


def _prepared(recipe: Recipe, images: Any) -> NDArray[Any]:
    batches = open_data(recipe.inputs, images=images, preprocess=recipe.preprocess)
    arrays = np.concatenate([batch["input"] for batch in batches])
    if batches.skipped:
        raise SystemExit(f"images were skipped: {batches.skipped}")
    return arrays


def prepare(folder: Path) -> dict[str, Any]:
    """Write every file but calib.json and lite0.cache; give the arrays "photos" and their "labels"."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe("efficientnet-lite0")
    assert recipe.calibration is not None
    export("efficientnet-lite0", folder / "model.onnx", reporter=StreamReporter())
    write_crops(recipe.calibration, folder / "crops")
    files = recipe.labelled_files()
    photos = _prepared(recipe, files)
    labels = [int(path.stem.rsplit("_", 1)[1]) for path in files]  # imagenet_NN_LABEL
    np.savez(folder / "calib.npz", input=_prepared(recipe, folder / "crops"))
    np.savez(folder / "photos.npz", input=photos, labels=labels)
    reference = OnnxRunner(folder / "model.onnx", optimize=True, threads=THREADS)
    np.savez(folder / "reference.npz", **reference({"input": photos}))
    return {"photos": photos, "labels": labels}


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: scripts/gpu_inputs FOLDER")
    folder = Path(sys.argv[1])
    prepare(folder)
    model, table, data = (folder / name for name in ("model.onnx", "calib.json", "calib.npz"))
    calibrate(model, table, data=data, threads=THREADS, export_cache=folder / "lite0.cache", reporter=StreamReporter())
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_file()))}")


if __name__ == "__main__":
    main()
