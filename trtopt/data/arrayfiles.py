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
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, TrtoptError
from trtopt.core.files import opened_regular

_WHOLE = 1 << 30  # bytes of a compressed array
_PIECE = 1 << 20  # bytes


def stored_array(path: Path) -> NDArray[Any]:
    """Map the array of an .npy file."""
    with readable(path), opened_regular(path) as file:
        return _mapped(path, file, os.fstat(file.fileno()).st_size)


def stored_arrays(path: Path, *, checked: bool = False) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file by name; its checksums are compared, unless that is `checked` before or later."""
    with readable(path), opened_regular(path) as file, zipfile.ZipFile(path) as archive:
        arrays: dict[str, NDArray[Any]] = {}
        for item in archive.infolist():
            name = item.filename.removesuffix(".npy")
            with archive.open(item) as member:  # which checks its place
                if item.compress_type == zipfile.ZIP_STORED:
                    while not checked and member.read(_PIECE):  # at its end the checksum is compared
                        pass
                    file.seek(item.header_offset)
                    local = file.read(30)  # the archive's own header: fixed part, then name and extra field
                    file.seek(
                        int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), os.SEEK_CUR
                    )
                    arrays[name] = _mapped(path, file, min(item.file_size, item.compress_size))
                elif item.file_size > _WHOLE:
                    raise ValueError(
                        f"{name} has {item.file_size} bytes; up to {_WHOLE} are read compressed: use np.savez"
                    )
                else:
                    shape, dtype, order = _header(path, member, item.file_size)
                    arrays[name] = np.ndarray(shape, dtype, member.read(), order=order)
        return arrays


def _mapped(path: Path, file: IO[bytes], held: int) -> NDArray[Any]:
    shape, dtype, order = _header(path, file, held)
    # nothing can't be mapped
    return np.memmap(path, dtype, "r", file.tell(), shape, order) if 0 not in shape else np.empty(shape, dtype)


def _header(path: Path, file: IO[bytes], held: int) -> tuple[tuple[int, ...], np.dtype[Any], Literal["C", "F"]]:
    """Read an array's header, of `held` bytes in all: its shape, dtype and order."""
    begin = file.tell()
    layout: Any = np.lib.format  # untyped in some of the NumPy versions that are supported
    # 3.0 is 2.0 with UTF-8 in the names of fields; arrays with fields are no input of a model.
    read = layout.read_array_header_1_0 if layout.read_magic(file) == (1, 0) else layout.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        what = path if path.suffix == ".npy" else f"{path}: {Path(file.name).stem}"
        raise DataError(
            f"{what} holds Python objects, as NumPy makes of a dict or of arrays of several sizes, and they aren't read: "
            "save numbers, np.savez('F.npz', NAME=np.stack(samples)), or each sample in a file of a folder"
        )
    if dtype.subdtype is not None:
        raise ValueError(f"its dtype is {dtype}")
    needed = file.tell() - begin + math.prod(shape) * dtype.itemsize
    if needed > held or min(shape, default=0) < 0:
        raise ValueError(f"it says that it takes {needed} bytes, and {held} are there")
    return shape, dtype, "F" if fortran else "C"


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
