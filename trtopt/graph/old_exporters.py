"""Rewrite at reading what exporters write and ONNX Runtime or TensorRT refuses.

**Dilated convolutions that `auto_pad` pads** (tf2onnx, Keras): ONNX Runtime refuses them.
**Scales of 0**, which quantizers give channels of zeros: TensorRT refuses them.
**Operators in ONNX's name that it hasn't** (onnx-graphsurgeon writes plugins so): onnx's checker refuses the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, defs, helper, numpy_helper

from trtopt.core.errors import InvalidModel
from trtopt.graph.op_types import QDQ
from trtopt.graph.proto import STANDARD, Links, all_graphs, attribute, infer_shapes, opset_version, refill, to_array

OLDEST = 7  # the opset since which operands broadcast as NumPy's do; TensorRT and ONNX Runtime read no older one
_PADDED = ("Conv", "MaxPool")
_PLUGINS = "trt.plugins"  # the domain by which PyTorch-TensorRT calls them
_Shapes = Mapping[str, tuple[int | None, ...]]


def upgrade_legacy_model(proto: ModelProto, what: str) -> bool:
    """Rewrite what is known, in place, and say whether there was any.

    Args:
        what: what messages call the model.

    Raises:
        InvalidModel: it is of an opset below 7, or a node is damaged.
    """
    if 0 < (opset := opset_version(proto)) < OLDEST:
        raise InvalidModel(
            f"{what} is of opset {opset}; TensorRT reads {OLDEST} and newer: export it again at opset 13 or newer, or try "
            "onnx.version_converter.convert_version(model, 13)"
        )
    nodes = [node for graph in all_graphs(proto.graph) for node in graph.node if node.domain in STANDARD]
    try:
        padded = [node for node in nodes if node.op_type in _PADDED and _dilated(node)]
        shapes = _shapes(proto) if padded else {}
        changed = [_pad(node, shapes) for node in padded]
        own = {function.name for function in proto.functions if function.domain in STANDARD}
        changed += [
            _as_plugins(proto, [node for node in nodes if node.op_type not in own and not _known(node.op_type)])
        ]
        return _positive_scales(proto, [node for node in nodes if node.op_type in QDQ]) or any(changed)
    except (LookupError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        text = "a node lacks an input, an output or an attribute, or has one of another type"
        raise InvalidModel(f"{what} isn't valid ONNX: {text} ({reason}): export it again") from error


def _positive_scales(proto: ModelProto, nodes: Sequence[NodeProto]) -> bool:
    """Write 1 for scales of 0 where all that is quantized is 0: of zeros any scale makes zeros."""
    links, dead = Links(proto.graph), dict[str, NDArray[np.bool_]]()
    for node in nodes:
        scale, zero = (links.constants.get(name) for name in (*node.input, "")[1:3])
        if scale is None or len(scale.dims) > 1 or to_array(scale).all():
            continue
        maker = links.makers.get(node.input[0], node)
        held = links.constants.get(maker.input[0] if maker.op_type == "QuantizeLinear" else node.input[0])
        zeros = np.asarray(to_array(scale) == 0)  # a comparison of rank 0 gives a scalar, which takes no value
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


def _known(operator: str) -> bool:
    """Return whether it is ONNX's own, in any opset; a node without an operator is refused elsewhere."""
    return not operator or bool(defs.has(operator))


def _as_plugins(proto: ModelProto, nodes: Sequence[NodeProto]) -> bool:
    """Put nodes into a domain of their own, where what they take and give isn't checked, and they are told as plugins."""
    for node in nodes:
        node.domain = _PLUGINS
    if nodes and all(entry.domain != _PLUGINS for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(_PLUGINS, 1))
    return bool(nodes)


def _shapes(proto: ModelProto) -> _Shapes:
    """Shapes as far as they can be inferred, None for what is open; the model may not be valid."""
    try:
        graph = infer_shapes(proto).graph
    except Exception:  # ONNX's inference raises whatever its operators do
        return {}
    values = (*graph.input, *graph.value_info, *graph.output)
    dims = {value.name: value.type.tensor_type.shape.dim for value in values}
    shapes = {name: tuple(dim.dim_value or None for dim in shape) for name, shape in dims.items()}
    return {**shapes, **{tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}}


def _dilated(node: NodeProto) -> bool:
    same = attribute(node, "auto_pad", b"") in (b"SAME_UPPER", b"SAME_LOWER")
    return same and any(size != 1 for size in attribute(node, "dilations", []))


def _pad(node: NodeProto, shapes: _Shapes) -> bool:
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
