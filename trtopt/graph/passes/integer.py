"""Integer operators of ONNX and ONNX Runtime as floating ones that read DequantizeLinear and give to QuantizeLinear.

What moves codes is written between such a pair as well, so that codes lie nowhere but between the two. Of quantization by the
range of each input nothing stays: TensorRT has fixed scales alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from trtopt.graph.op_types import QDQ, SELECTING
from trtopt.graph.passes.result import Line, Refused, set_input
from trtopt.graph.view import Editor, attribute, constant, is_constant, operand, read_once, sizes

INTEGER = ("DynamicQuantize", "QLinear", "QOrdered", "ConvInteger", "MatMulInteger", "MatMulNBits", "MatMulBnb4", "QAttention",
          "QGemm", "QMoE", "QEmbedLayerNormalization", "GatherBlockQuantized", "TRT_FP8")  # fmt: skip
_MOVING = (*SELECTING, "DepthToSpace", "SpaceToDepth", "MaxPool", "Pad", "Clip", "Tile")


class _Form(NamedTuple):
    """A floating operator, and slots of the integer one: codes, scale (-1: it is 1) and zero point of operands (none: by three
    from the third on) and of the result (None: floats), the bias (codes where the result is), and what is read as it is."""

    op: str
    operands: tuple[tuple[int, int, int], ...]
    result: tuple[int, int] | None = None
    bias: int = -1
    others: tuple[int, ...] = ()


_TWO = ((0, 1, 2), (3, 4, 5))
_ALONE = ("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax")
_FORMS = {
    "QLinearConv": _Form("Conv", _TWO, (6, 7), 8),
    "QLinearMatMul": _Form("MatMul", _TWO, (6, 7)),
    "QGemm": _Form("Gemm", _TWO, (7, 8), 6),
    "QLinearAdd": _Form("Add", _TWO, (6, 7)),
    "QLinearMul": _Form("Mul", _TWO, (6, 7)),
    "QLinearWhere": _Form("Where", ((1, 2, 3), (4, 5, 6)), (7, 8), others=(0,)),
    "QLinearConcat": _Form("Concat", (), (0, 1)),
    **{f"QLinear{op}": _Form(op, ((0, 1, 2),), (3, 4)) for op in _ALONE},
    "ConvInteger": _Form("Conv", ((0, -1, 2), (1, -1, 3))),
    "MatMulInteger": _Form("MatMul", ((0, -1, 2), (1, -1, 3))),
    "MatMulIntegerToFloat": _Form("MatMul", ((0, 2, 4), (1, 3, 5)), bias=6),
    "DynamicQuantizeMatMul": _Form("MatMul", ((1, 2, 3),), bias=4, others=(0,)),
}


class Integers:
    """The rewriting of one model.

    Attributes:
        written: how many of each operator are floating ones now.
        dynamic: something was quantized by the range of each input, and isn't any more; or weights are floats.
        refused: what has no such form, each with the reason.
    """

    def __init__(self, model: ir.Model) -> None:
        self.editor = Editor(model)
        self.written, self.dynamic, self.refused = Counter[str](), False, list[str]()
        self._scales: dict[ir.Value, tuple[ir.Value | None, ...]] = {}  # codes → scale and zero point
        self._origins: dict[ir.Value, ir.Value] = {}  # codes by an input's range → what they were made of
        for node in list(model.graph.all_nodes()):
            line = Line(self.editor, node)
            try:
                results = self._written(line, node)
            except Refused as reason:
                self.refused.append(f"{node.name} ({node.op_type}): {reason}")
                continue
            if results:
                self.written.update([node.op_type] * (node.op_type not in QDQ))
                ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, node.outputs, results)
        common.RemoveUnusedNodesPass()(model)
        for node in model.graph.all_nodes():
            if node.op_type == "DynamicQuantizeLinear":
                self.refused.append(f"{node.name} ({node.op_type}): what reads it has no floating form")

    def _constant(self, node: ir.Node, content: Any, dtype: Any = None) -> ir.Value:
        return self.editor.constant(f"{node.name}/constant", content, dtype)

    def _written(self, line: Line, node: ir.Node) -> Sequence[ir.Value]:
        """Return the values in place of a node's; none: it stays."""
        codes, op = operand(node, 0), node.op_type
        if op == "Identity" and is_constant(codes) and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], codes)
            return ()
        if op.startswith("TRT_FP8"):  # ModelOpt's, in domain trt
            self.written[op] += 1
            node.op_type = op = op.removeprefix("TRT_FP8")
            set_input(node, 2, self._constant(node, np.zeros((), ml_dtypes.float8_e4m3fn)))
        if op in QDQ:
            node.domain = ""  # ONNX Runtime's own has further types
        if op == "QuantizeLinear":
            self._scales[node.outputs[0]] = node.inputs[1], operand(node, 2)
        elif op == "DynamicQuantizeLinear":
            if any(value.is_graph_output() for value in node.outputs):
                raise Refused("its codes, or their scale, are an output of the model")
            if not _only_scales(node.outputs[1]):
                raise Refused("its scale, which each input has its own of, multiplies more than sums of its codes")
            self._origins[node.outputs[0]], self.dynamic = node.inputs[0], True
            self.written[op] += 1
            ir.convenience.replace_all_uses_with(node.outputs[1], self._constant(node, np.float32(1)))
        elif op == "DequantizeLinear" and codes in self._origins:
            return [line("Identity", self._origins[codes])]
        elif op in _MOVING and codes is not None:
            return self._moved(line, node, codes)
        elif op == "MatMulNBits":
            return [self._blocks(line, node)]
        elif op in _FORMS:
            return [self._computed(line, node, _FORMS[op])]
        elif op.startswith(INTEGER):
            raise Refused("it has no form in floating operators here")
        return ()

    def _moved(self, line: Line, node: ir.Node, codes: ir.Value) -> Sequence[ir.Value]:
        """Move floats in place of codes."""
        held, source, others = self._scales.get(codes), self._origins.get(codes), [*node.inputs[1:]]
        known = held or (self._ahead(codes) if source is None else None)
        if source is None and known is None:
            return ()
        source = source or line("DequantizeLinear", codes, *(known or ()))
        for slot in {"Pad": (2,), "Clip": (1, 2)}.get(node.op_type, ()):  # which are codes, too
            if operand(node, slot) is not None or node.op_type == "Pad":
                end, scale, zero = (constant(item) for item in (operand(node, slot), *(known or (None, None))))
                if end is None or scale is None or zero is None:
                    raise Refused("what it pads or bounds codes with isn't known")
                others[slot - 1] = self._constant(node, (end.astype(np.float64) - zero) * scale, scale.dtype)
        maker = codes.producer()
        if node.op_type == "Clip" and maker is not None and maker.op_type == "QuantizeLinear":
            source = maker.inputs[0]  # the same bounded before: codes between them may have room where all haven't
        made = ir.Node("", node.op_type, [source, *others], node.attributes.values(), num_outputs=len(node.outputs))
        line.nodes.append(made)
        for value in (made, *made.outputs):
            value.name = self.editor.fresh(f"{node.name}/moved")
        if held is None:
            self._origins.update(zip(node.outputs, made.outputs))
            node.graph.insert_after(node, line.nodes)  # what reads codes of it is written anew
            return ()
        results = [line("QuantizeLinear", value, *held) for value in made.outputs]
        self._scales.update(dict.fromkeys(results, held))
        return results

    def _ahead(self, codes: ir.Value) -> tuple[ir.Value | None, ...] | None:
        """Return the scale and zero point that inputs' and constants' codes are read with; None: they aren't codes."""
        for node, _ in codes.uses() if codes.dtype in (ir.DataType.INT8, ir.DataType.UINT8) else ():
            if node.op_type == "DequantizeLinear" and sizes(node.inputs[1]) in ((), (1,)):
                return node.inputs[1], operand(node, 2)
            if node.op_type in _MOVING and (found := self._ahead(node.outputs[0])) is not None:
                return found
        return None

    def _computed(self, line: Line, node: ir.Node, form: _Form) -> ir.Value:
        slots = form.operands or [(slot, slot + 1, slot + 2) for slot in range(2, len(node.inputs), 3)]
        attributes = {name: held.value for name, held in node.attributes.items() if name != "opset"}
        form_in, axis = sizes(operand(node, 0)), attributes.get("axis", 1)
        if attribute(node, "opset", 13) < 13 and axis != -1 and (form_in is None or axis != len(form_in) - 1):
            raise Refused("before opset 13 it is over all axes from one on")
        if attributes.pop("channels_last", 0):
            raise Refused("its channels are on the last axis, as ONNX Runtime's optimizer lays them out")
        values = [operand(node, slot) for slot in form.others]
        factor = self._factor(node) if node.op_type.endswith("Integer") else None
        for place, three in enumerate(slots, len(values)):
            values.append(self._read(line, node, place, three, factor if place else None))
        bias = operand(node, form.bias) if form.bias >= 0 else None
        if bias is not None and form.result:
            content, *scales = (constant(operand(node, at)) for at in (form.bias, *(scale for _, scale, _ in slots)))
            if content is None or any(scale is None for scale in scales):
                raise Refused("its bias, or a scale of it, isn't constant")
            scale = math.prod(np.float64(item).reshape(-1) for item in scales) * attribute(node, "alpha", 1.0)
            values.append(self._constant(node, content.reshape(-1) * scale, np.float32))
        result = line(form.op, *values, **attributes)
        line.nodes[-1].name = node.name
        if bias is not None and not form.result:
            result = line("Add", result, bias)
        if form.result and operand(node, form.result[0]) is not None:
            held = tuple(operand(node, slot) for slot in form.result)
            result = line("QuantizeLinear", result, *held)
            self._scales[result] = held
        elif node.op_type.endswith("Integer"):
            sums, dynamic = node.outputs[0], operand(node, 0) in self._origins
            whole = sums.is_graph_output() or {it.op_type for it in sums.consumers()} - {"Cast", *_MOVING * dynamic}
            if dynamic and whole:
                raise Refused("its sums are used as whole numbers, and those of an input's own range are floats here")
            if dynamic:
                sums.dtype = ir.DataType.FLOAT
            elif whole:
                result = line("Cast", result, to=int(ir.DataType.INT32))
        self.dynamic |= node.op_type == "DynamicQuantizeMatMul"
        return result

    def _factor(self, node: ir.Node) -> NDArray[Any] | None:
        """Take the constant that sums of codes are multiplied by, one or one a channel, out of the Mul behind their Cast: sums
        themselves pass FP16's range. None: it isn't there, or something else reads them."""
        value, channels = (
            node.outputs[0],
            (sizes(operand(node, 1)) or (None,))[0 if node.op_type == "ConvInteger" else -1],
        )
        for op in ("Cast", "Mul"):
            if not read_once(value) or (reader := value.uses()[0].node).op_type != op:
                return None
            place, value = value.uses()[0].idx, reader.outputs[0]
        number = _number(reader.inputs[1 - place])
        if number is None or number.size not in (1, channels) or not (number > 0).all():
            return None
        reader.replace_input_with(1 - place, self._constant(node, np.ones_like(number)))
        return number.reshape(-1) if number.size > 1 else number.reshape(())

    def _read(
        self, line: Line, node: ir.Node, place: int, slots: Sequence[int], factor: NDArray[Any] | None = None
    ) -> ir.Value | None:
        """Return what the codes of an operand stand for, times a factor."""
        codes, scale, zero = (operand(node, slot) if slot >= 0 else None for slot in slots)
        if codes in self._origins:
            origin = self._origins[codes]
            return origin if factor is None else line("Mul", origin, self._constant(node, factor))
        one, (count, *more) = np.float32(1) if factor is None else factor, (sizes(zero) or (1,))
        if more:
            raise Refused("its zero points are of more than one axis")
        scale = scale or self._constant(node, one if count in (None, 1) else np.broadcast_to(one, count))
        turned = node.op_type in ("QLinearConv", "ConvInteger") or attribute(node, "transB", 0)
        axis = 0 if turned else max(len(sizes(codes) or ()) - 2 + place, 0)
        if zero is not None and factor is not None and factor.size > 1 and (held := constant(zero)) is not None:
            zero = self._constant(node, np.broadcast_to(held, factor.shape))
        each = any(sizes(item) not in (None, (), (1,)) for item in (scale, zero))
        return line("DequantizeLinear", codes, scale, zero, **({"axis": axis} if each else {}))

    def _blocks(self, line: Line, node: ir.Node) -> ir.Value:
        """Write MatMulNBits: 4 bits as INT4, beside a product of blocks' sums with what zero points are off the middle."""
        inputs, outputs, bits, block = (attribute(node, name, 4) for name in ("K", "N", "bits", "block_size"))
        packed, scale, zero, order = held = [constant(operand(node, slot)) for slot in range(1, 5)]
        if packed is None or scale is None or any(operand(node, slot) and held[slot - 1] is None for slot in (3, 4)):
            raise Refused("its codes, scales or zero points aren't constant")
        count, row = -(-inputs // block), np.arange(inputs) // block
        codes, scale = _unpacked(packed.reshape(outputs, -1), bits)[:, :inputs].T, scale.reshape(outputs, count).T
        zeros = np.full((outputs, count), 1 << bits - 1) if zero is None else zero.reshape(outputs, -1)
        zeros = (_unpacked(zeros, bits) if zeros.dtype == np.uint8 else zeros)[:, :count].T.astype(np.float64)
        if bits == 4 and not inputs % block and (order is None or (order == row).all()):
            turned = scale < 0  # TensorRT has positive scales alone
            size = np.maximum(np.abs(scale), np.finfo(np.float16).smallest_subnormal)
            signed = np.where(turned[row], 15 - codes, codes).astype(np.int8) - 8
            stored = self._constant(node, signed, ml_dtypes.int4), self._constant(node, size)
            result = line("MatMul", node.inputs[0], line("DequantizeLinear", *stored, axis=0, block_size=block))
            if (rest := (8 - np.where(turned, 15 - zeros, zeros)) * size).any():
                sums = line("MatMul", node.inputs[0], self._constant(node, row[:, None] == range(count), scale.dtype))
                result = line("Add", result, line("MatMul", sums, self._constant(node, rest, scale.dtype)))
        else:
            row = row if order is None else order
            weight = (codes - zeros[row]) * scale.astype(np.float64)[row]
            result, self.dynamic = line("MatMul", node.inputs[0], self._constant(node, weight, scale.dtype)), True
        next(made for made in line.nodes if made.op_type == "MatMul").name = node.name
        return result if operand(node, 5) is None else line("Add", result, operand(node, 5))


def _number(value: ir.Value | None) -> NDArray[Any] | None:
    """Return a constant, or a product of constants."""
    maker = None if value is None else value.producer()
    if (held := constant(value)) is not None or maker is None or maker.op_type != "Mul":
        return held
    one, other = map(_number, maker.inputs)
    return None if one is None or other is None else one * other


def _only_scales(value: ir.Value) -> bool:
    """Tell if a scale multiplies sums of codes alone, by itself or with other scales."""
    return not value.is_graph_output() and all(_scales(node, slot) for node, slot in value.uses())


def _scales(node: ir.Node, slot: int) -> bool:
    if node.op_type in ("Identity", *_MOVING):
        return _only_scales(node.outputs[0])
    if node.op_type != "Mul":
        return bool(node.op_type.startswith(("DequantizeLinear", *INTEGER)))
    other = node.inputs[1 - slot]
    maker = None if other is None else other.producer()
    while maker is not None and maker.op_type in ("Cast", *_MOVING) and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    if is_constant(other) or (maker is not None and maker.op_type == "DynamicQuantizeLinear"):
        return _only_scales(node.outputs[0])
    return maker is not None and bool(maker.op_type.endswith("Integer"))


def _unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes of each row, the low bits of a byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray(packed[..., None] >> shifts & (1 << bits) - 1, np.uint8).reshape(len(packed), -1)
