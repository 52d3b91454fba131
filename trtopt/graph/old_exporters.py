"""What old exporters wrote that ONNX, ONNX Runtime or TensorRT doesn't take, in the form that they do: at reading, for all.

**Before opset 7** operands broadcast along an axis that a node names, and attributes said what types say since. ONNX's own
converter writes such a model in opset 7; it passes over that axis, so that another than the last ones is refused.
**Chainer** has integers in Constants before opset 9, which allows them. **Slopes of PRelu**, one a channel, have one axis in
files of opset 7 and newer, too, where that is the last one. **keras2onnx** has dilated convolutions that `auto_pad` pads, which
ONNX Runtime refuses. **Quantizers** give channels of zeros a scale of 0, which TensorRT refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtopt.core.errors import InvalidModel, ModelError
from trtopt.graph.passes.opset import upgraded
from trtopt.graph.proto import (
    QDQ,
    STANDARD,
    Links,
    all_graphs,
    attribute,
    infer_shapes,
    node_label,
    opset_version,
    refill,
    to_array,
    unique,
)

OLDEST = 7  # the opset since which operands broadcast as NumPy's do; TensorRT and ONNX Runtime read no older one
_INTEGERS = 9  # the opset since which Constant takes integers
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_AXES = 13  # the opset since which axes of Unsqueeze are an input
_PADDED = ("Conv", "MaxPool")
# Of opsets before 7, and without a meaning for who only runs a model: memory that may be used again, training.
Shape = tuple[int | None, ...]


def mend(proto: ModelProto, what: str) -> bool:
    """Rewrite what is known, in place, and say whether there was any.

    Args:
        what: what messages call the model.

    Raises:
        InvalidModel: it is of an opset below 7, and can't be written in 7; or a node is damaged.
    """
    try:
        return _mended(proto, what)
    except (LookupError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        text = "a node lacks an input, an output or an attribute, or has one of another type"
        raise InvalidModel(f"{what} isn't valid ONNX: {text} ({reason}): export it again") from error


def _mended(proto: ModelProto, what: str) -> bool:
    opset = opset_version(proto)
    if 0 < opset < OLDEST:
        _to_seven(proto, opset, what)
    changed = 0 < opset < OLDEST
    changed |= 0 < opset < _INTEGERS and _constants(proto)
    nodes = [node for graph in all_graphs(proto.graph) for node in graph.node if node.domain in STANDARD]
    padded = [node for node in nodes if node.op_type in _PADDED and _dilated(node)]
    slopes = [node for node in nodes if node.op_type == "PRelu"]
    shapes = _shapes(proto) if padded or slopes else {}
    for node in padded:
        changed |= _pad(node, shapes)
    changed |= _positive_scales(proto, [node for node in nodes if node.op_type in QDQ])
    return changed | (bool(slopes) and _widen(proto, lambda node: _channels(node, shapes, always=opset < OLDEST)))


def _positive_scales(proto: ModelProto, nodes: Sequence[NodeProto]) -> bool:
    """Write 1 for scales of 0 where all that is quantized is 0: of zeros any scale makes zeros."""
    links, dead = Links(proto.graph), dict[str, NDArray[np.bool_]]()
    for node in nodes:
        scale, zero = (links.constants.get(name) for name in (*node.input, "")[1:3])
        if scale is None or len(scale.dims) > 1 or to_array(scale).all():
            continue
        maker = links.makers.get(node.input[0], node)
        held = links.constants.get(maker.input[0] if maker.op_type == "QuantizeLinear" else node.input[0])
        zeros = to_array(scale) == 0
        if held is None or (zero is not None and to_array(zero).any()):
            zeros[...] = False
        elif zeros.size == 1:
            zeros &= not to_array(held).any()
        else:
            zeros &= ~np.moveaxis(to_array(held), attribute(node, "axis", 1), 0).reshape(len(zeros), -1).any(1)
        dead[node.input[1]] = dead.get(node.input[1], True) & zeros
    for name, where in dead.items():
        values = to_array(links.constants[name])
        links.constants[name].CopyFrom(numpy_helper.from_array(np.where(where, values.dtype.type(1), values), name))
    return any(where.any() for where in dead.values())


def _to_seven(proto: ModelProto, opset: int, what: str) -> None:
    shapes, problem = _shapes(proto), ""
    for node in (node for graph in all_graphs(proto.graph) for node in graph.node):
        if attribute(node, "broadcast", 0) and (axis := attribute(node, "axis", None)) is not None:
            rank, own = (len(shapes.get(name, ())) for name in node.input)
            if not rank or axis % rank + own != rank:
                problem = problem or f"{node_label(node)} broadcasts along axis {axis}"
    try:
        made = None if problem else upgraded(proto, OLDEST)
    except ModelError as error:
        made, problem = None, str(error)
    if made is None:
        raise InvalidModel(
            f"{what} is of opset {opset}; TensorRT reads {OLDEST} and newer, and it can't be written in that: {problem}: "
            "export it again at opset 13 or newer"
        )
    made.ir_version = max(made.ir_version, 4)  # since when initializers needn't be inputs
    proto.CopyFrom(made)


def _channels(node: NodeProto, shapes: Mapping[str, Shape], *, always: bool) -> list[int]:
    """The axes that a PRelu's slopes of shape (C,) lack; from opset 7 on only where they don't fit the last axis."""
    if node.op_type != "PRelu" or len(node.input) != 2:
        return []
    shape, slopes = (shapes.get(name, ()) for name in node.input)
    of_channels = len(shape) > 2 and len(slopes) == 1 and slopes != (1,)
    if of_channels and (always or (shape[1] == slopes[0] != shape[-1])):
        return list(range(1, len(shape) - 1))
    return []


def _widen(proto: ModelProto, axes_of: Callable[[NodeProto], Sequence[int]]) -> bool:
    """Put an Unsqueeze in front of second operands that lack axes; folding makes constants of those that are."""
    changed = False
    for graph in all_graphs(proto.graph):
        before = {index: axes for index, node in enumerate(graph.node) if (axes := axes_of(node))}
        if before:
            _put_in(graph, before, opset_version(proto))
            changed = True
    return changed


def _put_in(graph: GraphProto, before: Mapping[int, Sequence[int]], opset: int) -> None:
    taken = {value.name for value in (*graph.input, *graph.initializer)}
    taken |= {name for node in graph.node for name in (*node.input, *node.output, node.name)}
    nodes = list[NodeProto]()
    for index, node in enumerate(graph.node):
        copy = NodeProto.FromString(node.SerializeToString())
        if index in before:
            name, label = unique(f"{node.output[0]}_operand", taken), unique(f"{node.name}/Unsqueeze", taken)
            made = helper.make_node("Unsqueeze", [node.input[1]], [name], label)
            if opset < _AXES:
                made.attribute.append(helper.make_attribute("axes", before[index]))
            else:
                made.input.append(unique(f"{name}_axes", taken))
                graph.initializer.append(numpy_helper.from_array(np.asarray(before[index], np.int64), made.input[1]))
            nodes.append(made)
            copy.input[1] = name
        nodes.append(copy)
    refill(graph.node, nodes)


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


def _shapes(proto: ModelProto) -> dict[str, Shape]:
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
    refill(node.attribute, [*kept, helper.make_attribute("pads", [*begins, *ends])])
    return True
