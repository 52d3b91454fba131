"""ONNX as the parser of TensorRT 8.6 reads it: an older opset, and nothing that it passes over.

Some importers of 8.6 don't look at an attribute, or at a missing input, and say nothing: the network then computes something
else, or the process ends. Such a node is written in other words where that is exact and short, and refused by name elsewhere.
Sources: onnx-tensorrt, release/8.6-GA: builtin_op_importers.cpp, onnx2trt_utils.cpp, ConditionalHelpers.cpp; NvInfer.h, 8.6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from trtopt.graph.guard import guarded
from trtopt.graph.op_types import RECURRENT
from trtopt.graph.passes.opset import lower_opset
from trtopt.graph.passes.result import Line, PassResult, Refused, become, rewrite_nodes, set_input
from trtopt.graph.proto import STANDARD
from trtopt.graph.view import Editor, along, attribute, constant, constant_tensor, drop_unread, operand, sizes, to_ir

_STORED = (ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN)


def readable(model: ir.Model, max_opset: int | None) -> PassResult:
    """Rewrite a graph as a generation's parser reads it (`Capabilities.max_opset`; None: as it is).

    Raises:
        UnsupportedOperator: an operator, or a way of using one, doesn't exist at that opset, or isn't seen by the parser.
    """
    if max_opset is None:
        return PassResult(model)
    lowered, failure = lower_opset(model, max_opset).changes, "TensorRT 8.6 would compute something else for"
    rewritten = rewrite_nodes(model, _rewrite, failure, "build with a later generation, or export these otherwise")
    return PassResult(model, [*lowered, *rewritten])


def _rewrite(node: ir.Node, editor: Editor) -> bool:
    before = node.inputs, dict(node.attributes)
    while node.inputs and node.inputs[-1] is None:  # a null that importers read through
        node.resize_inputs(len(node.inputs) - 1)
    op = node.op_type if node.domain in STANDARD else ""
    if op in _REFUSED and (found := _REFUSED[op][0](node)):
        raise Refused(_REFUSED[op][1].format(found))
    if op in _RULES:
        _RULES[op](node, editor)
    return (node.inputs, dict(node.attributes)) != before


def as_read(proto: ModelProto, result: PassResult) -> ModelProto:
    """Return what `readable` made of a model, compared with it; the model itself where it is read as it is.

    Raises:
        ModelError: what came out isn't valid, or computes something else.
    """
    return guarded(proto, result, "the model can't be written as TensorRT 8.6 reads it", "please report the model")


def readable_model(proto: ModelProto, max_opset: int | None) -> ModelProto:
    """`readable` and `as_read` for a message."""
    return proto if max_opset is None else as_read(proto, readable(to_ir(proto), max_opset))


def with_float_weights(model: ir.Model) -> PassResult:
    """Give every constant of INT8 or FP8 behind a DequantizeLinear as floats and a QuantizeLinear, which gives the codes.

    The builder of 8.6 takes stored INT8 codes for most convolutions. For a matrix product, or convolutions that it would join
    since they read the same tensor, it stops with an assertion (seen on an H200: docs/results/zoo.md). 10.6 runs no layer in
    FP8 whose weight is stored as codes and, where a depthwise convolution has to run in floating point, gives NaN without a
    word (docs/results/tensorrt-10.md).
    """
    editor, dequantized, changes = Editor(model), dict[tuple[Any, ...], ir.Value](), list[str]()
    for node in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
        codes, scale = node.inputs[0], constant(node.inputs[1])
        if scale is None or not codes.is_initializer() or codes.dtype not in _STORED:
            continue
        attributes = {name: held.value for name, held in node.attributes.items()}
        key = (*node.inputs, str(attributes))
        if key not in dequantized:
            content = np.asarray(constant(codes), np.float32)
            if scale.size > 1:
                scale = along(attribute(node, "axis", 1) % content.ndim, scale, content.ndim)
            floats = editor.constant(f"{codes.name}_float", (content * scale).astype(scale.dtype))
            again = f"{codes.name}_again", codes.dtype, codes.shape
            name = editor.fresh(f"{codes.name}/QuantizeLinear")
            quantize = editor.node("QuantizeLinear", [floats, *node.inputs[1:]], *again, name=name, **attributes)
            model.graph.insert_before(node, quantize)
            dequantized[key] = quantize.outputs[0]
        node.replace_input_with(0, dequantized[key])
        changes.append(str(node.name))
    drop_unread(model.graph)
    return PassResult(model, changes)


def _fill(node: ir.Node, **defaults: Any) -> None:
    """Write out ONNX's own defaults, where the parser has others."""
    for name, value in defaults.items():
        node.attributes.setdefault(name, ir.convenience.convert_attribute(name, value))


def _shape(node: ir.Node, editor: Editor) -> None:
    """`start` and `end` (opset 15) aren't read, the whole shape comes out: cut it afterwards."""
    if not node.attributes:
        return
    line = Line(editor, node, ir.DataType.INT64)
    bounds = [attribute(node, "start", 0)], [attribute(node, "end", 2**31 - 1)], [0]
    whole = line("Shape", *node.inputs)
    node.graph.insert_before(node, line.nodes)
    become(node, "Slice", [whole, *map(line.integers, bounds)])


