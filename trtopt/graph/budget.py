"""Bound the cost of folding: each constant expression is judged by its operands before it is evaluated.

A file of 150 bytes can ask for gigabytes (ConstantOfShape, Tile, Expand, products of vectors) or for hours (Resize, which
ONNX's reference evaluator computes element by element). What costs more than it is worth is left in the graph, to be computed.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnx import NodeProto, TensorProto

from trtopt.graph.op_types import EVALUATED_BY_NUMPY, MULTIPLYING
from trtopt.graph.view import sizes
from trtopt.graph.work import node_macs

RESULT = 64 << 20  # bytes of one result, where its operands aren't larger
TOTAL = 128 << 20  # bytes of all constants together, in a model whose own take less than half of that
MACS = 1 << 31  # multiply-accumulates: a second or two
SLOWLY = 1 << 18  # elements that are computed one by one in Python
NOT_FOLDED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")  # they carry the precision plan
_SHRINKING = ("NonZero", "Compress", "Unique")  # how much they give nobody knows before; no more than they read


class Budget:
    """Says of one node after the other whether to evaluate it.

    Args:
        left: bytes by which the constants may still grow.
        opsets: domain → version.
    """

    def __init__(self, budget: int, opsets: dict[str, int]) -> None:
        self._left, self._opsets = budget, opsets

    def __call__(self, node: ir.Node) -> bool:
        """Return whether a node whose inputs are all constants is evaluated."""
        if node.op_type in NOT_FOLDED or len(node.outputs) != 1:  # of several results onnxscript keeps none
            return False
        if _misjudged(ir.serde.serialize_node(node), self._opsets.get("", 0)):
            return False
        operands = [value for value in node.inputs if value is not None]
        constants = {value.name or "": value.const_value for value in operands if value.const_value is not None}
        if any(constant.dtype == TensorProto.STRING for constant in constants.values()):
            return False
        nbytes = sum(constant.nbytes for constant in constants.values())
        elements, size = _result(node)
        if elements is None and node.op_type in _SHRINKING:
            elements = sum(constant.size * max(1, len(constant.shape)) for constant in constants.values())
            size = elements * 8
        if elements is None or size > max(RESULT, nbytes) or not _quick(node, constants, elements):
            return False
        freed = sum(constants[value.name or ""].nbytes for value in operands if len(value.uses()) == 1)
        growth = max(0, size - freed)
        if growth > self._left:
            return False
        self._left -= growth
        return True


def _result(node: ir.Node) -> tuple[int | None, int]:
    """Elements and bytes of what it gives, as inferred right before by onnxscript; declared shapes are gone by then."""
    shape, dtype = sizes(node.outputs[0]), node.outputs[0].dtype
    if shape is None or None in shape or dtype in (None, ir.DataType.UNDEFINED, ir.DataType.STRING):
        return None, 0
    count = math.prod(size or 0 for size in shape)
    return count, math.ceil(count * dtype.itemsize)


def _quick(node: ir.Node, constants: dict[str, Any], elements: int) -> bool:
    if node.op_type in MULTIPLYING:
        shapes = {name: tuple(constant.shape.numpy()) for name, constant in constants.items()}
        shapes[node.outputs[0].name or ""] = (elements,)
        work = node_macs(ir.serde.serialize_node(node), shapes)
        return (work or math.prod(constant.size for constant in constants.values())) <= MACS
    most = max([elements, *(constant.size for constant in constants.values())])
    return node.op_type in EVALUATED_BY_NUMPY or most <= SLOWLY


def _misjudged(node: NodeProto, opset: int) -> bool:
    """Return whether ONNX's reference evaluator gives other values than ONNX says (and ONNX Runtime gives).

    It mixes the batch's own statistics into old BatchNormalization, takes Softmax along one axis where it was along all that
    follow, counts old Unsqueeze's negative axes from another end, pads MaxPool and ConvTranspose (`output_shape`, groups)
    otherwise, and knows GridSample's modes by new names only.
    """
    old = opset < 14 and node.op_type in ("BatchNormalization", "Softmax", "LogSoftmax", "Hardmax")
    below = node.op_type == "Unsqueeze" and any(axis < 0 for item in node.attribute for axis in item.ints)
    return old or below or node.op_type in ("ConvTranspose", "MaxPool", "GridSample")
