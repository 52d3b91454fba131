"""The fastest choice within an accuracy budget: which layers stay out of INT8, and how the weights of the others are rounded.

Weights are repaired first (`trtopt.calibration.repairing`), which also tells the noise that each layer makes. Layers are then
ranked by that noise for what leaving them out costs; a binary search finds how many of the first have to stay out for the
results to be within the limits, and those that turn out not to be needed are put back, the costliest first. Every choice is
judged by the real Q/DQ graph on real samples. Of up to `SMALL` layers all choices are tried, the cheapest first.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.builder.construction import spec_of, with_profiles
from trtopt.builder.lowering import lower
from trtopt.builder.request import BuildRequest
from trtopt.builder.samples import preparation, real_samples
from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.importing import kept_out
from trtopt.calibration.prepared import refuse_quantized
from trtopt.calibration.repairing import NoiseByPlace
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache
from trtopt.core.documents import plain
from trtopt.core.errors import AccuracyLost, DataError, OutputError, TrtoptError, UsageError
from trtopt.core.files import cache_folder, existing_file, sha256_json, write_json
from trtopt.core.host import cores
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Override, Precision, check_overrides, overriding, read_time
from trtopt.core.version import __version__
from trtopt.data import SAMPLES, Batches
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import joined
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.outputs import measure
from trtopt.evaluation.verify import Agreement, verify_all
from trtopt.graph.half import fp32_typed, has_half, widen
from trtopt.graph.io import Model, load_model
from trtopt.graph.output_kinds import Kind, resolve
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import WEIGHTED, Points, find_points
from trtopt.graph.passes.quantize import OPSET, check_scales
from trtopt.graph.passes.smooth import smoothed
from trtopt.graph.proto import fingerprint, in_memory, network_inputs
from trtopt.graph.view import to_ir, to_proto
from trtopt.graph.work import macs, shapes_at, sizes_in
from trtopt.ort.sessions import as_taken, open_session
from trtopt.ort.sessions import version as ort_version
from trtopt.recipes.classnames import load_classes
from trtopt.trt import select

SMALL = 10  # layers, of which all choices are tried
MOST_PUT_BACK = 24  # tries
MOVED, CONVERTED, QUANTIZED = 16, 4, 5  # in estimated costs
PURPOSE = "tuning"
Arrays = Mapping[str, NDArray[Any]]
Metric = Callable[..., float]


@dataclass(frozen=True)
class TunedChoice:
    """One choice that was tried.

    Attributes:
        left_out: how many layers stay out of INT8.
        share: of the multiply-accumulates, those in INT8.
        snr_db: of the worst output, on the samples that judge.
        figure: what else was measured, in words.
        missed: the limits that it misses; empty: none.
    """

    left_out: int
    share: float
    snr_db: float
    figure: str
    missed: tuple[str, ...]


@dataclass(frozen=True)
class Tuning:
    """What was found.

    Attributes:
        table: the scales, with the repairs and the layers that stay out.
        samples: that judged.
        before: INT8 everywhere, weights rounded to the nearest code; chosen: what is in the table.
        front: the choices that were tried and that no other beats in both INT8's share and accuracy, by share.
        tried: how many choices were.
        cost: in what layers were weighed.
        unfinished: the budget ended the search before all was tried.
    """

    table: Table
    samples: int
    before: TunedChoice
    chosen: TunedChoice
    front: tuple[TunedChoice, ...]
    tried: int
    cost: str
    seconds: float
    unfinished: bool = False

    @property
    def left_out(self) -> Mapping[str, str]:
        """Node name → why it stays out of INT8."""
        return self.table.left_out

    def __str__(self) -> str:
        count = len(self.table.repairs)
        repaired = f"{count} weight{'s' * (count > 1)} rounded by their inputs" if count else "no weight repaired"
        if self.left_out:
            count = len(self.left_out)
            out = f"{count} layer{'s' * (count > 1)} out of INT8, {self.chosen.share:.1%} of the arithmetic in it"
        else:
            out = "no layer has to stay out"
        figure = f", {self.chosen.figure}" if self.chosen.figure else ""
        return (
            f"{out}, {repaired}: {self.before.snr_db:.1f} → {self.chosen.snr_db:.1f} dB{figure} on {self.samples} samples; "
            f"{self.tried} choices in {self.seconds:.0f} s{' (the budget ended the search)' if self.unfinished else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        described = plain({name: value for name, value in vars(self).items() if name != "table"})
        return {
            **described,
            "seconds": round(self.seconds, 3),
            "left_out": dict(self.left_out),
            "repaired": list(self.table.repairs),
            "digest": self.table.digest,
        }


@dataclass(frozen=True)
class Goal:
    """What results must be like: `Limits`, and what is judged by labels or by the user's own function.

    Attributes:
        max_drop: most that top-1 accuracy may fall, as a share.
        metric: a function of {output: array of all samples}, and of the labels if it takes two arguments; more is better.
    """

    limits: Limits | None
    max_drop: float | None = None
    labels: tuple[int, ...] | None = None
    metric: Metric | None = None
    least: float = 0.0
    name: str = ""

    def describe(self) -> dict[str, Any]:
        return {"limits": plain(self.limits), "max_drop": self.max_drop, "metric": self.name, "least": self.least}


def goal_of(request: BuildRequest) -> Goal | None:
    """The goal that a request names; None: it names none.

    Raises:
        UsageError: it can't be right.
    """
    limits = Limits.of(request.min_agreement, request.min_snr)
    drop, metric, labels = _drop(request.max_drop), None, None
    if request.labels is not None:
        labels = _labels(request.labels)
    if drop is not None and labels is None:
        raise UsageError("`max_drop=` is a loss of accuracy, which needs labels: add `labels='FILE'`, one class a line")
    if (request.metric is None) != (request.min is None):
        raise UsageError("`metric=` and `min=` go together: a function and the least that it must give")
    if request.metric is not None:
        metric = request.metric if callable(request.metric) else _function(request.metric)
    if limits is None and drop is None and metric is None:
        if labels is not None:
            raise UsageError("`labels=` are for `max_drop=` and `metric=`: add one of them, or drop the labels")
        return None
    name = request.metric if isinstance(request.metric, str) else getattr(metric, "__qualname__", str(metric or ""))
    return Goal(limits, drop, labels, metric, request.min or 0.0, name)


def _drop(text: str | float | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise UsageError(f"`max_drop=` is {text}; a share such as 0.005 or '0.5%' is needed")
    return value


def _labels(given: Any) -> tuple[int, ...]:
    if not isinstance(given, (str, os.PathLike)):
        return tuple(map(int, given))
    path = existing_file(given, "the labels")
    words = path.read_text(encoding="utf-8", errors="replace").split()
    if wrong := next((word for word in words if not word.isdecimal()), None):
        raise UsageError(f"{path} holds {wrong!r}; one class number a line is needed, in the order of the samples")
    return tuple(map(int, words))


def _function(text: str) -> Metric:
    """What "module:function" names; the current folder's modules count too."""
    module, _, name = text.rpartition(":")
    here, path = str(Path.cwd()), list(sys.path)
    try:
        sys.path.append(here)
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module of the user's own may raise anything
        raise UsageError(
            f"`metric='{text}'` can't be imported: {type(error).__name__}: {error}; write module:function, of a module that is "
            "installed or lies in the current folder"
        ) from error
    finally:
        sys.path[:] = path
    if not callable(found):
        raise UsageError(f"`metric='{text}'` isn't a function; write module:function")
    return found  # type: ignore[no-any-return]


