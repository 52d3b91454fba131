"""check(): is this model valid, will the installed TensorRT take it, and what may go wrong in FP16 or INT8?"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from trtopt import trt
from trtopt.core.documents import Plain, plain
from trtopt.core.errors import BackendError, InvalidModel, MissingDependency, ModelError, UnsupportedRequest
from trtopt.core.options import taking
from trtopt.core.progress import Warnings
from trtopt.core.shapes import NOTHING, Suggestion, batch_alone, by_input, parse_profiles, seen_sizes, suggested_shapes
from trtopt.core.values import BuildSpec, Precision, Profile, TensorInfo, chosen_builder, parse_targets
from trtopt.data import SAMPLES, Batches, open_data, samples_of
from trtopt.data.convert import single_runs
from trtopt.data.preprocess import Preprocess
from trtopt.graph.cut import cut
from trtopt.graph.fixed_inputs import fix_inputs, with_file
from trtopt.graph.guard import invalid
from trtopt.graph.half import has_half
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import Model, load_model, save_model
from trtopt.graph.limits import instead
from trtopt.graph.op_types import QDQ
from trtopt.graph.origin import Origins
from trtopt.graph.passes.fold import FoldReport, fold
from trtopt.graph.passes.old_parser import readable_model
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.passes.typed import keep_fp32, overflowing
from trtopt.graph.prepare import FoldedModel, prepare, taken
from trtopt.graph.proto import tensor_info, whole_copy
from trtopt.graph.traced_batch import find_traced_batch
from trtopt.graph.view import to_ir
from trtopt.linting.refusals import asked
from trtopt.linting.request import CheckRequest
from trtopt.linting.rules import LEVELS, Finding, alike, find, one_sample, opset_findings
from trtopt.ort.comparison import compare
from trtopt.ort.folding import first_feeds
from trtopt.ort.ranges import beyond_fp16, measure_ranges, not_finite
from trtopt.trt.capabilities import Capabilities
from trtopt.trt.generation import Generation
from trtopt.trt.profiles import profile_problems

_PARSERS = ("custom-operator", "data-dependent-shape", "unsupported-type")  # what its parser says better, if it refuses
_LOST = (
    "report the model; build folds less then, and with `min_snr=30` and samples judges the engine by the model itself"
)


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
    def summary_lines(self) -> tuple[str, ...]:
        counts = {level: sum(finding.level == level for finding in self.findings) for level in LEVELS}
        numbers = (f"{count} {level}{'s' * (count != 1 and level != 'info')}" for level, count in counts.items())
        text = f"{self.model}: {', '.join(numbers)}; parser asked: {self.parser or 'none'}"
        if self.fixed:
            moved = any(item.code == "taken-in" and item.level == "warning" for item in self.findings)
            same = "outputs as far from the model's as its new scales are" if moved else "outputs unchanged"
            text += f"; wrote {self.fixed}, {same if self.verified else 'not verified'}"
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
        return "\n".join([*map(str, self.findings), *self.summary_lines])


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
    chosen_builder(request.backend)
    targets, profiles = parse_targets(request.target), parse_profiles(request.shapes)
    name = "the model" if isinstance(request.model, ModelProto) else os.fspath(request.model)
    try:
        with request.reporter.phase("read and validate"):
            loaded, fingerprint = _loaded(request)
    except InvalidModel as error:
        return CheckReport(name, (Finding("error", "invalid-model", "", "", str(error)),))
    prepared = prepare(loaded, reporter=request.reporter)
    folded, folding = prepared.proto, prepared.report
    checking = _Check(request, loaded, prepared, by_input(profiles, loaded.inputs), list(find(folded)))
    if (given := taken(loaded)).refused:
        checking.findings.append(Finding("error", "integer-operator", "", "", given.refused))
    elif given.changes:
        checking.findings.append(Finding("info" if given.exact else "warning", "taken-in", "", "", str(given)))
    if folding.problem:
        ours = "Error: " in folding.problem  # an exception's name: nothing that its maker could mend
        hint = "it is built as it is" + "; please report the model" * ours
        checking.findings.append(Finding("warning", "folding-incomplete", "", "", folding.warning, hint))
    checking.ask_parser()
    checking.findings += checking.ask_build(targets)
    checking.run_samples()
    shapes = checking.shapes()
    fixed, verified = checking.fix()
    findings = [replace(item, hint=with_file(item.hint, loaded.path)) for item in checking.findings]
    return CheckReport(
        model=name,
        findings=tuple(sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))),
        inputs=loaded.inputs,
        outputs=loaded.outputs,
        opset=loaded.opset,
        fingerprint=fingerprint,
        folding=folding,
        parser=checking.parser,
        fixed=fixed,
        verified=verified,
        shapes=shapes,
        nodes=_listed(to_ir(folded), checking.can) if request.nodes else (),
    )


def _loaded(request: CheckRequest) -> tuple[Model, str]:
    """Read the model with what was decided of it, and its fingerprint before that."""
    loaded = load_model(request.model, lazy=True)
    fingerprint = loaded.fingerprint
    if request.set:
        loaded = replace(load_model(fix_inputs(loaded.proto, request.set)), path=loaded.path)
    if request.outputs:
        loaded = replace(load_model(cut(loaded.proto, request.outputs)), path=loaded.path)
    return loaded, fingerprint


@dataclass
class _Check:
    """A valid model, and what was found so far.

    Attributes:
        parser: the TensorRT whose parser was asked.
        values: of the inputs whose values decide shapes, their lengths.
    """

    request: CheckRequest
    model: Model
    prepared: FoldedModel
    profiles: Sequence[Profile]
    findings: list[Finding]
    generation: Generation | None = None
    parser: str | None = None
    values: dict[str, int] = field(default_factory=dict)
    samples: Batches | None = None

    @property
    def can(self) -> Capabilities | None:
        return self.generation.capabilities if self.generation else None

    def ask_parser(self) -> None:
        """Find the TensorRT that is asked for, and what it refuses."""
        folded = self.prepared.proto
        try:
            self.generation = generation = trt.select(self.request.backend)
            self.findings += opset_findings(folded, generation.capabilities, str(generation))
            generation.compile_operators(folded, BuildSpec(backend=self.request.backend), self.request.reporter)
            with self.request.reporter.phase("ask the parser"):
                answers, self.values = _ask(generation, self.model, folded)
        except BackendError as error:
            if self.generation is None and self.request.backend != "auto":
                raise
            text = f"no TensorRT parser was asked about operators: {error}"
            self.findings.append(Finding("warning", "parser-not-asked", "", "", text))
        else:
            told = {answer.op or answer.node for answer in answers if answer.level == "error"}
            others = (it for it in self.findings if it.code not in _PARSERS or (it.op or it.node) not in told)
            self.findings = [*others, *answers]
            self.parser = str(generation)

    def ask_build(self, targets: tuple[int, ...]) -> Iterator[Finding]:
        """Look at targets and shapes as a build would."""
        inputs, longest = self.model.inputs, self.prepared.max_lengths
        for problem in profile_problems(inputs, self.profiles, longest=longest) if self.profiles else ():
            line = suggested_shapes(inputs, self.profiles[0], longest=longest)
            yield Finding("error", "shapes", "", "", problem, f"write {line}" if line.option else "no size is open")
        if targets and self.generation is not None:
            cautions = _Texts()
            try:
                self.generation.refuse(BuildSpec(targets=targets), cautions)
            except UnsupportedRequest as error:
                yield Finding("error", "target", "", "", str(error))
            int8 = BuildSpec(precision=Precision.INT8, targets=targets, allow_precision_fallback=True)
            with contextlib.suppress(UnsupportedRequest):  # what INT8 would lose; whether it is wanted isn't known here
                self.generation.refuse(int8, cautions)
            for text in dict.fromkeys(cautions.texts):
                yield Finding("warning", "target", "", "", text)

    def run_samples(self) -> None:
        """Find what samples show, where there are any."""
        request, preprocess = self.request, self.request.preprocess
        if request.images is None and request.data is None:
            return
        if preprocess is not None and request.images is not None:
            preprocess = Preprocess.load(preprocess).at_opt(self.model.inputs, self.profiles)
        limit = SAMPLES if request.limit is None else request.limit
        source = {**samples_of(request), "preprocess": preprocess, "limit": limit}
        self.samples = open_data(self.model.inputs, **source, reporter=request.reporter)
        with request.reporter.phase("measuring ranges"):
            self.findings += _ranges(self.samples, self.prepared.proto)

    def shapes(self) -> Suggestion:
        """Suggest ranges of what is left open; none where the batch alone is, of which a build has a range by itself."""
        inputs, batches_alone = self.model.inputs, batch_alone(self.model.inputs)
        if self.profiles or (batches_alone and not self.values):
            return NOTHING
        seen = seen_sizes(inputs, self.samples) if self.samples is not None and not batches_alone else {}
        return suggested_shapes(inputs, values=self.values, longest=self.prepared.max_lengths, seen=seen)

    def fix(self) -> tuple[Path | None, bool | None]:
        """Say where a batch of 1 is held, and write the cleaned model where it is asked for and computes the same; where it was
        written, and whether its outputs were compared."""
        held, output, verified, opened = find_traced_batch(self.prepared.proto), None, None, False
        if held.issues:  # opened as it came, where folding hides what belongs there
            before = find_traced_batch(taken(self.model).proto)
            held = before if before.dynamic_model is not None else held
        if self.request.fix is not None:
            output = Path(self.request.fix)
            with self.request.reporter.phase("clean and compare"):
                dynamic = held.dynamic_model
                opened = dynamic is not None and bool(self._write(fold(dynamic)[0], output, opened=True))
                verified = opened or self._write(self.prepared.proto, output)
        for finding in one_sample(held, self.model.inputs, self.profiles):
            hint = f"{output} takes any batch; its results are those of each sample alone"
            self.findings.append(replace(finding, level="info", hint=hint) if opened else finding)
        return output if verified is not None else None, verified

    def _write(self, folded: ModelProto, output: Path, *, opened: bool = False) -> bool | None:
        """Write a folded model where it computes the same or, `opened` for any batch, gives what each sample gives alone.

        Returns:
            whether that was seen; None where it doesn't, and wasn't written.
        """
        cleaned, kept = _lowered(folded, self.can)
        samples = () if opened else first_feeds(self.model.proto, self.samples or ())
        how: Any = {"profiles": self.profiles, "samples": samples, "opened": opened}
        gap = unknown = ""
        try:
            gap = invalid(cleaned) or compare(taken(self.model).proto, cleaned, self.model.inputs, **how)
        except (MissingDependency, ModelError) as error:
            unknown = " ".join(str(error).split())
        if opened and (gap or unknown):
            why = gap or f"they weren't compared: {unknown}"
            text = f"the batch of 1 stays: with any batch, samples don't give what each gives alone ({why[:300]})"
            self.findings.append(Finding("warning", "batch-kept", "", "", text))
            return None
        self.findings += kept
        if gap:
            text = f"the cleaned model computes something else ({gap}); it wasn't written"
            self.findings.append(Finding("error", "fix-changed-outputs", "", "", text, _LOST))
            return None
        if unknown:
            text = f"the cleaned model wasn't compared: {unknown}"
            hint = "where the original doesn't run on made-up inputs, give `shapes=`, or real samples as `data='F.npz'`"
            self.findings.append(Finding("warning", "fix-not-verified", "", "", text, hint))
        save_model(cleaned, output)
        return not unknown


def _ask(generation: Generation, model: Model, folded: ModelProto) -> tuple[list[Finding], dict[str, int]]:
    """Return what the installed parser refuses, and the inputs whose values decide shapes, with their lengths.

    Operators that a build would write out aren't refused.
    """
    notes = _Texts()
    graph, issues, values = asked(generation, folded, notes)
    origins, findings = Origins(model.proto, graph), list[Finding]()
    for issue, others in alike(issues, r"'[^']*'"):  # whatever tensors it names
        origin = f" ({origin})" if (origin := origins.of(issue.node)) else ""
        hint = instead(graph, {issue.op}, model.proto, model.path) if issue.op else ""
        if not hint and not re.search("[:;] ", issue.reason):  # which says what to do
            hint = "replace it, or move that part outside the engine"
        text = f"{generation}: {issue.reason}{origin}{others}"
        findings.append(Finding("error", "unsupported-operator", issue.node, issue.op, text, hint))
    findings += (Finding("info", "written-out", "", "", text) for text in notes.texts)
    text = "its values decide shapes inside, so `shapes=` bounds them, not its own shape"
    findings += (Finding("info", "shape-input", name, "", text) for name, _ in values)
    return findings, dict(values)


class _Texts(Warnings):
    """Texts of notes and warnings, for findings of their own."""

    note = Warnings.warn


def _ranges(samples: Batches, folded: ModelProto) -> Iterator[Finding]:
    """Return what samples show: values that aren't finite, or wouldn't be in FP16."""
    try:
        ranges = measure_ranges(folded, (run.feed for run in single_runs(network_inputs(folded), samples)))
    except ModelError as error:
        yield Finding("warning", "not-run", "", "", f"the model can't be run on the samples: {error}")
        return
    operators = {node.name: node.op_type for node in folded.graph.node}
    hint = "look at the samples, their preprocessing and the weights"
    if half := has_half(folded):
        hint = "export the model in FP32: `fp16=True` with the same samples keeps such nodes in FP32"
    for node, what in not_finite(folded, ranges).items():
        yield Finding("error", "not-finite", node, operators[node], what, hint)
    if not half:
        for node, what in overflowing(to_ir(folded), beyond_fp16(ranges)).items():
            hint = "`fp16=True` with the same samples keeps it in FP32"
            yield Finding("warning", "fp16-overflow", node, operators[node], what, hint)


def _lowered(folded: ModelProto, can: Capabilities | None) -> tuple[ModelProto, list[Finding]]:
    """Lower a graph to the opset that a generation reads, if that can be."""
    try:
        return readable_model(whole_copy(folded), can.max_opset if can else None), []
    except ModelError as error:
        return whole_copy(folded), [Finding("warning", "opset-kept", "", "", str(error))]


def _listed(model: ir.Model, can: Capabilities | None) -> tuple[ListedNode, ...]:
    """List the nodes of the main graph, for a target of these capabilities."""
    lacking: Any = {"excluded": can.floating(Precision.INT8), "between": can.quantized_between} if can else {}
    quantized = any(node.op_type in QDQ for node in model.graph)
    points = Points({}) if quantized else find_points(model, **lacking)
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
