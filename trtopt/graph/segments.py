"""A graph cut into models of consecutive nodes, to run parts of it again and again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from trtopt.core.errors import ModelError
from trtopt.graph.proto import empty_as, infer_shapes, node_reads

Slot = tuple[str, int]  # node name, input index


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes as a model.

    Attributes:
        proto: its graph's inputs and outputs are `inputs` and `outputs`; it holds the weights that its nodes read.
        inputs: tensors that it reads and doesn't make.
        outputs: tensors that it makes and that nodes behind it, or nobody but the caller, read.
    """

    proto: ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def with_constants(self, changes: Mapping[Slot, NDArray[np.float32]]) -> ModelProto:
        """The model with other constants in inputs of single nodes; other readers of the same weights keep theirs."""
        proto = ModelProto()
        proto.CopyFrom(self.proto)
        nodes = {node.name: node for node in proto.graph.node}
        for (label, index), content in changes.items():
            node, name = nodes[label], f"{label}/{index}/changed"
            node.input.extend([""] * (index + 1 - len(node.input)))
            node.input[index] = name
            proto.graph.initializer.append(numpy_helper.from_array(content, name))
        return proto


def divided(proto: ModelProto, ends: Collection[str], renamed: Mapping[Slot, str]) -> list[Segment]:
    """The graph in segments, of which each but the last ends with the node that makes one of `ends`.

    Args:
        proto: folded, so that nodes have names; weights in memory.
        renamed: what an input of a node is called in its segment, so that it can be given a value of its own.

    Raises:
        ModelError: ONNX's inference doesn't find the type of a tensor that goes from one segment to another.
    """
    graph = proto.graph
    types = {value.name: value for value in infer_shapes(proto).graph.value_info}
    types |= {value.name: value for value in (*graph.input, *graph.output)}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    parts: list[list[NodeProto]] = [[]]
    for node in graph.node:
        parts[-1].append(node)
        if not set(node.output).isdisjoint(ends):
            parts.append([])
    parts = [part for part in parts if part]
    read_last = {value.name: len(parts) for value in graph.output}
    for number, part in reversed(list(enumerate(parts))):
        for name in (name for node in part for name in node_reads(node)):
            read_last.setdefault(name, number)
    segments = []
    for number, part in enumerate(parts):
        results = {name for node in part for name in node.output if name}
        model = empty_as(proto, f"{graph.name} {number}")
        inputs: dict[str, ValueInfoProto] = {}
        for node in part:
            added = model.graph.node.add()
            added.CopyFrom(node)
            for name in dict.fromkeys(node_reads(node)):
                if name not in results and name not in weights:
                    inputs[name] = _described(types, name)
            for index, name in enumerate(node.input):
                if alias := renamed.get((node.name, index)):
                    added.input[index] = alias
                    inputs[alias] = _described(types, name, alias)
        reads = {name for node in model.graph.node for name in node_reads(node)}
        model.graph.initializer.extend(tensor for name, tensor in weights.items() if name in reads)
        model.graph.input.extend(value for name, value in inputs.items() if name in reads)
        outputs = [name for name in sorted(results) if read_last.get(name, -1) > number]
        model.graph.output.extend(_described(types, name) for name in outputs)
        if outputs:
            segments.append(Segment(model, tuple(value.name for value in model.graph.input), tuple(outputs)))
    return segments


def joined(segments: Sequence[Segment], outputs: Collection[str], aliases: Mapping[str, str]) -> Segment:
    """Segments that follow each other, as one.

    Args:
        outputs: what of the tensors that they make is wanted.
        aliases: inputs of segments → the tensors that they are, where one of these segments makes those.
    """
    model = empty_as(segments[0].proto, segments[0].proto.graph.name)
    inputs: dict[str, ValueInfoProto] = {}
    results: dict[str, ValueInfoProto] = {}
    weights: dict[str, TensorProto] = {}
    produced: set[str] = set()
    for segment in segments:
        graph = segment.proto.graph
        for value in graph.input:
            source = aliases.get(value.name)
            if source in produced and value.name not in produced:
                model.graph.node.add(op_type="Identity", name=value.name, input=[source], output=[value.name])
                produced.add(value.name)
            elif value.name not in produced:
                inputs[value.name] = value
        model.graph.node.extend(graph.node)
        weights |= {tensor.name: tensor for tensor in graph.initializer}
        produced |= {name for node in graph.node for name in node.output if name}
        results |= {value.name: value for value in graph.output if value.name in outputs}
    model.graph.initializer.extend(weights.values())
    model.graph.input.extend(inputs.values())
    model.graph.output.extend(results.values())
    return Segment(model, tuple(inputs), tuple(results))


def _described(types: Mapping[str, ValueInfoProto], name: str, alias: str = "") -> ValueInfoProto:
    if name not in types:
        raise ModelError(
            f"ONNX doesn't know the type of the tensor {name!r}, so the model can't be run in parts there: "
            "an operator of another domain makes it, perhaps"
        )
    value = ValueInfoProto()
    value.CopyFrom(types[name])
    value.name = alias or name
    for dim in value.type.tensor_type.shape.dim:  # symbols of one segment may be wrong in another
        dim.ClearField("dim_param")
    return value
