"""The goal of a choice and its evaluation on real samples: `Goal` and `AccuracyEvaluator`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto

from trtopt.builder.request import BuildRequest
from trtopt.core.errors import AccuracyLost, UsageError
from trtopt.core.words import counted
from trtopt.data import Batches
from trtopt.data.convert import Run, single_runs
from trtopt.data.rebatch import Arrays, samples_first
from trtopt.evaluation.agreement import Scores, verify_all
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.measures import measure
from trtopt.evaluation.metric import Metric, labels_of
from trtopt.graph.half import widen
from trtopt.graph.inputs import network_inputs, network_outputs
from trtopt.graph.output_kinds import Kind
from trtopt.ort.sessions import open_session, run_session

PURPOSE = "tuning"
FEW = 32  # samples; below, one decides too much


@dataclass(frozen=True)
class Goal:
    """A goal for results: `Limits`, or the user's own function (`trtopt.evaluation.metric`; more is better)."""

    limits: Limits | None
    metric: Metric | None = None
    least: float = 0.0


def goal_of(request: BuildRequest) -> Goal | None:
    """Return the goal that a request names; None: it names none."""
    limits = Limits.of(request.min_agreement, request.min_snr)
    labels = labels_of(request.labels)
    if (request.metric is None) != (request.min is None):
        raise UsageError("`metric=` and `min=` go together: a function and the least that it must give")
    metric = None if request.metric is None else Metric(request.metric, labels)
    if labels is not None and (metric is None or not metric.takes_labels):
        raise UsageError("`labels=` are for a `metric=` that takes them: add one, or drop the labels")
    return None if limits is None and metric is None else Goal(limits, metric, request.min or 0.0)


def too_few(count: int) -> str:
    """Warn where so few samples judge; "" where they are enough."""
    if count >= FEW:
        return ""
    judge = f"judge{'s' * (count == 1)}"
    return f"only {counted(count, 'sample')} {judge} the accuracy, so one decides over {1 / count:.0%}: give at least {FEW}"


# Judging a choice --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TunedChoice:
    """One choice that was tried on the samples.

    Attributes:
        snr_db: of the worst output.
        figure: what else was measured, in words.
        missed: the limits that it misses; empty: none.
        headroom_db: dB that the limit in dB leaves, a standard error included; below 0 where it is missed. None: there is none
            for all outputs as they are.
        left_out: how many layers stay out of INT8.
        share: of the multiply-accumulates, those in INT8.
    """

    snr_db: float
    figure: str
    missed: tuple[str, ...]
    headroom_db: float | None = None
    left_out: int = 0
    share: float = 1.0


class AccuracyEvaluator:
    """A judge of graphs, by their results on the samples against those of the model as it is, not folded."""

    def __init__(
        self, proto: ModelProto, batches: Batches, goal: Goal, kinds: Mapping[str, Kind], threads: int
    ) -> None:
        self.goal, self.kinds, self.threads = goal, kinds, threads
        inputs = network_inputs(proto)
        self.infos = network_outputs(proto, inputs)
        self.runs = list(single_runs(inputs, batches))
        self.samples = sum(run.real for run in self.runs)
        labels = None if goal.metric is None else goal.metric.labels
        if labels is not None and len(labels) != self.samples:
            why = "; `limit=` takes samples by their content: drop it" * (len(labels) > self.samples)
            raise UsageError(
                f"{len(labels)} labels were given for {self.samples} samples: give one for each, in their order{why}"
            )
        self.expected = self._results(proto)
        self.score = 0.0 if goal.metric is None else goal.metric(self.expected, self.expected)
        if goal.metric is not None and not self.score >= goal.least:
            raise AccuracyLost(
                f"{goal.metric.name} gives {self.score:.6g} for the float model itself, at least {goal.least:g} is asked for: "
                "quantization isn't to blame; look at the model, the samples and how they are prepared"
            )

    def __call__(self, proto: ModelProto) -> TunedChoice:
        goal, results = self.goal, self._results(proto)
        old, new = iter(self.expected), iter(results)
        feeds = (run.samples for run in self.runs)
        agreement = verify_all(lambda _: next(old), {"": lambda _: next(new)}, feeds, kinds=self.kinds)[""]
        description, outputs = agreement.figures(), agreement.outputs
        missed, error = list[str](), self._error(results)
        snr = min((item.snr_db for item in outputs if not item.integers), default=math.inf)
        limits, least = goal.limits, None if goal.limits is None else goal.limits.min_snr
        if limits is not None:
            missed = limits.missed(description)
            # Those in dB have to hold less a standard error over the samples.
            if not missed and least is not None and replace(limits, min_snr=least + error).missed(description):
                but = f"but not with a standard error of {error:.2g} dB over them"
                missed = [f"{least:g} dB hold on these samples, {but}"]
        measured = {name: measure(output, self.samples) for name, output in description["outputs"].items()}
        texts = [f"{name}: {text}" if len(measured) > 1 else text for name, text in measured.items() if text]
        if goal.metric is not None:
            scores = Scores(goal.metric.name, self.score, goal.metric(results, self.expected), goal.least)
            texts.append(f"{scores.name} {scores.candidate:.6g}")
            missed += scores.missed
        apart = any(item.channels is not None for item in outputs)  # each channel by itself
        headroom = None if least is None or apart or not math.isfinite(snr) else snr - least - error
        return TunedChoice(snr, "; ".join(texts), tuple(missed), headroom)

    def _error(self, results: Sequence[Arrays]) -> float:
        """Return the standard error over the samples, in dB, of the ratio of noise and signal, of the worst output."""
        largest, count = 0.0, len(results)
        for name in results[0]:
            old, new = ([np.asarray(arrays[name], np.float64) for arrays in each] for each in (self.expected, results))
            signal = np.array([np.square(item).sum() for item in old])
            noise = np.array([np.square(one - other).sum() for one, other in zip(old, new)])
            if count < 2 or not 0 < noise.sum() < math.inf or not signal.sum() > 0:
                continue
            ratio = noise.sum() / signal.sum()
            deviation = math.sqrt(float(np.square(noise - ratio * signal).sum()) * count / (count - 1)) / signal.sum()
            largest = max(largest, 10 * math.log10(1 + deviation / ratio))
        return largest

    def _results(self, proto: ModelProto) -> list[Arrays]:
        proto = widen(proto)  # FP16's rounding and limits are part of the result
        session = open_session(proto, threads=1, optimize=False, memory_pattern=False, purpose=PURPOSE)

        def run(part: Run) -> Arrays:
            return part.cut(samples_first(run_session(session, None, part.feed), self.infos))

        with ThreadPoolExecutor(self.threads, thread_name_prefix="trtopt-tune") as pool:
            return list(pool.map(run, self.runs))
