"""A module's inputs as they are asked for: names, shapes and types, in the order of forward's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo
from trtopt.frontend.forward import Arguments, example
from trtopt.frontend.modules import Source
from trtopt.recipes.loader import check_shape

InputSpec = Mapping[str, TensorInfo | Sequence[int | str]] | Sequence[TensorInfo | str]
SCALAR = "scalar"  # in place of a shape
# What PyTorch's users call types; NumPy's "float" is double.
_TORCH = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "long": "int64"}


def parse_input(text: str) -> TensorInfo:
    """Read `NAME:SHAPE[:DTYPE]` such as "input:batchx3x224x224" or "ids:batch,max:int64" (commas for names with an x); of a
    single number, which has no dimensions, "rate:scalar".

    Raises:
        UsageError: it can't be read.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise UsageError(
            f"`inputs=` {text!r} can't be read; write NAME:batchx3x224x224, NAME:batch,sequence:int64 or NAME:scalar"
        )
    sizes = parts[1].strip("[]()").replace(" ", "")  # as Python writes a shape
    pieces = [] if sizes == SCALAR else sizes.split("," if "," in sizes else "x")
    if "-1" in pieces:
        named = "x".join("batch" if size == "-1" else size for size in pieces)
        raise UsageError(
            f"`inputs=` {text!r} has -1 for a size: write a name for what stays open, such as {parts[0]}:{named}"
        )
    shape = check_shape([int(size) if size.isdecimal() else size for size in pieces], f"`inputs='{parts[0]}'`")
    return _info(TensorInfo(parts[0], parts[2] if len(parts) == 3 else "float32", shape))


def stated_inputs(source: Source, inputs: InputSpec | None) -> tuple[tuple[TensorInfo, ...], tuple[str, ...]]:
    """The inputs as the file has them, in the order in which forward gets them, and the last ones' arguments, by name."""
    takes = Arguments(source.module)
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Mapping):
        infos = [_stated(name, shape) for name, shape in inputs.items()]
    else:
        infos = [parse_input(item) if isinstance(item, str) else _stated("", item) for item in inputs or source.inputs]
    if not infos:
        typed = " ".join(
            f"`inputs='{name}:{example(name)}'`" for name in takes.required or takes.names[:1] or ["input"]
        )
        raise UsageError(
            f"{source.text}: its inputs' shapes aren't known; forward takes: {takes}. Give them, such as {typed}"
        )
    infos, keywords = takes.order(infos, source.text)
    return tuple(map(_info, infos)), keywords


def _stated(name: str, shape: Any) -> TensorInfo:
    """An input from Python."""
    if isinstance(shape, TensorInfo):
        return shape
    if not name or isinstance(shape, str) or hasattr(shape, "dtype") or not isinstance(shape, Sequence):
        example_ = {"x": ("batch", 16), "rate": ()}
        raise UsageError(
            f"`inputs=` holds {type(shape).__name__}{' for ' * bool(name)}{name}; a mapping of names to shapes is needed, such "
            f"as {example_}; tensors to compare on go to `sample=`"
        )
    return TensorInfo(name, "float32", tuple(shape))


def _info(info: TensorInfo) -> TensorInfo:
    check_shape(info.shape, f"input {info.name}")
    axis = info.batch_axis if info.shape else None
    info = replace(info, dtype=_TORCH.get(info.dtype, info.dtype), batch_axis=axis)
    try:
        known = np.dtype(info.dtype).kind in "biuf"
    except TypeError:  # BF16, too, which neither NumPy has nor torch takes from it
        known = False
    if not known:
        raise UsageError(f"input {info.name}: the dtype is {info.dtype!r}; write such as float32 or int64")
    return info
