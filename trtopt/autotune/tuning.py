"""The fastest choice within an accuracy budget: which layers stay out of INT8, and how the weights of the others are rounded.

Where INT8 everywhere isn't within the limits, weights are repaired (`trtopt.calibration.repairing`), which also tells the noise
that each layer makes. Layers are then ranked by that noise for what leaving them out costs; a binary search, which begins where
the summed noise foretells, finds how many of the first have to stay out for the results to be within the limits, and those that
turn out not to be needed are put back, the costliest first. Where FP8 may be used, as many of the first layers are in it as are
best there before any is in floating point, and what can't be put back in INT8 is tried in FP8. Every choice is judged by the
real Q/DQ graph on real samples. Of up to `SMALL` layers all choices between INT8 and floating point are tried, the cheapest
first, those last that the summed noise says are far from the limits.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from trtopt.autotune.costs import Costs, Measured
from trtopt.autotune.goal import PURPOSE, Goal, Judge, Judged, TunedFigures
from trtopt.builder.asked import spec_of, with_profiles
from trtopt.builder.lowering import fp8_points, lower
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import preparation, real_samples
from trtopt.calibration.calibrator import CalibrateResult, calibrate
from trtopt.calibration.importing import kept_out
from trtopt.calibration.prepared import prepare, refuse_quantized
from trtopt.calibration.repairing import NoiseByPlace
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache
from trtopt.core.documents import Damaged, converted, plain, read_json
from trtopt.core.errors import AccuracyLost, OutputError, TrtoptError, UsageError
from trtopt.core.files import cache_folder, sha256_json, write_json
from trtopt.core.host import cores
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import METHODS, Override, Precision, check_overrides, overriding, read_time
from trtopt.core.version import __version__
from trtopt.data import SAMPLES
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.graph.half import fp32_typed
from trtopt.graph.io import Model, load_model
from trtopt.graph.output_kinds import resolve
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import Points, find_points, one_row_a_sample
from trtopt.graph.passes.quantize import OPSET, check_scales
from trtopt.graph.passes.smooth import smoothed
from trtopt.graph.proto import fingerprint, in_memory
from trtopt.graph.view import to_ir, to_proto
from trtopt.graph.work import macs, sizes_in
from trtopt.ort.sessions import version as ort_version
from trtopt.recipes.classnames import load_classes
from trtopt.trt import select

SMALL = 10  # layers, of which all choices are tried
MOST_PUT_BACK = 24  # tries
IN_ROWS = "tuned: it computes one row a sample, and the engine was measured to be faster with it in floating point"
Work = Mapping[str, int]  # node → multiply-accumulates


@dataclass(frozen=True)
class TunedChoice:
    """One choice that was tried.

    Attributes:
        left_out: how many layers stay out of INT8; in_fp8: how many of these are in FP8.
        share: of the multiply-accumulates, those in INT8 or FP8.
        snr_db: of the worst output, on the samples that were run.
        figures: what else was measured; figure: the same in words.
        missed: the limits that it misses; empty: none.
        samples: that were run; a choice that is within the limits was run on all.
    """

    left_out: int
    share: float
    snr_db: float
    figure: str
    missed: tuple[str, ...]
    figures: TunedFigures
    samples: int
    in_fp8: int = 0


@dataclass(frozen=True)
class Tuning:
    """What was found.

    Attributes:
        table: the scales, with the repairs and the layers that stay out.
        samples: that judged.
        before: INT8 everywhere with the scales as they are; whole: with the repairs, where these were needed; chosen: what is
            in the table.
        front: the choices that were tried and that no other beats in both the share in 8 bits and accuracy, by share.
        tried: how many choices were.
        cost: in what layers were weighed.
        unfinished: the budget ended the search before all was tried.
        rival: the same with the products of one row a sample in floating point, within the limits, too, before it is known
            which is faster; None: there is no such choice, or nothing is timed.
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
    unfinished: bool = False
    rival: Tuning | None = None

    @property
    def left_out(self) -> Mapping[str, str]:
        """Node name → why it stays out of INT8."""
        return self.table.left_out

    def __str__(self) -> str:
        count = len(self.table.repairs)
        repaired = f"{count} weight{'s' * (count > 1)} rounded by their inputs" if count else "no weight repaired"
        if self.left_out:
            count = len(self.left_out)
            eighths = f" ({self.chosen.in_fp8} in FP8)" if self.chosen.in_fp8 else ""
            where = "8 bits" if eighths else "it"
            out = f"{count} layer{'s' * (count > 1)} out of INT8{eighths}, {self.chosen.share:.1%} of the arithmetic in {where}"
        else:
            out = "no layer has to stay out"
        figure = f", {self.chosen.figure}" if self.chosen.figure else ""
        before = f"{'about ' if self.before.samples < self.samples else ''}{self.before.snr_db:.1f}"
        return (
            f"{out}, {repaired}: {before} → {self.chosen.snr_db:.1f} dB{figure} on {self.samples} samples; "
            f"{self.tried} choices in {self.seconds:.0f} s{' (the budget ended the search)' if self.unfinished else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        described = plain({name: value for name, value in vars(self).items() if name not in ("table", "rival")})
        return {
            **described,
            "seconds": round(self.seconds, 3),
            "left_out": dict(self.left_out),
            "in_fp8": list(self.table.in_fp8),
            "repaired": list(self.table.repairs),
            "digest": self.table.digest,
        }


# Looking for one ---------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    """The choices of one model: sets of layers that stay out of INT8, and of these, the ones that are in FP8."""

    graph: Callable[[Sequence[str], Sequence[str]], ModelProto]
    points: Callable[[Sequence[str]], Points]
    noise: NoiseByPlace
    judging: _Judging
    costs: Costs
    overrides: Sequence[Override]
    deadline: float
    reporter: Reporter
    eighths: Collection[str] = ()  # layers that can be in FP8
    tried: dict[tuple[frozenset[str], frozenset[str]], TunedChoice] = field(default_factory=dict)
    rooms: dict[frozenset[str], float | None] = field(default_factory=dict)  # dB that a choice without FP8 leaves
    unfinished: bool = False

    def __post_init__(self) -> None:
        self.whole = self.points(())
        self.eighths = [name for name in self.eighths if self.costs.pays_in_fp8(name)]
        operators = {name: node.op_type for name, node in self.costs.nodes.items()}
        free = [name for name in self.whole.quantized if overriding(self.overrides, name, operators[name]) is None]
        self.layers, self.forced = free, set(self.whole.quantized) - set(free)  # in INT8 by the user's own wish
        self.made = {name: self.noise.weights.get(name, 0.0) for name in free}
        for tensor, slots in self.whole.reads.items():
            nodes = [node for node, _ in slots if node in operators] or [node for node, _ in slots]
            for node in nodes:
                if node in self.made:
                    self.made[node] += self.noise.activations.get(tensor, 0.0) / len(nodes)

    def cost(self, left_out: Sequence[str]) -> float:
        """Over INT8 everywhere."""
        return self.costs(self.points(left_out)) - self.costs(self.whole)

    def judged(self, left_out: Sequence[str], in_fp8: Sequence[str] = ()) -> TunedChoice:
        """One choice, run once."""
        key = frozenset(left_out), frozenset(in_fp8)
        if key not in self.tried:
            out, eighths = map(sorted, key)
            found = self.judging([*out, *(f"fp8 {name}" for name in eighths)], partial(self.graph, out, eighths))
            self.tried[key] = _choice(len(out), self.costs.share(self.points(out), eighths), found, len(eighths))
            if not eighths:
                self.rooms[key[0]] = found.room
        return self.tried[key]

    def left(self, left_out: Sequence[str]) -> float:
        """The noise that the ledger sums up where these stay out."""
        return self.noise.total - sum(self.made[name] for name in left_out)

    def begin(self, ranked: Sequence[str]) -> tuple[int, int]:
        """How many of the ranked layers to leave out first, and by how many more or fewer to go on from there."""
        room, whole = self.rooms[frozenset()], self.left(())
        if self.eighths or room is None or not 0 < whole < math.inf:
            return 2, 4  # the first few decide mostly, so that steps grow from there
        enough = (count for count in range(1, len(ranked)) if self.left(ranked[:count]) < whole * 10 ** (room / 10))
        return next(enough, len(ranked) // 2), 1

    def may_fit(self, name: str, chosen: Sequence[str]) -> bool:
        """Whether a layer is worth a try in INT8: half of what the ledger says that it adds fits into what is left."""
        room, left = self.rooms[frozenset(chosen)], self.left(chosen)
        if room is None or not 0 < left < math.inf:
            return True
        return 10 * math.log10(1 + self.made[name] / left / 2) <= room

    def found(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The layers to leave out of INT8, and those of them that are in FP8.

        Raises:
            AccuracyLost: only without INT8 do the results stay within the limits, or not even so.
        """
        small = len(self.layers) <= SMALL
        if not small and not self.judged(()).missed:
            return self._cheaper((), ())
        ranked = sorted(self.layers, key=lambda name: (-self.made[name] / self._alone[name], name))
        eighths = self._best_in_fp8(ranked)
        low, high = 0, len(ranked)  # `low` don't do; `high` do, if anything does
        if eighths and not self.judged(eighths, eighths).missed:
            high = 0
        elif small:
            return self._in_8_bits(self._cheapest(), (), put_back=False)

        def out(count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
            first = tuple(ranked[:count])
            others = tuple(name for name in eighths if name not in first)
            return first + others, others

        middle, step = self.begin(ranked)
        with self.reporter.phase("looking for the layers that have to stay out", None) as phase:
            while high - low > 1 and not self._over():
                if low or high < len(ranked):
                    middle = (low + high) // 2
                    middle = min(middle, low + step) if high == len(ranked) else middle
                    middle = max(middle, high - step) if low == 0 else middle
                    step *= 2
                choice = self.judged(*out(middle))
                phase.detail(f"{middle} out: {choice.snr_db:.1f} dB")
                low, high = (middle, high) if choice.missed else (low, middle)
            if high == len(ranked) and not (self.forced and not self.judged(ranked).missed):
                raise self._lost()
        return self._cheaper(*self._in_8_bits(*out(high)))

    @cached_property
    def _alone(self) -> Mapping[str, float]:
        """What leaving each layer out costs: at least a little, since nothing stays out for nothing."""
        return {name: max(self.cost([name]), self.costs.least) for name in self.layers}

    def _best_in_fp8(self, ranked: Sequence[str]) -> tuple[str, ...]:
        """As many of the first layers as are best in FP8: it is coarser, but as fine for small values as for large ones."""
        best, count = tuple[str, ...](), 2
        if not self.eighths:
            return best
        with self.reporter.phase("trying the layers that lose most in FP8", None) as phase:
            while self.judged(best, best).missed and count < 2 * len(ranked) and not self._over():
                names = tuple(name for name in ranked[:count] if name in self.eighths)
                choice, count = self.judged(names, names), 2 * count + 2
                phase.detail(f"{len(names)} in it: {choice.snr_db:.1f} dB")
                if choice.snr_db > self.judged(best, best).snr_db:
                    best = names
        return best

    def _in_8_bits(
        self, out: Sequence[str], in_fp8: tuple[str, ...], *, put_back: bool = True
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is left of them, the costliest tried first: back in INT8, or else in FP8, as far as the limits allow."""
        left = tuple(out)
        if not out or not (put_back or self.eighths):
            return left, in_fp8
        with self.reporter.phase("trying what stays out in 8 bits", None) as phase:
            for name in sorted(out, key=lambda name: (name in in_fp8, -self._alone[name], name))[:MOST_PUT_BACK]:
                if self._over():
                    break
                phase.advance()
                if not self.eighths and not self.may_fit(name, left):
                    continue
                without, others = (tuple(item for item in names if item != name) for names in (left, in_fp8))
                if put_back and not self.judged(without, others).missed:
                    left, in_fp8 = without, others
                elif name in self.eighths and name not in in_fp8 and not self.judged(left, (*in_fp8, name)).missed:
                    in_fp8 = (*in_fp8, name)
        return tuple(sorted(left)), tuple(sorted(in_fp8))

    def _cheaper(self, chosen: Sequence[str], in_fp8: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """With what else costs less in floating point, as a GPU's times and the conversions between them say."""
        if not chosen and not self.costs.in_int8:
            return (), ()
        quantized = set(self.whole.quantized)
        tied = {name: quantized - set(self.points([name]).quantized) - {name} for name in self.layers}
        grown = self.costs.cheapest(self.whole, chosen, self.layers, tied)
        whole = len(grown) == len(self.layers) and not self.forced
        better = not whole and self.cost(grown) < self.cost(chosen) - self.costs.equal
        better = better and not self.judged(grown, in_fp8).missed
        return tuple(sorted(grown if better else chosen)), tuple(in_fp8)

    def _cheapest(self) -> tuple[str, ...]:
        subsets = [
            subset
            for size in range(len(self.layers) + bool(self.forced))
            for subset in itertools.combinations(sorted(self.layers), size)
        ]
        costs = {subset: round(self.cost(subset) / self.costs.equal) for subset in subsets}
        with self.reporter.phase("trying the choices", None) as phase:
            if self.judged(()).missed and not self.forced:  # is one layer in INT8 too much already?
                alone = sorted((item for item in subsets if len(item) == len(self.layers) - 1), key=self.left)
                if all(self.judged(subset).missed for subset in alone if not self._over()):
                    raise self._lost()
            subsets.sort(key=lambda subset: (not self._may_do(subset), costs[subset], len(subset), subset))
            for subset in subsets:
                phase.advance()
                if not self.judged(subset).missed:
                    return subset
                if self._over():
                    break
        raise self._lost()

    def _may_do(self, left_out: Sequence[str]) -> bool:
        """Whether half of the noise that the ledger says is left fits into the limit."""
        room, whole = self.rooms[frozenset()], self.left(())
        if room is None or not 0 < whole < math.inf:
            return True
        return self.left(left_out) / 2 <= whole * 10 ** (room / 10)

    def _over(self) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.unfinished = True
        return True

    def _lost(self) -> AccuracyLost:
        most = max((item for item in self.tried.values() if item.share), key=lambda choice: choice.snr_db)
        best = f"the best choice tried: {most.snr_db:.1f} dB with {most.share:.0%} of the arithmetic in INT8, "
        best += "; ".join(most.missed)
        if self.unfinished:
            return AccuracyLost(
                f"the budget ended before a choice within the limits was found ({best}): give more of `budget=`"
            )
        if worst := "; ".join(self.judged(self.layers).missed):
            without = (
                "with nothing in INT8 but what `precision_override=` puts there" if self.forced else "without INT8"
            )
            return AccuracyLost(
                f"not even {without} do the results stay within the limits ({worst}): leaving layers out can't help: ask "
                "for less, or build without INT8 and FP16"
            )
        return AccuracyLost(
            f"only without INT8 do the results stay within the limits ({best}): build with `fp16=True`, or ask for less"
        )

    def reason(self, name: str, in_fp8: Sequence[str]) -> str:
        share = self.costs.work.get(name, 0) / (sum(self.costs.work.values()) or 1)
        noise = f"makes {self.made[name] / self.noise.total:.1%} of the noise and " if self.noise.total else ""
        time = ""
        if name in self.costs.in_int8:
            ours, other = self.costs.in_int8[name], self.costs.floating[name]
            time = f"; it takes {ours:.1%} of FP16's time in INT8 and {other:.1%} in FP16"
        eighth = "; in FP8 the results are within the limits" if name in in_fp8 else ""
        return f"tuned: in INT8 it {noise}does {share:.1%} of the arithmetic{time}{eighth}"

    def front(self) -> tuple[TunedChoice, ...]:
        """Of what was tried, what nothing else beats in both share and dB."""
        best: list[TunedChoice] = []
        for choice in sorted(self.tried.values(), key=lambda item: (-item.share, -item.snr_db)):
            if not best or choice.snr_db > best[-1].snr_db:
                best.append(choice)
        return tuple(best)


def _choice(left_out: int, share: float, found: Judged, in_fp8: int = 0) -> TunedChoice:
    return TunedChoice(left_out, share, found.snr_db, found.figure, found.missed, found.figures, found.samples, in_fp8)


class _Judging:
    """How graphs do. Kept in a file, one JSON line each: an interrupted search goes on from there."""

    def __init__(self, judge: Judge, path: Path | None) -> None:
        self.judge, self.path, self.known = judge, path, dict[str, Judged]()
        if path is None or not path.is_file():
            return
        self.known |= dict(filter(None, map(_line, path.read_text(encoding="utf-8").splitlines())))

    def __call__(self, choice: Sequence[str], graph: Callable[[], ModelProto]) -> Judged:
        """By the choice's name, where an earlier call ran its graph."""
        name = sha256_json(list(choice))
        if name not in self.known:
            found = self.known[name] = self.judge(graph())
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    content = [str(found.snr_db), found.figure, list(found.missed), vars(found.figures)]
                    file.write(json.dumps([name, *content, found.samples, found.room]) + "\n")
        return self.known[name]


def _line(text: str) -> tuple[str, Judged] | None:
    """What a line says; None: it was cut off when the process was killed."""
    try:
        name, snr, figure, missed, figures, samples, room = json.loads(text)
        room = None if room is None else float(room)
        said = str(figure), tuple(map(str, missed)), TunedFigures(**figures), int(samples)
        return str(name), Judged(float(snr), *said, room)
    except (ValueError, TypeError):
        return None


def tuned(request: BuildRequest, goal: Goal, measure: Callable[[Table, Work], Measured | None]) -> Tuning:
    """Find what has to stay out of INT8 for the results to be within the goal.

    Args:
        request: of an INT8 build; `calib` has the scales, else they are measured on all of the images or data.
        measure: gives the times of these layers, in INT8 by that table and in floating point; None: they can't be measured.

    Raises:
        UsageError, DataError, CalibrationError, ModelError: as `build` and `sensitivity`.
        AccuracyLost: the goal isn't within reach.
    """
    started, reporter, spec = time.monotonic(), request.reporter, spec_of(request)
    budget = budget_of(request.budget)
    if spec.precision is not Precision.INT8:
        raise UsageError("layers are chosen for INT8: add `int8=True`, or drop the limits")
    if spec.calibrator != "trtopt":
        raise UsageError("`calibrator='native'` leaves the scales to TensorRT: drop it, or the limits")
    if request.images is None and request.data is None:
        raise UsageError("accuracy is judged on real samples: add `images=DIR` or `data='F.npz'`")
    model = load_model(request.model)
    refuse_quantized(model)
    if not any(item.dtype.startswith(("float", "bfloat")) for item in model.outputs):
        said = ", ".join(f"{item.name} is {item.dtype}" for item in model.outputs)
        raise UsageError(
            f"no output is floating ({said}), so nothing says which layers lose: give the model that ends with the scores"
        )
    generation = select(request.backend)
    generation.refuse(spec)
    prepared = preparation(model, request)
    with_profiles(spec, model.inputs, prepared, SILENT)  # what is missing is told before the long work
    folded, _ = fold(model.proto, reporter=reporter)
    check_overrides(spec.overrides, folded.graph.node)
    scales = request.calib
    if scales is not None and not isinstance(scales, Table):
        if is_cache(scales):
            raise UsageError(
                f"`calib='{scales}'` is a TensorRT cache, and a search begins with a table: trtopt calibrate MODEL.onnx "
                f"--import-cache {scales} -o T.calib.json, then `calib='T.calib.json'`"
            )
        scales = Table.load(scales)
    if request.embed_preprocess:
        known = scales.preprocess if request.preprocess is None and scales is not None else request.preprocess
        Embedded.of(None if known is None else Preprocess.load(known), model.inputs)
    judging = real_samples(model, request, SAMPLES if goal.labels is None and goal.metric is None else None)
    names = None if request.classes is None else load_classes(request.classes)
    kinds = resolve(model.proto, model.outputs, request.output_kind, names)
    original = to_proto(to_ir_at(in_memory(fp32_typed(folded)[0]), OPSET[Precision.INT8]))
    judge = Judge(original, judging, goal, kinds, cores(), whole=spec.fp8_layers)
    if judge.doubt:
        reporter.warn(judge.doubt)
    key = {
        "trtopt": __version__,
        "onnxruntime": ort_version(PURPOSE),
        "model": fingerprint(folded),
        "table": None if scales is None else scales.digest,
        "method": request.method,
        "overrides": list(request.precision_override),
        "data": real_samples(model, request, None).describe(),
        "preprocess": None if prepared is None else prepared.describe(),
    }
    can, base = generation.capabilities, spec.base

    def points_of(graph: ir.Model, left_out: Sequence[str]) -> Points:
        return find_points(
            graph,
            base=base,
            overrides=(*spec.overrides, *kept_out(left_out, base)),
            excluded=can.float_only,
            conv_borders=can.conv_borders,
        )

    def graph(left_out: Sequence[str], in_fp8: Sequence[str], used: Table) -> ModelProto:
        """What the builder would be given."""
        out = dict.fromkeys(left_out, "tuned")
        return lower(folded, spec, generation, replace(used, left_out=out, in_fp8=tuple(in_fp8))).proto

    whole = points_of(to_ir(original), ())
    more = {
        "points": [whole.reads, [item.node for item in whole.weights]],
        "judged": judging.describe(),
        "goal": goal.describe(),
        "labels": goal.labels,
        "kinds": kinds,
        "spec": spec.describe(),
        "generation": [generation.family, generation.version],
    }
    if scales is None:
        table = _calibrated(request, model, prepared).table
    else:
        ready, method = prepare(model, spec.overrides), request.method
        table = ready.needed(scales) if method == "auto" else ready.chosen_again(scales, method)
        table = replace(table, left_out={}, in_fp8=())
    check_scales(whole, table.amax)
    judged = _Judging(judge, None if goal.metric is not None else _kept_file({**key, **more}, "lines", reporter))
    before = judged(["(as calibrated)"], partial(graph, (), (), table))
    noise = NoiseByPlace({}, {})
    if before.missed:
        table, noise = _repaired(request, model, prepared, key, table)
    proto = smoothed(original, table.smoothed)
    sizes = sizes_in(proto, {name: array.shape for name, array in judge.runs[0].feed.items()})
    costs = Costs(proto, sizes, apart=can.converts_apart, measured=measure(table, macs(proto, sizes)))
    deadline = time.monotonic() + (math.inf if budget is None else budget)
    linked = to_ir(proto)
    points = partial(points_of, linked)
    eighths = fp8_points(linked, (), base, can).quantized if spec.fp8_layers else ()
    given = partial(graph, used=table)
    search = _Search(given, points, noise, judged, costs, spec.overrides, deadline, reporter, eighths)
    left_out, in_fp8 = search.found()
    chosen = search.judged(left_out, in_fp8)
    reasons = {name: search.reason(name, in_fp8) for name in left_out}
    table = replace(table, left_out=reasons, in_fp8=in_fp8)
    rows, other = set(one_row_a_sample(linked, points(left_out))), None
    if costs.in_int8 and rows and rows.isdisjoint(search.forced):
        other = search.judged([*left_out, *rows], in_fp8)
    found = Tuning(
        table,
        judge.samples,
        _choice(0, costs.share(search.whole), before),
        search.judged(()),
        chosen,
        search.front(),
        len(search.tried) + 1,
        costs.unit,
        time.monotonic() - started,
        search.unfinished,
    )
    if other is None or other.missed:
        return found
    floating = replace(table, left_out={**reasons, **dict.fromkeys(sorted(rows), IN_ROWS)})
    return replace(found, rival=replace(found, table=floating, chosen=other))


def _kept_file(key: Mapping[str, Any], what: str, reporter: Reporter) -> Path | None:
    """Where a later call of this key finds what this one measured; None: that can't be kept."""
    try:
        return cache_folder("tuning") / f"{sha256_json(key)}.{what}"
    except OutputError as error:
        reporter.warn(f"this can't be kept for later calls: {error}")
        return None


def _calibrated(request: BuildRequest, model: Model, preprocess: Any, repaired: Table | None = None) -> CalibrateResult:
    """The scales, measured on all of the images or data; or a table with repairs by these."""
    return calibrate(
        model.path or model.proto,
        images=request.images,
        data=request.data,
        preprocess=preprocess,
        calib=repaired,
        method=repaired.method if repaired is not None and repaired.method in METHODS else request.method,
        limit=request.limit,
        batch=request.batch,
        precision_override=request.precision_override,
        repair=repaired is not None,
        reporter=request.reporter,
    )


def _repaired(
    request: BuildRequest, model: Model, preprocess: Any, key: Mapping[str, Any], scales: Table
) -> tuple[Table, NoiseByPlace]:
    """The table with repairs, and the noise that is left at each place; as an earlier call kept them."""
    reporter = request.reporter
    path = _kept_file(key, "calib.json", reporter)
    try:
        if path is not None and path.is_file():
            noise = converted(read_json(path.with_suffix(".noise")), NoiseByPlace)
            table = Table.load(path)
            reporter.note("the same model was repaired on the same samples before: that is used")
            return table, noise
    except (TrtoptError, Damaged, OSError) as error:
        reporter.note(f"what an earlier search kept can't be used: {error}")
    result = _calibrated(request, model, preprocess, scales)
    assert result.repairs is not None
    if path is not None:
        try:
            write_json(path.with_suffix(".noise"), plain(result.repairs.noise))
            result.table.save(path)
        except OutputError as error:
            reporter.warn(f"this can't be kept for later calls: {error}")
    return result.table, result.repairs.noise


def budget_of(text: str | float | None) -> float | None:
    """Seconds of "90", "90s", "10min" or "1h"; None: it isn't said.

    Raises:
        UsageError: it can't be read.
    """
    value = None if text is None else read_time(text, {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600})
    if text is not None and not value:
        raise UsageError(f"`budget={text!r}` can't be read; write a time such as 90s or 10min")
    return value
