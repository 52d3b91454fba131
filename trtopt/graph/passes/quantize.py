"""Insert Q/DQ pairs: placement and amax in, an FP32-typed graph with explicit quantization out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.core.errors import CalibrationError
from trtopt.core.values import Precision
from trtopt.core.words import first_of
from trtopt.graph.op_types import QDQ
from trtopt.graph.passes.casts import IR_TYPES
from trtopt.graph.passes.placement import Points, Weight
from trtopt.graph.passes.result import PassResult
from trtopt.graph.view import Editor, along, attribute, constant, drop_unread


class Format(NamedTuple):
    """Codes that numbers are quantized to.

    Attributes:
        opset: the first whose Q/DQ have them: INT8 per axis, FP8 at all, INT4 in blocks.
        largest: magnitude that gets the scale, symmetric; least: the lowest code.
        stored: as NumPy and ml_dtypes call the type.
        blocks: how many weights in a row may have one scale, the most that divides them counts; none: a channel or a tensor.
    """

    opset: int
    largest: float
    least: float
    stored: Any
    blocks: tuple[int, ...] = ()


FORMATS = {
    Precision.INT8: Format(13, 127.0, -127.0, np.int8),
    Precision.FP8: Format(19, 448.0, -448.0, ml_dtypes.float8_e4m3fn),  # E4M3
    Precision.INT4: Format(21, 7.0, -8.0, ml_dtypes.int4, (128, 64)),  # of weights alone
}


def is_quantized(proto: onnx.ModelProto) -> bool:
    """Return whether the graph already holds explicit quantization."""
    return any(node.op_type in QDQ for node in proto.graph.node)


def round_scale(scale: NDArray[np.floating[Any]], base: Precision) -> NDArray[np.float32]:
    """Scales as the typed graph will hold them, in FP32, never zero.

    Weights must be quantized with the scale they are dequantized with: rounding it afterwards would leave a gain error,
    up to 0.4 % in BF16, and a scale under 2**-25 would become 0 in FP16. Past the type's largest number: infinite.
    """
    dtype = IR_TYPES[base].numpy()
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):
        held: NDArray[Any] = np.maximum(scale, smallest).astype(dtype)
    if base is Precision.FP16:
        # Among subnormals (amax under 0.008) rounding down would clip the largest values by more than half a step.
        clipping = held < scale * (1 - 0.5 / FORMATS[Precision.INT8].largest)
        held = np.where(clipping, np.nextafter(held, dtype.type(np.inf)), held)
    return np.asarray(held, np.float32)


def weight_scales(weight: NDArray[np.float32], axis: int | None, precision: Precision) -> NDArray[np.float32]:
    """amax / largest code, per output channel (`axis`) or per tensor; 1.0 where a whole channel is (next to) zero."""
    others = None if axis is None else tuple(index for index in range(weight.ndim) if index != axis)
    amax = np.abs(weight).max(axis=others)
    scale = np.asarray(amax / FORMATS[precision].largest, np.float32)
    return np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1.0))


def quantize_weight(
    weight: NDArray[np.float32], scale: NDArray[np.float32], axis: int | None, precision: Precision
) -> NDArray[Any]:
    """Codes nearest to weight / scale, ties to even, as QuantizeLinear does (INT8: −127…127, INT4: −8…7)."""
    scaled = np.asarray(weight / along(axis, scale, weight.ndim))
    form = FORMATS[precision]
    if precision is not Precision.FP8:
        np.rint(scaled, out=scaled)
    return np.asarray(np.clip(scaled, form.least, form.largest, out=scaled), form.stored)


def check_scales(points: Points, amax: Mapping[str, float]) -> None:
    """Raise CalibrationError where a point has no amax, or one that isn't positive and finite."""
    unscaled = [name for name in points.activations if name not in amax]
    if unscaled:
        raise CalibrationError(
            f"the calibration table has no scale for {len(unscaled)} of {len(points.activations)} tensors "
            f"({first_of(unscaled, 5)}): it was made for another model, by an earlier trtopt, or with other "
            "`precision_override=`: give those that calibrate was given, or run trtopt calibrate on this model as it is"
        )
    bad = {name: amax[name] for name in points.activations if not 0 < amax[name] < float("inf")}
    if bad:
        raise CalibrationError(f"amax must be positive and finite; found {bad}")


