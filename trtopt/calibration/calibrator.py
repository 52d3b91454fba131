"""calibrate(): a model and real inputs in, a table of scales out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

from trtopt.calibration.exporting import ExportedCache, export
from trtopt.calibration.histogram import Histogram
from trtopt.calibration.importing import MISSING, Coverage, import_table
from trtopt.calibration.observe import observe, require_gpu_provider
from trtopt.calibration.prepared import Prepared, prepare, refuse_quantized
from trtopt.calibration.quality import Survey, check_preprocessing, facts, refuse
from trtopt.calibration.repairing import (
    SAMPLES,
    STRENGTHS,
    WORSE,
    WORTH_SMOOTHING,
    Repairs,
    channels,
    find_repairs,
)
from trtopt.calibration.request import CalibrateRequest
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache, read_cache
from trtopt.core.documents import plain
from trtopt.core.errors import DataError, ModelError, OutputError, TrtoptError, UsageError
from trtopt.core.files import cache_folder, cache_path, check_ending
from trtopt.core.host import cores
from trtopt.core.options import named, taking
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import METHODS, Override, Precision, TensorInfo, choice
from trtopt.data import Batches, ImageBatches, Skipped, open_data, samples_of
from trtopt.data.arrays import where_counted
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import Arrays, alone
from trtopt.graph.bounds import bounds
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import Model, load_model
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import find_points
from trtopt.graph.passes.quantize import OPSET
from trtopt.graph.passes.smooth import factors_for, smoothable, smoothed
from trtopt.graph.passes.typed import near_fp16_end
from trtopt.graph.proto import in_memory
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.ranges import beyond_fp16, measure_ranges

DEVICES = ("cpu", "cuda")
LEAST = 2  # samples: a scale from one is that sample's own
FEW = 32  # samples: below, thresholds still move visibly with each one


@dataclass(frozen=True)
class CalibrateResult:
    """The result of `calibrate`.

    Attributes:
        path: where the table was written, if asked for.
        skipped: files left out, with the reason.
        seconds: this call took.
        cached: the pass over the data was an earlier call's.
        notes: what the user should know about the data.
        coverage: how an imported cache fitted the model.
        exported: the TensorRT cache that was written.
        repairs: which weights are rounded otherwise, and what that gives.
    """

    table: Table
    path: Path | None
    skipped: tuple[Skipped, ...]
    seconds: float
    cached: bool
    notes: tuple[str, ...] = ()
    coverage: Coverage | None = None
    exported: ExportedCache | None = None
    repairs: Repairs | None = None

    @property
    def samples(self) -> int:
        return self.table.samples

    def to_json(self) -> dict[str, Any]:
        table = self.table
        tensors = {
            name: {"amax": entry.amax, "method": entry.method}
            | ({} if (seen := entry.histogram) is None else {"absmax": seen.absmax, "count": seen.total})
            for name, entry in table.tensors.items()
        }
        about = {name: getattr(table, name) for name in ("groups", "method", "samples", "digest", "quality")}
        own = {name: getattr(self, name) for name in ("skipped", "notes", "exported", "cached")}
        found: dict[str, Any] = {
            "tensors": tensors,
            "table": self.path,
            "seconds": round(self.seconds, 3),
            "coverage": self.coverage.to_json() if self.coverage else None,
            "repairs": self.repairs.describe() if self.repairs else None,
        }
        return dict(plain({**about, **own, **found}))


@taking(CalibrateRequest)
def calibrate(request: CalibrateRequest) -> CalibrateResult:
    """Measure a model's INT8 scales on real inputs, in one pass, or take them from an earlier measurement or a TensorRT
    cache, without any data.

    The result is the same, to the bit, whatever the batch size, the order of the samples and the number of threads. The fields
    of `CalibrateRequest` say what each argument is; of some there is more to know:

    Args:
        model: an FP32 ONNX file or model. It is folded first, as `build` folds it.
        images, data, preprocess, limit: real inputs, in any form that `trtopt.data.open_data` takes.
        calib: a table of an earlier call for this model: `method` chooses again from what was counted then.
        gates: measure squeeze-and-excite, too: the product, what the mean reads and the convolutions of one pixel. INT8 leaves
            it in floating point, but `tune` for TensorRT 8.6 tries it in INT8 where the table has its scales.
        repair: choose the codes of INT8 weights, and correct biases, by what the layers' inputs are; and where activations
            make much of the noise, move scales of channels from them into the weights around them. Each is kept where it
            lowers the noise at the outputs on samples held apart. The table holds it, and `build` repeats it.
        device: "cuda" runs the model on the first GPU, whose values may differ from a CPU's in their last bits.

    Raises:
        UsageError, DataError: arguments or data that can't be right, before any long work; copies when all were seen.
        CalibrationError: a tensor gives no scale (constant or not finite; it is named), the model already holds Q/DQ, or
            nothing in it can be quantized; or the imported cache lacks tensors (named).
        InvalidModel, DeviceError, OutputError: the model can't be read, there is no GPU, or the table can't be written.
    """
    return calibrated(request)


def calibrated(request: CalibrateRequest) -> CalibrateResult:
    """Do what `calibrate` does, for stages that have the request, and perhaps the model: a `Model` isn't read again."""
    reporter, started = request.reporter, time.monotonic()
    choice(request.method, METHODS, "`method=`")
    choice(request.missing, MISSING, "`missing=`")
    gpu = require_gpu_provider() if choice(request.device, DEVICES, "`device=`") == "cuda" else None
    overrides = tuple(map(Override.parse, request.precision_override))
    if request.repair and (request.import_cache is not None or (request.images is None and request.data is None)):
        raise UsageError("`repair=True` needs samples to round by: give `images=DIR` or `data='F.npz'`")
    if request.output is not None:
        check_ending(request.output, (".onnx", ".engine"), "a calibration table", "a model or an engine", ".calib.json")
    loaded = load_model(request.model, lazy=True)
    refuse_quantized(loaded)
    ready = partial(prepare, loaded, overrides, gates=request.gates, reporter=reporter)
    batches = coverage = repairs = exported = None
    cached = request.calib is not None
    if request.import_cache is not None:
        also = {} if request.method == "auto" else {"method": request.method}
        _refuse_measuring(request, "`import_cache=`", calib=request.calib, **also)
        cache = read_cache(request.import_cache)
        prepared, known = ready(), {"missing": request.missing, "preprocess": request.preprocess}
        with reporter.phase(f"importing {Path(request.import_cache).name}"):
            table, coverage = import_table(cache, loaded.proto, prepared, overrides=overrides, **known)
        for warning in coverage.warnings:
            reporter.warn(warning)
    elif request.calib is not None:
        if not request.repair:  # which needs samples
            _refuse_measuring(request, "`calib=`")
        if not isinstance(request.calib, Table) and is_cache(request.calib):
            raise UsageError(
                f"`calib='{request.calib}'` is a TensorRT cache: give it as `import_cache='{request.calib}'`"
            )
        earlier = request.calib if isinstance(request.calib, Table) else Table.load(request.calib)
        prepared = ready()
        with reporter.phase("choosing thresholds"):
            table = prepared.chosen_again(earlier, request.method)
    else:
        batches = open_data(
            loaded.inputs,
            **samples_of(request),
            batch=request.batch,
            threads=request.threads or (cores() if gpu else None),  # a GPU waits for decoding
            reporter=reporter,
        )
        check_enough(batches, loaded.inputs)
        if alone(loaded.inputs):
            reporter.note(f"{where_counted(loaded.inputs)}; {batches.samples} are read")
        prepared = ready(samples=batches)
        table, cached = _measured(request, prepared, batches, gpu)
    if request.repair:
        table, repairs = _repaired(request, prepared, loaded, overrides, table, gpu)
    notes = () if coverage else data_notes(table)
    for note in notes if request.calib is None else ():  # of an earlier table it was said when that was made
        reporter.warn(note)
    if request.output is not None:
        table.save(request.output)
    if request.export_cache is not None:
        exported = export(request, loaded.proto, prepared.proto, table, batches)
    path = None if request.output is None else Path(request.output)
    skipped = () if batches is None else batches.skipped
    return CalibrateResult(table, path, skipped, time.monotonic() - started, cached, notes, coverage, exported, repairs)


