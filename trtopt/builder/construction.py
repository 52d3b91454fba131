"""build(): an ONNX model to one plan and its manifest, on whichever TensorRT generation is there.

Precision is decided once and lowered in one of two ways, as the generation wants it: into the graph's own types
(strongly typed builds), or into builder flags beside an FP32-typed graph (8.6). Q/DQ pairs stand in the graph in both.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import onnx

from trtopt.builder.asked import check_outputs, is_none, spec_of, with_profiles
from trtopt.builder.lowering import Lowered, PrecisionReport, judge, lower
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import real_samples, sizes_of_samples
from trtopt.calibration.safety import Safety, find_unsafe
from trtopt.calibration.scales import Scales
from trtopt.calibration.table import Table
from trtopt.core.documents import Damaged, converted, plain
from trtopt.core.errors import (
    AccuracyLost,
    BackendError,
    ModelError,
    OutputError,
    PrecisionLost,
    TrtoptError,
    UnsupportedOperator,
    UsageError,
)
from trtopt.core.files import (
    cache_folder,
    check_writable,
    json_bytes,
    sha256_file,
    sha256_json,
    write_bytes,
    writing_together,
)
from trtopt.core.options import named, taking
from trtopt.core.progress import Duration
from trtopt.core.shapes import outside, shapes_option, suggested_shapes
from trtopt.core.temporary import scratch
from trtopt.core.values import (
    BuildSpec,
    Kept,
    Precision,
    Profile,
    TensorInfo,
    overriding,
    x,
)
from trtopt.core.version import __version__
from trtopt.core.words import first_of
from trtopt.cuda.device import DeviceInfo
from trtopt.data import Batches
from trtopt.data.convert import single_runs
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.engine.manifest import Manifest, beside, kept_graph, load_manifest, manifest_path, precision_summary
from trtopt.engine.store import GRAPH, PLAN, Entry, Store, digest_of, named_store
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import external_files, load_model, save_model
from trtopt.graph.lengths import max_input_lengths
from trtopt.graph.op_types import WEIGHTED
from trtopt.graph.origin import Origins
from trtopt.graph.output_kinds import resolve, stated
from trtopt.graph.passes.expand import written_out
from trtopt.graph.passes.fold import FoldReport, fold
from trtopt.graph.passes.quantize import is_quantized
from trtopt.graph.passes.typed import FP16_MAX, typed_already
from trtopt.graph.proto import fingerprint
from trtopt.graph.traced_batch import find_traced_batch
from trtopt.graph.view import to_ir
from trtopt.graph.work import lost_shapes, macs, sizes_in
from trtopt.linting.refusals import explained, refuse
from trtopt.linting.rules import fp16_hazards, one_sample, refuse_damaged
from trtopt.ort.folding import held_against, proven
from trtopt.ort.ranges import measure_ranges, not_finite
from trtopt.recipes.classnames import check_classes, load_classes
from trtopt.trt import select
from trtopt.trt.generation import BuiltPlan, Generation
from trtopt.trt.parsing import refusal
from trtopt.trt.profiles import validate_profiles

LEAST_QUANTIZED = 0.1  # of the arithmetic in INT8 or FP8: with less of it an engine is better built without
LEAST_SHARE = 0.5  # of the arithmetic asked for in a precision: an engine that runs less of it so isn't delivered
MOST_TIMINGS = 256 << 20  # bytes of a timing cache that is kept without being asked for
_CALIBRATION = ("images", "data", "calib", "preprocess", "method", "limit", "batch", "allow_unusual_data")
MEASURED = "by what the samples show"
PARTS = "part of an operator that TensorRT takes only written out"


@dataclass(frozen=True)
class BuildResult:
    """What `build` made.

    Attributes:
        precision: counts of the layers that do the arithmetic, as the engine reports them.
        precision_summary: the same in a line.
        coverage: precision → share of the multiply-accumulates of convolutions and matrix products that run in it.
        targets: compute capabilities it is for ("sm89"); empty: the GPU it was built on.
        cached: the engine was up to date, or in the store, and wasn't built again.
        kept: nodes that stay in a higher precision than asked for, with the reason.
        onnx: the graph that TensorRT was given, where it was asked for.
        table: the calibration it was quantized with.
        comparison: how it compares with FP16 on this GPU (`Comparison.describe()`); None for a build that isn't quantized, and
            where nothing could be measured: `not_measured` says why.
        tuning: what was chosen for the limit that was given (`trtopt.Tuning`); None: there was none.
        safety: what the samples say of the model in FP16 or BF16 (`Safety.describe()`); None: there were none.
        durations: how long its phases took.
    """

    engine: Path
    manifest: Path
    precision: Mapping[str, int]
    precision_summary: str
    seconds: float
    cached: bool
    targets: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    warnings: tuple[str, ...] = ()
    onnx: Path | None = None
    table: Table | None = None
    comparison: Mapping[str, Any] | None = None
    not_measured: str = ""
    coverage: Mapping[str, float] = field(default_factory=dict)
    tuning: Any = None
    safety: Mapping[str, Any] | None = None
    durations: Sequence[Duration] = ()

    def to_json(self) -> dict[str, Any]:
        description = plain(replace(self, table=None, tuning=None, seconds=round(self.seconds, 3)))
        del description["table"]
        tuning = None if self.tuning is None else self.tuning.to_json()
        return {**description, "calibration": _summary(self.table), "tuning": tuning}


def construct(request: BuildRequest) -> BuildResult:
    """Build one TensorRT engine: `output` (a plain plan) and `output`.json (its manifest).

    This is `trtopt.build` without measuring anything; arguments and errors are described there.
    """
    start = time.monotonic()
    where = named_store(request.store)
    work = _Build(request)
    reporter = request.reporter
    if not request.force and (manifest := work.up_to_date()):
        reporter.note(f"{work.output} is up to date")
        return work.result(work.described(manifest), time.monotonic() - start, cached=True)
    if where is not None and request.save_cache:
        reporter.note("`save_cache=` needs TensorRT's own calibration, so the store isn't asked")
    elif where is not None:
        manifest, cached = work.through(Store(where))
        return work.result(manifest, time.monotonic() - start, cached=cached)
    return work.result(work.made(), time.monotonic() - start, cached=False)


build = taking(BuildRequest)(construct)  # by keywords


def stored_engine(request: BuildRequest, store: Store) -> Entry:
    """The engine in the store, built if it isn't there; `output` stays unwritten. Raises as `trtopt.build`."""
    with scratch() as folder:
        graph = folder / GRAPH if request.save_onnx else None
        work = _Build(replace(request, output=folder / PLAN, save_onnx=graph))
        entry, _ = work.obtained(store, must_store=True)
        assert entry is not None
        return entry


