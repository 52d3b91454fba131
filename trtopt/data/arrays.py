"""Arrays as samples: .npz (one array per input), .npy, a folder of them, or arrays in memory, checked against the model."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.data.batches import Skipped
from trtopt.data.preprocess import Preprocess
from trtopt.errors import DataError, UsageError
from trtopt.files import sha256_json
from trtopt.spec import TensorInfo

Arrays = Mapping[str, NDArray[Any]]


class ArrayBatches:
    """See `trtopt.data.Batches`. Files are read one at a time, so that only the largest must fit into memory.

    Raises:
        UsageError: no such file, or names, shapes or dtypes that the model doesn't take (both are named).
        DataError: unreadable content, NaN or infinite values (input and sample named), or no samples.
    """

    skipped: tuple[Skipped, ...] = ()
    preprocess: Preprocess | None = None

    def __init__(self, source: Any, inputs: Sequence[TensorInfo], *, limit: int | None = None, batch: int = 8) -> None:
        self._inputs, self._batch, self._limit = tuple(inputs), batch, limit
        self._parts = _parts(source, self._inputs)
        digests: list[str] = []
        for part in self._pieces():
            count = len(next(iter(part.values())))
            for index in range(count):
                digest = hashlib.sha256()
                for info in self._inputs:
                    digest.update(np.ascontiguousarray(part[info.name][index]).tobytes())
                digests.append(digest.hexdigest())
        if not digests:
            raise DataError("--data holds no samples (the first axis counts them)")
        self._digests = digests
        self.samples = len(digests)

    def describe(self) -> dict[str, Any]:
        return {"kind": "arrays", "count": self.samples, "digest": sha256_json(sorted(self._digests))}

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        pending: dict[str, NDArray[Any]] = {}
        for part in self._pieces():
            if pending and any(pending[name].shape[1:] != part[name].shape[1:] for name in pending):
                yield pending  # another size: the samples can't share a batch
                pending = {}
            if pending:
                part = {name: np.concatenate([pending[name], part[name]]) for name in part}
            count = len(next(iter(part.values())))
            whole = count - count % self._batch
            for start in range(0, whole, self._batch):
                yield {name: values[start : start + self._batch] for name, values in part.items()}
            pending = {name: values[whole:] for name, values in part.items()} if whole < count else {}
        if pending:
            yield pending

    def _pieces(self) -> Iterator[dict[str, NDArray[Any]]]:
        """The checked parts, cut off at the limit."""
        left = self._limit
        for where, load in self._parts:
            part = _checked(load(), self._inputs, where)
            if left is not None:
                part = {name: values[:left] for name, values in part.items()}
                left -= len(next(iter(part.values())))
            if len(next(iter(part.values()))):
                yield part
            if left == 0:
                return


def _parts(source: Any, inputs: Sequence[TensorInfo]) -> list[tuple[str, Any]]:
    """(name for messages, function that loads it) of each file or object."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.exists():
            raise UsageError(f"--data {path} doesn't exist")
        files = [path]
        if path.is_dir():
            files = sorted(item for item in path.rglob("*") if item.suffix in (".npz", ".npy"))
            if not files:
                raise DataError(f"there is no .npz or .npy file in {path}")
        return [(str(file), lambda file=file: _load(file, inputs)) for file in files]
    if isinstance(source, np.ndarray):
        return [("the array", lambda: {_only(inputs, "an array").name: source})]
    if isinstance(source, Mapping):
        return [("the arrays", lambda: source)]
    if isinstance(source, Iterable):
        given = list(source)  # an iterator can be read once, and several passes are needed
        return [(f"batch {number}", lambda item=item: item) for number, item in enumerate(given)]
    raise UsageError(
        f"data is {type(source).__name__}; a path, an array, a mapping or an iterable of mappings is needed"
    )


def _only(inputs: Sequence[TensorInfo], what: str) -> TensorInfo:
    if len(inputs) != 1:
        names = ", ".join(info.name for info in inputs)
        raise UsageError(f"{what} fits a model with one input; this one has {names}: give an .npz with these names")
    return inputs[0]


def _load(path: Path, inputs: Sequence[TensorInfo]) -> Arrays:
    if path.suffix not in (".npz", ".npy"):
        raise UsageError(f"--data {path} is neither .npz nor .npy nor a folder of them")
    try:
        if path.suffix == ".npy":
            return {_only(inputs, f"{path.name}").name: np.load(path, mmap_mode="r", allow_pickle=False)}
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.error) as error:
        raise DataError(
            f"{path} can't be read as {path.suffix} ({str(error)[:200]}); was it written completely?"
        ) from None


def _checked(part: Arrays, inputs: Sequence[TensorInfo], where: str) -> dict[str, NDArray[Any]]:
    if not isinstance(part, Mapping):
        raise UsageError(f"{where} is {type(part).__name__}; input name → array is needed")
    wanted = [info.name for info in inputs]
    if missing := [name for name in wanted if name not in part]:
        extra = ", ".join(part) or "none"
        raise UsageError(
            f"{where} lacks {', '.join(missing)}; it has {extra}, the model's inputs are {', '.join(wanted)}"
        )
    if unknown := [name for name in part if name not in wanted]:
        raise UsageError(
            f"{where} has {', '.join(unknown)}, which is no input; the model's inputs are {', '.join(wanted)}"
        )
    found = {info.name: _fitting(np.asarray(part[info.name]), info, where) for info in inputs}
    counts = {name: len(values) for name, values in found.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{where}: the inputs have different numbers of samples: {counts}")
    return found


def _fitting(values: NDArray[Any], info: TensorInfo, where: str) -> NDArray[Any]:
    what = f"{where}: {info.name}"
    wanted, shape = np.dtype(info.dtype), "x".join(map(str, info.shape)) or "scalar"
    if values.ndim != len(info.shape) or values.ndim == 0:
        raise UsageError(f"{what} has shape {'x'.join(map(str, values.shape)) or 'scalar'}, the model takes {shape}")
    for axis, size in enumerate(info.shape[1:], start=1):  # the first axis counts samples
        if isinstance(size, int) and size >= 0 and values.shape[axis] != size:
            given = "x".join(map(str, values.shape))
            raise UsageError(f"{what} has shape {given}, the model takes {shape}: dimension {axis} must be {size}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        sample = int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(1)))
        raise DataError(f"{what} holds NaN or infinite values, first in sample {sample}")
    if values.dtype == wanted:
        return values
    same_kind = values.dtype.kind == wanted.kind or {values.dtype.kind, wanted.kind} == {"i", "u"}
    if not same_kind or values.dtype.kind not in "fiu":
        raise UsageError(f"{what} has dtype {values.dtype}, the model takes {info.dtype}: convert it with astype first")
    with np.errstate(over="ignore"):
        converted = values.astype(wanted)
    lost = not np.isfinite(converted).all() if wanted.kind == "f" else not np.array_equal(converted, values)
    if lost:
        raise DataError(f"{what} has {values.dtype} values that {info.dtype} can't hold")
    return converted
