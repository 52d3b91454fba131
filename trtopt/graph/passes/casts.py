"""Give every value of a graph a type, and write the casts and converted constants where types meet (see `typed`)."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.core.values import Kept, Precision
from trtopt.graph.view import Editor, attribute, constant, drop_unread, is_constant, normalization, slots, subgraphs

IR_TYPES = {
    Precision.FP32: ir.DataType.FLOAT,
    Precision.FP16: ir.DataType.FLOAT16,
    Precision.BF16: ir.DataType.BFLOAT16,
}
MASKING, _MASKED = {"Add", "Mul", "Sub", "Where"}, 2.0**14  # who reads a mask's sentinel, and what it is in FP16
# Float inputs that TensorRT wants in FP32, whatever the data's type, beside those that ONNX says.
PINNED_SLOTS = {"Resize": (1, 2), "Upsample": (1,), "NonMaxSuppression": (0, 1, 2, 3, 4), "Multinomial": (0,)}


def is_fp32(value: ir.Value | None) -> bool:
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype is ir.DataType.FLOAT


def scale_and_shift(node: ir.Node) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Factor and summand per channel that a BatchNormalization comes to; None: not known, or FP16 can't hold them."""
    parts = normalization(node)
    if parts is None or not all((np.abs(part) <= np.finfo(np.float16).max).all() for part in parts):
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
        for value in () if self.io_fp32 else filter(is_fp32, self.graph.inputs):
            self._narrow(value)
        for node in list(self.graph):
            self._node(node)
        for index, value in enumerate(list(self.graph.outputs)):
            if self.io_fp32 and value in self.narrow:
                self._keep_output(index, value)
        drop_unread(self.graph)

    def _narrow(self, value: ir.Value) -> None:
        value.dtype = self.base
        self.narrow.add(value)

    def _type_of(self, node: ir.Node) -> ir.DataType:
        if str(node.name) in self.kept:  # among them all control flow
            return ir.DataType.FLOAT
        values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
        if not all(isinstance(value.type, ir.TensorType) for value in values):
            return ir.DataType.FLOAT  # sequences hold what they held
        if node.op_type == "QuantizeLinear" or any(map(is_fp32, node.outputs)):
            return self.base
        # What makes integers or truths of FP32 values (sizes, counts, comparisons) must see them unrounded.
        ours = [value for value in node.inputs if is_fp32(value) or value in self.narrow]
        varying = [value for value in ours if not is_constant(value)]
        return ir.DataType.FLOAT if not varying or any(map(is_fp32, varying)) else self.base

    def _node(self, node: ir.Node) -> None:
        dtype = self._type_of(node)
        types = slots(node, self.opsets.get(node.domain, 1))
        for inner in (inner for graph in subgraphs(node) for inner in graph.all_nodes()):  # bodies keep reading FP32
            for slot, value in enumerate(inner.inputs):
                if value in self.narrow:
                    inner.replace_input_with(slot, self._as(value, ir.DataType.FLOAT))
        if node.op_type == "BatchNormalization" and dtype is not ir.DataType.FLOAT:
            self._plain_norm(node)
        followed = set[str]()  # types of the schema that are the reduced one in this node
        for slot, value in enumerate(node.inputs):
            if not is_fp32(value) and value not in self.narrow:  # its type isn't ours to choose: it wasn't FP32
                continue
            kind = types.inputs[slot] if types and slot < len(types.inputs) else ""
            pinned = slot in PINNED_SLOTS.get(node.op_type, ()) or not (types and types.takes(kind, self.base))
            needed = ir.DataType.FLOAT if pinned else dtype
            if needed is self.base:
                followed.add(kind)
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
        if (parts := scale_and_shift(node)) is None:
            return
        factor, shift = parts
        held = {"scale": factor, "shift": shift, "mean": np.zeros_like(factor), "variance": np.ones_like(factor)}
        for slot, (what, content) in enumerate(held.items(), 1):
            node.replace_input_with(slot, self.constant(f"{node.name}_{what}", content))
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)

    def _constant_node(self, node: ir.Node, dtype: ir.DataType) -> None:
        held = attribute(node, "value")
        content = constant(node.outputs[0]) if held is None else held.numpy()
        content = np.zeros(1) if content is None else content  # zero is a ConstantOfShape's own
        node.attributes.clear()  # of their value alone, in one form or another
        node.attributes["value"] = ir.AttrTensor("value", _narrowed(content, dtype, _limit(node.outputs[0], dtype)))

    def _as(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` in another type: a converted constant, or a cast; shared by its readers."""
        if value.dtype is dtype:
            return value
        key = (value, dtype)
        if key not in self.casts:
            name = f"{value.name}_{dtype.name.lower()}"
            if value.is_initializer():
                held, limit = value.const_value, _limit(value, dtype)
                # Converted when it is written: of large models not all fit into memory in both.
                lazily = ir.LazyTensor(lambda: _narrowed(held.numpy(), dtype, limit), dtype, held.shape)
                self.casts[key] = self.initializer(name, lazily)
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


def _limit(value: ir.Value, dtype: ir.DataType) -> float:
    """Return what stands for numbers beyond a type: its largest; of masks, which are added to scores and to each other, so
    little that the sum of three stays within FP16: a row that is masked throughout would be NaN. e to the power of it is 0."""
    masks = {node.op_type for node in value.consumers()} <= MASKING and dtype is ir.DataType.FLOAT16
    return _MASKED if masks else float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


def _narrowed(content: NDArray[np.generic], target: ir.DataType, limit: float) -> ir.TensorProtocol:
    """Limit what is beyond the type: only sentinels are here; infinite, they would make NaN of 0 (FP32's own does)."""
    numbers, largest = content.astype(np.float32), ml_dtypes.finfo(target.numpy()).max  # type: ignore[no-untyped-call]
    beyond = np.isfinite(numbers) & (np.abs(numbers) > float(largest))
    limited = np.where(beyond, np.sign(numbers) * np.float32(limit), numbers)
    return ir.tensor(limited.astype(target.numpy()), dtype=target)
