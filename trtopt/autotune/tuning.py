"""The fastest choice within an accuracy limit: which layers stay out of INT8, and how the weights of the others are rounded.

Where INT8 everywhere isn't within the limits, weights are repaired (`trtopt.calibration.repairing`), which also tells the noise
that each layer makes, and layers are left out (`trtopt.autotune.search`). Every choice is judged by the real Q/DQ graph on real
samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import onnx_ir as ir
from onnx import ModelProto

from trtopt.autotune.goal import PURPOSE, AccuracyEvaluator, Goal, TunedChoice, too_few
from trtopt.autotune.search import Choices, Measured
from trtopt.builder.asked import spec_of
from trtopt.builder.execute import opt_shapes
from trtopt.builder.lowering import in_fp32_types, lower
from trtopt.builder.plan import plan_build
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import preparation, real_samples
from trtopt.calibration import prepared
from trtopt.calibration.calibrator import CalibrateResult, calibrated_for
from trtopt.calibration.importing import kept_out, without_scales
from trtopt.calibration.prepared import refuse_quantized
from trtopt.calibration.repairing import NoiseByPlace
from trtopt.calibration.scales import may_stand_beside
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache
from trtopt.core.documents import Damaged, converted, plain, read_json
from trtopt.core.errors import AccuracyLost, OutputError, TrtoptError, UsageError
from trtopt.core.files import cache_folder, sha256_json, write_json
from trtopt.core.host import cores
from trtopt.core.progress import SILENT
from trtopt.core.values import METHODS, Precision, check_overrides
from trtopt.core.version import MAKER
from trtopt.core.words import counted
from trtopt.data import SAMPLES
from trtopt.evaluation.limits import without_share
from trtopt.evaluation.verify import kinds_of
from trtopt.graph.half import fp32_typed, has_half
from trtopt.graph.io import load_model
from trtopt.graph.limits import ending_before
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import Points, find_points, gates_of
from trtopt.graph.passes.quantize import FORMATS, check_scales
from trtopt.graph.passes.smooth import smoothed
from trtopt.graph.passes.typed import overflowing
from trtopt.graph.proto import in_memory
from trtopt.graph.view import to_ir, to_proto
from trtopt.graph.work import macs, sizes_in
from trtopt.ort.folding import proven
from trtopt.ort.sessions import version as ort_version

Content = TypeVar("Content")
Work = Mapping[str, int]  # node → multiply-accumulates


@dataclass(frozen=True)
class Tuning:
    """The choice that was found.

    Attributes:
        table: the scales, with the repairs and the layers that stay out.
        samples: that judged.
        before: INT8 everywhere with the scales as they are; whole: with the repairs, where these were needed; chosen: what is
            in the table.
        front: the choices that were tried and that no other beats in both the share in INT8 and accuracy, by share.
        tried: how many choices were.
        cost: in what layers were weighed.
        timed: layers were weighed by their times on a GPU.
    """

    table: Table
    samples: int
    before: TunedChoice
    whole: TunedChoice
    chosen: TunedChoice
    front: tuple[TunedChoice, ...]
    tried: int
    cost: str
    seconds: float
    timed: bool = False

    @property
    def left_out(self) -> Mapping[str, str]:
        """Node name → why it stays out of INT8."""
        return self.table.left_out

    def __str__(self) -> str:
        table, out = self.table, "no layer has to stay out"
        if self.left_out:
            out = f"{counted(len(self.left_out), 'layer')} out of INT8, {self.chosen.share:.1%} of the arithmetic in it"
        out += ", squeeze-and-excite in INT8, too" * bool(table.gates) + ", scales beside the graph" * table.beside
        out += f", {counted(len(table.repairs), 'weight')} rounded by their inputs" * bool(table.repairs)
        out += f", {counted(len(table.smoothed), 'activation')} with channels scaled alike" * bool(table.smoothed)
        out += ", nothing repaired" * (not table.repairs and not table.smoothed)
        figure = f", {self.chosen.figure}" if self.chosen.figure else ""
        decibels = f"{self.before.snr_db:.1f} → {self.chosen.snr_db:.1f} dB on {counted(self.samples, 'sample')}"
        return f"{out}: {decibels}{figure}; {counted(self.tried, 'choice')} in {self.seconds:.0f} s"

    def to_json(self) -> dict[str, Any]:
        description = plain({name: value for name, value in vars(self).items() if name != "table"})
        return {
            **description,
            "seconds": round(self.seconds, 3),
            "left_out": dict(self.left_out),
            "gates": list(self.table.gates),
            "repaired": list(self.table.repairs),
            "digest": self.table.digest,
        }


# Looking for one ---------------------------------------------------------------------------------------------------------


class _Subject:
    """The model of a request, and what a builder would be given of it.

    Attributes:
        given: the table that `calib` names.
        shapes: that the engine is tuned for.
    """

    def __init__(self, request: BuildRequest) -> None:
        """Refuse before long work what can't be built, or has no layers to choose."""
        if is_cache(request.calib):
            raise UsageError(
                f"`calib='{request.calib}'` is a TensorRT cache, and a search begins with a table: trtopt calibrate MODEL.onnx "
                f"--import-cache {request.calib} -o T.calib.json, then `calib='T.calib.json'`"
            )
        self.request, self.given = request, None if request.calib is None else Table.load(request.calib)
        self.model = model = load_model(request.model)
        refuse_quantized(model)
        prepared_by = request.preprocess
        if prepared_by is None and self.given and (request.images is not None or request.embed_preprocess):
            prepared_by = self.given.preprocess
        # The build says what there is to say.
        plan = plan_build(replace(request, calib=None, preprocess=prepared_by, reporter=SILENT))
        self.spec, self.generation = plan.spec, plan.generation
        if not any(item.floating for item in model.outputs):
            types = ", ".join(f"{item.name} is {item.dtype}" for item in model.outputs)
            cut = ending_before(model.proto, ("ArgMax", "ArgMin", "TopK"), model.path)
            raise UsageError(
                f"no output is floating ({types}), so nothing says which layers lose: give the model that ends with the scores"
                + f" ({cut})" * bool(cut)
            )
        read = (real_samples(model, those) for those in (request,))  # where folding needs them
        self.folded = proven(model, samples=chain.from_iterable(read), reporter=request.reporter)
        check_overrides(self.spec.overrides, self.folded.proto.graph.node)
        self.preprocess, self.shapes = preparation(model, request), opt_shapes(model.inputs, self.spec.profiles)
        # Of what decides which repairs are found.
        self.key = {
            "trtopt": MAKER,
            "onnxruntime": ort_version(PURPOSE),
            "model": self.folded.fingerprint,
            "table": None if self.given is None else self.given.digest,
            "method": request.method,
            "overrides": list(request.precision_override),
            "data": real_samples(model, request, None).describe(),
            "preprocess": None if self.preprocess is None else self.preprocess.describe(),
        }

    @cached_property
    def original(self) -> ModelProto:
        """Return it in FP32, at the opset of Q/DQ graphs."""
        return to_proto(to_ir_at(in_memory(fp32_typed(self.folded.proto)[0]), FORMATS[Precision.INT8].opset))

    @cached_property
    def gates(self) -> tuple[str, ...]:
        """Squeeze-and-excite that may be faster in INT8."""
        return gates_of(to_ir(self.original)) if self.generation.capabilities.gates_in_int8 else ()

    def measures_more(self, table: Table | None) -> bool:
        """Return whether choices need more scales than a placement, which are measured, or which this table has."""
        wanted = bool(self.gates) or may_stand_beside(self.spec, self.generation.capabilities)
        if not wanted or table is None:
            return wanted
        graph = to_ir(smoothed(self.original, table.smoothed))
        return table.tensors.keys() >= set(self.points(graph, (), gates_of(graph)).activations)

    def always_out(self, table: Table) -> tuple[str, ...]:
        """Return what `lower` keeps out of INT8 in every choice: by its values, without a scale, or FP32 in an FP16 model."""
        beyond = overflowing(to_ir(self.original), table.beyond_fp16) if self.spec.base is Precision.FP16 else {}
        islands = in_fp32_types(self.folded.proto)[1] if has_half(self.folded.proto) else {}
        return (*beyond, *islands, *without_scales(table))

    def points(self, graph: ir.Model, left_out: Sequence[str], gates: Sequence[str] = ()) -> Points:
        can = self.generation.capabilities
        return find_points(
            graph,
            base=self.spec.base,
            overrides=(*self.spec.overrides, *kept_out(left_out, self.spec.base)),
            excluded=can.floating(Precision.INT8, self.spec.optimization_level),
            between=can.quantized_between,
            gates=gates,
        )

    def first_scales(self) -> Table:
        """Return those that the search begins with: of every layer, whatever an earlier search left out."""
        if self.given is None:
            return self._calibrated().table
        more, method = self.measures_more(self.given), self.request.method
        ready = prepared.prepare(self.model, self.spec.overrides, all_tensors=more)
        table = ready.chosen_again(self.given, None if method == "auto" else method)
        return replace(table, left_out={}, gates=(), beside=False)

    def repaired(self, scales: Table) -> tuple[Table, NoiseByPlace]:
        """The table with repairs, and the noise that is left at each place; as an earlier call kept them."""
        reporter = self.request.reporter
        try:
            path = _kept_file(self.key, "calib.json")
            if path.is_file():
                noise, table = converted(read_json(path.with_suffix(".noise")), NoiseByPlace), Table.load(path)
                reporter.note("the same model was repaired on the same samples before: that is used")
                return table, noise
        except (TrtoptError, Damaged) as error:
            reporter.note(f"what an earlier search kept can't be used: {error}")
        result = self._calibrated(scales)
        assert result.repairs is not None
        with contextlib.suppress(OutputError):
            path = _kept_file(self.key, "calib.json")
            write_json(path.with_suffix(".noise"), plain(result.repairs.noise))
            result.table.save(path)
        return result.table, result.repairs.noise

    def _calibrated(self, table: Table | None = None) -> CalibrateResult:
        """The scales, measured on all of the images or data; or a table with repairs by these."""
        return calibrated_for(
            self.request,
            self.model,
            preprocess=self.preprocess,
            calib=table,
            method=table.method if table is not None and table.method in METHODS else self.request.method,
            all_tensors=self.measures_more(table),
            repair=table is not None,
        )


