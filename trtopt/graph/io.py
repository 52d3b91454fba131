"""ONNX files in and out: everything read is validated, everything written is whole."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, defs, helper

from trtopt.core.errors import InvalidModel, UsageError
from trtopt.core.files import existing_file, whole, writing_together
from trtopt.core.values import TensorInfo
from trtopt.graph.inputs import declare_outputs, network_inputs, network_outputs
from trtopt.graph.lazy_weights import make_lazy, read_in, set_external
from trtopt.graph.proto import (
    LARGE,
    PLUGIN_DOMAIN,
    STANDARD,
    all_nodes,
    all_tensors,
    fingerprint,
    in_memory,
    model_size,
    opset_version,
    refill,
    skeleton,
    tensor_chunks,
    tensor_size,
)
from trtopt.graph.validity import check_text, validate
from trtopt.graph.view import inline_functions, read_ir, to_proto

PROTOBUF_LIMIT = 2**31 - 1  # bytes in one protobuf message
INLINE_LIMIT = PROTOBUF_LIMIT - (16 << 20)  # above this, weights go to a file beside; the rest is room for the graph
ALLOW_EXTERNAL = "TRTOPT_ALLOW_EXTERNAL"  # a variable, since every command and process that reads a model heeds it
_ALIGNMENT = 4096  # bytes: lets readers map the external data


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
        opset: version of the default operator set, 7 or newer.
        mended: plugins have a domain of their own here, or functions import one that they use.
    """

    proto: ModelProto = field(repr=False)
    path: Path | None
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    opset: int
    mended: bool = False

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.proto)  # only where it is asked for: it hashes all weights


