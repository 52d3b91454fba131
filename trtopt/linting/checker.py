"""check(): is this model valid, will the installed TensorRT take it, and what may go wrong in FP16 or INT8?"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from trtopt import trt
from trtopt.core.documents import Plain, plain
from trtopt.core.errors import (
    BackendError,
    InvalidModel,
    MissingDependency,
    ModelError,
    NoBackend,
    UnsupportedRequest,
)
from trtopt.core.options import taking
from trtopt.core.progress import Reporter
from trtopt.core.shapes import (
    NOTHING,
    Suggestion,
    batch_alone,
    parse_profiles,
    seen_sizes,
    suggested_shapes,
)
from trtopt.core.values import BuildSpec, Issue, Precision, Profile, TensorInfo, chosen_builder, parse_targets
from trtopt.data import SAMPLES, Batches, open_data
from trtopt.data.convert import single_runs
from trtopt.data.preprocess import Preprocess
from trtopt.graph.cut import cut
from trtopt.graph.fixed_inputs import fix_inputs, with_file
from trtopt.graph.guard import invalid
from trtopt.graph.half import has_half
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import Model, load_model, save_model
from trtopt.graph.lengths import max_input_lengths
from trtopt.graph.limits import instead
from trtopt.graph.op_types import QDQ
from trtopt.graph.origin import Origins
from trtopt.graph.passes.fold import FoldReport, fold
from trtopt.graph.passes.old_parser import readable_model
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.passes.typed import keep_fp32, overflowing
from trtopt.graph.prepare import prepare
from trtopt.graph.proto import tensor_info, whole_copy
from trtopt.graph.traced_batch import TracedBatch, find_traced_batch
from trtopt.graph.view import to_ir
from trtopt.linting.refusals import asked
from trtopt.linting.request import CheckRequest
from trtopt.linting.rules import LEVELS, Finding, find, one_sample, opset_findings, such
from trtopt.ort.comparison import compare
from trtopt.ort.folding import first_feeds
from trtopt.ort.ranges import beyond_fp16, measure_ranges, not_finite
from trtopt.trt.generation import Generation
from trtopt.trt.profiles import profile_problems

_PARSERS = ("custom-operator", "data-dependent-shape", "unsupported-type")  # what its parser says better, if it refuses


@dataclass(frozen=True)
class ListedNode(Plain):
    """A node of the folded graph.

    Attributes:
        shape: of its first result, for people; empty: not known.
        precision: what `build --int8` asks for: "int8", "fp16", "fp32", or the type of a result that isn't floating.
        reason: why not INT8, where it could have been asked for, or why not FP16.
    """

    name: str
    op: str
    shape: str
    precision: str
    reason: str = ""


@dataclass(frozen=True)
class CheckReport:
    """Report of a check.

    Attributes:
        model: the path, or "the model".
        findings: errors first.
        inputs, outputs, opset, fingerprint: of the model as given; empty and 0 where it isn't valid.
        folding: nodes before and after folding; None where the model isn't valid.
        parser: the TensorRT whose parser was asked, or None (a finding says why not).
        fixed: the cleaned model that was written, if any.
        verified: None: nothing was written; True: the cleaned model's outputs are the same in ONNX Runtime; False: that
            couldn't be tried (a finding says why).
        shapes: the `shapes=` option to build with, and what of it is a guess; empty where build needs none or one was given.
        nodes: of the folded graph, if they were asked for: the names that --precision-override takes.
    """

    model: str
    findings: tuple[Finding, ...]
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    opset: int = 0
    fingerprint: str = ""
    folding: FoldReport | None = None
    parser: str | None = None
    fixed: Path | None = None
    verified: bool | None = None
    shapes: Suggestion = NOTHING
    nodes: tuple[ListedNode, ...] = ()

    @property
    def ok(self) -> bool:
        """No errors."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def summary(self) -> str:
        return "\n".join(self.summary_lines)

    @property
    def summary_lines(self) -> tuple[str, ...]:
        counts = {level: sum(finding.level == level for finding in self.findings) for level in LEVELS}
        numbers = (f"{count} {level}{'s' * (count != 1 and level != 'info')}" for level, count in counts.items())
        text = f"{self.model}: {', '.join(numbers)}; parser asked: {self.parser or 'none'}"
        if self.fixed:
            text += f"; wrote {self.fixed}, " + ("outputs unchanged" if self.verified else "not verified")
        lines = [text, *([f"  folded, as a build does: {self.folding}"] if self.folding else [])]
        if self.shapes.option:
            lines.append(f"build needs the range of what is left open: {self.shapes.option}")
        if self.shapes.guesses:
            lines.append(f"  adapt these guesses (min,opt,max): {'; '.join(self.shapes.guesses)}")
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        folding = self.folding.to_json() if self.folding else None
        return {**plain(self), "ok": self.ok, "folding": folding, "shapes": plain(self.shapes._asdict())}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), self.summary])


