"""Placement of Q/DQ pairs: decided once, used by calibration (what to observe) and by the build (what to insert).

The rules are those that TensorRT fuses (TensorRT Developer Guide, "Working with Quantized Types"; measured on 8.6:
docs/results/): activations per tensor, weights per output channel, symmetric; a layer reads its input quantized *after*
the activation; in `Conv + Add(skip)` only the skip is quantized so that the convolution, the Add and its ReLU stay one
kernel, and an Add of two activations reads both quantized; inputs of one Concat share one scale, and what else reads them
reads INT8; pooling reads INT8; nothing is quantized at the network's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from trtopt.core.options import named
from trtopt.core.values import Kept, Override, Precision, overriding
from trtopt.graph.op_types import FUSED_ACTIVATIONS, MOVING, POOLING, RECURRENT, SCALE_PRESERVING, SIGMOIDS, WEIGHTED
from trtopt.graph.view import attribute, constant, constant_tensor, is_constant, is_float, operand, read_once, sizes

GROUPED = "grouped Conv"  # an operator of its own where targets exclude operators
_ATTENTION = "quantizing them costs accuracy; to do it all the same: "
BEHIND_FLOATS = (
    "its input comes right from a convolution in floating point that is grouped or has a Clip behind it, and TensorRT 8.6 "
    "quantizes that wrongly"
)
UNTYPED = "the type of what it reads isn't known: an operator of another domain made it"
MIN_CHANNELS = 16  # narrower than one INT8 tensor-core tile: the conversion costs more than the layer saves


@dataclass(frozen=True)
class Weight:
    """A constant operand to quantize: who reads it, and its output-channel axis (None: one scale a tensor)."""

    node: str
    slot: int
    name: str
    axis: int | None


@dataclass(frozen=True)
class Points:
    """Tensors that get Q/DQ pairs, and their readers.

    Attributes:
        reads: tensor name → the (node name, input slot) pairs that read it quantized, in graph order.
        weights: constant operands to quantize.
        groups: sets of tensors that must share one scale.
        quantized: names of the nodes that compute on quantized operands.
        kept: Conv/ConvTranspose/Gemm/MatMul and recurrent nodes that don't, with the reason.
    """

    reads: Mapping[str, tuple[tuple[str, int], ...]]
    weights: tuple[Weight, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    quantized: tuple[str, ...] = ()
    kept: tuple[Kept, ...] = ()
    precision: Precision = Precision.INT8

    @property
    def activations(self) -> tuple[str, ...]:
        return tuple(self.reads)


@dataclass(frozen=True)
class _Gate:
    """A squeeze-and-excite block: a tensor, its mean over the image, convolutions of that, and the product of both ends."""

    product: ir.Node
    convolutions: tuple[ir.Node, ...]
    mean: ir.Node


@dataclass
class _Search:
    model: ir.Model
    precision: Precision
    base: Precision
    overrides: Sequence[Override]
    excluded: Mapping[str, str]
    barred: Mapping[str, str]
    bare: Collection[str]  # tensors that nothing may read quantized
    gates: Sequence[_Gate] = ()
    reads: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)
    quantized: dict[ir.Node, None] = field(default_factory=dict)  # in the order in which they were chosen
    kept: list[Kept] = field(default_factory=list)
    groups: tuple[tuple[str, ...], ...] = ()
    varying: Collection[ir.Value] = ()

    @property
    def points(self) -> Points:
        order = {value.name: index for index, value in enumerate(_values(self.model.graph))}
        reads = {name: tuple(self.reads[name]) for name in sorted(self.reads, key=lambda name: order.get(name, -1))}
        quantized = tuple(str(node.name) for node in self.quantized)
        return Points(reads, tuple(self.weights), self.groups, quantized, tuple(self.kept), self.precision)

    def read(self, node: ir.Node, slot: int) -> None:
        value = node.inputs[slot]
        assert value is not None and value.name is not None and node.name is not None
        reader = (node.name, slot)
        if value.name not in self.bare and reader not in (readers := self.reads.setdefault(value.name, [])):
            readers.append(reader)


def find_points(
    model: ir.Model,
    precision: Precision = Precision.INT8,
    *,
    base: Precision = Precision.FP16,
    overrides: Sequence[Override] = (),
    excluded: Mapping[str, str] | None = None,
    between: Mapping[str, str] | None = None,
    gates: Collection[str] = (),
) -> Points:
    """Decide the Q/DQ placement for a folded graph (every node named, every weight constant), which stays as it is.

    Args:
        precision: INT8 or FP8.
        base: what nodes that aren't quantized run in; only reported, in `Points.kept`.
        overrides: nodes to keep out, or (`=int8`, `=fp8`) to take in against the rules of thumb.
        excluded: operator, or `GROUPED`, → why the target can't run it quantized.
        between: operator, or `GROUPED`, → why the target runs it quantized only where its result is quantized, too. If
            `GROUPED` is among them, nothing is quantized right behind a floating convolution that is grouped or has a Clip
            behind it, either: TensorRT 8.6.0 then computes something else, without a word (docs/results/accuracy.md).
        gates: products of squeeze-and-excite (`gates_of`) whose whole block is quantized: both operands, what the mean reads,
            and the convolutions of one pixel.
    """
    blocks = [item for item in _gates(model) if item.product.name in gates] if gates else []
    barred, bare, between = dict[str, str](), set[str](), between or {}
    while True:
        search = _searched(_Search(model, precision, base, overrides, excluded or {}, barred, bare, blocks))
        giving = {
            str(node.name): between[_operator(node)]
            for node in search.quantized
            # measured so with these blocks alone
            if _operator(node) in between and _gives_floats(search, _result(node) if blocks else _end(node))
        }
        floats = _floating_ends(search) & search.reads.keys() if GROUPED in between else set()
        if giving.keys() <= barred.keys() and not floats:  # what is left of them was asked for by name
            return search.points
        barred.update(giving)
        bare |= floats


def gates_of(model: ir.Model) -> tuple[str, ...]:
    """The products of its squeeze-and-excite blocks, by name (Hu et al.: Squeeze-and-Excitation Networks, 2018)."""
    return tuple(str(item.product.name) for item in _gates(model))


def _gates(model: ir.Model) -> list[_Gate]:
    gates = []
    for node in model.graph:
        if node.op_type != "Mul" or node.domain or any(value is None for value in node.inputs):
            continue
        for slot, other in ((0, 1), (1, 0)):
            end, convolutions = node.inputs[slot], list[ir.Node]()
            maker = end.producer() if end is not None and read_once(end) else None
            while maker is not None and not _is_image_mean(maker):
                convolutions += [maker] * (maker.op_type == "Conv")
                within = maker.op_type in ("Conv", *SIGMOIDS, *FUSED_ACTIVATIONS) or _preserves(maker)
                value = maker.inputs[0] if within else _activated(maker)
                maker = None if value is None else value.producer()
            if maker is not None and convolutions and maker.inputs[0] is node.inputs[other]:
                gates.append(_Gate(node, tuple(convolutions), maker))
                break
    return gates


def _searched(search: _Search) -> _Search:
    search.varying = _varying(search.model.graph)
    first = _first(search.model.graph)
    for node in search.model.graph:
        if node.op_type in RECURRENT and not node.domain:
            search.kept.append(Kept(str(node.name), node.op_type, search.base, f"{node.op_type} is never quantized"))
        if node.op_type not in WEIGHTED or node.domain or node.inputs[0] is None:
            continue
        if is_float(node.inputs[0]):
            _weighted(search, node, first=node in first)
        elif node.inputs[0].dtype is None:
            search.kept.append(Kept(str(node.name), node.op_type, search.base, UNTYPED))
    if search.precision is Precision.INT8:  # TensorRT runs Add, pooling and Concat in INT8 but not in FP8
        for gate in search.gates:
            search.read(gate.product, 0)
            search.read(gate.product, 1)
            search.read(gate.mean, 0)
        _residuals(search)
        _poolings(search)
        _norms(search)
        search.groups = _concats(search)
        _readers_of_joined(search)
        _sums(search)
    return search


def _varying(graph: ir.Graph) -> set[ir.Value]:
    """Values that depend on what is in the network's inputs, not on their shapes alone: an LSTM's zero state doesn't."""
    values: set[ir.Value] = set(graph.inputs)
    for node in graph:
        source = not node.inputs or any(
            attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attribute in node.attributes.values()
        )
        if node.op_type != "Shape" and (
            source or not values.isdisjoint(value for value in node.inputs if value is not None)
        ):
            values.update(node.outputs)
    return values


