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

# Large ones, and where tables of positions end before them, small ones; of both those that the model's own sizes haven't.
_PRIMES = ((10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093), (29, 31, 37, 41, 43, 47, 53, 59, 61))
_NODES = 20_000  # of a model that is looked at
_SMALL = 64  # numbers of a tensor that may be a shape
# Operator → its default axis: those that go along it, and those that go along it and all that follow.
_ALONG = {"ArgMax": 0, "ArgMin": 0, "TopK": -1, "Gather": 0, "GatherElements": 0, "Split": 0, "LpNormalization": -1}
_ALONG |= dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), -1)
_FROM = {"LayerNormalization": -1, "RMSNormalization": -1}
_BEHIND = {"InstanceNormalization": 2, "GlobalAveragePool": 2, "GlobalMaxPool": 2, "AveragePool": 2, "MaxPool": 2}
_BEHIND |= {"Conv": 1, "ConvTranspose": 1, "GroupNormalization": 1}  # all axes from this one on
_OLD_SOFTMAX = 13  # the opset before which they went along all axes from their axis on, by default 1


class _Open(Exception):
    """It isn't known what a node does."""


def independent_axes(proto: ModelProto, inputs: Mapping[str, TensorInfo]) -> dict[str, list[int]] | None:
    """Input → its open axes that nothing mixes; None where that isn't known."""
    places = [(name, axis) for name, info in inputs.items() for axis in info.open_axes]
    nodes = proto.graph.node
    if len(nodes) > _NODES or any(node.domain not in STANDARD or any(subgraphs(node)) for node in nodes):
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
        graph = _Sizes(proto, inputs, sizes)
        try:
            mixed = {size for node in nodes for size in graph.mixed(node)}
        except Exception:  # `_Open`, and what ONNX's inference and evaluator raise, which has no common base
            continue
        free = [prime for prime in primes.values() if all(size % prime for size in mixed if size)]
        return {name: [axis for axis in info.open_axes if sizes[name, axis] in free] for name, info in inputs.items()}
    return None


class _Sizes:
    """Shapes and small values through a graph whose inputs have these sizes, found node by node: ONNX's inference of a whole
    graph doesn't follow what is computed of shapes as far."""

    def __init__(
        self, proto: ModelProto, inputs: Mapping[str, TensorInfo], sizes: Mapping[tuple[str, int], int]
    ) -> None:
        self._opset, self._primes = opset_version(proto), set(sizes.values())
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

    def _infer(self, node: NodeProto) -> None:
        schema: Any = schema_of(node.op_type, self._opset)  # None, of an unknown operator: its inference raises
        reads = [name for name in node.input if name]
        known = {name: self._types[name] for name in reads if name in self._types}
        data = {name: self._values[name] for name in reads if name in self._values}
        self._types |= onnx.shape_inference.infer_node_outputs(schema, node, known, data, None, self._imports)
        name = node.output[0]
        if node.op_type == "Shape":
            shape = self._shape(node.input[0])
            value: Any = np.asarray(shape[attribute(node, "start", 0) : attribute(node, "end", len(shape))], np.int64)
        elif data.keys() == set(reads) and len(node.output) == 1 and math.prod(self._shape(name)) <= _SMALL:
            graph = helper.make_graph([node], "one", [], [onnx.ValueInfoProto(name=name)], list(data.values()))
            (value,) = ReferenceEvaluator(helper.make_model(graph, opset_imports=self._imports)).run(None, {})
        else:
            return
        if value.dtype.kind in "biuf":
            self._values[name] = numpy_helper.from_array(np.asarray(value), name)

    def _shape(self, name: str) -> tuple[int, ...]:
        kind = self._types.get(name)
        if kind is None or not kind.tensor_type.HasField("shape"):
            raise _Open
        dims = kind.tensor_type.shape.dim
        if not all(dim.HasField("dim_value") for dim in dims):
            raise _Open
        return tuple(dim.dim_value for dim in dims)

    def _numbers(self, name: str) -> list[int]:
        return [int(number) for number in numpy_helper.to_array(self._values[name]).ravel()]

    def mixed(self, node: NodeProto) -> Iterator[int]:
        """The sizes of the axes that a node mixes.

        Raises:
            _Open: that isn't known.
            Exception: the sizes don't go together.
        """
        op = node.op_type
        self._infer(node)
        if op == "Reshape" and math.prod(self._shape(node.input[0])) != math.prod(self._shape(node.output[0])):
            raise _Open  # made for one size alone, as by a trace
        if op in ELEMENTWISE:
            return
        shapes = [self._shape(name) for name in node.input if name]
        first = shapes[0] if shapes else ()
        old = op in ("Softmax", "LogSoftmax", "Hardmax") and self._opset < _OLD_SOFTMAX
        if op in _ALONG or op in _FROM or op == "Concat":
            axis = attribute(node, "axis", 1 if old else (_ALONG | _FROM).get(op, 0))
            axis += len(first) * (axis < 0)
            if op == "Concat":
                yield from (shape[axis] for shape in shapes if len(shapes) > 1)
            else:
                yield from first[axis : None if op in _FROM or old else axis + 1]
        elif op in _BEHIND:
            yield from first[_BEHIND[op] :]
        elif op.startswith("Reduce"):
            yield from (first[axis] for axis in self._reduced(node, len(first)))
        elif op in ("Slice", "Pad"):
            yield from (size for size, other in zip(first, self._shape(node.output[0])) if size != other)
        elif op == "GatherND":
            yield from first[: attribute(node, "batch_dims", 0) + shapes[1][-1]]
        elif op == "ScatterND":
            yield from (*first[: shapes[1][-1]], *shapes[1][:-1])
        elif op == "ScatterElements":
            axis = attribute(node, "axis", 0)
            yield from (first[axis], shapes[1][axis])
        elif op == "CumSum":
            yield first[self._numbers(node.input[1])[0]]
        elif op == "MatMul":
            yield from (first[-1], shapes[1][-2 if len(shapes[1]) > 1 else 0])
        elif op == "Gemm":
            yield first[0 if attribute(node, "transA", 0) else 1]
        elif op == "Einsum":
            yield from _summed(attribute(node, "equation", b"").decode(), shapes)
        elif any(size and size % prime == 0 for shape in shapes for size in shape for prime in self._primes):
            raise _Open

    def _reduced(self, node: NodeProto, rank: int) -> Sequence[int]:
        axes = attribute(node, "axes", None)
        if axes is None and len(node.input) > 1 and node.input[1]:
            axes = self._numbers(node.input[1])
        if not axes:
            return () if attribute(node, "noop_with_empty_axes", 0) else range(rank)
        return list(axes)


def _summed(equation: str, shapes: Sequence[Sequence[int]]) -> Iterator[int]:
    """The sizes of an Einsum's letters that its result hasn't, or that an operand has twice."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if "." in equation or not arrow:
        raise _Open
    for letters, shape in zip(left.split(","), shapes):
        yield from (size for letter, size in zip(letters, shape) if letter not in right or letters.count(letter) > 1)
