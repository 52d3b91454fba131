"""How much inference would carry along: it follows the values of shapes, and models can make these as long as they like.

ONNX's data propagation keeps some 70 bytes for each number of every tensor of one dimension: 34 Concats of a constant with
itself are 10 GB. Lengths are therefore inferred without values first; where a length itself is computed from constants, which
shows only with values, values aren't propagated either.
"""

from __future__ import annotations

import math

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

MOST = 1 << 20  # numbers of all tensors together
_SHORT = 64  # numbers of a constant that may be a shape
_LONG = 1 << 12  # numbers that no shape has
_ELEMENTWISE = ("Add", "Sub", "Mul")
_PASSING = ("Cast", "Squeeze", "Unsqueeze", "Identity")
_SIZED = {
    "CenterCropPad", "ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Reshape", "Resize", "Tile", "Upsample",
}  # fmt: skip
_Shape = tuple[int | None, ...]


def carries_little(proto: ModelProto) -> bool:
    """Whether ONNX's inference of this model, whose large weights are left out, may propagate values."""
    if proto.functions:  # nobody has looked into them
        return False
    try:
        graph = onnx.shape_inference.infer_shapes(proto).graph
    except Exception:  # whoever infers next says what is wrong
        return True
    carried = _Carried()
    return carried.read(graph) and carried.total <= MOST


class _Carried:
    """Attributes: total: numbers in all tensors of one dimension."""

    def __init__(self) -> None:
        self.total = 0
        self._shapes: dict[str, _Shape] = {}
        self._constants: dict[str, list[int]] = {}
        self._known: dict[str, list[bool]] = {}  # for each number of a computed tensor, whether inference knows it

    def read(self, graph: GraphProto) -> bool:
        """Whether all lengths in it show without values."""
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            if tensor.HasField("shape"):
                dims = tensor.shape.dim
                self._shapes[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)
        for value in graph.input:
            self._count(value.name)
        for tensor in graph.initializer:
            self._constant(tensor.name, tensor)
        return all(map(self._node, graph.node))

    def _node(self, node: NodeProto) -> bool:
        for name in node.output:
            shape = self._shapes.get(name)
            lengths = [True] * (2 if node.op_type == "Pad" else 1)  # what says how long a result of one dimension is
            unsaid = shape in (None, (None,)) and node.op_type in _SIZED
            if unsaid and lengths in (self._known.get(name) for name in node.input):
                return False
            self._count(name)
        if node.op_type == "Constant" and node.attribute:
            self._constant(node.output[0], node.attribute[0].t)
        elif node.output and (elements := self._values(node)) is not None:
            self._known[node.output[0]] = elements
            if len(elements) > _LONG:
                return False
        return all(self.read(attribute.g) for attribute in node.attribute if attribute.HasField("g"))

    def _count(self, name: str) -> None:
        shape = self._shapes.get(name, ())
        if len(shape) == 1:
            self.total += shape[0] or 0

    def _constant(self, name: str, tensor: TensorProto) -> None:
        self._shapes[name] = tuple(tensor.dims)
        if tensor.data_type in (TensorProto.INT32, TensorProto.INT64) and math.prod(tensor.dims) <= _SHORT:
            self._constants[name] = numpy_helper.to_array(tensor).ravel().tolist()

    def _values(self, node: NodeProto) -> list[bool] | None:
        """Which numbers of its result are known; None: it isn't computed from shapes and constants."""
        if node.op_type == "Shape":
            shape = self._shapes.get(node.input[0])
            return None if shape is None else [size is not None for size in shape]
        operands = [self._of(name) for name in node.input if name]
        if not operands or operands[0] is None:
            return None
        data = operands[0]
        if node.op_type in _PASSING:
            return data
        if node.op_type == "Gather" and node.input[1] in self._constants:
            places = self._constants[node.input[1]]
            return [data[place] for place in places if -len(data) <= place < len(data)]
        if node.op_type == "Slice":
            return data if all(data) or not any(data) else [True]  # whichever it takes
        present = [item for item in operands if item is not None]
        if len(present) < len(operands):
            return None
        if node.op_type == "Concat":
            return [known for item in present for known in item]
        if node.op_type in _ELEMENTWISE and len(present) == 2:
            length = max(map(len, present))
            first, second = (item * length if len(item) == 1 else item for item in present)
            return [a and b for a, b in zip(first, second)]
        return [all(map(all, present))]

    def _of(self, name: str) -> list[bool] | None:
        return [True] * len(self._constants[name]) if name in self._constants else self._known.get(name)
