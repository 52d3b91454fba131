"""Other names for a graph's inputs, outputs and weights."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from trtopt.graph.proto import unique


def rename_values(model: ir.Model, names: Mapping[str, str], prefix: str) -> None:
    """Give inputs and outputs the `names` (old → new), and take `prefix` off weights' names; in place.

    Any other value that has such a name already gets another: torch's exporter would leave two of the same name.
    """
    values: dict[str, list[ir.Value]] = {}
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *(item for node in graph for item in node.outputs)):
            values.setdefault(str(value.name), []).append(value)
    wished = set(names.values())
    taken, change = values.keys() | wished, dict[str, str]()
    for name in sorted(values.keys() - names.keys()):
        shorter = name.removeprefix(prefix)
        if shorter not in taken:
            change[name] = unique(shorter, taken)
        elif name in wished:
            change[name] = unique(f"{name}_inner", taken)
    for name, other in (*change.items(), *names.items()):  # first who is in the way
        for value in values.get(name, ()):
            value.name = other
