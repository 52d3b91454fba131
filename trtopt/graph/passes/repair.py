"""Weights and biases changed so that INT8 loses less: exact changes of the floating-point graph before Q/DQ is put in.

A repaired weight lies on the grid that its scale makes, so rounding it to the nearest code, by trtopt or by TensorRT, gives the
codes that were chosen, whichever type holds the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.core.errors import CalibrationError
from trtopt.core.values import Precision
from trtopt.graph.passes.placement import Points
from trtopt.graph.passes.quantize import quantize_weight, weight_scales
from trtopt.graph.passes.result import PassResult, set_input
from trtopt.graph.view import Editor, along, constant, operand

BIAS = 2  # the input of Conv and Gemm that holds it


@dataclass(frozen=True)
class Repair:
    """Changes of one node.

    Attributes:
        offsets: of the weight's shape, int8: the chosen codes less the nearest ones.
        bias: float32, one per output channel, added to the bias; None: nothing is added.
    """

    offsets: NDArray[np.int8]
    bias: NDArray[np.float32] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Repair):
            return NotImplemented
        one, two = (np.zeros(0) if item.bias is None else item.bias for item in (self, other))
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(one, two)


def nearest(content: NDArray[np.float32], axis: int | None) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """The nearest codes of a weight, and their scales in a shape that multiplies with them."""
    scale = weight_scales(content, axis, Precision.INT8)
    return quantize_weight(content, scale, axis, Precision.INT8), along(axis, scale, content.ndim)


def repaired(content: NDArray[np.float32], axis: int | None, repair: Repair) -> NDArray[np.float32]:
    """The weight on its grid, with the chosen codes.

    Raises:
        CalibrationError: the repair is of another weight.
    """
    codes, scale = nearest(content, axis)
    if repair.offsets.shape != codes.shape:
        raise CalibrationError(
            f"the table's repair has shape {repair.offsets.shape}, the weight {codes.shape}: it was made for another model; "
            "calibrate this one"
        )
    rounded = codes.astype(np.float32) + repair.offsets
    return np.asarray(np.clip(rounded, -127, 127) * scale, np.float32)


def repair_weights(model: ir.Model, points: Points, repairs: Mapping[str, Repair]) -> tuple[PassResult, Points]:
    """Change what is quantized and has a repair, by its node's name; the points with the weights' new names.

    Raises:
        CalibrationError: a repair doesn't fit its weight.
    """
    editor, nodes = Editor(model), {str(node.name): node for node in model.graph}
    weights = {weight.node: weight for weight in points.weights}
    changed = [name for name in weights if name in repairs]
    for name in changed:
        node, weight, repair = nodes[name], weights[name], repairs[name]
        content = np.asarray(constant(node.inputs[weight.slot]), np.float32)
        value = editor.constant(f"{weight.name}_repaired", repaired(content, weight.axis, repair))
        node.replace_input_with(weight.slot, value)
        weights[name] = replace(weight, name=str(value.name))
        if repair.bias is not None:
            held = operand(node, BIAS)
            bias = repair.bias if held is None else np.asarray(constant(held), np.float32) + repair.bias
            set_input(node, BIAS, editor.constant(f"{name}_bias_repaired", bias, np.float32))
    return PassResult(model, changed), replace(points, weights=tuple(weights.values()))
