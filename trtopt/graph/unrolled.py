"""Loops of a known number of steps, written out: precision and scales reach into their steps then, as into any node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtopt.graph.proto import STANDARD, all_nodes, attribute, opset_version, refill, subgraphs, to_array, unique

NODES = 1000  # that one loop may become


def unrolled(proto: ModelProto) -> ModelProto:
    """The model with such loops of its main graph written out, whose condition stays true; itself where there is none."""
    opset = opset_version(proto)
    loops = {
        place: steps
        for place, node in enumerate(proto.graph.node)
        if node.op_type == "Loop" and node.domain in STANDARD and (steps := _steps(node, proto.graph)) is not None
    }
    if not loops or opset < 13:
        return proto
    result = ModelProto()
    result.CopyFrom(proto)
    nodes: list[NodeProto] = []
    for place, node in enumerate(result.graph.node):
        nodes += _Loop(result.graph, node, loops[place]).nodes if place in loops else [node]
    refill(result.graph.node, nodes)
    return result


def _steps(loop: NodeProto, graph: GraphProto) -> int | None:
    """How many there are; None: it isn't known, the condition may end it, or too much would come of it."""
    (body,) = subgraphs(loop)
    outside = _constants(graph)
    count = outside.get(loop.input[0])
    goes_on = len(loop.input) < 2 or not loop.input[1] or _true(outside.get(loop.input[1]))
    if count is None or not goes_on:
        return None
    makers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while (maker := makers.get(name)) is not None and maker.op_type == "Identity":
        name = maker.input[0]
    stays = name == body.input[1].name or _true({**outside, **_constants(body)}.get(name))
    steps = max(0, int(to_array(count).reshape(())))
    scans = len(body.output) > len(body.input) - 1
    fits = steps * sum(1 for _ in all_nodes(body)) <= NODES and (steps > 0 or not scans)
    return steps if stays and fits else None


def _constants(graph: GraphProto) -> dict[str, TensorProto]:
    """Initializers of one element, and Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and isinstance(value := attribute(node, "value", None), TensorProto):
            found[node.output[0]] = value
    return {name: tensor for name, tensor in found.items() if np.prod(tensor.dims, dtype=int) == 1}


def _true(tensor: TensorProto | None) -> bool:
    return tensor is not None and tensor.data_type == TensorProto.BOOL and bool(to_array(tensor).reshape(()))


class _Loop:
    """One, as the nodes that take its place."""

    def __init__(self, graph: GraphProto, loop: NodeProto, steps: int) -> None:
        (body,) = subgraphs(loop)
        taken = {tensor.name for tensor in graph.initializer}
        self.prefix = unique(loop.name or loop.output[0], {name.split("/step")[0] for name in taken})
        self.graph, self.nodes = graph, list[NodeProto]()
        kept = {tensor.name: f"{self.prefix}/{tensor.name}" for tensor in body.initializer}
        for tensor in body.initializer:
            copy = graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = kept[tensor.name]
        number, going = body.input[0].name, body.input[1].name
        carried = [value.name for value in body.input[2:]]
        current = list(loop.input[2:])
        scanned: list[list[str]] = [[] for _ in body.output[1 + len(carried) :]]
        true = self._constant("true", np.array(True))
        for step in range(steps):
            names = {
                **kept,
                number: self._constant(f"step{step}", np.array(step)),
                going: true,
                **dict(zip(carried, current)),
            }
            for node in body.node:
                copied = NodeProto()
                copied.CopyFrom(node)
                self.nodes.append(_renamed(copied, names, f"{self.prefix}/step{step}/"))
            results = [names.get(value.name, value.name) for value in body.output[1:]]
            current = results[: len(carried)]
            for number_of_scan, (values, name) in enumerate(zip(scanned, results[len(carried) :])):
                values.append(f"{self.prefix}/step{step}/scan{number_of_scan}")
                self._add("Unsqueeze", [name, self._constant("first", np.array([0]))], values[-1])
        for values, name in zip(scanned, loop.output[len(carried) :]):
            if name:
                self._add("Concat", values, name, axis=0)
        for value, name in zip(current, loop.output):
            if name:
                self._add("Identity", [value], name)

    def _add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], f"{self.prefix}/{output}/{op}", **attributes))

    def _constant(self, what: str, content: NDArray[Any]) -> str:
        name = f"{self.prefix}/{what}"
        if all(tensor.name != name for tensor in self.graph.initializer):
            self.graph.initializer.append(numpy_helper.from_array(content, name))
        return name


def _renamed(node: NodeProto, names: dict[str, str], prefix: str) -> NodeProto:
    """In place; what it gives comes to `names`."""
    for index, name in enumerate(node.input):
        node.input[index] = names.get(name, name)
    for body in subgraphs(node):
        _rename_captured(body, names)
    for index, name in enumerate(node.output):
        if name:
            node.output[index] = names[name] = f"{prefix}{name}"
    node.name = f"{prefix}{node.name or node.op_type}"
    return node


def _rename_captured(body: GraphProto, names: Mapping[str, str]) -> None:
    own = set(_own(body))
    outer = {name: new for name, new in names.items() if name not in own}
    for node in body.node:
        for index, name in enumerate(node.input):
            node.input[index] = outer.get(name, name)
        for inner in subgraphs(node):
            _rename_captured(inner, outer)
    for value in body.output:
        value.name = outer.get(value.name, value.name)


def _own(body: GraphProto) -> Iterator[str]:
    yield from (value.name for value in body.input)
    yield from (tensor.name for tensor in body.initializer)
    yield from (name for node in body.node for name in node.output)
