"""Loops of a known number of steps, written out: precision and scales reach into their steps then, as into any node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtopt.graph.proto import STANDARD, Links, opset_version, own_names, refill, subgraphs, to_array

NODES = 1000  # that one loop may become


def unrolled(proto: ModelProto) -> ModelProto:
    """The model with such loops of its main graph written out, whose condition stays true; itself where there is none."""
    graph = proto.graph
    loops = [place for place, node in enumerate(graph.node) if node.op_type == "Loop" and node.domain in STANDARD]
    if not loops or opset_version(proto) < 13:
        return proto
    constants = Links(graph).constants
    known = {place: steps for place in loops if (steps := _steps(graph.node[place], constants)) is not None}
    if not known:
        return proto
    result = ModelProto()
    result.CopyFrom(proto)
    nodes: list[NodeProto] = []
    for place, node in enumerate(result.graph.node):
        nodes += _Loop(result.graph, node, known[place]).nodes if place in known else [node]
    refill(result.graph.node, nodes)
    return result


def _steps(loop: NodeProto, outside: Mapping[str, TensorProto]) -> int | None:
    """How many there are; None: it isn't known, the condition may end it, or too much would come of it."""
    (body,) = subgraphs(loop)
    count = outside.get(loop.input[0])
    goes_on = len(loop.input) < 2 or not loop.input[1] or _true(outside.get(loop.input[1]))
    if count is None or not goes_on:
        return None
    inside, name = Links(body), body.output[0].name
    while (maker := inside.makers.get(name)) is not None and maker.op_type == "Identity":
        name = maker.input[0]
    stays = name == body.input[1].name or _true({**outside, **inside.constants}.get(name))
    steps = max(0, int(to_array(count).reshape(())))
    scans = len(body.output) > len(body.input) - 1
    fits = steps * len(inside.nodes) <= NODES and (steps > 0 or not scans)
    return steps if stays and fits else None


def _true(tensor: TensorProto | None) -> bool:
    return tensor is not None and bool(to_array(tensor).reshape(()))


class _Loop:
    """One, as the nodes that take its place."""

    def __init__(self, graph: GraphProto, loop: NodeProto, steps: int) -> None:
        (body,) = subgraphs(loop)
        self.graph, self.nodes, self.prefix = graph, list[NodeProto](), loop.name or loop.output[0]
        while any(name.startswith(f"{self.prefix}/") for name in own_names(graph)):
            self.prefix += "_"
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
    own = own_names(body)
    outer = {name: new for name, new in names.items() if name not in own}
    for node in body.node:
        for index, name in enumerate(node.input):
            node.input[index] = outer.get(name, name)
        for inner in subgraphs(node):
            _rename_captured(inner, outer)
    for value in body.output:
        value.name = outer.get(value.name, value.name)
