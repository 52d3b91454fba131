"""Arrays in .npy and .npz files, mapped, so that samples are read when they are asked for.

Compressed arrays of an archive can't be mapped: they are unpacked whole, up to 1 GiB, so that a small file can't ask for any
amount of memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, TrtoptError
from trtopt.core.files import opened_regular

_WHOLE = 1 << 30  # bytes of a compressed array
_PIECE = 1 << 20  # bytes
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes; others shrink zeros almost without end


class PackedArray:
    """A compressed array of an archive: its shape and dtype; it is unpacked, whole and once, when values are asked for.

    Raises:
        DataError: where the archive doesn't hold what it says; it is named.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile, item: zipfile.ZipInfo) -> None:
        self.path, self._item = path, item
        with archive.open(item) as file:
            self.shape, self.dtype, _ = _header(path, file, item.file_size, exact=True)
        self.ndim, self.nbytes = len(self.shape), math.prod(self.shape) * self.dtype.itemsize
        if self.nbytes > _WHOLE:
            raise ValueError(
                f"an array has {self.nbytes} bytes; up to {_WHOLE} are read where it is compressed: use np.savez"
            )
        self._content: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        if self._content is None:
            layout: Any = np.lib.format  # untyped in some of the NumPy versions that are supported
            with readable(self.path), zipfile.ZipFile(self.path) as archive, archive.open(self._item) as file:
                self._content = layout.read_array(file, allow_pickle=False)
                if file.read(1):  # what is read to its end has the right checksum
                    raise ValueError("more than an array is there")
        part: NDArray[Any] = self._content[rows]
        return part


def stored_array(path: Path) -> NDArray[Any]:
    """Map the array of an .npy file.

    Raises:
        DataError: it can't be read.
    """
    with readable(path), opened_regular(path) as file:
        return _mapped(path, file, os.fstat(file.fileno()).st_size)


def stored_arrays(path: Path, *, checked: bool = False) -> dict[str, NDArray[Any] | PackedArray]:
    """Return the arrays of an .npz file by name.

    Args:
        checked: its checksums were compared before, or will be.

    Raises:
        DataError: it can't be read.
    """
    with readable(path), opened_regular(path) as file, zipfile.ZipFile(path) as archive:
        arrays: dict[str, NDArray[Any] | PackedArray] = {}
        for item in archive.infolist():
            name = item.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"{name} is in it twice")
            if item.compress_type not in _COMPRESSIONS:
                raise ValueError(f"{name} is compressed by method {item.compress_type}; NumPy writes 0 and 8")
            if item.compress_type == zipfile.ZIP_STORED:
                with archive.open(item) as member:  # which checks its place
                    while not checked and member.read(_PIECE):  # at its end the checksum is compared
                        pass
                file.seek(item.header_offset)
                local = file.read(30)  # the archive's own header of the member: fixed part, then name and extra field
                file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), os.SEEK_CUR)
                arrays[name] = _mapped(path, file, min(item.file_size, item.compress_size), exact=True)
            else:
                arrays[name] = PackedArray(path, archive, item)
        return arrays


def _mapped(path: Path, file: IO[bytes], held: int, *, exact: bool = False) -> NDArray[Any]:
    shape, dtype, fortran = _header(path, file, held, exact=exact)
    if 0 in shape:
        return np.empty(shape, dtype)  # nothing can't be mapped
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _header(path: Path, file: IO[bytes], held: int, *, exact: bool) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Read an array's header: its shape, dtype and whether it is in Fortran order.

    Args:
        held: bytes that there are, header and all; the array must fill them where it is `exact`.
    """
    begin = file.tell()
    layout: Any = np.lib.format
    version = layout.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version} of the .npy format isn't known")
    # 3.0 is 2.0 with UTF-8 in the names of fields; arrays with fields are no input of a model.
    shape, fortran, dtype = (layout.read_array_header_1_0 if version == (1, 0) else layout.read_array_header_2_0)(file)
    if dtype.hasobject:
        what = path if path.suffix == ".npy" else f"{path}: {Path(file.name).stem}"
        raise DataError(
            f"{what} holds Python objects, as NumPy makes of a dict or of arrays of several sizes, and they aren't read: "
            "save numbers, np.savez('F.npz', NAME=np.stack(samples)), or each sample in a file of a folder"
        )
    if dtype.subdtype is not None:
        raise ValueError(f"its dtype is {dtype}")
    if any(type(size) is not int or size < 0 for size in shape) or len(shape) > 32:
        raise ValueError(f"its shape is {str(shape)[:60]}")
    needed = file.tell() - begin + math.prod(shape) * dtype.itemsize
    if needed > held or (exact and needed < held):
        raise ValueError(f"it says that it takes {needed} bytes, and {held} are there")
    return shape, dtype, fortran


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise DataError with the file's name for whatever goes wrong while it is read."""
    try:
        yield
    except TrtoptError:
        raise
    except Exception as error:  # NumPy parses damaged headers as Python: TokenError, SyntaxError and more come out
        reason = str(error) or type(error).__name__
        raise DataError(f"{path} can't be read as {path.suffix} ({reason[:200]}); was it written completely?") from None
