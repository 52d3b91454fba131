"""The agreement of candidates with their reference on all samples, each output by what it means.

Cosine misranks quantizations of classifiers: a bad calibration costs many classes while the cosine of the logits hardly falls
(docs/results/accuracy-lite0.md). It is reported, since people look for it, and judges embeddings alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import plain
from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import Kind, TensorInfo
from trtopt.data.rebatch import Arrays
from trtopt.evaluation.limits import Limits, not_finite
from trtopt.evaluation.measures import rows_of
from trtopt.evaluation.outputs import OutputAgreement, OutputSums, sentence, spread
from trtopt.evaluation.per_layer import LayerAgreement, verdict
from trtopt.graph.output_kinds import stated

Runner = Callable[[Arrays], Arrays]
"""Input name → array to output name → array: an `OnnxRunner`, or `Session.run`."""

_FINITE = (
    "build it with `fp16=True` and these samples (`data=` or `images=`), which keep in FP32 what FP16 can't hold, as a table "
    "calibrated on them does in INT8, or with `bf16=True`"
)
_FIRST = "; `per_layer=True` names the first node that gives such values"


@dataclass(frozen=True)
class Accuracy:
    """Share of samples whose label is the largest class, or among the five largest."""

    top1: float
    top5: float


@dataclass(frozen=True)
class Scores:
    """Values of a function of the user's own for the outputs of both. `least` is asked of the candidate's; None: nothing is."""

    name: str
    reference: float
    candidate: float
    least: float | None = None

    @property
    def missed(self) -> tuple[str, ...]:
        if self.least is None or self.candidate >= self.least:
            return ()
        own = "" if self.reference >= self.least else f"; the reference itself gives {self.reference:.6g}"
        return (f"{self.name} gives {self.candidate:.6g}, at least {self.least:g} is asked for{own}",)


@dataclass(frozen=True)
class Agreement:
    """The result of `verify`. The two accuracies are None without labels.

    Attributes:
        limits: what it was judged by; None: it wasn't.
        metric: what a function of the user's own gives, where there is one.
        engine: the candidate, where that was an engine, and the SHA-256 of its plan.
        ran: what its results came from.
        layers: the tensors that both graphs have, in the candidate's order, where they were asked for.
    """

    samples: int
    outputs: tuple[OutputAgreement, ...]
    reference_accuracy: Accuracy | None = None
    candidate_accuracy: Accuracy | None = None
    limits: Limits | None = None
    metric: Scores | None = None
    engine: str = ""
    engine_sha256: str = ""
    ran: str = ""
    layers: tuple[LayerAgreement, ...] = ()

    @property
    def snr_db(self) -> float:
        """The lowest over the outputs."""
        return min(item.snr_db for item in self.outputs)

    @property
    def top1(self) -> float | None:
        """Agreement of the first output that is classes."""
        return next((item.top1 for item in self.outputs if item.top1 is not None), None)

    @property
    def missed(self) -> tuple[str, ...]:
        """Return what is outside the limits, each with the value and the limit; without limits, values that aren't finite."""
        scores = () if self.metric is None else self.metric.missed
        return (*(not_finite if self.limits is None else self.limits.missed)(self.figures()), *scores)

    @property
    def ok(self) -> bool:
        """Return whether all values are finite, and nothing that was asked for is missed."""
        return not self.missed

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values; a number that isn't finite is its name ("inf", "-inf", "nan")."""
        values = {**self.figures(), "missed": list(self.missed), "ok": self.ok}
        known = ("engine", "engine_sha256", "ran", "metric", "limits", "layers")
        values |= {name: plain(value) for name in known if (value := getattr(self, name))}
        return values | ({"verdict": verdict(self.layers)} if self.layers else {})

    def figures(self) -> dict[str, Any]:
        """Return what was measured, without a judgement, as `describe`."""
        return {
            "samples": self.samples,
            "snr_db": plain(self.snr_db),
            "top1_agreement": self.top1,
            "reference_accuracy": plain(self.reference_accuracy),
            "candidate_accuracy": plain(self.candidate_accuracy),
            "outputs": {item.name: item.describe() for item in self.outputs},
        }

    def __str__(self) -> str:
        lines = [f"ran {self.ran}"] if self.ran else []
        for name, output in self.figures()["outputs"].items():
            lines.append(sentence(name, output, self.samples))
            if more := spread(output):
                lines.append(f"  {more}")
        if self.reference_accuracy and self.candidate_accuracy:
            old, new = self.reference_accuracy, self.candidate_accuracy
            lines.append(f"top-1 {old.top1:.1%} → {new.top1:.1%}, top-5 {old.top5:.1%} → {new.top5:.1%}")
        if self.layers:
            lines.append(verdict(self.layers))
        asked = [] if self.limits is None else [self.limits.kept(self.figures())]
        if (scores := self.metric) is not None:
            lines.append(f"{scores.name}: {scores.reference:.6g} → {scores.candidate:.6g}")
            asked += [] if scores.least is None else [f"{scores.name} at least {scores.least:g}"]
        lines += [f"outside {'the' if asked else 'any'} limit: {text}" for text in self.missed]
        if asked and not self.missed:
            lines.append(f"within the limits: {'; '.join(asked)}")
        if any(item.nonfinite for item in self.outputs):
            lines.append(f"next: {_FINITE}{_FIRST * (not self.layers)}")
        return "\n".join(lines)


