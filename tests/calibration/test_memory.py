"""Peak memory of a whole calibration, each in a process of its own: a few copies of the weights, and none of the data."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from graphs import model as build, node
from onnx import save_model
from sklearn.datasets import load_digits

resource = pytest.importorskip("resource")
WIDE = 4096
RUN = """
import json, resource, sys
from trtopt.calibration.calibrator import calibrate
import cv2, onnxruntime, onnxscript.optimizer, onnxscript.rewriter
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
result = calibrate(sys.argv[1], images=json.loads(sys.argv[2]), preprocess={"size": [8, 8], "channels": "gray"},
                   threads=2, cache=False, allow_unusual_data=True)
print(json.dumps([result.samples, before, peak()]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x (batch, 1, 8, 8) → 64 → 4096 → 4096 → y (batch, 10): 68 MB."""
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("wide") / "wide.onnx"
    sizes = (64, WIDE, WIDE, 10)
    nodes, weights = [node("Flatten", "x", "h0")], {}
    for number, shape in enumerate(itertools.pairwise(sizes)):
        weights[f"w{number}"] = random.standard_normal(shape).astype(np.float32) * np.float32(1 / np.sqrt(shape[0]))
        nodes += [node("Gemm", f"h{number} w{number}", f"g{number}"), node("Relu", f"g{number}", f"h{number + 1}")]
    nodes[-1].output[0] = "y"
    save_model(build(nodes, inputs={"x": ["batch", 1, 8, 8]}, weights=weights), path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digits as PNG files of 512 x 512 pixels: 64 decoded at once would be 50 MB."""
    import cv2

    folder, paths = tmp_path_factory.mktemp("digits"), []
    for number, digit in enumerate(load_digits().images[:256]):
        paths.append(str(folder / f"{number}.png"))
        cv2.imwrite(paths[-1], np.kron(digit * 15, np.ones((64, 64))).astype(np.uint8))
    return paths


def run(model: Path, images: list[str]) -> tuple[int, float, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(model), json.dumps(images)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    samples, before, peak = json.loads(done.stdout.splitlines()[-1])
    return samples, before / 2**20, peak / 2**20


def test_memory_does_not_grow_with_the_data_and_holds_few_copies_of_the_weights(model: Path, images: list[str]) -> None:
    few, many = run(model, images[:32]), run(model, images)
    assert (few[0], many[0]) == (32, 256)
    assert many[2] <= 1.05 * few[2], (few, many)
    weights = model.stat().st_size / 2**20
    assert weights > 60
    assert many[2] - many[1] < 5 * weights, (few, many, weights)
