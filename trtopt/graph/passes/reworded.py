"""Other words for what TensorRT computes wrong around codes.

Seen (docs/results/certify.md): behind a DequantizeLinear 8.6.0 takes a Clip's least for 0, 10.6.0 gives other values for Neg
and Abs. With multiplications, Max and Min, which it doesn't move in front of the DequantizeLinear, both are right. Q/DQ of
activations with a scale for each place of an axis give zeros or NaN on 10.6.0 in FP16. A convolution in INT8 that writes FP16
behind an activation mixes up its channels on 10.6.0 if they are more than 32; matrix products of very small scales are zero.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.core.values import Kept, Precision
from trtopt.graph.op_types import ELEMENTWISE, MOVING, QDQ, SCALE_PRESERVING, SELECTING
from trtopt.graph.passes.result import Line, PassResult, become, chain
from trtopt.graph.view import Editor, attribute, constant, drop_unread, is_constant, is_float, made_by, operand, sizes

_FUSED = ELEMENTWISE - MOVING - {*QDQ, "Add", "Clip", "Relu", "Sub"}
_WITH_IT = SCALE_PRESERVING | {"Abs", "Clip", "Concat", "Neg", "Relu"}  # what TensorRT may move in front of one


def reword(model: ir.Model, *, everywhere: bool = False) -> PassResult:
    """Write Neg, Abs, and Clip with a least other than 0, behind DequantizeLinear, in other operators, and scales along an axis
    of what isn't constant as factors; name the nodes.

    Args:
        everywhere: not behind codes alone are Neg and Abs rewritten: 8.6 has no INT8 kernel for them, and asks for one.
    """
    editor, changes, behind = Editor(model), list[str](), set[ir.Value]()
    for node in list(model.graph.all_nodes()):
        name, value = str(node.name), node.inputs[0] if node.inputs else None
        any_place = everywhere and node.op_type in ("Abs", "Neg") and is_float(value)
        if ((any_place or value in behind) and _reword(node, value, editor)) or (
            node.op_type in QDQ and _by_tensor(node, editor)
        ):
            changes.append(name)
        elif node.op_type == "DequantizeLinear" or (node.op_type in _WITH_IT and not behind.isdisjoint(node.inputs)):
            behind.update(node.outputs)
    drop_unread(model.graph)
    return PassResult(model, changes)


def unfuse(model: ir.Model, reason: str, *, whole: bool = False) -> PassResult:
    """Compute in FP32 what TensorRT would make a part of a quantized convolution that writes FP16 or BF16.

    Args:
        reason: why they are kept in FP32.
        whole: also what is only read quantized again, but for products: 10.6 doesn't build it by the model's own Q/DQ.
    """
    editor, kept, behind = Editor(model), list[Kept](), set[ir.Value]()
    for node in list(model.graph):
        read = [value for value in node.inputs if value is not None]
        if _in_int8(node) or (node.op_type in MOVING and read and read[0] in behind):
            behind.update(node.outputs)
        elif node.op_type in _FUSED and not behind.isdisjoint(read) and _short(node, whole) and not _swish(node):
            kept.append(Kept(str(node.name), node.op_type, Precision.FP32, reason))
            _widen(node, editor)
    return PassResult(model, [item.node for item in kept], tuple(kept))


def _in_int8(node: ir.Node) -> bool:
    """Tell if it is a convolution on INT8; not of groups: those run in FP16 before an activation."""
    codes = made_by(node.inputs[0], "DequantizeLinear") if node.op_type == "Conv" else None
    if codes is None or attribute(node, "group", 1) > 1:
        return False
    zero = constant(operand(codes, 2))
    return zero is None or zero.dtype.kind in "iu"


def _short(node: ir.Node, whole: bool) -> bool:
    """Tell if it gives FP16 or BF16 that is read as such, or by whomever: `whole`, and Erf, whose codes are wrong, too."""
    result = node.outputs[0]
    floats = result.is_graph_output() or any(use.op_type != "QuantizeLinear" for use in result.consumers())
    any_reader = node.op_type == "Erf" or (whole and node.op_type != "Mul")
    return is_float(result) and result.dtype is not ir.DataType.FLOAT and (floats or any_reader)


def _swish(node: ir.Node) -> bool:
    """Tell if it is one of the two nodes of x · sigmoid(x), which TensorRT has kernels of its own for."""
    products = node.outputs[0].consumers() if node.op_type == "Sigmoid" else [node]
    pairs = [pair for item in products if item.op_type == "Mul" for pair in (item.inputs, item.inputs[::-1])]
    gates = [(made_by(gate, "Sigmoid"), value) for gate, value in pairs]
    return any(gate is not None and gate.inputs[0] is value for gate, value in gates)


def _widen(node: ir.Node, editor: Editor) -> None:
    """Let a cast take a node's place, of the same operator in FP32."""
    line, narrow = Line(editor, node, ir.DataType.FLOAT), node.outputs[0].dtype
    read = [line("Cast", value, to=ir.DataType.FLOAT) if is_float(value) else value for value in node.inputs]
    wide = line(node.op_type, *read, **node.attributes)
    node.graph.insert_before(node, line.nodes)
    line.nodes[-1].name, node.name = node.name, line.nodes[-1].name
    become(node, "Cast", [wide], to=narrow)


