"""Engines of one model in several precisions: what is asked of the builder for each, and where they lie meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtopt.builder import construction as engine
from trtopt.builder.asked import spec_of
from trtopt.builder.construction import BuildResult
from trtopt.builder.request import BuildRequest
from trtopt.core.errors import DeviceError, UsageError
from trtopt.core.options import without
from trtopt.core.progress import Phase, Reporter
from trtopt.core.values import Override, Precision
from trtopt.cuda.device import Device, DeviceInfo
from trtopt.graph.io import load_model
from trtopt.graph.passes.quantize import is_quantized
from trtopt.trt import select

NATIVE_CACHE = "native.cache"  # beside a candidate's plan
CALIBRATION = ("int8", "fp8", "images", "data", "calib", "method", "limit", "batch", "calibrator", "save_cache")


def gpu_for(request: BuildRequest) -> DeviceInfo:
    """The GPU that the engines are measured on.

    Raises:
        DeviceError: there is none, CUDA can't use it, or the engines are for others.
        MissingDependency: cuda-bindings isn't installed.
        UsageError: engines of both precisions can't be made of the model and run.
    """
    generation, spec = select(request.backend), spec_of(request)
    gpu, targets = generation.device(spec), generation.targets(spec)
    if gpu is None:
        raise DeviceError(f"there is no GPU here: {generation.gpu().reason}")
    if targets and gpu.compute_capability not in targets:
        names = ", ".join(f"sm{target}" for target in targets)
        raise DeviceError(
            f"the engine is for {names}; the GPU here is {gpu}: add `target='sm{gpu.compute_capability}'`"
        )
    device = Device(gpu.ordinal)
    if request.strip:
        raise UsageError("an engine without its weights (`strip=True`) can't run")
    if is_quantized(load_model(request.model, lazy=True).proto):
        raise UsageError(
            f"the model already holds Q/DQ, so there is no {spec.base.upper()} form of it: give the float model"
        )
    return device.info


def floating(request: BuildRequest, precision: Precision, preprocess: Any, *, within: bool = False) -> BuildRequest:
    """Return the request for the same engine without quantization.

    Args:
        within: with the samples, which say what of it has to stay in FP32 to be within the limits.
    """
    precisions = (Precision.FP32, precision)
    kept = ("images", "data", "limit", "batch") if within and precision is not Precision.FP32 else ()
    return replace(
        without(request, *(name for name in CALIBRATION if name not in kept)),
        fp16=precision is Precision.FP16,
        bf16=precision is Precision.BF16,
        precision_override=[
            text for text in request.precision_override if Override.parse(text).precision in precisions
        ],
        preprocess=preprocess,
        reporter=_Prefixed(request.reporter, precision),
    )


def build_candidate(request: BuildRequest, precision: Precision, folder: Path) -> BuildResult:
    """Build one engine, with all that belongs to it, in a folder of its own."""
    own = folder / str(precision)
    own.mkdir(parents=True)
    return engine.construct(
        replace(
            request,
            output=own / Path(request.output).name,
            save_onnx=own / "graph.onnx" if request.save_onnx else None,
            save_cache=own / NATIVE_CACHE if request.save_cache else None,
        )
    )


class _Prefixed(Reporter):
    """Another candidate's phases and warnings, under its name; its notes were said for the first one."""

    def __init__(self, reporter: Reporter, precision: Precision) -> None:
        self._reporter, self._name = reporter, precision.upper()

    def warn(self, text: str) -> None:
        self._reporter.warn(f"{self._name}: {text}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        with self._reporter.phase(f"{self._name}: {name}", total) as phase:
            yield phase
