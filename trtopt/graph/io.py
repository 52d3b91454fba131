"""ONNX files in and out: everything read is validated, everything written is whole."""

from __future__ import annotations

import functools
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from trtopt.errors import InvalidModel, UsageError
from trtopt.files import existing_file, writing, writing_together
from trtopt.graph.proto import (
    LARGE,
    all_tensors,
    fingerprint,
    in_memory,
    model_size,
    opset_version,
    skeleton,
    tensor_info,
    tensor_pieces,
    tensor_size,
)
from trtopt.graph.stored import Spans, attach, parse_light, point, refer
from trtopt.graph.validity import check_versions, validate
from trtopt.spec import TensorInfo

PROTOBUF_LIMIT = 2**31 - 1  # bytes in one protobuf message
INLINE_LIMIT = PROTOBUF_LIMIT - (16 << 20)  # above this, weights go to a file beside; the rest is room for the graph
_ALIGNMENT = 4096  # bytes: lets readers map the external data
_MAPPED = 1 << 20  # bytes: files of this size or more are mapped


@dataclass(frozen=True, eq=False)
class Model:
    """A valid ONNX model in memory, external data included (of a lazy one large weights aren't, see `load_model`).

    Attributes:
        proto: the model, nodes in topological order; may exceed what one protobuf message can hold: write it with
            `save_model`. Treat it as read-only.
        path: the file it came from, if any.
        fingerprint: hexadecimal SHA-256 of the content, weights included; the same wherever the weights are stored and
            whatever the files are called.
        inputs: network inputs without initializers; shape entries are sizes, dimension names, or -1.
        outputs: network outputs, likewise; () also where the rank isn't known.
        opset: version of the default operator set.
    """

    proto: ModelProto = field(repr=False)
    path: Path | None
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    opset: int

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.proto)  # only where it is asked for: 0.06 s for 100 MB


