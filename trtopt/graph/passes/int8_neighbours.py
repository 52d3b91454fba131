"""Nodes beside INT8 layers that read INT8 as well, so that no conversion stands between: sums, pooling, Concats, norms.

Which of them TensorRT fuses, and what it costs where they read floats, is measured (docs/results/accuracy.md). FP8 has none of
these: TensorRT runs Add, pooling and Concat in INT8 but not in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from trtopt.core.values import Override, Precision, overriding
from trtopt.graph.op_types import FUSED_ACTIVATIONS, MOVING, POOLING, SCALE_PRESERVING, SIGMOIDS
from trtopt.graph.view import attribute, constant, is_float, operand, read_once, sizes, subgraphs


class Reads:
    """Tensors that are read quantized, as it is decided.

    Attributes:
        overrides: nodes that the user decides about.
        bare: tensors that nothing may read quantized.
        varying: values that depend on what is in the network's inputs, not on their shapes alone: an LSTM's zero state doesn't.
        reads: tensor → the (node name, input slot) pairs that read it quantized.
        quantized: nodes that compute on quantized operands, in the order in which they were chosen.
        group_of: tensor → all those that share its scale, itself among them.
    """

    def __init__(self, graph: ir.Graph, overrides: Sequence[Override], bare: Collection[str]) -> None:
        self.graph, self.overrides, self.bare, self.varying = graph, overrides, bare, _varying(graph)
        self.reads: dict[str, list[tuple[str, int]]] = {}
        self.quantized: dict[ir.Node, None] = {}
        self.group_of: dict[str, frozenset[str]] = {}

    def read(self, node: ir.Node, *slots: int) -> None:
        for slot in slots:
            name, reader = node.inputs[slot].name, (node.name, slot)
            if name not in self.bare and reader not in (readers := self.reads.setdefault(name, [])):
                readers.append(reader)

    def join(self, *names: str) -> None:
        """Let tensors share one scale, with those that share theirs."""
        group = frozenset(names).union(*(self.group_of.get(name, ()) for name in names))
        self.group_of.update(dict.fromkeys(group, group))

    def override(self, node: ir.Node) -> Precision | None:
        return overriding(self.overrides, node.name or "", node.op_type)

    def free(self, *operators: str) -> list[ir.Node]:
        """Return the nodes of ONNX's operators of these names, in order, that the user says nothing about."""
        nodes = (node for node in self.graph if node.op_type in operators and not node.domain)
        return [node for node in nodes if self.override(node) is None]

    def gives_floats(self, value: ir.Value) -> bool:
        """Return whether anybody reads it unquantized."""
        quantized = self.reads.get(str(value.name), [])
        return value.is_graph_output() or any((str(use.node.name), use.idx) not in quantized for use in value.uses())


def quantize_neighbours(search: Reads) -> None:
    """Let what stands beside quantized layers read INT8, one rule after the other."""
    for rule in (_residuals, _poolings, _norms, _concats, _readers_of_joined, _sums):
        rule(search)


def _residuals(search: Reads) -> None:
    """Quantize the skip alone in Add(conv, skip): the convolution, the Add and its ReLU stay one kernel.

    Of two convolutions the deeper one adds, left out by name, too, where nothing is quantized then: leaving a node out never
    quantizes a tensor that wasn't before, for which a table has no scale.
    """
    depth: dict[ir.Value, int] = {}  # the longest path, in nodes, from the inputs
    for node in search.graph:
        level = 1 + max((depth.get(value, 0) for value in node.inputs if value is not None), default=0)
        depth.update(dict.fromkeys(node.outputs, level))

    def straight_from_conv(value: ir.Value) -> bool:
        producer = value.producer()
        if producer is None or producer.op_type != "Conv" or not read_once(value):
            return False
        return producer in search.quantized or search.override(producer) is not None

    for node in search.free("Add"):
        branches = [value for value in node.inputs if value is not None and value in search.varying]
        if len(branches) != 2 or branches[0] is branches[1] or not all(map(is_float, branches)):
            continue
        if sizes(branches[0]) != sizes(branches[1]):  # a broadcast (squeeze-and-excite, bias), not a residual
            continue
        main = max(filter(straight_from_conv, branches), key=lambda value: depth[value], default=None)
        if main is not None and main.producer() in search.quantized:
            search.read(node, 1 if main is node.inputs[0] else 0)


def _poolings(search: Reads) -> None:
    """Average pooling reads INT8 when nobody else needs the tensor in floating point.

    Behind a residual too: read in FP16 there, it makes the Add and its skip FP16, which costs two conversions
    (ResNet-50 in docs/results/runtime.md).
    """
    in_int8 = {name for readers in search.reads.values() for name, _ in readers}
    pools = dict.fromkeys(filter(is_pooling, search.free(*POOLING)))
    for node in pools:
        value = node.inputs[0]
        producer = through(value.producer(), lambda item: item.op_type in FUSED_ACTIVATIONS)
        alone = all(use.node in pools for use in value.uses())
        if value.name in search.reads or (alone and producer is not None and producer.name in in_int8):
            search.read(node, 0)


def _norms(search: Reads) -> None:
    """A BatchNormalization right behind a Concat, in front of quantized layers, reads INT8, as DenseNet's do: read in FP16, it
    makes the Concat FP16, which costs more than INT8 saves (docs/results/accuracy.md)."""
    for node in search.free("BatchNormalization"):
        maker = through(node.inputs[0].producer(), preserves)
        joined = maker is not None and maker.op_type == "Concat" and search.override(maker) is None
        if joined and _is_norm(search, node):
            search.read(node, 0)


