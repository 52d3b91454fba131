"""Results of passes over a graph, and the loop of those that take one node after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        changes: node of the graph before → the one that computes it now, itself where it was changed; empty: none was.
        kept: nodes that it left in a higher precision, each with its reason.
    """

    model: ir.Model
    changes: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()

    @property
    def changed(self) -> bool:
        return bool(self.changes)


class Refused(Exception):
    """The reason why a rule can't write a node as it should be."""


class Line:
    """New nodes in the order in which they compute, in place of one or in front of it, named after it."""

    def __init__(self, editor: Editor, node: ir.Node) -> None:
        self.nodes: list[ir.Node] = []
        self._editor, self._name = editor, str(node.name or node.outputs[0].name)

    def number(self, content: Any, dtype: Any = np.float32) -> ir.Value:
        return self._editor.constant(f"{self._name}/constant", content, dtype)

    def __call__(self, op: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        name = self._editor.fresh(f"{self._name}/{op}")
        self.nodes.append(self._editor.node(op, inputs, name, name=name, **attributes))
        return self.nodes[-1].outputs[0]


def rewrite_nodes(
    model: ir.Model, rule: Callable[[ir.Node, Editor], bool], failure: str, instead: str
) -> dict[str, str]:
    """Let a rule rewrite every node, those of bodies too, and name those that it says it changed.

    Raises:
        UnsupportedOperator: "FAILURE … node(s)", with every node that the rule refuses, and `instead`.
    """
    editor, issues, changes = Editor(model), list[Issue](), dict[str, str]()
    for node in list(model.graph.all_nodes()):
        name = node.name or f"{node.op_type} → {node.outputs[0].name!r}"
        try:
            if rule(node, editor):
                changes[name] = name
        except Refused as reason:
            issues.append(Issue(name, node.op_type, str(reason)))
    if issues:
        raise UnsupportedOperator(f"{failure} {len(issues)} node(s)", issues, instead)
    drop_unread(model.graph)
    return changes
