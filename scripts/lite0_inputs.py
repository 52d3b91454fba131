"""EfficientNet-Lite0 and real inputs for it, as files: what scripts/gpu_inputs and scripts/bench_accuracy start from.

    python scripts/lite0_inputs.py FOLDER

writes model.onnx, calib.npz (64 crops of photos), calib.json (their table), photos.npz (20 labelled photos) and
reference.npz (the FP32 outputs for them in ONNX Runtime). All from installed packages; the same on every run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trtopt.calibration.calibrator import calibrate
from trtopt.data.preprocess import Preprocess

from trtopt.exporter import export
from trtopt.measure.onnx_runner import OnnxRunner
from trtopt.progress import reporter
from trtopt.recipes import load_recipe, package_file

CROPS = 64
THREADS = 2
# Colour photos that scikit-image and scikit-learn ship.
PHOTOS = (
    *(f"package:skimage/data/{name}" for name in ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")),
    *(f"package:skimage/data/{name}" for name in ("motorcycle_left.png", "motorcycle_right.png", "retina.jpg")),
    *(f"package:sklearn/datasets/images/{name}" for name in ("china.jpg", "flower.jpg")),
)


def read_image(path: Path) -> NDArray[np.uint8]:
    """Height × width × RGB."""
    import cv2

    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if image is None:
        raise SystemExit(f"{path} can't be decoded")
    return np.ascontiguousarray(image[:, :, ::-1]).astype(np.uint8)


def crops(count: int = CROPS) -> list[NDArray[np.uint8]]:
    """Square crops of 40 to 100 % of the photos' shorter sides, at places drawn with a fixed seed."""
    photos = [read_image(package_file(name)) for name in PHOTOS]
    generator = np.random.default_rng(0)
    found: list[NDArray[np.uint8]] = []
    for index in range(count):
        photo = photos[index % len(photos)]
        height, width = photo.shape[:2]
        side = int(min(height, width) * generator.uniform(0.4, 1.0))
        top, left = generator.integers(0, height - side + 1), generator.integers(0, width - side + 1)
        found.append(photo[top : top + side, left : left + side])
    return found


def prepare(folder: Path) -> dict[str, Any]:
    """Write every file but calib.json; give the arrays: "calib", "photos", "labels"."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe("efficientnet-lite0")
    export("efficientnet-lite0", folder / "model.onnx", for_generation="tensorrt8", reporter=reporter())
    preprocess = Preprocess.load(recipe.preprocess)
    files = recipe.labelled_files()
    labels = [int(path.stem.rsplit("_", 1)[1]) for path in files]  # imagenet_NN_LABEL
    calib = np.stack([preprocess(image) for image in crops()])
    photos = np.stack([preprocess(read_image(path)) for path in files])
    np.savez(folder / "calib.npz", input=calib)
    np.savez(folder / "photos.npz", input=photos, labels=labels)
    reference = OnnxRunner(folder / "model.onnx", optimize=True, threads=THREADS)
    np.savez(folder / "reference.npz", **reference({"input": photos}))
    return {"calib": calib, "photos": photos, "labels": labels}


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: scripts/gpu_inputs FOLDER")
    folder = Path(sys.argv[1])
    prepare(folder)
    model, data, output = (folder / name for name in ("model.onnx", "calib.npz", "calib.json"))
    calibrate(model, data=data, output=output, reporter=reporter())
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()
