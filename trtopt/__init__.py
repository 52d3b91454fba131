"""trtopt: PyTorch or ONNX to a verified INT8 or FP16 TensorRT engine, the same way on TensorRT 8.6, 10, 11 and RTX.

    trtopt.export("torchvision:resnet50", "resnet50.onnx")
    trtopt.check("resnet50.onnx").ok
    trtopt.build("resnet50.onnx", "resnet50.engine", int8=True, images="photos/", preprocess="imagenet")

Each function is also a command: `trtopt build --help`; `run_jobs` and `show_jobs` are `trtopt jobs run` and `jobs show`,
`deploy_triton` is `trtopt deploy triton`, `list_store` is `trtopt store list` and so on. Beside the functions stand what they
take and give, and their errors, of which `TrtoptError` is the base. Names load when they are first used, so that
`import trtopt` is fast and needs nothing but the base install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtopt.autotune.building import build as build, tune as tune
    from trtopt.autotune.goal import TunedFigures as TunedFigures
    from trtopt.autotune.search import TunedChoice as TunedChoice
    from trtopt.autotune.sensitivity import (
        NoiseSource as NoiseSource,
        Sensitivity as Sensitivity,
        sensitivity as sensitivity,
    )
    from trtopt.autotune.tuning import Tuning as Tuning
    from trtopt.builder.construction import BuildResult as BuildResult
    from trtopt.calibration.calibrator import CalibrateResult as CalibrateResult, calibrate as calibrate
    from trtopt.calibration.exporting import ExportedCache as ExportedCache
    from trtopt.calibration.histogram import Histogram as Histogram
    from trtopt.calibration.importing import Coverage as Coverage
    from trtopt.calibration.repairing import NoiseByPlace as NoiseByPlace, Repairs as Repairs
    from trtopt.calibration.table import Table as Table, TableEntry as TableEntry
    from trtopt.core.errors import (
        AccuracyLost as AccuracyLost,
        BackendError as BackendError,
        BuildCancelled as BuildCancelled,
        BuildFailed as BuildFailed,
        BundleFailed as BundleFailed,
        Busy as Busy,
        CalibrationError as CalibrationError,
        DataError as DataError,
        DeviceError as DeviceError,
        EngineError as EngineError,
        EngineMismatch as EngineMismatch,
        ExportMismatch as ExportMismatch,
        InvalidModel as InvalidModel,
        MissingDependency as MissingDependency,
        ModelError as ModelError,
        NoBackend as NoBackend,
        NoServer as NoServer,
        OutputError as OutputError,
        PrecisionLost as PrecisionLost,
        ServerFailed as ServerFailed,
        SignatureRefused as SignatureRefused,
        TrtoptError as TrtoptError,
        UnsupportedOperator as UnsupportedOperator,
        UnsupportedRequest as UnsupportedRequest,
        UsageError as UsageError,
        WorkerDied as WorkerDied,
    )
    from trtopt.core.progress import Duration as Duration, Phase as Phase, Reporter as Reporter
    from trtopt.core.shapes import Suggestion as Suggestion
    from trtopt.core.values import (
        Kept as Kept,
        Precision as Precision,
        ShapeRange as ShapeRange,
        TensorInfo as TensorInfo,
    )
    from trtopt.core.version import __version__ as __version__
    from trtopt.cuda.smi import Clocks as Clocks
    from trtopt.data.batches import Skipped as Skipped
    from trtopt.data.preprocess import Preprocess as Preprocess
    from trtopt.diagnosis.benching import bench as bench
    from trtopt.diagnosis.findings import HostFinding as HostFinding
    from trtopt.diagnosis.migration import Migration as Migration, Replacement as Replacement
    from trtopt.diagnosis.page import Report as Report, report as report
    from trtopt.diagnosis.profiling import EngineProfile as EngineProfile, profile as profile
    from trtopt.diagnosis.report import DoctorReport as DoctorReport, doctor as doctor
    from trtopt.engine.difference import Differing as Differing, EngineDifference as EngineDifference
    from trtopt.engine.inspection import (
        EngineReport as EngineReport,
        ModelReport as ModelReport,
        VersionReport as VersionReport,
        inspect as inspect,
        version as version,
    )
    from trtopt.engine.manifest import Manifest as Manifest, load_manifest as load_manifest
    from trtopt.engine.signing import Signature as Signature, sign as sign
    from trtopt.engine.store import StoredEngine as StoredEngine
    from trtopt.engine.storekeeping import (
        StoreListing as StoreListing,
        StorePruning as StorePruning,
        StoreVerification as StoreVerification,
        list_store as list_store,
        prune_store as prune_store,
        verify_store as verify_store,
    )
    from trtopt.evaluation.benchmark import BenchReport as BenchReport, BenchRow as BenchRow
    from trtopt.evaluation.limits import Limits as Limits
    from trtopt.evaluation.outputs import (
        Channels as Channels,
        OutputAgreement as OutputAgreement,
        SampleAgreement as SampleAgreement,
        SampleSpread as SampleSpread,
    )
    from trtopt.evaluation.per_layer import LayerAgreement as LayerAgreement
    from trtopt.evaluation.verify import (
        Accuracy as Accuracy,
        Agreement as Agreement,
        Scores as Scores,
        verify as verify,
    )
    from trtopt.frontend.comparison import ExportComparison as ExportComparison
    from trtopt.frontend.exporter import ExportResult as ExportResult, export as export
    from trtopt.frontend.proposal import InitResult as InitResult, init as init
    from trtopt.graph.output_kinds import Kind as Kind
    from trtopt.graph.passes.fold import FoldReport as FoldReport
    from trtopt.graph.passes.listing import ListedNode as ListedNode
    from trtopt.graph.passes.repair import Repair as Repair
    from trtopt.jobs.results import JobResult as JobResult, JobsResult as JobsResult
    from trtopt.jobs.runner import run_jobs as run_jobs, show_jobs as show_jobs
    from trtopt.linting.checker import CheckReport as CheckReport, check as check
    from trtopt.linting.rules import Finding as Finding
    from trtopt.runtime.batch_queue import BatcherStats as BatcherStats
    from trtopt.runtime.batcher import Batcher as Batcher
    from trtopt.runtime.bound_call import BoundCall as BoundCall
    from trtopt.runtime.inference import (
        OutputSummary as OutputSummary,
        Ranked as Ranked,
        RunResult as RunResult,
        run as run,
    )
    from trtopt.runtime.predictions import Prediction as Prediction
    from trtopt.runtime.profiling import LayerTime as LayerTime, LayerTimes as LayerTimes
    from trtopt.runtime.session import MemoryReport as MemoryReport, Session as Session, SessionStats as SessionStats
    from trtopt.runtime.timing import Spread as Spread, Timing as Timing
    from trtopt.serving.bundle import Bundle as Bundle, BundledFile as BundledFile, bundle as bundle
    from trtopt.serving.repository import (
        DeployedModel as DeployedModel,
        Deployment as Deployment,
        deploy_triton as deploy_triton,
    )
    from trtopt.serving.server import Server as Server, ServerEnd as ServerEnd, serve as serve
    from trtopt.trt.compatibility import PlanOrigin as PlanOrigin
    from trtopt.workflow import PipelineResult as PipelineResult, pipeline as pipeline

_HOMES = {
    "autotune.building": ("build", "tune"),
    "autotune.sensitivity": ("NoiseSource", "Sensitivity", "sensitivity"),
    "autotune.goal": ("TunedFigures",),
    "autotune.search": ("TunedChoice",),
    "autotune.tuning": ("Tuning",),
    "builder.construction": ("BuildResult",),
    "calibration.calibrator": ("CalibrateResult", "calibrate"),
    "calibration.exporting": ("ExportedCache",),
    "calibration.histogram": ("Histogram",),
    "calibration.importing": ("Coverage",),
    "calibration.repairing": ("NoiseByPlace", "Repairs"),
    "calibration.table": ("Table", "TableEntry"),
    "core.errors": (
        "AccuracyLost",
        "BackendError",
        "BuildCancelled",
        "BuildFailed",
        "BundleFailed",
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
        "NoServer",
        "OutputError",
        "PrecisionLost",
        "ServerFailed",
        "SignatureRefused",
        "TrtoptError",
        "UnsupportedOperator",
        "UnsupportedRequest",
        "UsageError",
        "WorkerDied",
    ),
    "core.progress": ("Duration", "Phase", "Reporter"),
    "core.shapes": ("Suggestion",),
    "core.values": ("Kept", "Precision", "ShapeRange", "TensorInfo"),
    "core.version": ("__version__",),
    "cuda.smi": ("Clocks",),
    "data.batches": ("Skipped",),
    "data.preprocess": ("Preprocess",),
    "diagnosis.benching": ("bench",),
    "diagnosis.findings": ("HostFinding",),
    "diagnosis.migration": ("Migration", "Replacement"),
    "diagnosis.page": ("Report", "report"),
    "diagnosis.profiling": ("EngineProfile", "profile"),
    "diagnosis.report": ("DoctorReport", "doctor"),
    "engine.difference": ("Differing", "EngineDifference"),
    "engine.inspection": ("EngineReport", "ModelReport", "VersionReport", "inspect", "version"),
    "engine.manifest": ("Manifest", "load_manifest"),
    "engine.store": ("StoredEngine",),
    "engine.storekeeping": (
        "StoreListing",
        "StorePruning",
        "StoreVerification",
        "list_store",
        "prune_store",
        "verify_store",
    ),
    "evaluation.benchmark": ("BenchReport", "BenchRow"),
    "evaluation.limits": ("Limits",),
    "evaluation.outputs": ("Channels", "OutputAgreement", "SampleAgreement", "SampleSpread"),
    "evaluation.per_layer": ("LayerAgreement",),
    "evaluation.verify": ("Accuracy", "Agreement", "Scores", "verify"),
    "frontend.comparison": ("ExportComparison",),
    "frontend.exporter": ("ExportResult", "export"),
    "frontend.proposal": ("InitResult", "init"),
    "graph.output_kinds": ("Kind",),
    "graph.passes.fold": ("FoldReport",),
    "graph.passes.listing": ("ListedNode",),
    "graph.passes.repair": ("Repair",),
    "jobs.results": ("JobResult", "JobsResult"),
    "jobs.runner": ("run_jobs", "show_jobs"),
    "linting.checker": ("CheckReport", "check"),
    "linting.rules": ("Finding",),
    "runtime.batch_queue": ("BatcherStats",),
    "runtime.batcher": ("Batcher",),
    "runtime.bound_call": ("BoundCall",),
    "runtime.inference": ("OutputSummary", "Ranked", "RunResult", "run"),
    "runtime.predictions": ("Prediction",),
    "runtime.profiling": ("LayerTime", "LayerTimes"),
    "runtime.session": ("MemoryReport", "Session", "SessionStats"),
    "runtime.timing": ("Spread", "Timing"),
    "engine.signing": ("Signature", "sign"),
    "serving.bundle": ("Bundle", "BundledFile", "bundle"),
    "serving.repository": ("DeployedModel", "Deployment", "deploy_triton"),
    "serving.server": ("Server", "ServerEnd", "serve"),
    "trt.compatibility": ("PlanOrigin",),
    "workflow": ("PipelineResult", "pipeline"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trtopt' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"trtopt.{_HOME[name]}")
    except ModuleNotFoundError as error:
        from trtopt.core.errors import without_graphs

        explanation = without_graphs(error)
        if explanation is None:
            raise
        raise explanation from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
