"""Weights that stay in their file until somebody reads them.

A lazy weight is an initializer without content, with ONNX's own external reference: the absolute path of the file that
holds it, an offset and a length. Copying weights takes most of the time of reading
and folding a model, where memory is new to the process; see `trtopt.graph.io.load_model`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from onnx import TensorProto

from trtopt.core.errors import InvalidModel
from trtopt.core.files import opened_regular

_STAMP = "checksum"  # the entry of a reference that holds the file's size and time of change when it was made
_CHUNK = 1 << 20  # bytes: read and hand on, from memory that is in use already


def make_lazy(tensor: TensorProto, file: Path, offset: int, length: int) -> None:
    """Let a weight be `length` bytes of a file."""
    tensor.ClearField("raw_data")
    location, stamp = str(file.absolute()), _stamp(file.stat())
    set_external(tensor, location=location, offset=offset, length=length, **{_STAMP: stamp})


def set_external(tensor: TensorProto, **entries: str | int) -> None:
    """Write ONNX's external reference: `location` and, where they matter, `offset`, `length`…"""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))


def is_lazy(tensor: TensorProto) -> bool:
    """Return whether `make_lazy` made it so: what models themselves refer to is relative to them."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return False
    return any(entry.key == "location" and Path(entry.value).is_absolute() for entry in tensor.external_data)


def read_in(tensor: TensorProto) -> None:
    """Give a lazy weight its content."""
    content = b"".join(map(bytes, chunks(tensor)))
    tensor.ClearField("data_location")
    del tensor.external_data[:]
    tensor.raw_data = content


def chunks(tensor: TensorProto) -> Iterator[memoryview]:
    """The content of a lazy weight, in order; each chunk is gone when the next one is asked for.

    Raises:
        InvalidModel: the file isn't what it was when the model was read.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path, remaining = Path(entries["location"]), int(entries["length"])
    buffer = memoryview(bytearray(min(_CHUNK, remaining)))
    try:
        with opened_regular(path) as file:
            file.seek(int(entries["offset"]))
            while remaining:
                stamp = _stamp(os.fstat(file.fileno()))
                if stamp != entries[_STAMP] or not (size := file.readinto(buffer[:remaining])):
                    raise OSError("another file")
                yield buffer[:size]
                remaining -= size
    except OSError as error:
        text = f"{path} was changed or moved while the model in it was being used"
        raise InvalidModel(f"{text}: start again when it is complete") from error


def _stamp(state: os.stat_result) -> str:
    return f"{state.st_size}:{state.st_mtime_ns}"
