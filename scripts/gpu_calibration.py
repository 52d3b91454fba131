"""Calibration on a GPU beside the same job on that machine's CPU: ResNet-50, 1,024 crops of real photos.

    python scripts/gpu_calibration.py crops FOLDER             anywhere: writes FOLDER/crops, 1,024 JPEG files, about 15 MB
    python scripts/gpu_calibration.py run FOLDER REPORT.md [PEER-SAMPLES]   on the machine with the GPU

There it needs PyTorch with CUDA, torchvision, onnx2pytorch, and what trtopt needs with its extra ort. The peer is
ONNX Runtime's entropy calibrator; it keeps all activations (0.11 GB a sample), so PEER-SAMPLES (128) says how many it gets,
and the report says so. Everything runs in one process after one warm-up on 64 crops; the best of three runs counts, of the
CPU's and the peer one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_calibration import RECIPE, onnxruntime_own

from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import require
from trtopt.core.files import write_bytes
from trtopt.data import open_data
from trtopt.data.samples import write_crops
from trtopt.frontend.exporter import export
from trtopt.graph.io import load_model

SAMPLES = 1024
SIZE = 224
MODEL = "resnet50"


def make_crops(folder: Path) -> None:
    cv2 = require("cv2", "ort", "writing crops")
    (folder / "crops").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch) / "crops.toml"
        recipe.write_text(RECIPE.replace("size = 256", f"size = {SIZE}"))
        for path in write_crops(recipe, Path(scratch) / "crops"):
            target = folder / "crops" / f"{path.stem}.jpg"
            cv2.imwrite(str(target), cv2.imread(str(path)), [cv2.IMWRITE_JPEG_QUALITY, 85])


def run(folder: Path, report: Path, peer_samples: int) -> None:
    torch = require("torch", "torch-calibration", "calibrating on the GPU")
    cores = len(os.sched_getaffinity(0))
    crops = sorted((folder / "crops").glob("*.jpg"))
    assert len(crops) == SAMPLES, (
        f"{folder}/crops holds {len(crops)} files; {SAMPLES} are needed: make them with `crops`"
    )
    model = folder / f"{MODEL}.onnx"
    if not model.is_file():
        export(f"torchvision:{MODEL}", model, verify=False)

    def ours(device: str, images: list[Path]) -> tuple[float, Any]:
        start = time.perf_counter()
        result = calibrate(
            model, images=images, preprocess="imagenet", method="entropy", device=device, threads=cores, cache=False
        )
        return time.perf_counter() - start, result.table

    ours("cuda", crops[:64])
    gpu = sorted((ours("cuda", crops) for _ in range(3)), key=lambda item: item[0])
    again = {table.digest for _, table in gpu}
    reverse = ours("cuda", crops[::-1])[1]
    cpu_seconds, cpu = ours("cpu", crops)
    gpu_seconds, table = gpu[0]
    ratios = np.array([table.amax[name] / amax for name, amax in cpu.amax.items()])
    info = load_model(model).inputs
    arrays = [batch[info[0].name] for batch in open_data(info, images=crops[:peer_samples], preprocess="imagenet")]
    np.savez(folder / "samples.npz", **{info[0].name: np.concatenate(arrays)})
    peer = onnxruntime_own(folder, MODEL)
    scaled = peer["seconds"] * SAMPLES / peer_samples
    title = f"ONNX Runtime {peer['version']}, {cores} cores"
    scaled_from = f"{peer['seconds']:.1f} s for {peer_samples} prepared samples, so for {SAMPLES}"
    repeated = "the same table, to the bit" if len(again) == 1 else f"{len(again)} different tables"
    reversed_ = "the same too" if reverse.digest in again else "another"
    p10, median, p90 = np.quantile(ratios, [0.1, 0.5, 0.9])
    text = f"""\
# Calibrating {MODEL} on {SAMPLES} images, on a GPU

{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, {cores} CPU cores; `scripts/gpu_calibration.py run`.
From JPEG files to the table with entropy: decoding, loading and folding the model included, imports not.

| | seconds | of it the pass | GPU is |
|---|---|---|---|
| trtopt, GPU | {gpu_seconds:.2f} | {table.seconds:.2f} | |
| trtopt, {cores} cores | {cpu_seconds:.2f} | {cpu.seconds:.2f} | {cpu_seconds / gpu_seconds:.1f} × as fast |
| {title}: {scaled_from} | {scaled:.0f} | | {scaled / gpu_seconds:.1f} × as fast |

Three runs on the GPU give {repeated}; the images in reverse order {reversed_}. amax over the CPU's, {ratios.size} tensors:
median {median:.5f}, p10 {p10:.5f}, p90 {p90:.5f}, least {ratios.min():.4f}, most {ratios.max():.4f}.
"""
    write_bytes(report, text.encode())
    print(text)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "crops":
        make_crops(Path(sys.argv[2]))
    elif len(sys.argv) in (4, 5) and sys.argv[1] == "run":
        run(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) == 5 else 128)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
