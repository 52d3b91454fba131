"""A graph with custom operators in ONNX Runtime: sessions of the parts between them, and their references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from trtopt.core.errors import ModelError, UsageError
from trtopt.core.operators import known
from trtopt.core.words import counted
from trtopt.graph.proto import attributes_of, custom_nodes, inferred_values, node_label, node_reads, refill, to_array

Part = Callable[[dict[str, Any]], dict[str, Any]]
WITHOUT = "nothing here computes the operator {}: name its reference, `operators=['OPS.py']` (docs/custom-operators.md)"


class SplitSession:
    """Runs a graph as an `onnxruntime.InferenceSession` does. Calls may overlap.

    Nodes are run in turns: all standard ones that wait for no custom operator as one session, then the custom ones that read
    only what is there, and so on.

    Args:
        outputs: tensors to compute, and nothing that they don't need; None: the graph's own outputs.
        open_part: makes the session of a part, by the names of what it has to give.
    """

    def __init__(
        self, proto: ModelProto, outputs: Sequence[str] | None, open_part: Callable[[ModelProto, Sequence[str]], Any]
    ) -> None:
        self._weights = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._inputs = [value for value in proto.graph.input if value.name not in self._weights]
        declared = {value.name: value for value in proto.graph.output}
        self.wanted = [*declared] if outputs is None else list(outputs)
        self._outputs = [declared.get(name) or ValueInfoProto(name=name) for name in self.wanted]
        self._types = inferred_values(proto)
        self._constant = {name: to_array(self._weights[name]) for name in self.wanted if name in self._weights}
        self._proto, self._open = proto, open_part
        self._providers = ["CPUExecutionProvider"]
        later, steps = {*self.wanted}, list[list[Part]]()
        for is_custom, nodes in reversed(_turns(proto, self.wanted)):
            steps.append([*map(self._call, nodes)] if is_custom else [self._part(nodes, later)])
            later.update(name for node in nodes for name in node_reads(node))
        self._steps = [step for turn in reversed(steps) for step in turn]

    def get_inputs(self) -> list[Any]:
        return [_described(value) for value in self._inputs]

    def get_outputs(self) -> list[Any]:
        return [_described(value) for value in self._outputs]

    def get_providers(self) -> list[str]:
        return self._providers

    def run(self, outputs: Sequence[str] | None, feed: Mapping[str, Any]) -> list[Any]:
        """Return these outputs, or all, in that order."""
        values = {**self._constant, **feed}
        for step in self._steps:
            values.update(step(values))
        return [values[name] for name in (self.wanted if outputs is None else outputs)]

    def _part(self, nodes: Sequence[NodeProto], needed: set[str]) -> Part:
        made = {name for node in nodes for name in node.output if name}
        reads = dict.fromkeys(name for node in nodes for name in node_reads(node) if name not in made)
        part = ModelProto(ir_version=self._proto.ir_version, opset_import=self._proto.opset_import)
        part.functions.extend(self._proto.functions)
        graph = part.graph
        graph.name = self._proto.graph.name or "part"
        graph.node.extend(nodes)
        graph.initializer.extend(self._weights[name] for name in reads if name in self._weights)
        fed = [name for name in reads if name not in self._weights]
        refill(graph.input, map(self._input, fed))
        given = [name for name in made if name in needed]
        graph.output.extend(ValueInfoProto(name=name) for name in given)
        session = self._open(part, given)
        self._providers = session.get_providers()
        return lambda values: dict(zip(given, session.run(given, {name: values[name] for name in fed})))

    def _input(self, name: str) -> ValueInfoProto:
        """Declare what a part reads, of any shape."""
        own = next((value for value in self._inputs if value.name == name), self._types.get(name))
        kind = 0 if own is None else own.type.tensor_type.elem_type
        if not kind:
            maker = next((node_label(node) for node in self._proto.graph.node if name in node.output), "nothing")
            raise ModelError(
                f"the type of {name!r}, from {maker}, isn't known: say what the operator gives, by `outputs=` of "
                "@trtopt.operator"
            )
        return helper.make_tensor_value_info(name, kind, None)

    def _call(self, node: NodeProto) -> Part:
        """Return the step that calls a node's reference."""
        operator, attributes = known(node.domain, node.op_type), attributes_of(node)
        if operator is None:
            raise ModelError(f"{node_label(node)}: {WITHOUT.format(f'{node.domain}::{node.op_type}')}")
        types = [self._types.get(name) for name in node.output]
        held = {name: to_array(self._weights[name]) for name in node.input if name in self._weights}

        def call(values: dict[str, Any]) -> dict[str, Any]:
            # Copies: a function may work in place, and others read the same tensor.
            arrays = [np.array(held[name] if name in held else values[name]) if name else None for name in node.input]
            results = operator(arrays, attributes)
            if len(results) != len(node.output):
                given, needed = counted(len(results), "result"), len(node.output)
                raise UsageError(f"the reference of {operator.name} gives {given}; {node_label(node)} has {needed}")
            named = f"the reference of {operator.name} gives {node_label(node)}"
            return {
                name: _of_type(result, kind, named) for name, result, kind in zip(node.output, results, types) if name
            }

        return call


def _turns(proto: ModelProto, wanted: Iterable[str]) -> list[tuple[bool, list[NodeProto]]]:
    """Return the nodes that `wanted` needs in turns, standard ones and custom ones (True), each after what it reads."""
    custom = {name for node in custom_nodes(proto) for name in node.output if name}
    needed = {*wanted}
    for node in reversed(proto.graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(node_reads(node))
    turn_of, turns = dict[str, int](), dict[int, list[NodeProto]]()
    for node in proto.graph.node:
        if not needed.isdisjoint(node.output):
            turn = max((turn_of[name] for name in node_reads(node) if name in turn_of), default=0)
            turn += turn % 2 != (not custom.isdisjoint(node.output))  # custom ones in every second turn
            turn_of.update(dict.fromkeys(node.output, turn))
            turns.setdefault(turn, []).append(node)
    return [(turn % 2 == 1, turns[turn]) for turn in sorted(turns)]


def _described(value: ValueInfoProto) -> SimpleNamespace:
    """Describe an input or output as ONNX Runtime does."""
    tensor = value.type.tensor_type
    kind = TensorProto.DataType.Name(tensor.elem_type).lower()
    sizes = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim]
    return SimpleNamespace(name=value.name, type=f"tensor({kind})", shape=sizes)


def _of_type(result: Any, declared: ValueInfoProto | None, who: str) -> NDArray[Any]:
    """Return a reference's result in the type that the graph goes on with: Python computes in float64 by itself."""
    kind, array = 0 if declared is None else declared.type.tensor_type.elem_type, np.asarray(result)
    made = np.ascontiguousarray(array, helper.tensor_dtype_to_np_dtype(kind) if kind else None).reshape(array.shape)
    if array.dtype.kind == "f" and made.dtype.kind in "biu" and not np.array_equal(array, made):
        raise UsageError(
            f"{who} fractions; the graph has {made.dtype} there: round them, or name its type in `outputs=`"
        )
    return made