def _is_grouped(node: ir.Node) -> bool:
    return node.op_type == "Conv" and bool(attribute(node, "group", 1) > 1)


def _operator(node: ir.Node) -> str:
    """Return what targets that can't run some operators quantized call a node's."""
    return GROUPED if _is_grouped(node) else node.op_type


def _floating_ends(search: _Search) -> set[str]:
    """Return the results of floating convolutions that are grouped or have a Clip behind them."""
    ends = {node: _end(node) for node in search.model.graph if node.op_type == "Conv" and node not in search.quantized}
    return {
        str(end.name)
        for node, end in ends.items()
        if _is_grouped(node) or ((last := end.producer()) is not None and last.op_type == "Clip")
    }


def _end(node: ir.Node) -> ir.Value:
    """The result of a convolution, behind its activation if it has one."""
    value = node.outputs[0]
    while read_once(value) and (user := value.uses()[0].node).op_type in ("Relu", "Clip"):
        value = user.outputs[0]
    return value


def _result(node: ir.Node) -> ir.Value:
    """The same, and behind a hard-swish or a SiLU."""
    value = _end(node)
    users = {use.node for use in value.uses()}
    product = next((user for user in users if user.op_type == "HardSwish" or _activated(user) is value), None)
    others = () if product is None else [item.producer() for item in product.inputs if item is not value]
    return value if product is None or value.is_graph_output() or users != {product, *others} else product.outputs[0]