# Judging a choice --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Judged:
    """How a graph does on the samples."""

    snr_db: float
    figure: str
    missed: tuple[str, ...]


class _Judge:
    """Runs graphs on the samples, each on one thread by itself, and holds the results against those of floating point."""

    def __init__(
        self,
        proto: ModelProto,
        batches: Batches,
        goal: Goal,
        kinds: Mapping[str, Kind],
        threads: int,
    ) -> None:
        self.goal, self.kinds, self.threads = goal, kinds, threads
        self.outputs = [value.name for value in proto.graph.output]
        self.feeds: list[tuple[Arrays, int]] = list(single_runs(network_inputs(proto), batches))
        self.samples = sum(real for _, real in self.feeds)
        if goal.labels is not None and len(goal.labels) != self.samples:
            raise UsageError(f"{len(goal.labels)} labels were given for {self.samples} samples")
        self.expected = self._run(proto, optimize=True)
        if goal.metric is not None and not (value := self._scored(self.expected)) >= goal.least:
            raise AccuracyLost(
                f"{goal.name} gives {value:.6g} for the float model itself, at least {goal.least:g} is asked for: quantization "
                "isn't to blame; look at the model, the samples and how they are prepared"
            )

    def __call__(self, proto: ModelProto) -> _Judged:
        found, goal = self._run(proto, optimize=False), self.goal
        old, new = iter(self.expected), iter(found)
        feeds = [_cut(feed, len(next(iter(feed.values()))), real) for feed, real in self.feeds]
        labels = goal.labels if goal.max_drop is not None else None
        agreement = verify_all(lambda _: next(old), {"": lambda _: next(new)}, feeds, labels, kinds=self.kinds)[""]
        described = agreement.describe()
        missed = self._missed(described, found) if goal.limits is not None else []
        figures = [text for name, output in described["outputs"].items() if (text := measure(output, self.samples))]
        if goal.limits is not None and goal.limits.min_snr is not None:
            silent = [name for name, item in described["outputs"].items() if item["near_zero"] == item["rows"] > 0]
            figures += [f"{name} is next to zero, so that its dB aren't judged" for name in silent]
        if goal.max_drop is not None and agreement.reference_accuracy and agreement.candidate_accuracy:
            before, after = agreement.reference_accuracy.top1, agreement.candidate_accuracy.top1
            figures.append(f"top-1 {before:.1%} → {after:.1%}")
            if before - after > goal.max_drop + 1e-12:
                missed.append(f"top-1 falls by {before - after:.2%}, at most {goal.max_drop:.2%} is allowed")
        if goal.metric is not None:
            value = self._scored(found)
            figures.append(f"{goal.name} {value:.6g}")
            if not value >= goal.least:
                missed.append(f"{goal.name} gives {value:.6g}, at least {goal.least:g} is asked for")
        return _Judged(_worst(agreement), "; ".join(figures), tuple(missed))

    def _missed(self, described: Mapping[str, Any], found: Sequence[Arrays]) -> list[str]:
        """Of the limits. Those in dB have to hold less a standard error over the samples, so that others will be within too."""
        limits = self.goal.limits
        assert limits is not None
        missed = limits.missed(described)
        if missed or limits.min_snr is None:
            return missed
        error = max(self._error(name, found) for name in self.outputs)
        if not replace(limits, min_snr=limits.min_snr + error).missed(described):
            return []
        return [
            f"{limits.min_snr:g} dB hold on these samples, but not with a standard error of {error:.1f} dB over them"
        ]

    def _error(self, name: str, found: Sequence[Arrays]) -> float:
        """Standard error, in dB, of the ratio of the samples' summed noise and signal."""
        old = [np.asarray(arrays[name], np.float64) for arrays in self.expected]
        new = [np.asarray(arrays[name], np.float64) for arrays in found]
        signal = np.array([np.square(item).sum() for item in old])
        noise = np.array([np.square(one - other).sum() for one, other in zip(old, new)])
        if len(old) < 2 or not 0 < noise.sum() < math.inf or not signal.sum() > 0:
            return 0.0
        ratio = noise.sum() / signal.sum()
        count = len(old)
        spread = math.sqrt(float(np.square(noise - ratio * signal).sum()) * count / (count - 1)) / signal.sum()
        return 10 * math.log10(1 + spread / ratio)

    def _scored(self, arrays: Sequence[Arrays]) -> float:
        goal = self.goal
        assert goal.metric is not None
        given: list[Any] = [joined(arrays)]
        if _takes_labels(goal.metric):
            if goal.labels is None:
                raise UsageError(f"`metric='{goal.name}'` takes labels as well: add `labels='FILE'`")
            given.append(np.array(goal.labels))
        try:
            return float(goal.metric(*given))
        except Exception as error:  # the user's own function may raise anything
            shapes = ", ".join(f"{name} {array.shape}" for name, array in given[0].items())
            raise UsageError(
                f"`metric='{goal.name}'` failed on {{{shapes}}}: {type(error).__name__}: {error}"
            ) from error

    def _run(self, proto: ModelProto, *, optimize: bool) -> list[Arrays]:
        proto = widen(proto) if has_half(proto) else proto  # FP16's rounding and limits are part of the result
        session = open_session(proto, threads=1, optimize=optimize, memory_pattern=False, purpose=PURPOSE)

        def run(item: tuple[Arrays, int]) -> Arrays:
            feed, real = item
            try:
                found = dict(zip(self.outputs, session.run(self.outputs, as_taken(session, feed))))
                return _cut(found, len(next(iter(feed.values()))), real)
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                raise DataError(f"ONNX Runtime can't run the model on these samples: {error}") from error

        with ThreadPoolExecutor(self.threads, thread_name_prefix="trtopt-tune") as pool:
            return list(pool.map(run, self.feeds))


