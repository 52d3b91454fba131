"""Find the open axes of its inputs that a model mixes: on an axis that nothing mixes, entries are samples beside each other.

Each open size is made a prime of its own, and shapes are inferred with these, so that a size anywhere tells by its factors
which axes it comes from, merged or not (steps × samples, samples × heads). Nodes that sum, normalize, pick or join along an
axis mix what its size comes from; nodes that compute element by element, or move elements, mix nothing. A node that isn't
known to do one of the two leaves the question open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from trtopt.core.values import TensorInfo
from trtopt.graph.op_types import ELEMENTWISE
from trtopt.graph.proto import STANDARD, attribute, opset_version, schema_of, subgraphs

Place = tuple[str, int]  # an input and an axis
# Large ones, and where tables of positions end before them, small ones; of both those that the model's own sizes haven't.
_PRIMES = (
    (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093),
    (29, 31, 37, 41, 43, 47, 53, 59, 61),
)
_NODES = 20_000  # of a model that is looked at
_SMALL = 64  # numbers of a tensor that may be a shape
_NORMALIZING = ("Softmax", "LogSoftmax", "Hardmax")
_ALONG = {"ArgMax": 0, "ArgMin": 0, "TopK": -1, "Gather": 0, "Split": 0}
_ALONG |= {"GatherElements": 0, "LpNormalization": -1}
_FROM = {"LayerNormalization": -1, "RMSNormalization": -1}  # from this axis on
_BEHIND = {"InstanceNormalization": 2, "GlobalAveragePool": 2, "GlobalMaxPool": 2, "AveragePool": 2, "MaxPool": 2}
_BEHIND |= {"Conv": 1, "ConvTranspose": 1, "GroupNormalization": 1}  # all axes from this one on
_RESIZING = ("Slice", "Pad")


class _Open(Exception):
    """It isn't known what a node does."""


def independent_axes(proto: ModelProto, inputs: Mapping[str, TensorInfo]) -> dict[str, list[int]] | None:
    """Input → its open axes that nothing mixes; None where that isn't known.

    Args:
        proto: weights aren't read but for small ones.
    """
    places = [(name, axis) for name, info in inputs.items() for axis in info.open_axes]
    if (
        proto.functions
        or len(proto.graph.node) > _NODES
        or any(node.domain not in STANDARD or any(subgraphs(node)) for node in proto.graph.node)
    ):
        return None
    own: list[object] = [inputs[name].dimension(axis) for name, axis in places]
    by_axis: list[object] = [axis for _, axis in places]  # unnamed sizes may have to be equal: those on the same axis
    fixed = {size for tensor in proto.graph.initializer for size in tensor.dims}
    for choice, keys in itertools.product(_PRIMES, (own, by_axis)):
        free = [prime for prime in choice if all(size % prime for size in fixed if size)]
        if len(set(keys)) > len(free):
            continue
        primes = dict(zip(dict.fromkeys(keys), free))
        sizes = {place: primes[key] for place, key in zip(places, keys)}
        try:
            mixed = _Sizes(proto, inputs, sizes).mixed()
        except Exception:  # `_Open`, and what ONNX's inference and evaluator raise, which has no common base
            continue
        return {
            name: [axis for axis in info.open_axes if sizes[name, axis] not in mixed] for name, info in inputs.items()
        }
    return None


