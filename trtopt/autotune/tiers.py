"""Engines of one model in every format that the target has, side by side: `tiers`."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trtopt.autotune.building import build, tune
from trtopt.autotune.candidates import Prefixed
from trtopt.autotune.request import TiersRequest
from trtopt.autotune.selection import EQUAL
from trtopt.builder.asked import spec_of
from trtopt.builder.plan import plan_build
from trtopt.builder.request import BuildRequest
from trtopt.calibration.calibrator import calibrate
from trtopt.core.documents import plain
from trtopt.core.errors import (
    BuildCancelled,
    CalibrationError,
    MissingDependency,
    TrtoptError,
    UnsupportedRequest,
    UsageError,
)
from trtopt.core.files import made_folder, write_bytes, write_json
from trtopt.core.options import flag_of, options, preprocess_words, taking
from trtopt.core.progress import recorded
from trtopt.core.values import choice
from trtopt.cuda.device import probe
from trtopt.data import SAMPLES
from trtopt.diagnosis import charts, report as reports
from trtopt.engine.manifest import REASONS, load_manifest
from trtopt.evaluation.benchmark import BenchRow, bench
from trtopt.evaluation.limits import share_of
from trtopt.evaluation.measures import decibels, measure
from trtopt.evaluation.verify import verify
from trtopt.graph.io import load_model
from trtopt.graph.prepare import holds_scales
from trtopt.trt import select

# Name → options of build; what a TensorRT or target refuses is left out.
TIERS = {"fp32": dict[str, Any]()} | {name: {name: True} for name in ("fp16", "bf16", "fp8", "int8", "int4")}
_JUDGED_BY = ("images", "data", "preprocess", "limit", "batch")
_NAMED = ("classes", "output_kind", "plugins", "operators")
_EVERYWHERE = ("shapes", "target", "backend", "device", "optimization_level", "store", *_NAMED)
_MIB = 1 << 20


@dataclass(frozen=True)
class Tier:
    """One engine, or why there is none.

    Attributes:
        command: what builds it again.
        failed: why it isn't built; then the rest is empty.
        seconds: of its build, when that was.
        plan: bytes; scratch: of GPU memory that a context needs besides; None: not known.
        times: of each batch (`bench`); accuracy: against the model (`Agreement.figures()`); notes: why it has none.
        best: no other tier is as good in dB and in every time (without a GPU, size of the plan) and better in one.
    """

    name: str
    command: str
    failed: str = ""
    precision_summary: str = ""
    seconds: float = 0.0
    plan: int = 0
    scratch: int | None = None
    times: tuple[BenchRow, ...] = ()
    accuracy: Mapping[str, Any] | None = None
    notes: str = ""
    best: bool = False

    @property
    def snr_db(self) -> float:
        """Return the dB of the worst output; NaN: it wasn't judged."""
        return math.nan if self.accuracy is None else float(self.accuracy["snr_db"])

    @property
    def ms(self) -> tuple[float, ...]:
        """The median for each batch: on the GPU or, where that can't be asked, end to end."""
        return tuple(spread.median for row in self.times if (spread := row.gpu or row.run) is not None)

    def beats(self, other: Tier) -> bool:
        """Tell if it is as good in all, and better in something; costs that differ by less than `EQUAL` are the same."""
        ratios = [mine / theirs for mine, theirs in zip(self.ms or [self.plan], other.ms or [other.plan])]
        as_good = self.snr_db >= other.snr_db and max(ratios) <= 1 + EQUAL
        return as_good and (self.snr_db > other.snr_db or min(ratios) < 1 / (1 + EQUAL))

    def cells(self, sizes: int) -> tuple[str, ...]:
        """Return its row of a table with so many batches, as text."""
        speed = [f"{ms:.4g}" for ms in self.ms] + ["-"] * (sizes - len(self.ms))
        if sizes:
            speed.append(f"{max(item.throughput or 0.0 for item in self.times):.0f}" if self.times else "-")
        if self.failed:
            return (self.name, "", *speed, "-", "-", "-", "-", f"no engine: {self.failed}", "-")
        outputs, samples = (self.accuracy or {"outputs": {}})["outputs"], (self.accuracy or {}).get("samples", 0)
        same = {name: measure(output, samples) for name, output in outputs.items()}
        said = "; ".join(f"{name}: {text}" if len(same) > 1 else text for name, text in same.items() if text)
        snr = {math.inf: "equal"}.get(self.snr_db, f"{self.snr_db:.1f}").replace("nan", "-")
        scratch = "-" if self.scratch is None else f"{self.scratch / _MIB:.1f}"
        runs = REASONS.split(self.precision_summary)[0] + f"; {self.notes}" * bool(self.notes)
        sized = (f"{self.plan / _MIB:.1f}", scratch, snr, said or "-")
        return (self.name, "★" * self.best, *speed, *sized, runs, f"{self.seconds:.1f}")