class _Judge:
    """The verdicts on choices: the graph of each runs once, and not at all where an earlier call ran it."""

    def __init__(self, subject: _Subject, goal: Goal) -> None:
        """Judge on the request's samples, and say what makes that doubtful."""
        self.subject, request, model = subject, subject.request, subject.model
        samples = real_samples(model, request, SAMPLES if goal.metric is None else None)
        kinds = kinds_of(model, request)
        self.evaluator = AccuracyEvaluator(model.proto, samples, goal, kinds, cores())
        no_share = "" if request.min_agreement is None else without_share(kinds.values())
        for doubt in filter(None, (too_few(self.evaluator.samples), no_share)):
            request.reporter.warn(doubt)
        self.known: dict[str, TunedChoice] = {}
        # Of what a verdict depends on besides the scales and the choice.
        self.key = {
            **subject.key,
            "judged": samples.describe(),
            "goal": plain(goal.limits),  # a metric's verdicts aren't kept
            "kinds": kinds,
            "spec": subject.spec.describe(),
            "generation": [subject.generation.family, subject.generation.version],
        }

    def __call__(self, table: Table, left_out: Sequence[str] = ()) -> TunedChoice:
        """Return how a choice does, by the graph that the builder would be given."""

        def run() -> TunedChoice:
            subject, choice = self.subject, replace(table, left_out=dict.fromkeys(left_out, "tuned"))
            return self.evaluator(lower(subject.folded.proto, subject.spec, subject.generation, choice).proto)

        name = sha256_json([table.digest, *left_out])
        if name not in self.known:
            own_code = self.evaluator.goal.metric is not None  # of which no key tells whether it changed
            self.known[name] = run() if own_code else remembered([self.key, name], "choice", TunedChoice, run)
        return self.known[name]


