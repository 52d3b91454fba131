"""Samples along the first axes of arrays, cut into batches and put together again: here and nowhere else.

A batch maps input names to arrays whose first axes have the same length, one entry a sample. Models whose samples lie elsewhere
(`TensorInfo.batch_axis`) get what `laid_out` makes of a batch.
`Batches` are real samples, which calibration, verification and benchmarks read, the same ones on every pass.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Name
from trtopt.core.errors import DataError, EngineError, UsageError
from trtopt.core.files import sha256_json
from trtopt.core.values import Profile, TensorInfo, x
from trtopt.data.preprocess import Preprocess

if TYPE_CHECKING:
    from typing_extensions import Self

Arrays = Mapping[str, NDArray[Any]]
_ANY = 1 << 62  # samples


def samples_in(batch: Mapping[str, Any], where: str = "") -> int:
    """Count the samples of a batch of anything with `ndim` and a length; `where` begins a DataError's message."""
    counts = {name: len(array) if array.ndim else -1 for name, array in batch.items()}
    scalar = next((name for name, count in counts.items() if count < 0), None)
    if scalar is not None:
        raise DataError(f"{where}the data for {scalar!r} is one number; the first axis of an array must count samples")
    if len({*counts.values()}) > 1:
        raise DataError(f"{where}the inputs have different numbers of samples: {counts}")
    return next(iter(counts.values()), 0)


def alone(infos: Iterable[TensorInfo]) -> bool:
    """True where a model with these inputs is run on one sample at a time, as samples aren't on the first axis of each."""
    return any(info.batch_axis != 0 for info in infos)


def counting(inputs: Iterable[TensorInfo]) -> dict[str, int]:
    """The inputs that a batch grows with, each with the axis of its samples; none, where fixed ones aren't of one size. Beside
    one whose batch is open, an input of a fixed size there is the same for all samples."""
    axes = {info.name: info.batch_axis for info in inputs if info.shape and info.batch_axis is not None}
    sizes = {info.name: info.sizes[axes[info.name]] for info in inputs if info.name in axes}
    if -1 in sizes.values():
        return {name: axis for name, axis in axes.items() if sizes[name] == -1}
    return axes if len({*sizes.values()}) == 1 else {}


@dataclass(frozen=True)
class Call:
    """One call's arrays, as a model takes them.

    Attributes:
        size: samples in them; 0: samples aren't counted, and results are taken as they stand.
        real: how many of these don't only fill the batch up.
    """

    feed: dict[str, NDArray[Any]]
    size: int = 0
    real: int = 0

    def cut(self, outputs: Arrays, infos: Iterable[TensorInfo]) -> dict[str, NDArray[Any]]:
        """The results of the real samples."""
        results = dict(outputs)
        for info in infos:
            if self.size and info.batch_axis is not None:
                results[info.name] = share(outputs[info.name], info, self.size, 0, self.real)
        return results


def share(array: Any, info: TensorInfo, size: int, start: int, stop: int) -> Any:
    """The rows of an output for the samples `start` to `stop` of the `size` that it was computed for."""
    axis = info.batch_axis or 0
    rows, rest = divmod(array.shape[axis], size) if array.ndim > axis else (0, 1)
    if rest or not rows:
        raise EngineError(
            f"output {info.name!r} has shape {x(array.shape)} for a batch of {size}: axis {axis} isn't the batch, so that it "
            "can't be divided; call Session.run, or give no more samples at a time than the engine takes"
        )
    return array if stop - start == size else array[(slice(None),) * axis + (slice(start * rows, stop * rows),)]


