"""Relations between an engine's own results, which hold for a right one whatever the network is, and need no reference.

Rows of a batch that are equal have equal results; rows in another order have their results in that order; a batch has the
results of its samples one by one; and a result depends on its inputs alone: not on what ran before, in what batch, in which
context, by a CUDA graph or without, or beside what. A right engine holds them to the bit, or to the last bits where TensorRT
has another kernel for another batch; what is allowed is a share of the noise that its arithmetic has on this network anyway.

Not demanded is what the network itself doesn't do: rows of an output that the model as given computes from other rows, too
(found by running it), and outputs that have no rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Described
from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo
from trtopt.core.words import first_of
from trtopt.data.difference import in_db, powers
from trtopt.data.rebatch import Arrays, joined, share
from trtopt.evaluation.agreement import unpadded

Runner = Callable[[Arrays], Arrays]
Row = Mapping[str, NDArray[np.generic]]
MODEL, MASKED = "the model as given", "what masks hide"
LAST_BITS = 100.0  # dB: more is never asked for
LEAST = 6.0  # dB: less is never allowed; twice a value is 6 dB
SHARE = 12.0  # dB: a row may differ by sixteen times the power of the noise that rows have in the median
_TINY = np.finfo(np.float32).tiny  # the least normal number: GPUs take what is below for zero
_FAINT = 1e-3  # of the mean signal: rows below are held against the mean


@dataclass(frozen=True)
class Relation(Described):
    """A relation that was tried on an output.

    Attributes:
        name: of the relation; batch: how many samples at a time it was tried with.
        worst_db: the row that is farthest off, in dB beside its signal (of whole numbers 1 over the share that differs); inf:
            all are the same to the bit.
        limit_db: what it has to reach.
        sample: whose row that is.
    """

    name: str
    output: str
    batch: int
    worst_db: float
    limit_db: float
    sample: str

    @property
    def holds(self) -> bool:
        return self.slack >= 0

    @property
    def slack(self) -> float:
        """dB by which it holds."""
        return self.worst_db - self.limit_db


@dataclass(frozen=True)
class Samples:
    """Samples one by one, their names, and what the model as given makes of them."""

    arrays: Sequence[Arrays]
    names: Sequence[str]
    wanted: Sequence[Row]

    def of(self, chosen: Iterable[int]) -> Samples:
        """Return some of them, again from the first where there are no more."""
        at = [index % len(self.arrays) for index in chosen]
        return Samples([self.arrays[i] for i in at], [self.names[i] for i in at], [self.wanted[i] for i in at])


@dataclass
class Candidate:
    """Something that computes the model's outputs, samples first in all arrays.

    Attributes:
        run: one call for each batch.
        sizes: samples that it takes at a time, ascending.
        ways: other ways to the same results: name → function.
        outputs: those that are looked at.
        of_pixels: it takes pixels, and inputs that weren't made of pixels can't be given.
        most: dB beside the model that a kernel of its kind may have.
        unordered: outputs whose entries stand in the order of scores, in which last bits make others stand first.
    """

    run: Runner
    sizes: tuple[int, ...]
    outputs: Sequence[TensorInfo]
    ways: Mapping[str, Runner] = field(default_factory=dict)
    most: float = np.inf
    unordered: frozenset[str] = frozenset()
    of_pixels: bool = False

    def rows(self, results: Arrays, count: int) -> list[Row]:
        """Cut results into those of each sample; of an output without rows each has all. UsageError where one isn't there."""
        if absent := [info.name for info in self.outputs if info.name not in results]:
            raise UsageError(
                f"the model gives {first_of(absent)}, what is certified only {first_of(list(results), 12)}: is it this model's?"
            )
        return [
            {info.name: _cut(np.asarray(results[info.name]), info, count, at) for info in self.outputs}
            for at in range(count)
        ]

    def alone(self, run: Runner, sample: Arrays) -> Row:
        """Return what `run` gives for one sample, beside copies of itself where the engine takes no fewer."""
        return self.rows(run(_copies(sample, self.sizes[0])), self.sizes[0])[0]


