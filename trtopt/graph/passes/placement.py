"""Placement of Q/DQ pairs: decided once, used by calibration (what to observe) and by the build (what to insert).

The rules are those that TensorRT fuses (TensorRT Developer Guide, "Working with Quantized Types"; measured on 8.6:
docs/results/): activations per tensor, weights per output channel, symmetric; a layer reads its input quantized *after*
the activation; what stands beside such layers as `int8_neighbours` says; nothing is quantized at the network's outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from trtopt.core.options import named
from trtopt.core.values import Kept, Override, Precision
from trtopt.graph.op_types import FUSED_ACTIVATIONS, RECURRENT, SIGMOIDS, WEIGHTED
from trtopt.graph.passes.int8_neighbours import Reads, activation_of, is_pooling, preserves, quantize_neighbours
from trtopt.graph.view import attribute, channel_axes, constant_tensor, is_constant, is_float, read_once, sizes

GROUPED = "grouped Conv"  # an operator of its own where targets exclude operators
_MEANS = ("GlobalAveragePool", "ReduceMean")  # of all pixels
_ATTENTION = "quantizing them costs accuracy; to do it all the same: "
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


class _Gate(NamedTuple):
    """A squeeze-and-excite block: a tensor, its mean over the image, convolutions of that, and the product of both ends."""

    product: ir.Node
    convolutions: tuple[ir.Node, ...]
    mean: ir.Node


class _Asked(NamedTuple):
    """The arguments of `find_points`, the nodes of `_first`, and node → why it isn't quantized, as found by quantizing it."""

    precision: Precision
    base: Precision
    excluded: Mapping[str, str]
    gates: Sequence[_Gate]
    first: Set[ir.Node]
    barred: dict[str, str]


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
    asked = _Asked(precision, base, excluded or {}, blocks, _first(model.graph), {})
    bare, between = set[str](), between or {}
    while True:
        search = Reads(model.graph, overrides, bare)
        weights, kept = _layers(asked, search)
        if precision is Precision.INT8:
            for gate in blocks:
                search.read(gate.product, 0, 1)
                search.read(gate.mean, 0)
            quantize_neighbours(search)
        giving = {
            str(node.name): between[_operator(node)]
            for node in search.quantized
            # measured so with these blocks alone
            if _operator(node) in between and search.gives_floats(_result(node) if blocks else _end(node))
        }
        floats = _floating_ends(search) & search.reads.keys() if GROUPED in between else set()
        if giving.keys() <= asked.barred.keys() and not floats:  # what is left of them was asked for by name
            break
        asked.barred.update(giving)
        bare |= floats
    values = (*search.graph.inputs, *(value for node in search.graph for value in node.outputs))
    reads = {str(value.name): tuple(search.reads[value.name]) for value in values if value.name in search.reads}
    groups = dict.fromkeys(tuple(sorted(search.group_of[name])) for name in search.reads if name in search.group_of)
    quantized = tuple(str(node.name) for node in search.quantized)
    return Points(reads, tuple(weights), tuple(groups), quantized, tuple(kept), precision)


def gates_of(model: ir.Model) -> tuple[str, ...]:
    """The products of its squeeze-and-excite blocks, by name (Hu et al.: Squeeze-and-Excitation Networks, 2018)."""
    return tuple(str(item.product.name) for item in _gates(model))


def _gates(model: ir.Model) -> list[_Gate]:
    gates = []
    for node in model.graph:
        if node.op_type != "Mul" or node.domain:
            continue
        for end, other in (node.inputs, node.inputs[::-1]):
            maker, convolutions = end.producer() if read_once(end) else None, list[ir.Node]()
            while maker is not None and not (maker.op_type in _MEANS and is_pooling(maker)):
                convolutions += [maker] * (maker.op_type == "Conv")
                within = maker.op_type in ("Conv", *SIGMOIDS, *FUSED_ACTIVATIONS) or preserves(maker)
                value = maker.inputs[0] if within else activation_of(maker)
                maker = None if value is None else value.producer()
            if maker is not None and convolutions and maker.inputs[0] is other:
                gates.append(_Gate(node, tuple(convolutions), maker))
                break
    return gates


