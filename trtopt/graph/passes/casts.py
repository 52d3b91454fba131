"""Give every value of a graph a type, and write the casts and converted constants where types meet (see `typed`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.core.values import Kept, Precision
from trtopt.graph.op_types import CONTROL_FLOW
from trtopt.graph.view import (
    Editor,
    attribute,
    constant,
    constant_tensor,
    drop_unread,
    is_constant,
    is_float,
    normalization,
    slots,
    subgraphs,
)

_FP16_MAX = float(np.finfo(np.float16).max)
IR_TYPES = {
    Precision.FP32: ir.DataType.FLOAT,
    Precision.FP16: ir.DataType.FLOAT16,
    Precision.BF16: ir.DataType.BFLOAT16,
}
PINNED_SLOTS = {  # float inputs that TensorRT wants in FP32, whatever the data's type, beside those that ONNX says
    "Resize": (1, 2),
    "Upsample": (1,),
    "NonMaxSuppression": (0, 1, 2, 3, 4),
    "Multinomial": (0,),
}


def is_fp32(value: ir.Value | None) -> bool:
    return is_float(value) and value is not None and value.dtype is ir.DataType.FLOAT


def scale_and_shift(node: ir.Node) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Factor and summand per channel that a BatchNormalization comes to; None: not known, or FP16 can't hold them."""
    parts = normalization(node)
    if parts is None or not all((np.abs(part) <= _FP16_MAX).all() for part in parts):
        return None
    factor, summand = parts
    return factor.astype(np.float32), summand.astype(np.float32)


