"""How well a candidate agrees with its reference: signal-to-noise ratio and classes, not cosine.

Cosine misranks quantizations: calibrated with noise instead of photos, EfficientNet-Lite0 drops from 0.90 to 0.65 top-1
while the cosine of its logits stays 0.99. It is reported, since people look for it, and not judged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.errors import DataError, UsageError
from trtopt.measure.onnx_runner import OnnxRunner

Arrays = Mapping[str, NDArray[Any]]
Runner = Callable[[Arrays], Arrays]
"""Input name → array to output name → array: an `OnnxRunner`, or `Session.run`."""


@dataclass(frozen=True)
class OutputAgreement:
    """One output, over all samples.

    Attributes:
        snr_db: 10·log10(Σ reference² / Σ (reference − candidate)²); inf where equal, -inf where nothing is right.
        max_abs: the largest absolute difference; inf with non-finite values.
        cosine: of the two outputs as vectors; nan where one is zero. Not a measure of quality.
        nonfinite: NaN and infinite values of the candidate where the reference has none.
        top1: share of samples with the same largest class; None where the output isn't samples × classes.
    """

    name: str
    snr_db: float
    max_abs: float
    cosine: float
    nonfinite: int
    top1: float | None


@dataclass(frozen=True)
class Accuracy:
    """Share of samples whose label is the largest class, or among the five largest."""

    top1: float
    top5: float


@dataclass(frozen=True)
class Agreement:
    """What `verify` and `compare` found. The two accuracies are None without labels."""

    samples: int
    outputs: tuple[OutputAgreement, ...]
    reference_accuracy: Accuracy | None = None
    candidate_accuracy: Accuracy | None = None

    @property
    def snr_db(self) -> float:
        """The lowest over the outputs."""
        return min(item.snr_db for item in self.outputs)

    @property
    def top1(self) -> float | None:
        """Top-1 agreement of the first output that has classes."""
        return next((item.top1 for item in self.outputs if item.top1 is not None), None)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values; a number that isn't finite is its name ("inf", "-inf", "nan")."""

        def plain(accuracy: Accuracy | None) -> dict[str, float] | None:
            return None if accuracy is None else {"top1": accuracy.top1, "top5": accuracy.top5}

        return {
            "samples": self.samples,
            "snr_db": _plain(self.snr_db),
            "top1_agreement": self.top1,
            "reference_accuracy": plain(self.reference_accuracy),
            "candidate_accuracy": plain(self.candidate_accuracy),
            "outputs": {
                item.name: {
                    "snr_db": _plain(item.snr_db),
                    "max_abs": _plain(item.max_abs),
                    "cosine": _plain(item.cosine),
                    "nonfinite": item.nonfinite,
                    "top1_agreement": item.top1,
                }
                for item in self.outputs
            },
        }

    def __str__(self) -> str:
        lines = [
            f"{item.name}: {item.snr_db:.1f} dB, largest difference {item.max_abs:.3g}"
            + (f", {item.nonfinite} values not finite" if item.nonfinite else "")
            + ("" if item.top1 is None else f", same class for {item.top1:.1%} of {self.samples}")
            for item in self.outputs
        ]
        if self.reference_accuracy and self.candidate_accuracy:
            old, new = self.reference_accuracy, self.candidate_accuracy
            lines.append(f"top-1 {old.top1:.1%} → {new.top1:.1%}, top-5 {old.top5:.1%} → {new.top5:.1%}")
        return "\n".join(lines)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def verify(
    reference: str | os.PathLike[str] | ModelProto | Runner,
    candidate: str | os.PathLike[str] | ModelProto | Runner,
    batches: Iterable[Arrays],
    labels: Sequence[int] | None = None,
    threads: int | None = None,
) -> Agreement:
    """Run both on the same samples and compare every output.

    Args:
        reference: usually the FP32 ONNX model. ONNX models run in ONNX Runtime on the CPU.
        candidate: usually its Q/DQ, FP16 or BF16 model, run node by node without graph optimizations; or a function
            from inputs to outputs, such as `Session.run`.
        batches: input name → array, the first axis counting samples; each batch is run once through both.
        labels: the true class of each sample, in order.
        threads: ONNX Runtime's threads within an operator; None: one per core.

    Raises:
        ModelError: ONNX Runtime can't run a model.
        DataError: no samples, inputs that don't fit, or a reference output that isn't finite.
        UsageError: the outputs differ in name or shape, or the labels don't fit.
    """
    old = reference if callable(reference) else OnnxRunner(reference, optimize=True, threads=threads)
    new = candidate if callable(candidate) else OnnxRunner(candidate, optimize=False, threads=threads)
    return verify_all(old, {"candidate": new}, batches, labels)["candidate"]


def verify_all(
    reference: Runner, candidates: Mapping[str, Runner], batches: Iterable[Arrays], labels: Sequence[int] | None = None
) -> dict[str, Agreement]:
    """`verify` for several candidates by name: one pass over the samples, each run once through the reference.

    Raises: DataError and UsageError, as `verify`.
    """
    comparisons = {name: _Comparison(labels) for name in candidates}
    for batch in batches:
        samples = next((len(array) for array in batch.values() if array.ndim), 1)
        expected = reference(batch)
        for name, run in candidates.items():
            comparisons[name].add(expected, run(batch), samples)
    return {name: comparison.result() for name, comparison in comparisons.items()}


