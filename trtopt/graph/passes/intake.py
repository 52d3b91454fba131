"""Quantized models of any maker in the form that all else here reads: Q/DQ that TensorRT can run.

It has signed codes with a zero point of 0. Others that have room in these keep their numbers, those that haven't get wider
steps, and what no product reads is written in floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import ModelProto
from onnx_ir.passes import common

from trtopt.core.errors import ModelError
from trtopt.core.words import first_of
from trtopt.graph.guard import guarded
from trtopt.graph.op_types import QDQ, WEIGHTED
from trtopt.graph.passes.integer import INTEGER, Integers
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.result import Line, PassResult, become, set_input
from trtopt.graph.proto import LARGE, STANDARD, all_nodes, name_nodes, skeleton
from trtopt.graph.view import Editor, along, attribute, constant, constant_tensor, operand, share_weights, sizes

_LIMITS = {ir.DataType[f"INT{bits}"]: (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (4, 8, 16, 32)}
_LIMITS |= {ir.DataType[f"UINT{bits}"]: (0, (1 << bits) - 1) for bits in (4, 8, 16, 32)}
_INT8 = ir.DataType.INT8
_LEAST = 2.0**-24  # FP16's least number, in which engines hold scales
_SAME = "tensors in other codes, or in floating point, with the same numbers"
_WIDER = "activations with zero points moved to symmetric scales, up to twice as wide: samples give others anew"
_ANEW = "weights with zero points coded anew"
_LONG = "activations left in floating point"
_FLOAT = "weights in floating point: `int8=True` with samples (`images=`, `data=`) quantizes them anew"
_INSTEAD = "give the float model that it was made from, and let build quantize that (`int8=True`)"


@dataclass(frozen=True)
class Taken:
    """A model as it is worked on.

    Attributes:
        proto: the model itself where it isn't quantized, or only as TensorRT has it.
        changes: what was written otherwise, in words; none: nothing was.
        exact: its numbers are the model's, but for rounding in floating point.
        refused: why it can't be taken, and what to do instead; empty: it can.
    """

    proto: ModelProto = field(repr=False)
    changes: tuple[str, ...] = ()
    exact: bool = True
    refused: str = ""

    def __str__(self) -> str:
        return f"quantized already: {'; '.join(self.changes)}"


def take_in(proto: ModelProto, *, drop: bool = False) -> Taken:
    """Write what is quantized of a model as TensorRT can run it; the model itself where it can already. `drop`: without scales,
    which are measured anew."""
    ops = {(node.domain, node.op_type) for node in all_nodes(proto.graph)}
    names = {op for _, op in ops}
    if names.isdisjoint(QDQ) and not any(name.startswith(INTEGER) for name in names):
        return Taken(proto)
    newest = "MatMulNBits" in names or any("eLinear" in op and domain not in STANDARD for domain, op in ops)
    try:
        light = skeleton(proto, LARGE, external="weights")  # reading one names its nameless constants
        name_nodes(light)
        share_weights(model := to_ir_at(light, 21 if newest else 13), proto)
        if (integers := Integers(model)).refused:
            why = first_of(integers.refused, 3)
            raise ModelError(f"it is quantized already, in what TensorRT hasn't ({why}): {_INSTEAD}")
        pairs = _Pairs(model, drop, integers.dynamic or drop)
        common.RemoveUnusedNodesPass()(model)
        written = ", ".join(f"{count} {op}" for op, count in integers.written.items())
        changes = [f"{written} written as floating operators and Q/DQ"] if written else []
        changes += [f"{count} {what}" for what, count in pairs.counts.items()]
        changes += [_FLOAT] * (integers.dynamic or drop)
        made = guarded(proto, PassResult(model, changes), "what is quantized can't be written as Q/DQ", _INSTEAD)
    except ModelError as error:
        return Taken(proto, refused=str(error))
    return Taken(made, tuple(changes), {*pairs.counts} <= {_SAME} and not (integers.dynamic or drop))


def _spread(held: Any, shape: Sequence[int], axis: int, block: int = 0) -> NDArray[np.float64]:
    """Return scales or zero points as they meet codes: one, one for each place on `axis`, or for each `block` of places."""
    wide = np.asarray(held, np.float64)
    if block and wide.ndim:
        return np.asarray(np.repeat(wide, block, axis).take(range(shape[axis]), axis))
    return np.asarray(along(axis % len(shape), wide, len(shape)) if wide.size > 1 else wide.reshape(()))


class _Held(NamedTuple):
    """Constants of a Q or DQ of whole numbers."""

    scale: NDArray[Any]
    zero: NDArray[np.int64]
    dtype: ir.DataType
    limits: tuple[int, int]
    axis: int
    block: int

    @property
    def native(self) -> bool:
        """Return whether TensorRT has such codes, of weights."""
        signed = self.dtype in (_INT8, ir.DataType.INT4) and self.scale.shape != (1,)
        return signed and not self.zero.any() and bool((self.scale >= _LEAST).all())


def _held(node: ir.Node) -> _Held | None:
    scale, codes, zero = constant(operand(node, 1)), node.inputs[0], constant_tensor(operand(node, 2))
    block, axis, form = attribute(node, "block_size", 0), attribute(node, "axis", 1), sizes(codes) or ()
    if scale is None or codes is None or (operand(node, 2) is not None and zero is None):
        return None
    dtype = ir.DataType(attribute(node, "output_dtype", 0) or ir.DataType.UINT8) if zero is None else zero.dtype
    if zero is None and node.op_type == "DequantizeLinear" and codes.dtype is not None:
        dtype = codes.dtype
    content = np.zeros(scale.shape, np.int64) if zero is None else zero.numpy().astype(np.int64)
    many = {item.size for item in (scale, content)} - {1}
    fits = block or not many or (-len(form) <= axis < len(form) and many == {form[axis]})
    return _Held(scale, content, dtype, _LIMITS[dtype], axis, block) if dtype in _LIMITS and fits else None


def _widening(low: Any, high: Any) -> Any:
    """Return how many times as wide steps have to be for codes less their zero point to have room in signed ones of 8 bits."""
    return np.maximum(1.0, np.maximum(low / -128, high / 127))


class _Pairs:
    """The rewriting of Q and DQ; `counts`: what was changed → how often."""

    def __init__(self, model: ir.Model, drop: bool, recover: bool) -> None:
        """Rewrite all; `recover`: weights stay in codes of 8 bits only where something else is quantized."""
        self.editor, self.counts, self.drop = Editor(model), Counter[str](), drop
        self._whole: dict[ir.Value, ir.Value] = {}  # codes that are computed in floats → the same as floats
        quantizing, dequantizing = ([node for node in model.graph.all_nodes() if node.op_type == op] for op in QDQ)
        left = [node for node in quantizing if self._quantize(node)]
        for node in dequantizing:
            self._dequantize(node, recover and not left)

    def _quantize(self, node: ir.Node) -> bool:
        """Rewrite a Q and what dequantizes its codes; tell whether it stays one."""
        held, value, codes = _held(node), node.inputs[0], node.outputs[0]
        if held is None or value is None or held.block or (held.native and held.dtype is _INT8 and not self.drop):
            return True
        if (content := constant(value)) is not None:
            scale, zero = (_spread(item, content.shape, held.axis) for item in (held.scale, held.zero))
            made = np.clip(np.rint(content / np.maximum(scale, _LEAST)) + zero, *held.limits)
            coded = self.editor.constant(f"{codes.name}_codes", made, held.dtype.numpy())
            ir.convenience.replace_all_uses_with(codes, coded)
            return False
        readers = [use.node for use in codes.uses()]
        own = [reader for reader in readers if reader.op_type == "DequantizeLinear" and (other := _held(reader))
               and all(map(np.array_equal, held, other))]  # fmt: skip
        if len(own) < len(readers) or codes.is_graph_output():
            return self._give(node, held, own)
        line, left = Line(self.editor, node), self.drop or held.limits[1] > 255
        if held.zero.size > 1 and held.zero.any():
            raise ModelError(
                f"{value.name} is quantized with a zero point for each channel, which TensorRT hasn't: {_INSTEAD}"
            )
        value, low, high = self._bounded(line, value, held, own, left)
        factor = float(_widening(low, high))
        node.graph.insert_before(node, line.nodes)
        if left:
            for reader in own:
                become(reader, "Identity", [value])
            self.counts[_LONG] += 1
            return False
        node.replace_input_with(0, value)
        for item in (node, *own):
            self._rescale(item, np.asarray(held.scale * factor, held.scale.dtype), np.int8)
        self.counts[_SAME if factor == 1 else _WIDER] += 1
        return True

    def _rescale(self, node: ir.Node, scale: NDArray[Any], dtype: Any) -> None:
        node.attributes.pop("output_dtype", None)
        scale = scale.reshape(()) if scale.size == 1 else scale  # else TensorRT runs it in floats
        set_input(node, 1, self.editor.constant(f"{node.outputs[0].name}_scale", scale))
        set_input(node, 2, self.editor.constant(f"{node.outputs[0].name}_zero_point", np.zeros(scale.shape, dtype)))

    def _bounded(
        self, line: Line, value: ir.Value, held: _Held, own: Sequence[ir.Node], left: bool
    ) -> tuple[ir.Value, int, int]:
        """Bound what is quantized as its codes do, in floats where it is `left`: many a maker leaves Relu and Clip to
        them. Also return the least and largest code, less the zero point."""
        low, high = int(held.limits[0] - held.zero.max()), int(held.limits[1] - held.zero.min())
        # No codes bound any more; of symmetric ones only what they cut off, which is little.
        bare, each = left and not held.native, held.scale.size > 1
        lows, highs = ([], []) if each else _ends(value, own, held.scale.item())
        free = all(end < low for end in lows), all(end > high for end in highs)
        free = free[0] and (bare or low > -128), free[1] and (bare or high != 127)
        low, high = max([low, *lows]), min([high, *highs])
        factor = _widening(low, high)
        needed = free[0] and (left or low / factor > -127.5), free[1] and (left or high / factor < 126.5)
        if low == 0 and needed == (True, False) and not each:
            maker = value.producer()
            positive = maker is not None and maker.op_type in ("Sigmoid", "Softmax", "HardSigmoid")
            return value if positive else line("Relu", value), low, high
        steps = _spread(held.scale, [size or 1 for size in sizes(value) or ()], held.axis)
        ends = [np.asarray(end * steps, held.scale.dtype) for end in (low, high)]
        if not each:
            bounds = [self.editor.constant(f"{value.name}_end", end) if cut else None for end, cut in zip(ends, needed)]
            return line("Clip", value, *bounds) if any(needed) else value, low, high
        for op, end, cut in zip(("Max", "Min"), ends, needed):  # a Clip's ends are numbers
            value = line(op, value, self.editor.constant(f"{value.name}_end", end)) if cut else value
        return value, low, high

    def _give(self, node: ir.Node, held: _Held, own: list[ir.Node]) -> bool:
        """Compute codes that are outputs, or that something else reads, in floats; a pair has its own."""
        line, value, name = Line(self.editor, node), node.inputs[0], node.outputs[0].name
        twin = line("QuantizeLinear", value, *node.inputs[1:])
        for reader in own:
            reader.replace_input_with(0, twin)
        numbers = (np.asarray(item, held.scale.dtype) for item in (held.scale, held.zero, *held.limits))
        scale, zero, *limits = (self.editor.constant(f"{name}_number", item) for item in numbers)
        near = line("Add", line("Round", line("Div", value, scale)), zero)
        codes = line("Cast", whole := line("Clip", near, *limits), to=int(held.dtype))
        codes.dtype, self._whole[codes] = held.dtype, whole  # TensorRT casts to uint8 at outputs alone
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, node.outputs, [codes])
        self.counts[_SAME] += 1
        return self._quantize(line.nodes[0])

    def _dequantize(self, node: ir.Node, recover: bool) -> None:
        codes, held = node.inputs[0], _held(node)
        maker = None if codes is None else codes.producer()
        if codes is None or held is None or (maker is not None and maker.op_type == "QuantizeLinear"):
            return
        content, slots = constant(codes), _slots(node)
        coded = held.limits[1] < 256 and slots <= {0, 1}
        if content is None:
            if not held.native or codes in self._whole:
                self._take(node, codes, held)
        elif not (coded or (held.native and content.size > 1 and 2 not in slots)) or (recover and not held.block):
            self._float(node, held, content)
        elif not held.native:
            self._recode(node, held, content)

    def _float(self, node: ir.Node, held: _Held, content: NDArray[Any]) -> None:
        scale, zero = (_spread(item, content.shape, held.axis, held.block) for item in (held.scale, held.zero))
        numbers = ((content.astype(np.float64) - zero) * scale).astype(held.scale.dtype)
        become(node, "Constant", [], value=ir.tensor(numbers))
        self.counts[_SAME] += 1

    def _recode(self, node: ir.Node, held: _Held, content: NDArray[Any]) -> None:
        """Give a weight signed codes: the same less the zero point where these have room, else of wider steps."""
        codes, scale = content - _spread(held.zero, content.shape, held.axis, held.block), held.scale
        small = held.limits[1] < 16 and codes.min() >= -8 and codes.max() <= 7
        if held.block and not (small and (scale >= _LEAST).all()):
            self._float(node, held, content)
            return
        factor = 1.0 if small else float(_widening(codes.min(), codes.max()))
        if not held.block:
            scale = np.maximum(scale * factor, _LEAST).astype(scale.dtype)
            codes = np.rint(codes * _spread(held.scale / scale, content.shape, held.axis))
        dtype = ml_dtypes.int4 if small else np.int8
        node.replace_input_with(0, self.editor.constant(f"{node.outputs[0].name}_codes", codes, dtype))
        self._rescale(node, scale, dtype)
        self.counts[_SAME if factor == 1 else _ANEW] += 1

    def _take(self, node: ir.Node, codes: ir.Value, held: _Held) -> None:
        """Cast codes that come from elsewhere, such as an input, and quantize what they stand for, if TensorRT can."""
        line, dtype, form = Line(self.editor, node), held.scale.dtype, [size or 1 for size in sizes(codes) or ()]
        # FP16 has whole numbers to 2,048.
        counted = dtype if held.limits[1] < 256 else np.dtype(np.int32 if held.limits[1] < 1 << 31 else np.int64)
        zero, scale = (_spread(item, form, held.axis) for item in (held.zero, held.scale))
        value = line("Cast", self._whole.get(codes, codes), to=int(ir.DataType.from_numpy(counted)))
        value = line("Sub", value, self.editor.constant(f"{node.name}_zero", zero, counted))
        value = value if counted == dtype else line("Cast", value, to=int(ir.DataType.from_numpy(dtype)))
        value = line("Mul", value, self.editor.constant(f"{node.name}_scale", scale, dtype))
        # Else TensorRT has no such codes of activations.
        paired = counted == dtype and held.scale.size == held.zero.size == 1
        if paired:  # with a zero point: without one codes are uint8
            pair = node.inputs[1], self.editor.constant(f"{node.name}_zero_point", held.zero, held.dtype.numpy())
            value = line("DequantizeLinear", line("QuantizeLinear", value, *pair), *pair)
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], line.nodes, node.outputs, [value])
        if paired:
            self._quantize(line.nodes[-2])
        else:
            self.counts[_SAME] += 1


def _ends(value: ir.Value, own: Sequence[ir.Node], scale: float) -> tuple[list[int], list[int]]:
    """Return bounds, in codes, that stand right before a value's quantization, or right behind it."""
    readers = {reader for node in own for reader in node.outputs[0].consumers()}
    shared = len(readers) > 1 or any(node.outputs[0].is_graph_output() for node in own)
    lows, highs = list[int](), list[int]()
    for node in (value.producer(), *(() if shared else readers)):
        if node is not None and node.op_type == "Clip":
            low, high = (constant(operand(node, slot)) for slot in (1, 2))
            lows += [] if low is None else [int(np.floor(low.item() / scale + 1e-3))]
            highs += [] if high is None else [int(np.ceil(high.item() / scale - 1e-3))]
        lows += [0] if node is not None and node.op_type == "Relu" else []
    return lows, highs


def _slots(node: ir.Node) -> set[int]:
    """Return in which slots products read a weight, also transposed; -1: something else reads it."""
    found = {-1} if node.outputs[0].is_graph_output() else set[int]()
    for reader, slot in node.outputs[0].uses():
        inner = _slots(reader) if reader.op_type == "Transpose" else {slot if reader.op_type in WEIGHTED else -1}
        found |= inner
    return found