def _takes_labels(metric: Metric) -> bool:
    try:
        needed = [item for item in inspect.signature(metric).parameters.values() if item.default is item.empty]
    except (TypeError, ValueError):  # in C, without a signature
        return False
    return len(needed) > 1


def _cut(arrays: Arrays, size: int, real: int) -> Arrays:
    """Without the samples that a fixed batch was filled up with."""
    return {name: item[:real] if item.ndim and len(item) == size else item for name, item in arrays.items()}


def _worst(agreement: Agreement) -> float:
    floating = [item.snr_db for item in agreement.outputs if not item.integers]
    return min(floating, default=math.inf)


class _Costs:
    """What a placement costs, estimated: arithmetic in floating point, and the elements that its kernels move.

    Args:
        apart: what goes from INT8 to a floating layer, and what is quantized behind one, is converted by kernels of their own,
            which take longer than the layer does, as TensorRT 8.6's do (docs/results/accuracy.md).
    """

    def __init__(self, proto: ModelProto, sizes: Mapping[str, int], *, apart: bool) -> None:
        self.converted, self.quantized = (CONVERTED, QUANTIZED) if apart else (0, 0)
        self.unit = f"MACs in floating point, and {MOVED} for each element moved"
        if apart:
            self.unit += f" ({CONVERTED} and {QUANTIZED} times as many for each converted from and to INT8)"
        self.unit += ": an estimate"
        shapes, self.work = shapes_at(proto, sizes, 1), macs(proto, sizes)
        self.size = {name: math.prod(shape) for name, shape in shapes.items()}
        self.nodes = {node.name: node for node in proto.graph.node if node.op_type in WEIGHTED}
        self.sources: dict[str, frozenset[str]] = {}  # tensor → the nearest layers that it comes from
        for node in proto.graph.node:
            found = [self.sources.get(name, frozenset()) for name in node.input]
            made = frozenset([node.name]) if node.name in self.nodes else frozenset().union(*found)
            self.sources |= dict.fromkeys(node.output, made)

    def share(self, points: Points) -> float:
        """Of the arithmetic, what is in INT8."""
        return sum(self.work.get(name, 0) for name in points.quantized) / (sum(self.work.values()) or 1)

    def __call__(self, points: Points) -> float:
        inside = set(points.quantized)
        cost = 0.0
        for name, node in self.nodes.items():
            if name not in inside:
                read, made = self.size.get(node.input[0], 0), self.size.get(node.output[0], 0)
                cost += self.work.get(name, 0) + MOVED * (read + made)
                if self.sources.get(node.input[0], frozenset()) & inside:
                    cost += MOVED * self.converted * read
        for tensor in points.reads:
            if self.sources.get(tensor, frozenset()) - inside:
                cost += MOVED * self.quantized * self.size.get(tensor, 0)
        return cost

    def beside(self, name: str) -> set[str]:
        """The nearest layers before and behind one."""
        behind = {other for other, node in self.nodes.items() if name in self.sources.get(node.input[0], ())}
        return behind | self.sources.get(self.nodes[name].input[0], frozenset())


