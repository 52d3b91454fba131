"""trtopt: PyTorch or ONNX to a verified INT8 or FP16 TensorRT engine, the same way on TensorRT 8.6, 10, 11 and RTX.

    trtopt.export("torchvision:resnet50", "resnet50.onnx")
    trtopt.check("resnet50.onnx").ok
    trtopt.build("resnet50.onnx", "resnet50.engine", int8=True, images="photos/", preprocess="imagenet")

Each function is also a command: `trtopt build --help`; `run_jobs` and `show_jobs` are `trtopt jobs run` and `jobs show`. Beside
the functions stand what they take and give, and their errors, of which `TrtoptError` is the base (`trtopt.core.errors` has the
tree). Names load when they are first used, so that `import trtopt` is fast and needs nothing but the base install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtopt.autotune.building import build
    from trtopt.builder.construction import BuildResult
    from trtopt.calibration.calibrator import CalibrateResult, calibrate
    from trtopt.calibration.exporting import ExportedCache
    from trtopt.calibration.histogram import Histogram
    from trtopt.calibration.importing import Coverage
    from trtopt.calibration.table import Table, TableEntry
    from trtopt.core.errors import (
        AccuracyLost,
        BackendError,
        BuildCancelled,
        BuildFailed,
        Busy,
        CalibrationError,
        DataError,
        DeviceError,
        EngineError,
        EngineMismatch,
        ExportMismatch,
        InvalidModel,
        MissingDependency,
        ModelError,
        NoBackend,
        OutputError,
        PrecisionLost,
        TrtoptError,
        UnsupportedOperator,
        UnsupportedRequest,
        UsageError,
        WorkerDied,
    )
    from trtopt.core.progress import Phase, Reporter
    from trtopt.core.shapes import Suggestion
    from trtopt.core.values import Kept, Precision, ShapeRange, TensorInfo
    from trtopt.core.version import __version__
    from trtopt.cuda.smi import Clocks
    from trtopt.data.batches import Skipped
    from trtopt.data.preprocess import Preprocess
    from trtopt.engine.inspection import EngineReport, ModelReport, VersionReport, inspect, version
    from trtopt.engine.manifest import Manifest, load_manifest
    from trtopt.evaluation.benchmark import BenchReport, BenchRow, bench
    from trtopt.evaluation.limits import Limits
    from trtopt.evaluation.outputs import Channels, OutputAgreement, SampleAgreement, SampleSpread
    from trtopt.evaluation.verify import Accuracy, Agreement, verify
    from trtopt.frontend.exporter import ExportComparison, ExportResult, export
    from trtopt.graph.output_kinds import Kind
    from trtopt.graph.passes.fold import FoldReport
    from trtopt.graph.passes.listing import ListedNode
    from trtopt.jobs.results import JobResult, JobsResult
    from trtopt.jobs.runner import run_jobs, show_jobs
    from trtopt.linting.checker import CheckReport, check
    from trtopt.linting.rules import Finding
    from trtopt.runtime.batcher import Batcher, BatcherStats
    from trtopt.runtime.bound import Bound
    from trtopt.runtime.inference import OutputSummary, Ranked, RunResult, run
    from trtopt.runtime.predictions import Prediction
    from trtopt.runtime.session import MemoryReport, Session, SessionStats
    from trtopt.runtime.timing import Spread, Timing
    from trtopt.workflow import PipelineResult, pipeline

_HOMES = {
    "autotune.building": ("build",),
    "builder.construction": ("BuildResult",),
    "calibration.calibrator": ("CalibrateResult", "calibrate"),
    "calibration.exporting": ("ExportedCache",),
    "calibration.histogram": ("Histogram",),
    "calibration.importing": ("Coverage",),
    "calibration.table": ("Table", "TableEntry"),
    "core.errors": (
        "AccuracyLost",
        "BackendError",
        "BuildCancelled",
        "BuildFailed",
        "Busy",
        "CalibrationError",
        "DataError",
        "DeviceError",
        "EngineError",
        "EngineMismatch",
        "ExportMismatch",
        "InvalidModel",
        "MissingDependency",
        "ModelError",
        "NoBackend",
        "OutputError",
        "PrecisionLost",
        "TrtoptError",
        "UnsupportedOperator",
        "UnsupportedRequest",
        "UsageError",
        "WorkerDied",
    ),
    "core.progress": ("Phase", "Reporter"),
    "core.shapes": ("Suggestion",),
    "core.values": ("Kept", "Precision", "ShapeRange", "TensorInfo"),
    "core.version": ("__version__",),
    "cuda.smi": ("Clocks",),
    "data.batches": ("Skipped",),
    "data.preprocess": ("Preprocess",),
    "engine.inspection": ("EngineReport", "ModelReport", "VersionReport", "inspect", "version"),
    "engine.manifest": ("Manifest", "load_manifest"),
    "evaluation.benchmark": ("BenchReport", "BenchRow", "bench"),
    "evaluation.limits": ("Limits",),
    "evaluation.outputs": ("Channels", "OutputAgreement", "SampleAgreement", "SampleSpread"),
    "evaluation.verify": ("Accuracy", "Agreement", "verify"),
    "frontend.exporter": ("ExportComparison", "ExportResult", "export"),
    "graph.output_kinds": ("Kind",),
    "graph.passes.fold": ("FoldReport",),
    "graph.passes.listing": ("ListedNode",),
    "jobs.results": ("JobResult", "JobsResult"),
    "jobs.runner": ("run_jobs", "show_jobs"),
    "linting.checker": ("CheckReport", "check"),
    "linting.rules": ("Finding",),
    "runtime.batcher": ("Batcher", "BatcherStats"),
    "runtime.bound": ("Bound",),
    "runtime.inference": ("OutputSummary", "Ranked", "RunResult", "run"),
    "runtime.predictions": ("Prediction",),
    "runtime.session": ("MemoryReport", "Session", "SessionStats"),
    "runtime.timing": ("Spread", "Timing"),
    "workflow": ("PipelineResult", "pipeline"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Accuracy",
    "AccuracyLost",
    "Agreement",
    "BackendError",
    "Batcher",
    "BatcherStats",
    "BenchReport",
    "BenchRow",
    "Bound",
    "BuildCancelled",
    "BuildFailed",
    "BuildResult",
    "Busy",
    "CalibrateResult",
    "CalibrationError",
    "Channels",
    "CheckReport",
    "Clocks",
    "Coverage",
    "DataError",
    "DeviceError",
    "EngineError",
    "EngineMismatch",
    "EngineReport",
    "ExportComparison",
    "ExportMismatch",
    "ExportResult",
    "ExportedCache",
    "Finding",
    "FoldReport",
    "Histogram",
    "InvalidModel",
    "JobResult",
    "JobsResult",
    "Kept",
    "Kind",
    "Limits",
    "ListedNode",
    "Manifest",
    "MemoryReport",
    "MissingDependency",
    "ModelError",
    "ModelReport",
    "NoBackend",
    "OutputAgreement",
    "OutputError",
    "OutputSummary",
    "Phase",
    "PipelineResult",
    "Precision",
    "PrecisionLost",
    "Prediction",
    "Preprocess",
    "Ranked",
    "Reporter",
    "RunResult",
    "SampleAgreement",
    "SampleSpread",
    "Session",
    "SessionStats",
    "ShapeRange",
    "Skipped",
    "Spread",
    "Suggestion",
    "Table",
    "TableEntry",
    "TensorInfo",
    "Timing",
    "TrtoptError",
    "UnsupportedOperator",
    "UnsupportedRequest",
    "UsageError",
    "VersionReport",
    "WorkerDied",
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
