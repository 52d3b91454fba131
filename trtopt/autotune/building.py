"""build() as users call it: the builder, and where INT8 or FP8 is asked for, the comparison with FP16 on this machine's GPU.

INT8 is not always faster: TensorRT may have no good INT8 kernel for a layer, and conversions between types cost time. So a
quantized engine is measured against the one that it replaces, unless that is declined, and `best` decides by the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trtopt.autotune.candidates import NATIVE_CACHE, Engines, asked_of_builder, gpu_for
from trtopt.autotune.goal import Goal, goal_of, too_few
from trtopt.autotune.request import TuneRequest
from trtopt.autotune.selection import EQUAL, Comparison, measured, stored_comparison
from trtopt.autotune.tuning import check_tunable, tuned
from trtopt.builder import construction as engine
from trtopt.builder.asked import check_outputs, spec_of
from trtopt.builder.construction import BuildResult
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples, with_model
from trtopt.calibration.table import Table
from trtopt.core.errors import (
    AccuracyLost,
    BuildCancelled,
    BuildFailed,
    DeviceError,
    MissingDependency,
    PrecisionLost,
    TrtoptError,
    UsageError,
)
from trtopt.core.files import (
    existing_file,
    folder_beside,
    sha256_file,
    sha256_json,
    whole,
    write_bytes,
)
from trtopt.core.options import taking, without
from trtopt.core.progress import recorded
from trtopt.core.values import BuildSpec, Precision
from trtopt.core.version import __version__
from trtopt.cuda.device import DeviceInfo
from trtopt.data import Batches
from trtopt.data.preprocess import Preprocess
from trtopt.engine.manifest import load_manifest, manifest_path
from trtopt.engine.store import named_store
from trtopt.evaluation.agreement import Runner
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.verify import by_samples, kinds_of
from trtopt.graph.io import Model, load_model
from trtopt.graph.output_kinds import Kind
from trtopt.ort.runner import OnnxRunner
from trtopt.ort.sessions import version as ort_version
from trtopt.trt import select

GOAL = ("labels", "metric", "min", "min_agreement", "min_snr")
NO_LIMIT = -1000.0  # dB


@taking(BuildRequest)
def build(request: BuildRequest) -> BuildResult:
    """Build a TensorRT engine: `output` (a plain plan) and `output`.json (its manifest).

    Each option is described in `BuildRequest`. INT8 and FP8 leave the rest in FP16, or in BF16 with `bf16` as well.

    Args:
        model: an ONNX file or model; one that already holds Q/DQ needs no data.
        best: build INT8 (or FP8, if `fp8`) and FP16 (or BF16), time both on this machine's GPU, and keep the fastest whose
            results stay within the limits on real samples; FP32 where neither does. `comparison` says which and why.
        min_agreement, min_snr, metric with min: with INT8, limits that `tune` keeps; see `verify` for their defaults.
        images, data, calib: where scales come from: images, arrays (files or in memory), a table that `calibrate` wrote, or a
            TensorRT calibration cache. With `calib`, the others only judge.
        embed_preprocess: the engine takes uint8 pixels (samples × height × width × 3 in RGB, or × 1 in gray); `shapes` are of
            the model's own inputs all the same.
        save_onnx: where to keep the graph that TensorRT was given. To load that of an INT8 build in ONNX Runtime without
            trtopt, set graph_optimization_level to ORT_DISABLE_ALL: its passes round biases with scales too small for FP16.
        classes, output_kind: stand in the manifest, which alone is written again where nothing else changed.

    Raises:
        UsageError, DataError, InvalidModel, UnsupportedRequest, MissingDependency: before any long work.
        DeviceError: no GPU `device`; best without a GPU that the engine can run on.
        UnsupportedOperator, BuildFailed, BuildCancelled: from TensorRT; nothing is written.
        PrecisionLost: the engine doesn't compute in the precision asked for (see `allow_precision_fallback`).
        AccuracyLost: nothing stays within the limits, best not even in FP32; nothing is written.
    """
    return _logged(request, _built)


def _logged(request: BuildRequest, work: Callable[[BuildRequest], BuildResult]) -> BuildResult:
    """Do the work, its log kept and its scales where that is asked for."""
    named_store(request.store)  # refused before the work
    with recorded(request.reporter, request.log) as reporter:
        result = work(replace(request, reporter=reporter))
        if request.save_calib is not None and result.tuning is None:  # a search has kept its own
            if result.table is None:
                reporter.warn("`save_calib=` kept nothing: no scales of trtopt's own calibration are in this engine")
            else:
                result.table.save(request.save_calib)
    return result


def _built(request: BuildRequest) -> BuildResult:
    if request.best:
        if not request.compare:
            raise UsageError(
                "`best=True` compares engines: drop `compare=False`, or name the precision instead of `best=True`"
            )
        for name in ("labels", "metric", "min"):
            if getattr(request, name) is not None:
                raise UsageError(f"`{name}=` is judged by a search in INT8: `int8=True` instead of `best=True`")
        return _best(request, Limits.of(request.min_agreement, request.min_snr) or Limits())
    goal = goal_asked(request)
    if goal is not None:
        return _tuned(request, goal)
    return _asked_for(request)


def goal_asked(request: BuildRequest) -> Goal | None:
    """Return the goal of a build that isn't `best`, for which layers are chosen; None: there is none."""
    half = (request.fp16 or request.bf16) and not (request.int8 or request.fp8)
    return goal_of(without(request, "min_snr") if half else request)  # there the builder keeps it


