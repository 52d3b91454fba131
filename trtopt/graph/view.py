"""An ONNX graph as linked values and nodes (onnx-ir), with shapes, for the passes that place precision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import ShapeInferencePass

FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def linked(proto: onnx.ModelProto) -> ir.Model:
    """`proto` as an onnx-ir model with inferred types and shapes; `proto` itself stays as it is."""
    model = ir.from_proto(proto)
    # Inference is best effort here (validity is graph.io's business): without a shape the passes stay conservative.
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    return ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model).model


def constant(value: ir.Value | None) -> NDArray[np.generic] | None:
    """The value's content if it never changes (an initializer or a Constant node's output), else None."""
    if value is None:
        return None
    tensor = value.const_value if value.is_initializer() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def sizes(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """The shape, None where a dimension is dynamic; None altogether if the rank isn't known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in FLOAT_TYPES


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def ints_attribute(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    attribute = node.attributes.get(name)
    return list(default if attribute is None else attribute.as_ints())


def read_once(value: ir.Value) -> bool:
    """Whether one node reads it, in one place, and nobody outside the graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def fresh_names(graph: ir.Graph) -> Callable[[str], str]:
    """A function that gives a wished name, or that name with a number where the graph (or an earlier call) has it."""
    taken = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        taken.add(str(node.name))
        taken.update(str(value.name) for value in node.outputs)

    def fresh(wished: str) -> str:
        name, number = wished, 1
        while name in taken:
            name, number = f"{wished}_{number}", number + 1
        taken.add(name)
        return name

    return fresh


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if isinstance(attribute, ir.Attr):
            if attribute.type is ir.AttributeType.GRAPH:
                yield attribute.as_graph()
            elif attribute.type is ir.AttributeType.GRAPHS:
                yield from attribute.as_graphs()


def outer_values(node: ir.Node) -> Iterator[ir.Value]:
    """Values of the enclosing graph that the bodies of a control-flow node read."""
    for graph in subgraphs(node):
        for inner in ir.traversal.RecursiveGraphIterator(graph):
            for value in inner.inputs:
                if value is not None and value.graph is not graph and value.graph is node.graph:
                    yield value
        for value in graph.outputs:
            if value.graph is node.graph:
                yield value