def load_model(source: str | os.PathLike[str] | ModelProto, *, lazy: bool = False) -> Model:
    """Read and validate a model.

    Args:
        lazy: leave weights over `LARGE` bytes in their files. For code that reads them by `tensor_pieces` or `in_memory`
            alone, as this room's and calibration's do; no library knows what to make of such a model.

    Raises:
        UsageError: the file doesn't exist, is a folder, or can't be read.
        InvalidModel: it isn't a valid ONNX model; the message names the node, tensor or value.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, ModelProto):
        path, proto, what, spans = None, ModelProto(), "the model", Spans()
        proto.CopyFrom(source)
    else:
        path = existing_file(source, "the model")
        what = str(path)
        proto, spans = _parse(path, lazy)
    check_versions(proto, what)
    _load_external_data(proto, path.parent if path else None, what, lazy)
    if path and spans:
        with path.open("rb") as file:
            for index, (offset, length) in spans.items():
                refer(proto.graph.initializer[index], file, offset, length)
    inferred = validate(proto, what)
    initializers = {tensor.name for tensor in proto.graph.initializer}
    types = {value.name: value for value in inferred.graph.output}
    return Model(
        proto,
        path,
        tuple(tensor_info(value) for value in proto.graph.input if value.name not in initializers),
        tuple(tensor_info(types.get(value.name, value)) for value in proto.graph.output),
        opset_version(proto),
    )


def save_model(proto: ModelProto, path: str | os.PathLike[str], *, inline_limit: int = INLINE_LIMIT) -> None:
    """Write a model, whole or not at all; past `inline_limit` bytes its weights go to `NAME.data` beside it.

    Raises:
        OutputError: a file can't be written.
    """
    target = Path(path)
    if model_size(proto) <= inline_limit:
        with writing(target) as partial:
            partial.write_bytes(in_memory(proto).SerializeToString(deterministic=True))
        return
    weights = target.with_name(target.name + ".data")
    stubs = skeleton(proto, 1024, external=weights.name)
    content = {tensor.name: tensor for tensor in proto.graph.initializer}
    with writing_together(weights, target) as (partial_weights, partial):
        with partial_weights.open("wb") as file:
            for stub in stubs.graph.initializer:
                if stub.data_location == TensorProto.EXTERNAL:
                    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                    start = file.tell()
                    for piece in tensor_pieces(content[stub.name]):
                        file.write(piece)
                    point(stub, location=weights.name, offset=start, length=file.tell() - start)
        partial.write_bytes(stubs.SerializeToString(deterministic=True))


def _parse(path: Path, lazy: bool) -> tuple[ModelProto, Spans]:
    """What is in a file, and where in it the weights lie that were left there."""
    try:
        size = path.stat().st_size
        if size > PROTOBUF_LIMIT:
            raise InvalidModel(
                f"{path} is {size} bytes; an ONNX file can hold at most {PROTOBUF_LIMIT}: save it with external data "
                "(onnx.save(model, path, save_as_external_data=True))"
            )
        with path.open("rb") as file:
            start = file.read(_MAPPED)
            if len(start) == _MAPPED and path.is_file():  # in place: read first, the weights would lie in memory twice
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                    return (_parsed_light(view) if lazy else None) or (_parsed(view, start, path, size), {})
            return _parsed(start + file.read(), start, path, size), {}
    except OSError as error:
        raise UsageError(f"can't read the model {path}: {error.strerror}") from error


def _parsed_light(content: memoryview) -> tuple[ModelProto, Spans] | None:
    """None: it has to be parsed whole, if only to say what is wrong with it."""
    try:
        found = parse_light(content, LARGE)
    except DecodeError:
        return None
    if found is not None:
        proto, spans = found
        for index, (_, length) in spans.items():
            if length != tensor_size(proto.graph.initializer[index]):
                return None
    return found


def _parsed(content: bytes | memoryview, start: bytes, path: Path, size: int) -> ModelProto:
    if not start:
        raise InvalidModel(f"{path} is empty (0 bytes); an ONNX model is needed: export or copy it again")
    proto = ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise InvalidModel(
            f"{path} ({size} bytes) isn't an ONNX model, or is truncated{_looks_like(start)}; "
            "compare its size with the original and copy or export it again"
        ) from error
    if not proto.HasField("graph") or (not proto.graph.node and not proto.graph.output):
        raise InvalidModel(
            f"{path} ({size} bytes) holds no graph, so it isn't an ONNX model{_looks_like(start)}; "
            "export or copy it again"
        )
    return proto


def _looks_like(content: bytes) -> str:
    for start, what in (
        (b"PK\x03\x04", "a PyTorch checkpoint or another zip archive: trtopt export makes ONNX from a PyTorch model"),
        (b"\x80", "a pickle, perhaps an old PyTorch checkpoint: trtopt export makes ONNX from a PyTorch model"),
        (b"version https://git-lfs", "a Git LFS pointer: git lfs pull fetches the model"),
        (b"ftrt", "a TensorRT plan: trtopt inspect reads it"),
        (b"<", "a web page: the download went wrong"),
    ):
        if content.startswith(start):
            return f" (it looks like {what})"
    return ""


def _load_external_data(proto: ModelProto, folder: Path | None, what: str, lazy: bool) -> None:
    weights = len(proto.graph.initializer)
    for index, tensor in enumerate(all_tensors(proto.graph)):  # initializers first
        if tensor.data_location == TensorProto.EXTERNAL:
            if folder is None:
                raise InvalidModel(
                    f"the weight {tensor.name!r} is stored outside the model, which was given without its path: "
                    "give the file's path instead, or onnx.load it with its external data"
                )
            file, offset, length = _external_place(tensor, folder, what)
            with file.open("rb") as stream:
                refer(tensor, stream, offset, length)
            if lazy and index < weights and length > LARGE:
                continue
            attach(tensor)
        tensor.ClearField("data_location")  # so that the fingerprint doesn't depend on where weights were stored


def external_files(proto: ModelProto, path: Path) -> list[Path]:
    """The files beside the model at `path` that hold weights of it.

    Raises:
        InvalidModel: a reference that `load_model` would refuse.
    """
    stored = [tensor for tensor in all_tensors(proto.graph) if tensor.data_location == TensorProto.EXTERNAL]
    return sorted({_external_place(tensor, path.parent, str(path))[0] for tensor in stored})


def _external_place(tensor: TensorProto, folder: Path, what: str) -> tuple[Path, int, int]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or tensor_size(tensor))
    except ValueError:
        offset = length = -1
    if not location or Path(location).is_absolute() or ".." in Path(location).parts or offset < 0 or length < 0:
        raise InvalidModel(
            f"{what}: the weight {tensor.name!r} has a bad external data reference {entries}; a file name "
            "beside the model, an offset and a length are needed: export it again"
        )
    file = folder / location
    if not file.is_file():
        raise InvalidModel(
            f"{what}: its external data file {location} is missing (it holds the weight {tensor.name!r}): "
            f"copy it beside the model, to {file}"
        )
    if length != tensor_size(tensor):
        raise InvalidModel(
            f"{what}: the weight {tensor.name!r} of shape {list(tensor.dims)} needs {tensor_size(tensor)} bytes, its "
            f"external data in {location} is {length}: export it again"
        )
    size = file.stat().st_size
    if size < offset + length:
        raise InvalidModel(
            f"{what}: its external data file {location} has {size} bytes; the weight {tensor.name!r} needs bytes "
            f"{offset} to {offset + length}: the file is truncated, copy it again"
        )
    return file, offset, length
