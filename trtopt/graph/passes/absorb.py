"""Make constants that act on a convolution's or product's result, and zeros around its input, part of it.

BatchNormalization, Mul, Div, Add and Sub go into weights and bias where nothing else reads what the node gives and their
constant is one number a channel, or one for all: any other, such as a window over time or a weight a row, stays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.graph.op_types import WEIGHTED
from trtopt.graph.passes.result import set_input
from trtopt.graph.view import (
    Editor,
    attribute,
    channel_axes,
    constant,
    constant_tensor,
    normalization,
    operand,
    read_once,
    spread,
)

_Array = NDArray[Any]


def absorb(model: ir.Model) -> None:
    """Rewrite every graph of a model whose shapes are inferred; nodes keep their names, results theirs."""
    editor = Editor(model)
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Conv" and not node.domain:
            _take_padding(node)
        elif (maker := _maker(node)) is None or (affine := _affine(node, maker)) is None:
            continue
        elif _scaled(maker, *affine, editor):
            ir.convenience.replace_nodes_and_values(maker.graph, node, [node], [], node.outputs[:1], maker.outputs)


def _maker(node: ir.Node) -> ir.Node | None:
    """The convolution or product whose result a node changes, and nobody else reads."""
    if node.domain or node.op_type not in ("Mul", "Div", "Add", "Sub", "BatchNormalization"):
        return None
    for value in node.inputs if node.op_type in ("Mul", "Add") else node.inputs[:1]:
        maker = value.producer() if value is not None and read_once(value) else None
        if maker is not None and maker.op_type in WEIGHTED and not maker.domain and maker.graph is node.graph:
            return maker
    return None


def _affine(node: ir.Node, maker: ir.Node) -> tuple[_Array, _Array] | None:
    """The factor and the summand of each channel, or one for all; None: the node does something else."""
    made, tensor = maker.outputs[0], constant_tensor(operand(maker, 1))
    if tensor is None:
        return None
    weight, product = tensor.shape.numpy(), maker.op_type == "MatMul"
    given = weight if not product else made.shape if len(weight) == 2 else None
    if given is None or (product and len(given) != 2 and node.op_type not in ("Mul", "Div")):
        return None  # its rank isn't known, or no Gemm adds that
    if node.op_type == "BatchNormalization":
        return normalization(node)
    array, rank = constant(node.inputs[0] if node.inputs[1] is made else node.inputs[1]), len(given)
    if array is None or array.ndim > rank:
        return None
    form, axis = (1,) * (rank - array.ndim) + array.shape, 1 if maker.op_type.startswith("Conv") else rank - 1
    if form[axis] not in (1, _channels(maker, weight)[1]) or math.prod(form) != form[axis]:
        return None  # along another axis, or the result is larger
    number = array.astype(np.float64).reshape(-1)
    one, zero = np.ones(1), np.zeros(1)
    if node.op_type in ("Mul", "Div"):
        return number if node.op_type == "Mul" else one / number, zero
    return one, number if node.op_type == "Add" else -number


def _channels(maker: ir.Node, weight: tuple[int, ...]) -> tuple[int, int]:
    """Return in how many groups a node gives how many channels."""
    groups = attribute(maker, "group", 1) if maker.op_type == "ConvTranspose" else 1
    return groups, weight[channel_axes(maker)[1]] * groups


def _scaled(maker: ir.Node, factor: _Array, summand: _Array, editor: Editor) -> bool:
    """Multiply weights and bias by the factor and add the summand; False: it can't be, and nothing is changed.

    Weights that stay as they are aren't read: large ones may be elsewhere.
    """
    tensor, bias = constant_tensor(operand(maker, 1)), constant(operand(maker, 2))
    if tensor is None or (bias is None and operand(maker, 2) is not None):
        return False
    shape = tensor.shape.numpy()
    groups, channels = _channels(maker, shape)
    content = dict[int, _Array]()
    if (factor != 1).any():
        content[1] = tensor.numpy().astype(np.float64) * spread(factor, shape, channel_axes(maker)[1], groups)
    if bias is not None or summand.any():
        before = np.zeros(channels) if bias is None else bias.astype(np.float64) * attribute(maker, "beta", 1.0)
        content[2] = before * factor + summand
    with np.errstate(over="ignore"):
        made = {slot: array.astype(tensor.dtype.numpy()) for slot, array in content.items()}
    if not all(np.isfinite(array.astype(np.float64)).all() for array in made.values()):
        return False
    for slot, array in made.items():
        name = f"{maker.outputs[0].name}/{'weight' if slot == 1 else 'bias'}"
        set_input(maker, slot, editor.constant(name, array))
    if 2 in made:
        maker.op_type = "Gemm" if maker.op_type == "MatMul" else maker.op_type
        maker.attributes.pop("beta", None)
    return True


def _take_padding(node: ir.Node) -> None:
    """Let a convolution put the zeros around its input that a Pad puts there."""
    weight, pad = operand(node, 1), node.inputs[0].producer() if node.inputs[0] is not None else None
    rank = len(weight.shape) if weight is not None and weight.shape is not None else 0
    zeros = ("Pad", "", "constant")
    if pad is None or (pad.op_type, pad.domain, attribute(pad, "mode", "constant")) != zeros or rank < 3:
        return
    amounts, value, axes = (constant(operand(pad, slot)) for slot in (1, 2, 3))
    amounts, value = attribute(pad, "pads", amounts), attribute(pad, "value", value)  # before opset 11
    computed = any(operand(pad, slot) is not None and held is None for slot, held in ((2, value), (3, axes)))
    own, auto = attribute(node, "pads", [0] * (2 * rank - 4)), attribute(node, "auto_pad", "NOTSET")
    if amounts is None or computed or np.any(value) or auto not in ("NOTSET", "VALID"):
        return
    around = np.zeros((2, rank), np.int64)
    around[:, range(rank) if axes is None else axes] = np.reshape(amounts, (2, -1))
    if not around[:, :2].any() and (around >= 0).all():
        node.attributes["pads"] = ir.AttrInt64s("pads", [*map(int, around[:, 2:].reshape(-1) + own)])
        node.attributes.pop("auto_pad", None)
        node.replace_input_with(0, pad.inputs[0])