# Looking for one ---------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    """The choices of one model: sets of layers that stay out of INT8."""

    graph: Callable[[Sequence[str]], ModelProto]
    points: Callable[[Sequence[str]], Points]
    noise: NoiseByPlace
    judge: _Judge
    costs: _Costs
    overrides: Sequence[Override]
    deadline: float
    reporter: Reporter
    memo: _Memo
    tried: dict[frozenset[str], TunedChoice] = field(default_factory=dict)
    unfinished: bool = False

    def __post_init__(self) -> None:
        self.whole = self.points(())
        operators = {name: node.op_type for name, node in self.costs.nodes.items()}
        free = [name for name in self.whole.quantized if overriding(self.overrides, name, operators[name]) is None]
        self.layers, self.forced = free, len(free) < len(self.whole.quantized)  # in INT8 by the user's own wish
        self.made = {name: self.noise.weights.get(name, 0.0) for name in free}
        for tensor, slots in self.whole.reads.items():
            nodes = [node for node, _ in slots if node in operators] or [node for node, _ in slots]
            for node in nodes:
                if node in self.made:
                    self.made[node] += self.noise.activations.get(tensor, 0.0) / len(nodes)

    def cost(self, left_out: Sequence[str]) -> float:
        """Over INT8 everywhere; at least a little, since nothing stays out for nothing."""
        return max(self.costs(self.points(left_out)) - self.costs(self.whole), 1.0) if left_out else 0.0

    def judged(self, left_out: Sequence[str]) -> TunedChoice:
        """One choice, run once."""
        key = frozenset(left_out)
        if key not in self.tried:
            points = self.points(left_out)
            self.tried[key] = self.seen(sorted(key), partial(self.graph, sorted(key)), self.costs.share(points))
        return self.tried[key]

    def seen(self, name: Sequence[str], graph: Callable[[], ModelProto], share: float) -> TunedChoice:
        """How a graph does; by its name, where an earlier call ran it."""
        found = self.memo.get(name)
        if found is None:
            found = self.judge(graph())
            self.memo.put(name, found)
        return TunedChoice(len(name), share, found.snr_db, found.figure, found.missed)

    def found(self) -> tuple[str, ...]:
        """The layers to leave out.

        Raises:
            AccuracyLost: only without INT8 do the results stay within the limits, or not even so.
        """
        if not self.judged(()).missed:
            return ()
        if len(self.layers) <= SMALL:
            return self._cheapest()
        alone = {name: self.cost([name]) for name in self.layers}
        ranked = sorted(self.layers, key=lambda name: (-self.made[name] / alone[name], name))
        low, high = 0, len(ranked)  # `low` don't do; `high` do, if anything does
        with self.reporter.phase("looking for the layers that have to stay out", None) as phase:
            while high - low > 1 and not self._over():
                # The first few decide mostly, so that steps grow from there.
                middle = min(2 * low + 2, (low + high) // 2) if high == len(ranked) else (low + high) // 2
                choice = self.judged(ranked[:middle])
                phase.detail(f"{middle} out: {choice.snr_db:.1f} dB")
                low, high = (middle, high) if choice.missed else (low, middle)
            if high == len(ranked) and not (self.forced and not self.judged(ranked).missed):
                raise self._lost()
            chosen = ranked[:high]
            for name in sorted(chosen, key=lambda name: (-alone[name], name))[:MOST_PUT_BACK]:
                if self._over():
                    break
                without = [other for other in chosen if other != name]
                choice = self.judged(without)
                phase.detail(f"{len(without)} out: {choice.snr_db:.1f} dB")
                if not choice.missed:
                    chosen = without
        return self._grown(chosen)

    def _grown(self, chosen: Sequence[str]) -> tuple[str, ...]:
        """With the neighbours whose staying out as well costs less than conversions between."""
        grown, cost = list(chosen), self.cost(chosen)
        while True:
            near = sorted(set().union(*map(self.costs.beside, grown)) & set(self.layers) - set(grown))
            more = [[name] for name in near] + [list(pair) for pair in itertools.combinations(near, 2)][:200]
            found = min(((self.cost([*grown, *item]), item) for item in more), default=(cost, []))
            if found[0] >= cost:
                break
            cost, grown = found[0], [*grown, *found[1]]
        whole = len(grown) == len(self.layers) and not self.forced
        return tuple(sorted(chosen if whole or self.judged(grown).missed else grown))

    def _cheapest(self) -> tuple[str, ...]:
        subsets = [
            subset
            for size in range(1, len(self.layers) + self.forced)
            for subset in itertools.combinations(sorted(self.layers), size)
        ]
        subsets.sort(key=lambda subset: (self.cost(subset), subset))
        with self.reporter.phase("trying all choices", None) as phase:
            for subset in subsets:
                phase.advance()
                if not self.judged(subset).missed:
                    return subset
                if self._over():
                    break
        raise self._lost()

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

    def reason(self, name: str) -> str:
        share = self.costs.work.get(name, 0) / (sum(self.costs.work.values()) or 1)
        noise = self.made[name] / (self.noise.total or 1)
        return f"tuned: in INT8 it makes {noise:.1%} of the noise and does {share:.1%} of the arithmetic"

    def front(self) -> tuple[TunedChoice, ...]:
        """Of what was tried, what nothing else beats in both share and dB."""
        best: list[TunedChoice] = []
        for choice in sorted(self.tried.values(), key=lambda item: (-item.share, -item.snr_db)):
            if not best or choice.snr_db > best[-1].snr_db:
                best.append(choice)
        return tuple(best)


class _Memo:
    """Results that an earlier call measured, one JSON line each: an interrupted search goes on from there."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.known = path, dict[str, _Judged]()
        if path is None or not path.is_file():
            return
        self.known |= dict(filter(None, map(_line, path.read_text(encoding="utf-8").splitlines())))

    def get(self, choice: Sequence[str]) -> _Judged | None:
        return self.known.get(sha256_json(list(choice)))

    def put(self, choice: Sequence[str], found: _Judged) -> None:
        name = sha256_json(list(choice))
        self.known[name] = found
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, str(found.snr_db), found.figure, list(found.missed)]) + "\n")


def _line(text: str) -> tuple[str, _Judged] | None:
    """What a line says; None: it was cut off when the process was killed."""
    try:
        name, snr, figure, missed = json.loads(text)
        return str(name), _Judged(float(snr), str(figure), tuple(map(str, missed)))
    except (ValueError, TypeError):
        return None


def tuned(request: BuildRequest, goal: Goal) -> Tuning:
    """Find what has to stay out of INT8 for the results to be within the goal.

    Args:
        request: of an INT8 build; `calib` has the scales, else they are measured on all of the images or data.

    Raises:
        UsageError, DataError, CalibrationError, ModelError: as `build` and `sensitivity`.
        AccuracyLost: the goal isn't within reach.
    """
    started, reporter, spec = time.monotonic(), request.reporter, spec_of(request)
    budget = None if request.budget is None else _seconds(request.budget)
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
    judging = real_samples(model, request, SAMPLES if goal.labels is None and goal.metric is None else None)
    names = None if request.classes is None else load_classes(request.classes)
    kinds = resolve(model.proto, model.outputs, request.output_kind, names)
    original = to_proto(to_ir_at(in_memory(fp32_typed(folded)[0]), OPSET[Precision.INT8]))
    judge = _Judge(original, judging, goal, kinds, cores())
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
    table, bare, noise, kept = _repaired(request, model, prepared, key, scales)
    proto = smoothed(original, table.smoothed)
    can, base = generation.capabilities, spec.base

    found_in = to_ir(proto)

    def points(left_out: Sequence[str], graph: ir.Model = found_in) -> Points:
        return find_points(
            graph,
            base=base,
            overrides=(*spec.overrides, *kept_out(left_out, base)),
            excluded=can.float_only,
            grouped=can.grouped,
        )

    def graph(left_out: Sequence[str], used: Table = table) -> ModelProto:
        """What the builder would be given."""
        return lower(folded, spec, generation, replace(used, left_out=dict.fromkeys(left_out, "tuned"))).proto

    whole = points(())
    check_scales(whole, table.amax)
    lines = None
    if kept is not None and goal.metric is None:
        more = {
            "points": [whole.reads, [item.node for item in whole.weights]],
            "judged": judging.describe(),
            "goal": goal.describe(),
            "labels": goal.labels,
            "kinds": kinds,
            "spec": spec.describe(),
            "generation": [generation.family, generation.version],
        }
        lines = kept.with_name(f"{sha256_json({**key, **more})}.lines")
    sizes = sizes_in(proto, {name: array.shape for name, array in judge.feeds[0][0].items()})
    costs = _Costs(proto, sizes, apart=generation.capabilities.converts_apart)
    deadline = time.monotonic() + (math.inf if budget is None else budget)
    search = _Search(graph, points, noise, judge, costs, spec.overrides, deadline, reporter, _Memo(lines))
    before = search.seen(["(as calibrated)"], partial(graph, (), bare), costs.share(whole))
    left_out = search.found()
    chosen = search.judged(left_out)
    table = replace(table, left_out={name: search.reason(name) for name in left_out})
    return Tuning(
        table,
        judge.samples,
        replace(before, left_out=0),
        chosen,
        search.front(),
        len(search.tried) + 1,
        costs.unit,
        time.monotonic() - started,
        search.unfinished,
    )


def _repaired(
    request: BuildRequest, model: Model, preprocess: Any, key: Mapping[str, Any], scales: Table | None
) -> tuple[Table, Table, NoiseByPlace, Path | None]:
    """The table with repairs, that without any, and the noise that is left at each place; as an earlier call kept them."""
    reporter, path = request.reporter, None
    try:
        path = cache_folder("tuning") / f"{sha256_json(key)}.calib.json"
        if path.is_file():
            stored = json.loads(path.with_suffix(".noise").read_text(encoding="utf-8"))
            noise = NoiseByPlace(stored["activations"], stored["weights"])
            table = Table.load(path)
            reporter.note("the same model was repaired on the same samples before: that is used")
            return table, _bare(table, stored["amax"]), noise, path
    except (TrtoptError, OSError, ValueError, KeyError, TypeError) as error:
        reporter.note(f"what an earlier search kept can't be used: {error}")
    result = calibrate(
        model.path or model.proto,
        images=request.images,
        data=request.data,
        preprocess=preprocess,
        calib=scales,
        method=request.method if scales is None or request.method != "auto" else scales.method,
        limit=request.limit,
        batch=request.batch,
        precision_override=request.precision_override,
        repair=True,
        reporter=reporter,
    )
    table, repairs = result.table, result.repairs
    assert repairs is not None
    if path is not None:
        try:
            kept = {**plain(repairs.noise), "amax": dict(repairs.replaced)}
            write_json(path.with_suffix(".noise"), kept)
            table.save(path)
        except OutputError as error:
            reporter.warn(f"this can't be kept for later calls: {error}")
            path = None
    return table, _bare(table, repairs.replaced), repairs.noise, path


def _bare(table: Table, amax: Mapping[str, float]) -> Table:
    """The table before its repairs; `amax` of the scales that were replaced."""
    entries = {name: replace(table.tensors[name], amax=float(value)) for name, value in amax.items()}
    return replace(table, tensors={**table.tensors, **entries}, repairs={}, smoothed={})


def _seconds(text: str | float) -> float:
    """Seconds of "90", "90s", "10min" or "1h".

    Raises:
        UsageError: it can't be read.
    """
    value = read_time(text, {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600})
    if not value:
        raise UsageError(f"`budget={text!r}` can't be read; write a time such as 90s or 10min")
    return value
