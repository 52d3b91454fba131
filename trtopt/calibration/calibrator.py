"""calibrate(): a model and real inputs to a table of scales."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from trtopt.calibration.observe import observe
from trtopt.calibration.table import Table, choose_all
from trtopt.data import Batches, open_data
from trtopt.errors import CalibrationError, OutputError, TrtoptError, UsageError
from trtopt.files import cache_folder, check_writable, sha256_json
from trtopt.graph.fold import fold
from trtopt.graph.io import load_model
from trtopt.graph.placement import Points, find_points
from trtopt.graph.proto import fingerprint
from trtopt.graph.quantize import is_quantized
from trtopt.progress import SILENT, Reporter
from trtopt.spec import METHODS, Override, choice

FEW = 32  # samples below which thresholds still move noticeably
_CACHE_VERSION = 1  # of what a cached pass means: raise it when the same inputs would give other counts


@dataclass(frozen=True)
class CalibrateResult:
    """What `calibrate` measured. `cached`: the pass over the data was taken from an earlier run."""

    table: Table
    path: Path | None
    seconds: float
    cached: bool
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        return self.table.samples

    @property
    def skipped(self) -> tuple[Mapping[str, str], ...]:
        return self.table.skipped

    def to_json(self) -> dict[str, Any]:
        tensors = {
            name: {"amax": entry.amax, "method": entry.method, "absmax": entry.histogram.absmax}
            for name, entry in self.table.tensors.items()
        }
        return {
            "tensors": tensors,
            "groups": [list(group) for group in self.table.groups],
            "method": self.table.method,
            "samples": self.samples,
            "skipped": list(self.skipped),
            "table": str(self.path) if self.path else None,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "cached": self.cached,
        }


def calibrate(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str | os.PathLike[str] | None = None,
    *,
    images: Any = None,
    data: Any = None,
    preprocess: Any = None,
    method: str = "auto",
    limit: int | None = None,
    batch: int = 8,
    threads: int | None = None,
    precision_override: Sequence[str] = (),
    cache: bool = True,
    reporter: Reporter = SILENT,
) -> CalibrateResult:
    """Measure the INT8 scales of a model on real inputs, in one pass.

    The result doesn't depend on the batch size or on the order of the samples. The table keeps the histograms, so that
    another method needs no second pass (`Table.with_method`).

    Args:
        model: an FP32 ONNX model; it is folded first, as `build` does.
        output: where to write the table, or None.
        images: a folder of images (with `preprocess`), or a list of paths.
        data: arrays (.npz with one array per input, .npy, a folder of them, or in memory); first axis = samples.
        preprocess: preset ("imagenet", "efficientnet-lite", "yolo"), a TOML file, or a `Preprocess`.
        method: "auto", "entropy", "mse", "minmax" or "percentile"; see `calibration.thresholds`.
        limit: use at most so many samples.
        batch: samples at a time; only memory and speed depend on it.
        threads: for inference and image decoding; None: one per core.
        precision_override: as for `build`; nodes taken out aren't measured.
        cache: reuse the pass of an earlier call with the same model, data and preprocessing.

    Raises:
        UsageError, DataError: the inputs don't fit, are missing, or hold NaN.
        CalibrationError: a tensor that can't give a scale, by name; a model that is quantized already.
    """
    started = time.monotonic()
    choice(method, METHODS, "--method")
    if batch < 1:
        raise UsageError(f"--batch is {batch}; at least 1 is needed")
    if output is not None:
        check_writable(output)
    loaded = load_model(model)
    if is_quantized(loaded.proto):
        raise CalibrationError(
            "the model already holds Q/DQ nodes: its scales are in it, there is nothing to calibrate"
        )
    folded, _ = fold(loaded.proto, reporter=reporter)
    points = find_points(folded, overrides=tuple(map(Override.parse, precision_override)))
    if not points.reads:
        why = (
            "; ".join(f"{item.node}: {item.reason}" for item in points.kept[:3])
            or "it has no convolution or matrix product"
        )
        raise CalibrationError(f"there is nothing to quantize in this model: {why}")
    batches = open_data(
        loaded.inputs, images=images, data=data, preprocess=preprocess, limit=limit, batch=batch, threads=threads
    )
    identity = {"name": loaded.path.name if loaded.path else "", "fingerprint": fingerprint(folded)}
    store = _cache_file(identity["fingerprint"], batches, points) if cache else None
    table = _cached(store, reporter) if store else None
    cached = table is not None
    if table is None:
        table = _measure(folded, identity, points, batches, method, threads, reporter)
        if store:
            _remember(table, store, reporter)
    elif table.method != method:
        table = table.with_method(method)
    notes = _notes(table)
    for note in notes:
        reporter.warn(note)
    if output is not None:
        table.save(output)
    return CalibrateResult(table, Path(output) if output else None, time.monotonic() - started, cached, notes)


def _measure(
    folded: onnx.ModelProto,
    identity: Mapping[str, str],
    points: Points,
    batches: Batches,
    method: str,
    threads: int | None,
    reporter: Reporter,
) -> Table:
    started = time.monotonic()
    histograms, samples = observe(
        folded, points.activations, batches, samples=batches.samples, threads=threads, reporter=reporter
    )
    with reporter.phase("choose thresholds"):
        tensors = choose_all(histograms, points.groups, method)
    preprocess = batches.preprocess
    return Table(
        tensors=tensors,
        groups=points.groups,
        model=identity,
        data=batches.describe(),
        method=method,
        samples=samples,
        seconds=round(time.monotonic() - started, 3),
        preprocess=preprocess.describe() if preprocess is not None else None,
        skipped=tuple({key: str(value) for key, value in asdict(item).items()} for item in batches.skipped),
    )


def _notes(table: Table) -> tuple[str, ...]:
    notes = []
    if table.samples < FEW:
        notes.append(f"only {table.samples} samples: thresholds still move with so few; {FEW} to 512 is usual")
    if table.skipped:
        some = ", ".join(f"{item['name']} ({item['reason']})" for item in table.skipped[:3])
        notes.append(f"{len(table.skipped)} files skipped: {some}{', …' if len(table.skipped) > 3 else ''}")
    return tuple(notes)


def _cache_file(model: str, batches: Batches, points: Points) -> Path:
    key = sha256_json(
        {
            "version": _CACHE_VERSION,
            "model": model,
            "data": batches.describe(),
            "preprocess": batches.preprocess.describe() if batches.preprocess is not None else None,
            "tensors": points.activations,
            "groups": points.groups,
        }
    )
    return cache_folder("calibration") / f"{key}.calib.json"


def _cached(store: Path, reporter: Reporter) -> Table | None:
    if not store.is_file():
        return None
    try:
        table = Table.load(store)
    except TrtoptError:
        return None  # damaged, or of another version: measure again
    reporter.note(f"calibration of the same model on the same {table.samples} samples: taken from the cache")
    return table


def _remember(table: Table, store: Path, reporter: Reporter) -> None:
    try:
        table.save(store)
    except OutputError as error:
        reporter.warn(f"the pass isn't cached: {error}")
