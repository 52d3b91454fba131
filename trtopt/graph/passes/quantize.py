"""Insert Q/DQ pairs: placement and amax in, an FP32-typed ONNX graph with explicit quantization out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.core.errors import CalibrationError
from trtopt.core.values import Precision
from trtopt.graph.passes.opset import upgraded
from trtopt.graph.passes.placement import Points, Weight
from trtopt.graph.view import constant, fresh_names, linked

LARGEST = {Precision.INT8: 127.0, Precision.FP8: 448.0}  # largest magnitude of int8 (symmetric) and of float8 E4M3
_STORED: dict[Precision, Any] = {Precision.INT8: np.int8, Precision.FP8: ml_dtypes.float8_e4m3fn}
_ROUNDED: dict[Precision, Any] = {
    Precision.FP32: np.float32,
    Precision.FP16: np.float16,
    Precision.BF16: ml_dtypes.bfloat16,
}


def is_quantized(proto: onnx.ModelProto) -> bool:
    """Whether the graph already holds explicit quantization."""
    return any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in proto.graph.node)


def round_scale(scale: NDArray[np.floating[Any]], base: Precision) -> NDArray[np.float32]:
    """Scales as the typed graph will hold them, in FP32, never zero.

    Weights must be quantized with the scale they are dequantized with: rounding it afterwards would leave a gain error,
    up to 0.4 % in BF16, and a scale under 2**-25 would become 0 in FP16. Past the type's largest number: infinite.
    """
    dtype = _ROUNDED[base]
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):
        held: NDArray[Any] = np.maximum(scale, smallest).astype(dtype)
    if base is Precision.FP16:
        # Among subnormals (amax under 0.008) rounding down would clip the largest values by more than half a step.
        held = np.where(held < scale * (1 - 0.5 / LARGEST[Precision.INT8]), np.nextafter(held, dtype(np.inf)), held)
    return np.asarray(held, np.float32)


def weight_scales(weight: NDArray[np.float32], axis: int | None, precision: Precision) -> NDArray[np.float32]:
    """amax / largest code, per output channel (`axis`) or per tensor; 1.0 where a whole channel is (next to) zero."""
    others = None if axis is None else tuple(index for index in range(weight.ndim) if index != axis)
    amax = np.abs(weight).max(axis=others)
    scale = np.asarray(amax / LARGEST[precision], np.float32)
    return np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1.0))


def quantize_weight(
    weight: NDArray[np.float32], scale: NDArray[np.float32], axis: int | None, precision: Precision
) -> NDArray[Any]:
    """Codes nearest to weight / scale, ties to even, as QuantizeLinear does; symmetric (INT8: −127…127)."""
    shape = [1] * weight.ndim
    if axis is not None:
        shape[axis] = -1
    scaled = weight / scale.reshape(shape)
    limit = LARGEST[precision]
    if precision is Precision.INT8:
        scaled = np.rint(scaled)
    return np.asarray(np.clip(scaled, -limit, limit), _STORED[precision])


def insert_qdq(
    proto: onnx.ModelProto,
    points: Points,
    amax: Mapping[str, float],
    *,
    base: Precision = Precision.FP32,
) -> onnx.ModelProto:
    """A copy of `proto` with a Q/DQ pair on every point and quantized weights; still FP32-typed.

    Args:
        amax: calibrated largest magnitude per activation tensor.
        base: the type the scales will later be held in (`graph.typed`); they are rounded to it here.

    Raises:
        CalibrationError: a point has no amax, or one that isn't positive and finite or that `base` can't hold; a weight
            isn't finite.
    """
    missing = [name for name in points.activations if name not in amax]
    if missing:
        raise CalibrationError(
            f"the calibration table has no scale for {len(missing)} of {len(points.activations)} tensors "
            f"({', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}): it was made for another model or other "
            "`precision_override=`; run trtopt calibrate on this model"
        )
    bad = {name: amax[name] for name in points.activations if not 0 < amax[name] < float("inf")}
    if bad:
        raise CalibrationError(f"amax must be positive and finite; found {bad}")
    # The first opset with per-axis (13) and float8 (19) Q/DQ; raised before, as the converter has no way for older Q/DQ.
    proto = upgraded(proto, 19 if points.precision is Precision.FP8 else 13)
    model = linked(proto)
    writer = Writer(model, points.precision)
    values = {value.name: value for value in _every_value(model.graph)}
    for name, readers in points.reads.items():
        scale = round_scale(np.asarray(amax[name] / LARGEST[points.precision]), base)
        if not np.isfinite(scale):
            raise CalibrationError(
                f"{name} reaches {amax[name]:.4g}, whose scale {str(base).upper()} can't hold: build with `bf16=True` "
                "besides, or keep its readers out with `precision_override=`"
            )
        dequantized = writer.pair(values[name], scale)
        for node_name, slot in readers:
            writer.nodes[node_name].replace_input_with(slot, dequantized)
    stored: dict[tuple[str, int | None], ir.Value] = {}
    for weight in points.weights:
        key = (weight.name, weight.axis)
        if key not in stored:
            stored[key] = _dequantized_weight(writer, weight, base)
        node = writer.nodes[weight.node]
        node.replace_input_with(weight.slot, stored[key])
        if node.op_type in ("Conv", "ConvTranspose") and "kernel_shape" not in node.attributes:
            # ONNX takes it from the weight; TensorRT 8.6 doesn't where the weight isn't a constant (seen on an H200).
            shape = stored[key].shape
            assert shape is not None
            node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", [int(size) for size in shape.numpy()[2:]])
    for name in {weight.name for weight in points.weights}:
        value = model.graph.initializers.get(name)
        if value is not None and not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
    result: onnx.ModelProto = ir.to_proto(model)
    return result


def _dequantized_weight(writer: Writer, weight: Weight, base: Precision) -> ir.Value:
    value = writer.nodes[weight.node].inputs[weight.slot]
    content = constant(value)
    assert content is not None and value is not None  # find_points only names constants
    weights = np.asarray(content, np.float32)
    if not np.isfinite(weights).all():
        raise CalibrationError(
            f"the weight {weight.name} of {weight.node} holds NaN or infinity: export the model again from good weights"
        )
    scale = round_scale(weight_scales(weights, weight.axis, writer.precision), base)
    return writer.dequantize(
        weight.name, quantize_weight(weights, scale, weight.axis, writer.precision), scale, weight.axis
    )


def _every_value(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


class Writer:
    """Adds quantization nodes beside what they quantize, with names that tell where they belong."""

    def __init__(self, model: ir.Model, precision: Precision) -> None:
        self.graph, self.precision = model.graph, precision
        self.nodes = {str(node.name): node for node in model.graph}
        self.fresh = fresh_names(model.graph)

    def pair(self, value: ir.Value, scale: NDArray[np.float32]) -> ir.Value:
        """Q and DQ, one scale, right behind the producer of `value`; returns what its readers read."""
        stored = np.dtype(_STORED[self.precision])
        scales, zero = self._parameters(str(value.name), scale, stored)
        codes = self._value(f"{value.name}_quantized", ir.DataType.from_numpy(stored), value)
        result = self._value(f"{value.name}_dequantized", ir.DataType.FLOAT, value)
        nodes = [
            self._node("QuantizeLinear", [value, scales, zero], codes),
            self._node("DequantizeLinear", [codes, scales, zero], result),
        ]
        producer = value.producer()
        if producer is not None:
            self.graph.insert_after(producer, nodes)
        else:
            self.graph.insert_before(self.graph[0], nodes)
        return result

    def dequantize(self, name: str, codes: NDArray[Any], scale: NDArray[np.float32], axis: int | None) -> ir.Value:
        """DQ over stored codes; returns its output."""
        stored = self.initializer(f"{name}_quantized", codes)
        scales, zero = self._parameters(name, scale, codes.dtype)
        result = self._value(f"{name}_dequantized", ir.DataType.FLOAT, stored)
        attributes = [] if axis is None else [ir.AttrInt64("axis", axis)]
        self.graph.insert_before(
            self.graph[0], [self._node("DequantizeLinear", [stored, scales, zero], result, attributes)]
        )
        return result

    def _parameters(self, name: str, scale: NDArray[np.float32], stored: np.dtype[Any]) -> tuple[ir.Value, ir.Value]:
        zero = np.zeros(scale.shape, stored)
        return self.initializer(f"{name}_scale", scale), self.initializer(f"{name}_zero_point", zero)

    def initializer(self, name: str, content: NDArray[Any]) -> ir.Value:
        name = self.fresh(name)
        tensor = ir.tensor(np.ascontiguousarray(content) if content.ndim else content, name=name)
        value = ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
        self.graph.register_initializer(value)
        return value

    def _value(self, name: str, dtype: ir.DataType, like: ir.Value) -> ir.Value:
        return ir.Value(name=self.fresh(name), type=ir.TensorType(dtype), shape=like.shape)

    def _node(self, op: str, inputs: list[ir.Value], output: ir.Value, attributes: Sequence[ir.Attr] = ()) -> ir.Node:
        return ir.Node("", op, inputs, attributes, outputs=[output], name=self.fresh(f"{output.name}/{op}"))
