"""Run NVIDIA ModelOpt's ONNX quantization, in an environment of its own: MODEL CALIB.npz METHOD OUTPUT."""

from __future__ import annotations

import os
import sys
import time

import modelopt
import numpy as np
from modelopt.onnx.quantization import quantize

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported

model, data, method, output = sys.argv[1:]
with np.load(data) as arrays:
    calibration = {name: arrays[name] for name in arrays.files}
start = time.perf_counter()  # its import takes 3 to 6 s more
quantize(
    model,
    quantize_mode="int8",
    calibration_data=calibration,
    calibration_method=method,
    calibration_eps=["cpu"],
    high_precision_dtype="fp32",
    output_path=output,
    log_level="ERROR",
)
print(f"\n{modelopt.__version__} {time.perf_counter() - start:.1f}")
