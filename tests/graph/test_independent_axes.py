"""Which axes a graph mixes, and where samples lie therefore."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import model, node, nodes as graph_nodes, values
from onnx import ModelProto, NodeProto, TensorProto

from trtopt.graph.independent_axes import independent_axes
from trtopt.graph.inputs import network_inputs

WIDTH, HEADS = 24, 3
WEIGHTS = {
    "one": np.array(1), "none": np.array([0]), "heads": np.array(HEADS), "deep": np.array([WIDTH // HEADS]),
    "wide": np.array([WIDTH]), "w": values(WIDTH, WIDTH), "axis0": np.array([0]), "axis1": np.array([1]),
    "first": np.array(0), "far": np.array([2**31 - 1]), "table": values(40, 1, WIDTH), "few": np.array([2]),
    "words": values(50, WIDTH), "scale": values(WIDTH), "at": np.array([[0]]), "places": np.array([[[0]]]),
    "filter": values(4, 3, 1), "channels": values(3), "pads": np.array([0, 1, 0, 0, 0, 0]),
}  # fmt: skip


def attention(x: str = "x") -> list[NodeProto]:
    """As PyTorch's: steps × samples × width, in which samples and heads are merged to one axis."""
    return [
        node("Shape", x, "steps", "", start=0, end=1), node("Shape", x, "count", "", start=1, end=2),
        node("Mul", "count heads", "rows"), node("Concat", "steps rows deep", "parted", axis=0),
        node("Reshape", f"{x} parted", "p"), node("Transpose", "p", "q", perm=[1, 0, 2]),
        node("Transpose", "q", "k", perm=[0, 2, 1]), node("MatMul", "q k", "scores"), node("Softmax", "scores", "s"),
        node("MatMul", "s q", "v"), node("Transpose", "v", "o", perm=[1, 0, 2]),
        node("Concat", "steps count wide", "whole", axis=0), node("Reshape", "o whole", "r"), node("MatMul", "r w", "y"),
    ]  # fmt: skip


