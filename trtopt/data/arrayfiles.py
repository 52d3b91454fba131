"""Arrays in .npy and .npz files, read a few samples at a time, and never beyond what their file holds.

Nothing is mapped: a file that another process cuts off meanwhile would end this one by a signal. So that a file of some
kilobytes can't ask for any amount of memory, a compressed array has up to 64 MiB a sample, and one that must be read whole
(in Fortran order, or compressed and asked for whole) up to 1 GiB.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, TrtoptError
from trtopt.core.files import opened_regular

_SAMPLE = 1 << 26  # bytes of a compressed array's sample
_WHOLE = 1 << 30  # bytes of an array that must be read whole
_PIECE = 1 << 18  # bytes read at a time from an archive, which copies what it has to append what it gets
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes; others shrink zeros almost without end


class StoredArray(ABC):
    """An array in a file: its shape and dtype; rows (along its first axis) are read when they are asked for.

    Args:
        file: at the array's header, which is read.
        held: bytes that there are, header and all; the array must fill them where it is `exact`.

    Raises:
        DataError: from every method but this, where the file doesn't hold what it says or has changed; it is named.
    """

    def __init__(self, path: Path, file: IO[bytes], held: int, *, exact: bool, packed: bool) -> None:
        self.path, begin = path, file.tell()
        layout: Any = np.lib.format  # untyped in some of the NumPy versions that are supported
        version = layout.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version} of the .npy format isn't known")
        # 3.0 is 2.0 with UTF-8 in the names of fields; arrays with fields are no input of a model.
        header_reader = layout.read_array_header_1_0 if version == (1, 0) else layout.read_array_header_2_0
        shape, fortran, dtype = header_reader(file)
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
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self.ndim, self._row = len(self.shape), math.prod(self.shape[1:]) * dtype.itemsize
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        self._fortran, self._packed = fortran and self.ndim > 1, packed
        self._content: NDArray[Any] | None = None
        self._header = file.tell() - begin
        needed = self._header + self.nbytes
        if needed > held or (exact and needed < held):
            raise ValueError(f"it says that it takes {needed} bytes, and {held} are there")
        if packed and self.ndim and self._row > _SAMPLE:
            raise ValueError(
                f"its samples have {self._row} bytes each; up to {_SAMPLE} are read where they are compressed: use np.savez"
            )

    @abstractmethod
    def _fill(self, target: NDArray[np.uint8], at: int) -> int:
        """Read bytes from byte `at` of the array on; how many there were."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Sequence[int]) -> NDArray[Any]:
        """Some rows, in ascending order."""
        if self._fortran:
            self._content = self.whole() if self._content is None else self._content
            return self._content[rows]
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return self._read(start * self._row, (max(0, stop - start), *self.shape[1:]))
        return np.stack([self._read(row * self._row, self.shape[1:]) for row in rows])

    def whole(self) -> NDArray[Any]:
        if self.nbytes > _WHOLE and (self._fortran or self._packed):
            how = "in Fortran order: use np.ascontiguousarray" if self._fortran else "compressed: use np.savez"
            raise DataError(f"{self.path}: an array has {self.nbytes} bytes; up to {_WHOLE} are read where it is {how}")
        return self._read(0, self.shape[::-1]).T if self._fortran else self._read(0, self.shape)

    def _read(self, at: int, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array of this shape from byte `at` on."""
        with readable(self.path):
            array = np.empty(shape, self.dtype)
            if array.nbytes and self._fill(array.reshape(-1).view(np.uint8), at) < array.nbytes:
                raise ValueError("it was cut off meanwhile")
            return array


class _Plain(StoredArray):
    """Bytes as they are, in any order."""

    def __init__(self, path: Path, file: IO[bytes], held: int, *, exact: bool = False) -> None:
        begin = file.tell()
        super().__init__(path, file, held, exact=exact, packed=False)
        self._begin, self._stamp = begin + self._header, _stamp(file)

    def _fill(self, target: NDArray[np.uint8], at: int) -> int:
        with opened_regular(self.path) as file:
            if _stamp(file) != self._stamp:
                raise ValueError("it was changed meanwhile")
            file.seek(self._begin + at)
            return file.readinto(target.data)


class _Member(StoredArray):
    """A member read through its archive, which compares the checksum at its end: fast from first to last."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, item: zipfile.ZipInfo, file: IO[bytes]) -> None:
        self._archive, self._item = archive, item
        self._file: Any = file
        self._at = 0  # byte of the array that comes next
        packed = item.compress_type != zipfile.ZIP_STORED
        super().__init__(path, self._file, item.file_size, exact=True, packed=packed)

    def _fill(self, target: NDArray[np.uint8], at: int) -> int:
        if at < self._at:
            self._file, self._at = self._archive.open(self._item), 0
            self._file.seek(self._header)
        while self._at < at:
            skipped = len(self._file.read(min(_PIECE, at - self._at)))
            if not skipped:
                return 0
            self._at += skipped
        done = 0
        while done < len(target) and (count := self._file.readinto(target[done : done + _PIECE].data)):
            done, self._at = done + count, self._at + count
        return done


def stored_array(path: Path) -> StoredArray:
    """The array of an .npy file.

    Raises:
        DataError: it can't be read.
    """
    with readable(path), opened_regular(path) as file:
        return _Plain(path, file, os.fstat(file.fileno()).st_size)


def stored_arrays(path: Path, *, checked: bool = False) -> dict[str, StoredArray]:
    """The arrays of an .npz file by name.

    Args:
        checked: the archive's checksums were compared before, so that what isn't compressed is read in any order.

    Raises:
        DataError: it can't be read.
    """
    with readable(path), contextlib.ExitStack() as unread:
        opened_regular(path).close()
        archive = unread.enter_context(zipfile.ZipFile(path))
        arrays: dict[str, StoredArray] = {}
        for name, item in members(archive).items():
            if checked and item.compress_type == zipfile.ZIP_STORED:
                arrays[name] = _uncompressed(path, archive, item)
            else:
                arrays[name] = _Member(path, archive, item, unread.enter_context(archive.open(item)))
        unread.pop_all()  # it is closed with the last array that is read through it
        return arrays


def members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """An .npz file's members by their arrays' names; ValueError for what NumPy doesn't write."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for item in archive.infolist():
        name = item.filename.removesuffix(".npy")
        if name in entries:
            raise ValueError(f"{name} is in it twice")
        if item.compress_type not in _COMPRESSIONS:
            raise ValueError(f"{name} is compressed by method {item.compress_type}; NumPy writes 0 and 8")
        entries[name] = item
    return entries


def _uncompressed(path: Path, archive: zipfile.ZipFile, item: zipfile.ZipInfo) -> StoredArray:
    archive.open(item).close()  # its checks of the member's place
    with opened_regular(path) as file:
        file.seek(item.header_offset)
        local = file.read(30)  # the archive's own header of the member: fixed part, then name and extra field
        file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), os.SEEK_CUR)
        return _Plain(path, file, min(item.file_size, item.compress_size), exact=True)


def _stamp(file: IO[bytes]) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


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
