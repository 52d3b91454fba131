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
from trtopt.graph.passes.opset import lower_opset
from trtopt.graph.passes.quantize import along
from trtopt.graph.passes.result import Line, PassResult, Refused, rewrite_nodes
from trtopt.graph.proto import STANDARD
from trtopt.graph.view import Editor, attribute, constant, constant_tensor, drop_unread, operand, sizes, to_ir

_INT32_MAX = 2**31 - 1
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
    return PassResult(model, {**lowered, **rewritten})


def _rewrite(node: ir.Node, editor: Editor) -> bool:
    count = len(node.inputs)
    while node.inputs and node.inputs[-1] is None:  # a null that importers read through
        node.resize_inputs(len(node.inputs) - 1)
    rule = _RULES.get(node.op_type) if node.domain in STANDARD else None
    return (rule is not None and rule(node, editor)) or len(node.inputs) < count


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
    editor, dequantized, changes = Editor(model), dict[tuple[Any, ...], ir.Value](), dict[str, str]()
    for node in list(model.graph):
        codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        scale = constant(node.inputs[1]) if codes is not None and codes.is_initializer() else None
        if codes is None or scale is None or codes.dtype not in _STORED:
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
        changes[str(node.name)] = str(node.name)
    drop_unread(model.graph)
    return PassResult(model, changes)


def _set(node: ir.Node, slot: int, value: ir.Value) -> bool:
    """Give an input, those before it that are missing left out."""
    node.resize_inputs(max(slot + 1, len(node.inputs)))
    node.replace_input_with(slot, value)
    return True


def _fill(node: ir.Node, **defaults: Any) -> bool:
    """The node with ONNX's own defaults written out, where the parser has others."""
    absent = [name for name in defaults if name not in node.attributes]
    for name in absent:
        node.attributes[name] = ir.convenience.convert_attribute(name, defaults[name])
    return bool(absent)


def _shape(node: ir.Node, editor: Editor) -> bool:
    """`start` and `end` (opset 15) aren't read, the whole shape comes out: cut it afterwards."""
    if not node.attributes:
        return False
    line = Line(editor, node)
    bounds = [attribute(node, "start", 0)], [attribute(node, "end", _INT32_MAX)], [0]
    whole = line("Shape", *node.inputs)
    node.op_type, whole.dtype = "Slice", ir.DataType.INT64
    node.attributes.clear()
    node.graph.insert_before(node, line.nodes)
    return all(
        _set(node, slot, value) for slot, value in enumerate([whole, *(line.number(it, np.int64) for it in bounds)])
    )


def _gather(node: ir.Node, editor: Editor) -> bool:
    """A negative index along an axis of dynamic size is undefined: count from the end by the size."""
    index, shape, axis = constant(node.inputs[1]), sizes(node.inputs[0]), attribute(node, "axis", 0)
    if index is None or not (index < 0).any() or (shape and shape[axis] is not None):
        return False
    if axis < 0 and not shape:
        raise Refused("its negative indices along an axis of dynamic size are undefined there")
    line = Line(editor, node)
    where = line.number(axis % len(shape) if axis < 0 and shape else axis, np.int64)
    size = line("Gather", line("Shape", node.inputs[0]), where)
    back = line("Mul", line.number(index < 0, np.int64), size)
    indices = line("Add", line.number(index, np.int64), back)
    for value in (made.outputs[0] for made in line.nodes):
        value.dtype = ir.DataType.INT64
    assert node.graph is not None
    node.graph.insert_before(node, line.nodes)
    return _set(node, 1, indices)


def _trilu(node: ir.Node, editor: Editor) -> bool:
    """A missing `upper` means 0."""
    if node.inputs[0] is None or node.inputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BOOL):
        raise Refused(
            "it multiplies what it cuts away by 0, which makes NaN of infinities: use Where with compared positions"
        )
    return _fill(node, upper=1)


