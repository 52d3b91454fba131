"""Engines of one model against each other: timed in turns, judged against FP32, one kept, and why.

Everything that was measured is kept as plain JSON in the engine's manifest.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtopt.core.documents import Damaged, converted, plain
from trtopt.core.errors import AccuracyLost, TrtoptError
from trtopt.engine.manifest import load_manifest
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.outputs import sentence
from trtopt.evaluation.timing import Times

LOST = 10.0  # dB: below, an engine's results aren't those of its model
EQUAL = 0.01  # times that differ by less count as equal, and of equals the more precise engine is better
_ORDER = ("fp32", "fp16", "bf16", "fp8", "int8")  # from the most precise


@dataclass(frozen=True)
class Candidate:
    """One engine, or why there is none.

    Attributes:
        precision_summary: as in `BuildResult`.
        accuracy: against FP32 (`Agreement.figures()`); None: not judged.
        failed: why there is no such engine; then the rest is empty.
    """

    precision: str
    precision_summary: str = ""
    seconds: float = 0.0
    times: tuple[Times, ...] = ()
    accuracy: Mapping[str, Any] | None = None
    failed: str = ""

    @property
    def name(self) -> str:
        return self.precision.upper()

    @property
    def quantized(self) -> bool:
        return self.precision in ("int8", "fp8")

    def missed(self, limits: Limits) -> str:
        """Say why it can't be kept within limits; "": it can, as far as that is known."""
        if self.failed or self.accuracy is None:
            return self.failed
        return "; ".join(limits.missed(self.accuracy))

    def slower_than(self, other: Candidate) -> str:
        """Say at which profiles it takes longer than `other`, and how many times as long; "": at none."""
        ratios = [(mine, mine.gpu_ms / theirs.gpu_ms) for mine, theirs in zip(self.times, other.times)]
        return ", ".join(f"{_shapes(at)} ({ratio:.2f} times its time)" for at, ratio in ratios if ratio > 1 + EQUAL)

    def relative_time(self, other: Candidate) -> float:
        """Return how many times as long as `other` it takes: geometric mean over the profiles."""
        return statistics.geometric_mean(mine.gpu_ms / theirs.gpu_ms for mine, theirs in zip(self.times, other.times))


@dataclass(frozen=True)
class Comparison:
    """Measurements of several engines, and the one that is kept.

    Attributes:
        gpu: where; inputs: what the engines were timed on; reference: what they were judged against, or None.
        kept: precision of the engine kept, and `why` in one line.
        speedup: how many times as fast the quantized engine is as the other; None where one of them couldn't be built.
        best: whether the fastest within `limits` was to be kept, rather than what was asked for.
        candidates: what was built, those that failed too.
        key: what a selection depends on; empty without one.
    """

    gpu: str
    inputs: str
    reference: str | None
    candidates: tuple[Candidate, ...]
    best: bool = False
    limits: Limits | None = None
    kept: str = ""
    why: str = ""
    key: str = ""

    @property
    def speedup(self) -> float | None:
        candidates = {item.quantized: item for item in reversed(self.candidates) if item.times}
        return candidates[False].relative_time(candidates[True]) if len(candidates) == 2 else None

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**plain(self), "speedup": self.speedup}

    def candidate(self, precision: str) -> Candidate:
        return next(item for item in self.candidates if item.precision == precision)

    def asked_for(self, precision: str) -> Comparison:
        """Keep `precision` as it was asked for, and say how it compares."""
        mine = self.candidate(precision)
        other = next(item for item in self.candidates if item.precision != precision)
        near = "" if mine.accuracy is None else f"; {_accuracy(mine, other.name)}"
        return replace(self, kept=precision, why=f"{mine.name} as asked for: {_compared(mine, other)}{near}")

    def lost(self, precision: str) -> str:
        """Say how near its results are to the reference's, where they have next to nothing to do with them; else nothing."""
        mine = self.candidate(precision)
        return _accuracy(mine, self.reference or "") if mine.missed(Limits(min_agreement=0.0, min_snr=LOST)) else ""

    def judged(self, limits: Limits) -> Comparison:
        """Keep the fastest within the limits, quantized only if it is slower in no profile than one in floating point. Raise
        AccuracyLost where there is none."""
        outside = {item.precision: item.missed(limits) for item in self.candidates}
        fitting = [item for item in self.candidates if not outside[item.precision]]
        if not fitting:
            failures = "; ".join(f"{item.name}: {outside[item.precision]}" for item in self.candidates)
            raise AccuracyLost(
                f"no precision stays within the accuracy limit ({failures}): lower `min_agreement=` or `min_snr=`, calibrate "
                "on more or other data, or keep sensitive layers in FP32 with `precision_override=`"
            )
        slower = {
            item.precision: f", but takes longer than {other.name} at {places}: `int8=True` with its table keeps it"
            for item in fitting
            for other in fitting
            if item.quantized and not other.quantized and (places := item.slower_than(other))
        }
        steady = [item for item in fitting if item.precision not in slower]
        fastest = min(item.relative_time(fitting[0]) for item in steady)
        equals = [item for item in steady if item.relative_time(fitting[0]) <= fastest * (1 + EQUAL)]
        best = min(equals, key=lambda item: _ORDER.index(item.precision))
        reasons = []
        for item in fitting:
            if item is not best:
                longer = best.relative_time(item) > 1 + EQUAL
                reasons.append(_compared(best, item) + (slower.get(item.precision, "") if longer else ""))
        for item in self.candidates:
            if item.failed:
                reasons.append(f"no {item.name} engine: {item.failed}")
            elif why := outside[item.precision]:
                reasons.append(f"{item.name} is outside the accuracy limit ({why})")
        why = f"{best.name} kept: {'; '.join([*reasons, _accuracy(best, 'FP32')])}"
        return replace(self, best=True, limits=limits, kept=best.precision, why=why)


def _shapes(times: Times) -> str:
    return "; ".join(f"{name} {shape}" for name, shape in times.shapes.items())


def _compared(mine: Candidate, other: Candidate) -> str:
    """Compare `mine` with `other` in speed, in words."""
    relative = mine.relative_time(other)
    each = ", ".join(f"{a.gpu_ms:.4g} and {b.gpu_ms:.4g} ms" for a, b in zip(mine.times, other.times))
    shapes = ", ".join(map(_shapes, mine.times))
    relation = f"{1 / relative:.2f} times as fast as" if relative < 1 else f"{relative:.2f} times the time of"
    if abs(math.log(relative)) <= math.log(1 + EQUAL):
        relation = "as fast as"
    return f"{relation} {other.name} ({each} at {shapes})"


def _accuracy(candidate: Candidate, reference: str) -> str:
    """Say how near the results are to the reference's, each output by its kind."""
    accuracy = candidate.accuracy or {}
    said = (sentence(name, output, accuracy["samples"]) for name, output in accuracy["outputs"].items())
    return f"against {reference}: {'; '.join(said)}"


def stored_comparison(output: Path) -> Comparison | None:
    """The comparison in the manifest at `output`; None where there is none, or it can't be read, as from another version."""
    with contextlib.suppress(TrtoptError, Damaged):
        manifest = load_manifest(output)
        if manifest is not None and manifest.comparison:
            return converted(dict(manifest.comparison), Comparison)
    return None
