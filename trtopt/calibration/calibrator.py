"""calibrate(): a model and real inputs in, a table of scales out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from trtopt.calibration.importing import MISSING, Coverage, import_table
from trtopt.calibration.observe import observe, require_gpu_provider
from trtopt.calibration.prepared import Prepared, floating, prepare, refuse_quantized
from trtopt.calibration.propagation import propagate
from trtopt.calibration.quality import INSIST, check_samples, data_notes
from trtopt.calibration.repairing import SAMPLES, Repairer, Repairs
from trtopt.calibration.request import CalibrateRequest
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache, read_cache, write_cache
from trtopt.calibration.thresholds import choose
from trtopt.core.documents import plain
from trtopt.core.errors import OutputError, TrtoptError, UsageError
from trtopt.core.files import cache_folder, cache_path, check_ending
from trtopt.core.host import cores
from trtopt.core.options import named, taking
from trtopt.core.values import METHODS, Override, choice
from trtopt.core.words import first_of
from trtopt.data import SOURCE, Batches, Skipped, open_data, samples_of
from trtopt.data.arrays import where_counted
from trtopt.data.rebatch import Arrays, alone
from trtopt.graph.io import Model, load_model
from trtopt.graph.prepare import taken
from trtopt.graph.view import to_ir


@dataclass(frozen=True)
class ExportedCache:
    """A cache that was written.

    Attributes:
        tensors: entries for the folded graph; others: further names of the original model.
        lacking: floating tensors of the folded graph without an entry.
    """

    path: Path
    tensors: int
    others: int
    lacking: tuple[str, ...]


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
        all_tensors: measure every floating tensor. With a table that has them all `tune` for TensorRT 8.6 tries
            squeeze-and-excite in INT8, too, and for TensorRT 10 scales beside the graph.
        repair: choose the codes of INT8 weights, and correct biases, by what the layers' inputs are; and where activations
            make much of the noise, move scales of channels from them into the weights around them. Each is kept where it
            lowers the noise at the outputs on samples held apart. The table holds it, and `build` repeats it.
        device: "cuda" runs the model on the first GPU, whose values may differ from a CPU's in their last bits.

    Raises:
        UsageError, DataError: arguments or data that can't be right, before any long work.
        CalibrationError: a tensor gives no scale (constant or not finite; it is named), the model already holds Q/DQ, or
            nothing in it can be quantized; or the imported cache lacks tensors (named).
        InvalidModel, DeviceError, OutputError: the model can't be read, there is no GPU, or the table can't be written.
        ModelError: with `repair`, no output is floating and of the same shape each time.
    """
    return calibrated(request)


def calibrated(request: CalibrateRequest) -> CalibrateResult:
    """Do what `calibrate` does, for stages that have the request, and perhaps the model: a `Model` isn't read again."""
    started, reporter = time.monotonic(), request.reporter
    calibration = _Calibration(request)
    if request.import_cache is not None:
        prepared, table = calibration.imported(request.import_cache)
    elif request.calib is not None:
        prepared, table = calibration.chosen_again(request.calib)
    else:
        prepared, table = calibration.measured()
    if request.repair:
        table = calibration.repaired(prepared, table)
    batches, coverage = calibration.batches, calibration.coverage
    notes = () if coverage else data_notes(table)
    for note in notes if request.calib is None else ():  # of an earlier table it was said when that was made
        reporter.warn(note)
    if request.output is not None:
        table.save(request.output)
    exported = None if request.export_cache is None else calibration.exported(prepared, table, request.export_cache)
    path, skipped = None if request.output is None else Path(request.output), () if batches is None else batches.skipped
    found = notes, coverage, exported, calibration.repairs
    return CalibrateResult(table, path, skipped, time.monotonic() - started, calibration.cached, *found)


