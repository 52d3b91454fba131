"""Scales of channels moved from activations into the weights behind them, so that one INT8 scale fits all channels.

x W = (x / s) (s W) for any positive s, one for each channel; with s near the channels' own sizes the tensor loses its outliers
and the weights, which have scales of their own and are rounded with care, take them (Xiao et al., "SmoothQuant", ICML 2023).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.core.errors import CalibrationError
from trtopt.graph.passes.placement import Points
from trtopt.graph.passes.result import PassResult
from trtopt.graph.proto import whole_copy
from trtopt.graph.view import Editor, attribute, constant, drop_unread, to_ir, to_proto

Floats = NDArray[np.float32]


def smoothed_name(tensor: str) -> str:
    """Of the tensor that stands for `tensor` where its scales of channels are moved."""
    return f"{tensor}/smoothed"


def smoothable(model: ir.Model, points: Points) -> dict[str, dict[str, Floats]]:
    """Activations that only matrix products with a constant matrix read quantized → these nodes' matrices, K × N."""
    nodes = {str(node.name): node for node in model.graph}
    found = {}
    for name, readers in points.reads.items():
        matrices = {node: _matrix(nodes[node]) if slot == 0 else None for node, slot in readers}
        known = {node: matrix for node, matrix in matrices.items() if matrix is not None}
        if len(known) == len(matrices) and len({len(matrix) for matrix in known.values()}) == 1:
            found[name] = known
    return found


def smooth(model: ir.Model, factors: Mapping[str, Floats]) -> PassResult:
    """Divide tensors by a factor for each channel of their last axis, and multiply the matrices of what reads them with it.

    Raises:
        CalibrationError: the model has no such tensor, or of another size.
    """
    editor = Editor(model)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    changed = []
    for name, factor in factors.items():
        value = values.get(name)
        readers = [] if value is None else [use.node for use in value.uses() if use.idx == 0]
        fitting = {
            node: matrix for node in readers if (matrix := _matrix(node)) is not None and len(matrix) == len(factor)
        }
        if value is None or not fitting:
            raise CalibrationError(
                f"the table divides the channels of {name!r}, which no matrix product of {len(factor)} inputs reads here: it "
                "was made for another model; calibrate this one"
            )
        inverse = editor.constant(f"{name}_smoothing", (1 / factor.astype(np.float64)).astype(np.float32))
        node = editor.node("Mul", [value, inverse], smoothed_name(name), value.dtype, value.shape)
        editor.put_behind(value, [node])
        for reader in fitting:
            weight = constant(reader.inputs[1])
            rows = factor if _transposed(reader) else factor[:, None]
            content = np.asarray(np.asarray(weight, np.float32) * rows, np.float32)
            reader.replace_input_with(0, node.outputs[0])
            reader.replace_input_with(1, editor.constant(f"{reader.name}_smoothed", content))
            changed.append(str(reader.name))
    drop_unread(model.graph)
    return PassResult(model, dict(zip(changed, changed)))


def smoothed(proto: ModelProto, factors: Mapping[str, Floats]) -> ModelProto:
    """A copy that `smooth` has changed; the model itself where there is nothing to move. Raises: as `smooth`."""
    if not factors:
        return proto
    model = to_ir(whole_copy(proto))
    smooth(model, factors)
    return to_proto(model)


def factors_for(largest: Floats, matrices: Mapping[str, Floats], strength: float) -> Floats:
    """max|x|^strength / max|W|^(1 − strength) of each channel, of geometric mean 1.

    Args:
        largest: magnitude seen of each channel.
        matrices: K × N, of those that read it.
    """
    weights = np.maximum.reduce([np.abs(matrix).max(1) for matrix in matrices.values()]).astype(np.float64)
    tiny = 1e-5 * max(float(largest.max()), 1e-30)
    seen = np.maximum(largest.astype(np.float64), tiny)
    weights = np.maximum(weights, 1e-5 * max(float(weights.max()), 1e-30))
    factor = seen**strength / weights ** (1 - strength)
    return np.asarray(factor / np.exp(np.log(factor).mean()), np.float32)


def _transposed(node: ir.Node) -> bool:
    return node.op_type == "Gemm" and bool(attribute(node, "transB", 0))


def _matrix(node: ir.Node) -> Floats | None:
    """What the node multiplies its first input with, K × N; None where that is nothing of the kind."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain or attribute(node, "transA", 0):
        return None
    content = constant(node.inputs[1])
    if content is None or content.ndim != 2 or content.dtype != np.float32:
        return None
    return content.T if _transposed(node) else content
