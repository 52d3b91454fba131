"""What of a model is for a batch of 1 though its inputs leave theirs open: found, and opened where that can be."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, nodes as graph_nodes, values
from onnx import ModelProto, NodeProto
from onnx.reference import ReferenceEvaluator

from trtopt.graph.io import load_model
from trtopt.graph.traced_batch import TracedBatch, find_traced_batch


def numbers(*entries: int) -> np.ndarray:
    return np.asarray(entries, np.int64)


def flat(*target: int, out: int | str = "batch") -> ModelProto:
    """x → Conv → pooled → Reshape → Gemm."""
    nodes = graph_nodes("c = Conv (x, w) p = GlobalAveragePool (c) [flat] f = Reshape (p, s) [fc] y = Gemm (f, v, b)")
    weights = {"w": values(8, 3, 3, 3), "s": numbers(*target), "v": values(8, 5), "b": values(5)}
    return model(nodes, weights=weights, outputs={"y": [out, 5]})


def shuffle() -> ModelProto:
    nodes = graph_nodes(
        "[apart] r = Reshape (x, a) t = Transpose <perm = [0, 2, 1, 3, 4]> (r) [joined] y = Reshape (t, b)"
    )
    shapes = {"a": numbers(1, 2, 4, 3, 3), "b": numbers(1, -1, 3, 3)}
    return model(nodes, weights=shapes, inputs={"x": ["batch", 8, 3, 3]}, outputs={"y": ["batch", 8, 3, 3]})


def attention() -> ModelProto:
    """Steps first, as nn.MultiheadAttention writes it: samples lie in the middle, and are merged with heads."""
    nodes = graph_nodes(
        "t = Transpose <perm = [1, 0, 2]> (x) [heads] h = Reshape (t, heads) "
        "q = Transpose <perm = [1, 0, 2]> (h) k = Transpose <perm = [1, 2, 0]> (h) scores = MatMul (q, k) "
        "shares = Softmax (scores) o = MatMul (shares, q) back = Transpose <perm = [1, 0, 2]> (o) "
        "[whole] w = Reshape (back, whole) y = Transpose <perm = [1, 0, 2]> (w)"
    )
    shapes = {"heads": numbers(6, 4, 2), "whole": numbers(6, 1, 8)}
    return model(nodes, weights=shapes, inputs={"x": ["batch", 6, 8]}, outputs={"y": ["batch", 6, 8]})


def windows() -> ModelProto:
    """Swin's: windows are merged with samples, and `int()` made a number of how many samples there are."""
    nodes = graph_nodes(
        "r = Reshape (x, a) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (r) u = Reshape (t, b) m = MatMul (u, w) "
        "[apart] v = Reshape (m, c) z = Transpose <perm = [0, 1, 3, 2, 4, 5]> (v) [image] q = Reshape (z, d) "
        "y = Add (q, x)"
    )
    shapes = {"a": numbers(-1, 2, 2, 2, 2, 3), "b": numbers(-1, 4, 3), "c": numbers(1, 2, 2, 2, 2, -1)}
    weights = {**shapes, "d": numbers(1, 16, -1), "w": values(3, 3)}
    return model(nodes, weights=weights, inputs={"x": ["batch", 16, 3]}, outputs={"y": ["batch", 16, 3]})


def recurrent(state: float = 0.0) -> ModelProto:
    """A text recognizer's end, steps first."""
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        NodeProto.FromString(node("LSTM", "t W R B", "l", "lstm", hidden_size=4).SerializeToString()),
        node("Squeeze", "l one", "s"),
        node("Reshape", "s steps", "f", "apart"),
        node("MatMul", "f v", "y"),
    ]
    nodes[1].input.extend(["", "h", "h"])
    weights = {"W": values(1, 16, 3), "R": values(1, 16, 4), "B": values(1, 32), "v": values(4, 5)}
    shapes = {"one": numbers(1), "steps": numbers(6, 1, -1)}
    weights |= {**shapes, "h": np.full((1, 1, 4), state, np.float32)}
    return model(nodes, weights=weights, inputs={"x": ["batch", 6, 3]}, outputs={"y": [6, "batch", 5]})


def upsampled() -> ModelProto:
    up = node("Resize", "x roi none sizes", "y", "up", mode="nearest", coordinate_transformation_mode="asymmetric")
    empty = np.zeros(0, np.float32)
    weights = {"roi": empty, "none": empty, "sizes": numbers(1, 3, 16, 8)}
    return model([up], weights=weights, opset=11, outputs={"y": ["batch", 3, 16, 8]})


def token() -> ModelProto:
    nodes = [node("Relu", "x", "r"), node("Concat", "class r", "y", "joined", axis=1)]
    return model(nodes, weights={"class": values(1, 1, 4)}, inputs={"x": ["batch", 5, 4]}, outputs={"y": None})


def merged() -> ModelProto:
    """Steps × samples, in which the samples lie inside."""
    nodes = graph_nodes("t = Transpose <perm = [1, 0, 2]> (x) [merged] f = Reshape (t, s) y = Gemm (f, v, b)")
    weights = {"s": numbers(6, 4), "v": values(4, 5), "b": values(5)}
    return model(nodes, weights=weights, inputs={"x": ["batch", 6, 4]}, outputs={"y": [6, 5]})


