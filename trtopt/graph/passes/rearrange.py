"""The same network in a form whose INT8 kernels are faster: what TensorRT itself fuses or leaves apart to its disadvantage.

Measured with TensorRT 8.6 on an H200 (docs/results/runtime.md).

**A residual block whose skip is a convolution of its own** (the first one of each stage of a ResNet) becomes one convolution:

    y = W·a + V·p    becomes    y = [W V]·Concat(a, p)

`a` is what the block's last 1×1 convolution reads, `p` what the skip's 1×1 convolution reads: the block's input. The skip is
then not written, rounded to INT8 and read again, and the wider product takes little longer than one of the two. The codes of
`p` have a scale of their own and a convolution has one for all its inputs, so V takes the quotient of the two: no tensor is
rounded again. Where the skip has a stride, a MaxPool of 1×1 picks its pixels.

**The first convolution and the MaxPool behind it** stay two kernels. TensorRT has one kernel for both, where the padding is the
same on all sides; it takes longer than the two. So padding that no window reaches is left out, which changes no result. And for
the convolution to write INT8, its result is rounded before the MaxPool as it is behind it: the largest of rounded values is the
rounded largest one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtopt.core.values import Precision
from trtopt.graph.passes.quantize import FLOATS, Writer, quantize_weight, weight_scales
from trtopt.graph.passes.result import PassResult
from trtopt.graph.view import attribute, constant, operand, read_once, sizes

VECTOR = 32  # channels that TensorRT's INT8 format keeps together: at a multiple of them Concat needs no copy
FEW = 4  # input channels: TensorRT has that one kernel for images; nobody has looked at wider ones
_ONE = [1, 1]
_QUANTIZED = ("DequantizeLinear", "QuantizeLinear")  # from a reader back to what was quantized


def rearrange(model: ir.Model, fixed: Collection[str] = ()) -> PassResult:
    """Bring what `insert_qdq` made, FP32-typed and INT8, into that form.

    Args:
        fixed: names of nodes that must stay as they are.
    """
    writer = Writer(model, Precision.INT8)
    nodes = [node for node in model.graph if node.name not in fixed]
    changes: dict[str, str] = {}
    for pool in (node for node in nodes if node.op_type == "MaxPool"):
        if _keep_apart(writer, pool):
            changes[str(pool.name)] = str(pool.name)
    for add in (node for node in nodes if node.op_type == "Add"):
        if (branches := _branches(add, fixed)) is not None:
            main, skip = branches
            _merge(writer, add, main, skip)
            changes[str(skip.conv.name)] = str(main.conv.name)
    if changes:
        RemoveUnusedNodesPass()(model)
    return PassResult(model, changes)


def _made_for_one(value: ir.Value | None) -> ir.Node | None:
    """Who computes `value`, if nobody reads it but one node."""
    return value.producer() if value is not None and read_once(value) else None


def _behind(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """Who computes what comes to `value` through nodes of these operators, the last one first, nothing of it read elsewhere."""
    node = _made_for_one(value)
    for op in ops:
        node = _made_for_one(node.inputs[0]) if node is not None and node.op_type == op else None
    return node


def _made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """Who computes `value`, if it is such a node."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op else None


# Residual blocks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Branch:
    """A quantized 1×1 convolution: who gives back the codes that it reads; its weight and bias before it was quantized."""

    conv: ir.Node
    dequantize: ir.Node
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    strides: list[int]

    @property
    def scale(self) -> NDArray[np.float32]:
        return np.asarray(constant(self.dequantize.inputs[1]), np.float32)


def _branches(add: ir.Node, fixed: Collection[str]) -> tuple[_Branch, _Branch] | None:
    """The convolutions that compute the operands, if they can become one: the block's last, and its skip's."""
    if add.outputs[0].is_graph_output():
        return None
    for block, beside in (add.inputs, reversed(add.inputs)):
        main, skip = _branch(_behind(block), fixed), _branch(_behind(beside, *_QUANTIZED), fixed)
        if main is None or skip is None or main.strides != _ONE:
            continue
        if _behind(main.conv.inputs[0], *_QUANTIZED) is not None:  # what others read too, Concat would have to copy
            return main, skip
    return None