def _repaired(
    request: CalibrateRequest,
    prepared: Prepared,
    given: Model,
    overrides: Sequence[Override],
    table: Table,
    gpu: Mapping[str, str] | None,
) -> tuple[Table, Repairs]:
    """Return the table with what lowers the noise most on samples held apart, at the outputs of the model as it was given."""
    proto = to_proto(to_ir_at(in_memory(prepared.proto), OPSET[Precision.INT8]))
    few = partial(open_data, given.inputs, **{**samples_of(request), "limit": SAMPLES})
    find = partial(find_repairs, given=given.proto, threads=request.threads or cores(), reporter=request.reporter)
    table, model = replace(table, repairs={}, smoothed={}, left_out={}), to_ir(proto)
    points = find_points(model, overrides=overrides)
    repairs = find(proto, points, table.amax, few())
    assert repairs is not None
    best, before = (table, repairs), repairs.before
    candidates = smoothable(model, points)
    adds = 3 * sum(len(item.matrices) for item in candidates.values() if item.adds) >= len(points.weights)
    if not adds:  # a node more each, for networks only that matrix products do the most of, as transformers
        candidates = {name: item for name, item in candidates.items() if not item.adds}
    share = sum(repairs.noise.activations.get(name, 0.0) for name in candidates) / (repairs.noise.total or 1.0)
    worth = share >= WORTH_SMOOTHING and request.export_cache is None
    largest = channels(proto, {name: item.axis for name, item in candidates.items()}, few()) if worth else {}
    for strength in STRENGTHS if worth else ():
        factors = {name: factors_for(largest[name], readers, strength) for name, readers in candidates.items()}
        other = smoothed(proto, factors)
        points = find_points(to_ir(other), overrides=overrides)
        seen, _ = _measured(
            request,
            prepared.of(other, points),
            open_data(given.inputs, **samples_of(request), batch=request.batch),
            gpu,
            examined=False,
        )
        tried = replace(table, tensors={**table.tensors, **seen.tensors}, smoothed=factors)
        what = f"rounding weights, channels smoothed (strength {strength:g})"
        # What is worse isn't worth the time of repairing it; of transformers that can't be said before.
        most = math.inf if adds else before / WORSE
        repairs = find(other, points, tried.amax, few(), what=what, most=most)
        if repairs is not None and repairs.after < best[1].after:
            best = tried, replace(repairs, before=before)
    table, repairs = best
    return replace(table, repairs=repairs.nodes), repairs


