"""Results of passes over a graph, and the loop of those that take one node after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.core.errors import UnsupportedOperator
from trtopt.core.values import Issue, Kept
from trtopt.graph.view import Editor, drop_unread


@dataclass(frozen=True)
class PassResult:
    """Result of a pass. Passes change the graph that they are given.

    Attributes:
        model: the graph.
        changes: names of the nodes that it changed, or made; empty: none.
        kept: nodes that it left in a higher precision, each with its reason.
    """

    model: ir.Model
    changes: Collection[str] = ()
    kept: tuple[Kept, ...] = ()


class Refused(Exception):
    """The reason why a rule can't write a node as it should be."""


class Line:
    """New nodes in the order in which they compute, in place of one or in front of it, named after it; they give `dtype`."""

    def __init__(self, editor: Editor, node: ir.Node, dtype: ir.DataType | None = None) -> None:
        self.nodes: list[ir.Node] = []
        self._editor, self._name, self._dtype = editor, str(node.name or node.outputs[0].name), dtype

    def integers(self, content: Any) -> ir.Value:
        return self._editor.constant(f"{self._name}/constant", content, np.int64)

    def __call__(self, op: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        name = self._editor.fresh(f"{self._name}/{op}")
        self.nodes.append(self._editor.node(op, inputs, name, self._dtype, name=name, **attributes))
        return self.nodes[-1].outputs[0]


def set_input(node: ir.Node, slot: int, value: ir.Value) -> None:
    """Give a node an input, those before it that it hasn't left out."""
    node.resize_inputs(max(slot + 1, len(node.inputs)))
    node.replace_input_with(slot, value)


def become(node: ir.Node, op: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> None:
    """Make a node another operator, of these inputs and attributes alone."""
    node.op_type = op
    node.attributes.clear()
    for name, content in attributes.items():
        node.attributes[name] = ir.convenience.convert_attribute(name, content)
    node.resize_inputs(len(inputs))
    for slot, value in enumerate(inputs):
        node.replace_input_with(slot, value)


def chain(node: ir.Node, editor: Editor, value: ir.Value, *steps: tuple[str, ir.Value]) -> None:
    """Make a node the last of operators of two operands, each of which takes what the one before gives.

    The first takes `value`, and has the node's name.
    """
    line = Line(editor, node, node.outputs[0].dtype)
    for op, other in steps[:-1]:
        value = line(op, value, other)
    node.graph.insert_before(node, line.nodes)
    become(node, steps[-1][0], [value, steps[-1][1]])
    if line.nodes:
        line.nodes[0].name, node.name = node.name, line.nodes[0].name


def rewrite_nodes(model: ir.Model, rule: Callable[[ir.Node, Editor], bool], failure: str, instead: str) -> list[str]:
    """Let a rule rewrite every node, those of bodies too, and name those that it says it changed.

    Raises:
        UnsupportedOperator: "FAILURE … node(s)", with every node that the rule refuses, and `instead`.
    """
    editor, issues, changes = Editor(model), list[Issue](), list[str]()
    for node in list(model.graph.all_nodes()):
        name = node.name or f"{node.op_type} → {node.outputs[0].name!r}"
        try:
            if rule(node, editor):
                changes.append(name)
        except Refused as reason:
            issues.append(Issue(name, node.op_type, str(reason)))
    if issues:
        raise UnsupportedOperator(f"{failure} {len(issues)} node(s)", issues, instead)
    drop_unread(model.graph)
    return changes