def _suppress(node: ir.Node, editor: Editor) -> bool:
    """Without a threshold of scores, those of 0 and less are dropped."""
    if operand(node, 4) is not None:
        return False
    lowest = [np.finfo(np.float32).min]
    return _set(node, 4, editor.constant(f"{node.outputs[0].name}_all", lowest, np.float32))


def _normalize(node: ir.Node, editor: Editor) -> bool:
    """It has no LayerNormalization without a bias."""
    scale = constant(node.inputs[1])
    if operand(node, 2) is not None or scale is None:
        return False
    return _set(node, 2, editor.constant(f"{node.outputs[0].name}_bias", np.zeros_like(scale)))


def _quantize(node: ir.Node, editor: Editor) -> bool:
    """A missing axis means 0 there; unsigned codes are clamped as signed ones; a missing zero point ends the parser."""
    scale, zero = constant(node.inputs[1]), constant_tensor(operand(node, 2))
    if node.op_type == "QuantizeLinear" if zero is None else zero.dtype is ir.DataType.UINT8:
        raise Refused("it quantizes to uint8, of which TensorRT has none: quantize symmetrically to int8")
    if scale is None:
        return False
    changed = scale.size > 1 and _fill(node, axis=1)
    if operand(node, 2) is None:
        name = f"{node.outputs[0].name}_zero_point"
        changed = _set(node, 2, editor.constant(name, np.zeros(scale.shape), np.int8))
    return changed


def _refused(seen: Callable[[ir.Node], Any], reason: str) -> Callable[[ir.Node, Editor], bool]:
    """Return a rule that refuses the nodes of which `seen` is true."""

    def rule(node: ir.Node, editor: Editor) -> bool:
        if found := seen(node):
            raise Refused(reason.format(found))
        return False

    return rule


def _reads_all_axes(node: ir.Node) -> bool:
    axes = constant(operand(node, 1))
    unread = operand(node, 1) is None or (axes is not None and not axes.size)
    return bool(attribute(node, "noop_with_empty_axes")) and unread


def _collects(node: ir.Node) -> bool:
    return any(value.name for value in node.outputs[max(0, len(node.inputs) - 2) :])


def _reduction(node: ir.Node) -> str:
    return str(attribute(node, "reduction", "none")).replace("none", "")


_layout = _refused(
    lambda node: attribute(node, "layout"), "its layout {} (batch first) isn't read; export it with layout 0"
)
_reduces = _refused(_reduction, "its reduction {!r} isn't read: values would be replaced")


# Each says whether it changed the node.
_RULES: Mapping[str, Callable[[ir.Node, Editor], bool]] = {
    "Constant": _refused(
        lambda node: [name for name in node.attributes if name.startswith("value_int")],
        "its {} isn't read; give it `value`, or a graph that folds",
    ),
    "ConvTranspose": _refused(
        lambda node: attribute(node, "output_shape"),
        "it gives its output's shape {}, padded there otherwise; give it pads instead",
    ),
    "DequantizeLinear": _quantize,
    "GRU": _layout,
    "Gather": _gather,
    "If": _refused(
        lambda node: sum(bool(value.name) for value in node.outputs) > 1,
        "its outputs, of which it has several, come in any order",
    ),
    "LSTM": _layout,
    "LayerNormalization": _normalize,
    "Loop": _refused(_collects, "what it collects has the length of its limit, or 1024, however often it runs"),
    "NonMaxSuppression": _suppress,
    "QuantizeLinear": _quantize,
    "RNN": _layout,
    "ReduceSum": _refused(_reads_all_axes, "it reduces no axis, and all are reduced there"),
    "RoiAlign": lambda node, editor: _fill(node, sampling_ratio=0),
    "ScatterElements": _reduces,
    "ScatterND": _reduces,
    "Selu": lambda node, editor: _fill(node, alpha=1.6732632423543772, gamma=1.0507009873554805),
    "Shape": _shape,
    "Slice": _refused(
        lambda node: operand(node, 4) is not None and operand(node, 3) is None,
        "it has steps without axes, which end the process there: give it axes",
    ),
    "Trilu": _trilu,
}