def load_model(source: str | os.PathLike[str] | ModelProto, *, lazy: bool = False) -> Model:
    """Read and validate a model.

    Args:
        lazy: leave external weights over `LARGE` bytes in their files. For code that reads them by `tensor_chunks` or
            `in_memory` alone, as this room's and calibration's do; no library knows what to make of such a model.

    Raises:
        UsageError: the file doesn't exist, is a folder, or can't be read.
        InvalidModel: it isn't a valid ONNX model; the message names the node, tensor or value.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, ModelProto):
        path, proto, what = None, ModelProto(), "the model"
        proto.CopyFrom(source)
    else:
        module = os.fspath(source)  # in PyTorch, perhaps, where an ONNX file is needed
        named = ":" in module and "/" not in module.rpartition(":")[2]
        advice = f"an ONNX file is needed, which trtopt export {module} -o model.onnx writes" if named else ""
        path = existing_file(source, "the model", advice)
        what, proto = str(path), _parse(path)
    check_text(proto, what)
    _load_external_data(proto, path, what, lazy)
    weights, inputs = ({item.name for item in field} for field in (proto.graph.initializer, proto.graph.input))
    if proto.ir_version == 3 and weights - inputs:
        proto.ir_version = 4  # the first in which weights needn't be inputs; tools that took them out left the number
    mended = _name_plugins(proto)
    try:
        inferred = validate(proto, what)
    except InvalidModel:
        # ONNX infers nothing across a custom operator within a function; the nodes themselves may be all right.
        if not (proto.functions and _inline_functions(proto)):
            raise
        inferred = validate(proto, what)
    if proto.functions:
        _inline_functions(proto)
    infos = network_inputs(proto)
    outputs = network_outputs(proto, infos, inferred.graph.output)
    declare_outputs(proto, outputs)
    return Model(proto, path, tuple(infos.values()), outputs, opset_version(proto), mended)


def save_model(proto: ModelProto, path: str | os.PathLike[str], *, inline_limit: int = INLINE_LIMIT) -> None:
    """Write a model, whole or not at all; past `inline_limit` bytes its weights go to `NAME.data` beside it.

    Raises:
        OutputError: a file can't be written.
    """
    target = Path(path)
    if model_size(proto) <= inline_limit:
        with writing_together(target) as (partial,):
            partial.write_bytes(in_memory(proto).SerializeToString(deterministic=True))
        return
    weights = target.with_name(target.name + ".data")
    stubs = skeleton(proto, 1024, external=weights.name)
    with writing_together(weights, target) as (partial_weights, partial):
        with partial_weights.open("wb") as file:
            end = 0
            for stub, tensor in zip(stubs.graph.initializer, proto.graph.initializer):
                if stub.data_location == TensorProto.EXTERNAL:
                    start = end + -end % _ALIGNMENT
                    file.seek(start)
                    file.writelines(tensor_chunks(tensor))
                    end = start + tensor_size(tensor)
                    set_external(stub, location=weights.name, offset=start, length=end - start)
        partial.write_bytes(stubs.SerializeToString(deterministic=True))


def _parse(path: Path) -> ModelProto:
    try:
        size = path.stat().st_size
        if size > PROTOBUF_LIMIT:
            raise InvalidModel(
                f"{path} is {size} bytes; an ONNX file can hold at most {PROTOBUF_LIMIT}: save it with external data "
                "(onnx.save(model, path, save_as_external_data=True))"
            )
        content = whole(path, PROTOBUF_LIMIT)
    except OSError as error:
        raise UsageError(f"can't read the model {path}: {error.strerror}") from error
    if not content:
        raise InvalidModel(f"{path} is empty (0 bytes); an ONNX model is needed: export or copy it again")
    proto = ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        other = _looks_like(content, path)
        again = ", or is truncated; compare its size with the original and copy or export it again"
        raise InvalidModel(f"{path} ({size} bytes) isn't an ONNX model{other or again}") from error
    if not proto.HasField("graph") or (not proto.graph.node and not proto.graph.output):
        raise InvalidModel(
            f"{path} ({size} bytes) holds no graph, so it isn't an ONNX model{_looks_like(content, path)}; "
            "export or copy it again"
        )
    return proto


_EXPORT = "trtopt export makes ONNX from a PyTorch model"
_KERAS = "Keras' model.export('model.onnx', format='onnx') makes ONNX from the model"
_ENGINE = "a TensorRT engine: give the ONNX model that it was built from"
_STARTS = (  # what begins so, at that place
    (0, b"PK\x03\x04", f"a PyTorch checkpoint or another zip archive: {_EXPORT}"),
    (0, b"\x80", f"a pickle, perhaps an old PyTorch checkpoint: {_EXPORT}"),
    (0, b"version https://git-lfs", "a Git LFS pointer: git lfs pull fetches the model"),
    (0, b"ftrt", _ENGINE),
    (0, b"vtrt", _ENGINE),
    (0, b"\x1f\x8b", "a gzip archive: gunzip it"),
    (0, b"\x89HDF", f"HDF5, as Keras writes it: {_KERAS}"),
    (4, b"TFL3", "a TensorFlow Lite model: tf2onnx makes ONNX from it"),
    (4, b"ORTM", "ONNX Runtime's own format: give the ONNX file that it was made from"),
    (0, b"<", "a web page: the download went wrong"),
)


def _looks_like(content: bytes, path: Path) -> str:
    told = next((what for place, start, what in _STARTS if content.startswith(start, place)), "")
    if told == _ENGINE and (manifest := Path(f"{path}.json")).is_file():
        told += f", which {manifest} names under source"
    form = onnx.serialization.registry.get_format_from_file_extension(path.suffix)
    if path.suffix == ".py":
        told = f"Python: trtopt export {path.name}:CLASS makes ONNX from a PyTorch module"
    elif form not in (None, "protobuf") and any(word in content[:4096] for word in (b"ir_version", b"irVersion")):
        binary = f"onnx.save(onnx.load({path.name!r}), {path.with_suffix('.onnx').name!r})"
        told = f"a text form of ONNX: {binary} writes the binary one"
    elif path.suffix == ".npz":
        told = f"NumPy's arrays: they are given as `data={str(path)!r}`"
    elif content.startswith(b"{") and b'"trtopt.calib/' in content:
        told = f"a calibration table: give the model that it was made for, and the table as `calib={str(path)!r}`"
    elif content.startswith(b"{") and b'"trtopt.engine/' in content:
        told = "an engine's manifest: give the ONNX model that it names under source"
    return told and f" (it looks like {told})"


def _name_plugins(proto: ModelProto) -> bool:
    """Put operators in ONNX's name that it hasn't into a domain of their own, and say whether there was one.

    onnx-graphsurgeon writes plugins so, and onnx's checker refuses them; in another domain they are told as plugins.
    """
    own = {function.name for function in proto.functions if function.domain in STANDARD}
    found = False
    for node in (node for body in (proto.graph, *proto.functions) for node in all_nodes(body)):
        if node.domain in STANDARD and node.op_type and node.op_type not in own and not defs.has(node.op_type):
            node.domain, found = PLUGIN_DOMAIN, True
    if found and all(entry.domain != PLUGIN_DOMAIN for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(PLUGIN_DOMAIN, 1))
    for function in proto.functions:  # many a writer leaves custom domains to the model's imports
        lacking = {node.domain for node in all_nodes(function)} - {entry.domain for entry in function.opset_import}
        missing = [entry for entry in proto.opset_import if entry.domain in lacking]
        function.opset_import.extend(missing)
        found |= bool(missing)
    return found


def _inline_functions(proto: ModelProto) -> bool:
    """Write out what can be, since Q/DQ and custom operators are looked for in graphs alone; tell whether anything was."""
    try:
        inline_functions(model := read_ir(skeleton(proto, LARGE, external="weights")))
        made = to_proto(model)
        validate(made, "the model")
    except Exception:  # the library raises whatever it fails on; folding says it
        return False
    refill(proto.graph.node, made.graph.node)
    refill(proto.functions, made.functions)
    refill(proto.opset_import, made.opset_import)
    return True


def _load_external_data(proto: ModelProto, path: Path | None, what: str, lazy: bool) -> None:
    weights = len(proto.graph.initializer)
    for index, tensor in enumerate(all_tensors(proto.graph)):  # initializers first
        if tensor.data_location == TensorProto.EXTERNAL:
            if path is None:
                raise InvalidModel(
                    f"the weight {tensor.name!r} is stored outside the model, which was given without its path: "
                    "give the file's path instead, or onnx.load it with its external data"
                )
            file, offset, length = _external_place(tensor, path, what)
            make_lazy(tensor, file, offset, length)
            if lazy and index < weights and length > LARGE:
                continue
            read_in(tensor)
        tensor.ClearField("data_location")  # so that the fingerprint doesn't depend on where weights were stored


def external_files(path: Path) -> dict[str, Path]:
    """The files that hold weights of an ONNX file, by what it calls them: their places relative to its folder.

    Raises:
        InvalidModel: a reference that `load_model` would refuse.
    """
    tensors = all_tensors(onnx.load(path, load_external_data=False).graph)
    references = [tensor.external_data for tensor in tensors if tensor.data_location == TensorProto.EXTERNAL]
    places = {entry.value for entries in references for entry in entries if entry.key == "location"}
    return {place: external_file(path, place) for place in sorted(places)}


def _external_place(tensor: TensorProto, model: Path, what: str) -> tuple[Path, int, int]:
    entries, needed = {entry.key: entry.value for entry in tensor.external_data}, tensor_size(tensor)
    named, location = f"{what}: the weight {tensor.name!r}", entries.get("location", "")
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or needed)
        file = external_file(model, location)
        size = file.stat().st_size
    except ValueError:
        offset = length = -1
    except InvalidModel as error:
        raise InvalidModel(f"{named}: {error}") from error
    if offset < 0 or length < 0:
        reference = {key: value[:80] for key, value in entries.items()}
        text = f"{named} has a bad external data reference {reference}; a file name beside the model, an offset and a length"
        raise InvalidModel(f"{text} are needed: export it again")
    if length != needed:
        text = f"of shape {list(tensor.dims)} needs {needed} bytes, its external data in {location} is {length}"
        raise InvalidModel(f"{named} {text}: export it again")
    if size < offset + length:
        text = f"its external data file {location} has {size} bytes; the weight {tensor.name!r} needs bytes {offset} to"
        raise InvalidModel(f"{what}: {text} {offset + length}: the file is truncated, copy it again")
    return file, offset, length


def external_file(model: Path, location: str) -> Path:
    """The file that a model's external data is in, links followed.

    It lies in the model's folder or, where the model itself is a link, in that of the link's target (Hugging Face's cache links
    every file into one folder), or in a folder that $TRTOPT_ALLOW_EXTERNAL names: a model mustn't choose what else is read.

    Args:
        location: as the model has it, relative to its folder.

    Raises:
        InvalidModel: it lies elsewhere, doesn't exist or is no file.
    """
    reference = location if len(location) <= 200 else f"{location[:200]}…"
    if not location or "\0" in location or Path(location).is_absolute() or ".." in Path(location).parts:
        text = f"bad external data reference {reference!r}; a file name beside the model is needed"
        raise InvalidModel(f"{text}: export it again")
    try:
        file = (model.parent / location).resolve()
        there = file.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, links in a circle
        raise InvalidModel(f"its external data {reference} can't be read: {error}") from error
    allowed = filter(None, os.environ.get(ALLOW_EXTERNAL, "").split(os.pathsep))
    folders = (model.parent, model.resolve().parent, *map(Path, allowed))
    if not any(file.is_relative_to(folder.resolve()) for folder in folders):
        raise InvalidModel(
            f"its external data {reference} is a link to {file}, outside the model's folder: copy it there, or, if you trust "
            f"the model, allow that folder: {ALLOW_EXTERNAL}={file.parent}"
        )
    if not there:
        state = "is no file" if file.exists() else "is missing"
        raise InvalidModel(f"its external data file {reference} {state}: copy it beside the model, to {file}")
    return file
