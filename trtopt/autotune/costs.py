"""What it costs to leave layers out of INT8: in the time that they take on a GPU where that was measured, else estimated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import ModelProto

from trtopt.core.errors import require
from trtopt.graph.op_types import WEIGHTED
from trtopt.graph.passes.placement import Points
from trtopt.graph.work import macs, shapes_at

MOVED, CONVERTED, QUANTIZED = 16, 4, 5  # in estimated costs


@dataclass(frozen=True)
class Measured:
    """Times of two engines of one model on a GPU, as shares of the floating one's; means over the profiles.

    Attributes:
        quantized, floating: node → the share that it takes in either engine.
        fp8: node → the share that it takes in FP8, where that is a choice.
        shortest: for each profile, the share of the shortest layer: no kernel takes less.
        described: what was measured, in words.
    """

    quantized: Mapping[str, float]
    floating: Mapping[str, float]
    shortest: Sequence[float]
    described: str
    fp8: Mapping[str, float] = field(default_factory=dict)


class Costs:
    """What a placement costs: the time of its layers in either precision and of the conversions between them.

    Where nothing was measured, an estimate: arithmetic in floating point, and the elements that its kernels move.

    Args:
        apart: what goes from INT8 to a floating layer, and what is quantized behind one, is converted by kernels of their own,
            which take longer than the layer does, as TensorRT 8.6's do (docs/results/accuracy.md).

    Attributes:
        unit: in words. floating, in_int8: layer → what it costs in either. in_fp8: the same, where it was measured.
        least: that a layer is taken to cost when layers are ranked. equal: costs that differ by less count as equal.
    """

    def __init__(
        self,
        proto: ModelProto,
        sizes: Mapping[str, int],
        *,
        apart: bool,
        measured: Measured | None = None,
    ) -> None:
        self.converted, self.quantized = (CONVERTED, QUANTIZED) if apart else (0, 0)
        shapes, self.work = shapes_at(proto, sizes, 1), macs(proto, sizes)
        self.size = {name: math.prod(shape) for name, shape in shapes.items()}
        self.nodes = {node.name: node for node in proto.graph.node if node.op_type in WEIGHTED}
        self.sources: dict[str, frozenset[str]] = {}  # tensor → the nearest layers that it comes from
        self._nearest_layers: dict[str, frozenset[str]] = {}  # other nodes → the nearest layers behind what they read
        for node in proto.graph.node:
            sources = [self.sources.get(name, frozenset()) for name in node.input]
            layers = frozenset([node.name]) if node.name in self.nodes else frozenset().union(*sources)
            self._nearest_layers[node.name] = layers
            self.sources |= dict.fromkeys(node.output, layers)
        self.floating: Mapping[str, float] = {
            name: self.work.get(name, 0) + MOVED * (self._elements(node.input[0]) + self._elements(node.output[0]))
            for name, node in self.nodes.items()
        }
        self.in_int8: Mapping[str, float] = {}
        self.in_fp8: Mapping[str, float] | None = None
        self.shortest: Sequence[float] = (0.0,)
        self.scale, self.least, self.equal = 1.0, 1.0, 1.0
        if measured is None:
            self.unit = f"MACs in floating point, and {MOVED} for each element moved"
            if apart:
                self.unit += f" ({CONVERTED} and {QUANTIZED} times as many for each converted from and to INT8)"
            self.unit += ": an estimate"
        else:
            estimate = sum(self.floating[name] for name in measured.floating if name in self.floating)
            self.scale = sum(measured.floating.values()) / (estimate or 1.0)
            self.floating = {name: measured.floating.get(name, 0.0) for name in self.nodes}
            self.in_int8, self.in_fp8, self.shortest = measured.quantized, measured.fp8, measured.shortest
            self.least, self.equal = 1e-4, 0.01
            self.unit = measured.described

    def _elements(self, tensor: str) -> int:
        return self.size.get(tensor, 0)

    def share(self, points: Points, in_fp8: Iterable[str] = ()) -> float:
        """Of the arithmetic, what is in INT8 or FP8."""
        return sum(self.work.get(name, 0) for name in (*points.quantized, *in_fp8)) / (sum(self.work.values()) or 1)

    def __call__(self, points: Points) -> float:
        inside = set(points.quantized)
        cost = 0.0
        for name, node in self.nodes.items():
            if name in inside:
                cost += self.in_int8.get(name, 0.0)
                continue
            cost += self.floating[name]
            if self.sources.get(node.input[0], frozenset()) & inside:
                cost += self._conversion(node.input[0], self.converted)
        for tensor in points.reads:
            if self.sources.get(tensor, frozenset()) - inside:
                cost += self._conversion(tensor, self.quantized)
        return cost

    def pays_in_fp8(self, name: str) -> bool:
        """Whether the layer is faster in FP8 than in floating point, as it is taken to be where nothing was measured."""
        return self.in_fp8 is None or self.in_fp8.get(name, math.inf) < self.floating.get(name, 0.0)

    def _conversion(self, tensor: str, times: int) -> float:
        """Of a kernel that does nothing else; 0 where conversions are part of the layers beside them."""
        if not times:
            return 0.0
        alone = self.scale * MOVED * times * self._elements(tensor)
        return sum(max(shortest, alone) for shortest in self.shortest) / len(self.shortest)

    def cheapest(
        self, whole: Points, outside: Iterable[str], free: Collection[str], tied: Mapping[str, Collection[str]]
    ) -> tuple[str, ...]:
        """The layers to leave out for the least cost, if `outside` stay out in any case: a minimum cut of a network.

        Layers on the source's side are in INT8, those on the sink's in floating point; an edge's capacity is what it costs to
        cut it. (Greig, Porteous, Seheult: Exact maximum a posteriori estimation for binary images, 1989.)

        Args:
            whole: the points of INT8 everywhere.
            free: what may stay out.
            tied: layer → those that go with it, as no kernel runs them in INT8 then.
        """
        networkx = require("networkx", "ort", "tuning")
        network = networkx.DiGraph()
        network.add_nodes_from(("int8", "float"))
        inside, floating = set(whole.quantized), set(outside)

        def edge(left: object, right: object, capacity: float | None = None) -> None:
            """Paid where `left` is in INT8 and `right` isn't; None: that may not be."""
            if capacity is None:
                network.add_edge(left, right)  # networkx takes a missing capacity for an infinite one
            elif capacity > 0:
                edge_data = network.get_edge_data(left, right, {"capacity": 0.0})
                network.add_edge(left, right, capacity=edge_data["capacity"] + capacity)

        for name in self.nodes:
            if name in floating or name not in inside:
                edge(name, "float")
            elif name not in free:
                edge("int8", name)
            else:
                edge("int8", name, self.floating[name])
                edge(name, "float", self.in_int8.get(name, 0.0))
            for other in tied.get(name, ()):
                edge(other, name)
        for name, node in self.nodes.items():  # converted once for each layer that reads it in floating point
            for source in self.sources.get(node.input[0], ()):
                edge(source, ("given", name))
            edge(("given", name), name, self._conversion(node.input[0], self.converted))
        for tensor, slots in whole.reads.items():  # quantized once, where any of its layers is floating
            makers = self.sources.get(tensor, frozenset())
            ends = set().union(*(self._nearest_layers.get(node, frozenset()) for node, _ in slots)) - makers
            for maker in makers:
                edge(("made", tensor), maker)
            for name in ends:
                edge(name, ("read", tensor))
            edge(("read", tensor), ("made", tensor), self._conversion(tensor, self.quantized))
        try:
            _, (_, cut) = networkx.minimum_cut(network, "int8", "float")
        except networkx.NetworkXUnbounded:  # what the user has in INT8 goes with what has to stay out
            cut = floating
        return tuple(sorted(name for name in free if name in cut))