def tuned(request: BuildRequest, goal: Goal, measure: Callable[[Table, Work], Measured | None]) -> list[Tuning]:
    """Find what has to stay out of INT8 for the goal; a second choice has squeeze-and-excite in INT8, where that may be faster.

    Args:
        measure: gives times of layers, None where there are none.
    """
    start, subject = time.monotonic(), _Subject(request)
    judge, table = _Judge(subject, goal), subject.first_scales()
    check_scales(subject.points(to_ir(subject.original), subject.always_out(table)), table.amax)
    before, noise = judge(table), NoiseByPlace({}, {})
    if before.missed:
        table, noise = subject.repaired(table)

    def choose(table: Table) -> Tuning:
        """Return the best choice with these scales; AccuracyLost where there is none."""
        proto = smoothed(subject.original, table.smoothed)
        work, graph, always_out = macs(proto, sizes_in(proto, subject.shapes)), to_ir(proto), subject.always_out(table)
        choices = Choices(
            evaluate=partial(judge, table),
            points=lambda left_out: subject.points(graph, [*left_out, *always_out], table.gates),
            operators={node.name: node.op_type for node in proto.graph.node},
            noise=noise,
            work=work,
            measured=measure(table, work),
            overrides=subject.spec.overrides,
            reporter=request.reporter,
        )
        left_out = choices.chosen()
        return Tuning(
            table=replace(table, left_out={name: choices.reason(name) for name in left_out}),
            samples=judge.evaluator.samples,
            before=replace(before, share=choices.share(choices.all_quantized.quantized)),
            whole=choices.judged(()),
            chosen=choices.judged(left_out),
            front=choices.pareto_front(),
            tried=len(judge.known),
            cost="the share of the arithmetic" if choices.measured is None else choices.measured.described,
            seconds=time.monotonic() - start,
            timed=choices.measured is not None,
        )

    tunings = [choose(table)]
    if subject.gates and tunings[0].timed and subject.measures_more(table):
        with contextlib.suppress(AccuracyLost):  # then it stays in floating point
            tunings.append(choose(replace(table, gates=subject.gates)))
    elif subject.gates and tunings[0].timed:
        request.reporter.note(
            "squeeze-and-excite isn't tried in INT8, as the table has no scales for it: trtopt calibrate measures it with "
            "`all_tensors=True`, too"
        )
    return tunings