class _Sizes:
    """Shapes and small integer values through a graph whose inputs have these sizes."""

    def __init__(self, proto: ModelProto, inputs: Mapping[str, TensorInfo], sizes: Mapping[Place, int]) -> None:
        self._nodes, self._opset, self._primes = proto.graph.node, opset_version(proto), set(sizes.values())
        self._imports = [helper.make_opsetid("", self._opset)]
        self._types: dict[str, TypeProto] = {}
        self._values: dict[str, TensorProto] = {}
        for tensor in proto.graph.initializer:
            self._types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            if math.prod(tensor.dims) <= _SMALL:
                self._values[tensor.name] = tensor
        for value in proto.graph.input:
            if value.name in inputs:
                shape = [sizes.get((value.name, axis), size) for axis, size in enumerate(inputs[value.name].shape)]
                self._types[value.name] = helper.make_tensor_type_proto(value.type.tensor_type.elem_type, shape)

    def mixed(self) -> set[int]:
        """The primes of all sizes that a node mixes.

        Raises:
            _Open: of a node it isn't known whether it does.
            Exception: the sizes don't go together.
        """
        found: set[int] = set()
        for node in self._nodes:
            self._infer(node)
            for size in self._mixing(node):
                found |= self._of(size)
        return found

    def _of(self, size: int) -> set[int]:
        return {prime for prime in self._primes if size and size % prime == 0}

    def _shape(self, name: str) -> tuple[int, ...]:
        kind = self._types.get(name)
        if kind is None or not kind.tensor_type.HasField("shape"):
            raise _Open
        dims = kind.tensor_type.shape.dim
        if not all(dim.HasField("dim_value") for dim in dims):
            raise _Open
        return tuple(dim.dim_value for dim in dims)

    def _infer(self, node: NodeProto) -> None:
        schema = schema_of(node.op_type, self._opset)
        if schema is None:
            raise _Open
        reads = [name for name in node.input if name]
        known = {name: self._types[name] for name in reads if name in self._types}
        data = {name: self._values[name] for name in reads if name in self._values}
        self._types |= onnx.shape_inference.infer_node_outputs(schema, node, known, data, None, self._imports)
        if node.op_type == "Shape" or (data.keys() == set(reads) and len(node.output) == 1):
            self._evaluate(node, data)

    def _evaluate(self, node: NodeProto, data: Mapping[str, TensorProto]) -> None:
        """Return what a node gives that computes shapes."""
        (name,) = node.output
        if math.prod(self._shape(name)) > _SMALL:
            return
        value: Any
        if node.op_type == "Shape":
            shape = self._shape(node.input[0])
            value = np.asarray(shape[attribute(node, "start", 0) : attribute(node, "end", len(shape))], np.int64)
        elif node.op_type == "Constant":
            (item,) = node.attribute
            held = helper.get_attribute_value(item)
            value = numpy_helper.to_array(held) if isinstance(held, TensorProto) else np.asarray(held)
        else:
            graph = helper.make_graph([node], "one", [], [onnx.ValueInfoProto(name=name)], list(_named(data)))
            (value,) = ReferenceEvaluator(helper.make_model(graph, opset_imports=self._imports)).run(None, {})
        if value.dtype.kind in "biuf":
            self._values[name] = numpy_helper.from_array(np.asarray(value), name)

    def _mixing(self, node: NodeProto) -> Iterator[int]:
        """The sizes of the axes that a node mixes."""
        op = node.op_type
        if op == "Reshape" and math.prod(self._shape(node.input[0])) != math.prod(self._shape(node.output[0])):
            raise _Open  # made for one size alone, as by a trace
        if op in ELEMENTWISE:
            return
        shapes = [self._shape(name) for name in node.input if name]
        first = shapes[0] if shapes else ()
        if op in _ALONG or op in _FROM or op == "Concat":
            axis = attribute(node, "axis", _ALONG.get(op, _FROM.get(op, 0)))
            axis += len(first) * (axis < 0)
            if op == "Concat":
                yield from (shape[axis] for shape in shapes if len(shapes) > 1)
            else:
                yield from first[axis : None if op in _FROM else axis + 1]
        elif op in _NORMALIZING:
            old = self._opset < 13  # then from the axis on
            axis = attribute(node, "axis", 1 if old else -1)
            axis += len(first) * (axis < 0)
            yield from first[axis : None if old else axis + 1]
        elif op in _BEHIND:
            yield from first[_BEHIND[op] :]
        elif op.startswith("Reduce"):
            yield from (first[axis] for axis in self._reduced(node, len(first)))
        elif op in _RESIZING:
            result = self._shape(node.output[0])
            yield from (size for size, other in zip(first, result) if size != other)
        elif op == "GatherND":
            start = attribute(node, "batch_dims", 0)
            yield from first[start : start + shapes[1][-1]]
        elif op == "ScatterND":
            yield from (*first[: shapes[1][-1]], *shapes[1][:-1])
        elif op == "ScatterElements":
            axis = attribute(node, "axis", 0)
            yield from (first[axis], shapes[1][axis])
        elif op == "CumSum":
            (axis,) = self._numbers(node.input[1])
            yield first[axis]
        elif op == "MatMul":
            yield first[-1]
            yield shapes[1][-2 if len(shapes[1]) > 1 else 0]
        elif op == "Gemm":
            yield first[0 if attribute(node, "transA", 0) else 1]
        elif op == "Einsum":
            yield from _summed(attribute(node, "equation", b"").decode(), shapes)
        elif any(self._of(size) for shape in shapes for size in shape):
            raise _Open

    def _numbers(self, name: str) -> list[int]:
        if name not in self._values:
            raise _Open
        return [int(number) for number in numpy_helper.to_array(self._values[name]).ravel()]

    def _reduced(self, node: NodeProto, rank: int) -> Sequence[int]:
        axes = attribute(node, "axes", None)
        if axes is None and len(node.input) > 1 and node.input[1]:
            axes = self._numbers(node.input[1])
        if not axes:
            return () if attribute(node, "noop_with_empty_axes", 0) else range(rank)
        return list(axes)


def _named(data: Mapping[str, TensorProto]) -> Iterator[TensorProto]:
    for name, tensor in data.items():
        held = TensorProto()
        held.CopyFrom(tensor)
        held.name = name
        yield held


def _summed(equation: str, shapes: Sequence[Sequence[int]]) -> Iterator[int]:
    """The sizes of an Einsum's letters that its result hasn't, or that an operand has twice."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if "." in equation or not arrow:
        raise _Open
    for letters, shape in zip(left.split(","), shapes):
        yield from (size for letter, size in zip(letters, shape) if letter not in right or letters.count(letter) > 1)