@pytest.mark.parametrize(
    ("proto", "nodes"),
    [
        (flat(1, 8), ["flat"]),
        (flat(1, -1), ["flat"]),
        (flat(1, -1, out=1), ["flat"]),
        (shuffle(), ["apart", "joined"]),
        (attention(), ["heads", "whole"]),
        (windows(), ["apart", "image"]),
        (recurrent(), ["lstm", "apart"]),
    ],
    ids=["flat", "rest", "undeclared", "shuffle", "attention", "windows", "recurrent"],
)
def test_what_is_opened_gives_each_sample_what_it_gives_alone(proto: ModelProto, nodes: list[str]) -> None:
    held = find_traced_batch(load_model(proto).proto)
    assert held.certain and [issue.node for issue in held.issues] == nodes
    assert held.dynamic_model is not None
    opened = load_model(held.dynamic_model).proto
    assert not find_traced_batch(opened).issues
    shape = [dim.dim_value or 1 for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    one, other = values(*shape, seed=1), values(*shape, seed=2)
    alone = [ReferenceEvaluator(proto).run(None, {"x": sample})[0] for sample in (one, other)]
    (both,) = ReferenceEvaluator(opened).run(None, {"x": np.concatenate([one, other])})
    axis = next(axis for axis, size in enumerate(alone[0].shape) if size != both.shape[axis])
    np.testing.assert_allclose(both, np.concatenate(alone, axis), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("proto", "last", "reason"),
    [
        (recurrent(0.5), "lstm", "initial states"),
        (upsampled(), "up", "it makes 1x3x16x8 of 3x3x8x8"),
        (token(), "joined", "don't fit together"),
        (merged(), "merged", "it makes 6x4 of 6x3x4"),
    ],
)
def test_what_can_not_be_opened_is_named(proto: ModelProto, last: str, reason: str) -> None:
    held = find_traced_batch(load_model(proto).proto)
    assert held.certain and held.dynamic_model is None
    assert held.issues[-1].node == last and reason in held.issues[-1].reason


def test_a_first_axis_that_counts_something_else_stays() -> None:
    """Points × coordinates become one cloud of them: nothing contradicts that."""
    nodes = [node("Reshape", "x s", "r"), node("ReduceMax", "r", "y", axes=[1], keepdims=0)]
    proto = model(nodes, weights={"s": numbers(1, -1, 3)}, inputs={"x": ["points", 3]}, outputs={"y": [1, 3]})
    assert find_traced_batch(proto) == find_traced_batch(flat(-1, 8)) == find_traced_batch(flat(0, -1))
    assert not find_traced_batch(proto).issues


def test_an_output_that_does_not_follow_the_batch_it_declares_is_not_certain() -> None:
    nodes = [node("Reshape", "x s", "y", "flat")]
    proto = model(nodes, weights={"s": numbers(1, -1)}, outputs={"y": ["batch", "n"]})
    held = find_traced_batch(proto)
    assert not held.certain and held.dynamic_model is not None and [issue.node for issue in held.issues] == ["flat"]


def test_other_open_sizes_stay_open() -> None:
    nodes = [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Reshape", "t s", "r"), node("Add", "r one", "y")]
    weights = {"s": numbers(1, -1, 3), "one": values(1, 1, 3)}
    proto = model(nodes, weights=weights, inputs={"x": ["batch", 3, "h", "w"]}, outputs={"y": ["batch", "n", 3]})
    opened = find_traced_batch(proto).dynamic_model
    assert opened is not None
    for shape in ((2, 3, 4, 5), (3, 3, 2, 2)):
        (result,) = ReferenceEvaluator(opened).run(None, {"x": values(*shape)})
        assert result.shape == (shape[0], shape[2] * shape[3], 3)


def test_a_fixed_batch_is_not_looked_at() -> None:
    proto = flat(1, 8, out=1)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    assert not find_traced_batch(proto).issues


def test_a_trace_that_holds_lengths_says_nothing_of_the_batch() -> None:
    """As TorchScript's export of torch.nn.MultiheadAttention: any number of samples of the length it was made at run."""
    nodes = [node("Reshape", "x s", "r", "parted"), node("MatMul", "r w", "y")]
    weights = {"s": numbers(0, 6, 4, 2), "w": values(2, 3)}
    proto = model(nodes, weights=weights, inputs={"x": ["batch", "steps", 8]}, outputs={"y": ["batch", 6, 4, 3]})
    held = find_traced_batch(load_model(proto).proto)
    assert held.length is not None and held.length.node == "parted" and "1x6x4x2 of 1x224x8" in held.length.reason
    assert not held.issues
    weights["s"] = numbers(0, -1, 4, 2)
    proto = model(nodes, weights=weights, inputs={"x": ["batch", "steps", 8]}, outputs={"y": ["batch", "steps", 4, 3]})
    assert find_traced_batch(load_model(proto).proto) == TracedBatch()
