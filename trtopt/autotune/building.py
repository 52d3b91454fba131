"""build() as users call it: the builder, and where INT8 or FP8 is asked for, the comparison with FP16 on this machine's GPU.

INT8 is not always faster: TensorRT may have no good INT8 kernel for a layer, and conversions between types cost time. So a
quantized engine is measured against the one that it replaces, unless that is declined, and `best` decides by the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trtopt.autotune.candidates import NATIVE_CACHE, Engines, asked_of_builder, gpu_for
from trtopt.autotune.goal import Goal, goal_of, too_few
from trtopt.autotune.request import TuneRequest
from trtopt.autotune.selection import EQUAL, Comparison, stored_comparison
from trtopt.autotune.tuning import check_tunable, tuned
from trtopt.builder import construction as engine
from trtopt.builder.asked import check_outputs, spec_of
from trtopt.builder.construction import BuildResult
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples, with_model
from trtopt.calibration.table import Table
from trtopt.certification.certificate import certify
from trtopt.certification.healing import certifying, healed
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
from trtopt.core.files import existing_file, folder_beside, sha256_file, sha256_json, whole, write_bytes
from trtopt.core.options import taking, without
from trtopt.core.progress import recorded
from trtopt.core.values import Precision
from trtopt.cuda.device import probe
from trtopt.data.preprocess import Preprocess
from trtopt.engine.manifest import load_manifest, manifest_path
from trtopt.engine.store import named_store
from trtopt.evaluation.agreement import Runner
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.measures import decibels
from trtopt.evaluation.verify import by_samples
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner
from trtopt.ort.sessions import version as ort_version

GOAL = ("labels", "metric", "min", "min_agreement", "min_snr")
NO_LIMIT = -1000.0  # dB


@taking(BuildRequest)
def build(request: BuildRequest) -> BuildResult:
    """Build a TensorRT engine: `output` (a plain plan) and `output`.json (its manifest).

    Each option has a line in `BuildRequest` and in `trtopt build --help`. INT8, FP8 and INT4 leave the rest in FP16, or in BF16
    with `bf16` as well.

    Args:
        model: an ONNX file or model; one that already holds Q/DQ needs no data.
        heal: certify it (see `certify`), and where the engine isn't right, try cures at the place where it fails: another
            optimization level, a tensor kept out of fusions, an operator in parts, nodes in FP32, several profiles. The fastest
            engine that is right is kept; `healing` says what was tried.
        best: build INT8 (or FP8, if `fp8`) and FP16 (or BF16), time both on this machine's GPU, and keep the fastest whose
            results stay within the limits on real samples; FP32 where neither does. `comparison` says which and why.
        min_agreement, min_snr, metric with min: with INT8, limits that `tune` keeps; see `verify` for their defaults.
        int4: INT4 weights of MatMul and Gemm, in blocks of 128 or 64 inputs, by GPTQ on `images` or `data` where given.
        sparsity: "keep": sparse kernels where weights are 2:4; "prune": made so first, by SparseGPT on `images` or `data`,
            else by magnitude, in FP16 and INT8; what that loses is told, and `min_snr` is its limit.
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
        AccuracyLost: nothing stays within the limits, best not even in FP32, or nothing heals; nothing is written.
    """
    return _logged(request, _built)


def _logged(request: BuildRequest, work: Callable[[BuildRequest], BuildResult]) -> BuildResult:
    """Do the work on the model, which is read once; its log is kept, and its scales where that is asked for."""
    named_store(request.store)  # refused before the work
    check_outputs(request)
    request = replace(request, certify=False) if request.heal else request  # which certifies what it builds
    if request.certify and request.save_onnx is None and not (gpu := probe()):
        raise UsageError(
            f"`certify=True` runs the engine, and {gpu.reason}: add `save_onnx='kept.onnx'`, whose graph is tried then"
        )
    with recorded(request.reporter, request.log) as reporter:
        request = replace(with_model(request), reporter=reporter)
        result = healed(request, work) if request.heal else work(request)
        if request.save_calib is not None and result.tuning is None:  # a search has kept its own
            if result.table is None:
                reporter.warn("`save_calib=` kept nothing: no scales of trtopt's own calibration are in this engine")
            else:
                result.table.save(request.save_calib)
        return _certified(request, result) if request.certify else result


def _certified(request: BuildRequest, result: BuildResult) -> BuildResult:
    """Hold the engine, which is written, against itself and its model; what doesn't hold is told, and `ok` is False."""
    found = certify(load_model(request.model).proto, result.engine, **certifying(request))
    for item in found.failed[:3]:
        request.reporter.warn(f"{result.engine} isn't right: {item.name}: {decibels(item.worst_db)} ({item.output})")
    return replace(result, certificate=found.describe())


