"""An ONNX graph as linked values and nodes (onnx-ir), with types and shapes: what passes take, change and give."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from trtopt.core.errors import ModelError
from trtopt.core.library_output import quiet
from trtopt.core.operators import known
from trtopt.core.words import first_of
from trtopt.graph.proto import STANDARD, infer_shapes, schema_of, tensor_chunks, to_array, unique

FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


class _LazyWeight(ir.serde.TensorProtoTensor):  # type: ignore[misc]
    """A weight that stays in its file: read where it is asked for, written as the reference that it is."""

    def numpy(self) -> NDArray[Any]:
        return to_array(self.raw)

    def tobytes(self) -> bytes:
        return b"".join(map(bytes, tensor_chunks(self.raw)))


def to_ir(proto: onnx.ModelProto) -> ir.Model:
    """`proto` as an onnx-ir model with inferred types and shapes; `proto` itself stays as it is, and lazy weights lazy.

    Shapes are inferred once, here; passes keep them up.

    Raises:
        ModelError: it holds values that onnx-ir has no form for.
    """
    model = read_ir(proto)
    share_weights(model, proto)
    infer_into(model, proto)
    return model


def share_weights(model: ir.Model, proto: onnx.ModelProto) -> None:
    """Let weights that are references be those of `proto`, uncopied; lazy ones stay lazy."""
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name, value in model.graph.initializers.items():
        if isinstance(value.const_value, (ir.ExternalTensor, _LazyWeight)):
            value.const_value = _LazyWeight(weights[name])


def read_ir(proto: onnx.ModelProto) -> ir.Model:
    """`proto` as an onnx-ir model, as it is.

    Raises:
        ModelError: it holds values that onnx-ir has no form for.
    """
    try:
        return ir.from_proto(proto)
    except ir.serde.SerdeError as error:  # maps, and other types that it has no form for
        values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
        names = [value.name for value in values if value.type.WhichOneof("value") not in ("tensor_type", None)]
        text = f"the model holds values that aren't tensors or sequences of them: {first_of(names, 5) or 'see its types'}; "
        text += "leave these out of the network"
        if any(node.op_type == "ZipMap" for node in proto.graph.node):
            text += (
                "; a ZipMap of scikit-learn's converter makes them: to_onnx(…, options={'zipmap': False}) gives arrays"
            )
        raise ModelError(text) from error


def inline_functions(model: ir.Model) -> None:
    """Put the nodes of model-local functions in place of their calls; of one that a plugin is to compute the call stays."""
    for key in [key for key in model.functions if known(*key[:2]) is not None]:
        del model.functions[key]
    for function in model.functions.values():
        # Of custom domains the version says nothing here, and the library refuses two.
        function.opset_imports.update({key: it for key, it in model.opset_imports.items() if key not in STANDARD})
        for node in function:
            node.name = node.name or f"{node.op_type}_{node.outputs[0].name}"
    common.InlinePass()(model)


def infer_into(model: ir.Model, proto: onnx.ModelProto) -> None:
    """Best effort (validity is `validity`'s business): without a shape passes stay conservative."""
    try:
        with quiet():
            inferred = ir.from_proto(infer_shapes(proto))
    except Exception:  # ONNX's inference raises whatever its operators do
        return
    for graph, typed in zip(model.graphs(), inferred.graphs()):
        values = ir.convenience.create_value_mapping(typed)
        for name, value in ir.convenience.create_value_mapping(graph).items():
            if name in values and not value.is_initializer():
                value.type = values[name].type or value.type
                value.shape = value.shape if values[name].shape is None else values[name].shape


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a message; lazy weights stay lazy."""
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


def opset_of(model: ir.Model) -> int:
    """The version of the default operator set; 0 where none is imported."""
    return next((version for domain, version in model.opset_imports.items() if domain in STANDARD), 0)


class Slots(NamedTuple):
    """Types of a node's inputs and outputs by its operator's schema: each one's name, and what that may be."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    allowed: Mapping[str, frozenset[str]]

    def takes(self, kind: str, dtype: ir.DataType) -> bool:
        name = f"tensor({dtype.name.lower()})"
        return name in self.allowed.get(kind, (kind,))


@functools.lru_cache(maxsize=1024)
def _slots(domain: str, op: str, opset: int, inputs: int, outputs: int) -> Slots | None:
    if (schema := schema_of(op, opset, domain)) is None:
        return None

    def names(formal: Sequence[Any], count: int) -> tuple[str, ...]:  # the last one may stand for any number
        return tuple(formal[min(index, len(formal) - 1)].type_str for index in range(count if formal else 0))

    types = {item.type_param_str: frozenset(item.allowed_type_strs) for item in schema.type_constraints}
    return Slots(names(schema.inputs, inputs), names(schema.outputs, outputs), types)


def slots(node: ir.Node, opset: int) -> Slots | None:
    """Return what the schema of its operator says at that version of its domain, or what is known of a custom one; None:
    nothing is."""
    found = _slots(node.domain, node.op_type, opset, len(node.inputs), len(node.outputs))
    if found is None and node.domain not in STANDARD and (custom := known(node.domain, node.op_type)) is not None:
        inputs = (_FIXED if slot in custom.fp32_inputs else _kind(value) for slot, value in enumerate(node.inputs))
        allowed = frozenset(f"tensor({_ONNX_NAMES[item]})" for item in custom.types)
        return Slots(tuple(inputs), tuple(map(_kind, node.outputs)), {_FREE: allowed})
    return found


_FREE, _FIXED = "T", "tensor(float)"  # types of a custom operator's slots
_ONNX_NAMES = {"fp32": "float", "fp16": "float16", "bf16": "bfloat16"}


def _kind(value: ir.Value | None) -> str:
    """Return which of them a tensor is of: floats may change, all together; others are what they are."""
    dtype = None if value is None else value.dtype
    return _FREE if dtype is None or dtype in FLOAT_TYPES else f"tensor({dtype.name.lower()})"


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return what the value holds if it never changes (an initializer or a Constant node's output), not read yet; else None."""
    return None if value is None else ir.convenience.get_const_tensor(value)


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The content of `constant_tensor`."""
    tensor = constant_tensor(value)
    return None if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    return constant_tensor(value) is not None


def sizes(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """The shape, None where a dimension is dynamic; None altogether if the rank isn't known."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def is_float(value: ir.Value | None) -> bool:
    """Return whether it is a floating tensor; a sequence of them isn't."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype in FLOAT_TYPES


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """An attribute's value, a list for several numbers; `default` where the node has none of that name."""
    held = node.attributes.get(name)
    if held is None or held.is_ref():
        return default
    return list(held.value) if isinstance(held.value, (list, tuple)) else held.value


def operand(node: ir.Node, slot: int) -> ir.Value | None:
    """An input; None where it is left out."""
    return node.inputs[slot] if len(node.inputs) > slot else None


def made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes a value, if it is such an operator of ONNX."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op and not node.domain else None


def read_once(value: ir.Value) -> bool:
    """Return whether one node reads it, in one place, and nobody outside the graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The bodies of If, Loop and Scan."""
    for held in node.attributes.values():
        if held.type is ir.AttributeType.GRAPH:
            yield held.as_graph()


def drop_unread(graph: ir.Graph) -> None:
    """Take away the initializers that nobody reads."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del graph.initializers[name]


def channel_axes(node: ir.Node) -> tuple[int, int]:
    """Return the axes of a layer's weight for the channels that it reads and gives (a ConvTranspose: gives in each group)."""
    turned = node.op_type == "Conv" or (node.op_type == "Gemm" and attribute(node, "transB", 0))
    return (1, 0) if turned else (0, 1)


def along(axis: int | None, numbers: NDArray[Any], rank: int) -> NDArray[Any]:
    """Numbers in a shape that multiplies with a weight of this rank: one for each entry on an axis; None: one for all."""
    return numbers.reshape([-1 if index == axis else 1 for index in range(rank)])


def spread(numbers: NDArray[Any], shape: Sequence[int], axis: int, groups: int) -> NDArray[Any]:
    """The same for a layer's weight, whose groups lie one behind the other on axis 0: on axis 1 are the channels of one."""
    if axis == 0 or groups == 1 or numbers.size == 1:
        return along(axis, numbers, len(shape))
    each = np.repeat(numbers.reshape(groups, -1), shape[0] // groups, axis=0)
    return each.reshape(*each.shape, *[1] * (len(shape) - 2))


def normalization(node: ir.Node) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return each channel's factor and summand of a BatchNormalization; None: they aren't constant, or change in training."""
    held = [item.astype(np.float64) for value in node.inputs[1:5] if (item := constant(value)) is not None]
    training = attribute(node, "training_mode", 0) or any(value.name for value in node.outputs[1:])
    if training or len(held) < 4 or not attribute(node, "spatial", 1):
        return None
    gain, bias, mean, variance = held
    with np.errstate(all="ignore"):
        factor = gain / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        return factor, bias - mean * factor


class Editor:
    """Makes nodes and constants for a graph, by names that nothing in it has."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self._names = {str(node.name) for node in model.graph.all_nodes()}
        for graph in model.graphs():
            self._names.update(ir.convenience.create_value_mapping(graph))

    def fresh(self, wished: str) -> str:
        """The wished name, or that name with a number."""
        return unique(wished, self._names)

    def constant(self, name: str, content: Any, dtype: Any = None) -> ir.Value:
        """An initializer of the outermost graph, which every body sees."""
        array = np.asarray(content, dtype)
        return self.initializer(name, ir.tensor(np.ascontiguousarray(array) if array.ndim else array))

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = name = self.fresh(name)
        value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype))
        self.graph.register_initializer(value)
        return value

    def node(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        output: str | ir.Value,
        dtype: ir.DataType | None = None,
        shape: ir.Shape | None = None,
        *,
        name: str = "",
        **attributes: Any,
    ) -> ir.Node:
        """A node of its own, to be put into the graph.

        Args:
            output: what it gives: a value that nobody makes any more, or the name of a new one, of `dtype` and `shape`.
            name: as it is; empty: OUTPUT/OPERATOR.
        """
        if isinstance(output, str):
            kind = None if dtype is None else ir.TensorType(dtype)
            output = ir.Value(name=self.fresh(output), type=kind, shape=shape)
        name = name or self.fresh(f"{output.name}/{op}")
        return ir.node(op, inputs, attributes, outputs=[output], name=name)

    def put_behind(self, value: ir.Value, nodes: Sequence[ir.Node]) -> None:
        """Put nodes right behind who makes `value`, at the graph's start where nobody does."""
        producer = value.producer()
        if producer is not None:
            self.graph.insert_after(producer, nodes)
        else:
            self.graph.insert_before(self.graph[0], nodes)


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