def _hazards(folded: onnx.ModelProto, spec: BuildSpec, lowered: Lowered) -> list[str]:
    """What `check` says of constants beyond FP16, of those that the build didn't keep in FP32."""
    if spec.base is not Precision.FP16:
        return []
    in_fp32 = {item.node for item in lowered.kept if item.precision is Precision.FP32}
    findings = [item for item in fp16_hazards(folded) if item.node not in in_fp32]
    if not findings:
        return []
    first, others = findings[0], f" ({len(findings)} such nodes)" if len(findings) > 1 else ""
    return [f"{first.node} ({first.op}){others}: {first.message}; {first.hint}"]


class _Build:
    """One build. Making it checks all that can be known before TensorRT is asked, and calibrates."""

    def __init__(self, request: BuildRequest) -> None:
        self.request, self.output, reporter = request, Path(request.output), request.reporter
        spec = spec_of(request)
        check_outputs(request)
        self.model = model = load_model(request.model)
        self.name = str(model.path or "the model")  # what messages call it
        self.classes = None if request.classes is None else load_classes(request.classes)
        if self.classes is not None:
            check_classes(self.classes, model.outputs)
        self.stated = stated(request.output_kind, model.outputs)
        sources = {name: getattr(request, name) for name in _CALIBRATION}
        scales = Scales(**sources, overrides=request.precision_override)
        if spec.fp8_layers and (scales.calib is None or scales.calib_is_cache):
            raise UsageError(
                "`int8=True` and `fp8=True` are both given, and nothing says which layers are in which: give a limit such as "
                "`min_snr=25`, or the table that a search kept by `save_calib=`, or drop one of the two"
            )
        quantized, self.generation = is_quantized(model.proto), select(request.backend)
        self.generation.refuse(spec)
        early = spec.precision.quantized or request.images is not None or request.data is not None
        refuse(self.generation, model, self.folded[0] if early and request.calib is None else None)
        scales.check(spec, quantized)
        if not spec.targets and (targets := self.generation.targets(spec)):
            reporter.note(f"for {', '.join(f'sm{target}' for target in targets)} (`target=` chooses)")
        preprocess = None if request.preprocess is None else Preprocess.load(request.preprocess)
        self.spec = spec = with_profiles(
            spec, model, preprocess, reporter, functools.partial(sizes_of_samples, model, request)
        )
        if preprocess is not None:
            sized_preprocess = preprocess.at_opt(model.inputs, spec.profiles)
            if sized_preprocess.size is not None and preprocess.size is None:
                reporter.note(
                    f"images are prepared in {x(sized_preprocess.size)}, the opt size of `shapes=` (`size=` gives another)"
                )
            scales = replace(scales, preprocess=sized_preprocess)
        if spec.embed_preprocess:
            if preprocess is not None or scales.calib is None:  # else the table knows
                Embedded.of(preprocess, model.inputs)
            if scales.data is not None:  # is used as it is
                scales = replace(scales, preprocess=None)
        self.table = scales.table(model, spec, quantized, reporter)
        if self.table is not None and spec.precision is Precision.INT8 and self.table.in_fp8 and not spec.fp8_layers:
            count = len(self.table.in_fp8)
            reporter.note(
                f"of the layers that the table has out of INT8, {count} would run in FP8 with `fp8=True`, and run in "
                f"{spec.base.upper()}"
            )
        self.native, self.cache = scales.native(model, spec), scales.native_cache(spec)
        self.native_batch = scales.native_batch(model)
        self.preprocessing = scales.preprocessing(self.table, self.native)
        self.embedded = self._embedded(preprocess) if spec.embed_preprocess else None
        self.safety: Safety | None = None
        self.samples: Batches | None = None
        if not spec.precision.quantized and (request.images is not None or request.data is not None):
            self.samples = real_samples(model, request)
        elif not spec.precision.quantized and request.min_snr is not None and not request.best:
            raise UsageError("`min_snr=` is judged on real samples: add `images=DIR` or `data='F.npz'`")

    def _embedded(self, preprocess: Preprocess | None) -> Embedded:
        """What the engine is to do of the preprocessing itself."""
        calibration_preprocess = preprocess if self.preprocessing is None else Preprocess.load(self.preprocessing)
        embedded = Embedded.of(calibration_preprocess, self.model.inputs)
        self.request.reporter.note(
            f"the engine takes {embedded.input!r} as uint8 pixels, samples x height x width x {embedded.preprocess.count}, and "
            f"makes the model's input of them: {embedded}"
        )
        return embedded

    def _engine(self) -> tuple[tuple[TensorInfo, ...], tuple[Profile, ...]]:
        """The engine's inputs and profiles, which are the model's unless preprocessing is embedded."""
        inputs, profiles = self.model.inputs, self.spec.profiles
        if self.embedded is None:
            return inputs, profiles
        return self.embedded.inputs(inputs), self.embedded.profiles(profiles)

    def _measure(self, folded: onnx.ModelProto) -> None:
        """Find what has to stay in FP32 by what the samples show, where the build has any and isn't quantized.

        Of a model that is FP16 or BF16 already it is said that it stays as it is, and what isn't finite in it.
        """
        spec, request, reporter = self.spec, self.request, self.request.reporter
        own = None if spec.precision.quantized or spec.base is Precision.FP32 else typed_already(to_ir(folded))
        if own is not None:
            option = f"`{spec.base}=True`"
            reporter.note(
                f"the model is {own.upper()} already, and its types stay as they are: {option} changes nothing"
            )
            if self.samples is not None:
                feeds = (run.feed for run in single_runs(network_inputs(folded), self.samples))
                for node, what in not_finite(folded, measure_ranges(folded, feeds)).items():
                    reporter.warn(f"{node} {what}, in the model as it is given")
            return
        if self.samples is None:
            return
        self.safety = find_unsafe(
            folded,
            spec.base,
            self.samples,
            given=self.model.proto,
            limit_db=request.min_snr,
            overrides=spec.overrides,
            io_fp32=spec.io_fp32,
            reporter=reporter,
        )
        if self.safety.missed and request.min_snr is not None and not request.best:
            fp32, advice = self.safety.fp32_db, "without `min_snr=` it is built unjudged"
            if fp32 is not None and fp32 >= request.min_snr:
                known = f"FP32 gives {fp32:.0f}" if math.isfinite(fp32) else "FP32 loses nothing"
                advice = f"{known}: drop `{spec.base}=True`, or ask for less as `min_snr=`"
            raise AccuracyLost(f"{self.safety}. Nothing was written; {advice}")
        (reporter.warn if self.safety.missed else reporter.note)(str(self.safety))

    def _warn_of_shapes(self) -> None:
        """Say that the samples (the first one speaks for them) have shapes that the engine won't take."""
        if self.request.images is None and self.request.data is None:
            return
        first = next(iter(self.samples or real_samples(self.model, replace(self.request, limit=1))))
        if problem := outside(self.spec.profiles, self.model.inputs, first):
            self.request.reporter.warn(f"{problem}, which it won't take: give others as `shapes=`, or other samples")

    def _warn_of_inputs(self, folded: onnx.ModelProto) -> None:
        """Say which inputs of an engine that takes FP16 hold more in the samples than FP16 does."""
        spec = self.spec
        if spec.io_fp32 or spec.base is not Precision.FP16 or self.embedded is not None:
            return
        largest = {} if self.table is None else self.table.beyond_fp16
        largest = {**largest, **({} if self.safety is None else self.safety.inputs)}
        for name, info in network_inputs(folded).items():
            if info.floating and largest.get(name, 0.0) > FP16_MAX:
                self.request.reporter.warn(
                    f"the samples hold {largest[name]:,.0f} in the input {name!r}, which is FP16 with `fp32_io=False` and ends "
                    f"at {FP16_MAX:,.0f}: the engine refuses such samples; leave `fp32_io=` as it is"
                )

    @property
    def _unsafe(self) -> Mapping[str, str]:
        return {} if self.safety is None else self.safety.in_fp32

    # Building

    @functools.cached_property
    def folded(self) -> tuple[onnx.ModelProto, FoldReport]:
        return fold(self.model.proto, reporter=self.request.reporter)

    def made(self) -> Manifest:
        """Build the engine and write it."""
        request, spec, inputs, start = self.request, self.spec, self.model.inputs, time.monotonic()
        reporter = request.reporter
        compare = held_against(self.model, samples=self.samples or (), profiles=spec.profiles, reporter=reporter)
        folded, folding = proven(self.model, self.folded, compare, reporter)
        if folding.problem:
            reporter.warn(folding.warning)
        refuse_damaged(folded, self.name)
        for finding in one_sample(find_traced_batch(folded), inputs, spec.profiles):
            if finding.level == "error":
                raise ModelError(
                    f"{self.name} can't be built for several samples: {str(finding).removeprefix('error: ')}"
                )
        if self.table is not None and self.table.model["fingerprint"] != fingerprint(folded):
            reporter.warn("the calibration table was made for another model, or for other weights: calibrate this one")
        validate_profiles(inputs, spec.profiles, longest=max_input_lengths(folded))  # folding may have shown them
        self._measure(folded)
        self._warn_of_inputs(folded)
        self._warn_of_shapes()
        lowered, engine, report = self._construct(folded)
        tell_cut_off(request)
        for warning in [*engine.warnings, *_hazards(folded, spec, lowered)]:
            reporter.warn(warning)
        return self._write(lowered, engine, report, time.monotonic() - start)

    def _construct(self, folded: onnx.ModelProto) -> tuple[Lowered, BuiltPlan, PrecisionReport]:
        """Build the plan; what TensorRT doesn't quantize is left out of INT8 or FP8 in a second build.

        Raises:
            PrecisionLost: less than half of the arithmetic runs as asked for, or what runs isn't known.
        """
        spec, generation, reporter = self.spec, self.generation, self.request.reporter
        shapes = opt_shapes(self.model.inputs, spec.profiles)[0]
        sizes = sizes_in(folded, shapes)
        with scratch() as folder:
            lowered, engine = self._planned(folded, {}, folder)
            asked_nodes, arithmetic = lowered.asked, macs(lowered.source or folded, sizes)
            report = judge(engine, lowered, spec, arithmetic, asked_nodes)
            lost = report.lost
            operators = {node.name: node.op_type for node in folded.graph.node}
            named = any(overriding(spec.overrides, node, operators.get(node, "")) is not None for node in lost)
            repairable = bool(lost) and report.share >= LEAST_SHARE and not named
            if repairable and self.table is not None and not spec.allow_precision_fallback:
                reporter.note(
                    f"{generation} runs {len(lost)} of {len(asked_nodes)} quantized layers in floating point "
                    f"({first_of(lost)}): building again with these in {spec.base.upper()}"
                )
                reasons = {node: f"{generation} runs it in {other} when quantized" for node, other in lost.items()}
                lowered, engine = self._planned(folded, reasons, folder)
                report = judge(engine, lowered, spec, arithmetic, asked_nodes)
        for what, advice in self._deviations(report, named):
            if advice and not spec.allow_precision_fallback:
                raise PrecisionLost(
                    Origins(self.model.proto, folded).explained(f"{what}. Nothing was written; {advice}")
                )
            reporter.warn(what)
        wanted = [
            item for item in report.coverage if item is spec.precision or (spec.precision.quantized and item.quantized)
        ]
        share = sum(report.coverage[item] for item in wanted)
        little = share < LEAST_QUANTIZED if spec.precision.quantized else not share
        if report.coverage and little and spec.precision is not Precision.FP32:
            reporter.warn(self._other(share, report, lowered, is_quantized(folded)))
        return lowered, engine, report

    def _deviations(self, report: PrecisionReport, named: bool) -> Iterator[tuple[str, str]]:
        """In what the engine isn't as asked for, and what to do where that fails the build; "" where it is only told.

        Args:
            named: the user named a node that is lost.
        """
        anyway = "take it as it is with `allow_precision_fallback=True`"
        if report.unknown:
            yield f"what the engine of {self.generation} runs isn't known: {report.unknown}", anyway
        little = report.share < LEAST_SHARE
        if report.problem or little:
            what = "; ".join(
                filter(None, [report.problem, f"{report.share:.0%} of the arithmetic asked for runs as asked"])
            )
            serious = (little or named) and not self.spec.allow_precision_fallback
            if serious:
                what = f"{self.generation} built an engine without the precision asked for: {what}"
            yield what, f"{anyway}, or keep layers out with `precision_override=`" * serious

    def _other(self, share: float, report: PrecisionReport, lowered: Lowered, quantized: bool) -> str:
        """Why hardly anything, or nothing, runs in the precision asked for, and what to ask for instead."""
        precision, base = self.spec.precision, self.spec.base
        what = f"no convolution or matrix product runs in {precision.upper()}"
        if share:
            what = f"{precision.upper()} does {share:.1%} of the arithmetic"
        if quantized and not precision.quantized:
            return f"{what}: the model is quantized, which `int8=True` says"
        others = " and ".join(item.upper() for item in report.coverage if item is not precision)
        rest = "the rest runs" if share else "they run"
        why = f"{rest} in {others}, because of the model's own types, which are left as they are"
        if lowered.kept:
            why = f"{lowered.kept[0].node}: {lowered.kept[0].reason}"
        other = named(str(Precision.FP16 if base is Precision.FP32 else base), True)
        return f"{what}: {why}" + f"; build it with {other}, which needs no scales and loses less" * precision.quantized

    def _planned(
        self, graph: onnx.ModelProto, unquantized: Mapping[str, str], folder: Path
    ) -> tuple[Lowered, BuiltPlan]:
        """Lower the graph and build it; operators that TensorRT refuses whole are written out where ONNX has parts for them."""
        spec, generation, path = self.spec, self.generation, folder / "model.onnx"
        if spec.timing_cache is None and generation.capabilities.timing_cache:
            cache = None if is_none(self.request.timing_cache) else kept_timing(generation, generation.device(spec))
            spec = replace(spec, timing_cache=cache or folder / "timing.cache")  # a second build is then much faster
        try:
            if issues := generation.limits(graph):
                raise refusal(self.name, issues)
            lowered = lower(
                graph,
                spec,
                generation,
                self.table,
                unquantized=unquantized,
                measured=self._unsafe,
                embedded=self.embedded,
            )
            save_model(lowered.proto, path)
            engine = generation.build(
                path,
                replace(spec, profiles=self._engine()[1]),
                quantized=lowered.quantized,
                layer_precision=lowered.layer_precision,
                preferred=lowered.preferred,
                calibration=self.native,
                calibration_batch=self.native_batch,
                calibration_cache=self.cache,
                name=self.name,
                reporter=self.request.reporter,
            )
            return lowered, engine
        except UnsupportedOperator as error:
            parts = written_out(graph, error.issues, self.request.reporter)
            readers = {} if self.table is None or error.issues else self._reading(str(error), graph)
            if parts is None and not readers.keys() <= unquantized.keys():
                self.request.reporter.warn(
                    f"building again with {first_of(readers)} in {spec.base.upper()}, for {error}"
                )
                return self._planned(graph, {**unquantized, **readers}, folder)
            if parts is None:
                if not error.issues:
                    raise type(error)(Origins(self.model.proto, graph).explained(str(error))) from error
                raise explained(error, self.model, graph) from error
        except BackendError as error:
            raise type(error)(Origins(self.model.proto, graph).explained(str(error)) + self._agreeing(graph)) from error
        old = {node.name for node in graph.graph.node}
        new = {node.name: PARTS for node in parts.graph.node if node.name not in old}
        return self._planned(parts, {**unquantized, **new}, folder)

    def _agreeing(self, graph: onnx.ModelProto) -> str:
        """What to type where sizes that were given contradict each other in the model."""
        given = self.spec.profiles[0] if self.spec.profiles else {}
        asked = {info.name: given[info.name] for info in self.model.inputs if info.open_axes and info.name in given}
        line = suggested_shapes(self.model.inputs, given, lost=lost_shapes(graph)).option
        return f"; these go together: {line}" if line not in ("", shapes_option([asked])) else ""

    def _reading(self, error: str, graph: onnx.ModelProto) -> dict[str, str]:
        """Of what reads a node without an implementation, the layers in INT8 or FP8, each with why it can't be: TensorRT moves
        the QuantizeLinear in front of them to the node's own input, and then the node has to compute on codes (8.6, a Resize
        whose result is joined with others: docs/results/zoo.md)."""
        reasons: dict[str, str] = {}
        tensors: set[str] = set()
        refused_node = ""
        for node in graph.graph.node:
            if node.op_type not in WEIGHTED and node.name and re.search(rf"(?<!\S){re.escape(node.name)}(?!\S)", error):
                refused_node = refused_node or node.name
                tensors.update(node.output)
            elif tensors.isdisjoint(node.input):
                continue
            elif node.op_type not in WEIGHTED:
                tensors.update(node.output)
            elif (
                not tensors.isdisjoint(node.input[:1])
                and overriding(self.spec.overrides, node.name, node.op_type) is None
            ):
                reasons[node.name] = (
                    f"{self.generation} has no implementation of {refused_node} in front of it when quantized"
                )
        return reasons

    # Engines that are there

    @functools.cached_property
    def _parts(self) -> dict[str, Any]:
        """What a plan depends on, as JSON has it; equal parts mean that a rebuild would give the same engine.

        Not how TensorRT was named, and which file kept its timings.
        """
        device = self.generation.device(self.spec)
        needs_gpu = not self.generation.capabilities.builds_without_gpu
        spec = self.spec.describe()
        for name in ("backend", "timing_cache", "targets"):
            del spec[name]
        parts = {
            "model": self.model.fingerprint,
            "spec": spec,
            "generation": [self.generation.family, self.generation.version],
            "targets": list(self.generation.targets(self.spec)),
            "gpu": str(device) if device and needs_gpu else None,
            "scales": self.table.digest if self.table else None,
            "native": self.native.describe() if self.native else None,
            "cache": hashlib.sha256(self.cache).hexdigest() if self.cache else None,
            "preprocess": self.preprocessing if self.embedded is None else self.embedded.describe(),
            "trtopt": __version__,
            **({} if self.samples is None else {"samples": self.samples.describe(), "limit": self.request.min_snr}),
        }
        return cast("dict[str, Any]", json.loads(json.dumps(parts, default=str)))

    def _key(self) -> str:
        return sha256_json(self._parts)

    def obtained(self, store: Store, *, must_store: bool = False) -> tuple[Entry | None, Manifest | None]:
        """The entry of the store, and the manifest where it had to be built; of those that ask at once, one builds.

        Args:
            must_store: that it can't be stored is an error; else there is no entry then.
        """
        request, reporter = self.request, self.request.reporter
        parts = {**self._parts, "graph": request.save_onnx is not None}
        if not request.force and (entry := store.find(parts)):
            return entry, None
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(store.building(digest_of(parts), reporter))
            except OutputError as error:  # such as a folder that others write, and that we may read
                if must_store:
                    raise
                reporter.note(store.explained(parts))
                reporter.warn(f"the engine will not be in the store: {error.problem}")
                return None, self.made()
            if not request.force:
                if entry := store.find(parts):
                    return entry, None
                reporter.note(store.explained(parts))
            manifest = self.made()
            try:
                return store.add(parts, self._to_store(manifest), reporter), manifest
            except OutputError as error:
                if must_store:
                    raise
                reporter.warn(f"the engine isn't in the store: {error}")
                return None, manifest

    def through(self, store: Store) -> tuple[Manifest, bool]:
        """The manifest of the engine that now is at `output`, and whether it came from the store."""
        reporter = self.request.reporter
        for _ in range(2):
            entry, manifest = self.obtained(store)
            if manifest is not None:
                if entry is not None:
                    entry.close()
                return manifest, False
            assert entry is not None
            with entry:
                try:
                    manifest = self._taken(entry)
                    reporter.note(f"{self.output} is the engine {entry.digest[:12]} of {store}")
                    return manifest, True
                except Damaged as error:
                    damage = str(error)
            try:
                if store.set_aside(entry.digest, reporter):  # else another has replaced it meanwhile
                    reporter.warn(f"the store's engine {entry.digest[:12]} is damaged and was put aside: {damage}")
            except OutputError as error:
                reporter.warn(error.problem)
                break
        return self.made(), False

    def _to_store(self, manifest: Manifest) -> dict[str, Path | bytes]:
        """Name in an entry → what is to be in it, of the engine at `output`."""
        graph = self.request.save_onnx
        inside = replace(manifest, graph_file=GRAPH if graph else None)
        files: dict[str, Path | bytes] = {PLAN: self.output, manifest_path(PLAN).name: json_bytes(asdict(inside))}
        if graph:
            bare = onnx.load(graph, load_external_data=False)
            files |= {GRAPH: Path(graph)} | {path.name: path for path in external_files(bare, Path(graph))}
        return files

    def _taken(self, entry: Entry) -> Manifest:
        """Write the engine of an entry to `output`, with what this request says of it; Damaged if the entry is."""
        graph, source = self.request.save_onnx, self.model.path
        try:
            entry.check(*(name for name in entry.files if name != PLAN))
            entry_manifest = load_manifest(entry.plan)
        except TrtoptError as error:
            raise Damaged(str(error)) from None
        if entry_manifest is None:
            raise Damaged("it has no manifest")
        tell_cut_off(self.request)
        manifest = replace(
            entry_manifest,
            source={**entry_manifest.source, "path": str(source) if source else None},
            graph_file=beside(self.output, graph) if graph else None,
            classes=self.classes,
            output_kinds=self._kinds(self.classes),
        )
        with writing_together(self.output, manifest_path(self.output)) as (plan, manifest_file):
            entry.copy(PLAN, plan)
            manifest_file.write_bytes(json_bytes(asdict(manifest)))
            if graph:
                save_model(load_model(entry.folder / GRAPH).proto, graph)
        return manifest

    def up_to_date(self) -> Manifest | None:
        """The manifest of the engine at `output`, if a build now would make the same one."""
        cache, graph = self.request.save_cache, self.request.save_onnx
        if not self.output.is_file() or (cache and not Path(cache).is_file()):
            return None
        try:
            manifest = load_manifest(self.output)
            if manifest is None or manifest.key != self._key() or sha256_file(self.output) != manifest.plan["sha256"]:
                return None
            graph_kept = not graph or (Path(graph).is_file() and load_model(graph).fingerprint == manifest.graph)
            return manifest if graph_kept else None
        except TrtoptError:
            return None  # unreadable: build again

    def described(self, manifest: Manifest) -> Manifest:
        """The manifest with the class names given now, if they are, and the kinds of the outputs: no plan depends on them."""
        classes = manifest.classes if self.classes is None else list(self.classes)
        reporter = self.request.reporter
        new_manifest = replace(manifest, classes=classes, output_kinds=self._kinds(classes))
        if new_manifest == manifest:
            return manifest
        path = new_manifest.save(self.output)
        if new_manifest.classes != manifest.classes:
            reporter.note(f"{path} has {len(classes or ())} class names now")
        if new_manifest.output_kinds != manifest.output_kinds:
            changes = ", ".join(f"{name}={kind}" for name, kind in (new_manifest.output_kinds or {}).items())
            reporter.note(f"{path} has kinds of outputs now: {changes}")
        return new_manifest

    def _kinds(self, classes: Sequence[str] | None) -> dict[str, str]:
        """Output name → what it holds."""
        kinds = resolve(self.model.proto, self.model.outputs, self.stated, classes)
        return {name: str(kind) for name, kind in kinds.items()}

    def _write(self, lowered: Lowered, engine: BuiltPlan, report: PrecisionReport, seconds: float) -> Manifest:
        """Write the plan, the manifest that vouches for it, and the graph if it is to be kept: all, or none."""
        graph, cache = self.request.save_onnx, self.request.save_cache
        kept_nodes = [replace(item, reason=MEASURED) if item.node in self._unsafe else item for item in lowered.kept]
        counts, summary = precision_summary(engine.layers, kept_nodes, engine.layers_unknown or report.hidden)
        generation, device, spec = self.generation, self.generation.device(self.spec), self.spec.describe()
        embedded, (inputs, profiles) = self.embedded, self._engine()
        with writing_together(self.output, manifest_path(self.output)) as (partial, partial_manifest):
            partial.write_bytes(engine.plan)
            manifest = Manifest(
                generation={name: getattr(generation, name) for name in ("family", "product", "version")}
                | {"gpu": str(device) if device else None},
                targets=[f"sm{target}" for target in engine.targets],
                spec=spec,
                precision=counts,
                precision_summary=summary,
                coverage={str(item): round(share, 6) for item, share in report.coverage.items()},
                layers=plain(engine.layers),
                kept=plain(lowered.kept),
                inputs=list(map(_tensor, inputs)),
                outputs=list(map(_tensor, self.model.outputs)),
                profiles=replace(self.spec, profiles=profiles).describe()["profiles"],
                source={"path": str(self.model.path) if self.model.path else None, "sha256": self.model.fingerprint},
                plan={"sha256": hashlib.sha256(engine.plan).hexdigest(), "bytes": memoryview(engine.plan).nbytes},
                key=self._key(),
                seconds=round(seconds, 3),
                trtopt=__version__,
                preprocess=self.preprocessing if embedded is None else embedded.outside.describe(),
                embedded=None if embedded is None else embedded.describe(),
                calibration=_summary(self.table),
                warnings=list(engine.warnings),
                graph=fingerprint(lowered.proto) if graph else None,
                graph_file=beside(self.output, graph) if graph else None,
                classes=self.classes,
                output_kinds=self._kinds(self.classes),
                safety=None if self.safety is None else self.safety.describe(),
                scratch=engine.scratch,
                compute_capabilities=list(engine.targets) or ([device.compute_capability] if device else []),
            )
            partial_manifest.write_bytes(json_bytes(asdict(manifest)))
            if graph:
                save_model(lowered.proto, graph)
            if cache and engine.native_cache is not None:
                write_bytes(cache, engine.native_cache)
            # Everything is on the disk when the first file takes its name: a full disk leaves what was there before.
        return manifest

    def result(self, manifest: Manifest, seconds: float, *, cached: bool) -> BuildResult:
        return BuildResult(
            engine=self.output,
            manifest=manifest_path(self.output),
            precision=manifest.precision,
            precision_summary=manifest.precision_summary,
            coverage=manifest.coverage,
            seconds=seconds,
            cached=cached,
            targets=tuple(manifest.targets),
            kept=converted(list(manifest.kept), tuple[Kept, ...]),
            warnings=tuple(manifest.warnings),
            onnx=Path(self.request.save_onnx) if self.request.save_onnx else None,
            table=self.table,
            safety=manifest.safety,
        )