class Typing(Editor):
    """Assigns a type to every value, then writes casts and converted constants.

    Attributes:
        narrow: values that were FP32 and are of the reduced type now.
        reduced: names of the nodes that compute in it.
    """

    def __init__(self, model: ir.Model, base: Precision, io_fp32: bool, kept: Mapping[str, Kept]) -> None:
        super().__init__(model)
        self.opsets, self.io_fp32, self.kept = model.opset_imports, io_fp32, kept
        self.base = IR_TYPES[base]
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.narrow: set[ir.Value] = set()
        self.reduced: set[str] = set()

    def apply(self) -> None:
        outputs = list(self.graph.outputs)
        narrowed = {value for value in (*self.graph.inputs, *outputs) if is_fp32(value)}
        if not self.io_fp32:
            for value in self.graph.inputs:
                if is_fp32(value):
                    self._narrow(value)
        for node in list(self.graph):
            self._node(node)
        for index, value in enumerate(outputs):
            if self.io_fp32 and value in narrowed and value in self.narrow:
                self._keep_output(index, value)
        drop_unread(self.graph)

    def _narrow(self, value: ir.Value) -> None:
        value.dtype = self.base
        self.narrow.add(value)

    def _flexible(self, value: ir.Value | None) -> bool:
        """Return whether the value's type is ours to choose: it was FP32 in the model."""
        return is_fp32(value) or value in self.narrow

    def _type_of(self, node: ir.Node) -> ir.DataType:
        if str(node.name) in self.kept or node.op_type in CONTROL_FLOW:
            return ir.DataType.FLOAT
        values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
        if not all(isinstance(value.type, ir.TensorType) for value in values):
            return ir.DataType.FLOAT  # sequences hold what they held
        if node.op_type == "QuantizeLinear" or any(map(is_fp32, node.outputs)):
            return self.base
        # What makes integers or truths of FP32 values (sizes, counts, comparisons) must see them unrounded.
        varying = [value for value in node.inputs if self._flexible(value) and not is_constant(value)]
        return ir.DataType.FLOAT if not varying or any(map(is_fp32, varying)) else self.base

    def _node(self, node: ir.Node) -> None:
        dtype = self._type_of(node)
        types = slots(node, self.opsets.get(node.domain, 1))
        if node.op_type in CONTROL_FLOW:
            self._body(node)
        if node.op_type == "BatchNormalization" and dtype is not ir.DataType.FLOAT:
            self._plain_norm(node)
        followed = set[str]()  # types of the schema that are the reduced one in this node
        for slot, value in enumerate(node.inputs):
            if value is None or not self._flexible(value):
                continue
            kind = types.inputs[slot] if types and slot < len(types.inputs) else ""
            pinned = slot in PINNED_SLOTS.get(node.op_type, ()) or not (types and types.takes(kind, self.base))
            needed = ir.DataType.FLOAT if pinned else dtype
            if needed is self.base:
                followed.add(kind)
            if value.dtype is not needed or value.is_initializer():
                node.replace_input_with(slot, self._as(value, needed))
        if followed:
            self.reduced.add(str(node.name))
        if dtype is ir.DataType.FLOAT:
            return
        if node.op_type == "Cast" and is_fp32(node.outputs[0]):
            node.attributes["to"] = ir.AttrInt64("to", int(dtype))
            self._narrow(node.outputs[0])
        elif node.op_type in ("Constant", "ConstantOfShape") and is_fp32(node.outputs[0]):
            self._constant_node(node, dtype)
            self._narrow(node.outputs[0])
        elif types is not None:
            if node.op_type == "DequantizeLinear":  # what it gives is of its scale's type, unless it says another
                followed |= {types.outputs[0]} if followed and not attribute(node, "output_dtype", 0) else set()
            for output, kind in zip(node.outputs, types.outputs):
                if is_fp32(output) and kind in followed:
                    self._narrow(output)

    def _plain_norm(self, node: ir.Node) -> None:
        """A BatchNormalization that multiplies and adds, with factors that the reduced type holds: what remains of it."""
        parts = scale_and_shift(node)
        if parts is None:
            return
        held = {
            "scale": parts[0],
            "shift": parts[1],
            "mean": np.zeros_like(parts[0]),
            "variance": np.ones_like(parts[0]),
        }
        for slot, (what, content) in enumerate(held.items(), 1):
            node.replace_input_with(slot, self.constant(f"{node.name}_{what}", content))
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)

    def _body(self, node: ir.Node) -> None:
        """Bodies keep reading FP32: outer values that changed type are cast back for them."""
        for inner in (inner for graph in subgraphs(node) for inner in graph.all_nodes()):
            for slot, value in enumerate(inner.inputs):
                if value in self.narrow:
                    inner.replace_input_with(slot, self._as(value, ir.DataType.FLOAT))

    def _constant_node(self, node: ir.Node, dtype: ir.DataType) -> None:
        held = attribute(node, "value")
        content = constant(node.outputs[0]) if held is None else held.numpy()
        content = np.asarray([0] if content is None else content, np.float32)  # 0: a ConstantOfShape's own
        for name in [name for name in node.attributes if name.startswith("value")]:
            node.attributes.pop(name)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_narrowed(content, dtype), dtype=dtype))

    def _as(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` in another type: a converted constant, or a cast; shared by its readers."""
        if value.is_initializer() and value.dtype is dtype:
            return value
        key = (value, dtype)
        if key not in self.casts:
            name = f"{value.name}_{dtype.name.lower()}"
            if value.is_initializer():
                tensor = constant_tensor(value)
                assert tensor is not None
                self.casts[key] = self.initializer(name, _converted(tensor, dtype))
            else:
                cast = self.node("Cast", [value], name, dtype, value.shape, to=int(dtype))
                self.put_behind(value, [cast])
                self.casts[key] = cast.outputs[0]
        return self.casts[key]

    def _keep_output(self, index: int, value: ir.Value) -> None:
        """Cast back behind the producer, under the output's own name."""
        name = str(value.name)
        value.name = self.fresh(f"{name}_{self.base.name.lower()}")
        output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
        cast = self.node("Cast", [value], output, name=f"{name}/Cast", to=int(ir.DataType.FLOAT))
        self.put_behind(value, [cast])
        self.graph.outputs[index] = output


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.LazyTensor:
    """A constant in another type, converted when it is written: of large models not all fit into memory in both."""
    return ir.LazyTensor(
        lambda: ir.tensor(_narrowed(tensor.numpy().astype(np.float32), dtype), dtype=dtype),
        dtype,
        ir.Shape(tensor.shape),
    )


def _narrowed(content: NDArray[np.float32], target: ir.DataType) -> NDArray[np.generic]:
    """Clip what is beyond the type: only sentinels are here; infinite, they would make NaN of 0 (FP32's own does)."""
    if target is ir.DataType.FLOAT:
        return content
    dtype: Any = np.float16 if target is ir.DataType.FLOAT16 else ml_dtypes.bfloat16
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    limited = np.where(np.isfinite(content), np.clip(content, -largest, largest), content)
    return np.asarray(limited, dtype)