@taking(CheckRequest)
def check(request: CheckRequest) -> CheckReport:
    """Check a model: validity, operators the installed parser refuses, precision hazards.

    An invalid model is a finding, not an exception. The hazards are those of the folded graph, which is what is built.

    Args:
        fix: write the cleaned model here, if ONNX Runtime gives the same outputs (on seeded synthetic inputs) or isn't
            installed: folded, at an opset that the backend reads, for any batch where constants held a batch of 1.
        set: values or sizes of inputs, before all else: "sr=16000", "x:batchx576" (batch counts samples).
        outputs: tensors that the model is to end at; nodes and inputs that these don't need go.
        backend, target: whose parser to ask, and compute capabilities to build for, such as "sm89".
        shapes: profiles, as for `build`, to check against the inputs.
        images, data, preprocess, limit: real samples, as for `build`: what isn't finite on them, or wouldn't be in FP16.
        nodes: list the nodes too, and what an INT8 build makes of each.

    Raises:
        UsageError: the file doesn't exist, or an option can't be right.
        NoBackend: `backend` names one that isn't installed ("auto" only says that no parser was asked).
        OutputError: `fix` can't be written.
    """
    reporter = request.reporter
    chosen_builder(request.backend)
    targets = parse_targets(request.target)
    profiles = parse_profiles(request.shapes)
    name = "the model" if isinstance(request.model, ModelProto) else os.fspath(request.model)
    try:
        with reporter.phase("read and validate"):
            loaded = load_model(request.model, lazy=True)
            fingerprint = loaded.fingerprint
            if request.set:
                loaded = replace(load_model(fix_inputs(loaded.proto, request.set)), path=loaded.path)
            if request.outputs:
                loaded = replace(load_model(cut(loaded.proto, request.outputs)), path=loaded.path)
    except InvalidModel as error:
        return CheckReport(name, (Finding("error", "invalid-model", "", "", str(error)),))
    prepared = prepare(loaded, reporter=reporter)
    folded, folding = prepared.proto, prepared.report
    findings = [*find(folded)]
    if folding.problem:
        ours = "Error: " in folding.problem  # an exception's name: nothing that its maker could mend
        hint = "it is built as it is" + "; please report the model" * ours
        findings.append(Finding("warning", "folding-incomplete", "", "", folding.warning, hint))
    generation, reason = None, ""
    try:
        generation = trt.select(request.backend)
    except NoBackend as error:
        if request.backend != "auto":
            raise
        reason = str(error)
    can = generation.capabilities if generation else None
    limit = can.max_opset if can else None
    findings += opset_findings(folded, limit, str(generation))
    values: dict[str, int] = {}
    if generation is not None:
        with reporter.phase("ask the parser"):
            try:
                answers, values = _ask(generation, loaded, folded)
                told = {answer.op or answer.node for answer in answers if answer.level == "error"}
                findings = [
                    item for item in findings if item.code not in _PARSERS or (item.op or item.node) not in told
                ]
                findings += answers
            except BackendError as error:
                reason = str(error)
    if reason:
        text = f"no TensorRT parser was asked about operators: {reason}"
        findings.append(Finding("warning", "parser-not-asked", "", "", text))
    findings += _request(generation, loaded, folded, targets, profiles)
    samples: Batches | None = None
    if request.images is not None or request.data is not None:
        samples = _samples(request, loaded, profiles)
        with reporter.phase("measuring ranges"):
            findings += _ranges(samples, folded)
    suggestion, batches_alone = NOTHING, batch_alone(loaded.inputs)
    if not profiles and not (batches_alone and not values):  # a build has a range of batches by itself
        seen = seen_sizes(loaded.inputs, samples) if samples is not None and not batches_alone else {}
        longest = max_input_lengths(folded)
        suggestion = suggested_shapes(loaded.inputs, values=values, longest=longest, seen=seen)
    held = _held(loaded.proto, folded)
    output, verified, opened = None, None, False
    if request.fix is not None:
        with reporter.phase("clean and compare"):
            how = {"profiles": profiles, "samples": first_feeds(loaded.proto, samples or ())}
            problems, verified, opened = _fix(loaded, folded, held, Path(request.fix), limit, how)
            findings += problems
            output = None if any(item.level == "error" for item in problems) else Path(request.fix)
    for finding in one_sample(held, loaded.inputs, profiles):
        hint = f"{output} takes any batch; its results are those of each sample alone"
        findings.append(replace(finding, level="info", hint=hint) if opened else finding)
    if not isinstance(request.model, ModelProto):
        findings = [replace(item, hint=with_file(item.hint, name)) for item in findings]
    return CheckReport(
        model=name,
        findings=tuple(sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))),
        inputs=loaded.inputs,
        outputs=loaded.outputs,
        opset=loaded.opset,
        fingerprint=fingerprint,
        folding=folding,
        parser=None if reason else str(generation),
        fixed=output,
        verified=verified if output else None,
        shapes=suggestion,
        nodes=_listed(to_ir(folded), *((can.float_only, can.quantized_between) if can else ()))
        if request.nodes
        else (),
    )