@taking(TuneRequest)
def tune(request: TuneRequest) -> BuildResult:
    """Build the fastest INT8 engine that stays within an accuracy limit: `build(int8=True)` with that limit.

    It takes what `build` takes, and at least one of min_snr, min_agreement and metric. It raises what `build` raises.
    """
    if request.best:
        raise UsageError(
            "`best=True` is `build`'s: it keeps one of several engines, tune looks for what stays out of INT8: drop it"
        )
    goal = goal_of(request)
    if goal is None:
        raise UsageError(
            "there is no limit to tune to: give `min_snr=25` (dB), `min_agreement=0.99`, or `metric='module:function'` with "
            "`min=`"
        )
    plain = BuildRequest(**vars(request))  # whose defaults are those of a build without INT8
    return _logged(plain, lambda request: _tuned(request, goal))


def _tuned(request: BuildRequest, goal: Goal) -> BuildResult:
    """Choose what stays out of INT8, then build. On a GPU by its layers' times, and FP16 instead where that is as fast."""
    check_outputs(request)
    check_tunable(request)
    request = with_model(request)
    plain = replace(without(request, *GOAL), save_calib=None)
    not_measured, gpu = "`compare=False` was given", None
    if request.compare:
        try:
            gpu = gpu_for(request)
        except TrtoptError as error:
            not_measured = str(error)
    with folder_beside(Path(request.output)) as folder:
        samples = real_samples(load_model(request.model), request) if gpu is not None else None
        engines = None if gpu is None else Engines(plain, gpu, folder, samples)
        tuning = tuned(request, goal, engines.times if engines else lambda *_: None)
        tuning = engines.fastest(tuning) if engines else tuning
        request.reporter.note(str(tuning))
        if request.save_calib is not None:
            tuning.table.save(request.save_calib)
        if engines is None:
            result = engine.construct(replace(without(plain, "images", "data"), calib=tuning.table))
            return replace(result, tuning=tuning, not_measured=not_measured)
        # The engine is judged as well as the graph was; by speed alone where the limit is the user's own.
        limits = goal.limits or Limits(min_agreement=0.0, min_snr=NO_LIMIT)
        result = _best(replace(plain, calib=tuning.table), limits, engines)
    return replace(result, tuning=tuning)


# What was asked for, measured ------------------------------------------------------------------------------------------