def compare(reference: Arrays, candidate: Arrays, labels: Sequence[int] | None = None) -> Agreement:
    """Compare outputs that were computed already, such as an engine's on a GPU with the FP32 model's.

    Args:
        reference, candidate: output name → array, the first axis counting samples.
        labels: the true class of each sample, in order.

    Raises: DataError and UsageError, as `verify`.
    """
    comparison = _Comparison(labels)
    comparison.add(reference, candidate, next((len(array) for array in reference.values() if array.ndim), 1))
    return comparison.result()


@dataclass
class _Sums:
    """Running sums of one output, in FP64."""

    signal: float = 0.0
    noise: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    max_abs: float = 0.0
    nonfinite: int = 0
    same: int = 0
    classes: bool = True
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("old1", "old5", "new1", "new5"), 0))

    def add(self, old: NDArray[np.float64], new: NDArray[np.float64]) -> None:
        self.nonfinite += int(new.size - np.isfinite(new).sum())
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(old - new)
            self.signal += float(np.square(old).sum())
            self.noise += float(np.square(difference).sum())
            self.candidate += float(np.square(new).sum())
            self.product += float((old * new).sum())
        worst = float(difference.max(initial=0.0))
        self.max_abs = max(self.max_abs, math.inf if math.isnan(worst) else worst)

    @property
    def snr_db(self) -> float:
        if self.noise == 0:
            return math.inf
        if self.signal == 0 or not math.isfinite(self.noise):
            return -math.inf
        return 10 * math.log10(self.signal / self.noise)

    @property
    def cosine(self) -> float:
        size = math.sqrt(self.signal) * math.sqrt(self.candidate) if self.candidate >= 0 else math.nan
        return self.product / size if size else math.nan


class _Comparison:
    """Adds batches up; nothing but sums is kept."""

    def __init__(self, labels: Sequence[int] | None) -> None:
        self.labels = labels
        self.samples = 0
        self.sums: dict[str, _Sums] = {}

    def add(self, reference: Arrays, candidate: Arrays, samples: int) -> None:
        if set(reference) != set(candidate):
            names = (", ".join(sorted(outputs)) for outputs in (reference, candidate))
            raise UsageError("the reference has outputs {}; the candidate {}".format(*names))
        labels = None if self.labels is None else np.asarray(self.labels[self.samples : self.samples + samples])
        if labels is not None and len(labels) < samples:
            raise UsageError(f"{len(labels) + self.samples} labels were given; there are more samples")
        for name in reference:
            old, new = np.asarray(reference[name], np.float64), np.asarray(candidate[name], np.float64)
            if old.shape != new.shape:
                raise UsageError(f"output {name!r}: shape {old.shape} in the reference, {new.shape} in the candidate")
            if not np.isfinite(old).all():
                raise DataError(
                    f"the reference gives {old.size - int(np.isfinite(old).sum())} values that aren't finite in output "
                    f"{name!r}; there is nothing to compare with: check the inputs' preprocessing"
                )
            sums = self.sums.setdefault(name, _Sums())
            sums.add(old, new)
            sums.classes = sums.classes and old.ndim == 2 and old.shape[1] > 1 and len(old) == samples
            if sums.classes:
                sums.same += int((old.argmax(1) == new.argmax(1)).sum())
                if labels is not None:
                    _count_hits(sums, old, new, labels, name)
        self.samples += samples

    def result(self) -> Agreement:
        if not self.samples:
            raise DataError("there are no samples to compare")
        outputs = tuple(
            OutputAgreement(
                name,
                sums.snr_db,
                sums.max_abs,
                sums.cosine,
                sums.nonfinite,
                sums.same / self.samples if sums.classes else None,
            )
            for name, sums in self.sums.items()
        )
        if self.labels is None:
            return Agreement(self.samples, outputs)
        if len(self.labels) != self.samples:
            raise UsageError(f"{len(self.labels)} labels were given for {self.samples} samples")
        classifier = next((sums for sums in self.sums.values() if sums.classes), None)
        if classifier is None:
            raise UsageError("labels were given, but no output is samples × classes")
        share = {key: count / self.samples for key, count in classifier.hits.items()}
        return Agreement(
            self.samples, outputs, Accuracy(share["old1"], share["old5"]), Accuracy(share["new1"], share["new5"])
        )


def _count_hits(
    sums: _Sums, old: NDArray[np.float64], new: NDArray[np.float64], labels: NDArray[Any], name: str
) -> None:
    if labels.min() < 0 or labels.max() >= old.shape[1]:
        allowed = f"output {name!r} has classes 0 to {old.shape[1] - 1}"
        raise UsageError(f"labels {labels.min()} to {labels.max()}: {allowed}")
    for key, scores in (("old", old), ("new", new)):
        best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")[:, :5]
        sums.hits[f"{key}1"] += int((best[:, 0] == labels).sum())
        sums.hits[f"{key}5"] += int((best == labels[:, None]).any(1).sum())
