"""Scales of channels moved from activations into the weights behind them, so that one INT8 scale fits all channels.

x W = (x / s) (s W) for any positive s, one for each channel; with s near the channels' own sizes the tensor loses its outliers
and the weights, which have scales of their own and are rounded with care, take them (Xiao et al., "SmoothQuant", ICML 2023).
In front of matrix products the division is a Mul. Between convolutions it goes into the first one's weights and bias, where
nothing stands between them or only activations with f(x / s) = f(x) / s, so not ReLU6 (Nagel et al., "Data-Free Quantization
Through Weight Equalization and Bias Correction", ICCV 2019, with the factors of SmoothQuant: weights have a scale for each
channel here, tensors one for all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.core.errors import CalibrationError
from trtopt.graph.passes.int8_neighbours import through
from trtopt.graph.passes.placement import Points
from trtopt.graph.passes.result import PassResult
from trtopt.graph.proto import whole_copy
from trtopt.graph.view import Editor, attribute, channel_axes, constant, drop_unread, read_once, spread, to_ir, to_proto

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Readers:
    """Nodes that multiply an activation with weights.

    Attributes:
        matrices: node → its weights, one row for each channel of the activation.
        axis: of the activation's channels.
        adds: the division is a node more.
    """

    matrices: Mapping[str, Floats]
    axis: int
    adds: bool


def smoothed_name(tensor: str) -> str:
    """Name the tensor that stands for `tensor` where its scales of channels are moved."""
    return f"{tensor}/smoothed"


def smoothable(model: ir.Model, points: Points) -> dict[str, Readers]:
    """Activations whose scales of channels can be moved into what reads them quantized."""
    nodes = {str(node.name): node for node in model.graph}
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    readers = {}
    for name, places in points.reads.items():
        matrices = {node: _matrix(nodes[node]) if slot == 0 else None for node, slot in places}
        weights = {node: matrix for node, matrix in matrices.items() if matrix is not None}
        if len(weights) < len(matrices) or len({len(matrix) for matrix in weights.values()}) != 1:
            continue
        kinds = {nodes[node].op_type == "Conv" for node in weights}
        if kinds == {False}:
            readers[name] = Readers(weights, axis=-1, adds=True)
        elif kinds == {True} and len(values[name].uses()) == len(weights) and _in_front(values[name]) is not None:
            readers[name] = Readers(weights, axis=1, adds=False)
    return readers


def smooth(model: ir.Model, factors: Mapping[str, Floats]) -> PassResult:
    """Divide tensors by a factor for each of their channels, and multiply the weights of what reads them with it.

    Raises:
        CalibrationError: the model has no such tensor, or of another size.
    """
    editor = Editor(model)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    changed = []
    for name, factor in factors.items():
        value = values.get(name)
        readers = [] if value is None else [use.node for use in value.uses() if use.idx == 0]
        fitting = [node for node in readers if (matrix := _matrix(node)) is not None and len(matrix) == len(factor)]
        front = None
        if value is not None and fitting and fitting[0].op_type == "Conv":
            front = _in_front(value)
            if front is None or len(fitting) < len(value.uses()):
                fitting = []
        if value is None or not fitting:
            raise CalibrationError(
                f"the table divides the channels of {name!r}, which no layer of {len(factor)} inputs reads here: it was made "
                "for another model; calibrate this one"
            )
        if front is None:
            inverse = editor.constant(f"{name}_smoothing", (1 / factor.astype(np.float64)).astype(np.float32))
            node = editor.node("Mul", [value, inverse], smoothed_name(name), value.dtype, value.shape)
            editor.put_behind(value, [node])
            for reader in fitting:
                reader.replace_input_with(0, node.outputs[0])
        else:
            for slot in range(1, len(front.inputs)):  # its weights and its bias
                if (content := constant(front.inputs[slot])) is not None:
                    divided = content / spread(factor, content.shape, 0, 1)
                    front.replace_input_with(slot, editor.constant(f"{front.name}_divided", divided, np.float32))
            between: ir.Value | None = value
            while between is not None:  # what the factors divide isn't the tensor of that name any more
                between.name = editor.fresh(smoothed_name(str(between.name)))
                maker = between.producer()
                between = None if maker is None or maker is front else maker.inputs[0]
            changed.append(str(front.name))
        for reader in fitting:
            weights = np.asarray(constant(reader.inputs[1]), np.float32)
            weights = spread(factor, weights.shape, channel_axes(reader)[0], attribute(reader, "group", 1)) * weights
            reader.replace_input_with(1, editor.constant(f"{reader.name}_smoothed", weights, np.float32))
            changed.append(str(reader.name))
    drop_unread(model.graph)
    return PassResult(model, changed)


def smoothed(proto: ModelProto, factors: Mapping[str, Floats]) -> ModelProto:
    """A copy that `smooth` has changed; the model itself where there is nothing to move. Raises: as `smooth`."""
    if not factors:
        return proto
    model = to_ir(whole_copy(proto))
    smooth(model, factors)
    return to_proto(model)


def factors_for(largest: Floats, readers: Readers, strength: float) -> Floats:
    """max|x|^strength / max|W|^(1 − strength) of each channel, of geometric mean 1.

    Args:
        largest: magnitude seen of each channel.
    """
    weights = np.maximum.reduce([np.abs(matrix).max(1) for matrix in readers.matrices.values()]).astype(np.float64)
    tiny = 1e-5 * max(float(largest.max()), 1e-30)
    amax = np.maximum(largest.astype(np.float64), tiny)
    weights = np.maximum(weights, 1e-5 * max(float(weights.max()), 1e-30))
    factor = amax**strength / weights ** (1 - strength)
    return np.asarray(factor / np.exp(np.log(factor).mean()), np.float32)


def _matrix(node: ir.Node) -> Floats | None:
    """Return the matrix that a node multiplies its first input with, a row for each channel of it; None: nothing such."""
    if node.op_type not in ("MatMul", "Gemm", "Conv") or node.domain or attribute(node, "transA", 0):
        return None
    content = constant(node.inputs[1])
    if content is None or content.dtype != np.float32:
        return None
    if node.op_type == "Conv":
        groups = attribute(node, "group", 1)
        grouped = content.reshape(groups, len(content) // groups, *content.shape[1:])
        return np.moveaxis(grouped, 2, 1).reshape(groups * content.shape[1], -1)
    return np.moveaxis(content, channel_axes(node)[0], 0) if content.ndim == 2 else None


def _in_front(value: ir.Value) -> ir.Node | None:
    """The convolution that gives `value`, through nothing but activations that a positive factor passes; None: none does."""

    def homogeneous(node: ir.Node) -> bool:
        return node.op_type in ("Relu", "LeakyRelu", "PRelu") and not node.domain and read_once(node.inputs[0])

    node = through(value.producer(), homogeneous)
    if node is None or node.op_type != "Conv" or node.domain or value.is_graph_output():
        return None
    weights = [constant(item) for item in node.inputs[1:] if item is not None]
    return node if all(item is not None and item.dtype == np.float32 for item in weights) else None
