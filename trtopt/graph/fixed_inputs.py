"""Inputs that are decided before anything else: a value, which becomes a constant, or sizes and their names.

A constant input may decide control flow and operators that TensorRT has for constants alone; sizes decide what is computed of
them; and the name of a dimension says which axis counts samples (`graph.inputs`).
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto, numpy_helper

from trtopt.core.errors import UsageError
from trtopt.core.options import named
from trtopt.core.values import TensorInfo, x
from trtopt.graph.inputs import forget_batch_axes
from trtopt.graph.proto import Links, all_graphs, node_reads, tensor_info, whole_copy

_SETTING = 16  # numbers that an input which is a setting has at most
_OPEN = "?"


def fix_inputs(proto: ModelProto, settings: Sequence[str]) -> ModelProto:
    """A copy in which inputs have what is set of them.

    Args:
        settings: NAME=VALUE (several numbers with commas between; one fills an input of any size that is fixed), or NAME:SHAPE
            as 1x576 or batch,576, where a name or "?" leaves a size open. Shapes come first, whatever the order.

    Raises:
        UsageError: one can't be read, names no input, or doesn't fit it.
    """
    result = whole_copy(proto)
    weights = {tensor.name for tensor in result.graph.initializer}
    inputs = {value.name: value for value in result.graph.input if value.name not in weights}
    longest_first = sorted(inputs, key=len, reverse=True)
    shapes, values = list[tuple[str, str]](), list[tuple[str, str]]()
    for text in settings:
        name = next((name for name in longest_first if text.startswith((f"{name}=", f"{name}:"))), "")
        rest = text[len(name) + 1 :].strip()
        if not name or not rest:
            raise UsageError(
                f"`set=` {text!r} sets no input; write NAME=VALUE or NAME:1x576, of one of the inputs: "
                + ", ".join(f"{info.name} {info.dims}" for info in map(tensor_info, inputs.values()))
            )
        (values if text[len(name)] == "=" else shapes).append((name, rest))
    forget_batch_axes(result)
    for name, rest in shapes:
        _size(result, inputs[name], rest)
    for name, rest in values:
        constant = _value(tensor_info(inputs[name]), rest)
        result.graph.initializer.append(numpy_helper.from_array(constant, name))
        result.graph.input.remove(inputs[name])
    return result


def with_file(text: str, path: str | os.PathLike[str] | None) -> str:
    """Put a model's file in the place of MODEL in `trtopt check MODEL`; without a file it stays."""
    return text if path is None else text.replace("trtopt check MODEL", f"trtopt check {shlex.quote(os.fspath(path))}")


def how_to_decide(proto: ModelProto, operators: Collection[str] = ("If",)) -> str:
    """Return what to type for an If, or other operators, that inputs decide: their values, or else their sizes.

    Empty where none does, or one that is no setting but data: with sizes that are open, no tensor of numbers, or many of them.
    Nor where no input would be left. Loops and Scans stay: no number of steps takes them out.
    """
    links = Links(proto.graph)
    inputs = {value.name for value in proto.graph.input} - links.constants.keys()
    deciding = dict[tuple[str, bool], None]()
    deciders = [node for node in links.nodes if node.op_type in operators]
    reads = [node.input[:1] if node.op_type == "If" else node.input[1:] for node in deciders]
    pending = [(name, True) for names in reads for name in names]
    seen = set(pending)
    for name, by_value in pending:  # grows on the way
        if name in inputs:
            deciding[name, by_value] = None
        elif (maker := links.makers.get(name)) is not None:
            further = [(operand, by_value and maker.op_type not in ("Shape", "Size")) for operand in node_reads(maker)]
            pending += [item for item in further if item not in seen]
            seen.update(further)
    infos = {value.name: tensor_info(value) for value in proto.graph.input}
    by_values = [infos[name] for name, by_value in deciding if by_value]
    if any(info.open_axes or not info.numeric or math.prod(map(int, info.shape)) > _SETTING for info in by_values):
        return ""
    values = [f"{info.name}={'480,640' if math.prod(info.sizes) == 2 else 'VALUE'}" for info in by_values]
    settings = values or [f"{name}:SIZES" for name, _ in deciding]
    if not settings or len(values) == len(inputs):
        return ""
    what = "the value" if values else "sizes"
    return f"trtopt check MODEL {named('set', settings)} `fix='OUT.onnx'` writes the model with {what} of that input decided"


def _size(proto: ModelProto, value: ValueInfoProto, text: str) -> None:
    info = tensor_info(value)
    sizes = [size.strip() for size in re.split("," if "," in text else "x", text)]
    option = f"`set='{info.name}:{text}'`"
    if any(size != _OPEN and not size.isdecimal() and not size.isidentifier() for size in sizes):
        raise UsageError(f"{option} can't be read; write sizes and names such as 1x576, batchx576 or batch,576")
    if len(sizes) != len(info.shape):
        raise UsageError(f"{option} has {len(sizes)} sizes; the input is {info.dims}")
    renamed: dict[str, str] = {}
    for axis, size in enumerate(sizes):
        dim = value.type.tensor_type.shape.dim[axis]
        if axis not in info.open_axes:
            if size not in (_OPEN, str(info.shape[axis])):
                raise UsageError(
                    f"{option}: size {axis} is {info.shape[axis]} in the model, {info.dims}, and only open sizes can be "
                    "decided: export the model with the other size, or with this one open"
                )
        elif size != _OPEN:
            dim.dim_param = name = dim.dim_param or f"{info.name}.{axis}"
            renamed[name] = size
    for graph in all_graphs(proto.graph):  # equal names are equal sizes
        for other in (*graph.input, *graph.output, *graph.value_info):
            for dim in other.type.tensor_type.shape.dim:
                if size := renamed.get(dim.dim_param, ""):
                    field, decided = ("dim_value", int(size)) if size.isdecimal() else ("dim_param", size)
                    setattr(dim, field, decided)


def _value(info: TensorInfo, text: str) -> NDArray[np.generic]:
    option = f"`set='{info.name}={text}'`"
    if info.open_axes:
        example = ",".join("1" if axis in info.open_axes else str(size) for axis, size in enumerate(info.shape))
        raise UsageError(f"{option}: the input is {info.dims}; set its sizes, too, as by `set='{info.name}:{example}'`")
    shape = tuple(int(size) for size in info.shape)
    try:
        numbers = np.asarray([_number(part.strip()) for part in text.split(",")])
        array = numbers.astype(info.dtype)
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{option} can't be read; numbers with commas between are needed, of {info.dtype}") from None
    if array.dtype.kind in "biu" and not np.array_equal(array, numbers):
        raise UsageError(f"{option}: {info.dtype} can't hold that")
    if len(numbers) not in (1, math.prod(shape)):
        raise UsageError(f"{option} has {len(numbers)} numbers; the input is {x(shape)}, of {math.prod(shape)}")
    return np.full(shape, array[0]) if len(numbers) == 1 else array.reshape(shape)


def _number(text: str) -> float:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
