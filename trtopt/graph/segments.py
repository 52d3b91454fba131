"""A graph cut into models of consecutive nodes, to run parts of it again and again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from trtopt.core.errors import ModelError
from trtopt.graph.proto import inferred_values, node_reads

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


def divided(proto: ModelProto, ends: Collection[str], renamed: Mapping[Slot, str]) -> list[Segment]:
    """The graph in segments, of which each but the last ends with the node that makes one of `ends`.

    Args:
        proto: folded, so that nodes have names; weights in memory.
        renamed: what an input of a node is called in its segment, so that it can be given a value of its own.

    Raises:
        ModelError: ONNX's inference doesn't find the type of a tensor that goes from one segment to another.
    """
    graph = proto.graph
    types = inferred_values(proto)
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
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in part]
        for node in nodes:
            for index, name in enumerate(node.input):
                if alias := renamed.get((node.name, index)):
                    node.input[index] = alias
                    types[alias] = _described(types, name)
        outputs = [name for node in part for name in node.output if name and read_last.get(name, -1) > number]
        if outputs:
            segments.append(_segment(proto, nodes, sorted(outputs), types, weights))
    return segments


def joined(segments: Sequence[Segment], outputs: Collection[str], aliases: Mapping[str, str]) -> Segment:
    """Segments that follow each other, as one.

    Args:
        outputs: what of the tensors that they make is wanted.
        aliases: inputs of segments → the tensors that they are, where one of these segments makes those.
    """
    types: dict[str, ValueInfoProto] = {}
    weights: dict[str, TensorProto] = {}
    nodes: list[NodeProto] = []
    made = dict[str, None]()
    for segment in segments:
        graph = segment.proto.graph
        for name in segment.inputs:
            if (source := aliases.get(name)) in made and name not in made:
                nodes.append(helper.make_node("Identity", [source], [name], name))
                made[name] = None
        nodes += graph.node
        made |= dict.fromkeys(name for node in graph.node for name in node.output if name)
        types |= {value.name: value for value in (*graph.input, *graph.output)}
        weights |= {tensor.name: tensor for tensor in graph.initializer}
    return _segment(segments[0].proto, nodes, [name for name in made if name in outputs], types, weights)


def _segment(
    like: ModelProto,
    nodes: Sequence[NodeProto],
    outputs: Sequence[str],
    types: Mapping[str, ValueInfoProto],
    weights: Mapping[str, TensorProto],
) -> Segment:
    """Make a model of nodes in the versions of another, which reads what they don't make."""
    model = ModelProto(ir_version=like.ir_version, opset_import=like.opset_import, functions=like.functions)
    model.graph.name = like.graph.name
    made = {name for node in nodes for name in node.output}
    reads = [name for name in dict.fromkeys(name for node in nodes for name in node_reads(node)) if name not in made]
    inputs = [name for name in reads if name not in weights]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(weights[name] for name in reads if name in weights)
    model.graph.input.extend(_described(types, name) for name in inputs)
    model.graph.output.extend(_described(types, name) for name in outputs)
    return Segment(model, tuple(inputs), tuple(outputs))


def _described(types: Mapping[str, ValueInfoProto], name: str) -> ValueInfoProto:
    if name not in types:
        raise ModelError(
            f"ONNX doesn't know the type of the tensor {name!r}, so the model can't be run in parts there: "
            "an operator of another domain makes it, perhaps"
        )
    value = ValueInfoProto()
    value.CopyFrom(types[name])
    value.name = name
    for dim in value.type.tensor_type.shape.dim:  # symbols of one segment may be wrong in another
        dim.ClearField("dim_param")
    return value
