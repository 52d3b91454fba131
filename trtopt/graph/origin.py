"""Nodes in the words of the user's own model: folding and typing make nodes, and names, that nobody has seen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnx import ModelProto, NodeProto

from trtopt.core.values import Issue
from trtopt.core.words import first_of
from trtopt.graph.fixed_inputs import how_to_decide
from trtopt.graph.proto import Links, all_nodes, node_label, subgraphs


class Origins:
    """Origins of the nodes of a graph that was made from a model.

    Args:
        original: the model as it was given.
        made: what was built of it.
    """

    def __init__(self, original: ModelProto, made: ModelProto) -> None:
        nodes = list(all_nodes(original.graph))
        self._names = {node.name for node in nodes if node.name}
        self._tensors = {value.name for value in original.graph.input}
        self._tensors.update(name for node in nodes for name in node.output)
        self._made, self._links = made, Links(made.graph)
        self._nodes = {node.name: node for node in self._links.nodes}

    def of(self, name: str) -> str:
        """Return where a node comes from, such as "gives 'Y'"; empty where the model has a node or tensor of that name."""
        node = self._nodes.get(name)
        if node is None or name in self._names or name in self._tensors:
            return ""
        if tensor := next((item for item in node.output if item in self._tensors), ""):
            return f"gives {tensor!r}"
        return f"part of what gives {tensor!r}" if (tensor := next(self._after(node), "")) else ""

    def _after(self, node: NodeProto) -> Iterator[str]:
        """Tensors of the model that are computed from a node's results, nearest first."""
        pending, seen = [node], {node.name}
        for item in pending:  # grows on the way
            for user in (user for name in item.output if name for user in self._links.readers.get(name, ())):
                if user.name not in seen:
                    seen.add(user.name)
                    pending.append(user)
                    yield from (name for name in user.output if name in self._tensors)

    def retold(self, issue: Issue) -> str:
        """An issue in the model's words."""
        return issue.text(self.of(issue.node))

    def explained(self, text: str) -> str:
        """A message of TensorRT's, with where the nodes come from that it names and the model doesn't.

        One that names nothing of the graph gets what TensorRT's builder most often fails on, where the model has that.
        """
        words = {word.rstrip(".") for word in re.findall(r"[^\s\"'`()\[\]{},;:]+", text)}
        nodes = [node for name, node in self._nodes.items() if name in words]
        origins = [f"{node.name} {origin}" for node in nodes if (origin := self.of(node.name))]
        if origins:
            return f"{text} (in the model: {'; '.join(origins[:4])})"
        flow = [node for node in self._nodes.values() if any(subgraphs(node))]
        if nodes or not flow:
            return text
        some = first_of(
            f"{node.op_type} that {it}" if (it := self.of(node.name)) else node_label(node) for node in flow
        )
        advice = "export it with that decided, or, where it depends on a size, leave its other side out of `shapes=`"
        advice += f"; {decide}" if (decide := how_to_decide(self._made)) else ""
        return f"{text}; the model holds control flow, of which TensorRT builds only part: {some}: {advice}"