def _is_norm(search: Reads, node: ir.Node) -> bool:
    """Return whether a quantized layer stands behind a BatchNormalization's activation or pooling."""
    pending = [node]
    while pending:
        for use in pending.pop().outputs[0].uses():
            if use.node in search.quantized:
                return True
            if use.node.op_type in (*FUSED_ACTIVATIONS, *POOLING) or preserves(use.node):
                pending.append(use.node)
    return False


def _concats(search: Reads) -> None:
    """Quantize the inputs of a Concat that feeds a quantized layer, all with the scale of its output.

    What no input changes, such as a class token beside patches, needn't fit that scale, and stays as a constant does. One whose
    values are handed out as they are, such as a cache or the context of the next call, joins them in floating point.
    """
    makers = {value.name: node for node in search.graph for value in node.outputs}
    pending, handed_out, seen = list(search.reads), _handed_out(search.graph), set[ir.Node]()
    while pending:
        point = pending.pop()
        node = through(makers.get(point), preserves)
        if node is None or node.op_type != "Concat" or search.override(node) is not None:
            continue
        slots = [slot for slot, item in enumerate(node.inputs) if is_float(item) and item in search.varying]
        if len(slots) < 2 or node.outputs[0] in handed_out:
            continue
        names = [node.inputs[slot].name for slot in slots]
        search.join(point, *names)
        if node not in seen:
            seen.add(node)
            search.read(node, *slots)
            pending += names


def _handed_out(graph: ir.Graph) -> set[ir.Value | None]:
    """Return what outputs of the network hold as it is, only moved or joined with other values."""
    values: set[ir.Value | None] = set(graph.outputs)
    for node in reversed(list(graph)):
        if node.op_type in MOVING and not values.isdisjoint(node.outputs):
            values.update(node.inputs)
    return values


def _readers_of_joined(search: Reads) -> None:
    """Quantize for the other readers of a Concat's quantized inputs or result, or floating ones are needed, too: a
    BatchNormalization, and pooling whose result has the same scale, so that no value changes. What a nearest Resize reads for a
    Concat gets that scale as well: in INT8 it moves half of the bytes (docs/results/accuracy.md)."""
    for node in reversed(search.free("MaxPool", "Resize", "BatchNormalization")):
        name, result = node.inputs[0].name, node.outputs[0]
        if name in search.bare:
            continue
        if node.op_type == "BatchNormalization":
            joined = name in search.group_of and _is_norm(search, node)
        elif joined := result.name in search.group_of and preserves(node) and not search.gives_floats(result):
            if node.op_type == "Resize":
                search.join(result.name, name)
            joined = name in search.group_of[result.name]
        if joined:
            search.read(node, 0)


def _sums(search: Reads) -> None:
    """An Add of two branches that both end in an activation, as CSPDarknet has it, is part of no convolution's kernel: where
    its sum is only read quantized it reads INT8 as well; in FP16 it moves twice as many bytes (docs/results/accuracy.md)."""
    for node in reversed(search.free("Add")):
        one, other = node.inputs
        if one is other or search.gives_floats(node.outputs[0]):
            continue
        readers = {reader for value in (one, other) for reader, _ in search.reads.get(str(value.name), ())}
        if node.name in readers:
            continue  # a residual, which its convolution adds
        if sizes(one) == sizes(other) and all(_from_int8(search, value) for value in (one, other)):
            search.read(node, 0, 1)


def _from_int8(search: Reads, value: ir.Value | None) -> bool:
    """Return whether it is what a quantized convolution's activation gives, or the sum of two such."""
    activated = False
    while value is not None and (node := value.producer()) is not None:
        silu = activation_of(node)
        activated |= silu is not None or node.op_type in FUSED_ACTIVATIONS
        if node.op_type == "Add":
            return bool(search.reads.get(str(value.name)))
        if node.op_type == "Conv":
            return activated and node in search.quantized
        if silu is None and node.op_type not in FUSED_ACTIVATIONS and not preserves(node):
            return False
        value = silu if silu is not None else node.inputs[0]
    return False


def _varying(graph: ir.Graph) -> set[ir.Value]:
    values: set[ir.Value] = set(graph.inputs)
    for node in graph:
        always = not node.inputs or next(subgraphs(node), None) is not None
        if node.op_type != "Shape" and (always or not values.isdisjoint(node.inputs)):
            values.update(node.outputs)
    return values


def through(node: ir.Node | None, passing: Callable[[ir.Node], bool]) -> ir.Node | None:
    """Return the node that computes what this one gives, through nodes that hand on their first input."""
    while node is not None and passing(node):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node


def activation_of(node: ir.Node) -> ir.Value | None:
    """Return what a product with its own sigmoid (SiLU) is of; None: the node is no such product."""
    if node.op_type != "Mul":
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        maker = None if other is None else other.producer()
        if maker is not None and maker.op_type in SIGMOIDS and maker.inputs[0] is value:
            return value
    return None


def is_pooling(node: ir.Node) -> bool:
    """Return whether an operator of `POOLING` is of images, and if it is a mean, over their pixels."""
    shape = sizes(node.inputs[0])
    if shape is None or len(shape) != 4:
        return False
    if node.op_type != "ReduceMean":
        return True
    axes = attribute(node, "axes", constant(operand(node, 1)))
    return axes is not None and sorted(axis % 4 for axis in axes) == [2, 3]


def preserves(node: ir.Node) -> bool:
    """Return whether the node only moves or selects values, so that its input and output fit one scale."""
    if node.op_type == "Resize":
        return bool(attribute(node, "mode", "nearest") == "nearest")
    if node.op_type == "Pad":
        value = constant(operand(node, 2))
        return attribute(node, "mode", "constant") == "constant" and (value is None or not value.any())
    return node.op_type in SCALE_PRESERVING
