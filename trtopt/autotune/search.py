"""Which layers stay out of INT8, once it is known what each of them adds to the noise and what leaving it out costs.

Layers are ranked by their noise for what leaving them out costs. A binary search, which begins at the number that the summed
noise predicts, finds how many of the first have to stay out for the results to be within the limits, and those that turn out
not to be needed are put back, the costliest first. Where FP8 may be used, as many of the first layers are in it as are best
there before any is in floating point, and what can't be put back in INT8 is tried in FP8. Of up to `SMALL` layers all choices
between INT8 and floating point are tried, the cheapest first, those last that the summed noise says are far from the limits.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from onnx import ModelProto

from trtopt.autotune.costs import Costs
from trtopt.autotune.goal import Judge, Judged, TunedFigures
from trtopt.calibration.repairing import NoiseByPlace
from trtopt.core.errors import AccuracyLost
from trtopt.core.files import sha256_json, whole
from trtopt.core.progress import Reporter
from trtopt.core.values import Override, overriding
from trtopt.graph.passes.placement import Points

SMALL = 10  # layers, of which all choices are tried
MOST_PUT_BACK = 24  # tries


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

    @classmethod
    def of(cls, left_out: int, share: float, judged: Judged, in_fp8: int = 0) -> TunedChoice:
        return cls(left_out, share, judged.snr_db, judged.figure, judged.missed, judged.figures, judged.samples, in_fp8)


@dataclass
class Search:
    """The choices of one model: sets of layers that stay out of INT8, and of these, the ones that are in FP8."""

    graph: Callable[[Sequence[str], Sequence[str]], ModelProto]
    points: Callable[[Sequence[str]], Points]
    noise: NoiseByPlace
    judging: Callable[[Sequence[str], Callable[[], ModelProto]], Judged]
    costs: Costs
    overrides: Sequence[Override]
    deadline: float
    reporter: Reporter
    eighths: Collection[str] = ()  # layers that can be in FP8
    gates: Sequence[str] = ()  # squeeze-and-excite in INT8, in every choice
    tried: dict[tuple[frozenset[str], frozenset[str]], TunedChoice] = field(default_factory=dict)
    rooms: dict[frozenset[str], float | None] = field(default_factory=dict)  # dB that a choice without FP8 leaves
    unfinished: bool = False

    def __post_init__(self) -> None:
        self.whole = self.points(())
        self.eighths = [name for name in self.eighths if self.costs.pays_in_fp8(name)]
        operators = {name: node.op_type for name, node in self.costs.nodes.items()}
        free = [name for name in self.whole.quantized if overriding(self.overrides, name, operators[name]) is None]
        self.layers, self.forced = free, set(self.whole.quantized) - set(free)  # in INT8 by the user's own wish
        self.layer_noise = {name: self.noise.weights.get(name, 0.0) for name in free}
        for tensor, slots in self.whole.reads.items():
            nodes = [node for node, _ in slots if node in operators] or [node for node, _ in slots]
            for node in nodes:
                if node in self.layer_noise:
                    self.layer_noise[node] += self.noise.activations.get(tensor, 0.0) / len(nodes)
        weights = sum(self.noise.weights.get(name, 0.0) for name in self.whole.quantized)
        self.total_noise = weights + sum(self.noise.activations.get(name, 0.0) for name in self.whole.reads)

    def cost(self, left_out: Sequence[str]) -> float:
        """Over INT8 everywhere."""
        return self.costs(self.points(left_out)) - self.costs(self.whole)

    def judged(self, left_out: Sequence[str], in_fp8: Sequence[str] = ()) -> TunedChoice:
        """One choice, run once."""
        key = frozenset(left_out), frozenset(in_fp8)
        if key not in self.tried:
            out, eighths = map(sorted, key)
            names = [*(f"gate {name}" for name in self.gates), *out, *(f"fp8 {name}" for name in eighths)]
            judged = self.judging(names, partial(self.graph, out, eighths))
            self.tried[key] = TunedChoice.of(
                len(out), self.costs.share(self.points(out), eighths), judged, len(eighths)
            )
            if not eighths:
                self.rooms[key[0]] = judged.room
        return self.tried[key]

    def left(self, left_out: Sequence[str]) -> float:
        """The noise that the ledger sums up where these stay out."""
        return self.total_noise - sum(self.layer_noise[name] for name in left_out)

    def begin(self, ranking: Sequence[str]) -> tuple[int, int]:
        """How many of the ranked layers to leave out first, and by how many more or fewer to go on from there."""
        room, whole = self.rooms[frozenset()], self.left(())
        if self.eighths or room is None or not 0 < whole < math.inf:
            return 2, 4  # the first few decide mostly, so that steps grow from there
        enough = (count for count in range(1, len(ranking)) if self.left(ranking[:count]) < whole * 10 ** (room / 10))
        return next(enough, len(ranking) // 2), 1

    def may_fit(self, name: str, left_out: Sequence[str]) -> bool:
        """Whether a layer is worth a try in INT8: half of what the ledger says that it adds fits into what is left."""
        room, noise = self.rooms[frozenset(left_out)], self.left(left_out)
        if room is None or not 0 < noise < math.inf:
            return True
        return 10 * math.log10(1 + self.layer_noise[name] / noise / 2) <= room

    def found(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The layers to leave out of INT8, and those of them that are in FP8.

        Raises:
            AccuracyLost: only without INT8 do the results stay within the limits, or not even so.
        """
        small = len(self.layers) <= SMALL
        if not small and not self.judged(()).missed:
            return self._cheaper((), ())
        ranking = sorted(self.layers, key=lambda name: (-self.layer_noise[name] / self._alone[name], name))
        eighths = self._best_in_fp8(ranking)
        low, high = 0, len(ranking)  # `low` don't do; `high` do, if anything does
        if eighths and not self.judged(eighths, eighths).missed:
            high = 0
        elif small:
            return self._in_8_bits(self._cheapest(), (), put_back=False)

        def out(count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
            first = tuple(ranking[:count])
            fp8_layers = tuple(name for name in eighths if name not in first)
            return first + fp8_layers, fp8_layers

        middle, step = self.begin(ranking)
        with self.reporter.phase("looking for the layers that have to stay out", None) as phase:
            while high - low > 1 and not self._over():
                if low or high < len(ranking):
                    middle = (low + high) // 2
                    middle = min(middle, low + step) if high == len(ranking) else middle
                    middle = max(middle, high - step) if low == 0 else middle
                    step *= 2
                choice = self.judged(*out(middle))
                phase.detail(f"{middle} out: {choice.snr_db:.1f} dB")
                low, high = (middle, high) if choice.missed else (low, middle)
            if high == len(ranking) and not (self.forced and not self.judged(ranking).missed):
                raise self._lost()
        return self._cheaper(*self._in_8_bits(*out(high)))

    @cached_property
    def _alone(self) -> Mapping[str, float]:
        """What leaving each layer out costs: at least a little, since nothing stays out for nothing."""
        return {name: max(self.cost([name]), self.costs.least) for name in self.layers}

    def _best_in_fp8(self, ranking: Sequence[str]) -> tuple[str, ...]:
        """As many of the first layers as are best in FP8: it is coarser, but as fine for small values as for large ones."""
        best, count = tuple[str, ...](), 2
        if not self.eighths:
            return best
        with self.reporter.phase("trying the layers that lose most in FP8", None) as phase:
            while self.judged(best, best).missed and count < 2 * len(ranking) and not self._over():
                names = tuple(name for name in ranking[:count] if name in self.eighths)
                choice, count = self.judged(names, names), 2 * count + 2
                phase.detail(f"{len(names)} in it: {choice.snr_db:.1f} dB")
                if choice.snr_db > self.judged(best, best).snr_db:
                    best = names
        return best

    def _in_8_bits(
        self, out: Sequence[str], in_fp8: tuple[str, ...], *, put_back: bool = True
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is left of them, the costliest tried first: back in INT8, or else in FP8, as far as the limits allow."""
        left_out = tuple(out)
        if not out or not (put_back or self.eighths):
            return left_out, in_fp8
        with self.reporter.phase("trying what stays out in 8 bits", None) as phase:
            for name in sorted(out, key=lambda name: (name in in_fp8, -self._alone[name], name))[:MOST_PUT_BACK]:
                if self._over():
                    break
                phase.advance()
                if not self.eighths and not self.may_fit(name, left_out):
                    continue
                without, others = (tuple(item for item in names if item != name) for names in (left_out, in_fp8))
                if put_back and not self.judged(without, others).missed:
                    left_out, in_fp8 = without, others
                elif name in self.eighths and name not in in_fp8 and not self.judged(left_out, (*in_fp8, name)).missed:
                    in_fp8 = (*in_fp8, name)
        return tuple(sorted(left_out)), tuple(sorted(in_fp8))

    def _cheaper(self, left_out: Sequence[str], in_fp8: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """With what else costs less in floating point, as a GPU's times and the conversions between them say."""
        if not left_out and not self.costs.in_int8:
            return (), ()
        quantized = set(self.whole.quantized)
        tied = {name: quantized - set(self.points([name]).quantized) - {name} for name in self.layers}
        cheapest = self.costs.cheapest(self.whole, left_out, self.layers, tied)
        whole = len(cheapest) == len(self.layers) and not self.forced
        better = not whole and self.cost(cheapest) < self.cost(left_out) - self.costs.equal
        better = better and not self.judged(cheapest, in_fp8).missed
        return tuple(sorted(cheapest if better else left_out)), tuple(in_fp8)

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
        noise = f"makes {self.layer_noise[name] / self.total_noise:.1%} of the noise and " if self.total_noise else ""
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


class Judging:
    """How graphs do. Kept in a file, one JSON line each: an interrupted search goes on from there."""

    def __init__(self, judge: Judge, path: Path | None) -> None:
        self.judge, self.path, self.judgements, self.asked = judge, path, dict[str, Judged](), set[str]()
        if path is None or not path.is_file():
            return
        self.judgements |= dict(filter(None, map(_line, whole(path).decode().splitlines())))

    def __call__(self, scales: str, choice: Sequence[str], graph: Callable[[], ModelProto]) -> Judged:
        """By the digest of the scales and the choice's name, where an earlier call ran its graph."""
        name = sha256_json([scales, *choice])
        self.asked.add(name)
        if name not in self.judgements:
            judged = self.judgements[name] = self.judge(graph())
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    content = [str(judged.snr_db), judged.figure, list(judged.missed), vars(judged.figures)]
                    file.write(json.dumps([name, *content, judged.samples, judged.room]) + "\n")
        return self.judgements[name]


def _line(text: str) -> tuple[str, Judged] | None:
    """What a line says; None: it was cut off when the process was killed."""
    try:
        name, snr, figure, missed, figures, samples, room = json.loads(text)
        room = None if room is None else float(room)
        others = str(figure), tuple(map(str, missed)), TunedFigures(**figures), int(samples)
        return str(name), Judged(float(snr), *others, room)
    except (ValueError, TypeError):
        return None
