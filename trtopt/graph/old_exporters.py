"""What old exporters wrote that ONNX, ONNX Runtime or TensorRT doesn't take, in the form that they do: at reading, for all.

**Chainer** has integers in Constants before opset 9, which allows them. **Slopes of PRelu**, one a channel, have one axis in
files of opset 7 and newer, too, where that is the last one. **keras2onnx** has dilated convolutions that `auto_pad` pads, which
ONNX Runtime refuses.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto, TensorProto, helper

from trtopt.graph.proto import STANDARD, all_graphs, attribute, infer_shapes, opset_version

_INTEGERS = 9  # the opset since which Constant takes integers
BROADCASTING = 7  # the opset since which operands broadcast as NumPy's do
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_PADDED = ("Conv", "MaxPool")
Shape = tuple[int | None, ...]


def mend(proto: ModelProto) -> bool:
    """Rewrite what is known, in place, and say whether there was any; what isn't is left to whoever refuses it."""
    opset = opset_version(proto)
    changed = 0 < opset < _INTEGERS and _constants(proto)
    nodes = [node for graph in all_graphs(proto.graph) for node in graph.node if node.domain in STANDARD]
    padded = [node for node in nodes if node.op_type in _PADDED and _dilated(node)]
    slopes = opset >= BROADCASTING and any(node.op_type == "PRelu" for node in nodes)
    shapes = known_shapes(proto) if padded or slopes else {}
    for node in padded:
        changed |= _pad(node, shapes)
    return changed | (slopes and widen_slopes(proto, shapes, always=False))


def _constants(proto: ModelProto) -> bool:
    """Constant nodes of integers as initializers, which may be of any type."""
    changed = False
    for graph in all_graphs(proto.graph):
        held = {node.output[0]: attribute(node, "value", None) for node in graph.node if node.op_type == "Constant"}
        held = {name: tensor for name, tensor in held.items() if tensor is not None and tensor.data_type not in _FLOATS}
        for name, tensor in held.items():
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = name
            proto.ir_version = max(proto.ir_version, 4)  # since when initializers needn't be inputs
        for node in [node for node in graph.node if held and node.output[0] in held]:
            graph.node.remove(node)
            changed = True
    return changed


def known_shapes(proto: ModelProto) -> dict[str, Shape]:
    """Shapes as far as they can be inferred, None for what is open; the model may not be valid."""
    try:
        graph = infer_shapes(proto).graph
    except Exception:  # ONNX's inference raises whatever its operators do
        return {}
    values = (*graph.input, *graph.value_info, *graph.output)
    dims = {value.name: value.type.tensor_type.shape.dim for value in values}
    shapes: dict[str, Shape] = {name: tuple(dim.dim_value or None for dim in shape) for name, shape in dims.items()}
    return shapes | {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}


def _dilated(node: NodeProto) -> bool:
    same = attribute(node, "auto_pad", b"") in (b"SAME_UPPER", b"SAME_LOWER")
    return same and any(size != 1 for size in attribute(node, "dilations", []))


def _pad(node: NodeProto, shapes: Mapping[str, Shape]) -> bool:
    """Padding in numbers: with a stride of 1 it goes with any size."""
    dilations = attribute(node, "dilations", [])
    kernel = attribute(node, "kernel_shape", None)
    if kernel is None:
        kernel = shapes.get(node.input[1], ())[2:]
    strides = attribute(node, "strides", [1] * len(dilations))
    sizes = [*shapes.get(node.input[0], ())[2:]] or [None] * len(dilations)
    begins, ends = [], []
    for size, length, stride, dilation in zip(sizes, kernel, strides, dilations):
        if length is None or (size is None and stride != 1):
            return False
        last = 0 if size is None else -(-size // stride) * stride - stride  # where the last window starts
        total = max(0, last + (length - 1) * dilation + 1 - (size or 1))
        small, large = total // 2, total - total // 2
        upper = attribute(node, "auto_pad", b"") == b"SAME_UPPER"
        begins.append(small if upper else large)
        ends.append(large if upper else small)
    if len(begins) != len(dilations):
        return False
    kept = [item for item in node.attribute if item.name not in ("auto_pad", "pads")]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("pads", [*begins, *ends])])
    return True


def widen_slopes(proto: ModelProto, shapes: Mapping[str, Shape], *, always: bool) -> bool:
    """One slope a channel for PRelu: before opset 7 of shape (C,), which since then stands for the last axis.

    Args:
        shapes: of what the nodes read, as far as they are known.
        always: the model comes from before opset 7; else only slopes that don't fit the last axis are of channels.
    """
    added: dict[str, set[int]] = {}
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "PRelu" and (tensor := weights.get(node.input[1])) is not None and len(tensor.dims) == 1:
            shape, count = shapes.get(node.input[0], ()), tensor.dims[0]
            channels = len(shape) > 2 and count > 1 and (always or (shape[1] == count != shape[-1]))
            added.setdefault(tensor.name, set()).add(len(shape) - 2 if channels else 0)
    wider = {name: axes for name, axes in added.items() if len(axes) == 1 and axes != {0}}
    for name, axes in wider.items():
        weights[name].dims.extend([1] * axes.pop())
        declared = next((value for value in proto.graph.input if value.name == name), None)
        if declared is not None:
            proto.graph.input.remove(declared)
            proto.ir_version = max(proto.ir_version, 4)  # since when initializers needn't be inputs
    return bool(wider)