def check_tunable(request: BuildRequest) -> None:
    """Raise UsageError for a request that leaves nothing to choose, or nothing to judge by."""
    spec = spec_of(request)
    if spec.precision is not Precision.INT8:
        raise UsageError(
            "layers are chosen for INT8: add `int8=True`, or drop the limits; FP16 and BF16 take `min_snr=` alone, and verify "
            "judges any engine by it and `min_agreement=`"
        )
    if spec.calibrator != "trtopt":
        raise UsageError("`calibrator='native'` leaves the scales to TensorRT: drop it, or the limits")
    if request.images is None and request.data is None:
        raise UsageError("accuracy is judged on real samples: add `images=DIR` or `data='F.npz'`")


def _kept_file(key: Any, what: str) -> Path:
    """Return where a later call of this key finds what this one measured; OutputError where that can't be kept."""
    return cache_folder("tuning") / f"{sha256_json(key)}.{what}"


def remembered(key: Any, what: str, kind: Any, measure: Callable[[], Content]) -> Content:
    """Return what an earlier call of this key measured, else what `measure` gives, which is kept unless it is None."""
    with contextlib.suppress(Damaged, OutputError):  # damaged or not there
        return cast("Content", converted(read_json(_kept_file(key, what)), kind))
    found = measure()
    if found is not None:
        with contextlib.suppress(OutputError):
            write_json(_kept_file(key, what), plain(found))
    return found
