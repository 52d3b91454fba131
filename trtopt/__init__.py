"""trtopt: PyTorch or ONNX to a verified INT8 or FP16 TensorRT engine, the same way on TensorRT 8.6, 10, 11 and RTX.

    trtopt.export("torchvision:resnet50", "resnet50.onnx")
    trtopt.check("resnet50.onnx").ok
    trtopt.build("resnet50.onnx", "resnet50.engine", int8=True, images="photos/", preprocess="imagenet")

Each function is also a command: `trtopt build --help`; `run_jobs` and `show_jobs` are `trtopt jobs run` and `jobs show`. Names
load when they are first used, so that `import trtopt` is fast and needs nothing but the base install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtopt.autotune.building import build
    from trtopt.builder.construction import BuildResult
    from trtopt.calibration.calibrator import CalibrateResult, calibrate
    from trtopt.calibration.table import Table
    from trtopt.core.errors import TrtoptError
    from trtopt.core.version import __version__
    from trtopt.data.preprocess import Preprocess
    from trtopt.engine.inspection import EngineReport, ModelReport, inspect, version
    from trtopt.engine.manifest import Manifest, load_manifest
    from trtopt.evaluation.benchmark import BenchReport, bench
    from trtopt.evaluation.verify import Agreement, verify
    from trtopt.frontend.exporter import ExportResult, export
    from trtopt.jobs.results import JobsResult
    from trtopt.jobs.runner import run_jobs, show_jobs
    from trtopt.linting.checker import CheckReport, check
    from trtopt.runtime.batcher import Batcher, BatcherStats
    from trtopt.runtime.inference import RunResult, run
    from trtopt.runtime.predictions import Prediction
    from trtopt.runtime.session import Session
    from trtopt.workflow import PipelineResult, pipeline

_HOMES = {
    "evaluation.benchmark": ("BenchReport", "bench"),
    "autotune.building": ("build",),
    "calibration.calibrator": ("CalibrateResult", "calibrate"),
    "calibration.table": ("Table",),
    "data.preprocess": ("Preprocess",),
    "builder.construction": ("BuildResult",),
    "core.errors": ("TrtoptError",),
    "frontend.exporter": ("ExportResult", "export"),
    "runtime.batcher": ("Batcher", "BatcherStats"),
    "runtime.inference": ("RunResult", "run"),
    "jobs.results": ("JobsResult",),
    "jobs.runner": ("run_jobs", "show_jobs"),
    "linting.checker": ("CheckReport", "check"),
    "engine.manifest": ("Manifest", "load_manifest"),
    "engine.inspection": ("EngineReport", "ModelReport", "inspect", "version"),
    "evaluation.verify": ("Agreement", "verify"),
    "runtime.predictions": ("Prediction",),
    "runtime.session": ("Session",),
    "workflow": ("PipelineResult", "pipeline"),
    "core.version": ("__version__",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Agreement",
    "Batcher",
    "BatcherStats",
    "BenchReport",
    "BuildResult",
    "CalibrateResult",
    "CheckReport",
    "EngineReport",
    "ExportResult",
    "JobsResult",
    "Manifest",
    "ModelReport",
    "PipelineResult",
    "Prediction",
    "Preprocess",
    "RunResult",
    "Session",
    "Table",
    "TrtoptError",
    "__version__",
    "bench",
    "build",
    "calibrate",
    "check",
    "export",
    "inspect",
    "load_manifest",
    "pipeline",
    "run",
    "run_jobs",
    "show_jobs",
    "verify",
    "version",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trtopt' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"trtopt.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
