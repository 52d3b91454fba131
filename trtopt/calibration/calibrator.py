"""calibrate(): a model and real inputs in, a table of scales out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

from trtopt.calibration.convergence import movement
from trtopt.calibration.expected import examine, first_layers
from trtopt.calibration.exporting import ExportedCache, export
from trtopt.calibration.importing import MISSING, Coverage, load_import, refuse_measuring
from trtopt.calibration.observe import Observation, observe
from trtopt.calibration.prepared import Prepared, prepare, refuse_quantized
from trtopt.calibration.quality import Survey
from trtopt.calibration.report import facts, forecast, refuse, refuse_early, warnings
from trtopt.calibration.request import CalibrateRequest
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache
from trtopt.calibration.torch_engine import TorchEngine, engine_identity
from trtopt.core.errors import CalibrationError, DataError, OutputError, TrtoptError, UsageError
from trtopt.core.files import cache_folder, check_writable
from trtopt.core.host import cores
from trtopt.core.options import taking
from trtopt.core.progress import Reporter
from trtopt.core.values import METHODS, Override, TensorInfo, check_overrides, choice
from trtopt.data import Batches, ImageBatches, Skipped, open_data
from trtopt.graph.io import load_model

DEVICES = ("cpu", "cuda")
LEAST = 2  # samples: a scale from one is that sample's own
FEW = 32  # samples: below, thresholds still move visibly with each one


@dataclass(frozen=True)
class CalibrateResult:
    """What `calibrate` measured.

    Attributes:
        path: where the table was written, if asked for.
        skipped: files left out, with the reason.
        seconds: this call took.
        cached: the pass over the data was an earlier call's.
        notes: what the user should know about the data.
        coverage: how an imported cache fitted the model.
        exported: the TensorRT cache that was written.
    """

    table: Table
    path: Path | None
    skipped: tuple[Skipped, ...]
    seconds: float
    cached: bool
    notes: tuple[str, ...] = ()
    coverage: Coverage | None = None
    exported: ExportedCache | None = None

    @property
    def samples(self) -> int:
        return self.table.samples

    @property
    def convergence(self) -> str:
        """How far more samples would move thresholds, in a sentence; empty where that isn't known."""
        return forecast(self.table)

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": {
                name: {"amax": entry.amax, "method": entry.method} | _seen(entry.histogram)
                for name, entry in self.table.tensors.items()
            },
            "groups": [list(group) for group in self.table.groups],
            "method": self.table.method,
            "samples": self.samples,
            "skipped": [asdict(item) for item in self.skipped],
            "table": str(self.path) if self.path else None,
            "digest": self.table.digest,
            "quality": None if self.table.quality is None else dict(self.table.quality),
            "notes": list(self.notes),
            "coverage": self.coverage.to_json() if self.coverage else None,
            "exported": self.exported.to_json() if self.exported else None,
            "seconds": round(self.seconds, 3),
            "cached": self.cached,
        }


def _seen(histogram: Any) -> dict[str, Any]:
    return {} if histogram is None else {"absmax": histogram.absmax, "count": histogram.total}