def kept_timing(generation: Generation, device: DeviceInfo | None) -> Path | None:
    """The timing cache that builds on this GPU by this TensorRT share; None where the cache folder can't be written."""
    gpu = re.sub(r"[^\w]+", "-", str(device)).strip("-")
    try:
        path = cache_folder("timing") / f"{generation.family}-{generation.version}-{gpu}.cache"
        check_writable(path)
    except OutputError:
        return None
    with contextlib.suppress(OSError):
        if path.stat().st_size > MOST_TIMINGS:
            path.unlink()  # nobody knows which of them are still of use
    return path


def opt_shapes(inputs: Sequence[TensorInfo], profiles: Sequence[Profile]) -> list[dict[str, tuple[int, ...]]]:
    """Of all inputs, what each profile is tuned for."""
    static = {item.name: item.shape for item in inputs}
    return [
        {name: tuple(map(int, profile[name].opt if name in profile else shape)) for name, shape in static.items()}
        for profile in profiles or ({},)
    ]


def tell_cut_off(request: BuildRequest) -> None:
    """Say that an engine is going to replace one whose graph was kept, where its own isn't."""
    output, graph_file = Path(request.output), request.save_onnx
    if graph_file is None and (graph := kept_graph(output)) is not None:
        request.reporter.warn(
            f"{graph} is the graph of the engine that this one replaces, and isn't this one's: add `save_onnx='{graph}'`"
        )
    if graph_file is not None and beside(output, graph_file) is None:
        request.reporter.warn(
            f"{os.fspath(graph_file)} isn't in the folder of {output} or below it, so the manifest doesn't name it: "
            "`backend='onnxruntime'` won't find it"
        )


def _summary(table: Table | None) -> dict[str, Any] | None:
    return None if table is None else {"method": table.method, "samples": table.samples, "digest": table.digest}


def _tensor(info: TensorInfo) -> dict[str, Any]:
    """As the manifest has it: where samples lie stands there if they don't lie first."""
    description: dict[str, Any] = plain(info)
    if info.batch_axis != 0:
        return description
    return {name: value for name, value in description.items() if name != "batch_axis"}