def _refuse_measuring(request: CalibrateRequest, source: str, **others: Any) -> None:
    """Raise UsageError for what only measuring needs, `others` among it, beside scales from `source`."""
    options = {name: getattr(request, name) for name in ("images", "data", "limit", "threads")} | others
    extra = [named(name) for name, value in options.items() if value is not None]
    if extra:
        raise UsageError(
            f"{source} takes what was measured before, without data: drop {', '.join(extra)}, or drop {source} to measure anew"
        )


def _measured(
    request: CalibrateRequest,
    prepared: Prepared,
    batches: Batches,
    gpu: Mapping[str, str] | None,
    *,
    examined: bool = True,
) -> tuple[Table, bool]:
    """Return what a pass over the samples gives, and whether an earlier call made that pass.

    Args:
        gpu: of a pass on a GPU, what else its values depend on.
        examined: the samples are held against the model: their pixels, and what comes near FP16's largest number.
    """
    reporter, insist = request.reporter, request.allow_unusual_data
    described = None if batches.preprocess is None else batches.preprocess.describe()
    key = prepared.pass_key(batches.describe(), described, gpu)
    store = cache_path() / "calibration" / f"{key}.calib.json" if request.cache else None
    table = _cached(store, request.method, reporter) if store else None
    cached = table is not None
    if table is None:
        started, survey = time.monotonic(), Survey()
        seen = observe(
            prepared.proto,
            prepared.tensors,
            survey.watch(batches),
            total=batches.samples,
            threads=request.threads,
            device=request.device,
            reporter=reporter,
        )
        quality, ranges = facts(survey), dict[str, float]()
        refuse(quality, insist)
        if examined:
            quality["preprocessing"] = check_preprocessing(prepared.proto, survey.ranged)
            ranges = half_ranges(prepared.proto, survey.ranged, seen.histograms, request.threads, reporter)
        about = {"data": batches.describe(), "preprocess": described, "ranges": ranges}
        with reporter.phase("choosing thresholds"):
            table = prepared.table(seen, request.method, quality, **about)
        table = replace(table, seconds=round(time.monotonic() - started, 3))
        if store:
            try:
                cache_folder("calibration")
                table.save(store)
            except OutputError as error:
                reporter.warn(f"this pass can't be kept for later calls: {error}")
    table = replace(table, model=prepared.identity, skipped=tuple(map(asdict, batches.skipped)))
    refuse(table.quality or {}, insist)
    return table, cached