def _activated(node: ir.Node) -> ir.Value | None:
    """Return what a product with its own sigmoid (SiLU) is of; None: the node is no such product."""
    if node.op_type != "Mul":
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        maker = None if other is None else other.producer()
        if maker is not None and maker.op_type in SIGMOIDS and maker.inputs[0] is value:
            return value
    return None


def _gives_floats(search: _Search, value: ir.Value) -> bool:
    """Return whether anybody reads it unquantized."""
    quantized = search.reads.get(str(value.name), [])
    return value.is_graph_output() or any((str(use.node.name), use.idx) not in quantized for use in value.uses())


def _values(graph: ir.Graph) -> Iterable[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _override(search: _Search, node: ir.Node) -> Precision | None:
    return overriding(search.overrides, node.name or "", node.op_type)


def _first(graph: ir.Graph) -> set[ir.Node]:
    """The first convolution, and those at other inputs that are like it: twins that compare two images compute the same."""
    behind: set[ir.Value | None] = set()
    heads = []
    for node in graph:
        after = not behind.isdisjoint(node.inputs)
        if node.op_type == "Conv" and not after:
            heads.append(node)
        if after or node.op_type == "Conv":
            behind.update(node.outputs)
    return {node for node in heads if sizes(node.inputs[1]) == sizes(heads[0].inputs[1])}


def _weighted(search: _Search, node: ir.Node, *, first: bool) -> None:
    precision = _override(search, node)
    forced = precision is not None and precision.quantized
    kept_in = search.base
    tensor = constant_tensor(node.inputs[1])
    weight = None if tensor is None else tuple(int(size) for size in tensor.shape.numpy())
    if precision is not None and not precision.quantized:
        reason, kept_in = f"`precision_override=` asks for {precision}", precision
    elif (operator := _operator(node)) in search.excluded:
        reason = search.excluded[operator]
    elif not forced and str(node.name) in search.barred:
        reason = search.barred[str(node.name)]
    elif node.inputs[0] is not None and node.inputs[0].name in search.bare:
        reason = BEHIND_FLOATS
    elif node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.DOUBLE:
        reason = "it computes in float64, which TensorRT makes float32: export the model in float32"
    elif is_constant(node.inputs[0]):
        reason = "its left operand is constant"
    elif node.inputs[0] not in search.varying:
        reason = "its left operand is the same for every input"
    elif weight is None and node.op_type != "MatMul":
        reason = "its weight is computed at run time; only constant weights are quantized"
    elif weight is None:
        instead = named("precision_override", [f"NAME={search.precision}"])
        reason = "" if forced else f"both operands are activations (attention): {_ATTENTION}{instead}"
    elif len(weight) < 2 or (node.op_type in ("Gemm", "MatMul") and len(weight) != 2):
        reason = f"its weight has rank {len(weight)}; 2 is needed"
    elif node.op_type == "Gemm" and attribute(node, "transA", 0):
        reason = "Gemm with transA=1"
    else:
        forced = forced or any(node in gate.convolutions for gate in search.gates)
        reason = "" if forced else _too_small(search.precision, node, weight, first)
    if reason:
        search.kept.append(Kept(str(node.name), node.op_type, kept_in, reason))
        return
    search.quantized[node] = None
    search.read(node, 0)
    if weight is None:
        search.read(node, 1)
    else:
        value = node.inputs[1]
        assert value is not None
        axis = _channel_axis(node) if search.precision is Precision.INT8 else None  # FP8 weights: one scale a tensor
        search.weights.append(Weight(str(node.name), 1, str(value.name), axis))


def _channel_axis(node: ir.Node) -> int | None:
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1 if attribute(node, "group", 1) == 1 else None
    return 0 if node.op_type == "Gemm" and attribute(node, "transB", 0) else 1


def _too_small(precision: Precision, node: ir.Node, weight: tuple[int, ...], first: bool) -> str:
    """Return why quantizing doesn't pay for this layer, or an empty string."""
    useless = f"under {MIN_CHANNELS}, {str(precision).upper()} doesn't pay"
    if node.op_type == "Conv":
        out_channels, in_channels = weight[0], weight[1] * attribute(node, "group", 1)
        depthwise = attribute(node, "group", 1) > 1
        shape = sizes(node.inputs[0])
        if shape is not None and len(shape) > 2 and all(size == 1 for size in shape[2:]):
            return "its input is 1×1 (squeeze-and-excite): memory-bound"
        worthwhile = first and precision is Precision.INT8  # of FP8, those of fewer channels run in FP16 all the same
        if not worthwhile and not depthwise and min(out_channels, in_channels) < MIN_CHANNELS:
            return f"{in_channels} → {out_channels} channels: {useless}"
        return ""
    if node.op_type == "ConvTranspose":
        channels = min(weight[0], weight[1] * attribute(node, "group", 1))
        return f"{channels} channels: {useless}" if channels < MIN_CHANNELS else ""
    k, n = (weight[1], weight[0]) if node.op_type == "Gemm" and attribute(node, "transB", 0) else weight[-2:]
    shape = sizes(node.inputs[0])
    rows = shape[:-1] if shape else (None,)
    if all(size == 1 for size in rows):
        return "one row (matrix × vector): memory-bound"
    return f"K={k}, N={n}: {useless}" if min(k, n) < MIN_CHANNELS else ""


def _residuals(search: _Search) -> None:
    """Quantize the skip in Add(conv, skip); the convolution of the other branch then adds it in its epilogue.

    Of two convolutions the deeper one adds, left out by name, too, where nothing is quantized then: leaving a node out never
    quantizes a tensor that wasn't before, for which a table has no scale.
    """
    quantized = {node.name for node in search.quantized}
    depth = _depths(search.model.graph)

    def straight_from_conv(value: ir.Value) -> bool:
        producer = value.producer()
        if producer is None or producer.op_type != "Conv" or not read_once(value):
            return False
        return producer.name in quantized or _override(search, producer) is not None

    for node in search.model.graph:
        if node.op_type != "Add" or node.domain or _override(search, node) is not None:
            continue
        branches = [value for value in node.inputs if value is not None and value in search.varying]
        if len(branches) != 2 or branches[0] is branches[1] or not all(map(is_float, branches)):
            continue
        if sizes(branches[0]) != sizes(branches[1]):  # a broadcast (squeeze-and-excite, bias), not a residual
            continue
        candidates = [value for value in branches if straight_from_conv(value)]
        if candidates:
            main = max(candidates, key=lambda value: depth[value])
            adds = main.producer()
            if adds is None or adds.name not in quantized:
                continue
            skip = branches[0] if main is branches[1] else branches[1]
            search.read(node, 0 if node.inputs[0] is skip else 1)


def _depths(graph: ir.Graph) -> dict[ir.Value, int]:
    """Longest path, in nodes, from the inputs to each value."""
    depth: dict[ir.Value, int] = {}
    for node in graph:
        level = 1 + max((depth.get(value, 0) for value in node.inputs if value is not None), default=0)
        depth.update(dict.fromkeys(node.outputs, level))
    return depth


def _poolings(search: _Search) -> None:
    """Average pooling reads INT8 when nobody else needs the tensor in floating point.

    Behind a residual too: read in FP16 there, it makes the Add and its skip FP16, which costs two conversions
    (ResNet-50 in docs/results/runtime.md).
    """
    quantized = {node.name for node in search.quantized}
    residuals = {name for readers in search.reads.values() for name, _ in readers} - quantized

    def pools(node: ir.Node) -> bool:
        return node.op_type in POOLING and _override(search, node) is None and _is_pooling(node)

    for node in search.model.graph:
        if not pools(node):
            continue
        value = node.inputs[0]
        assert value is not None
        producer = _maker(value, lambda item: item.op_type in FUSED_ACTIVATIONS)
        computed_in_int8 = producer is not None and (producer.name in quantized or producer.name in residuals)
        others = {use.node for use in value.uses() if not pools(use.node)}
        if value.name in search.reads or (computed_in_int8 and not others):
            search.read(node, 0)


def _is_pooling(node: ir.Node) -> bool:
    """Return whether an operator of `POOLING` is of images, and if it is a mean, over their pixels."""
    shape = sizes(node.inputs[0])
    if shape is None or len(shape) != 4:
        return False
    if node.op_type != "ReduceMean":
        return True
    axes = attribute(node, "axes")
    if axes is None:
        content = constant(operand(node, 1))
        axes = [] if content is None else content.ravel().tolist()
    return sorted(axis % 4 for axis in axes) == [2, 3]


def _is_image_mean(node: ir.Node) -> bool:
    return node.op_type in ("GlobalAveragePool", "ReduceMean") and _is_pooling(node)


def _maker(value: ir.Value | None, passing: Callable[[ir.Node], bool]) -> ir.Node | None:
    """Return the node that computes `value`, through nodes that hand on their first input."""
    while (node := None if value is None else value.producer()) is not None and passing(node):
        value = node.inputs[0]
    return node


def _concats(search: _Search) -> tuple[tuple[str, ...], ...]:
    """Quantize the inputs of a Concat that feeds a quantized layer, all with the scale of its output.

    What no input changes, such as a class token beside patches, needn't fit that scale, and stays as a constant does. One whose
    values are handed out as they are, such as a cache or the context of the next call, joins them in floating point.
    """
    values = {value.name: value for value in _values(search.model.graph)}
    groups: dict[str, set[str]] = {}
    pending, handed_out = list(search.reads), _handed_out(search.model.graph)
    seen: set[ir.Node] = set()
    while pending:
        point = pending.pop()
        node = _maker(values[point], _preserves)
        if (
            node is None
            or node.op_type != "Concat"
            or _override(search, node) is not None
            or node.outputs[0] in handed_out
        ):
            continue
        slots = [slot for slot, item in enumerate(node.inputs) if is_float(item) and item in search.varying]
        if len(slots) < 2:
            continue
        names = [str(item.name) for slot, item in enumerate(node.inputs) if slot in slots and item is not None]
        group = set().union(*(groups.get(name, {name}) for name in (point, *names)))
        groups.update(dict.fromkeys(group, group))
        if node not in seen:
            seen.add(node)
            for slot in slots:
                search.read(node, slot)
            pending += names
    return tuple(dict.fromkeys(tuple(sorted(groups[name])) for name in search.reads if name in groups))


def _handed_out(graph: ir.Graph) -> set[ir.Value | None]:
    """Return what outputs of the network hold as it is, only moved or joined with other values."""
    values: set[ir.Value | None] = set(graph.outputs)
    for node in reversed(list(graph)):
        if node.op_type in MOVING and not values.isdisjoint(node.outputs):
            values.update(node.inputs)
    return values


def _norms(search: _Search) -> None:
    """A BatchNormalization right behind a Concat, in front of quantized layers, reads INT8, as DenseNet's do: read in FP16, it
    makes the Concat FP16, which costs more than INT8 saves (docs/results/accuracy.md)."""
    for node in search.model.graph:
        maker = _maker(node.inputs[0], _preserves) if _is_norm(search, node) else None
        if maker is not None and maker.op_type == "Concat" and _override(search, maker) is None:
            search.read(node, 0)


def _is_norm(search: _Search, node: ir.Node) -> bool:
    """Return whether it is a BatchNormalization with a quantized layer behind its activation or pooling."""
    if node.op_type != "BatchNormalization" or node.domain or _override(search, node) is not None:
        return False
    pending = [node]
    while pending:
        for use in pending.pop().outputs[0].uses():
            if use.node in search.quantized:
                return True
            if use.node.op_type in (*FUSED_ACTIVATIONS, *POOLING) or _preserves(use.node):
                pending.append(use.node)
    return False


def _readers_of_joined(search: _Search) -> None:
    """Quantize for the other readers of a Concat's quantized inputs or result, or floating ones are needed, too: a
    BatchNormalization, and pooling whose result has the same scale, so that no value changes. What a nearest Resize reads for a
    Concat gets that scale as well: in INT8 it moves half of the bytes (docs/results/accuracy.md)."""
    group_of = {name: frozenset(group) for group in search.groups for name in group}
    for node in reversed(list(search.model.graph)):
        value = node.inputs[0] if node.inputs else None
        if value is None or value.name in search.bare or _override(search, node) is not None:
            continue
        name, result = str(value.name), node.outputs[0]
        if node.op_type in ("MaxPool", "Resize") and _preserves(node) and not _gives_floats(search, result):
            group = group_of.get(str(result.name), frozenset())
            if node.op_type == "Resize" and group:
                group |= group_of.get(name, {name})
                group_of.update(dict.fromkeys(group, group))
            if name in group:
                search.read(node, 0)
        elif name in group_of and _is_norm(search, node):
            search.read(node, 0)
    search.groups = tuple(dict.fromkeys(tuple(sorted(group_of[name])) for name in search.reads if name in group_of))


def _sums(search: _Search) -> None:
    """An Add of two branches that both end in an activation, as CSPDarknet has it, is part of no convolution's kernel: where
    its sum is only read quantized it reads INT8 as well; in FP16 it moves twice as many bytes (docs/results/accuracy.md)."""
    for node in reversed(list(search.model.graph)):
        if node.op_type != "Add" or node.domain or _override(search, node) is not None:
            continue
        if len(node.inputs) != 2 or node.inputs[0] is node.inputs[1] or _gives_floats(search, node.outputs[0]):
            continue
        if any(
            node.name == reader
            for value in node.inputs
            for reader, _ in search.reads.get(str(value and value.name), ())
        ):
            continue  # a residual, which its convolution adds
        if sizes(node.inputs[0]) == sizes(node.inputs[1]) and all(_from_int8(search, value) for value in node.inputs):
            search.read(node, 0)
            search.read(node, 1)


def _from_int8(search: _Search, value: ir.Value | None) -> bool:
    """Return whether it is what a quantized convolution's activation gives, or the sum of two such."""
    activated = False
    while value is not None and (node := value.producer()) is not None:
        silu = _activated(node)
        activated |= silu is not None or node.op_type in FUSED_ACTIVATIONS
        if node.op_type == "Add":
            return bool(search.reads.get(str(value.name)))
        if node.op_type == "Conv":
            return activated and node in search.quantized
        if silu is None and node.op_type not in FUSED_ACTIVATIONS and not _preserves(node):
            return False
        value = silu if silu is not None else node.inputs[0]
    return False


def _preserves(node: ir.Node) -> bool:
    """Return whether the node only moves or selects values, so that its input and output fit one scale."""
    if node.op_type == "Resize":
        return bool(attribute(node, "mode", "nearest") == "nearest")
    if node.op_type == "Pad":
        value = constant(operand(node, 2))
        return attribute(node, "mode", "constant") == "constant" and (value is None or not value.any())
    return node.op_type in SCALE_PRESERVING
