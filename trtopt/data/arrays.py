"""Arrays as samples: .npz (one array per input), .npy, a folder of them, or arrays in memory, checked against the model."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.data.batches import Skipped
from trtopt.data.preprocess import Preprocess
from trtopt.errors import DataError, OutputError, TrtoptError, UsageError
from trtopt.files import sha256_json
from trtopt.spec import TensorInfo

Arrays = Mapping[str, NDArray[Any]]
_Part = tuple[str, Callable[..., Arrays]]
_Taken = tuple[tuple[str, int, int], ...]  # digest, part and place of each sample
_BLOCK = 1 << 24  # bytes checked at a time


class ArrayBatches:
    """See `trtopt.data.Batches`. Everything is checked when this is made, block by block.

    .npy files and uncompressed .npz files (`np.savez`) are mapped, not read; of compressed ones the largest must fit into
    memory, unless they are unpacked to files in the folder `unpack`. Which samples a `limit` takes is decided by their
    content.

    With `lazy` names, shapes and types are checked when this is made; values are checked, and digests made, in a thread
    meanwhile. What asks for them (a pass, `describe`, `digests`, `part`) waits for it, and raises what it found.

    Raises:
        UsageError: no such file, or names, shapes or dtypes that the model doesn't take (both are named).
        DataError: unreadable content, NaN or infinite values (input and sample named), or no samples.
    """

    skipped: tuple[Skipped, ...] = ()
    preprocess: Preprocess | None = None

    def __init__(
        self,
        source: Any,
        inputs: Sequence[TensorInfo],
        *,
        limit: int | None = None,
        batch: int = 8,
        lazy: bool = False,
        unpack: Path | None = None,
    ) -> None:
        self._inputs, self._batch = tuple(inputs), batch
        self._parts = _parts(source, self._inputs)
        if unpack is not None:
            self._parts = [
                _unpacked(part, self._inputs, unpack / str(number)) for number, part in enumerate(self._parts)
            ]
        self._named = [_short(where, source) for where, _ in self._parts]
        found = sum(_count(_matched(_look(load), self._inputs, where)) for where, load in self._parts)
        if not found:
            raise DataError("--data holds no samples (the first axis counts them)")
        self.samples = found if limit is None else min(found, limit)
        self._reading: Future[_Taken] | None = Future()
        if lazy:
            threading.Thread(target=self._read, args=(self._reading,), name="trtopt-digests", daemon=True).start()
        else:
            self._read(self._reading)
            self._taken  # noqa: B018  raises what is wrong

    def _read(self, reading: Future[_Taken]) -> None:
        try:
            found: list[tuple[str, int, int]] = []
            for number, (where, load) in enumerate(self._parts):
                found += [(digest, number, index) for index, digest in enumerate(_digests(load(), self._inputs, where))]
            taken = found if self.samples >= len(found) else sorted(found)[: self.samples]
            reading.set_result(tuple(sorted(taken, key=lambda item: item[1:])))
        except BaseException as error:
            reading.set_exception(error)

    @property
    def _taken(self) -> _Taken:
        """The samples used, in order."""
        reading = self._reading
        if reading is not None:
            self._known, self._reading = reading.result(), None
        return self._known

    @property
    def digests(self) -> tuple[str, ...]:
        """Of each sample's content, in order."""
        return tuple(digest for digest, _, _ in self._taken)

    @property
    def names(self) -> tuple[str, ...]:
        """Of each sample, in order: "FILE[INDEX]"; of arrays in memory "arrays[INDEX]"."""
        return tuple(f"{self._named[number]}[{index}]" for _, number, index in self._taken)

    def part(self, start: int, stop: int) -> ArrayBatches:
        """The samples from `start` to `stop` alone; nothing is read for it, and of files it can be sent to another process."""
        taken = self._taken[start:stop]  # first: nothing that is still being read can be copied
        some = copy.copy(self)
        some._known, some.samples = taken, len(taken)
        return some

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "arrays",
            "count": self.samples,
            "digest": sha256_json(sorted(self.digests)),
        }

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        pending: list[dict[str, NDArray[Any]]] = []
        count = 0
        for piece in self._pieces():
            if pending and any(pending[0][name].shape[1:] != values.shape[1:] for name, values in piece.items()):
                yield _joined(pending)  # another size: the samples can't share a batch
                pending, count = [], 0
            start, size = 0, _count(piece)
            while start < size:
                step = min(self._batch - count, size - start)
                pending.append({name: values[start : start + step] for name, values in piece.items()})
                start, count = start + step, count + step
                if count == self._batch:
                    yield _joined(pending)
                    pending, count = [], 0
        if pending:
            yield _joined(pending)

    def _pieces(self) -> Iterator[dict[str, NDArray[Any]]]:
        """The samples taken, in order, at most a batch at a time, as the model takes them."""
        rows_of: list[list[int]] = [[] for _ in self._parts]
        for _, number, index in self._taken:
            rows_of[number].append(index)
        for (where, load), taken in zip(self._parts, rows_of):
            if not taken:
                continue
            part = _matched(load(checked=True), self._inputs, where)
            for start in range(0, len(taken), self._batch):
                rows = taken[start : start + self._batch]
                # Rows in a row are a slice, which copies nothing where the array is in memory.
                pick = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
                yield {info.name: _converted(part[info.name][pick], info) for info in self._inputs}


