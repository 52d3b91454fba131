"""FP16 and BF16 in the graph itself: every tensor gets the type it will really have, with casts where types meet.

TensorRT 10's strongly typed mode, 11 and TensorRT-RTX take precision from here and from nowhere else; 8.6 takes the
same decisions (`keep_fp32`) as layer precisions beside its flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from trtopt.graph.quantize import is_quantized, upgraded
from trtopt.graph.view import constant, fresh_names, is_float, linked, outer_values, subgraphs
from trtopt.spec import Kept, Override, Precision, overriding

FP16_MAX = 65504.0
# Beyond these a constant means "minus infinity" (attention masks), not a quantity: models write -3.4e38, -1e9, -1e12.
SENTINEL = 1e30
MASK = -1e8

_OVERFLOWS = {
    "Exp": "e^x passes 65504 at x = 11.1",
    "Pow": "powers pass 65504 early (256² does)",
    "ReduceSum": "sums pass 65504",
    "ReduceSumSquare": "sums of squares pass 65504",
    "ReduceL1": "sums pass 65504",
    "ReduceL2": "sums of squares pass 65504",
    "ReduceProd": "products pass 65504",
    "ReduceLogSum": "sums pass 65504",
    "ReduceLogSumExp": "sums of exponentials pass 65504",
    "CumSum": "sums pass 65504",
    "LpNormalization": "sums of squares pass 65504",
    "LayerNormalization": "its variance sums squares, which pass 65504",
    "InstanceNormalization": "its variance sums squares, which pass 65504",
    "GroupNormalization": "its variance sums squares, which pass 65504",
    "RMSNormalization": "sums of squares pass 65504",
    "MeanVarianceNormalization": "its variance sums squares, which pass 65504",
    "BatchNormalization": "not folded into a convolution; its scale may not fit FP16",
}
_NO_BF16 = frozenset(  # refused in BF16 by TensorRT-RTX 1.7's parser or builder, each tried alone
    ("HardSwish", "Mish", "LpNormalization", "GlobalLpPool", "MeanVarianceNormalization", "Shrink", "ConvTranspose")
)
_VARIANCE_TAIL = ("ReduceMean", "ReduceSum", "Add", "Max", "Sqrt", "Reciprocal", "Div")
_CONTROL_FLOW = ("If", "Loop", "Scan")
_PINNED_SLOTS = {  # float inputs that ONNX defines as FP32, whatever the data's type
    "Resize": (1, 2),
    "Upsample": (1,),
    "NonMaxSuppression": (0, 1, 2, 3, 4),
    "RandomNormal": (),
    "RandomUniform": (),
    "Multinomial": (0,),
    "Bernoulli": (),
}
_TYPED_BY_ATTRIBUTE = ("RandomNormalLike", "RandomUniformLike", "EyeLike", "Bernoulli")  # "dtype", else their input's
_ONNX_NAMES = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
_IR_TYPES = {
    Precision.FP32: ir.DataType.FLOAT,
    Precision.FP16: ir.DataType.FLOAT16,
    Precision.BF16: ir.DataType.BFLOAT16,
}


def keep_fp32(proto: onnx.ModelProto, base: Precision, overrides: Sequence[Override] = ()) -> tuple[Kept, ...]:
    """Nodes that must not run in `base`: what would overflow, what computes shapes, what the user named."""
    return tuple(_kept(linked(proto), base, overrides).values())


def to_typed(
    proto: onnx.ModelProto, base: Precision, *, io_fp32: bool = True, overrides: Sequence[Override] = ()
) -> tuple[onnx.ModelProto, tuple[Kept, ...]]:
    """A copy of `proto` whose floating tensors are `base`, with FP32 kept where `keep_fp32` says.

    Args:
        proto: FP32 graph, with or without Q/DQ pairs (their scales become `base` too, as strongly typed builds need).
        base: FP16 or BF16; FP32 returns the graph as it is.
        io_fp32: leave the network's inputs and outputs FP32, with casts inside.

    Returns:
        The typed graph and the nodes that were kept FP32, each with its reason.
    """
    if base is Precision.FP32:
        return proto, ()
    if base is Precision.BF16:
        proto = upgraded(proto, 22)  # first opset whose Conv and pooling take BF16
    elif is_quantized(proto):
        proto = upgraded(proto, 19)  # first opset whose Q/DQ take FP16 scales
    model = linked(proto)
    kept = _kept(model, base, overrides)
    _Typing(model, base, io_fp32, kept).apply()
    return ir.to_proto(model), tuple(kept.values())


def _kept(model: ir.Model, base: Precision, overrides: Sequence[Override]) -> dict[str, Kept]:
    kept: dict[str, Kept] = {}

    def keep(node: ir.Node, reason: str) -> None:
        kept.setdefault(str(node.name), Kept(str(node.name), node.op_type, Precision.FP32, reason))

    from_shape = _shape_arithmetic(model.graph)
    opset = model.opset_imports.get("", 1)
    for node in model.graph:
        asked = overriding(overrides, node.name or "", node.op_type)
        if asked is Precision.FP32:
            keep(node, "--precision-override asks for fp32")
            continue
        if node.op_type in _CONTROL_FLOW:
            keep(node, "control flow: its body stays as it is")
            continue
        if not any(map(is_float, node.outputs)):
            continue
        if not _defined(node, base, opset):
            keep(node, f"ONNX gives {node.op_type} no {str(base).upper()} type here")
        elif node in from_shape:
            keep(node, "computes shapes, which FP16 holds exactly only up to 2048")
        elif base is Precision.BF16 and node.op_type in _NO_BF16:
            keep(node, f"TensorRT has no BF16 {node.op_type}")
        elif asked is not None or base is not Precision.FP16:
            continue
        elif node.op_type in _OVERFLOWS:
            keep(node, _OVERFLOWS[node.op_type])
        elif node.op_type == "Mul" and node.inputs[0] is node.inputs[1]:
            keep(node, "squares pass 65504 early (256² does)")
        elif (largest := _largest_constant(node)) > FP16_MAX:
            keep(node, f"holds a constant of magnitude {largest:.3g}; FP16 ends at 65504")
    if base is Precision.FP16:
        _extend_over_variance(model.graph, kept, overrides)
    return kept


def _defined(node: ir.Node, base: Precision, opset: int) -> bool:
    """Whether ONNX lets the node's FP32 operands be of type `base`; True where it doesn't say."""
    if node.op_type in ("RandomNormal", "RandomUniform") or (
        node.op_type in _TYPED_BY_ATTRIBUTE and "dtype" in node.attributes
    ):
        return False
    if node.op_type == "Einsum":  # ONNX has it in FP16 only; TensorRT runs it in BF16 as well
        return True
    opset = max(opset, 19)  # older Q/DQ and normalizations are upgraded, or kept, where they must be
    if node.domain or not onnx.defs.has(node.op_type, opset):
        return True
    schema, wanted = onnx.defs.get_schema(node.op_type, opset), f"tensor({_ONNX_NAMES[base]})"
    allowed = {item.type_param_str: set(item.allowed_type_strs) for item in schema.type_constraints}
    pinned = _PINNED_SLOTS.get(node.op_type, ())
    operands = [item for slot, item in enumerate(schema.inputs) if slot not in pinned] + list(schema.outputs)
    kinds = [allowed.get(item.type_str, {item.type_str}) for item in operands]
    return all(wanted in kind for kind in kinds if "tensor(float)" in kind)


def _extend_over_variance(graph: ir.Graph, kept: dict[str, Kept], overrides: Sequence[Override]) -> None:
    """A square is only safe if what follows it (mean, + epsilon, square root, division) stays FP32 as well."""
    chain = {node for node in graph if node.op_type in ("Pow", "Mul") and str(node.name) in kept}
    for node in graph:
        if overriding(overrides, node.name or "", node.op_type) is not None:
            continue
        producers = (value.producer() for value in node.inputs if value is not None)
        if node.op_type in _VARIANCE_TAIL and any(item in chain and item.op_type != "Div" for item in producers):
            chain.add(node)
            reason = "follows a square (variance or norm); its input may pass 65504"
            kept.setdefault(str(node.name), Kept(str(node.name), node.op_type, Precision.FP32, reason))


def _shape_arithmetic(graph: ir.Graph) -> set[ir.Node]:
    """Nodes that compute with sizes in floating point: casts of what comes from Shape, and what is made of those."""
    integers: set[ir.Value] = set()
    floats: set[ir.Node] = set()
    for node in graph:
        varying = [value for value in node.inputs if value is not None and constant(value) is None]
        from_floats = [value for value in varying if is_float(value)]
        if node.op_type in ("Shape", "Size") or (
            varying and all(value in integers or value.producer() in floats for value in varying)
        ):
            if not any(map(is_float, node.outputs)):
                integers.update(node.outputs)
            elif node.op_type == "Cast" or from_floats:
                floats.add(node)
    return floats


def _largest_constant(node: ir.Node) -> float:
    largest = 0.0
    for slot, value in enumerate(node.inputs):
        if slot in _PINNED_SLOTS.get(node.op_type, ()) or not is_float(value):
            continue
        content = constant(value)
        if content is not None and content.size:
            numbers = content.astype(np.float32)
            counted = np.isfinite(numbers) & (numbers > MASK) & (numbers < SENTINEL)
            magnitudes = np.abs(numbers[counted])
            largest = max(largest, float(magnitudes.max(initial=0.0)))
    return largest


class _Typing:
    """Assigns a type to every value, then writes casts and converted constants."""

    def __init__(self, model: ir.Model, base: Precision, io_fp32: bool, kept: Mapping[str, Kept]) -> None:
        self.model, self.graph, self.io_fp32, self.kept = model, model.graph, io_fp32, kept
        self.base = _IR_TYPES[base]
        self.fresh = fresh_names(model.graph)
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.converted: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def apply(self) -> None:
        outputs = list(self.graph.outputs)
        original = [value.dtype for value in outputs]
        if not self.io_fp32:
            for value in self.graph.inputs:
                if value.dtype is ir.DataType.FLOAT:
                    value.dtype = self.base
        for node in list(self.graph):
            self._node(node)
        for index, value in enumerate(outputs):
            wanted = original[index]
            if self.io_fp32 and wanted is ir.DataType.FLOAT and value.dtype is not wanted:
                self._keep_output(index, value, wanted)
        for name in [
            name for name, value in self.graph.initializers.items() if not value.uses() and not value.is_graph_output()
        ]:
            del self.graph.initializers[name]

    def _type_of(self, node: ir.Node) -> ir.DataType:
        if str(node.name) in self.kept:
            return ir.DataType.FLOAT
        if node.op_type == "QuantizeLinear" or any(map(is_float, node.outputs)):
            return self.base
        # What makes integers or truths of FP32 values (sizes, counts, comparisons) must see them unrounded.
        varying = [value for value in node.inputs if value is not None and constant(value) is None]
        return ir.DataType.FLOAT if any(value.dtype is ir.DataType.FLOAT for value in varying) else self.base

    def _node(self, node: ir.Node) -> None:
        wanted = self._type_of(node)
        pinned = _PINNED_SLOTS.get(node.op_type, ())
        if node.op_type in _CONTROL_FLOW:
            self._body(node)
        for slot, value in enumerate(node.inputs):
            if value is None or value.dtype not in (ir.DataType.FLOAT, self.base):
                continue
            needed = ir.DataType.FLOAT if slot in pinned else wanted
            if value.dtype is not needed or value.is_initializer():
                node.replace_input_with(slot, self._as(value, needed, node))
        if node.op_type == "Cast" and node.outputs[0].dtype is ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", int(wanted))
        elif node.op_type in ("Constant", "ConstantOfShape") and node.outputs[0].dtype is ir.DataType.FLOAT:
            self._constant_node(node, wanted)
        for output in node.outputs:
            if (
                output.dtype is ir.DataType.FLOAT
                and node.op_type not in _CONTROL_FLOW
                and node.op_type != "NonMaxSuppression"
            ):
                output.dtype = wanted

    def _body(self, node: ir.Node) -> None:
        """Bodies keep reading FP32: outer values that changed type are cast back for them."""
        for value in list(outer_values(node)):
            if value.dtype is self.base:
                replacement = self._as(value, ir.DataType.FLOAT, node)
                for graph in subgraphs(node):
                    for inner in ir.traversal.RecursiveGraphIterator(graph):
                        for slot, item in enumerate(inner.inputs):
                            if item is value:
                                inner.replace_input_with(slot, replacement)

    def _constant_node(self, node: ir.Node, wanted: ir.DataType) -> None:
        attribute = node.attributes.get("value")
        if attribute is not None:
            content = attribute.as_tensor().numpy().astype(np.float32)
        elif node.op_type == "ConstantOfShape":
            content = np.zeros(1, np.float32)
        else:
            given = constant(node.outputs[0])
            assert given is not None
            content = given.astype(np.float32)
        for name in [name for name in node.attributes if name.startswith("value")]:
            node.attributes.pop(name)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_narrowed(content, wanted), dtype=wanted))

    def _as(self, value: ir.Value, wanted: ir.DataType, reader: ir.Node) -> ir.Value:
        """`value` in another type: a converted constant, or a cast shared by its readers."""
        if value.is_initializer():
            if wanted is ir.DataType.FLOAT and value.dtype is ir.DataType.FLOAT:
                return value
            return self._initializer(value, wanted)
        key = (value, wanted)
        if key not in self.casts:
            name = self.fresh(f"{value.name}_{wanted.name.lower()}")
            output = ir.Value(name=name, type=ir.TensorType(wanted), shape=value.shape)
            cast = ir.Node(
                "", "Cast", [value], [ir.AttrInt64("to", int(wanted))], outputs=[output], name=f"{name}/Cast"
            )
            producer = value.producer()
            if producer is not None:
                self.graph.insert_after(producer, [cast])
            else:
                self.graph.insert_before(self.graph[0], [cast])
            self.casts[key] = output
        return self.casts[key]

    def _initializer(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        key = (value, wanted)
        if key not in self.converted:
            assert value.const_value is not None
            name = self.fresh(f"{value.name}_{wanted.name.lower()}")
            content = value.const_value.numpy()
            tensor = ir.tensor(_narrowed(content.astype(np.float32), wanted), dtype=wanted, name=name)
            copy = ir.Value(name=name, const_value=tensor, type=ir.TensorType(wanted), shape=tensor.shape)
            self.graph.register_initializer(copy)
            self.converted[key] = copy
        return self.converted[key]

    def _keep_output(self, index: int, value: ir.Value, wanted: ir.DataType) -> None:
        """Cast back behind the producer, under the output's own name."""
        name, producer = str(value.name), value.producer()
        assert producer is not None
        value.name = self.fresh(f"{name}_{self.base.name.lower()}")
        output = ir.Value(name=name, type=ir.TensorType(wanted), shape=value.shape)
        cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(wanted))], outputs=[output], name=f"{name}/Cast")
        self.graph.insert_after(producer, [cast])
        self.graph.outputs[index] = output


def _narrowed(content: NDArray[np.float32], wanted: ir.DataType) -> NDArray[np.generic]:
    """Only sentinels reach past the type's largest number here; infinite, they would make NaN of 0 (FP32's own does)."""
    if wanted is ir.DataType.FLOAT:
        return content
    dtype: Any = np.float16 if wanted is ir.DataType.FLOAT16 else ml_dtypes.bfloat16
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    limited = np.where(np.isfinite(content), np.clip(content, -largest, largest), content)
    return np.asarray(limited, dtype)