@dataclass(frozen=True)
class Tiers:
    """The result of `tiers`.

    Attributes:
        calibration: the table that all scales are of; None: none was needed.
        not_timed: why there are no times; empty: there are.
        left_out: tier → why this TensorRT or the target hasn't got it.
        page: None: jinja2 isn't installed.
    """

    model: str
    rows: tuple[Tier, ...]
    calibration: Path | None = None
    not_timed: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    page: Path | None = None

    @property
    def ok(self) -> bool:
        """Return whether every tier has an engine."""
        return not any(row.failed for row in self.rows)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows, as text."""
        sizes = next(([item.batch for item in row.times] for row in self.rows if row.times), [])
        speed = (*(f"ms @{size}" for size in sizes), "samples/s") if sizes else ()
        columns = ("tier", "", *speed, "plan MiB", "scratch MiB", "dB", "by kind", "runs", "build s")
        return columns, [row.cells(len(sizes)) for row in self.rows]

    def lines(self) -> list[str]:
        """Return what builds each tier, and why there are no others."""
        said = "★: no other beats it in time and dB; ms on the GPU, samples/s end to end"
        if self.not_timed:
            said = f"★: no other beats it in size and dB, which are of its graph; not timed: {self.not_timed}"
        missing = (f"no {name}: {why}" for name, why in self.left_out.items())
        return [said, *missing, *(f"{row.name}: {row.command}" for row in self.rows if row.command)]

    def to_json(self) -> dict[str, Any]:
        return {"format": "trtopt.tiers/1", **plain(self), "ok": self.ok}


@taking(TiersRequest)
def tiers(request: TiersRequest) -> Tiers:
    """Build a model in every format that the target has, all from one calibration, into the folder `output`; judge each on the
    samples and, on a GPU, time it. Without a GPU their graphs are judged, and sizes stand in place of times.

        trtopt.tiers("model.onnx", "tiers", images="photos", preprocess="imagenet", limits=(20, 30))

    The folder has an engine with its manifest and, without a GPU, its graph for each tier, the calibration table, `tiers.json`
    and, where jinja2 is installed, a page. Engines that are up to date aren't built again.

    Args:
        limits: of INT8 engines by `tune`, too: dB from 1 on, or shares (0.99, "99%").
        only: names in `TIERS`; without, all that aren't refused.
        batches: of `bench`.

    Raises:
        UsageError: no samples, an unknown tier, or what no tier can be built with.
        DataError: the samples can't be right. What else a tier raises stands in its row, and the others are built all the same.
    """
    if request.images is None and request.data is None:
        raise UsageError("tiers are judged on real samples: add `images=DIR` or `data='F.npz'`")
    with recorded(request.reporter, request.log) as reporter:
        request = replace(request, reporter=reporter)
        wanted, left_out = _wanted(request)
        folder, gpu = made_folder(request.output), probe()
        calib, no_scales = None, ""
        try:
            calib = _calibrated(request, folder) if any(map(_quantized, wanted.values())) else None
        except CalibrationError as error:
            no_scales = str(error)
        lost = {name: Tier(name, "", failed=no_scales) for name, own in wanted.items() if no_scales and _quantized(own)}
        rows = [lost.get(name) or _tier(request, name, own, folder, calib) for name, own in wanted.items()]
        known = [row for row in rows if row.snr_db > -math.inf and (row.ms or not gpu)]
        marked = tuple(replace(row, best=row in known and not any(item.beats(row) for item in known)) for row in rows)
        result = Tiers(str(request.model), marked, calib, "" if gpu else gpu.reason, left_out, folder / "tiers.html")
        try:
            write_bytes(folder / "tiers.html", _page(result).encode())
        except MissingDependency as error:
            reporter.note(f"no page: {error}")
            result = replace(result, page=None)
        write_json(folder / "tiers.json", result.to_json())
        return result


def _wanted(request: TiersRequest) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """The tiers to build, by name, with their own options; and why there are no others."""
    generation, left_out, tuned = select(request.backend), dict[str, str](), dict[str, Mapping[str, Any]]()
    for given in request.limits:
        if not (value := share_of(str(given))) >= 0:
            raise UsageError(f"`limits=` has {given!r}; dB such as 30, or shares such as 99%, are needed")
        if "%" in str(given) or value < 1:
            tuned[f"int8-{100 * value:g}pct"] = {"int8": True, "min_agreement": value}
        else:
            tuned[f"int8-{value:g}db"] = {"int8": True, "min_snr": int(value) if value == int(value) else value}
    for name in request.only:
        choice(name, TIERS, "`only=`")
    if holds_scales(load_model(request.model, lazy=True)):
        line = f"give that, or build this one: trtopt build {shlex.quote(os.fspath(request.model))} -o OUT.engine"
        raise UsageError(f"the model holds Q/DQ already, and tiers are formats of a float model: {line}")
    everywhere = _given(request, _EVERYWHERE)
    # What no tier can be built with is said before the work.
    plan_build(BuildRequest(request.model, "fp16.engine", fp16=True, **everywhere, **_given(request, _JUDGED_BY)))
    for name, own in TIERS.items():
        try:
            generation.refuse(spec_of(BuildRequest(request.model, "", **everywhere, **own)))
        except UnsupportedRequest as error:  # noqa: PERF203
            left_out[name] = " ".join(str(error).split())
    names = request.only or [name for name in TIERS if name not in left_out]
    return {name: TIERS[name] for name in names} | tuned, {} if request.only else left_out


def _quantized(own: Mapping[str, Any]) -> bool:
    return bool(own.keys() & {"int8", "fp8"})


def _given(request: TiersRequest, names: Sequence[str]) -> dict[str, Any]:
    values = [(item.name, getattr(request, item.name), item.default) for item in fields(request)]
    return {name: value for name, value, default in values if name in names and value is not default}


def _calibrated(request: TiersRequest, folder: Path) -> Path:
    """Write the table that all tiers have their scales from, with what tune needs for its choices."""
    table = folder / f"{Path(request.model).stem}.calib.json"
    given = _given(request, ("method", "operators", "calib", "precision_override"))
    if request.calib is None:
        given |= _given(request, (*_JUDGED_BY, "allow_unusual_data"))
        # Scales beside the graph, which tune tries, too.
        given["all_tensors"] = bool(request.limits) and select(request.backend).capabilities.native_calibrator
    calibrate(request.model, table, **given, reporter=request.reporter)
    return table


def _tier(request: TiersRequest, name: str, own: Mapping[str, Any], folder: Path, calib: Path | None) -> Tier:
    engine, reporter = folder / f"{name}.engine", Prefixed(request.reporter, name)
    judged_by = _given(request, _JUDGED_BY)
    tuned, given = bool(own.keys() & {"min_snr", "min_agreement"}), {**own, **_given(request, _EVERYWHERE)}
    if _quantized(own):
        given |= {"calib": calib} | (judged_by if tuned else {"compare": False})
    elif own:  # what overflows on the samples stays in FP32
        given |= judged_by
    given |= _given(request, ("precision_override",)) if own else {}
    if not probe():
        given["save_onnx"] = folder / f"{name}.onnx"
    row = Tier(name, _command("tune" if tuned else "build", request.model, engine, given))
    try:
        built = (tune if tuned else build)(request.model, engine, **given, reporter=reporter)
        manifest = load_manifest(engine)
        assert manifest is not None  # it has just been written
        row = replace(row, precision_summary=built.precision_summary, seconds=manifest.seconds)
        row = replace(row, plan=int(manifest.plan["bytes"]), scratch=manifest.scratch)
        sampled = {**judged_by, "limit": request.limit or SAMPLES, **_given(request, _NAMED)}
        with reporter.phase("comparing with the model"):
            row = replace(row, accuracy=verify(request.model, engine, **sampled).figures())
        if probe():
            where = _given(request, ("backend", "device", "plugins"))
            row = replace(row, times=bench(engine, batch=request.batches, **where, reporter=reporter).rows)
    except BuildCancelled:
        raise
    except TrtoptError as error:
        said, what = " ".join(str(error).split()), "not judged" if row.accuracy is None else "not timed"
        reporter.warn(said)
        return replace(row, notes=f"{what}: {said}") if row.plan else replace(row, failed=said)
    return row


def _command(name: str, model: Any, engine: Path, given: Mapping[str, Any]) -> str:
    """Say what to type for a call with these options; what has no text, such as arrays in memory, as its help calls it."""
    words = ["trtopt", name, os.fspath(model)]
    for option, value in given.items():
        item, said = options(BuildRequest)[option]
        yes, _, no = flag_of(item).partition("/")
        if option == "preprocess":
            words += preprocess_words(value)
        elif not isinstance(value, bool):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                words += [yes, str(each if isinstance(each, (str, os.PathLike, int, float)) else said.metavar)]
        elif (name, option) != ("tune", "int8"):
            words.append(yes if value else no)
    return shlex.join([*words, "-o", os.fspath(engine)])


def _page(result: Tiers) -> str:
    """Draw the table, and cost and dB of each tier."""
    placed = [row for row in result.rows if row.snr_db > -math.inf and (row.ms or result.not_timed)]
    top = max((row.snr_db for row in placed if row.snr_db < math.inf), default=0.0) + 10
    dots = []
    for row in placed:
        cost = row.ms[-1] if row.ms else row.plan / _MIB
        what = f"{row.name}{'★' * row.best} {cost:.4g}, {decibels(row.snr_db)}"
        dots.append((what, cost, min(row.snr_db, top), row.name.partition("-")[0]))
    columns, cells = result.table()
    contents: dict[str, Any] = {"engine": Path(result.model).name, "name": "Tiers", "columns": columns, "cells": cells}
    contents |= {"chart": charts.scatter(dots), "commands": result.lines()}
    across = "MiB of the plan" if result.not_timed else f"GPU {columns[-8]}"
    return reports.rendered("table.html", {**contents, "across": across})
