"""The goal of a choice and its evaluation on real samples: `Goal` and `AccuracyEvaluator`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto

from trtopt.builder.request import BuildRequest
from trtopt.calibration.quality import checksum
from trtopt.core.documents import plain
from trtopt.core.errors import AccuracyLost, DataError, UsageError
from trtopt.core.words import counted
from trtopt.data import Batches
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import Arrays, samples_first
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.metric import Metric, called, labels_of, metric_of, of_all, scored, takes_labels
from trtopt.evaluation.outputs import measure
from trtopt.evaluation.verify import Agreement, verify_all
from trtopt.graph.half import widen
from trtopt.graph.inputs import network_inputs, network_outputs
from trtopt.graph.output_kinds import Kind
from trtopt.ort.sessions import as_taken, open_session

PURPOSE = "tuning"
FEW = 32  # samples; below, one decides too much
ROUNDS = (16, 8, 4, 2)  # a graph is looked at after so many parts of the samples


@dataclass(frozen=True)
class Goal:
    """A goal for results: `Limits`, or the user's own function.

    Attributes:
        labels: true classes, for a metric that takes them.
        metric: see `trtopt.evaluation.metric`; more is better.
    """

    limits: Limits | None
    labels: tuple[int, ...] | None = None
    metric: Metric | None = None
    least: float = 0.0
    name: str = ""

    def describe(self) -> dict[str, Any]:
        return {"limits": plain(self.limits), "metric": self.name, "least": self.least}


def goal_of(request: BuildRequest) -> Goal | None:
    """The goal that a request names; None: it names none.

    Raises:
        UsageError: it can't be right.
    """
    limits = Limits.of(request.min_agreement, request.min_snr)
    labels, metric = None if request.labels is None else labels_of(request.labels), None
    if (request.metric is None) != (request.min is None):
        raise UsageError("`metric=` and `min=` go together: a function and the least that it must give")
    if request.metric is not None:
        metric = metric_of(request.metric, labels)
    if labels is not None and (metric is None or not takes_labels(metric)):
        raise UsageError("`labels=` are for a `metric=` that takes them: add one, or drop the labels")
    if limits is None and metric is None:
        if request.budget is not None:
            limit = "a limit such as `min_snr=25`" if request.int8 else "`int8=True` and a limit such as `min_snr=25`"
            raise UsageError(
                f"`budget=` is the time to look for what stays out of INT8 within a limit: add {limit}, or drop it"
            )
        if request.trade_profiles:
            raise UsageError(
                "`trade_profiles=True` decides whether INT8 is kept: add `best=True`, or `int8=True` and a limit such as "
                "`min_snr=25`, or drop it"
            )
        return None
    if request.trade_profiles and not request.compare:
        raise UsageError("`trade_profiles=True` weighs times, and `compare=False` measures none: drop one of them")
    return Goal(limits, labels, metric, request.min or 0.0, called(request.metric))


def too_few(count: int) -> str:
    """Warn where so few samples judge; "" where they are enough."""
    if count >= FEW:
        return ""
    judge = f"judge{'s' * (count == 1)}"
    return f"only {counted(count, 'sample')} {judge} the accuracy, so one decides over {1 / count:.0%}: give at least {FEW}"


# Judging a choice --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TunedFigures:
    """Figures besides dB; None: not measured.

    Attributes:
        agreement: share of classes, tokens or pixels that are the same, of the output where that is least.
        cosine: of embeddings, the lowest.
        metric: what the user's own function gives.
    """

    agreement: float | None = None
    cosine: float | None = None
    metric: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """The results of a graph on the samples.

    Attributes:
        snr_db: of the worst output, on those that were run.
        figures: what else was measured on them; figure: the same in words.
        missed: the limits that it misses.
        samples: that were run: not all where the others couldn't have mended what was missed.
        headroom_db: dB that the limit in dB leaves, its standard error included; below 0 where it is missed. None: there is
            none for all outputs as they are.
    """

    snr_db: float
    figure: str
    missed: tuple[str, ...]
    figures: TunedFigures
    samples: int
    headroom_db: float | None = None


class AccuracyEvaluator:
    """Runs graphs on the samples, each on one thread by itself, and holds the results against those of the model as it is.

    The samples are run in rounds, in an order that only their content decides. A graph that would miss the limits even if it
    lost nothing on all samples that are left isn't run on these; one that is within them was run on all.

    Args:
        proto: the model as the user gave it, not folded.
    """

    def __init__(
        self,
        proto: ModelProto,
        batches: Batches,
        goal: Goal,
        kinds: Mapping[str, Kind],
        threads: int,
    ) -> None:
        self.goal, self.kinds, self.threads = goal, kinds, threads
        inputs = network_inputs(proto)
        self.outputs = [value.name for value in proto.graph.output]
        self.infos = network_outputs(proto, inputs)
        self.runs = list(single_runs(inputs, batches))
        self.samples = sum(run.real for run in self.runs)
        self.order = sorted(range(len(self.runs)), key=lambda number: checksum(self.runs[number].feed))
        count = len(self.order)
        self.rounds = sorted({*(math.ceil(count / part) for part in ROUNDS), count})
        alone = [
            {name: array[k : k + 1] for name, array in run.samples.items()}
            for run in self.runs
            for k in range(run.real)
        ]
        self.different = len(set(map(checksum, alone)))
        if goal.labels is not None and len(goal.labels) != self.samples:
            why = "; `limit=` takes samples by their content: drop it" * (len(goal.labels) > self.samples)
            raise UsageError(
                f"{len(goal.labels)} labels were given for {self.samples} samples: give one for each, in their order{why}"
            )
        self.expected = self._runner(proto)(range(count))
        self.reference = of_all(self.expected) if goal.metric is not None else {}
        if goal.metric is not None and not (value := self._scored(self.expected)) >= goal.least:
            raise AccuracyLost(
                f"{goal.name} gives {value:.6g} for the float model itself, at least {goal.least:g} is asked for: quantization "
                "isn't to blame; look at the model, the samples and how they are prepared"
            )

    def __call__(self, proto: ModelProto) -> Evaluation:
        goal, run = self.goal, self._runner(proto)
        results_by_run: dict[int, Arrays] = {}
        missed: list[str] = []
        for end in self.rounds:
            part = self.order[len(results_by_run) : end]
            results_by_run |= zip(part, run(part))
            if goal.limits is not None and end < len(self.order):
                best = [results_by_run.get(number, arrays) for number, arrays in enumerate(self.expected)]
                if missed := goal.limits.missed(self._agreement(range(len(best)), best).figures()):
                    break
        run_numbers = sorted(results_by_run)
        results, whole = [results_by_run[number] for number in run_numbers], len(results_by_run) == len(self.order)
        agreement = self._agreement(run_numbers, results)
        description = agreement.figures()
        error = self._error(run_numbers, results)
        if goal.limits is not None:
            missed = (self._missed(description, error) if whole else goal.limits.missed(description)) or missed
        samples = agreement.samples
        measured = {name: measure(output, samples) for name, output in description["outputs"].items()}
        figures = [f"{name}: {text}" if len(measured) > 1 else text for name, text in measured.items() if text]
        measures = TunedFigures(*(_least(description, name) for name in ("agreement", "cosine_min")))
        if goal.metric is not None and whole:
            value = self._scored(results)
            measures = replace(measures, metric=value)
            figures.append(f"{goal.name} {value:.6g}")
            if not value >= goal.least:
                missed.append(f"{goal.name} gives {value:.6g}, at least {goal.least:g} is asked for")
        snr = min((item.snr_db for item in agreement.outputs if not item.integers), default=math.inf)
        headroom = None
        if goal.limits is not None and goal.limits.min_snr is not None and math.isfinite(snr):
            apart = any(item.channels is not None for item in agreement.outputs)  # each channel by itself
            headroom = None if apart else snr - goal.limits.min_snr - error
        return Evaluation(snr, "; ".join(figures), tuple(missed), measures, samples, headroom)

    def _agreement(self, numbers: Sequence[int], results: Sequence[Arrays]) -> Agreement:
        """Compare these runs with floating point."""
        old, new = (iter(arrays) for arrays in ([self.expected[number] for number in numbers], results))
        feeds = [self.runs[number].samples for number in numbers]
        return verify_all(lambda _: next(old), {"": lambda _: next(new)}, feeds, kinds=self.kinds)[""]

    @property
    def constant_output_warning(self) -> str:
        """Say that the model gives all samples the same results, so that no limit says anything; "" where it doesn't."""
        first = {name: array[0] for name, array in self.expected[0].items()}
        rows = ((name, row) for arrays in self.expected for name, array in arrays.items() for row in array)
        if self.different < 2 or any(not np.array_equal(row, first[name]) for name, row in rows):
            return ""
        nothing = ", all zeros," * (not any(array.any() for array in first.values()))
        return (
            f"the float model gives the same results{nothing} for {self.different} different samples, so that no limit says "
            "anything: are its weights trained, and is this preprocessing its own?"
        )

    def _missed(self, description: Mapping[str, Any], error: float) -> list[str]:
        """Return the limits missed. Those in dB have to hold less a standard error over the samples."""
        limits = self.goal.limits
        assert limits is not None
        missed = limits.missed(description)
        if missed or limits.min_snr is None:
            return missed
        if not replace(limits, min_snr=limits.min_snr + error).missed(description):
            return []
        return [
            f"{limits.min_snr:g} dB hold on these samples, but not with a standard error of {error:.2g} dB over them"
        ]

    def _error(self, numbers: Sequence[int], results: Sequence[Arrays]) -> float:
        """Standard error over all samples, in dB, of the ratio of their summed noise and signal, as these runs show it: that of
        the output where it is largest."""
        largest, count = 0.0, len(numbers)
        for name in self.outputs:
            old = [np.asarray(self.expected[number][name], np.float64) for number in numbers]
            new = [np.asarray(arrays[name], np.float64) for arrays in results]
            signal = np.array([np.square(item).sum() for item in old])
            noise = np.array([np.square(one - other).sum() for one, other in zip(old, new)])
            if count < 2 or not 0 < noise.sum() < math.inf or not signal.sum() > 0:
                continue
            ratio = noise.sum() / signal.sum()
            deviation = math.sqrt(float(np.square(noise - ratio * signal).sum()) * count / (count - 1)) / signal.sum()
            deviation *= math.sqrt(count / len(self.runs))
            largest = max(largest, 10 * math.log10(1 + deviation / ratio))
        return largest

    def _scored(self, arrays: Sequence[Arrays]) -> float:
        assert self.goal.metric is not None
        return scored(self.goal.metric, self.goal.name, of_all(arrays), self.reference, self.goal.labels)

    def _runner(self, proto: ModelProto) -> Callable[[Sequence[int]], list[Arrays]]:
        """Open the model; return a function from numbers of runs to their results."""
        proto = widen(proto)  # FP16's rounding and limits are part of the result
        session = open_session(proto, threads=1, optimize=False, memory_pattern=False, purpose=PURPOSE)

        def run(number: int) -> Arrays:
            part = self.runs[number]
            try:
                outputs = dict(zip(self.outputs, session.run(self.outputs, as_taken(session, part.feed))))
                return part.cut(samples_first(outputs, self.infos))
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                raise DataError(f"ONNX Runtime can't run the model on these samples: {error}") from error

        def all_of(numbers: Sequence[int]) -> list[Arrays]:
            with ThreadPoolExecutor(self.threads, thread_name_prefix="trtopt-tune") as pool:
                return list(pool.map(run, numbers))

        return all_of


def _least(description: Mapping[str, Any], name: str) -> float | None:
    """Over the outputs that have it."""
    return min((float(item[name]) for item in description["outputs"].values() if item[name] is not None), default=None)
