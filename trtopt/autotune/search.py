"""The layers that stay out of INT8, once it is known what each of them adds to the noise and what leaving it out costs.

Layers are ranked by their noise for what leaving them out costs. `fewest` finds how many of the first have to stay out for the
results to be within the limits, beginning at the number that the summed noise predicts; those that aren't needed are put back,
the costliest first. What a GPU runs faster in floating point stays out as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trtopt.autotune.goal import TunedChoice
from trtopt.autotune.selection import EQUAL
from trtopt.calibration.repairing import NoiseByPlace
from trtopt.calibration.safety import fewest
from trtopt.core.errors import AccuracyLost
from trtopt.core.progress import Reporter
from trtopt.core.values import Override, overriding
from trtopt.graph.op_types import WEIGHTED
from trtopt.graph.passes.placement import Points

MOST_PUT_BACK = 24  # tries
LEAST = 1e-4  # that a layer is taken to cost when layers are ranked: nothing stays out for nothing


@dataclass(frozen=True)
class Measured:
    """Times of two engines of one model on a GPU, as shares of the floating one's; means over the profiles.

    Attributes:
        quantized, floating: node → the share that it takes in either engine.
        described: what was measured, in words.
    """

    quantized: Mapping[str, float]
    floating: Mapping[str, float]
    described: str


@dataclass
class Choices:
    """The choices of one model: sets of layers that stay out of INT8.

    Attributes:
        operators: of the nodes.
        work: node → multiply-accumulates, whose shares are the costs where no times were measured.
    """

    evaluate: Callable[[Sequence[str]], TunedChoice]
    points: Callable[[Sequence[str]], Points]
    operators: dict[str, str]
    noise: NoiseByPlace
    work: Mapping[str, int]
    measured: Measured | None
    overrides: Sequence[Override]
    reporter: Reporter
    tried: dict[frozenset[str], TunedChoice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all_quantized = self.points(())
        quantized = self.all_quantized.quantized
        self.layers = [name for name in quantized if overriding(self.overrides, name, self.operators[name]) is None]
        self.forced = set(quantized) - set(self.layers)  # in INT8 by the user's own wish
        self.layer_noise = {name: self.noise.weights.get(name, 0.0) for name in self.layers}
        for tensor, slots in self.all_quantized.reads.items():
            nodes = [node for node, _ in slots if self.operators.get(node) in WEIGHTED] or [node for node, _ in slots]
            for node in nodes:
                if node in self.layer_noise:
                    self.layer_noise[node] += self.noise.activations.get(tensor, 0.0) / len(nodes)
        weights = sum(self.noise.weights.get(name, 0.0) for name in quantized)
        self.total_noise = weights + sum(self.noise.activations.get(name, 0.0) for name in self.all_quantized.reads)

    def share(self, names: Iterable[str]) -> float:
        """Return the share of the arithmetic that these do."""
        return sum(self.work.get(name, 0) for name in names) / (sum(self.work.values()) or 1)

    def cost(self, name: str) -> float:
        """Return what leaving a layer out costs; below 0: it is faster in floating point."""
        if self.measured is None:
            return self.share([name])
        return self.measured.floating.get(name, 0.0) - self.measured.quantized.get(name, 0.0)

    def judged(self, left_out: Sequence[str]) -> TunedChoice:
        """Return how one choice does, run once."""
        key = frozenset(left_out)
        if key not in self.tried:
            out = sorted(key)
            share = self.share(self.points(out).quantized)
            self.tried[key] = replace(self.evaluate(out), left_out=len(out), share=share)
        return self.tried[key]

    def remaining_noise(self, left_out: Sequence[str]) -> float:
        """Return the noise that the ledger sums up where these stay out."""
        return self.total_noise - sum(self.layer_noise[name] for name in left_out)

    def chosen(self) -> tuple[str, ...]:
        """Return the layers to leave out of INT8; AccuracyLost where that doesn't help."""
        return tuple(sorted(self._faster(self._search() if self.judged(()).missed else ())))

    def _search(self) -> tuple[str, ...]:
        """Return a few layers without which the limits hold."""
        costs = {name: max(self.cost(name), LEAST) for name in self.layers}
        ranked = sorted(self.layers, key=lambda name: (-self.layer_noise[name] / costs[name], name))
        first, step = self._first(ranked)
        with self.reporter.phase("looking for the layers that have to stay out", None) as phase:

            def within(count: int) -> bool:
                phase.detail(f"{count} out")
                return not self.judged(ranked[:count]).missed

            count = fewest(len(ranked), within, first=first, step=step)
        if count == len(ranked) and (not self.forced or self.judged(ranked).missed):
            raise self._lost()
        left_out = tuple(ranked[:count])
        with self.reporter.phase("trying what stays out in INT8", None) as phase:
            for name in sorted(left_out, key=lambda name: (-costs[name], name))[:MOST_PUT_BACK]:
                phase.advance()
                others = tuple(item for item in left_out if item != name)
                if self._may_fit(name, left_out) and not self.judged(others).missed:
                    left_out = others
        return left_out

    def _first(self, ranking: Sequence[str]) -> tuple[int, int]:
        """Return how many of the ranked layers to leave out first, and by how many more or fewer to go on from there."""
        headroom, noise = self.judged(()).headroom_db, self.remaining_noise(())
        if headroom is None or not 0 < noise < math.inf:
            return 2, 4  # the first few decide mostly, so that steps grow from there
        most = noise * 10 ** (headroom / 10)
        enough = (count for count in range(1, len(ranking)) if self.remaining_noise(ranking[:count]) < most)
        return next(enough, len(ranking) // 2), 1

    def _may_fit(self, name: str, left_out: Sequence[str]) -> bool:
        """Return whether half of what the ledger says that a layer adds fits into what is left."""
        headroom, noise = self.judged(left_out).headroom_db, self.remaining_noise(left_out)
        if headroom is None or not 0 < noise < math.inf:
            return True
        return 10 * math.log10(1 + self.layer_noise[name] / noise / 2) <= headroom

    def _faster(self, left_out: tuple[str, ...]) -> tuple[str, ...]:
        """Add the layers that a GPU was measured to run faster in floating point, where that is within the limits, too."""
        if self.measured is None:
            return left_out
        gains = {name: -self.cost(name) for name in self.layers if name not in left_out and self.cost(name) < 0}
        more = (*left_out, *gains)
        everything = len(more) == len(self.layers) and not self.forced
        better = sum(gains.values()) > EQUAL and not everything and not self.judged(more).missed
        return more if better else left_out

    def _lost(self) -> AccuracyLost:
        if worst := "; ".join(self.judged(self.layers).missed):
            alone = "with nothing in INT8 but what `precision_override=` puts there" if self.forced else "without INT8"
            return AccuracyLost(
                f"not even {alone} do the results stay within the limits ({worst}): leaving layers out can't help: ask "
                "for less, or build without INT8 and FP16"
            )
        quantized = (item for item in self.tried.values() if item.left_out < len(self.layers))
        most = max(quantized, key=lambda choice: choice.snr_db)
        best = f"{most.snr_db:.1f} dB with {most.share:.0%} of the arithmetic in INT8, {'; '.join(most.missed)}"
        return AccuracyLost(
            f"only without INT8 do the results stay within the limits (the best choice tried: {best}): build with `fp16=True`, "
            "or ask for less"
        )

    def reason(self, name: str) -> str:
        """Say why a layer stays out."""
        noise = f"makes {self.layer_noise[name] / self.total_noise:.1%} of the noise and " if self.total_noise else ""
        said = f"tuned: in INT8 it {noise}does {self.share([name]):.1%} of the arithmetic"
        if self.measured is None:
            return said
        ours, other = (shares.get(name, 0.0) for shares in (self.measured.quantized, self.measured.floating))
        return f"{said}; it takes {ours:.1%} of FP16's time in INT8 and {other:.1%} in FP16"

    def pareto_front(self) -> tuple[TunedChoice, ...]:
        """Return of what was tried what nothing else beats in both share and dB."""
        best: list[TunedChoice] = []
        for choice in sorted(self.tried.values(), key=lambda item: (-item.share, -item.snr_db)):
            if not best or choice.snr_db > best[-1].snr_db:
                best.append(choice)
        return tuple(best)
