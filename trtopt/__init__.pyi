"""The public names, each with its module: read by type checkers, and by `__init__.py` to load a name when it is first used."""

from trtopt.autotune.building import build as build, tune as tune
from trtopt.autotune.goal import TunedChoice as TunedChoice
from trtopt.autotune.sensitivity import (
    NoiseSource as NoiseSource,
    Sensitivity as Sensitivity,
    sensitivity as sensitivity,
)
from trtopt.autotune.tiers import Tier as Tier, Tiers as Tiers, tiers as tiers
from trtopt.autotune.tuning import Tuning as Tuning
from trtopt.builder.construction import BuildResult as BuildResult
from trtopt.builder.refit import RefitResult as RefitResult, refit as refit
from trtopt.calibration.calibrator import (
    CalibrateResult as CalibrateResult,
    ExportedCache as ExportedCache,
    calibrate as calibrate,
)
from trtopt.calibration.histogram import Histogram as Histogram
from trtopt.calibration.importing import Coverage as Coverage
from trtopt.calibration.repairing import NoiseByPlace as NoiseByPlace, Repairs as Repairs
from trtopt.calibration.table import Table as Table
from trtopt.calibration.thresholds import TableEntry as TableEntry
from trtopt.certification.certificate import Certificate as Certificate, certify as certify
from trtopt.certification.relations import Relation as Relation
from trtopt.core.errors import (
    AccuracyLost as AccuracyLost,
    BackendError as BackendError,
    BuildCancelled as BuildCancelled,
    BuildFailed as BuildFailed,
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
    TrtoptError as TrtoptError,
    UnsupportedOperator as UnsupportedOperator,
    UnsupportedRequest as UnsupportedRequest,
    UsageError as UsageError,
    WorkerDied as WorkerDied,
)
from trtopt.core.operators import operator as operator
from trtopt.core.progress import Phase as Phase, Reporter as Reporter
from trtopt.core.shapes import Suggestion as Suggestion
from trtopt.core.values import Kept as Kept, Precision as Precision, ShapeRange as ShapeRange, TensorInfo as TensorInfo
from trtopt.core.version import __version__ as __version__
from trtopt.cuda.clocks import Clocks as Clocks
from trtopt.data.preprocess import Preprocess as Preprocess
from trtopt.data.rebatch import Call as Call, Skipped as Skipped
from trtopt.diagnosis.doctor import DoctorReport as DoctorReport, HostFinding as HostFinding, doctor as doctor
from trtopt.diagnosis.migration import Migration as Migration, Replacement as Replacement
from trtopt.diagnosis.profiling import EngineProfile as EngineProfile, profile as profile
from trtopt.diagnosis.report import Report as Report, report as report
from trtopt.diagnosis.upgrading import Change as Change, Upgrade as Upgrade, upgrade as upgrade
from trtopt.engine.inspection import VersionReport as VersionReport, inspect as inspect, version as version
from trtopt.engine.manifest import Manifest as Manifest, load_manifest as load_manifest
from trtopt.engine.reports import (
    Differing as Differing,
    EngineDifference as EngineDifference,
    EngineReport as EngineReport,
)
from trtopt.engine.store import (
    StoredEngine as StoredEngine,
    StoreListing as StoreListing,
    StorePruning as StorePruning,
    list_store as list_store,
    prune_store as prune_store,
)
from trtopt.evaluation.agreement import Accuracy as Accuracy, Agreement as Agreement, Scores as Scores
from trtopt.evaluation.benchmark import BenchReport as BenchReport, BenchRow as BenchRow, bench as bench
from trtopt.evaluation.limits import Limits as Limits
from trtopt.evaluation.measures import Channels as Channels
from trtopt.evaluation.outputs import (
    OutputAgreement as OutputAgreement,
    SampleAgreement as SampleAgreement,
    SampleSpread as SampleSpread,
)
from trtopt.evaluation.per_layer import LayerAgreement as LayerAgreement
from trtopt.evaluation.verify import verify as verify
from trtopt.frontend.comparison import ExportComparison as ExportComparison
from trtopt.frontend.exporter import ExportResult as ExportResult, export as export
from trtopt.frontend.proposal import InitResult as InitResult, init as init
from trtopt.graph.output_kinds import Kind as Kind
from trtopt.graph.passes.fold import FoldReport as FoldReport
from trtopt.graph.passes.repair import Repair as Repair
from trtopt.jobs.results import JobResult as JobResult, JobsResult as JobsResult
from trtopt.jobs.runner import run_jobs as run_jobs, show_jobs as show_jobs
from trtopt.linting.checker import CheckReport as CheckReport, ListedNode as ListedNode, check as check
from trtopt.linting.rules import Finding as Finding
from trtopt.runtime.batcher import Batcher as Batcher, BatcherStats as BatcherStats
from trtopt.runtime.bound_call import BoundCall as BoundCall
from trtopt.runtime.images import Prediction as Prediction
from trtopt.runtime.inference import (
    OutputSummary as OutputSummary,
    Ranked as Ranked,
    RunResult as RunResult,
    run as run,
)
from trtopt.runtime.open_engine import MemoryReport as MemoryReport, SessionStats as SessionStats
from trtopt.runtime.session import Session as Session
from trtopt.runtime.timing import LayerTime as LayerTime, LayerTimes as LayerTimes, Spread as Spread, Timing as Timing
from trtopt.serving.repository import (
    DeployedModel as DeployedModel,
    Deployment as Deployment,
    deploy_triton as deploy_triton,
)
from trtopt.serving.server import Server as Server, ServerEnd as ServerEnd, serve as serve
from trtopt.trt.compatibility import PlanOrigin as PlanOrigin
from trtopt.trt.plugins import Creator as Creator
from trtopt.workflow import PipelineResult as PipelineResult, pipeline as pipeline

__all__: list[str]