def _gather(node: ir.Node, editor: Editor) -> None:
    """A negative index along an axis of dynamic size is undefined: count from the end by the size."""
    index, shape, axis = constant(node.inputs[1]), sizes(node.inputs[0]), attribute(node, "axis", 0)
    if index is None or not (index < 0).any() or (shape and shape[axis] is not None):
        return
    if axis < 0 and not shape:
        raise Refused("its negative indices along an axis of dynamic size are undefined there")
    line = Line(editor, node, ir.DataType.INT64)
    where = line.integers(axis % len(shape) if axis < 0 and shape else axis)
    size = line("Gather", line("Shape", node.inputs[0]), where)
    back = line("Mul", line.integers(index < 0), size)
    indices = line("Add", line.integers(index), back)
    node.graph.insert_before(node, line.nodes)
    set_input(node, 1, indices)


def _trilu(node: ir.Node, editor: Editor) -> None:
    """A missing `upper` means 0."""
    if node.inputs[0] is None or node.inputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BOOL):
        raise Refused(
            "it multiplies what it cuts away by 0, which makes NaN of infinities: use Where with compared positions"
        )
    _fill(node, upper=1)


def _suppress(node: ir.Node, editor: Editor) -> None:
    """Without a threshold of scores, those of 0 and less are dropped."""
    if operand(node, 4) is None:
        lowest = [np.finfo(np.float32).min]
        set_input(node, 4, editor.constant(f"{node.outputs[0].name}_all", lowest, np.float32))


def _convolve(node: ir.Node, editor: Editor) -> None:
    """A weight that isn't constant, as behind a DequantizeLinear, doesn't tell the kernel's size."""
    weight, shape = node.inputs[1], sizes(node.inputs[1])
    if weight is not None and not weight.is_initializer() and shape and None not in shape[2:]:
        _fill(node, kernel_shape=shape[2:])


def _normalize(node: ir.Node, editor: Editor) -> None:
    """It has no LayerNormalization without a bias."""
    if operand(node, 2) is None and (scale := constant(node.inputs[1])) is not None:
        set_input(node, 2, editor.constant(f"{node.outputs[0].name}_bias", np.zeros_like(scale)))


def _quantize(node: ir.Node, editor: Editor) -> None:
    """A missing axis means 0 there; unsigned codes are clamped as signed ones; a missing zero point ends the parser."""
    scale, zero = constant(node.inputs[1]), constant_tensor(operand(node, 2))
    if node.op_type == "QuantizeLinear" if zero is None else zero.dtype is ir.DataType.UINT8:
        raise Refused("it quantizes to uint8, of which TensorRT has none: quantize symmetrically to int8")
    if scale is not None and scale.size > 1:
        _fill(node, axis=1)
    if scale is not None and operand(node, 2) is None:
        set_input(node, 2, editor.constant(f"{node.outputs[0].name}_zero_point", np.zeros(scale.shape), np.int8))


def _reads_all_axes(node: ir.Node) -> bool:
    axes = constant(operand(node, 1))
    unread = operand(node, 1) is None or (axes is not None and not axes.size)
    return bool(attribute(node, "noop_with_empty_axes")) and unread


def _collects(node: ir.Node) -> bool:
    return any(value.name for value in node.outputs[max(0, len(node.inputs) - 2) :])


def _reduction(node: ir.Node) -> str:
    return str(attribute(node, "reduction", "none")).replace("none", "")


_REDUCES = (_reduction, "its reduction {!r} isn't read: values would be replaced")
_LAYOUT = (lambda node: attribute(node, "layout"), "its layout {} (batch first) isn't read; export it with layout 0")
# Operator → what isn't read, where a node has it, and why it is refused.
_REFUSED: Mapping[str, tuple[Callable[[ir.Node], Any], str]] = {
    **dict.fromkeys(RECURRENT, _LAYOUT),
    "Constant": (
        lambda node: [name for name in node.attributes if name.startswith("value_int")],
        "its {} isn't read; give it `value`, or a graph that folds",
    ),
    "ConvTranspose": (
        lambda node: attribute(node, "output_shape"),
        "it gives its output's shape {}, padded there otherwise; give it pads instead",
    ),
    "If": (
        lambda node: sum(bool(value.name) for value in node.outputs) > 1,
        "its outputs, of which it has several, come in any order",
    ),
    "Loop": (_collects, "what it collects has the length of its limit, or 1024, however often it runs"),
    "ReduceSum": (_reads_all_axes, "it reduces no axis, and all are reduced there"),
    "ScatterElements": _REDUCES,
    "ScatterND": _REDUCES,
    "Slice": (
        lambda node: operand(node, 4) is not None and operand(node, 3) is None,
        "it has steps without axes, which end the process there: give it axes",
    ),
}
_RULES: Mapping[str, Callable[[ir.Node, Editor], None]] = {
    "Conv": _convolve,
    "ConvTranspose": _convolve,
    "DequantizeLinear": _quantize,
    "Gather": _gather,
    "LayerNormalization": _normalize,
    "NonMaxSuppression": _suppress,
    "QuantizeLinear": _quantize,
    "RoiAlign": lambda node, editor: _fill(node, sampling_ratio=0),
    "Selu": lambda node, editor: _fill(node, alpha=1.6732632423543772, gamma=1.0507009873554805),
    "Shape": _shape,
    "Trilu": _trilu,
}
