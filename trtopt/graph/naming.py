"""Other names for a graph's inputs, outputs and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import GraphProto

from trtopt.graph.proto import subgraphs


def rename_values(graph: GraphProto, names: Mapping[str, str], prefix: str) -> None:
    """Give inputs and outputs the `names` (old → new), and take `prefix` off weights' names; in place.

    Any other value that has such a name already gets another: torch's exporter would leave two of the same name.
    """
    taken, wished = set(_values(graph)), set(names.values())
    change = dict(names)
    for name in sorted(taken - set(names)):
        wanted = name.removeprefix(prefix)
        if wanted != name and wanted not in taken and wanted not in wished:
            change[name] = wanted
            taken.add(wanted)
        elif name in wished:
            number = next(number for number in range(len(taken) + 1) if f"{name}_inner{number}" not in taken | wished)
            change[name] = f"{name}_inner{number}"
            taken.add(change[name])
    _apply(graph, change)


def _values(graph: GraphProto) -> Iterator[str]:
    for group in (graph.input, graph.output, graph.initializer):
        yield from (item.name for item in group)
    for node in graph.node:
        yield from (name for name in (*node.input, *node.output) if name)
        for inner in subgraphs(node):
            yield from _values(inner)


def _apply(graph: GraphProto, change: Mapping[str, str]) -> None:
    for group in (graph.input, graph.output, graph.initializer, graph.value_info):
        for item in group:
            item.name = change.get(item.name, item.name)
    for node in graph.node:
        node.input[:] = [change.get(name, name) for name in node.input]
        node.output[:] = [change.get(name, name) for name in node.output]
        for inner in subgraphs(node):
            _apply(inner, change)