def _asked_for(request: BuildRequest) -> BuildResult:
    """Build what was asked for, then compare. Where that can't be done, or is interrupted, the engine stays."""
    reporter, spec = request.reporter, spec_of(request)
    quantized, base = spec.precision, spec.base
    check_outputs(request)
    request = with_model(request)
    result = engine.construct(request)
    if not quantized.quantized:
        return result
    if not request.compare:
        return replace(result, not_measured="`compare=False` was given")
    try:
        gpu = gpu_for(request)
    except TrtoptError as error:
        return replace(result, not_measured=str(error))
    comparison = stored_comparison(result.engine) if result.cached else None
    if comparison is None or comparison.gpu != str(gpu) or comparison.speedup is None:
        try:
            with folder_beside(result.engine) as folder:
                reporter.note(f"building for {base.upper()} too, to compare (`compare=False` leaves that out)")
                model, real = load_model(request.model), request.images is not None or request.data is not None
                samples, kinds = real_samples(model, request) if real else None, kinds_of(model, request)
                made = Engines(request, gpu, folder, samples, within=False)
                made.built[quantized] = result
                engines = {quantized: result, base: made.build(base)}
                comparison = measured(gpu, engines, {}, samples, reporter, reference=base, kinds=kinds)
        except (BuildCancelled, KeyboardInterrupt):
            reporter.warn(f"{result.engine} is written; interrupted before it was measured against {base.upper()}")
            raise
        except TrtoptError as error:
            reporter.warn(f"not measured against {base.upper()}: {error}")
            return replace(result, not_measured=str(error))
        reference = None if samples is None else f"the {base.upper()} engine"
        comparison = replace(comparison, reference=reference).asked_for(str(quantized))
        if (manifest := load_manifest(result.engine)) is not None:
            replace(manifest, comparison=comparison.describe()).save(result.engine)
    if comparison.speedup is not None and comparison.speedup <= 1 + EQUAL:
        longer = f"takes {1 / comparison.speedup:.2f} times as long as"
        how = longer if comparison.speedup < 1 / (1 + EQUAL) else "is no faster than"
        instead = f"use `best=True` or `{base}=True`"
        reporter.warn(f"{quantized.upper()} {how} {base.upper()} on {comparison.gpu}: {instead}")
    if loss := comparison.lost(str(quantized)):
        reporter.warn(
            f"the results of this {quantized.upper()} engine have little to do with the model's ({loss}): use `{base}=True`, "
            "or `min_snr=` to keep out of it what loses most; `trtopt verify MODEL.onnx ENGINE --per-layer` says where"
        )
    return replace(result, comparison=comparison.describe())


# The best ----------------------------------------------------------------------------------------------------------------


def _best(request: BuildRequest, limits: Limits, engines: Engines | None = None) -> BuildResult:
    """Keep the fastest engine within the limits; `engines`: those that a search has built already."""
    started, selection = time.monotonic(), _selection(request, limits)
    request = selection.request
    if not request.force and (result := selection.up_to_date()):
        return result
    if engines is None and (doubt := too_few(selection.samples.samples)):  # else the search has said so
        request.reporter.warn(doubt)
    with folder_beside(selection.output) as folder:
        if engines is None:
            engines = Engines(request, selection.gpu, folder, selection.samples)
        engines.request = request  # with the table that was chosen
        results, comparison = selection.judged(engines)
        best = results[Precision(comparison.kept)]
        selection.install(best, results.get(selection.quantized), comparison)
    request.reporter.note(comparison.why)
    return selection.result(best, comparison, seconds=time.monotonic() - started)


def _selection(request: BuildRequest, limits: Limits) -> _Selection:
    """Return what there is to select from, and by; what can't be judged or run here is refused."""
    request = request if request.int8 or request.fp8 else replace(request, int8=True)
    spec = spec_of(request)
    check_outputs(request)
    if request.images is None and request.data is None:
        alone = "; beside `calib=` they judge and nothing else" if request.calib is not None else ""
        raise UsageError(f"`best=True` judges accuracy on real samples: add `images=DIR` or `data='F.npz'`{alone}")
    request = with_model(request)
    try:
        gpu = gpu_for(request)
    except (DeviceError, MissingDependency, UsageError) as error:
        instead = f"choose the precision yourself: `{spec.precision}=True` or `{spec.base}=True` instead of `best=True`"
        raise type(error)(f"`best=True` measures engines on a GPU, and {error}; else {instead}") from error
    ort = ort_version("judging engines")  # what is missing is said before the work
    model = load_model(request.model)
    return _Selection(request, limits, spec, model, gpu, ort, real_samples(model, request), kinds_of(model, request))