def _ask(generation: Generation, model: Model, folded: ModelProto) -> tuple[list[Finding], dict[str, int]]:
    """Return what the installed parser refuses, and the inputs whose values decide shapes, with their lengths.

    Operators that a build would write out aren't refused.
    """
    notes = _Texts()
    graph, issues, values = asked(generation, folded, notes)
    origins = Origins(model.proto, graph)
    alike: dict[tuple[str, str], list[Issue]] = {}
    for issue in issues:  # the same reason, whatever tensors it names
        alike.setdefault((issue.op, re.sub(r"'[^']*'", "", issue.reason)), []).append(issue)
    findings = []
    for issue, *others in alike.values():
        origin = f" ({origin})" if (origin := origins.of(issue.node)) else ""
        text = f"{generation}: {issue.reason}{origin}{such([issue.node, *(other.node for other in others)])}"
        hint = instead(graph, {issue.op}, model.proto, model.path) if issue.op else ""
        if not hint and not re.search("[:;] ", issue.reason):  # which says what to do
            hint = "replace it, or move that part outside the engine"
        findings.append(Finding("error", "unsupported-operator", issue.node, issue.op, text, hint))
    rewrites = [Finding("info", "written-out", "", "", text) for text in notes.texts]
    text = "its values decide shapes inside, so `shapes=` bounds them, not its own shape"
    shape_inputs = [Finding("info", "shape-input", name, "", text) for name, _ in values]
    return [*findings, *rewrites, *shape_inputs], dict(values)