def _branch(conv: ir.Node | None, fixed: Collection[str]) -> _Branch | None:
    if conv is None or conv.op_type != "Conv" or conv.name in fixed:
        return None
    dequantize, codes = (_made_by(value, "DequantizeLinear") for value in conv.inputs[:2])
    if dequantize is None or codes is None or FLOATS not in codes.meta or sizes(dequantize.inputs[1]) != ():
        return None
    weight = constant(codes.meta[FLOATS])
    assert weight is not None  # it was quantized
    if weight.shape[1] % VECTOR or weight.shape[2:] != (1, 1) or attribute(conv, "group", 1) != 1:
        return None
    added = operand(conv, 2)
    bias = np.zeros(len(weight), np.float32) if added is None else constant(added)
    if bias is None or any(attribute(conv, "pads", [0])):
        return None
    strides = attribute(conv, "strides", _ONE)
    return _Branch(conv, dequantize, np.asarray(weight, np.float32), np.asarray(bias, np.float32), strides)


def _merge(writer: Writer, add: ir.Node, main: _Branch, skip: _Branch) -> None:
    name, scale = str(main.conv.name), main.scale

    def put(op: str, inputs: list[ir.Value | None], what: str, **attributes: Any) -> ir.Value:
        own = name if op == "Conv" else ""
        node = writer.node(op, inputs, f"{name}_{what}", ir.DataType.FLOAT, name=own, **attributes)
        writer.graph.insert_before(add, node)
        return node.outputs[0]

    shortcut = put("DequantizeLinear", [skip.dequantize.inputs[0], *main.dequantize.inputs[1:]], "shortcut")
    if skip.strides != _ONE:
        shortcut = put("MaxPool", [shortcut], "picked", kernel_shape=_ONE, strides=skip.strides)
    both = writer.pair(put("Concat", [main.conv.inputs[0], shortcut], "both", axis=1), scale)
    weight = np.concatenate([main.weight, skip.weight * (skip.scale / scale)], 1)
    scales = weight_scales(weight, 0, Precision.INT8)
    codes = writer.dequantize(f"{name}_merged", quantize_weight(weight, scales, 0, Precision.INT8), scales, 0)
    bias = writer.constant(f"{name}_bias", main.bias + skip.bias)
    result = put("Conv", [both, codes, bias], "merged", kernel_shape=_ONE)
    add.outputs[0].replace_all_uses_with(result)
    writer.graph.remove(add, safe=True)  # the old convolutions go with all that nobody reads any more


# The first convolution -----------------------------------------------------------------------------------------------------


def _keep_apart(writer: Writer, pool: ir.Node) -> bool:
    value, result = pool.inputs[0], pool.outputs[0]
    conv = _made_for_one(value)
    while conv is not None and conv.op_type in ("Relu", "Clip"):
        conv = _made_for_one(conv.inputs[0])
    users = [use.node for use in result.uses()]
    if value is None or conv is None or conv.op_type != "Conv":
        return False
    if [user.op_type for user in users] != ["QuantizeLinear"]:
        return False
    channels, scale = sizes(conv.inputs[0]), constant(users[0].inputs[1])
    if _made_by(conv.inputs[1], "DequantizeLinear") is None or channels is None or (channels[1] or FEW + 1) > FEW:
        return False
    pads = _reached(pool)
    if scale is None or pads is None:
        return False
    pool.attributes["pads"] = ir.AttrInt64s("pads", pads)
    pool.replace_input_with(0, writer.pair(value, np.asarray(scale, np.float32)))
    return True


def _reached(pool: ir.Node) -> list[int] | None:
    """Its padding without what no window reaches; None where that is all of it, or isn't known."""
    shape, pads, windows = sizes(pool.inputs[0]), attribute(pool, "pads", []), attribute(pool, "kernel_shape", [])
    axes = len(windows)
    if shape is None or len(shape) != axes + 2 or len(pads) != 2 * axes or attribute(pool, "ceil_mode", 0):
        return None
    if attribute(pool, "auto_pad", "NOTSET") != "NOTSET" or any(size != 1 for size in attribute(pool, "dilations", [])):
        return None
    padding = list(pads)
    for axis, (size, window, stride) in enumerate(zip(shape[2:], windows, attribute(pool, "strides", [1] * axes))):
        if size is None:
            return None
        excess = (pads[axis] + size + pads[axes + axis] - window) % stride
        padding[axes + axis] = max(0, pads[axes + axis] - excess)
    return None if padding == pads else padding