@dataclass(frozen=True)
class _Selection:
    """Engines of one request in three precisions, of which the fastest within the limits is kept."""

    request: BuildRequest
    limits: Limits
    spec: BuildSpec
    model: Model
    gpu: DeviceInfo
    ort: str
    samples: Batches
    kinds: Mapping[str, Kind]

    @property
    def output(self) -> Path:
        return Path(self.request.output)

    @property
    def quantized(self) -> Precision:
        return self.spec.precision

    def judged(self, engines: Engines) -> tuple[dict[Precision, BuildResult], Comparison]:
        """The engines that could be built, and how they compare and which is kept."""
        results: dict[Precision, BuildResult] = {}
        failures: dict[Precision, str] = {}
        reference: tuple[Runner, str] | None = None
        wanted = (self.quantized, self.spec.base, Precision.FP32)  # the last only where none of the others will do
        for precision in wanted:
            try:
                results[precision] = engines.build(precision)
            except (BuildFailed, PrecisionLost) as error:
                self.request.reporter.warn(f"no {precision.upper()} engine: {error}")
                failures[precision] = str(error)
            if precision is self.quantized or not results:
                continue
            run, description = reference = reference or self._reference()
            comparison = measured(
                self.gpu, results, failures, self.samples, self.request.reporter, reference=run, kinds=self.kinds
            )
            try:
                return results, replace(comparison, reference=description, key=self.key).judged(self.limits)
            except AccuracyLost:
                if precision is Precision.FP32:
                    raise
        raise BuildFailed("; ".join(f"no {item.upper()} engine: {why}" for item, why in failures.items()))

    def _reference(self) -> tuple[Runner, str]:
        """Return the FP32 model in ONNX Runtime, and what it is in words."""
        runner = OnnxRunner(self.model.path or self.model.proto, optimize=False, gpu=True)
        run = by_samples(runner, self.model.inputs, self.model.outputs)
        return run, f"the FP32 model in ONNX Runtime {self.ort} on the {'GPU' if runner.on_gpu else 'CPU'}"

    def install(self, best: BuildResult, quantized: BuildResult | None, comparison: Comparison) -> None:
        """Move the engine that is kept to the output: plan and manifest, and what else is to be kept."""
        manifest = load_manifest(best.engine)
        assert manifest is not None  # the builder has just written it
        manifest, cache = replace(manifest, comparison=comparison.describe()), self.request.save_cache
        graph = load_model(str(best.onnx)).proto if self.request.save_onnx else None
        with engine.writing_engine(self.request, manifest, graph) as plan:
            os.replace(best.engine, plan)
            if cache and quantized is not None:
                write_bytes(cache, whole(quantized.engine.with_name(NATIVE_CACHE)))

    def result(self, result: BuildResult, comparison: Comparison, *, seconds: float) -> BuildResult:
        graph = self.request.save_onnx
        return replace(
            result,
            engine=self.output,
            manifest=manifest_path(self.output),
            onnx=Path(graph) if graph else None,
            comparison=comparison.describe(),
            seconds=seconds,
        )

    def up_to_date(self) -> BuildResult | None:
        """Return the engine at the output, if a selection now would have the same candidates and limits."""
        comparison, cache = stored_comparison(self.output), self.request.save_cache
        if comparison is None or comparison.key != self.key or (cache and not Path(cache).is_file()):
            return None
        manifest = load_manifest(self.output)
        if manifest is None or sha256_file(self.output) != manifest.plan["sha256"]:
            return None
        kept, preprocess = Precision(comparison.kept), manifest.model_preprocess
        request = asked_of_builder(self.request, kept, preprocess, within=True)
        result = engine.construct(replace(request, store="none"))
        if not result.cached:
            return None
        self.request.reporter.note(f"{self.output} is up to date: {comparison.why}")
        return self.result(result, comparison, seconds=result.seconds)

    @cached_property
    def key(self) -> str:
        """Digest all that the candidates, their figures and the choice depend on."""
        request, generation = self.request, select(self.request.backend)
        calib, preprocess = request.calib, request.preprocess
        if calib is None:
            scales: Any = real_samples(self.model, request, None).describe()
        else:
            scales = calib.digest if isinstance(calib, Table) else sha256_file(existing_file(calib, "`calib=`"))
        prepared = None if preprocess is None else Preprocess.load(preprocess).describe()
        judged = [asdict(self.limits), self.samples.describe(), self.kinds]
        quantized = [scales, prepared, request.method, request.limit, request.batch]
        made = [self.model.fingerprint, self.spec.describe(), generation.family, generation.version, str(self.gpu)]
        return sha256_json([__version__, made, quantized, judged])