def net(nodes: list[NodeProto], *, opset: int = 17, **inputs: Any) -> ModelProto:
    read = {name for item in nodes for name in item.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    return model(nodes, inputs=inputs or {"x": ["", "?", WIDTH]}, outputs={"y": None}, weights=weights, opset=opset)


def axes(proto: ModelProto) -> dict[str, int | None]:
    return {name: info.batch_axis for name, info in network_inputs(proto).items()}


def test_attention_over_one_axis_keeps_samples_on_the_other() -> None:
    assert axes(net(attention())) == {"x": 1}
    assert axes(net(attention(), x=["a", "b", WIDTH])) == {"x": 1}
    assert axes(net([node("Transpose", "x", "t", perm=[1, 0, 2]), *attention("t")])) == {"x": 0}


BOTH = [0, 1]
THREE = ["n", "c", "l"]


@pytest.mark.parametrize(
    ("end", "free", "shape", "opset"),
    [
        ("y = ArgMax (x)", [1], None, 17),
        ("y, i = TopK (x, few)", BOTH, None, 17),
        ("y = Gather (x, first)", [1], None, 17),
        ("y = GatherElements (x, places)", [1], None, 17),
        ("y = Split (x)", [1], None, 17),
        ("y = LpNormalization (x)", BOTH, None, 17),
        ("y = LogSoftmax (x)", BOTH, None, 13),
        ("y = Hardmax (x)", [0], None, 12),  # then along all axes from the first on
        ("y = Softmax <axis = -2> (x)", [0], None, 17),
        ("y = LayerNormalization (x, scale)", BOTH, None, 17),
        ("y = LayerNormalization <axis = 1> (x, scale)", [0], None, 17),
        ("y = RMSNormalization (x, scale)", BOTH, None, 23),
        ("y = InstanceNormalization (x, channels, channels)", BOTH, THREE, 17),
        ("y = GlobalAveragePool (x)", BOTH, THREE, 17),
        ("y = AveragePool <kernel_shape = [2]> (x)", BOTH, THREE, 17),
        ("y = Conv (x, filter)", [0], THREE, 17),
        ("y = ConvTranspose (x, filter)", [0], THREE, 17),
        ("y = GroupNormalization <num_groups = 1> (x, channels, channels)", [0], THREE, 21),
        ("y = Concat <axis = 1> (x, x)", [0], None, 17),
        ("y = Concat <axis = 0> (x)", BOTH, None, 17),
        ("y = Pad (x, pads)", [0], None, 17),
        ("y = GatherND (x, at)", [1], None, 17),
        ("y = GatherND <batch_dims = 1> (x, at)", [], None, 17),
        ("y = ScatterND (x, at, x)", [1], None, 17),
        ("y = ScatterElements (x, places, x)", [1], None, 17),
        ("y = ScatterElements <axis = 1> (x, places, x)", [0], None, 17),
        ("y = CumSum (x, one)", [0], None, 17),
        ("y = MatMul (x, scale)", BOTH, None, 17),
        ("t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (w, t)", BOTH, None, 17),
        ("y = Gemm (x, w)", [0], ["n", WIDTH], 17),
        ("y = Gemm <transA = 1> (x, w)", [1], [WIDTH, "n"], 17),
        ('y = Einsum <equation = "nnc->nc"> (x)', [], ["n", "n", WIDTH], 17),
        ('y = Einsum <equation = "tnc,cd"> (x, w)', None, None, 17),
        ('y = Einsum <equation = "...c,cd->...d"> (x, w)', None, None, 17),
        ('y = Einsum <equation = "tnc,tnd->ncd"> (x, x)', [1], None, 17),
        ("y = Slice (x, none, few)", [1], None, 17),
        ("y = Slice (x, none, far)", BOTH, None, 17),
        ("y = ReduceMean (x, axis1)", [0], None, 18),
        ("y = ReduceMean <axes = [0]> (x) z = ReduceMean <axes = [1]> (x)", [], None, 17),
        ("y = ReduceSum (x)", [], None, 17),
        ("y = ReduceSum <noop_with_empty_axes = 1> (x)", BOTH, None, 17),
        ("a = Cast <to = 7> (x) y = ReduceSum (x, a)", None, None, 17),
        ("s = Asinh (scale) y = Add (x, s)", BOTH, None, 17),  # not known, but of no input
        ("y = own.Relu (x)", None, None, 17),
        ("c = Cast <to = 7> (x) e = Expand (x, c) y = Softmax (e)", None, None, 17),
        ("m = ReduceMax <axes = [0, 1], keepdims = 0> (x) i = Cast <to = 7> (m) y = Slice (x, i, i)", None, None, 17),
        ("y = Softmax (x)", BOTH, THREE, 17),
        (
            "s = Shape (x) u = Unsqueeze <axes = [0]> (s) q = Squeeze <axes = [0]> (u) y = Reshape (x, q)",
            BOTH,
            None,
            12,
        ),
        ("s = Shape <start = 2> (x) r = Reshape (x, s) y = ReduceMean <axes = [0]> (r)", None, None, 17),
    ],
)
def test_axes_left_free_by_a_node(end: str, free: list[int] | None, shape: list[Any] | None, opset: int) -> None:
    proto = net(graph_nodes(end), x=shape or ["", "?", WIDTH], opset=opset)
    assert independent_axes(proto, network_inputs(proto)) == (free if free is None else {"x": free})
    assert shape or free is None or axes(proto) == {"x": free[0] if free else None}


@pytest.mark.parametrize("length", ["of = Identity (all)", "one = Squeeze (all) of = Reshape (one, axis1)"])
def test_a_table_of_positions_may_end(length: str) -> None:
    nodes = [
        node("Gather", "words ids", "x"),
        node("Shape", "ids", "all", "", start=0, end=1),
        *graph_nodes(length),
        node("Slice", "table none of", "places"),
        node("Add", "x places", "placed"),
        *attention("placed"),
    ]
    proto = net(nodes, ids=["t", "n"])
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    assert axes(proto) == {"ids": 1}


@pytest.mark.parametrize("sizes", ["s n t n", "? ? ? ?"])
def test_two_sequences_have_their_samples_on_the_same_axis(sizes: str) -> None:
    s, n, t, m = sizes.split()
    nodes = graph_nodes(
        "q = Transpose <perm = [1, 0, 2]> (x) k = Transpose <perm = [1, 2, 0]> (z) scores = MatMul (q, k) "
        "p = Softmax (scores) v = Transpose <perm = [1, 0, 2]> (z) o = MatMul (p, v) "
        "back = Transpose <perm = [1, 0, 2]> (o) y = Add (back, x)"
    )
    assert axes(net(nodes, x=[t, n, WIDTH], z=[s, m, WIDTH])) == {"x": 1, "z": 1}


def test_what_is_not_known_says_nothing() -> None:
    """Nor is asked of images of open sizes."""
    assert axes(net([node("ReduceMean", "x", "y", axes=[1])], x=["n", 3, "h", "w"])) == {"x": 0}
    unknown = net([*attention()[:-1], node("Asinh", "r", "y")])
    traced = net([node("Reshape", "x fixed", "r"), node("ReduceMean", "r", "y", axes=[0])])
    traced.graph.initializer.extend(model([], weights={"fixed": np.array([5, -1, WIDTH])}).graph.initializer)
    for proto in (unknown, traced):
        assert independent_axes(proto, network_inputs(proto)) is None
        assert axes(proto) == {"x": 0}


def test_a_graph_networks_arrays_are_one_graph_each() -> None:
    """Nodes × values and 2 × edges: nodes are gathered and added by number, so neither axis holds samples."""
    nodes = [
        node("Gather", "edges first", "from"), node("Gather", "edges one", "to"), node("MatMul", "x w", "h"),
        node("Unsqueeze", "from axis1", "f"), node("GatherND", "h f", "sent"), node("Unsqueeze", "to axis1", "t"),
        node("ScatterND", "h t sent", "y", reduction="add"),
    ]  # fmt: skip
    proto = net(nodes, opset=18, x=["nodes", WIDTH], edges=[2, "edges"])
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    inputs = network_inputs(proto)
    assert independent_axes(proto, inputs) == {"x": [], "edges": []}
    assert [info.batch_axis for info in inputs.values()] == [None, None]