def _cut(array: NDArray[np.generic], info: TensorInfo, count: int, at: int) -> NDArray[np.generic]:
    axis = info.batch_axis
    if axis is None or array.ndim <= axis or array.shape[axis] % count:
        return array
    cut: NDArray[np.generic] = share(array, info, count, at, at + 1)
    return cut


def closeness(candidate: Candidate, name: str, wanted: Sequence[Row], found: Sequence[Row]) -> NDArray[np.float64]:
    """Return how near each row of an output is to another, in dB."""
    pairs = [(np.asarray(old[name]), np.asarray(new[name])) for old, new in zip(wanted, found, strict=True)]
    if name in candidate.unordered:
        pairs = [(np.sort(old, axis=None), np.sort(new, axis=None)) for old, new in pairs]
    if not all(old.shape == new.shape for old, new in pairs):
        return np.array([np.inf if old.shape == new.shape else -np.inf for old, new in pairs])
    if not _floating(pairs[0][0]):
        unlike = np.array([np.mean(old != new) if old.size else 0.0 for old, new in pairs])
        return in_db(np.ones(len(pairs)), unlike)
    sums = np.array([_sums(old, new) for old, new in pairs])
    mean = sums[:, 0].mean()
    return in_db(np.where(sums[:, 0] < _FAINT * mean, mean, sums[:, 0]), sums[:, 1])