def insert_qdq(
    model: ir.Model, points: Points, amax: Mapping[str, float], *, base: Precision = Precision.FP32
) -> PassResult:
    """Put a Q/DQ pair on every point and quantize the weights; the graph stays FP32-typed.

    Args:
        model: at the opset of `FORMATS` or newer.
        amax: calibrated largest magnitude per activation tensor.
        base: the type the scales will later be held in (`graph.passes.typed`); they are rounded to it here.

    Raises:
        CalibrationError: a point has no amax, or one that isn't positive and finite; a weight isn't finite; or `base` can't
            hold a scale.
    """
    check_scales(points, amax)
    editor = Editor(model)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    nodes = {str(node.name): node for node in model.graph}
    for name, readers in points.reads.items():
        scale = round_scale(np.asarray(amax[name] / FORMATS[points.precision].largest), base)
        if not np.isfinite(scale):
            raise CalibrationError(
                f"{name} reaches {amax[name]:.4g}, whose scale {str(base).upper()} can't hold: build with `bf16=True` "
                "besides, or keep its readers out with `precision_override=`"
            )
        dequantized = _pair(editor, values[name], scale, points.precision)
        for node_name, slot in readers:
            nodes[node_name].replace_input_with(slot, dequantized)
    weights: dict[tuple[str, int | None], ir.Value] = {}
    for weight in points.weights:
        key, node = (weight.name, weight.axis), nodes[weight.node]
        if key not in weights:
            weights[key] = _weight(editor, node.inputs[weight.slot], weight, points.precision, base)
        node.replace_input_with(weight.slot, weights[key])
        if node.op_type in ("Conv", "ConvTranspose") and attribute(node, "kernel_shape") is None:
            # ONNX takes it from the weight; TensorRT 8.6 doesn't where the weight isn't a constant (seen on an H200).
            shape = weights[key].shape.numpy()
            node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", [int(size) for size in shape[2:]])
    drop_unread(model.graph)
    changed = {node for readers in points.reads.values() for node, _ in readers}
    return PassResult(model, changed | {weight.node for weight in points.weights})


def _pair(editor: Editor, value: ir.Value, scale: NDArray[np.float32], precision: Precision) -> ir.Value:
    """Q and DQ, one scale, right behind the producer of `value`; returns what its readers read."""
    name, dtype = str(value.name), np.dtype(FORMATS[precision].stored)
    parameters = _parameters(editor, name, scale, dtype)
    codes = f"{name}_quantized", ir.DataType.from_numpy(dtype), value.shape
    quantize = editor.node("QuantizeLinear", [value, *parameters], *codes)
    dequantize = _dequantize(editor, name, quantize.outputs[0], parameters)
    editor.put_behind(value, [quantize, dequantize])
    return dequantize.outputs[0]


def _weight(editor: Editor, value: ir.Value | None, weight: Weight, precision: Precision, base: Precision) -> ir.Value:
    """DQ over the codes of a constant; returns its output."""
    content = constant(value)
    assert content is not None  # find_points only names constants
    weights = np.asarray(content, np.float32)
    if not np.isfinite(weights).all():
        raise CalibrationError(
            f"the weight {weight.name} of {weight.node} holds NaN or infinity: export the model again from good weights"
        )
    scale = round_scale(weight_scales(weights, weight.axis, precision), base)
    if not np.isfinite(scale).all():
        raise CalibrationError(
            f"the weight {weight.name} of {weight.node} reaches {np.abs(weights).max():.4g}, whose scale {str(base).upper()} "
            f"can't hold: build with `bf16=True` besides, or keep it out with `precision_override='{weight.node}=fp32'`"
        )
    codes = quantize_weight(weights, scale, weight.axis, precision)
    held = editor.constant(f"{weight.name}_quantized", codes)
    parameters = _parameters(editor, weight.name, scale, codes.dtype)
    node = _dequantize(editor, weight.name, held, parameters, weight.axis)
    editor.graph.insert_before(editor.graph[0], [node])
    return node.outputs[0]


def _dequantize(
    editor: Editor, name: str, codes: ir.Value, parameters: Sequence[ir.Value], axis: int | None = None
) -> ir.Node:
    output = f"{name}_dequantized", ir.DataType.FLOAT, codes.shape
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    return editor.node("DequantizeLinear", [codes, *parameters], *output, **attributes)


def _parameters(editor: Editor, name: str, scale: NDArray[np.float32], dtype: np.dtype[Any]) -> list[ir.Value]:
    zero = np.zeros(scale.shape, dtype)
    return [editor.constant(f"{name}_scale", scale), editor.constant(f"{name}_zero_point", zero)]
