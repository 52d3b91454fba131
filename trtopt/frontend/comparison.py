"""The exported model against PyTorch, on the same inputs, at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from trtopt.core.errors import ExportMismatch, ModelError
from trtopt.core.foreign import essence
from trtopt.core.words import first_of
from trtopt.data.difference import difference
from trtopt.data.rebatch import Arrays
from trtopt.frontend.failures import types_hint
from trtopt.frontend.samples import Subject
from trtopt.graph.io import Model
from trtopt.ort.sessions import OnnxSession


@dataclass(frozen=True)
class ExportComparison:
    """PyTorch against ONNX Runtime on the same inputs, at one batch size.

    Attributes:
        sizes: of the other open dimensions, by name, where they aren't those of the sample.
    """

    batch: int
    absolute: float
    relative: float
    output: str
    sizes: Mapping[str, int] = field(default_factory=dict)


def compared(
    subject: Subject, model: Model, tolerance: float, detail: Callable[[str], None]
) -> tuple[list[ExportComparison], list[str]]:
    """Return the comparisons, at two batch sizes and at other sizes of what is open, and what the user should know of them;
    ExportMismatch where PyTorch and ONNX Runtime disagree. `detail` is told each batch's difference."""
    comparisons: list[ExportComparison] = []
    notes: list[str] = []
    try:
        session = OnnxSession(model.proto)
    except ModelError as error:
        raise ModelError(f"{error}{types_hint(subject)}") from error
    for size in subject.batch_sizes:
        batch = subject.batch(size)
        try:
            expected = subject.outputs(batch, model)
        except Exception as error:
            if size == subject.batch_sizes[-1]:  # which has run
                raise
            # One sample alone isn't for every model: the axis may hold a graph's nodes.
            notes.append(
                f"not compared at batch {size}, where forward fails: {type(error).__name__}: {essence(error, 1)}"
            )
            continue
        gap = difference(expected, session(batch))
        comparisons.append(ExportComparison(size, gap.absolute, gap.relative, gap.output))
        detail(f"batch {size}: {gap}")
        if not gap.within(tolerance):
            _refuse(subject, size, expected, f"{gap}; allowed: relative {tolerance:g}")
        if undefined := [name for name, array in expected.items() if np.isnan(array).any()]:
            real = "; give real ones by `sample=`" if subject.made_up else ""
            notes.append(
                f"PyTorch itself gives NaN in {first_of(undefined)} on {subject.sampled}, so that the comparison says "
                f"little{real}"
            )
        elif not gap.scale:
            notes.append("every output is zero, so that the comparison says little")
    elsewhere, said = _elsewhere(subject, model, session, comparisons[0].batch, tolerance)
    return comparisons + elsewhere, notes + said


def _elsewhere(
    subject: Subject, model: Model, session: OnnxSession, samples: int, tolerance: float
) -> tuple[list[ExportComparison], list[str]]:
    """The comparison at other sizes of what is open beside the batch, the first that PyTorch takes; or why there is none.

    A trace may hold the sizes that it was made at, and give other results, or none, at any other. It may also hold what an
    `if` on sizes came to, such as whether to fill up to a multiple: so a neighbouring size is compared, too. Where that alone
    differs, the model is good for others, and that is said.
    """
    traced = {str(name): size for name, size in subject.sizes.items() if name != subject.first}
    tried, found = list[str](), list[ExportComparison]()
    for factor, more in ((2, 0), (0.5, 0), (1, 1)) if traced else ():  # the last is the neighbouring size
        sizes = {name: max(1, int(size * factor) + more) for name, size in traced.items()}
        if sizes == traced or (found and not more):
            continue
        tried.append(_listed(sizes))
        made = subject.batch(samples, sizes)
        try:
            expected = subject.outputs(made, model)
        except Exception:  # whatever a model raises at a size that it doesn't take
            continue
        try:
            gap = difference(expected, session(made))
            problem = "" if gap.within(tolerance) else f"they disagree there: {gap}"
        except ModelError:
            problem = "ONNX Runtime can't run it there"
        if problem and found:
            note = (
                f"the ONNX model is right with {_listed(traced)} and {_listed(found[0].sizes)}, but not at every size: PyTorch "
                f"runs it with {tried[-1]}, and {problem}. Where forward decides by sizes (an if, padding to a multiple), the "
                "trace holds what it did: do that before the model, or write it without if; else keep to such multiples"
            )
            return found, [note]
        if problem:
            raise ExportMismatch(
                f"{subject.text}: it was traced with {_listed(traced)}, and its ONNX model is right there alone: PyTorch runs "
                f"it with {tried[-1]}, but {problem}. Nothing was written; give sizes instead of names in `inputs=`"
            )
        found.append(ExportComparison(samples, gap.absolute, gap.relative, gap.output, sizes))
    if tried and not found:
        return [], [f"compared at one size alone: PyTorch doesn't take {' or '.join(tried)}"]
    return found, []


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _refuse(subject: Subject, size: int, expected: Arrays, gap: str) -> NoReturn:
    """Say that the exported model computes something else, and whether PyTorch itself does, the second time."""
    again = dict(zip(expected, subject(subject.batch(size))))
    changed = [name for name, value in again.items() if not np.array_equal(value.cpu().numpy(), expected[name], True)]
    if changed:
        raise ExportMismatch(
            f"{subject.text}: PyTorch itself gives another {changed[0]} for the same inputs the second time, which a graph "
            f"can't repeat ({gap}). Nothing was written. Does forward compute something random? torch.nn.functional.dropout(…) "
            "is on unless it is given training=self.training; random numbers belong outside, as an input. Does it change the "
            "module's buffers? Make those an input and an output of forward. If it is meant so: `verify=False`"
        )
    masks = ", ".join(info.name for info in subject.infos if not info.floating)
    hint = (
        f"Made up of both 0 and 1 ({masks}), a mask may leave nothing, of which PyTorch and ONNX make different things: give "
        "real ones by `sample=`"
        if masks and subject.made_up
        else "If the model computes in lower precision than FP32, give a larger `tolerance=`; if it chooses among nearly equal "
        "values (TopK), as untrained weights make them, give trained ones by `weights=`, or real inputs by `sample=`"
    )
    raise ExportMismatch(
        f"{subject.text}: PyTorch and ONNX Runtime disagree on {subject.sampled} at batch {size}: {gap}. Nothing was written. "
        f"{hint}"
    )
