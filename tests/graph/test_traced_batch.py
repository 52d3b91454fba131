"""What of a model is for a batch of 1 though its inputs leave theirs open: found, and opened where that can be."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import values, written
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from trtopt.graph.io import load_model
from trtopt.graph.traced_batch import TracedBatch, find_traced_batch


def flat(*target: int, out: int | str = "batch", batch: int | str = "batch") -> ModelProto:
    """x → Conv → pooled → Reshape → Gemm."""
    return written(
        f"(float[{batch},3,8,8] x) => (float[{out},5] y) {{ c = Conv (x, w) p = GlobalAveragePool (c) "
        "[flat] f = Reshape (p, s) [fc] y = Gemm (f, v, b) }",
        w=values(8, 3, 3, 3), s=target, v=values(8, 5), b=values(5),
    )  # fmt: skip


def shuffle() -> ModelProto:
    return written(
        "(float[batch,8,3,3] x) => (float[batch,8,3,3] y) { [apart] r = Reshape (x, a) "
        "t = Transpose <perm = [0, 2, 1, 3, 4]> (r) [joined] y = Reshape (t, b) }",
        a=[1, 2, 4, 3, 3], b=[1, -1, 3, 3],
    )  # fmt: skip


def attention() -> ModelProto:
    """Steps first, as nn.MultiheadAttention writes it: samples lie in the middle, and are merged with heads."""
    return written(
        "(float[batch,6,8] x) => (float[batch,6,8] y) { t = Transpose <perm = [1, 0, 2]> (x) [heads] h = Reshape (t, heads) "
        "q = Transpose <perm = [1, 0, 2]> (h) k = Transpose <perm = [1, 2, 0]> (h) scores = MatMul (q, k) "
        "shares = Softmax (scores) o = MatMul (shares, q) back = Transpose <perm = [1, 0, 2]> (o) "
        "[whole] w = Reshape (back, whole) y = Transpose <perm = [1, 0, 2]> (w) }",
        heads=[6, 4, 2], whole=[6, 1, 8],
    )  # fmt: skip


def windows() -> ModelProto:
    """Swin's: windows are merged with samples, and `int()` made a number of how many samples there are."""
    return written(
        "(float[batch,16,3] x) => (float[batch,16,3] y) { r = Reshape (x, a) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (r) "
        "u = Reshape (t, b) m = MatMul (u, w) [apart] v = Reshape (m, c) z = Transpose <perm = [0, 1, 3, 2, 4, 5]> (v) "
        "[image] q = Reshape (z, d) y = Add (q, x) }",
        a=[-1, 2, 2, 2, 2, 3], b=[-1, 4, 3], c=[1, 2, 2, 2, 2, -1], d=[1, 16, -1], w=values(3, 3),
    )  # fmt: skip


def recurrent(state: float = 0.0) -> ModelProto:
    """A text recognizer's end, steps first."""
    return written(
        "(float[batch,6,3] x) => (float[6,batch,5] y) { t = Transpose <perm = [1, 0, 2]> (x) "
        "[lstm] l = LSTM <hidden_size = 4> (t, W, R, B, , h, h) s = Squeeze (l, one) [apart] f = Reshape (s, steps) "
        "y = MatMul (f, v) }",
        W=values(1, 16, 3), R=values(1, 16, 4), B=values(1, 32), v=values(4, 5), one=[1], steps=[6, 1, -1],
        h=np.full((1, 1, 4), state, np.float32),
    )  # fmt: skip


def upsampled() -> ModelProto:
    mode = 'mode = "nearest", coordinate_transformation_mode = "asymmetric"'
    text = f"(float[batch,3,8,8] x) => (float[batch,3,16,8] y) {{ [up] y = Resize <{mode}> (x, none, none, sizes) }}"
    return written(text, 11, none=np.zeros(0, np.float32), sizes=[1, 3, 16, 8])


def token() -> ModelProto:
    text = "(float[batch,5,4] x) => (float[] y) { r = Relu (x) [joined] y = Concat <axis = 1> (class, r) }"
    return written(text, **{"class": values(1, 1, 4)})


def merged() -> ModelProto:
    """Steps × samples, in which the samples lie inside."""
    return written(
        "(float[batch,6,4] x) => (float[6,5] y) { t = Transpose <perm = [1, 0, 2]> (x) [merged] f = Reshape (t, s) "
        "y = Gemm (f, v, b) }",
        s=[6, 4], v=values(4, 5), b=values(5),
    )  # fmt: skip


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
    text = "(float[points,3] x) => (float[1,3] y) { r = Reshape (x, s) y = ReduceMax <axes = [1], keepdims = 0> (r) }"
    proto = written(text, s=[1, -1, 3])
    assert find_traced_batch(proto) == find_traced_batch(flat(-1, 8)) == find_traced_batch(flat(0, -1))
    assert not find_traced_batch(proto).issues and not find_traced_batch(flat(1, 8, out=1, batch=1)).issues


def test_an_output_that_does_not_follow_the_batch_it_declares_is_not_certain() -> None:
    proto = written("(float[batch,3,8,8] x) => (float[batch,n] y) { [flat] y = Reshape (x, s) }", s=[1, -1])
    held = find_traced_batch(proto)
    assert not held.certain and held.dynamic_model is not None and [issue.node for issue in held.issues] == ["flat"]


def test_other_open_sizes_stay_open() -> None:
    proto = written(
        "(float[batch,3,h,w] x) => (float[batch,n,3] y) { t = Transpose <perm = [0, 2, 3, 1]> (x) r = Reshape (t, s) "
        "y = Add (r, one) }",
        s=[1, -1, 3], one=values(1, 1, 3),
    )  # fmt: skip
    opened = find_traced_batch(proto).dynamic_model
    assert opened is not None
    for shape in ((2, 3, 4, 5), (3, 3, 2, 2)):
        (result,) = ReferenceEvaluator(opened).run(None, {"x": values(*shape)})
        assert result.shape == (shape[0], shape[2] * shape[3], 3)


def test_a_trace_that_holds_lengths_says_nothing_of_the_batch() -> None:
    """As TorchScript's export of torch.nn.MultiheadAttention: any number of samples of the length it was made at run."""
    text = "(float[batch,steps,8] x) => (float[batch,%s,4,3] y) { [parted] r = Reshape (x, s) y = MatMul (r, w) }"
    held = find_traced_batch(load_model(written(text % "6", s=[0, 6, 4, 2], w=values(2, 3))).proto)
    assert held.length is not None and held.length.node == "parted" and "1x6x4x2 of 1x224x8" in held.length.reason
    assert not held.issues
    open_length = written(text % "steps", s=[0, -1, 4, 2], w=values(2, 3))
    assert find_traced_batch(load_model(open_length).proto) == TracedBatch()
