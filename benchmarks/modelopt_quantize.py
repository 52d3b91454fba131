"""Run NVIDIA ModelOpt's ONNX quantization, in an environment of its own: MODEL CALIB.npz METHOD OUTPUT [MODE [TYPE]].

MODE: int8 (default), fp8 or int4; TYPE: fp32 (default), fp16 or bf16, of what isn't quantized.
"""

from __future__ import annotations

import os
import sys
import time

import modelopt
import numpy as np
from modelopt.onnx.quantization import quantize

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported

model, data, method, output, mode, rest = (*sys.argv[1:], *("int8", "fp32")[len(sys.argv) - 5 :])
with np.load(data) as arrays:
    calibration = {name: arrays[name] for name in arrays.files}
start = time.perf_counter()  # its import takes 3 to 6 s more
quantize(
    model,
    quantize_mode=mode,
    calibration_data=calibration,
    calibration_method=method,
    calibration_eps=["cpu"],
    high_precision_dtype=rest,
    output_path=output,
    log_level="ERROR",
)
print(f"\n{modelopt.__version__} {time.perf_counter() - start:.1f}")