def calibrated_for(request: Any, model: Model, **changes: Any) -> CalibrateResult:
    """Calibrate `model` as another stage's request says in the options that it shares, with `changes`."""
    shared = (*SOURCE, "batch", "method", "precision_override", "threads", "allow_unusual_data", "reporter")
    options = {name: getattr(request, name) for name in shared if hasattr(request, name)}
    return calibrated(CalibrateRequest(cast("Any", model), **{**options, **changes}))


class _Calibration:
    """A request that can be right, and its model; and what is found on the way to the table."""

    def __init__(self, request: CalibrateRequest) -> None:
        """Refuse what can't be right before any long work, and read the model."""
        choice(request.method, METHODS, "`method=`")
        choice(request.missing, MISSING, "`missing=`")
        on_gpu = choice(request.device, ("cpu", "cuda"), "`device=`") == "cuda"
        self.gpu = require_gpu_provider() if on_gpu else None  # what else the values of such a pass depend on
        self.overrides = tuple(map(Override.parse, request.precision_override))
        if request.repair and (request.import_cache is not None or (request.images is None and request.data is None)):
            raise UsageError("`repair=True` needs samples to round by: give `images=DIR` or `data='F.npz'`")
        if request.output is not None:
            others = (".onnx", ".engine")
            check_ending(request.output, others, "a calibration table", "a model or an engine", ".calib.json")
        self.request, self.model = request, load_model(request.model, lazy=True)
        refuse_quantized(self.model)
        self.cached = False
        self.batches: Batches | None = None
        self.coverage: Coverage | None = None
        self.repairs: Repairs | None = None

    def prepared(self, samples: Iterable[Arrays] = ()) -> Prepared:
        options: Any = {"all_tensors": self.request.all_tensors, "reporter": self.request.reporter}
        return prepare(self.model, self.overrides, samples=samples, **options)

    def imported(self, path: str | os.PathLike[str]) -> tuple[Prepared, Table]:
        request, reporter = self.request, self.request.reporter
        also = {} if request.method == "auto" else {"method": request.method}
        self._refuse_measuring("`import_cache=`", calib=request.calib, **also)
        cache, prepared = read_cache(path), self.prepared()
        known = {"overrides": self.overrides, "missing": request.missing, "preprocess": request.preprocess}
        with reporter.phase(f"importing {Path(path).name}"):
            table, self.coverage = import_table(cache, self.model.proto, prepared, **known)
        for warning in self.coverage.warnings:
            reporter.warn(warning)
        return prepared, table

    def chosen_again(self, calib: str | os.PathLike[str] | Table) -> tuple[Prepared, Table]:
        if not self.request.repair:  # which needs samples
            self._refuse_measuring("`calib=`")
        if is_cache(calib):
            raise UsageError(f"`calib='{calib}'` is a TensorRT cache: give it as `import_cache='{calib}'`")
        table, prepared, self.cached = Table.load(calib), self.prepared(), True
        with self.request.reporter.phase("choosing thresholds"):
            return prepared, prepared.chosen_again(table, self.request.method)

    def measured(self) -> tuple[Prepared, Table]:
        request, inputs = self.request, self.model.inputs
        threads = request.threads or (cores() if self.gpu else None)  # a GPU waits for decoding
        source = {**samples_of(request), "batch": request.batch, "threads": threads, "reporter": request.reporter}
        self.batches = batches = open_data(inputs, **source)
        check_samples(batches, inputs, None if request.allow_unusual_data else INSIST)
        if alone(inputs):
            request.reporter.note(f"{where_counted(inputs)}; {batches.samples} are read")
        prepared = self.prepared(batches)
        table, self.cached = self._pass(prepared, batches)
        return prepared, table

    def repaired(self, prepared: Prepared, table: Table) -> Table:
        """Add what lowers the noise most on samples held apart, at the outputs of the model as it was given."""
        request, inputs = self.request, self.model.inputs
        few = open_data(inputs, **{**samples_of(request), "limit": SAMPLES})
        threads = request.threads or cores()
        repairer = Repairer(taken(self.model).proto, few, self.overrides, threads, request.reporter)

        def measure(prepared: Prepared) -> Table:
            batches = self.batches or open_data(inputs, **samples_of(request), batch=request.batch)
            return self._pass(prepared, batches, examined=False)[0]

        table, self.repairs = repairer.repaired(table, prepared, None if request.export_cache else measure)
        return table

    def exported(self, prepared: Prepared, table: Table, output: str | os.PathLike[str]) -> ExportedCache:
        """Write the table as a cache for TensorRT 8.6 and 10, whose own calibrator then reads no data.

        TensorRT looks scales up by tensor name, for every floating tensor of the network that it is given, not only for those
        that a Q/DQ placement needs: layers beside a tensor without one fall back to floating point. So what the table doesn't
        hold is carried over where that is exact (see `propagation`) and else measured in a second pass, where there are
        samples. Names are those of the folded graph, which `build --calibrator native` gives TensorRT, and those of the
        original that hold the same values.
        """
        batches, reporter = self.batches, self.request.reporter
        graph, original = to_ir(prepared.proto), to_ir(self.model.proto)
        names, scales = floating(graph), propagate(graph, table.amax, table.groups)
        rest = [name for name in names if name not in scales]
        if batches is not None and rest:
            options: Any = {"threads": self.request.threads, "shard": True, "reporter": reporter}
            seen = observe(prepared.proto, (), batches, beside=rest, **options)  # without those that aren't finite
            counted = {name: item for name, item in seen.histograms.items() if item.absmax > 0}  # zeros give no scale
            scales |= {name: choose(item, table.method).amax for name, item in counted.items()}
        entries = {name: scales[name] for name in names if name in scales}
        scales = propagate(original, scales)
        others = {name: scales[name] for name in floating(original) if name in scales and name not in entries}
        path = write_cache(entries | others, output)
        if lacking := tuple(name for name in names if name not in entries):
            reporter.warn(
                f"the exported cache has no scale for {len(lacking)} of the {len(names)} floating tensors "
                f"({first_of(lacking)}): TensorRT will run layers beside them in floating point; calibrate on data to have "
                "them all"
            )
        return ExportedCache(path, len(entries), len(others), lacking)

    def _refuse_measuring(self, source: str, **others: Any) -> None:
        """Raise UsageError for what only measuring needs, `others` among it, beside scales from `source`."""
        options = {name: getattr(self.request, name) for name in ("images", "data", "limit", "threads")} | others
        if extra := [named(name) for name, value in options.items() if value is not None]:
            raise UsageError(
                f"{source} takes what was measured before, without data: drop {', '.join(extra)}, or drop {source} to measure "
                "anew"
            )

    def _pass(self, prepared: Prepared, batches: Batches, *, examined: bool = True) -> tuple[Table, bool]:
        """Return what a pass over the samples gives, and whether an earlier call made that pass."""
        request, reporter, started = self.request, self.request.reporter, time.monotonic()
        store = cache_path() / "calibration" / f"{prepared.pass_key(batches, self.gpu)}.calib.json"
        try:
            if request.cache and store.is_file():
                # Chosen again even for the same method: its rules may have changed since.
                table = Table.load(store).with_method(request.method)
                reporter.note(
                    f"the same model was calibrated on the same {table.samples} samples before: that pass is used"
                )
                return replace(table, model=prepared.identity, skipped=tuple(map(asdict, batches.skipped))), True
        except (TrtoptError, OSError) as error:  # OSError: a folder that is closed to this user
            reporter.note(f"the kept pass can't be used, so the data is read again: {error}")
        run = dict[str, Any](threads=request.threads, reporter=reporter)
        seen = observe(prepared.proto, prepared.tensors, batches, beside=prepared.beside, device=request.device, **run)
        table = prepared.table(seen, batches, request.method, examined=examined, **run)
        table = replace(table, seconds=round(time.monotonic() - started, 3))
        if request.cache:
            try:
                cache_folder("calibration")
                table.save(store)
            except OutputError as error:
                reporter.warn(f"this pass can't be kept for later calls: {error}")
        return table, False
