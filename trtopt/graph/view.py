"""An ONNX graph as linked values and nodes (onnx-ir), with shapes, for the passes that place precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import ShapeInferencePass

from trtopt.core.errors import ModelError
from trtopt.core.library_output import quiet
from trtopt.graph.proto import UNINFERRED, infer_shapes
from trtopt.graph.proto import subgraphs as proto_bodies

FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def linked(proto: onnx.ModelProto) -> ir.Model:
    """`proto` as an onnx-ir model with inferred types and shapes; `proto` itself stays as it is."""
    try:
        model = ir.from_proto(proto)
    except ir.serde.SerdeError as error:  # maps, and other types that it has no form for
        raise ModelError(
            f"the model holds values that aren't tensors or sequences of them: {_strange(proto)}"
        ) from error
    if any(node.op_type in UNINFERRED for node in model.graph.all_nodes()):
        _tell(model, infer_shapes(proto))
    with quiet():  # best effort (validity is graph.io's business): without a shape passes stay conservative
        model = ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model).model
    if any("Sequence" in node.op_type or "Optional" in node.op_type for node in model.graph.all_nodes()):
        _restore_containers(model, proto)
    return model


def _strange(proto: onnx.ModelProto) -> str:
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    names = [value.name for value in values if value.type.WhichOneof("value") not in ("tensor_type", None)]
    return f"{', '.join(names[:5]) or 'see its types'}; leave these out of the network"


def _tell(model: ir.Model, inferred: onnx.ModelProto) -> None:
    """Give the outputs of operators that onnx-ir's inference doesn't know their types and shapes."""
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
    for node in model.graph.all_nodes():
        for value in node.outputs if node.op_type in UNINFERRED else ():
            if value.name in known and value.type is None:
                found = known[str(value.name)].type
                value.type = ir.serde.deserialize_type_proto_for_type(found)
                value.shape = ir.serde.deserialize_type_proto_for_shape(found)


def _restore_containers(model: ir.Model, proto: onnx.ModelProto) -> None:
    """Give sequences and optionals their own types: onnx-ir's inference takes them for the tensors that they hold."""
    found: dict[str, onnx.TypeProto] = {}

    def read(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.WhichOneof("value") in ("sequence_type", "optional_type", "map_type"):
                found[value.name] = value.type
        for node in graph.node:
            for body in proto_bodies(node):
                read(body)

    read(infer_shapes(proto).graph)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name in found:
                value.type, value.shape = ir.serde.deserialize_type_proto_for_type(found[str(value.name)]), None


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
    """Whether it is a floating tensor; a sequence of them isn't."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype in FLOAT_TYPES


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
