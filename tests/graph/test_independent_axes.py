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
    "words": values(50, WIDTH), "scale": values(WIDTH),
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


def test_attention_over_the_first_axis_keeps_samples_on_the_second() -> None:
    assert axes(net(attention())) == {"x": 1}
    assert axes(net(attention(), x=["a", "b", WIDTH])) == {"x": 1}


def test_attention_over_the_second_axis_keeps_them_on_the_first() -> None:
    assert axes(net([node("Transpose", "x", "t", perm=[1, 0, 2]), *attention("t")])) == {"x": 0}


@pytest.mark.parametrize(
    ("end", "axis"),
    [
        ("y = ReduceMean <axes = [0]> (x)", 1),
        ("y = Gather <axis = 0> (x, first)", 1),
        ("y = Softmax <axis = 0> (x)", 1),
        ("y = Slice (x, none, few)", 1),
        ('y = Einsum <equation = "tnc,tnd->ncd"> (x, x)', 1),
        ("y = Concat <axis = 0> (x, x)", 1),
        ("y = CumSum (x, first)", 1),
        ("y = LayerNormalization (x, scale)", 0),
        ("y = Slice (x, none, far)", 0),
        ("y = MatMul (x, w)", 0),
        ("y = ReduceMean <axes = [0]> (x) z = ReduceMean <axes = [1]> (x)", None),
    ],
)
def test_what_goes_along_an_axis_mixes_it(end: str, axis: int | None) -> None:
    assert axes(net(graph_nodes(end))) == {"x": axis}


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