@taking(CalibrateRequest)
def calibrate(request: CalibrateRequest) -> CalibrateResult:
    """Measure a model's INT8 scales on real inputs, in one pass, or take them from an earlier measurement or a TensorRT
    cache, without any data.

    The result is the same, to the bit, whatever the batch size, the order of the samples and the number of threads.

    Args:
        model: an FP32 ONNX file or model. It is folded first, as `build` folds it.
        output: where to write the table (`*.calib.json`); None: it is only returned.
        images: a folder of images, or a list of files; needs `preprocess`.
        data: arrays: .npz with one per input, .npy, a folder of them, or in memory; the first axis counts samples.
        preprocess: "imagenet", "efficientnet-lite", "yolo", a TOML file, a mapping or a `Preprocess`.
        calib: a table of an earlier call for this model, instead of images or data: `method` chooses again from what was
            counted then.
        method: "auto", "entropy", "mse", "minmax" or "percentile"; see `trtopt.calibration.thresholds.choose`.
        limit: use at most so many samples.
        batch: samples read at a time.
        threads: samples run at the same time; None: one per core.
        precision_override: "PATTERN=fp32" by node name or operator, as for `build`: what these alone read isn't measured.
        cache: reuse an earlier pass with the same model, data and preprocessing (any method: histograms are kept).
        import_cache: a text cache of TensorRT 7 to 10, instead of images or data; `preprocess` is then only remembered.
        export_cache: where to write the scales as a cache that TensorRT 8.6 and 10 take without data.
        device: "cpu", or "cuda": the model runs in PyTorch and values are counted on the GPU (the extra torch-calibration).
        missing: needed tensors that the imported cache lacks: "error", or "float": what reads them stays out of INT8.
        allow_unusual_data: take random noise, images of one colour or one sample repeated, which are refused otherwise.

    Raises:
        UsageError, DataError: arguments or data that can't be right, before any long work; noise and its like as soon as
            more than half of the samples are.
        InvalidModel: the model can't be read.
        CalibrationError: a tensor gives no scale (constant or not finite; it is named), the model already holds Q/DQ, or
            nothing in it can be quantized; or the imported cache lacks tensors (named).
        OutputError: the table can't be written. Nothing is left behind.
    """
    reporter = request.reporter
    started = time.monotonic()
    choice(request.method, METHODS, "`method=`")
    if request.threads is not None and request.threads < 1:
        raise UsageError(f"`threads=` is {request.threads}; at least 1 is needed")
    choice(request.missing, MISSING, "`missing=`")
    choice(request.device, DEVICES, "`device=`")
    overrides = tuple(map(Override.parse, request.precision_override))
    if request.output is not None:
        check_writable(
            request.output,
            request.model,
            request.data,
            request.preprocess,
            request.import_cache,
            None if isinstance(request.calib, Table) else request.calib,
        )
    if request.export_cache is not None:
        check_writable(
            request.export_cache, request.model, request.data, request.preprocess, request.import_cache, request.output
        )
    loaded = load_model(request.model, lazy=True)
    refuse_quantized(loaded)
    original = loaded.proto if request.export_cache is not None else None
    if request.import_cache is not None:
        refuse_measuring(
            images=request.images,
            data=request.data,
            calib=request.calib,
            method=None if request.method == "auto" else request.method,
            limit=request.limit,
            threads=request.threads,
        )
        table, coverage, old, folded = load_import(
            request.import_cache,
            loaded,
            overrides=overrides,
            missing=request.missing,
            preprocess=request.preprocess,
            reporter=reporter,
        )
        check_overrides(overrides, folded.graph.node)
        found = _Found(table, folded, coverage=coverage, amax=old.amax)
    elif request.calib is not None:
        refuse_measuring(
            "`calib=`",
            images=request.images,
            data=request.data,
            preprocess=request.preprocess,
            limit=request.limit,
            threads=request.threads,
            device=None if request.device == "cpu" else request.device,
        )
        if not isinstance(request.calib, Table) and is_cache(request.calib):
            raise UsageError(
                f"`calib='{request.calib}'` is a TensorRT cache: give it as `import_cache='{request.calib}'`"
            )
        earlier = request.calib if isinstance(request.calib, Table) else Table.load(request.calib)
        prepared = prepare(loaded, overrides, reporter=reporter)
        check_overrides(overrides, prepared.proto.graph.node)
        with reporter.phase("choosing thresholds"):
            found = _Found(prepared.chosen_again(earlier, request.method), prepared.proto, cached=True)
    else:
        batches = open_data(
            loaded.inputs,
            images=request.images,
            data=request.data,
            preprocess=request.preprocess,
            limit=request.limit,
            batch=request.batch,
            threads=request.threads or (cores() if request.device != "cpu" else None),  # a GPU waits for decoding
            lazy=True,
        )
        check_enough(batches, loaded.inputs)
        prepared, first = prepare(loaded, overrides, reporter=reporter), first_layers(loaded.proto)
        check_overrides(overrides, prepared.proto.graph.node)
        del loaded  # of a model given in memory a copy of all weights
        found = _measured(
            prepared,
            first,
            batches,
            request.method,
            threads=request.threads,
            device=request.device,
            cache=request.cache,
            insist=request.allow_unusual_data,
            reporter=reporter,
        )
    notes = () if found.coverage else data_notes(found.table)
    for note in notes:
        reporter.warn(note)
    if request.output is not None:
        found.table.save(request.output)
    exported = None
    if request.export_cache is not None and original is not None:
        exported = export(
            request.export_cache,
            original,
            found.folded,
            found.table,
            batches=found.batches,
            amax=found.amax,
            threads=request.threads,
            reporter=reporter,
        )
    return CalibrateResult(
        table=found.table,
        path=None if request.output is None else Path(request.output),
        skipped=() if found.batches is None else found.batches.skipped,
        seconds=time.monotonic() - started,
        cached=found.cached,
        notes=notes,
        coverage=found.coverage,
        exported=exported,
    )


