"""Arrays as samples: .npz (one array per input), .npy, a folder of them, or arrays in memory, checked against the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, UsageError
from trtopt.core.files import existing_file
from trtopt.core.kept import ARRAYS, EXTENSIONS
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import TensorInfo, x
from trtopt.data.arrayfiles import stored_array, stored_arrays
from trtopt.data.convert import check_kind, converted
from trtopt.data.rebatch import Batches, moved, samples_in

_Part = tuple[str, Path | Mapping[str, Any]]  # name for messages; a file, or arrays by input
_BLOCK = 1 << 22  # bytes checked at a time


class ArrayBatches(Batches):
    """Samples of arrays. Everything is checked when this is made, block by block.

    Files are mapped, and compressed ones unpacked in each pass. Which samples a `limit` takes is decided by their content.

    Raises: UsageError (no such file, or names, shapes or dtypes that the model doesn't take) and DataError (unreadable content,
    NaN or infinite values, or no samples).
    """

    kind = "arrays"

    def __init__(
        self,
        source: Any,
        inputs: Sequence[TensorInfo],
        *,
        limit: int | None = None,
        batch: int = 8,
        reporter: Reporter = SILENT,
    ) -> None:
        self._inputs, self.batch = tuple(inputs), batch
        fixed = [info for info in self._inputs if info.batch_axis == 0 and info.shape and 0 not in info.open_axes]
        if len({info.shape[0] for info in fixed}) > 1:
            raise UsageError(_apart(fixed))
        self._parts = _parts(source, self._inputs, limit)
        samples: list[tuple[str, int, int]] = []
        for number, (where, part) in enumerate(self._parts):
            arrays = _matched(part, self._inputs, where, reporter)
            samples += [(digest, number, index) for index, digest in enumerate(_digests(arrays, self._inputs, where))]
        if not samples:
            raise DataError(f"`data=` holds no samples ({where_counted(self._inputs)})")
        names = [_short(where, source) for where, _ in self._parts]
        taken = sorted(sorted(samples)[:limit], key=lambda item: item[1:])
        self._choose([(digest, f"{names[number]}[{index}]", (number, index)) for digest, number, index in taken])

    def _pieces(self) -> Iterator[dict[str, NDArray[Any]]]:
        for number, taken in groupby((place for _, _, place in self._chosen), key=lambda place: place[0]):
            (where, part), places = self._parts[number], [index for _, index in taken]
            arrays = _matched(part, self._inputs, where)
            for start in range(0, len(places), self.batch):
                rows = places[start : start + self.batch]
                # Rows in a row are a slice, which copies nothing where the array is in memory.
                pick = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
                yield {
                    info.name: converted(arrays[info.name][pick], info.dtype, f"{where}: {info.name}")
                    for info in self._inputs
                }


def where_counted(inputs: Sequence[TensorInfo]) -> str:
    """Say where samples lie in the arrays of a model's inputs."""
    if all(info.batch_axis == 0 for info in inputs):
        return "the first axis of an array counts samples"
    if all(info.batch_axis is not None or not info.shape for info in inputs):
        axes = [f"axis {info.batch_axis} of {info.name} {info.dims}" for info in inputs if info.shape]
        numbers = "".join(f"; {info.name} is one number for each, or for all" for info in inputs if not info.shape)
        return f"samples are counted on {', '.join(axes) or 'an axis of their own'}{numbers}"
    shapes = " and ".join(f"{info.name} {info.dims}" for info in inputs)
    return (
        f"an array of {shapes} is one sample as a whole: give several in files of a folder, or along an axis before it"
    )


def _short(where: str, source: Any) -> str:
    """A part's name: a file's within the folder that was given, or alone; of what is in memory what it is."""
    if not isinstance(source, (str, os.PathLike)):
        return where.removeprefix("the ")
    return str(Path(where).relative_to(source)) if Path(source).is_dir() else Path(where).name


