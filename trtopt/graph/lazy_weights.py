"""Weights that stay in their file until somebody reads them: of ResNet-50's 102 MB, 0.7 MB are parsed.

A lazy weight is an initializer without content, with ONNX's own external reference: the absolute path of the file that
holds it (the model's own, too, inside its message), an offset and a length. Copying weights takes most of the time of reading
and folding a model, where memory is new to the process; see `trtopt.graph.io.load_model`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto

from trtopt.core.errors import InvalidModel

Spans = dict[int, tuple[int, int]]
"""Index of an initializer → offset and length of its content in the model's file."""

_GRAPH, _INITIALIZER, _RAW_DATA, _DATA_LOCATION = 7, 5, 9, 14  # field numbers in onnx.proto
_STAMP = "checksum"  # the entry of a reference that holds the file's size and time of change when it was made
_NUMBER = 10  # bytes of the longest number in a message
_CHUNK = 1 << 20  # bytes: read and hand on, from memory that is in use already


class Content:
    """A file's bytes, read where they are asked for. Not mapped: of a mapping whose file is cut, reading ends the process."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: slice) -> bytes:
        self._file.seek(place.start)
        return self._file.read(place.stop - place.start)


def parse_light(content: Content, limit: int) -> tuple[ModelProto, Spans] | None:
    """A model without the content of its initializers over `limit` bytes, and where that lies in `content`.

    None: it isn't written the usual way (or not a model at all), so that it has to be parsed whole.

    Raises:
        google.protobuf.message.DecodeError: it isn't a model.
    """
    try:
        fields = list(_fields(content, 0, len(content)))
        graphs = [field for field in fields if field[0] == _GRAPH]
        if len(graphs) != 1:
            return None
        kept, spans = _without_weights(content, *graphs[0][2:], limit)
    except (IndexError, ValueError):
        return None
    light = ModelProto()
    light.ParseFromString(b"".join(content[start:end] for number, start, _, end in fields if number != _GRAPH))
    light.graph.ParseFromString(kept)
    return light, spans


def _without_weights(content: Content, start: int, end: int, limit: int) -> tuple[bytes, Spans]:
    """A graph's message with large weights cut out of it."""
    parts: list[bytes] = []
    spans: Spans = {}
    initializers = 0
    for number, field, inside, after in _fields(content, start, end):
        if number == _INITIALIZER:
            if after - inside > limit:
                tensor = list(_fields(content, inside, after))
                raw = [item for item in tensor if item[0] == _RAW_DATA]
                if (
                    len(raw) == 1
                    and raw[0][3] - raw[0][2] > limit
                    and all(item[0] != _DATA_LOCATION for item in tensor)
                ):
                    rest = b"".join(content[item[1] : item[3]] for item in tensor if item[0] != _RAW_DATA)
                    parts += [_varint(_INITIALIZER << 3 | 2), _varint(len(rest)), rest]
                    spans[initializers] = raw[0][2], raw[0][3] - raw[0][2]
                    field = after
            initializers += 1
        parts.append(content[field:after])
    return b"".join(parts), spans


def _fields(content: Content, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """A protobuf message's fields: number, where it starts, where its content starts, where it ends."""
    while position < end:
        start, head = position, content[position : position + 2 * _NUMBER]
        key, position = _number(head, 0)
        kind, inside = key & 7, start + position
        if kind == 0:
            _, position = _number(head, position)
            position += start
        elif kind == 2:
            length, position = _number(head, position)
            inside = start + position
            position = inside + length
        elif kind in (1, 5):
            position = inside + (8 if kind == 1 else 4)
        else:
            raise ValueError(f"wire type {kind}")
        if position > end:
            raise ValueError("cut off")
        yield key >> 3, start, inside, position


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
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def make_lazy(tensor: TensorProto, file: BinaryIO, offset: int, length: int) -> None:
    """Let a weight be `length` bytes of an open file."""
    tensor.ClearField("raw_data")
    location = str(Path(file.name).absolute())
    set_external(tensor, location=location, offset=offset, length=length, **{_STAMP: _stamp(file)})


def set_external(tensor: TensorProto, **entries: str | int) -> None:
    """Write ONNX's external reference: `location` and, where they matter, `offset`, `length`…"""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))


def is_lazy(tensor: TensorProto) -> bool:
    """Whether `make_lazy` made it so: what models themselves make_lazy to is relative to them."""
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
    path, left = Path(entries["location"]), int(entries["length"])
    buffer = memoryview(bytearray(min(_CHUNK, left)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(int(entries["offset"]))
            while left:
                if _stamp(file) != entries[_STAMP] or not (size := file.readinto(buffer[:left])):
                    raise _changed(path)
                yield buffer[:size]
                left -= size
    except OSError as error:
        raise _changed(path) from error


def _stamp(file: BinaryIO) -> str:
    found = os.fstat(file.fileno())
    return f"{found.st_size}:{found.st_mtime_ns}"


def _changed(path: Path) -> InvalidModel:
    return InvalidModel(
        f"{path} was changed or moved while the model in it was being used: start again when it is complete"
    )
