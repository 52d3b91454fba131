"""Operators that TensorRT computes on INT8 codes, and wrong, where a DequantizeLinear stands before them, in other words.

Seen (docs/results/certify.md): 8.6.0 takes a Clip's least for 0, 10.6.0 gives other values for Neg and Abs. With
multiplications, Max and Min, which it doesn't move in front of the DequantizeLinear, both are right.
"""

from __future__ import annotations

import onnx_ir as ir

from trtopt.graph.op_types import SCALE_PRESERVING
from trtopt.graph.passes.result import PassResult, chain
from trtopt.graph.view import Editor, constant, drop_unread, operand

_WITH_IT = SCALE_PRESERVING | {"Abs", "Clip", "Concat", "Neg", "Relu"}  # what TensorRT may move in front of one


def reword(model: ir.Model) -> PassResult:
    """Write Neg, Abs, and Clip with a least other than 0, behind DequantizeLinear, in other operators; name the nodes."""
    editor, changes, behind = Editor(model), list[str](), set[ir.Value]()
    for node in list(model.graph.all_nodes()):
        name, value = str(node.name), node.inputs[0] if node.inputs else None
        if value in behind and _reword(node, value, editor):
            changes.append(name)
        elif node.op_type == "DequantizeLinear" or (node.op_type in _WITH_IT and not behind.isdisjoint(node.inputs)):
            behind.update(node.outputs)
    drop_unread(model.graph)
    return PassResult(model, changes)


def starts_at_zero(clip: ir.Node) -> bool:
    """Tell if a Clip is a Relu at its least."""
    held = constant(operand(clip, 1))
    return held is not None and not held.any()


def _reword(node: ir.Node, value: ir.Value, editor: Editor) -> bool:
    if node.op_type not in ("Abs", "Clip", "Neg") or value.dtype is None:
        return False
    if node.op_type == "Clip":
        least, most = operand(node, 1), operand(node, 2)
        if least is None or starts_at_zero(node):
            return False
        steps = [("Max", least), ("Min", most)][: 1 + (most is not None)]
    else:
        one = editor.constant(f"{node.outputs[0].name}/minus_one", -1, value.dtype.numpy())
        steps = [("Mul", one), ("Max", value)][: 1 + (node.op_type == "Abs")]
    chain(node, editor, value, *steps)
    return True
