"""Samples along the first axes of arrays, cut into batches and put together again: here and nowhere else.

A batch maps input names to arrays whose first axes have the same length, one entry a sample. Models whose samples lie elsewhere
(`TensorInfo.batch_axis`) get what `laid_out` makes of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError
from trtopt.core.values import TensorInfo

Arrays = Mapping[str, NDArray[Any]]


def samples_in(batch: Mapping[str, Any], where: str = "") -> int:
    """How many samples there are.

    Args:
        batch: name → anything with `ndim` and a length.
        where: begins the message.

    Raises:
        DataError: an array has no axis, or they have different numbers of samples.
    """
    counts = {name: len(array) if array.ndim else -1 for name, array in batch.items()}
    scalar = next((name for name, count in counts.items() if count < 0), None)
    if scalar is not None:
        raise DataError(f"{where}the data for {scalar!r} is one number; the first axis of an array must count samples")
    if len({*counts.values()}) > 1:
        raise DataError(f"{where}the inputs have different numbers of samples: {counts}")
    return next(iter(counts.values()), 0)


def alone(infos: Iterable[TensorInfo]) -> bool:
    """Whether a model with these inputs is run on one sample at a time, as samples aren't on the first axis of each."""
    return any(info.batch_axis != 0 for info in infos)


def laid_out(batch: Arrays, infos: Iterable[TensorInfo]) -> dict[str, NDArray[Any]]:
    """A batch as a model takes it: with samples on other axes; of what is one sample as a whole, the first one."""
    axes = {info.name: info.batch_axis for info in infos}
    return {name: _laid_out(array, axes.get(name, 0)) for name, array in batch.items()}


def samples_first(arrays: Mapping[str, Any], infos: Iterable[TensorInfo]) -> dict[str, Any]:
    """The opposite of `laid_out`, of what a model takes or gives."""
    axes = {info.name: info.batch_axis for info in infos}
    return {name: moved(array, axes.get(name, 0)) for name, array in arrays.items()}


def moved(array: Any, axis: int | None) -> Any:
    """An array whose samples lie on `axis` with them on the first axis; None: it is one sample."""
    return array if axis == 0 else array[None] if axis is None else np.moveaxis(array, axis, 0)


def _laid_out(array: NDArray[Any], axis: int | None) -> NDArray[Any]:
    if axis == 0:
        return array
    if axis is None:
        sample: NDArray[Any] = np.asarray(array[0])
        return sample
    return np.ascontiguousarray(np.moveaxis(array, 0, axis))


def joined(batches: Iterable[Arrays]) -> dict[str, NDArray[Any]]:
    """One batch of all samples, in order; a single batch's arrays as they are. At least one batch is needed."""
    parts = list(batches)
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def filled(batch: Arrays, size: int) -> dict[str, NDArray[Any]]:
    """`size` samples: the batch's first ones, and where it has fewer, from the first on again as often as it takes."""
    return {name: array if len(array) == size else array[np.arange(size) % len(array)] for name, array in batch.items()}


def chunks(batch: Arrays, most: int, least: int = 1) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """At most `most` samples at a time, each chunk with how many of its samples are real.

    What is left at the end and is fewer than `least` is filled up with its last sample.
    """
    count = samples_in(batch)
    for start in range(0, count, max(1, most)):
        size = min(most, count - start)
        chunk = {name: array[start : start + size] for name, array in batch.items()}
        if size < least:
            chunk = {name: np.concatenate([part, *[part[-1:]] * (least - size)]) for name, part in chunk.items()}
        yield chunk, size


def rebatched(batches: Iterable[Arrays], size: int) -> Iterator[dict[str, NDArray[Any]]]:
    """The same samples in the same order, `size` at a time.

    Fewer at the end, and before samples of other shapes than those before them, which can't share a batch.
    """
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
