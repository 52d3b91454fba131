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

from trtopt.graph.view import (
    Editor,
    attribute,
    channel_axes,
    constant,
    constant_tensor,
    normalization,
    operand,
    opset_of,
    read_once,
    sizes,
)

_Array = NDArray[Any]
_MAKERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def absorb(model: ir.Model) -> None:
    """Rewrite every graph of a model whose shapes are inferred; nodes keep their names, results theirs."""
    editor, opset = Editor(model), opset_of(model)
    for node in list(model.graph.all_nodes()):
        if node.op_type == "Conv" and not node.domain:
            _take_padding(node, opset)
        elif (maker := _maker(node)) is None or (affine := _affine(node, maker)) is None:
            continue
        elif _scaled(maker, *affine, editor):
            result, made = node.outputs[0], maker.outputs[0]
            made.name, result.name = result.name, None
            made.type, made.shape = result.type or made.type, result.shape or made.shape
            ir.convenience.replace_all_uses_with(result, made, replace_graph_outputs=True)
            maker.graph.remove(node, safe=True)


def _maker(node: ir.Node) -> ir.Node | None:
    """The convolution or product whose result a node changes, and nobody else reads."""
    if node.domain or node.op_type not in ("Mul", "Div", "Add", "Sub", "BatchNormalization"):
        return None
    for value in node.inputs if node.op_type in ("Mul", "Add") else node.inputs[:1]:
        maker = value.producer() if value is not None and read_once(value) else None
        if maker is not None and maker.op_type in _MAKERS and not maker.domain and maker.graph is node.graph:
            return maker
    return None


def _affine(node: ir.Node, maker: ir.Node) -> tuple[_Array, _Array] | None:
    """The factor and the summand of each channel, or one for all; None: the node does something else."""
    made, weight = maker.outputs[0], constant_tensor(operand(maker, 1))
    rank, channels = (None, 0) if weight is None else _channels(maker, weight.shape.numpy())
    if rank is None:
        return None
    if node.op_type == "BatchNormalization":
        return None if maker.op_type == "MatMul" and rank != 2 else normalization(node)
    array = constant(node.inputs[0] if node.inputs[1] is made else node.inputs[1])
    if array is None or array.ndim > rank:
        return None
    form, axis = (1,) * (rank - array.ndim) + array.shape, 1 if maker.op_type.startswith("Conv") else rank - 1
    if form[axis] not in (1, channels) or math.prod(form) != form[axis]:
        return None  # along another axis, or the result is larger
    number = array.astype(np.float64).reshape(-1)
    one, zero = np.ones(1), np.zeros(1)
    if node.op_type in ("Mul", "Div"):
        return number if node.op_type == "Mul" else one / number, zero
    return one, number if node.op_type == "Add" else -number


def _channels(maker: ir.Node, weight: tuple[int, ...]) -> tuple[int | None, int]:
    """Return how many dimensions (None: not known, or weights of another form) and channels a node gives."""
    if maker.op_type == "MatMul":
        form = sizes(maker.outputs[0]) if len(weight) == 2 else None
        return (None, 0) if form is None else (len(form), weight[-1])
    groups = attribute(maker, "group", 1) if maker.op_type == "ConvTranspose" else 1
    return len(weight), weight[channel_axes(maker)[1]] * groups


def _scaled(maker: ir.Node, factor: _Array, summand: _Array, editor: Editor) -> bool:
    """Multiply weights and bias by the factor and add the summand; False: it can't be, and nothing is changed.

    Weights that stay as they are aren't read: large ones may be elsewhere.
    """
    op, tensor, bias = maker.op_type, constant_tensor(operand(maker, 1)), constant(operand(maker, 2))
    assert tensor is not None
    shape = tensor.shape.numpy()
    rank, channels = _channels(maker, shape)
    if (bias is None and operand(maker, 2) is not None) or (op == "MatMul" and rank != 2 and summand.any()):
        return False
    group = attribute(maker, "group", 1) if op == "ConvTranspose" else 1
    if op == "ConvTranspose":  # inputs of all groups × outputs of one
        form, axis = (group, shape[0] // group, *shape[1:]), 2
        along = np.broadcast_to(factor, channels).reshape(group, 1, channels // group, *[1] * (len(shape) - 2))
    else:
        form, axis = shape, channel_axes(maker)[1]
        along = factor.reshape(-1, *[1] * (len(shape) - 1 - axis))
    content = dict[int, _Array]()
    if (factor != 1).any():
        content[1] = (tensor.numpy().astype(np.float64).reshape(form) * along).reshape(shape)
    if bias is not None or summand.any():
        before = np.zeros(channels) if bias is None else bias.astype(np.float64) * attribute(maker, "beta", 1.0)
        content[2] = before * factor + summand
    with np.errstate(over="ignore"):
        made = {slot: array.astype(tensor.dtype.numpy()) for slot, array in content.items()}
    if not all(np.isfinite(array.astype(np.float64)).all() for array in made.values()):
        return False
    for slot, array in made.items():
        maker.resize_inputs(max(len(maker.inputs), slot + 1))
        maker.replace_input_with(
            slot, editor.constant(f"{maker.outputs[0].name}/{'weight' if slot == 1 else 'bias'}", array)
        )
    if 2 in made:
        maker.op_type = "Gemm" if op == "MatMul" else op
        maker.attributes.pop("beta", None)
    return True


def _take_padding(node: ir.Node, opset: int) -> None:
    """Let a convolution put the zeros around its input that a Pad puts there."""
    weight, pad = operand(node, 1), node.inputs[0].producer() if node.inputs[0] is not None else None
    rank = len(weight.shape) if weight is not None and weight.shape is not None else 0
    if (
        pad is None
        or pad.op_type != "Pad"
        or pad.domain
        or attribute(pad, "mode", "constant") != "constant"
        or rank < 3
    ):
        return
    amounts, value, axes = (constant(operand(pad, slot)) for slot in (1, 2, 3))
    if opset < 11:
        amounts, value = attribute(pad, "pads"), attribute(pad, "value", 0.0)
    elif any(operand(pad, slot) is not None and found is None for slot, found in ((2, value), (3, axes))):
        return
    own, auto = attribute(node, "pads", [0] * (2 * rank - 4)), attribute(node, "auto_pad", "NOTSET")
    if amounts is None or np.any(value) or auto not in ("NOTSET", "VALID"):
        return
    around = np.zeros((2, rank), np.int64)
    around[:, range(rank) if axes is None else axes] = np.reshape(amounts, (2, -1))
    if not around[:, :2].any() and (around >= 0).all():
        node.attributes["pads"] = ir.AttrInt64s("pads", [*map(int, around[:, 2:].reshape(-1) + own)])
        node.attributes.pop("auto_pad", None)
        node.replace_input_with(0, pad.inputs[0])