def unquantize_small(model: ir.Model, least: float, base: Precision) -> PassResult:
    """Let matrix products whose two scales multiply to less than `least` read their weights as floats, which
    `with_float_weights` has put in front of the codes: TensorRT computes them in `base` then."""
    kept = list[Kept]()
    for node in model.graph:
        read = node.inputs[:2] if node.op_type in ("Gemm", "MatMul") else ()
        pairs = [pair for value in read if (pair := made_by(value, "DequantizeLinear")) is not None]
        scales = [float(scale.max()) for pair in pairs if (scale := constant(pair.inputs[1])) is not None]
        if len(scales) < 2 or (product := scales[0] * scales[1]) >= least:
            continue
        for slot, pair in enumerate(pairs):
            quantizer = made_by(pair.inputs[0], "QuantizeLinear")
            if quantizer is not None and is_constant(quantizer.inputs[0]):
                node.replace_input_with(slot, quantizer.inputs[0])
                reason = f"its scales multiply to {product:.1g}, which TensorRT 10.6 takes for zero"
                kept.append(Kept(str(node.name), node.op_type, base, reason))
    drop_unread(model.graph)
    return PassResult(model, [item.node for item in kept], tuple(kept))


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


def _is_weight(value: ir.Value | None) -> bool:
    """Tell whether it is constant, or codes of what is."""
    node = None if value is None else value.producer()
    codes = node is not None and node.op_type in ("QuantizeLinear", *SELECTING)
    return is_constant(value) or (codes and node is not None and _is_weight(node.inputs[0]))


def _by_tensor(node: ir.Node, editor: Editor) -> bool:
    """Divide in front of codes of scale 1, or multiply behind them: the same numbers to the bit."""
    scale, zero, form = constant(node.inputs[1]), constant(operand(node, 2)), sizes(node.inputs[0])
    if form is None or _is_weight(node.inputs[0]) or scale is None or scale.ndim != 1 or scale.size < 2:
        return False
    if zero is not None and zero.astype(bool).any():
        return False
    axis, of_one = attribute(node, "axis", 1) % len(form), node.inputs[0]
    along = editor.constant(f"{node.name}/scale", scale.reshape(np.where(np.arange(len(form)) == axis, -1, 1)))
    line = Line(editor, node, along.dtype)
    held = [editor.constant(f"{node.name}/one", np.ones((), scale.dtype))]
    held += [editor.constant(f"{node.name}/zero", np.zeros((), zero.dtype))] if zero is not None else []
    if node.op_type == "QuantizeLinear":
        of_one = line("Div", of_one, along)
        for slot, item in enumerate((of_one, *held)):
            node.replace_input_with(slot, item)
        node.attributes.pop("axis", None)
    else:
        chain(node, editor, line("DequantizeLinear", of_one, *held), ("Mul", along))
    node.graph.insert_before(node, line.nodes)
    return True
