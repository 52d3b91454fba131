"""Two ways of computing the same thing, compared on the same inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto

from trtopt.errors import ModelError, require
from trtopt.files import write_bytes
from trtopt.graph.io import save_model
from trtopt.machine import cores
from trtopt.spec import TensorInfo
from trtopt.temporary import scratch

THREADS = 4  # at most: comparisons are short, and the machine may be shared
SYNTHETIC = 1 << 26  # numbers in a made-up input
RESOLUTION = 4 * float(np.finfo(np.float32).eps)
INLINE = (
    8 << 20
)  # bytes: the weights of larger models reach ONNX Runtime in a file, which it maps: no copies, loaded sooner


@dataclass(frozen=True)
class Difference:
    """How far one set of outputs is from another.

    Attributes:
        absolute: largest |a − b| over all outputs.
        relative: largest |a − b| / max |a| of an output.
        scale: max |a| over all outputs; 0: the reference is all zeros, so that agreement says nothing.
        output: the output with the largest relative difference.
    """

    absolute: float
    relative: float
    scale: float
    output: str

    def within(self, tolerance: float, *, bounded: frozenset[str] = frozenset()) -> bool:
        """At most `tolerance`, relative.

        Args:
            bounded: outputs of a sigmoid or softmax, where what float32 resolves around 1 is accepted too: in the tail of
                one, the largest value may itself be a rounding error.
        """
        return self.relative <= tolerance or (self.output in bounded and self.absolute <= RESOLUTION)

    def __str__(self) -> str:
        return f"largest difference {self.absolute:.3g} (relative {self.relative:.3g}, in {self.output})"


def difference(reference: Mapping[str, NDArray[Any]], actual: Mapping[str, NDArray[Any]]) -> Difference:
    """Compare outputs by name; other shapes, NaN on one side only, or missing outputs count as infinitely far."""
    worst = Difference(0.0, 0.0, 0.0, next(iter(reference), ""))
    for name, expected in reference.items():
        absolute = relative = float("inf")
        if not isinstance(expected, np.ndarray) or expected.dtype.kind in "OUS":
            if _alike(expected, actual.get(name)):
                absolute = relative = 0.0
            worst = Difference(max(worst.absolute, absolute), max(worst.relative, relative), worst.scale, name)
            continue
        finite = np.nan_to_num(expected.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        scale = float(np.abs(finite).max(initial=0.0))
        found = actual.get(name)
        if found is not None and found.shape == expected.shape:
            a, b = expected.astype(np.float64), found.astype(np.float64)
            same = (a == b) | (np.isnan(a) & np.isnan(b))  # also for infinities, whose difference is NaN
            with np.errstate(invalid="ignore"):
                gap = np.where(same, 0.0, np.abs(a - b))
            absolute = float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max(initial=0.0))
            relative = absolute / scale if scale else (float("inf") if absolute else 0.0)
        worst = Difference(
            max(worst.absolute, absolute),
            max(worst.relative, relative),
            max(worst.scale, scale),
            name if relative >= worst.relative else worst.output,
        )
    return worst


def _alike(expected: Any, found: Any) -> bool:
    """Whether two sequences, optionals or arrays of text are the same; arrays of numbers to single precision."""
    if isinstance(expected, (list, tuple)):
        return isinstance(found, (list, tuple)) and len(expected) == len(found) and all(map(_alike, expected, found))
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray) and expected.dtype.kind not in "OUS":
        return expected.shape == found.shape and np.allclose(expected, found, rtol=1e-3, atol=1e-5, equal_nan=True)
    return bool(np.all(np.asarray(expected == found)))


def open_runtime(model: ModelProto | str | os.PathLike[str], options: Any, outputs: Sequence[str] | None = None) -> Any:
    """ONNX Runtime on the CPU.

    Args:
        options: its `SessionOptions`.
        outputs: tensors of a model in memory to compute, and nothing that they don't need; None: its own outputs.

    Raises:
        ModelError: it can't load the model; its message is quoted.
    """
    ort = require("onnxruntime", "ort", "running an ONNX model")
    with scratch() as folder:
        path = folder / "model.onnx"
        if isinstance(model, ModelProto):
            save_model(model, path, inline_limit=INLINE)
        if outputs is not None:
            light = ModelProto()
            light.ParseFromString(path.read_bytes())
            del light.graph.output[:]
            light.graph.output.extend(ValueInfoProto(name=name) for name in outputs)
            write_bytes(path, light.SerializeToString())
        try:
            source = os.fspath(path if isinstance(model, ModelProto) else model)
            return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise ModelError(f"ONNX Runtime can't load the model: {error}") from error


class OnnxSession:
    """A model in ONNX Runtime on the CPU.

    Args:
        threads: within an operator, at most; None: one per core.
        optimize: False runs the nodes as they stand.

    Attributes:
        inputs: name → ONNX Runtime's name of the type.
        outputs: names.
        batch: the size that every input's first axis is fixed to; None: dynamic, or not the same for all.

    Raises:
        MissingDependency: ONNX Runtime isn't installed.
        ModelError: it can't load the model; its message is quoted.
    """

    def __init__(
        self, model: ModelProto | str | os.PathLike[str], *, threads: int | None = THREADS, optimize: bool = True
    ) -> None:
        ort = require("onnxruntime", "ort", "running an ONNX model")
        options = ort.SessionOptions()
        options.log_severity_level = 4
        most = cores()
        options.intra_op_num_threads = min(threads or most, most)
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        self._session = open_runtime(model, options)
        self.inputs = {item.name: str(item.type) for item in self._session.get_inputs()}
        first = {item.shape[0] if item.shape else None for item in self._session.get_inputs()}
        size = first.pop() if len(first) == 1 else None
        self.batch = size if isinstance(size, int) and size > 0 else None
        self.outputs = tuple(item.name for item in self._session.get_outputs())

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        try:
            return dict(zip(self.outputs, self._session.run(None, dict(inputs))))
        except Exception as error:
            raise ModelError(f"ONNX Runtime can't run the model: {error}") from error


def is_numeric(info: TensorInfo) -> bool:
    """Whether it is a tensor of numbers or truths."""
    return info.dtype.startswith(("float", "bfloat", "int", "uint", "bool"))


def synthetic_inputs(inputs: Sequence[TensorInfo], sizes: Mapping[str, int], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Seeded inputs that exercise a graph; for comparing two forms of one model, never for calibration.

    Floats are normal; integers are 0 or 1 (a valid index or mask everywhere).

    Args:
        sizes: what a dynamic dimension becomes, by its name, else by "INPUT:AXIS".

    Raises:
        ModelError: an input isn't a tensor of numbers, or a very large one.
    """
    generator = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {}
    for info in inputs:
        shape = [
            size if isinstance(size, int) and size >= 0 else sizes.get(str(size), sizes.get(f"{info.name}:{axis}", 2))
            for axis, size in enumerate(info.shape)
        ]
        if not is_numeric(info):
            raise ModelError(f"the input {info.name} is of type {info.dtype}; made-up inputs are tensors of numbers")
        if math.prod(shape) > SYNTHETIC:
            raise ModelError(
                f"the input {info.name} has {math.prod(shape)} numbers; made-up inputs at most {SYNTHETIC}"
            )
        if info.dtype.startswith(("float", "bfloat")):
            arrays[info.name] = generator.standard_normal(shape).astype(info.dtype)
        else:
            arrays[info.name] = generator.integers(0, 2, shape).astype(info.dtype)
    return arrays