def half_ranges(
    proto: ModelProto,
    probes: Sequence[Arrays],
    counted: Mapping[str, Histogram],
    threads: int | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, float]:
    """Find what comes near FP16's largest number in these samples; nothing where the model can't be run.

    Args:
        counted: histograms of all samples: what can't come near by these needn't be run.
    """
    feeds = (run.feed for run in single_runs(network_inputs(proto), probes))
    within = bounds(proto, {name: (item.low, item.high) for name, item in counted.items()})
    small = {name for name, (low, high) in within.items() if not near_fp16_end(max(high, -low))}
    try:
        return beyond_fp16(measure_ranges(proto, feeds, threads=threads, but=small))
    except ModelError as error:
        reporter.note(f"what comes near FP16's largest number is only known of the tensors that were counted: {error}")
        return {}


def check_enough(batches: Batches, inputs: Sequence[TensorInfo] = ()) -> None:
    """Raise DataError where there are too few samples to calibrate on at all."""
    if batches.samples < LEAST:
        shapes = "".join(f"; {info.name} is {'x'.join(map(str, info.shape))}" for info in inputs[:4])
        more = f" ({where_counted(inputs)}{'' if alone(inputs) else shapes})"
        if isinstance(batches, ImageBatches):
            more = "".join(f"; left out: {item.name} {item.reason}" for item in batches.skipped[:3])
        raise DataError(
            f"there is only {batches.samples} sample to calibrate on; at least {LEAST} are needed, and {FEW} to some hundred "
            f"that look like what the network will see give good scales{more}"
        )


def data_notes(table: Table) -> tuple[str, ...]:
    """Say what the user should know about the samples that a table was made from."""
    notes = []
    if table.samples < FEW:
        notes.append(
            f"calibrated on only {table.samples} samples: thresholds still move with so few; give at least {FEW}, "
            "better some hundred, that look like what the network will see"
        )
    if table.skipped:
        some = "; ".join(f"{item['name']}: {item['reason']}" for item in table.skipped[:3])
        more = "; …" if len(table.skipped) > 3 else ""
        notes.append(f"{len(table.skipped)} files can't be used and were left out ({some}{more})")
    quality = table.quality or {"samples": 0, "different": 0}
    if copies := quality["samples"] - quality["different"]:
        notes.append(f"{copies} of the {quality['samples']} samples are copies of others: they add nothing new")
    if warning := (quality.get("preprocessing") or {}).get("warning"):
        notes.append(warning)
    return tuple(notes)


def _cached(store: Path, method: str, reporter: Reporter) -> Table | None:
    try:
        if not store.is_file():
            return None
        table = Table.load(store)
        # Chosen again even for the same method: its rules may have changed since.
        table = table.with_method(method)
    except (TrtoptError, OSError) as error:  # OSError: a folder that is closed to this user
        reporter.note(f"the kept pass can't be used, so the data is read again: {error}")
        return None
    reporter.note(f"the same model was calibrated on the same {table.samples} samples before: that pass is used")
    return table