class _Texts(Reporter):
    """Texts of notes and warnings, for findings of their own."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)

    note = warn


def _samples(request: CheckRequest, model: Model, profiles: Sequence[Profile]) -> Batches:
    preprocess = request.preprocess
    if preprocess is not None and request.images is not None:
        preprocess = Preprocess.load(preprocess).at_opt(model.inputs, profiles)
    return open_data(
        model.inputs,
        images=request.images,
        data=request.data,
        preprocess=preprocess,
        limit=SAMPLES if request.limit is None else request.limit,
        reporter=request.reporter,
    )


def _ranges(samples: Batches, folded: ModelProto) -> Iterator[Finding]:
    """Return what samples show: values that aren't finite, or wouldn't be in FP16."""
    try:
        ranges = measure_ranges(folded, (run.feed for run in single_runs(network_inputs(folded), samples)))
    except ModelError as error:
        yield Finding("warning", "not-run", "", "", f"the model can't be run on the samples: {error}")
        return
    operators = {node.name: node.op_type for node in folded.graph.node}
    broken = not_finite(folded, ranges)
    for node, what in broken.items():
        hint = "look at the samples, their preprocessing and the weights"
        if has_half(folded):
            hint = "export the model in FP32: `fp16=True` with the same samples keeps such nodes in FP32"
        yield Finding("error", "not-finite", node, operators[node], what, hint)
    if not has_half(folded):
        for node, what in overflowing(to_ir(folded), beyond_fp16(ranges)).items():
            hint = "`fp16=True` with the same samples keeps it in FP32"
            yield Finding("warning", "fp16-overflow", node, operators[node], what, hint)


def _request(
    generation: Generation | None,
    model: Model,
    folded: ModelProto,
    targets: tuple[int, ...],
    profiles: Sequence[Profile],
) -> Iterator[Finding]:
    """Targets and shapes, as a build would see them."""
    ends = max_input_lengths(folded)
    for info in model.inputs:
        for axis, size in enumerate(info.shape):
            if isinstance(size, int) and size > (end := ends.get((info.name, axis), size)):
                text = f"axis {axis} is {size}, and the model's position embeddings end at {end}: filled, it reads past them"
                yield Finding("warning", "positions", info.name, "", text, f"export it with at most {end}")
    for problem in profile_problems(model.inputs, profiles, longest=ends) if profiles else ():
        line = suggested_shapes(model.inputs, profiles[0], longest=ends)
        yield Finding("error", "shapes", "", "", problem, f"write {line}" if line.option else "no size is open")
    if targets and generation is not None:
        cautions = _Texts()
        try:
            generation.refuse(BuildSpec(targets=targets), cautions)
        except UnsupportedRequest as error:
            yield Finding("error", "target", "", "", str(error))
        int8 = BuildSpec(precision=Precision.INT8, targets=targets, allow_precision_fallback=True)
        with contextlib.suppress(UnsupportedRequest):  # what INT8 would lose; whether it is wanted isn't known here
            generation.refuse(int8, cautions)
        for text in dict.fromkeys(cautions.texts):
            yield Finding("warning", "target", "", "", text)


def _held(original: ModelProto, folded: ModelProto) -> TracedBatch:
    """Return where the model holds a batch of 1; opened as it came, where folding hides what belongs there."""
    held = find_traced_batch(folded)
    if not held.issues:
        return held
    before = find_traced_batch(original)
    return before if before.dynamic_model is not None else held


def _fix(
    model: Model, folded: ModelProto, held: TracedBatch, output: Path, limit: int | None, how: Mapping[str, Any]
) -> tuple[list[Finding], bool, bool]:
    """Write the cleaned model if it computes the same; findings, whether that was tried, and whether it is for any batch.

    Args:
        how: profiles and samples, for `compare`.
    """
    findings = list[Finding]()
    lost = "report the model; build folds less then, and with `min_snr=30` and samples judges the engine by the model itself"
    if held.dynamic_model is not None:
        cleaned, kept = _cleaned(fold(held.dynamic_model)[0], limit)
        try:
            gap = invalid(cleaned) or compare(model.proto, cleaned, model.inputs, profiles=how["profiles"], opened=True)
        except (MissingDependency, ModelError) as error:
            gap = f"they weren't compared: {error}"
        if not gap:
            save_model(cleaned, output)
            return kept, True, True
        text = f"the batch of 1 stays: with any batch, samples don't give what each gives alone ({gap[:300]})"
        findings.append(Finding("warning", "batch-kept", "", "", text))
    cleaned, kept = _cleaned(folded, limit)
    findings += kept
    if problem := invalid(cleaned):
        text = f"the cleaned model isn't valid ({problem}); it wasn't written"
        return [*findings, Finding("error", "fix-invalid", "", "", text, lost)], True, False
    verified = True
    try:
        if gap := compare(model.proto, cleaned, model.inputs, **how):
            text = f"the cleaned model computes something else ({gap}); it wasn't written"
            return [*findings, Finding("error", "fix-changed-outputs", "", "", text, lost)], True, False
    except (MissingDependency, ModelError) as error:
        verified, text = False, f"the cleaned model wasn't compared: {' '.join(str(error).split())}"
        hint = "where the original doesn't run on made-up inputs, give `shapes=`, or real samples as `data='F.npz'`"
        findings.append(Finding("warning", "fix-not-verified", "", "", text, hint))
    save_model(cleaned, output)
    return findings, verified, False


def _cleaned(folded: ModelProto, limit: int | None) -> tuple[ModelProto, list[Finding]]:
    """Lower a graph to the opset that a generation reads, if that can be."""
    cleaned, findings = whole_copy(folded), list[Finding]()
    try:
        cleaned = readable_model(cleaned, limit)
    except ModelError as error:
        findings.append(Finding("warning", "opset-kept", "", "", str(error)))
    return cleaned, findings


def _listed(
    model: ir.Model, float_only: Mapping[str, str] | None = None, between: Mapping[str, str] | None = None
) -> tuple[ListedNode, ...]:
    """List the nodes of the main graph, for a target that can't run `float_only` quantized (see `trt.Capabilities`)."""
    quantized = any(node.op_type in QDQ for node in model.graph)
    points = Points({}) if quantized else find_points(model, excluded=float_only, between=between)
    precisions = {item.node: (str(item.precision), item.reason) for item in points.kept}
    precisions |= {item.node: (str(item.precision), item.reason) for item in keep_fp32(model, Precision.FP16)}
    precisions |= {name: ("int8", "reads it quantized") for readers in points.reads.values() for name, _ in readers}
    precisions |= dict.fromkeys(points.quantized, ("int8", ""))
    nodes = []
    for node in model.graph:
        precision, reason = precisions.get(str(node.name), ("fp16", ""))
        producers = (value.producer() for value in node.inputs if value is not None)
        known = bool(node.outputs) and node.outputs[0].type is not None
        info = tensor_info(ir.to_proto(node.outputs[0])) if known else TensorInfo("", "")
        dtype, shape = info.dtype, info.dims if known else ""
        if any(producer is not None and producer.op_type == "DequantizeLinear" for producer in producers):
            precision, reason = "int8", "its Q/DQ in the model say so"
        elif dtype and dtype != "float32":
            precision, reason = {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, dtype), ""
        nodes.append(ListedNode(str(node.name), node.op_type, shape, precision, reason))
    return tuple(nodes)