def _digests(matched: Mapping[str, NDArray[Any]], inputs: Sequence[TensorInfo], where: str) -> list[str]:
    """Digest each sample, over all inputs; every value is checked on the way."""
    digests: list[str] = []
    rows = max(1, _BLOCK * samples_in(matched) // max(1, sum(values.nbytes for values in matched.values())))
    for start in range(0, samples_in(matched), rows):
        blocks = [_checked(matched[info.name][start : start + rows], info, where, start) for info in inputs]
        for samples in zip(*blocks):
            digest = hashlib.sha256()
            for sample in samples:
                digest.update(np.ascontiguousarray(sample).reshape(-1).view(np.uint8).data)
            digests.append(digest.hexdigest())
    return digests


def _saved(inputs: Sequence[TensorInfo]) -> str:
    """Say how to write a file of arrays."""
    arguments = ", ".join(f"{info.name}=array" if info.name.isidentifier() else "**arrays" for info in inputs)
    return f"in Python np.savez('samples.npz', {arguments}) writes one; {where_counted(inputs)}"


def _parts(source: Any, inputs: Sequence[TensorInfo], limit: int | None) -> list[_Part]:
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if os.path.isdir(path):  # noqa: PTH112  (Path's raises errors for names that are too long)
            files = sorted(item for item in path.rglob("*") if item.suffix in ARRAYS and not item.is_dir())
            if not files:
                images = any(item.suffix.lower() in EXTENSIONS for item in path.rglob("*"))
                instead = f"for its images, `images='{path}'` and `preprocess=` instead of `data=`"
                raise DataError(f"there is no .npz or .npy file in {path}: {instead if images else _saved(inputs)}")
            return [(str(file), file) for file in files]
        if existing_file(path, "`data=`").suffix not in ARRAYS:
            raise UsageError(f"`data='{path}'` is neither .npz nor .npy nor a folder of them; {_saved(inputs)}")
        return [(str(path), path)]
    if isinstance(source, Mapping):
        return [("the arrays", source)]
    if _is_array(source):
        return [("the array", {only(inputs, "an array").name: source})]
    parts, count = list[_Part](), 0  # kept: an iterator can be read once, and several passes are needed
    for number, batch in enumerate(named_batches(source, inputs)):
        parts.append((f"batch {number}", batch))
        count += max((len(value) for value in batch.values() if hasattr(value, "__len__")), default=0)
        if limit is not None and count >= limit and not isinstance(source, Sequence):
            break
    return parts


def plain(value: Any) -> Any:
    """A tensor of PyTorch in the CPU's memory, in a type that NumPy has; anything else as it is."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
        return value.float() if str(value.dtype) == "torch.bfloat16" else value
    return value


def _is_array(value: Any) -> bool:
    """True for arrays of NumPy, PyTorch or the like."""
    return hasattr(value, "__array__") and hasattr(value, "ndim")


def named_batches(source: Any, inputs: Sequence[TensorInfo]) -> Iterator[Mapping[str, Any]]:
    """Yield what an iterable gives, each batch by input names; nothing else is checked."""
    if not isinstance(source, Iterable) and not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise UsageError(
            f"data is {type(source).__name__}; a path, an array, a mapping of input names to arrays, or an iterable of these "
            "(such as a DataLoader) is needed"
        )
    # A data set that is read by index, as PyTorch's are, doesn't end by itself.
    items = source if isinstance(source, Iterable) else (source[index] for index in range(len(source)))
    for number, item in enumerate(items):
        yield {name: plain(value) for name, value in _named(item, inputs, number).items()}


def _named(item: Any, inputs: Sequence[TensorInfo], number: int) -> Mapping[str, Any]:
    """A batch by input names. Of a tuple the first ones are the inputs; labels behind them aren't read. A single sample,
    without the axis that counts samples, as data sets give it, is a batch of one."""
    if isinstance(item, Mapping):
        return {name: _batched(value, inputs, str(name)) for name, value in item.items()}
    parts = list(item) if isinstance(item, (tuple, list)) else [item]
    if len(parts) < len(inputs) or not all(map(_is_array, parts[: len(inputs)])):
        names = ", ".join(info.name for info in inputs)
        kinds = ", ".join(type(part).__name__ for part in parts[:4])
        held = f"{type(item).__name__} of {kinds}" if isinstance(item, (tuple, list)) else kinds
        raise UsageError(f"batch {number} is {held}; an array for each input ({names}), in order or by name, is needed")
    return {info.name: _batched(part, inputs, info.name) for info, part in zip(inputs, parts)}


def _batched(value: Any, inputs: Sequence[TensorInfo], name: str) -> Any:
    for info in inputs:
        if info.name == name and info.batch_axis is not None and _is_array(value) and value.ndim == len(info.shape) - 1:
            return value[(slice(None),) * info.batch_axis + (None,)] if value.ndim else value
    return value


def only(inputs: Sequence[TensorInfo], what: str, instead: str = "an .npz") -> TensorInfo:
    """Return a model's one input; UsageError where it has several, which `what` doesn't fit."""
    if len(inputs) != 1:
        names = ", ".join(info.name for info in inputs)
        raise UsageError(f"{what} fits a model with one input; this one has {names}: give {instead} with these names")
    return inputs[0]


def _matched(
    part: Path | Mapping[str, Any], inputs: Sequence[TensorInfo], where: str, reporter: Reporter | None = None
) -> dict[str, NDArray[Any]]:
    """The arrays by input, with names, shapes, dtypes and numbers of samples as the model needs them. The first time, when
    there is a `reporter` to be told what isn't read, checksums are compared, too."""
    file = isinstance(part, Path)
    if isinstance(part, Path):
        single = part.suffix == ".npy"
        part = {only(inputs, part.name).name: part} if single else stored_arrays(part, checked=reporter is None)
    names = [info.name for info in inputs]
    if absent := [name for name in names if name not in part]:
        extra = ", ".join(map(str, part)) or "none"
        raise UsageError(
            f"{where} lacks {', '.join(absent)}; it has {extra}, the model's inputs are {', '.join(names)}"
        )
    if unknown := ", ".join(sorted(str(name) for name in part if name not in names)):
        if not file:
            raise UsageError(f"{where} has {unknown}, which is no input; the model's inputs are {', '.join(names)}")
        if reporter is not None:
            reporter.note(f"{where} has {unknown}, which is no input: not read")
    arrays = {info.name: _fitting(part[info.name], info, f"{where}: {info.name}", file) for info in inputs}
    most = max(map(len, arrays.values()), default=0)
    for info in inputs:
        if not info.shape and len(array := arrays[info.name]) == 1:  # one number is the same for all samples
            arrays[info.name] = np.broadcast_to(array, most)
    try:
        samples_in(arrays, f"{where}: ")
    except DataError as error:
        raise DataError("; ".join(filter(None, (str(error), _apart(inputs))))) from None
    return arrays


def _apart(inputs: Sequence[TensorInfo]) -> str:
    """Say what to do about a model whose inputs don't all begin with the samples, such as an LSTM's with its state."""
    arrays = [info for info in inputs if info.shape]
    odd = next((info for info in arrays if info.shape[:1] != arrays[0].shape[:1]), None)
    if odd is None:
        return ""
    given = f"{odd.name}=NUMBERS"
    way = f"export it with {odd.name} as a constant, if that is the same for all samples, or make it one"
    if odd.open_axes:
        sizes = ("batch" if axis == odd.open_axes[0] else str(size) for axis, size in enumerate(odd.shape))
        given = f"{odd.name}:{','.join(sizes)}"
        way = f"export it with that axis called batch in all, wherever it is (`inputs=['{given}']`), or call it so in the file"
    return (
        f"samples are counted on the first axis of every input, and the model's {odd.name} is {odd.dims} beside "
        f"{arrays[0].name} {arrays[0].dims}: {way} (trtopt check MODEL `set='{given}'` `fix='OUT.onnx'`)"
    )


def _turned(shape: Sequence[int], info: TensorInfo, counted: bool) -> str:
    """Say what to do where only the channels are on the other side than the model's, as images come of most libraries."""
    if len(info.shape) != 4 or info.batch_axis not in (0, None):
        return ""
    first = counted + 1
    for order, where in (((2, 0, 1), "last"), ((1, 2, 0), "first")):
        sizes = [shape[first + place] for place in order]
        if all(want == size or not isinstance(want, int) for want, size in zip(info.shape[1:], sizes)):
            axes = (*range(first), *(first + place for place in order))
            return f"; its channels come {where}: give x.transpose{axes}"
    return ""


def _fitting(values: Any, info: TensorInfo, what: str, stored: bool = False) -> NDArray[Any]:
    try:
        array = stored_array(values) if isinstance(values, Path) else np.asanyarray(plain(values))
    except ValueError as error:  # nested lists of different lengths
        raise UsageError(f"{what} is no array ({error}); give samples of one size, or one mapping per size") from None
    if not info.shape and info.batch_axis is not None:
        raise UsageError(
            f"the input {info.name} is a single number, with no axis to count samples: make it a constant of the model"
        )
    if (stored or isinstance(values, Path)) and info.batch_axis is not None and 0 < array.ndim == len(info.shape) - 1:
        array = np.expand_dims(array, info.batch_axis)  # a file that holds one sample, as data sets give it
    shapes = f"{what} has shape {x(array.shape)}, the model takes {x(info.shape)}"
    # Of samples, each an array as the model takes it.
    counted = info.batch_axis is None and array.ndim == len(info.shape) + 1
    if array.ndim != len(info.shape) + counted:
        raise UsageError(shapes)
    for axis, size in enumerate(info.shape, start=counted):
        if axis != info.batch_axis and isinstance(size, int) and size >= 0 and array.shape[axis] != size:
            raise UsageError(f"{shapes}: dimension {axis} must be {size}{_turned(array.shape, info, counted)}")
    if info.batch_axis != 0 and not counted:
        array = moved(array, info.batch_axis)
    if 0 in array.shape[1:]:
        raise UsageError(f"{what} has shape {x(array.shape)}: there is no value in its samples")
    check_kind(array.dtype, info.dtype, what)
    return array


def usable(values: Any, info: TensorInfo, where: str) -> NDArray[Any]:
    """Samples of one input as the model takes them, all checked; raises as `ArrayBatches` does."""
    array = _fitting(values, info, f"{where}: {info.name}")
    if not len(array):
        raise DataError(f"{where}: {info.name} holds no samples (the first axis counts them)")
    return _checked(array, info, where, 0)


def _checked(values: NDArray[Any], info: TensorInfo, where: str, first: int) -> NDArray[Any]:
    """Some samples as the model takes them, every value checked; `first` is the number of the first one."""
    what = f"{where}: {info.name}"
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        sample = first + int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(1)))
        raise DataError(f"{what} holds NaN or infinite values, first in sample {sample}")
    return converted(values, info.dtype, what)