def verify_all(
    reference: Runner,
    candidates: Mapping[str, Runner],
    batches: Iterable[Arrays],
    labels: Sequence[int] | None = None,
    *,
    kinds: Mapping[str, Kind],
) -> dict[str, Agreement]:
    """`verify` for several candidates by name: one pass over the samples, each run once through the reference.

    Args:
        kinds: of the outputs; of those that it lacks values are compared.
    """
    comparisons = {name: _Comparison(labels, kinds) for name in candidates}
    for batch in batches:
        samples = next((len(array) for array in batch.values() if array.ndim), 1)
        outputs, masks = reference(batch), unpadded(batch)
        for name, runner in candidates.items():
            comparisons[name].add(outputs, runner(batch), samples, masks)
    names = tuple(getattr(batches, "names", ()))
    return {name: comparison.result(names) for name, comparison in comparisons.items()}


def unpadded(batch: Arrays) -> list[NDArray[np.bool_]]:
    """Samples × positions, which aren't padding, by each input of 0 and 1 that is called a mask or padding.

    A row that changes once has padding: where an attention mask is 0; else in its second part, as PyTorch's masks have 1 there
    and others 0. Any other row has none, since no sample is all padding.
    """
    masks = []
    for name, array in batch.items():
        named = re.search("mask|pad", name, re.I) and array.ndim == 2 and array.dtype.kind in "biu"
        if named and not ((array != 0) & (array != 1)).any():
            once = (array[:, 1:] != array[:, :-1]).sum(1, keepdims=True) == 1
            masks.append((array == (1 if re.search("att", name, re.I) else array[:, :1])) | ~once)
    return masks


class _Comparison:
    def __init__(self, labels: Sequence[int] | None, kinds: Mapping[str, Kind]) -> None:
        self.labels, self.kinds = labels, kinds
        self.samples = 0
        self.sums: dict[str, OutputSums] = {}
        # Of the first output that is classes: in the reference and the candidate, of one and of five.
        self.hits: Any = None

    def add(self, reference: Arrays, candidate: Arrays, samples: int, masks: Sequence[NDArray[np.bool_]] = ()) -> None:
        if not isinstance(candidate, Mapping) or not all(hasattr(array, "ndim") for array in candidate.values()):
            raise UsageError(f"the candidate gives {type(candidate).__name__}; a mapping of names to arrays is needed")
        if set(reference) != set(candidate):
            names = (", ".join(sorted(outputs)) for outputs in (reference, candidate))
            raise UsageError("the reference has outputs {}; the candidate {}".format(*names))
        labels = None if self.labels is None else np.asarray(self.labels[self.samples : self.samples + samples])
        if labels is not None and len(labels) < samples:
            raise UsageError(f"{len(labels) + self.samples} labels were given; there are more samples")
        outputs = {name: (np.asarray(reference[name]), np.asarray(candidate[name])) for name in reference}
        if not self.sums:
            stated(self.kinds, [TensorInfo(name, old.dtype.name, old.shape) for name, (old, _) in outputs.items()])
            self.sums = {name: OutputSums(name, self.kinds.get(name, Kind.OTHER)) for name in outputs}
        for name, (old, new) in outputs.items():
            if old.shape != new.shape:
                raise UsageError(f"output {name!r}: shape {old.shape} in the reference, {new.shape} in the candidate")
            fitting = [mask for mask in masks if mask.shape == old.shape[:2]]
            self.sums[name].add(old, new, samples, fitting[-1] if fitting else None)  # a decoder's comes last
        classes = [name for name, sums in self.sums.items() if sums.kind is Kind.CLASSES]
        first = next((name for name in classes if rows_of(outputs[name][0]).shape[:2] == (samples, 1)), None)
        if labels is not None and first is not None:
            hits = np.array([_hits(first, array, labels) for array in outputs[first]])
            self.hits = hits if self.hits is None else self.hits + hits
        self.samples += samples

    def result(self, names: Sequence[str] = ()) -> Agreement:
        if not self.samples:
            raise DataError("there are no samples to compare")
        if len(names) != self.samples:
            names = [f"sample {number}" for number in range(self.samples)]
        outputs = tuple(sums.result(names) for sums in self.sums.values())
        if self.labels is None:
            return Agreement(self.samples, outputs)
        if len(self.labels) != self.samples:
            raise UsageError(f"{len(self.labels)} labels were given for {self.samples} samples")
        if self.hits is None:
            kinds = ", ".join(f"{item.name} is {item.kind}" for item in outputs)
            raise UsageError(
                f"labels were given, but no output is samples × classes: {kinds}; say which it is "
                f"(`output_kind=['{outputs[0].name}=classes']`), or measure by a `metric=` that takes them"
            )
        before, after = (Accuracy(*map(float, shares)) for shares in self.hits / self.samples)
        return Agreement(self.samples, outputs, before, after)


def _hits(name: str, array: NDArray[Any], labels: NDArray[Any]) -> tuple[int, int]:
    """Count how often the label is the best class, and one of the five best."""
    scores = array.astype(np.float64).reshape(len(array), -1)
    low, high, last = int(labels.min()), int(labels.max()), scores.shape[1] - 1
    if low < 0 or high > last:
        numbered = f"label{f's {low} to' * (low != high)} {high}: output {name!r} has classes 0 to {last}"
        raise UsageError(numbered + "; where labels begin at 1, give each less 1" * (high == last + 1 > 1))
    best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")[:, :5]
    right = (best == labels[:, None]) & ~np.isnan(np.take_along_axis(scores, labels[:, None], 1))
    return int(right[:, 0].sum()), int(right.any(1).sum())