def calls(
    arrays: Arrays,
    inputs: Collection[TensorInfo],
    outputs: Iterable[TensorInfo],
    profiles: Sequence[Profile],
    *,
    limit: int | None = None,
    more: bool = False,
) -> list[Call]:
    """Any number of samples for a model's calls; one call as it stands where nothing counts samples, or no profile fits.

    Args:
        arrays: as the model takes them, but for the number of samples; of an input whose array is one sample as a whole also
            several, along an axis before it.
        limit: samples that are used, the first ones.
        more: the results are joined with those of other samples: UsageError for an output that isn't of samples.
    """
    axes = counting(inputs)
    several = {info.name for info in inputs if info.batch_axis is None and arrays[info.name].ndim > len(info.shape)}
    counted = [info for info in inputs if info.name in several or info.name in axes]
    if any(arrays[info.name].ndim != len(info.shape) + (info.name in several) for info in counted):
        return [Call(dict(arrays))]
    samples = {info.name: moved(arrays[info.name], axes.get(info.name, 0)) for info in counted}
    counts = {len(array) for array in samples.values()}
    ranges = [(1, 1)] if several else _batches(samples, counted, profiles)
    if len(counts) != 1 or counts == {0} or not ranges:
        return [Call(dict(arrays))]
    count = counts.pop()
    count, start, least, found = min(count, limit or count), 0, min(low for low, _ in ranges), list[Call]()
    while start < count:  # profiles may leave sizes out between them
        rest = count - start
        size = max((min(high, rest) for low, high in ranges if low <= rest), default=rest)
        part, real = next(chunks({name: item[start : start + size] for name, item in samples.items()}, size, least))
        found.append(Call({**arrays, **laid_out(part, counted)}, max(size, least), real))
        start += size
    most = max(call.size for call in found)
    odd = next((info for info in outputs if info.batch_axis is None), None)
    if odd is not None and most > 1 and (more or len(found) > 1 or found[0].real < most):
        raise UsageError(
            f"no axis of output {odd.name!r} {odd.dims} counts samples, so that its results can't be cut, nor joined with "
            f"those of another call: give {most} samples, which are one call (`limit={most}`)"
        )
    return found


def _batches(samples: Arrays, infos: Sequence[TensorInfo], profiles: Sequence[Profile]) -> list[tuple[int, int]]:
    """The least and the largest batch of each profile that takes samples of these shapes."""
    if not profiles:
        sizes = [info.sizes[info.batch_axis or 0] for info in infos[:1]]
        return [(size, size) if size > 0 else (1, _ANY) for size in sizes]
    ranges = []
    for profile in profiles:
        bounds = [(profile[info.name], info.batch_axis or 0, samples[info.name].shape[1:]) for info in infos]
        low = max((item.min[axis] for item, axis, _ in bounds), default=1)
        high = min((item.max[axis] for item, axis, _ in bounds), default=0)
        if 1 <= high >= low and all(item.holds((*to[:at], item.min[at], *to[at:])) for item, at, to in bounds):
            ranges.append((max(1, low), high))
    return ranges


def laid_out(batch: Arrays, infos: Iterable[TensorInfo]) -> dict[str, NDArray[Any]]:
    """A batch as a model takes it: with samples on other axes; of what is one sample as a whole, the first one."""
    axes = {info.name: info.batch_axis for info in infos}
    laid = dict(batch)
    for name, array in batch.items():
        axis = axes.get(name, 0)
        if axis != 0:
            laid[name] = np.asarray(array[0]) if axis is None else np.ascontiguousarray(np.moveaxis(array, 0, axis))
    return laid


def samples_first(arrays: Mapping[str, Any], infos: Iterable[TensorInfo]) -> dict[str, Any]:
    """The opposite of `laid_out`, of what a model takes or gives."""
    axes = {info.name: info.batch_axis for info in infos}
    return {name: moved(array, axes.get(name, 0)) for name, array in arrays.items()}


def moved(array: Any, axis: int | None) -> Any:
    """An array whose samples lie on `axis` with them on the first axis; None: it is one sample."""
    return array if axis == 0 else array[None] if axis is None else np.moveaxis(array, axis, 0)


