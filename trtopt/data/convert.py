"""Arrays in the type of a network's input, where that keeps their kind and their values, and in runs: here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data.rebatch import Arrays, alone, chunks, laid_out, samples_in


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of that name, through ml_dtypes for those that NumPy lacks."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with onnx

        if not hasattr(ml_dtypes, name):
            raise UsageError(
                f"the model takes {name}, which is no type of numbers: move that part outside the model"
            ) from None
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def check_kind(dtype: np.dtype[Any], name: str, what: str, taker: str = "the model") -> None:
    """Raise UsageError, by the array's name `what` and the taker's, unless arrays of type `dtype` may become ones of type
    `name`: both floating, or both whole numbers."""
    target = numpy_dtype(name)
    floating = _floating(dtype) and _floating(target)
    whole = dtype.kind in "iu" and target.kind in "iu"
    if dtype != target and not floating and not whole and not _nameless(dtype, target):
        pixels = target == np.uint8 and _floating(dtype)
        how = "give pixels from 0 to 255, not what is made of them" if pixels else "convert it with astype first"
        raise UsageError(f"{what} has dtype {dtype}, {taker} takes {name}: {how}")


def converted(array: NDArray[Any], name: str, what: str, taker: str = "the model") -> NDArray[Any]:
    """`array` in the type `name`, contiguous; itself where it is that already. UsageError for another kind, DataError for
    values that the type can't hold: too large ones, or whole numbers that would be others."""
    check_kind(array.dtype, name, what, taker)
    target = numpy_dtype(name)
    if array.dtype == target:
        return np.asarray(array if array.flags.c_contiguous else array.copy(order="C"))
    if _nameless(array.dtype, target):
        return array.view(target)
    with np.errstate(over="ignore"):
        result: NDArray[Any] = array.astype(target, order="C")
    exact = np.isfinite(result).sum() == np.isfinite(array).sum() if _floating(target) else (result == array).all()
    if not exact:
        raise DataError(f"{what} has {array.dtype} values that {name} can't hold")
    return result


def _floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name.startswith(("bfloat", "float")))


def _nameless(dtype: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """True where these may be the bytes of a type that .npy has no name for: two bytes come back of each bfloat16."""
    raw = dtype.kind == "V" and not dtype.isbuiltin and dtype.names is None
    return raw and dtype.itemsize == target.itemsize and target.isbuiltin != 1


@dataclass(frozen=True)
class Run:
    """Arrays as a model takes them."""

    feed: dict[str, NDArray[Any]]
    samples: dict[str, NDArray[Any]]  # what is real of it, with the samples along the first axes
    size: int  # samples that `feed` holds: more than those where a fixed batch is filled up

    @property
    def real(self) -> int:
        return samples_in(self.samples)

    def cut(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """Return what the model gives for `feed`, without the samples that a fixed batch was filled up with."""
        real, size = self.real, self.size
        filled = {name for name, array in outputs.items() if real < size and array.ndim and len(array) == size}
        return {name: array[:real] if name in filled else array for name, array in outputs.items()}


def single_runs(inputs: Mapping[str, TensorInfo], batches: Iterable[Arrays], size: int = 1) -> Iterator[Run]:
    """Samples as a model takes them, one or `size` at a time; of a model whose inputs share a fixed batch, as many at a time as
    that holds, the last ones filled up."""
    infos = tuple(inputs.values())
    fixed = {1} if alone(infos) else {info.shape[0] for info in infos if info.shape and 0 not in info.open_axes}
    size = int(fixed.pop()) if len(fixed) == 1 else size
    for batch in batches:
        arrays = {info.name: converted(batch[info.name], info.dtype, f"the input {info.name!r}") for info in infos}
        for chunk, real in chunks(arrays, size, size):
            yield Run(laid_out(chunk, infos), {name: array[:real] for name, array in chunk.items()}, size)
