"""A module's inputs as they are asked for: names, shapes and types, in the order of forward's arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo
from trtopt.frontend.modules import Source
from trtopt.recipes.loader import check_shape

InputSpec = Mapping[str, TensorInfo | Sequence[int | str]] | Sequence[TensorInfo | str]
SCALAR = "scalar"  # in place of a shape
# What PyTorch's users call types; NumPy's "float" is double.
_TORCH = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "long": "int64"}


class Arguments:
    """forward's arguments as its signature has them: `ordered` by position, all `names`, those `required`; `free`: it takes any
    number by position (*args), so that names say nothing."""

    def __init__(self, module: Any) -> None:
        try:
            parameters = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):  # built-in
            parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        single = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        self.ordered = [item.name for item in single if item.kind != item.KEYWORD_ONLY]
        self.names = [item.name for item in single]
        self.required = [item.name for item in single if item.default is item.empty]
        self.free = any(item.kind == item.VAR_POSITIONAL for item in parameters)

    def __str__(self) -> str:
        arguments = [name if name in self.required else f"{name} (optional)" for name in self.names]
        return ", ".join([*arguments, *(["*args"] if self.free else [])]) or "nothing"

    def order(self, infos: Sequence[TensorInfo], text: str) -> tuple[list[TensorInfo], tuple[str, ...]]:
        """The inputs in the order in which they are handed over, and the arguments of the last ones, which go by name. Names
        that are forward's own count as such, in any order; if none is, they are taken in order, as new names."""
        names = [info.name for info in infos]
        wrong = [name for name in names if name not in self.names]
        problem = ""
        if twice := [name for name in names if names.count(name) > 1]:
            problem = f"the input {twice[0]!r} is given twice"
        elif wrong and len(wrong) < len(names) and not self.free:
            problem = f"forward has no argument {wrong[0]!r}"
        elif wrong and len(names) > len(self.ordered) and not self.free:
            problem = f"{len(names)} inputs are given ({', '.join(names)})"
        if problem:
            raise UsageError(f"{text}: {problem}; forward takes: {self}")
        if wrong:
            feeds, keywords = set(self.ordered[: len(names)]), tuple[str, ...]()
        else:
            infos = sorted(infos, key=lambda info: self.names.index(info.name))
            feeds, first = set(names), 0
            while first < min(len(infos), len(self.ordered)) and infos[first].name == self.ordered[first]:
                first += 1
            keywords = tuple(info.name for info in infos[first:])
        absent = [name for name in self.required if name not in feeds]
        if absent:
            typed = " ".join(f"`inputs='{name}:{example(name)}'`" for name in absent)
            raise UsageError(
                f"{text}: forward needs {', '.join(absent)}, too; it takes: {self}. Add its shape, such as {typed}"
            )
        return list(infos), keywords


def example(name: str) -> str:
    """A shape to begin with, by what the argument's name says."""
    if re.search(r"ids|mask|token", name):
        return "batchxsequence:int64"
    return "batchx3x224x224" if re.search(r"^(x|input|im(a?ge?)?s?|pixels|photo|frame|image)", name) else "batchx8"


def parse_input(text: str) -> TensorInfo:
    """Read `NAME:SHAPE[:DTYPE]` such as "input:batchx3x224x224" or "ids:batch,max:int64" (commas for names with an x); of a
    single number, which has no dimensions, "rate:scalar"."""
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
