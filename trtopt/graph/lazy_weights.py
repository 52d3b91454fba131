"""Weights that stay in their file until somebody reads them.

A lazy weight is an initializer without content, with ONNX's own external reference: the absolute path of the file that
holds it (the model's own, too, inside its message), an offset and a length. Copying weights takes most of the time of reading
and folding a model, where memory is new to the process; see `trtopt.graph.io.load_model`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto

from trtopt.core.errors import InvalidModel
from trtopt.core.files import opened_regular

_WEIGHTS = (7, 5, 9)  # field numbers in onnx.proto: the graph, its initializers, their raw data
_STAMP = "checksum"  # the entry of a reference that holds the file's size and time of change when it was made
_NUMBER = 10  # bytes of the longest number in a message
_CHUNK = 1 << 20  # bytes: read and hand on, from memory that is in use already


def parse_light(file: BinaryIO, size: int, limit: int) -> tuple[ModelProto, list[tuple[int, int]]]:
    """A model whose initializers have no content where theirs is over `limit` bytes.

    Args:
        file: is read, not mapped: of a mapping whose file is cut meanwhile, reading ends the process.
        size: of the file.

    Returns:
        the model, and offset and length of each content that was left out, in order.

    Raises:
        IndexError, ValueError, google.protobuf.message.DecodeError: it isn't a model, or written in an unusual way.
    """
    places: list[tuple[int, int]] = []
    return ModelProto.FromString(_cut(file, 0, size, _WEIGHTS, limit, places)), places


def _cut(file: BinaryIO, place: int, end: int, path: Sequence[int], limit: int, places: list[tuple[int, int]]) -> bytes:
    """A protobuf message, with what lies at `path` and is over `limit` bytes left empty."""
    parts: list[bytes] = []
    while place < end:
        file.seek(place)
        head, length = file.read(2 * _NUMBER), 0
        key, inside = _number(head, 0)
        kind = key & 7
        if kind == 0:
            _, inside = _number(head, inside)
        elif kind == 2:
            length, inside = _number(head, inside)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place + inside + length > end:
            raise ValueError("cut off")
        if key != path[0] << 3 | 2 or length <= limit:
            file.seek(place)
            parts.append(file.read(inside + length))
        elif path[1:]:
            content = _cut(file, place + inside, place + inside + length, path[1:], limit, places)
            parts += [_varint(key), _varint(len(content)), content]
        else:
            parts.append(_varint(key) + _varint(0))
            places.append((place + inside, length))
        place += inside + length
    return b"".join(parts)


def _number(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


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
    with _changing(path), opened_regular(path) as file:
        file.seek(int(entries["offset"]))
        while remaining:
            if _stamp(os.fstat(file.fileno())) != entries[_STAMP] or not (size := file.readinto(buffer[:remaining])):
                raise OSError("another file")
            yield buffer[:size]
            remaining -= size


@contextlib.contextmanager
def _changing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{path} was changed or moved while the model in it was being used"
        raise InvalidModel(f"{text}: start again when it is complete") from error


def _stamp(state: os.stat_result) -> str:
    return f"{state.st_size}:{state.st_mtime_ns}"
