"""An engine's inputs and outputs: names, types, shapes and profiles, and checks of arrays against them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtopt.core.errors import EngineError, UsageError
from trtopt.core.values import Profile, ShapeRange, x
from trtopt.data.convert import numpy_dtype

Shape = tuple[int, ...]

# TensorRT's name of an I/O type → NumPy's (through ml_dtypes where NumPy has none).
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "FP8": "float8_e4m3fn"}
DTYPES |= {name: name.lower() for name in ("INT8", "UINT8", "INT32", "INT64", "BOOL")}


@dataclass(frozen=True)
class Tensor:
    """An input or output. `on_host`: TensorRT reads or writes it in host memory (a shape tensor)."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    on_host: bool = False
    batch_axis: int | None = 0

    def nbytes(self, shape: Shape) -> int:
        return math.prod(shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Signature:
    """Every input and output, and the shapes that each profile allows (inputs only; empty: anything fits)."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    profiles: tuple[Profile, ...] = ()

    @functools.cached_property
    def results(self) -> Mapping[str, Tensor]:
        """The outputs by their names."""
        return {item.name: item for item in self.outputs}

    @functools.cached_property
    def _names(self) -> Set[str]:
        return {item.name: None for item in self.inputs}.keys()

    @property
    def dynamic(self) -> bool:
        """Return True if there is more than one set of input shapes."""
        return any(-1 in item.shape or item.on_host for item in self.inputs)

    def check_names(self, inputs: Mapping[str, Any]) -> None:
        """Raise UsageError unless exactly the inputs are there."""
        names = self._names
        if type(inputs) is dict and inputs.keys() == names:
            return
        check_mapping("inputs", inputs)
        wrong = [f"unknown {name!r}" for name in inputs if name not in names]
        wrong += [f"missing {item.name!r}" for item in self.inputs if item.name not in inputs]
        if wrong:
            takes = ", ".join(repr(item.name) for item in self.inputs)
            raise UsageError(f"inputs: {', '.join(wrong)}; the engine takes {takes}")

    def profile(self, shapes: Sequence[Shape]) -> int:
        """The number of the profile for these input shapes: of those they fit, the one tuned for the nearest. UsageError where
        they fit none: the message gives the shapes allowed."""
        shapes_by_name = {item.name: shape for item, shape in zip(self.inputs, shapes)}
        if not self.profiles:  # the fixed dimensions are all that is known
            for item, shape in zip(self.inputs, shapes):
                if any(size not in (-1, there) for size, there in zip(item.shape, shape)):
                    raise UsageError(f"input {item.name!r} has shape {x(shape)}; {x(item.shape)} is needed")
            return 0
        numbered = enumerate(self.profiles)
        candidates = [at for at, item in numbered if all(item[name].holds(to) for name, to in shapes_by_name.items())]
        if not candidates:
            ranges = " or ".join(
                "; ".join(f"{name} {x(item.min)} to {x(item.max)}" for name, item in profile.items())
                for profile in self.profiles
            )
            shapes_text = "; ".join(f"{name} {x(shape)}" for name, shape in shapes_by_name.items())
            raise UsageError(
                f"inputs {shapes_text} are outside the engine's shapes: {ranges}; give others, or build it with other `shapes=`"
            )
        return min(candidates, key=lambda at: _distance(self.profiles[at], shapes_by_name))


def _distance(profile: Profile, shapes: Mapping[str, Shape]) -> int:
    return sum(abs(a - b) for name, shape in shapes.items() for a, b in zip(shape, profile[name].opt))


def check_mapping(what: str, mapping: Any) -> None:
    """Raise UsageError unless `mapping` maps names to arrays."""
    if not isinstance(mapping, Mapping):
        raise UsageError(f"{what} is {type(mapping).__name__}; names with arrays are needed: {{'name': array, …}}")


def check_array(tensor: Tensor, array: Any, role: str = "input") -> None:
    """Raise UsageError unless `array` (anything with dtype and shape) has the tensor's type and rank."""
    if array.dtype != tensor.dtype:
        takes, then = ("takes", "convert it") if role == "input" else ("gives", "give an array of that type")
        if role == "input" and tensor.dtype == np.uint8 and array.dtype in (np.float16, np.float32, np.float64):
            then = "give pixels from 0 to 255, not what is made of them"
        raise UsageError(f"{role} {tensor.name!r} is {array.dtype}; the engine {takes} {tensor.dtype}: {then}")
    if len(array.shape) != len(tensor.shape):
        raise UsageError(
            f"{role} {tensor.name!r} has shape {x(array.shape)}, rank {len(array.shape)}; "
            f"the engine {'takes' if role == 'input' else 'gives'} rank {len(tensor.shape)}, {x(tensor.shape)}"
            f"{': one sample is array[None] of it' if len(array.shape) + 1 == len(tensor.shape) else ''}"
        )


def signature(engine: Any) -> Signature:
    """Read off an ICudaEngine; EngineError where an input or output has a type that arrays can't hold."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs, outputs = list[Tensor](), list[Tensor]()
    for name in names:
        (inputs if engine.get_tensor_mode(name).name == "INPUT" else outputs).append(_describe(engine, name))
    profiles = tuple(
        {
            item.name: ShapeRange(
                *(tuple(map(int, shape)) for shape in engine.get_tensor_profile_shape(item.name, index))
            )
            for item in inputs
        }
        for index in range(engine.num_optimization_profiles)
    )
    return Signature(tuple(inputs), tuple(outputs), profiles)


def _describe(engine: Any, name: str) -> Tensor:
    kind = engine.get_tensor_dtype(name).name
    if kind not in DTYPES:
        raise EngineError(f"tensor {name!r} has type {kind}; allowed for inputs and outputs: {', '.join(DTYPES)}")
    layout = _layout(engine, name)
    if layout != "LINEAR":
        raise EngineError(
            f"tensor {name!r} is laid out as {layout}; arrays are LINEAR: build the engine with linear inputs and outputs"
        )
    shape = tuple(int(size) for size in engine.get_tensor_shape(name))
    return Tensor(name, numpy_dtype(DTYPES[kind]), shape, _on_host(engine, name))


# The lean runtime's bindings lack the types of some answers, which then raise TypeError: 8.6.0's and 10.16.1's `TensorFormat`,
# 8.6.0's `TensorLocation`.


def _layout(engine: Any, name: str) -> str:
    try:
        return str(engine.get_tensor_format(name).name)
    except TypeError:
        description = str(engine.get_tensor_format_desc(name))  # such as "Row-major linear FP32 format"
        return "LINEAR" if "linear" in description.lower() else description


def _on_host(engine: Any, name: str) -> bool:
    try:
        return bool(engine.get_tensor_location(name).name == "HOST")
    except TypeError:
        return bool(engine.is_shape_inference_io(name))