def _sums(old: NDArray[np.generic], new: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return the powers of signal and difference; of values that are finite in one alone the difference is infinite."""
    signal, noise = powers(*(np.where(np.abs(array) < _TINY, 0, array) for array in (old, new)))
    return np.array([signal, noise if np.array_equal(np.isnan(old), np.isnan(new)) else np.inf])


def _floating(array: NDArray[np.generic]) -> bool:
    return array.dtype.kind not in "biuSUO"  # bfloat16 is none of NumPy's own kinds


def own_rows(run: Runner, candidate: Candidate, samples: Samples) -> list[TensorInfo]:
    """Return the outputs whose rows the model as given, `run`, computes of their own samples alone."""
    several = candidate.rows(run(joined(samples.arrays)), len(samples.arrays))
    return [
        info
        for info in candidate.outputs
        if closeness(candidate, info.name, samples.wanted, several).min() > LAST_BITS / 2
    ]


def hidden_by_masks(run: Runner, candidate: Candidate, samples: Samples) -> frozenset[str]:
    """Return the outputs on which what masks hide has no influence in the model as given, `run`; none without such masks."""
    batch = joined(samples.arrays)
    if (other := _refilled(batch)) is None:
        return frozenset()
    seen, changed = (_visible(candidate.rows(run(each), len(samples.arrays)), batch) for each in (batch, other))
    names = (info.name for info in candidate.outputs)
    return frozenset(name for name in names if closeness(candidate, name, seen, changed).min() > LAST_BITS / 2)


def _refilled(batch: Arrays) -> Arrays | None:
    """Return a batch with the first position's values where its masks hide them; None where they hide nothing."""
    masks = unpadded(batch)
    if not masks or all(mask.all() for mask in masks):
        return None
    seen, other = np.all(masks, axis=0), dict(batch)
    for name, array in batch.items():
        if array.shape[:2] == seen.shape and not re.search("mask|pad", name, re.I):
            there = seen.reshape(*seen.shape, *[1] * (array.ndim - 2))
            other[name] = np.where(there, array, array[:, :1])
    return None if all(np.array_equal(other[name], batch[name]) for name in batch) else other


def _visible(rows: Sequence[Row], batch: Arrays) -> list[Row]:
    """Return rows with zeros at the positions that masks hide, where an output has positions on its second axis."""
    seen = np.all(unpadded(batch), axis=0)

    def shown(array: NDArray[np.generic], mask: NDArray[np.bool_]) -> NDArray[np.generic]:
        positions = array.ndim > 1 and array.shape[1] == len(mask)
        return (
            np.where(mask.reshape(1, -1, *[1] * (array.ndim - 2)), array, np.zeros_like(array)) if positions else array
        )

    return [{name: shown(np.asarray(array), mask) for name, array in row.items()} for row, mask in zip(rows, seen)]


def _limits(candidate: Candidate, wanted: Sequence[Row], alone: Sequence[Row]) -> dict[str, float]:
    """Return for each output what rows may differ by: a share of the noise that they have beside the model as given, or may
    have in other kernels, which another batch may run in."""
    noise = {info.name: float(np.median(closeness(candidate, info.name, wanted, alone))) for info in candidate.outputs}
    return {name: max(LEAST, min(LAST_BITS, min(decibels, candidate.most) - SHARE)) for name, decibels in noise.items()}


def silent(candidate: Candidate, rows: Sequence[Row]) -> list[str]:
    """Return the floating outputs that hold nothing but zeros and what isn't finite, which are alike whatever else is wrong."""
    arrays = {info.name: [np.asarray(row[info.name]) for row in rows] for info in candidate.outputs}
    floats = {name: np.abs(np.concatenate(items, axis=None)) for name, items in arrays.items() if _floating(items[0])}
    return [name for name, held in floats.items() if not ((held >= _TINY) & np.isfinite(held)).any()]


def undecided(candidate: Candidate, alone: Sequence[Row]) -> list[str]:
    """Return the outputs in the order of scores where some of these are equal, so that their order is open; not the scores."""
    ordered = [info.name for info in candidate.outputs if info.name in candidate.unordered]
    scores = [name for name in ordered if all(_steps(row[name]).max(initial=-1) <= 0 for row in alone)]
    tied = any((_steps(row[name]) == 0)[np.asarray(row[name])[..., 1:] != 0].any() for name in scores for row in alone)
    return [name for name in ordered if name not in scores] if tied else []


def _steps(array: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return what is added from entry to entry of a floating array's last axis; 1 of others: they are no scores."""
    floats = np.atleast_1d(np.asarray(array))
    return np.diff(floats.astype(np.float64)) if _floating(floats) else np.ones(1)


def relations(
    candidate: Candidate, samples: Samples, alone: Sequence[Row], masked: Collection[str] = ()
) -> Iterator[Relation]:
    """Try every relation.

    Args:
        samples: all of one shape.
        alone: the candidate's results for each of them by itself.
        masked: outputs on which what masks hide has no influence.
    """
    tried, allowed = list[tuple[Samples, Arrays, list[Row]]](), _limits(candidate, samples.wanted, alone)

    def held(name: str, names: Sequence[str], old: Sequence[Row], new: Sequence[Row]) -> Iterator[Relation]:
        for info in candidate.outputs:
            if name == MASKED and info.name not in masked:
                continue
            decibels = closeness(candidate, info.name, old, new)
            worst = int(decibels.argmin())
            yield Relation(name, info.name, len(names), float(decibels[worst]), allowed[info.name], names[worst])

    for size in candidate.sizes:
        several = samples.of(range(size))
        batch: Arrays = joined(several.arrays)
        first = candidate.rows(candidate.run(batch), size)
        tried.append((several, batch, first))
        yield from held(
            "a batch is its samples one by one", several.names, [alone[at % len(alone)] for at in range(size)], first
        )
        turned = {name: np.ascontiguousarray(array[::-1]) for name, array in batch.items()}
        if size > 1:
            other_order = candidate.rows(candidate.run(turned), size)[::-1]
            yield from held("rows in another order", several.names, first, other_order)
            for at in {0, len(samples.arrays) - 1}:
                copies = candidate.rows(candidate.run(_copies(samples.arrays[at], size)), size)
                yield from held("equal rows", [samples.names[at]] * size, [copies[0]] * size, copies)
        if masked and (other := _refilled(batch)) is not None:
            shown = _visible(first, batch), _visible(candidate.rows(candidate.run(other), size), batch)
            yield from held(MASKED, several.names, *shown)
        # Not in place of other values: they may be indices or lengths.
        spoiled = {name: np.full_like(array, np.nan) if _floating(array) else array for name, array in batch.items()}
        candidate.run(turned if candidate.of_pixels else spoiled)
        again = candidate.rows(candidate.run(batch), size)
        yield from held("again, behind other values", several.names, first, again)
    for several, batch, first in reversed(tried):
        for way, run in {"again, behind another batch": candidate.run, **candidate.ways}.items():
            yield from held(way, several.names, first, candidate.rows(run(batch), len(first)))


def _copies(sample: Arrays, count: int) -> Arrays:
    return {name: np.repeat(array, count, axis=0) for name, array in sample.items()}
