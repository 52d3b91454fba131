"""Inputs made up from a seed: for comparing two forms of one model, never for calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import ModelError
from trtopt.core.values import TensorInfo

SYNTHETIC = 1 << 26  # numbers in a made-up input


def synthetic_inputs(inputs: Sequence[TensorInfo], sizes: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """Inputs that exercise a graph.

    Floats are normal; integers and booleans are 0 or 1 (a valid index or mask everywhere), and both along the last axis: of a
    row that is masked as a whole, exporters and runtimes make each something else. Rows of integers begin with 1, as the first
    place of a causal model sees nothing else: in masks of integers 1 is what counts, of booleans it may be either.

    Args:
        sizes: what a dynamic dimension becomes, by its name, else by "INPUT:AXIS".

    Raises:
        ModelError: an input isn't a tensor of numbers, or a very large one.
    """
    generator = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for info in inputs:
        shape = [
            size if isinstance(size, int) and size >= 0 else sizes.get(str(size), sizes.get(f"{info.name}:{axis}", 2))
            for axis, size in enumerate(info.shape)
        ]
        if not info.numeric:
            raise ModelError(f"the input {info.name} is of type {info.dtype}; made-up inputs are tensors of numbers")
        if math.prod(shape) > SYNTHETIC:
            raise ModelError(
                f"the input {info.name} has {math.prod(shape)} numbers; made-up inputs at most {SYNTHETIC}"
            )
        if info.floating:
            numbers: Any = generator.standard_normal(shape)
        else:
            numbers = generator.integers(0, 2, shape)
            if shape and shape[-1] > 1:
                if info.dtype != "bool":
                    numbers[..., 0] = 1
                alike = numbers.min(-1) == numbers.max(-1)
                numbers[..., -1] = np.where(alike, 1 - numbers[..., -1], numbers[..., -1])
        arrays[info.name] = np.asarray(numbers, info.dtype)  # without dimensions it is no array
    return arrays