def _built(request: BuildRequest) -> BuildResult:
    if request.best:
        if not request.compare:
            raise UsageError(
                "`best=True` compares engines: drop `compare=False`, or name the precision instead of `best=True`"
            )
        if own := [name for name in ("labels", "metric", "min") if getattr(request, name) is not None]:
            raise UsageError(f"`{own[0]}=` is judged by a search in INT8: `int8=True` instead of `best=True`")
        return _best(request, Limits.of(request.min_agreement, request.min_snr) or Limits())
    goal = goal_asked(request)
    return _asked_for(request) if goal is None else _tuned(request, goal)


def goal_asked(request: BuildRequest) -> Goal | None:
    """Return the goal of a build that isn't `best`, for which layers are chosen; None: there is none."""
    builders = request.sparsity == "prune" or ((request.fp16 or request.bf16) and not (request.int8 or request.fp8))
    return goal_of(without(request, "min_snr") if builders else request)  # there the builder keeps it


@taking(TuneRequest)
def tune(request: TuneRequest) -> BuildResult:
    """Build the fastest INT8 engine that stays within an accuracy limit: `build(int8=True)` with that limit.

    It takes what `build` takes, and at least one of min_snr, min_agreement and metric. It raises what `build` raises.
    """
    if request.best:
        raise UsageError(
            "`best=True` is `build`'s: it keeps one of several engines, tune looks for what stays out of INT8: drop it"
        )
    if request.sparsity == "prune":
        raise UsageError(
            "`sparsity='prune'` is `build`'s: what it loses no layer out of INT8 mends; `min_snr=` is its limit there"
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
    check_tunable(request)
    plain = replace(without(request, *GOAL), save_calib=None)
    gpu, not_measured = None, ""
    try:
        gpu = gpu_for(request)
    except TrtoptError as error:
        not_measured = str(error)
    engines = None if gpu is None else Engines(plain, gpu)
    with folder_beside(request.output) as folder:
        if engines is not None:
            engines.folder = folder
        tunings = tuned(request, goal, engines.times if engines else lambda *_: None)
        tuning = engines.fastest(tunings) if engines else tunings[0]
        request.reporter.note(str(tuning))
        if request.save_calib is not None:
            tuning.table.save(request.save_calib)
        if engines is None:
            result = engine.construct(replace(without(plain, "images", "data"), calib=tuning.table))
            return replace(result, tuning=tuning, not_measured=not_measured)
        engines.request = replace(plain, calib=tuning.table)
        # The engine is judged as well as the graph was; by speed alone where the limit is the user's own.
        limits = goal.limits or Limits(min_agreement=0.0, min_snr=NO_LIMIT)
        return replace(_Selection(engines, limits).result(), tuning=tuning)


# What was asked for, measured ------------------------------------------------------------------------------------------


def _asked_for(request: BuildRequest) -> BuildResult:
    """Build what was asked for, then compare. Where that can't be done, or is interrupted, the engine stays."""
    reporter, spec = request.reporter, spec_of(request)
    quantized, base = spec.precision, spec.base
    result = engine.construct(request)
    if not quantized.quantized:
        return result
    try:
        gpu = gpu_for(request)
    except TrtoptError as error:
        return replace(result, not_measured=str(error))
    comparison = stored_comparison(result.engine) if result.cached else None
    if comparison is None or comparison.gpu != str(gpu) or comparison.speedup is None:
        try:
            engines = Engines(request, gpu, within=False)
            with folder_beside(result.engine) as engines.folder:
                reporter.note(f"building for {base.upper()} too, to compare (`compare=False` leaves that out)")
                engines.built[quantized] = result
                pair = {str(quantized): result, str(base): engines.build(base)}
                comparison = engines.measured(pair, reference=(str(base), f"the {base.upper()} engine"))
        except (BuildCancelled, KeyboardInterrupt):
            reporter.warn(f"{result.engine} is written; interrupted before it was measured against {base.upper()}")
            raise
        except TrtoptError as error:
            reporter.warn(f"not measured against {base.upper()}: {error}")
            return replace(result, not_measured=str(error))
        comparison = comparison.asked_for(str(quantized))
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


def _best(request: BuildRequest, limits: Limits) -> BuildResult:
    """Keep the fastest engine within the limits; what can't be judged or run here is refused."""
    request = request if request.int8 or request.fp8 else replace(request, int8=True)
    spec = spec_of(request)
    if request.images is None and request.data is None:
        alone = "; beside `calib=` they judge and nothing else" if request.calib is not None else ""
        raise UsageError(f"`best=True` judges accuracy on real samples: add `images=DIR` or `data='F.npz'`{alone}")
    try:
        gpu = gpu_for(request)
    except (DeviceError, MissingDependency, UsageError) as error:
        instead = f"choose the precision yourself: `{spec.precision}=True` or `{spec.base}=True` instead of `best=True`"
        raise type(error)(f"`best=True` measures engines on a GPU, and {error}; else {instead}") from error
    engines = Engines(request, gpu)
    assert engines.samples is not None  # of the images or data
    return _Selection(engines, limits, doubt=too_few(engines.samples.samples)).result()


class _Selection:
    """Engines of one request in three precisions, of which the fastest within the limits is kept; `doubt` is said of it."""

    def __init__(self, engines: Engines, limits: Limits, doubt: str = "") -> None:
        self.engines, self.limits, self.doubt = engines, limits, doubt
        self.request, self.output = engines.request, Path(engines.request.output)
        self.ort = ort_version("judging engines")  # what is missing is said before the work

    def result(self) -> BuildResult:
        """Return the engine that is kept: the one that is there, or the best of those that are built."""
        started, reporter = time.monotonic(), self.request.reporter
        if not self.request.force and (result := self.up_to_date()):
            return result
        if self.doubt:
            reporter.warn(self.doubt)
        with folder_beside(self.output) as self.engines.folder:
            results, comparison = self.judged()
            best, quantized = results[comparison.kept], results.get(self.engines.quantized)
            manifest, cache = load_manifest(best.engine), self.request.save_cache
            assert manifest is not None  # the builder has just written it
            manifest = replace(manifest, comparison=comparison.describe())
            graph = load_model(str(best.onnx)).proto if self.request.save_onnx else None
            with engine.writing_engine(self.request, manifest, graph) as plan:
                os.replace(best.engine, plan)
                if cache and quantized is not None:
                    write_bytes(cache, whole(quantized.engine.with_name(NATIVE_CACHE)))
        reporter.note(comparison.why)
        return self.kept(replace(best, seconds=time.monotonic() - started), comparison)

    def judged(self) -> tuple[dict[str, BuildResult], Comparison]:
        """The engines that could be built, and how they compare and which is kept."""
        engines, results, failures = self.engines, dict[str, BuildResult](), dict[str, str]()
        wanted = (engines.quantized, engines.base, Precision.FP32)  # the last only where none of the others will do
        for precision in wanted:
            try:
                results[precision] = engines.build(precision)
            except (BuildFailed, PrecisionLost) as error:
                self.request.reporter.warn(f"no {precision.upper()} engine: {error}")
                failures[precision] = str(error)
            if precision is engines.quantized or not results:
                continue
            comparison = replace(engines.measured(results, failures, self.reference), key=self.key)
            try:
                return results, comparison.judged(self.limits)
            except AccuracyLost:
                if precision is Precision.FP32:
                    raise
        raise BuildFailed("; ".join(f"no {item.upper()} engine: {why}" for item, why in failures.items()))

    @cached_property
    def reference(self) -> tuple[Runner, str]:
        """The FP32 model in ONNX Runtime, and what it is in words."""
        model = self.engines.model
        runner = OnnxRunner(model, optimize=False, gpu=True)
        device = "GPU" if runner.on_gpu else "CPU"
        return by_samples(runner, model), f"the FP32 model in ONNX Runtime {self.ort} on the {device}"

    def kept(self, result: BuildResult, comparison: Comparison) -> BuildResult:
        """Return what is told of the engine that is kept."""
        graph = Path(self.request.save_onnx) if self.request.save_onnx else None
        result = replace(result, engine=self.output, manifest=manifest_path(self.output), onnx=graph)
        return replace(result, comparison=comparison.describe())

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
        return self.kept(result, comparison)

    @cached_property
    def key(self) -> str:
        """Digest all that the candidates, their figures and the choice depend on."""
        request, engines = self.request, self.engines
        calib, preprocess = request.calib, request.preprocess
        if calib is None:
            scales: Any = real_samples(engines.model, request, None).describe()
        else:
            scales = calib.digest if isinstance(calib, Table) else sha256_file(existing_file(calib, "`calib=`"))
        prepared = None if preprocess is None else Preprocess.load(preprocess).describe()
        assert engines.samples is not None
        judged = [asdict(self.limits), engines.samples.describe(), engines.kinds]
        quantized = [scales, prepared, request.method, request.limit, request.batch]
        return sha256_json([engines.key, engines.model.fingerprint, quantized, judged])