def joined(batches: Iterable[Arrays], infos: Iterable[TensorInfo] = ()) -> dict[str, NDArray[Any]]:
    """One batch of all samples, in order, of at least one batch; a single one's arrays as they are. `infos` say where samples
    lie; if nowhere, an axis before the others counts the batches. Without, they are first."""
    parts = list(batches)
    if len(parts) == 1:
        return dict(parts[0])
    axes = {info.name: info.batch_axis for info in infos}
    whole: dict[str, NDArray[Any]] = {}
    for name in parts[0]:
        arrays, axis = [part[name] for part in parts], axes.get(name, 0)
        try:
            whole[name] = np.stack(arrays) if axis is None else np.concatenate(arrays, axis)
        except ValueError:
            shapes = ", ".join(dict.fromkeys(x(array.shape) for array in arrays))
            raise DataError(
                f"{name} has shapes {shapes}, which one array can't hold: give samples of one shape at a time"
            ) from None
    return whole


def filled(batch: Arrays, size: int) -> dict[str, NDArray[Any]]:
    """`size` samples: the batch's first ones, and where it has fewer, from the first on again as often as it takes."""
    return {name: array if len(array) == size else array[np.arange(size) % len(array)] for name, array in batch.items()}


def chunks(batch: Arrays, most: int, least: int = 1) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """At most `most` samples at a time, each chunk with how many of its samples are real: what is left at the end and is fewer
    than `least` is filled up with its last sample."""
    count = samples_in(batch)
    for start in range(0, count, max(1, most)):
        size = min(most, count - start)
        chunk = {name: array[start : start + size] for name, array in batch.items()}
        if size < least:
            chunk = {name: np.concatenate([part, *[part[-1:]] * (least - size)]) for name, part in chunk.items()}
        yield chunk, size


def rebatched(batches: Iterable[Arrays], size: int) -> Iterator[dict[str, NDArray[Any]]]:
    """The same samples in the same order, `size` at a time; fewer at the end, and before samples of other shapes than those
    before them, which can't share a batch."""
    pending: list[Arrays] = []
    count = 0
    for batch in batches:
        if pending and any(pending[0][name].shape[1:] != array.shape[1:] for name, array in batch.items()):
            yield joined(pending)
            pending, count = [], 0
        start, samples = 0, samples_in(batch)
        while start < samples:
            step = min(size - count, samples - start)
            pending.append({name: array[start : start + step] for name, array in batch.items()})
            start, count = start + step, count + step
            if count == size:
                yield joined(pending)
                pending, count = [], 0
    if pending:
        yield joined(pending)


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    name: Name
    reason: Name


class Batches:
    """Samples in batches, input name → array, first axis = samples; iterating again gives the same ones.

    Attributes:
        samples: their number in all; batch: at a time.
        digests, names: of each sample, in order: of its content; a file, or "FILE[INDEX]".
        skipped: files left out.
        preprocess: the way from an image to an input; None for arrays.
    """

    kind: ClassVar[str]
    batch: int
    skipped: tuple[Skipped, ...] = ()
    preprocess: Preprocess | None = None

    def _choose(self, chosen: Sequence[tuple[str, str, Any]]) -> None:
        """Take these samples, in order: each one's digest, name, and place."""
        self._chosen, self.samples = chosen, len(chosen)
        self.digests, self.names = (tuple(item[field] for item in chosen) for field in (0, 1))

    def part(self, start: int, stop: int) -> Self:
        """The samples from `start` to `stop` alone; nothing is read for it, and of files it can be sent to another process."""
        some = copy.copy(self)
        some._choose(self._chosen[start:stop])
        return some

    @property
    def preparation(self) -> dict[str, Any] | None:
        """`preprocess` in plain JSON."""
        return None if self.preprocess is None else self.preprocess.describe()

    def describe(self) -> dict[str, Any]:
        """Plain JSON: kind, count, and a digest of the content that doesn't depend on order or file names."""
        return {"kind": self.kind, "count": self.samples, "digest": sha256_json(sorted(self.digests))}

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        return rebatched(self._pieces(), self.batch)

    def _pieces(self) -> Iterator[Arrays]:
        """Yield the samples, in order, at most a batch at a time."""
        raise NotImplementedError