def _layers(asked: _Asked, search: Reads) -> tuple[list[Weight], list[Kept]]:
    """Decide on convolutions and products: the weights that are quantized, and the nodes that aren't."""
    weights, kept = list[Weight](), list[Kept]()
    for node in search.graph:
        data, name, reason = node.inputs[0] if node.inputs else None, str(node.name), ""
        if node.domain or data is None or node.op_type not in (*WEIGHTED, *RECURRENT):
            continue
        precision, base = search.override(node), asked.base
        if node.op_type in RECURRENT:
            reason = f"{node.op_type} is never quantized"
        elif data.dtype is None:
            reason = "the type of what it reads isn't known: an operator of another domain made it"
        elif not is_float(data):
            continue
        elif precision is not None and not precision.quantized:
            reason, base = f"`precision_override=` asks for {precision}", precision
        else:
            reason = next(filter(None, _reasons(asked, search, node, forced=precision is not None)), "")
        if reason:
            kept.append(Kept(name, node.op_type, base, reason))
            continue
        search.quantized[node] = None
        search.read(node, 0)
        value = node.inputs[1]
        if value is None or not is_constant(value):
            search.read(node, 1)
        else:  # of FP8: one scale a tensor
            one = asked.precision is not Precision.INT8 or (node.op_type == "ConvTranspose" and _groups(node) > 1)
            weights.append(Weight(name, 1, str(value.name), None if one else channel_axes(node)[1]))
    return weights, kept


def _reasons(asked: _Asked, search: Reads, node: ir.Node, *, forced: bool) -> Iterator[str]:
    """Return why a layer isn't quantized, or nothing, rule by rule; `forced`: its user asks for it."""
    data, tensor = node.inputs[0], constant_tensor(node.inputs[1])
    yield asked.excluded.get(_operator(node), "")
    if not forced:
        yield asked.barred.get(str(node.name), "")
    if data.name in search.bare:
        floats = "its input comes right from a convolution in floating point that is grouped or has a Clip behind it"
        yield f"{floats}, and TensorRT 8.6 quantizes that wrongly"
    if data.dtype == ir.DataType.DOUBLE:
        yield "it computes in float64, which TensorRT makes float32: export the model in float32"
    if is_constant(data):
        yield "its left operand is constant"
    if data not in search.varying:
        yield "its left operand is the same for every input"
    if tensor is None and node.op_type != "MatMul":
        yield "its weight is computed at run time; only constant weights are quantized"
    elif tensor is None and not forced:
        instead = named("precision_override", [f"NAME={asked.precision}"])
        yield f"both operands are activations (attention): {_ATTENTION}{instead}"
    elif tensor is not None:
        weight = tuple(int(size) for size in tensor.shape.numpy())
        if len(weight) < 2 or (node.op_type in ("Gemm", "MatMul") and len(weight) != 2):
            yield f"its weight has rank {len(weight)}; 2 is needed"
        if node.op_type == "Gemm" and attribute(node, "transA", 0):
            yield "Gemm with transA=1"
        if not forced and not any(node in gate.convolutions for gate in asked.gates):
            yield _too_small(asked.precision, node, weight, node in asked.first)


def _groups(node: ir.Node) -> int:
    return int(attribute(node, "group", 1))


def _operator(node: ir.Node) -> str:
    """Return what targets that can't run some operators quantized call a node's."""
    return GROUPED if node.op_type == "Conv" and _groups(node) > 1 else str(node.op_type)


def _floating_ends(search: Reads) -> set[str]:
    """Return the results of floating convolutions that are grouped or have a Clip behind them."""
    ends = {node: _end(node) for node in search.graph if node.op_type == "Conv" and node not in search.quantized}
    floats = [end for node, end in ends.items() if _operator(node) == GROUPED or end.producer().op_type == "Clip"]
    return {str(end.name) for end in floats}


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
    product = next((user for user in users if user.op_type == "HardSwish" or activation_of(user) is value), None)
    others = () if product is None else [item.producer() for item in product.inputs if item is not value]
    return value if product is None or value.is_graph_output() or users != {product, *others} else product.outputs[0]


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


def _too_small(precision: Precision, node: ir.Node, weight: tuple[int, ...], first: bool) -> str:
    """Return why quantizing doesn't pay for this layer, or an empty string."""
    useless, shape = f"under {MIN_CHANNELS}, {str(precision).upper()} doesn't pay", sizes(node.inputs[0])
    if node.op_type == "Conv":
        out_channels, in_channels = weight[0], weight[1] * _groups(node)
        if shape is not None and len(shape) > 2 and all(size == 1 for size in shape[2:]):
            return "its input is 1×1 (squeeze-and-excite): memory-bound"
        worthwhile = first and precision is Precision.INT8  # of FP8, those of fewer channels run in FP16 all the same
        if not worthwhile and _groups(node) == 1 and min(out_channels, in_channels) < MIN_CHANNELS:
            return f"{in_channels} → {out_channels} channels: {useless}"
        return ""
    if node.op_type == "ConvTranspose":
        channels = min(weight[0], weight[1] * _groups(node))
        return f"{channels} channels: {useless}" if channels < MIN_CHANNELS else ""
    k, n = (weight[axis] for axis in channel_axes(node))
    rows = shape[:-1] if shape else (None,)
    if all(size == 1 for size in rows):
        return "one row (matrix × vector): memory-bound"
    return f"K={k}, N={n}: {useless}" if min(k, n) < MIN_CHANNELS else ""