def _short(where: str, source: Any) -> str:
    """A part's name: a file's within the folder that was given, or alone; of what is in memory what it is."""
    if not isinstance(source, (str, os.PathLike)):
        return where.removeprefix("the ")
    return str(Path(where).relative_to(source)) if Path(source).is_dir() else Path(where).name


def _count(part: Arrays) -> int:
    return len(next(iter(part.values())))


def _joined(pieces: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return pieces[0] if len(pieces) == 1 else {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}


def _digests(part: Arrays, inputs: Sequence[TensorInfo], where: str) -> list[str]:
    """One digest per sample, over all inputs; checks every value on the way."""
    matched = _matched(part, inputs, where)
    found = [hashlib.sha256() for _ in range(_count(matched))]
    for info in inputs:
        values = matched[info.name]
        rows = max(1, _BLOCK // max(1, values[:1].nbytes))
        for start in range(0, len(values), rows):
            block = _checked(values[start : start + rows], info, where, start)
            for offset, sample in enumerate(block):
                found[start + offset].update(np.ascontiguousarray(sample).reshape(-1).view(np.uint8).data)
    return [digest.hexdigest() for digest in found]


def _parts(source: Any, inputs: Sequence[TensorInfo]) -> list[_Part]:
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
        return [(str(file), partial(_load, file, inputs)) for file in files]
    if isinstance(source, np.ndarray):
        return [("the array", partial(_given, {_only(inputs, "an array").name: source}))]
    if isinstance(source, Mapping):
        return [("the arrays", partial(_given, source))]
    if isinstance(source, Iterable):
        given = list(source)  # an iterator can be read once, and several passes are needed
        return [(f"batch {number}", partial(_given, item)) for number, item in enumerate(given)]
    raise UsageError(
        f"data is {type(source).__name__}; a path, an array, a mapping or an iterable of mappings is needed"
    )


def _only(inputs: Sequence[TensorInfo], what: str) -> TensorInfo:
    if len(inputs) != 1:
        names = ", ".join(info.name for info in inputs)
        raise UsageError(f"{what} fits a model with one input; this one has {names}: give an .npz with these names")
    return inputs[0]


def _given(arrays: Any, **_: bool) -> Arrays:
    found: Arrays = arrays
    return found


def _look(load: Callable[..., Arrays]) -> Arrays:
    """The arrays of a part, or others of their shapes and types where reading them would take long."""
    return load(bare=True)


def _unpacked(part: _Part, inputs: Sequence[TensorInfo], folder: Path) -> _Part:
    """The part with compressed arrays copied to files in `folder`, so that they can be mapped."""
    where, load = part
    path = Path(where)
    if getattr(load, "func", None) is not _load or path.suffix != ".npz":
        return part
    with _opened(path), zipfile.ZipFile(path) as archive:
        if all(item.compress_type == zipfile.ZIP_STORED for item in archive.infolist()):
            return part
        _matched(_look(load), inputs, where)  # what can't be used isn't unpacked
        try:
            folder.mkdir(parents=True)
            files = {}
            for number, info in enumerate(inputs):
                files[info.name] = folder / f"{number}.npy"
                with archive.open(f"{info.name}.npy") as member, files[info.name].open("wb") as file:
                    shutil.copyfileobj(member, file, _BLOCK)
        except OSError as error:
            raise OutputError(f"can't unpack {path} to {folder}: {error.strerror or error}") from error
    return where, partial(_mapped, files)


def _mapped(files: Mapping[str, Path], **_: bool) -> Arrays:
    return {name: np.load(file, mmap_mode="r", allow_pickle=False) for name, file in files.items()}


def _load(path: Path, inputs: Sequence[TensorInfo], *, checked: bool = False, bare: bool = False) -> Arrays:
    """Args: checked: an archive's checksums were compared before. bare: shapes and types are all that is wanted."""
    if path.suffix not in (".npz", ".npy"):
        raise UsageError(f"--data {path} is neither .npz nor .npy nor a folder of them")
    with _opened(path):
        if path.suffix == ".npy":
            return {_only(inputs, f"{path.name}").name: np.load(path, mmap_mode="r", allow_pickle=False)}
        with zipfile.ZipFile(path) as archive:
            return {
                item.filename.removesuffix(".npy"): _member(path, archive, item, checked, bare)
                for item in archive.infolist()
            }


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[None]:
    try:
        yield
    except TrtoptError:
        raise
    except Exception as error:  # NumPy parses damaged headers as Python: TokenError, SyntaxError and more come out
        raise DataError(
            f"{path} can't be read as {path.suffix} ({str(error)[:200]}); was it written completely?"
        ) from None


def _member(path: Path, archive: zipfile.ZipFile, item: zipfile.ZipInfo, checked: bool, bare: bool) -> NDArray[Any]:
    """One array of an .npz: mapped where it is stored uncompressed, as np.savez does, else read."""
    with archive.open(item) as file:
        layout: Any = np.lib.format  # untyped in some of the NumPy versions that are supported
        version = layout.read_magic(file)
        read = layout.read_array_header_1_0 if version == (1, 0) else layout.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{item.filename} holds Python objects")
        header = file.tell()
        if item.compress_type != zipfile.ZIP_STORED or 0 in shape or not shape:
            if bare:
                return np.broadcast_to(np.zeros((), dtype), shape)
            file.seek(0)
            return np.asarray(layout.read_array(file, allow_pickle=False))
        while not (checked or bare) and file.read(_BLOCK):  # to its end, where the archive's checksum is compared
            pass
    with path.open("rb") as raw:
        raw.seek(item.header_offset)
        local = raw.read(30)  # the archive's own header of the member: fixed part, then name and extra field
    start = item.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    return np.memmap(path, dtype, "r", start + header, shape, "F" if fortran else "C")


def _matched(part: Arrays, inputs: Sequence[TensorInfo], where: str) -> dict[str, NDArray[Any]]:
    """The arrays by input, with names, shapes, dtypes and numbers of samples as the model needs them."""
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
    found = {info.name: _fitting(_array(part[info.name], f"{where}: {info.name}"), info, where) for info in inputs}
    counts = {name: len(values) for name, values in found.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{where}: the inputs have different numbers of samples: {counts}")
    return found


def _array(given: Any, what: str) -> NDArray[Any]:
    try:
        return np.asanyarray(given)
    except ValueError as error:  # nested lists of different lengths
        raise UsageError(f"{what} is no array ({error}); give samples of one size, or one mapping per size") from None


def _fitting(values: NDArray[Any], info: TensorInfo, where: str) -> NDArray[Any]:
    what = f"{where}: {info.name}"
    wanted, shape = np.dtype(info.dtype), "x".join(map(str, info.shape)) or "scalar"
    if not info.shape:
        raise UsageError(
            f"the input {info.name} is a single number, with no axis to count samples: make it a constant of the model"
        )
    if values.ndim != len(info.shape):
        raise UsageError(f"{what} has shape {'x'.join(map(str, values.shape)) or 'scalar'}, the model takes {shape}")
    for axis, size in enumerate(info.shape[1:], start=1):  # the first axis counts samples
        if isinstance(size, int) and size >= 0 and values.shape[axis] != size:
            given = "x".join(map(str, values.shape))
            raise UsageError(f"{what} has shape {given}, the model takes {shape}: dimension {axis} must be {size}")
    same_kind = values.dtype.kind == wanted.kind or {values.dtype.kind, wanted.kind} == {"i", "u"}
    if values.dtype != wanted and (not same_kind or values.dtype.kind not in "fiu"):
        raise UsageError(f"{what} has dtype {values.dtype}, the model takes {info.dtype}: convert it with astype first")
    return values


def _checked(values: NDArray[Any], info: TensorInfo, where: str, first: int) -> NDArray[Any]:
    """Some samples as the model takes them, every value checked; `first` is the number of the first one."""
    what = f"{where}: {info.name}"
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        sample = first + int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(1)))
        raise DataError(f"{what} holds NaN or infinite values, first in sample {sample}")
    converted = _converted(values, info)
    if values.dtype == converted.dtype:
        return converted
    lost = not np.isfinite(converted).all() if converted.dtype.kind == "f" else not np.array_equal(converted, values)
    if lost:
        raise DataError(f"{what} has {values.dtype} values that {info.dtype} can't hold")
    return converted


def _converted(values: NDArray[Any], info: TensorInfo) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # checked before
        return np.asarray(np.ascontiguousarray(values, np.dtype(info.dtype)))