@dataclass(frozen=True)
class _Found:
    """A table, the folded graph that it is for, and what it came from: an imported cache, an earlier pass, or samples."""

    table: Table
    folded: ModelProto
    cached: bool = False
    coverage: Coverage | None = None
    amax: Mapping[str, float] | None = None
    batches: Batches | None = None


def _measured(
    prepared: Prepared,
    first: ModelProto,
    batches: Batches,
    method: str,
    *,
    threads: int | None,
    device: str,
    cache: bool,
    insist: bool,
    reporter: Reporter,
) -> _Found:
    """What a pass over the samples gives, or gave in an earlier call.

    Args:
        first: the model's first layers, which know what data it was trained on.
        insist: take data that isn't fit.
    """
    described = None if batches.preprocess is None else batches.preprocess.describe()
    engine = None if device == "cpu" else partial(TorchEngine, device=device)
    store = None
    if cache:
        identity = None if device == "cpu" else engine_identity(device)
        key = prepared.pass_key(batches.describe(), described, identity)
        try:
            store = cache_folder("calibration") / f"{key}.calib.json"
        except OutputError as error:
            reporter.warn(f"this pass can't be kept for later calls: {error}")
    table = _cached(store, batches, method, reporter) if store else None
    cached = table is not None
    if table is None:
        started = time.monotonic()
        survey = Survey()
        watched = survey.watch(batches, lambda: refuse_early(survey, batches.samples, insist))
        seen = observe(prepared.proto, prepared.tensors, watched, threads=threads, engine=engine, reporter=reporter)
        check_enough(batches)  # again: now it is known which images can be used
        found = facts(survey)
        refuse(found, insist)
        with reporter.phase("choosing thresholds"), ThreadPoolExecutor(1, "trtopt-examine") as beside:
            examining = beside.submit(examine, first, [feed for _, feed in sorted(survey.probes.items())])
            table = prepared.table(seen, method, data=batches.describe(), preprocess=described)
            table = with_quality(table, seen, found, examining.result())
        table = replace(table, seconds=round(time.monotonic() - started, 3))
        if store:
            _remember(table, store, reporter)
    table = replace(table, model=prepared.identity, skipped=tuple(map(asdict, batches.skipped)))
    refuse(table.quality or {}, insist)
    return _Found(table, prepared.proto, cached, batches=batches)


def with_quality(table: Table, seen: Observation, found: Mapping[str, Any], examined: Mapping[str, Any]) -> Table:
    """The table with what was found of its data, forecast of more of it, and examined of its preprocessing."""
    moves = movement(seen.blocks, table.tensors, table.groups, seen.samples)
    convergence = None if moves is None else {"method": table.method} | moves
    return replace(table, quality={**found, "convergence": convergence, "preprocessing": dict(examined)})


def check_enough(batches: Batches, inputs: Sequence[TensorInfo] = ()) -> None:
    """Raise DataError where there are too few samples to calibrate on at all."""
    if batches.samples < LEAST:
        shapes = "".join(f"; {info.name} is {'x'.join(map(str, info.shape))}" for info in inputs[:4])
        raise DataError(
            f"there is only {batches.samples} sample to calibrate on; at least {LEAST} are needed, and {FEW} to some hundred "
            f"that look like what the network will see give good scales (the first axis of an array counts samples{shapes})"
        )


def data_notes(table: Table) -> tuple[str, ...]:
    """What the user should know about the samples a table was made from."""
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
    if repeated := table.data.get("repeated"):
        notes.append(
            f"{repeated} of the {table.samples} images are copies of others: they add nothing that wasn't seen"
        )
    return (*notes, *warnings(table))


def _cached(store: Path, batches: Batches, method: str, reporter: Reporter) -> Table | None:
    try:
        if not store.is_file():
            return None
        table = Table.load(store)
        if isinstance(batches, ImageBatches) and table.data != batches.describe():
            batches.check()  # some couldn't be used then, and others may have stood in for them
            if table.data != batches.describe():
                return None
        # Chosen again even for the same method: its rules may have changed since.
        table = table.with_method(method)
        if table.quality is None:
            raise CalibrationError("it was made before data was looked at")
    except (TrtoptError, OSError) as error:  # OSError: a folder that is closed to this user
        reporter.note(f"the kept pass can't be used, so the data is read again: {error}")
        return None
    reporter.note(f"the same model was calibrated on the same {table.samples} samples before: that pass is used")
    return table


def _remember(table: Table, store: Path, reporter: Reporter) -> None:
    try:
        table.save(store)
    except OutputError as error:
        reporter.warn(f"this pass can't be kept for later calls: {error}")
