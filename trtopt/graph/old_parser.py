"""ONNX as the parser of TensorRT 8.6 reads it: an older opset, and nothing that it passes over.

Some importers of 8.6 don't look at an attribute and say nothing: the network then computes something else. Such a node is
written in other words where that is simple, and refused by name where it isn't. Source: onnx-tensorrt, release/8.6-GA,
builtin_op_importers.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from trtopt.errors import ModelError, UnsupportedOperator
from trtopt.graph.guard import fault
from trtopt.graph.opset import lower_opset
from trtopt.graph.proto import all_nodes, node_label, subgraphs
from trtopt.spec import Issue

_INT32_MAX = 2**31 - 1
Attributes = Mapping[str, Any]


def readable(proto: ModelProto, max_opset: int | None) -> ModelProto:
    """The same model as a generation's parser reads it (`Capabilities.max_opset`; None: as it is).

    Raises:
        UnsupportedOperator: an operator, or a way of using one, doesn't exist at that opset, or isn't seen by the parser.
        ModelError: what comes out isn't valid, or computes something else.
    """
    return proto if max_opset is None else _rewritten(lower_opset(proto, max_opset))


def _rewritten(proto: ModelProto) -> ModelProto:
    nodes = [(node, _attributes(node)) for node in all_nodes(proto.graph) if node.domain in ("", "ai.onnx")]
    passed_over = [
        Issue(node.name or node_label(node), node.op_type, reason)
        for node, attributes in nodes
        if node.op_type in _REFUSED and (reason := _REFUSED[node.op_type](attributes))
    ]
    if passed_over:
        raise UnsupportedOperator(
            f"TensorRT 8.6 would compute something else for {len(passed_over)} node(s)",
            passed_over,
            "use a later generation",
        )
    if not any(node.op_type == "Shape" and _cut(attributes) for node, attributes in nodes):
        return proto
    made = ModelProto()
    made.CopyFrom(proto)
    names = _Names(made)
    for graph in _graphs(made.graph):
        parts = [part for node in graph.node for part in (_shape(node, names) if node.op_type == "Shape" else [node])]
        del graph.node[:]
        graph.node.extend(parts)
    if problem := fault(proto, made):
        raise ModelError(f"the model can't be written as TensorRT 8.6 reads it ({problem}); please report the model")
    return made


def _attributes(node: NodeProto) -> Attributes:
    return {item.name: helper.get_attribute_value(item) for item in node.attribute if not item.ref_attr_name}


def _reduction(attributes: Attributes) -> str:
    found = attributes.get("reduction", b"none").decode()
    return "" if found == "none" else f"its reduction {found!r} isn't read: values would be replaced"


def _layout(attributes: Attributes) -> str:
    return "its layout 1 (batch first) isn't read; export it with layout 0" if attributes.get("layout") else ""


_REFUSED: Mapping[str, Callable[[Attributes], str]] = {
    "ScatterElements": _reduction,
    "ScatterND": _reduction,
    "RNN": _layout,
    "GRU": _layout,
    "LSTM": _layout,
}


def _cut(attributes: Attributes) -> bool:
    return bool(attributes.keys() & {"start", "end"})


def _shape(node: NodeProto, names: _Names) -> list[NodeProto]:
    """`start` and `end` (opset 15) aren't read, the whole shape comes out: cut it afterwards."""
    attributes = _attributes(node)
    if not _cut(attributes):
        return [node]
    output = node.output[0]
    whole = names.fresh(f"{output}_whole")
    bounds = {"start": attributes.get("start", 0), "end": attributes.get("end", _INT32_MAX), "axis": 0}
    inputs = [names.integer(value, f"{output}_{name}") for name, value in bounds.items()]
    return [
        helper.make_node("Shape", list(node.input), [whole], node.name),
        helper.make_node("Slice", [whole, *inputs], [output], names.fresh(f"{node.name}_part")),
    ]


class _Names:
    """Fresh names, and integers as constants of the outermost graph, which every body sees."""

    def __init__(self, proto: ModelProto) -> None:
        self.graph = proto.graph
        self.taken = {name for node in all_nodes(proto.graph) for name in (node.name, *node.output)}
        self.taken |= {item.name for item in (*proto.graph.initializer, *proto.graph.input)}

    def fresh(self, name: str) -> str:
        unique, number = name, 0
        while unique in self.taken:
            number += 1
            unique = f"{name}_{number}"
        self.taken.add(unique)
        return unique

    def integer(self, value: int, name: str) -> str:
        tensor = numpy_helper.from_array(np.array([value], np.int64), self.fresh(name))
        self.graph.initializer.append(tensor)
        return tensor.name


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The bodies before the graph that holds them: a graph's nodes are replaced when it has been given."""
    for node in graph.node:
        for body in subgraphs(node):
            yield from _graphs(body)
    yield graph
