"""Nodes that do nothing go, pairs become one, and what only looks like that stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import left, model, node, written
from numpy.typing import NDArray
from onnx import ModelProto, helper

from trtopt.graph.passes.fold import fold


def ints(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def one(
    op: str, *constants: Any, shape: Any = (2, 3, 4), first: bool = False, opset: int = 17, **attributes: Any
) -> ModelProto:
    names = [f"c{index}" for index in range(len(constants))]
    inputs = [*names, "x"] if first else ["x", *names]
    weights = {name: np.asarray(item) for name, item in zip(names, constants)}
    nodes = [helper.make_node(op, inputs, ["h"], "it", **attributes), node("Relu", "h", "y")]
    return model(nodes, inputs={"x": list(shape)}, weights=weights, opset=opset)


F = np.float32


@pytest.mark.parametrize(
    ("proto", "gone"),
    [
        (one("Mul", np.ones((), F)), True),
        (one("Mul", np.ones((1, 4), F), first=True), True),
        (one("Mul", np.ones((3, 1), F), shape=("n", 3, 4)), True),
        (one("Mul", np.ones((5, 1, 1, 1), F)), False),  # one dimension more
        (one("Mul", np.ones((2, 1), F), shape=(2, 1, 4)), False),  # a larger result
        (one("Mul", np.ones((2, 1, 1), F), shape=("n", 3, 4)), False),  # of a batch of one, two
        (one("Add", np.zeros((1, 1, 1), F)), True),
        (one("Add", np.full((), 1e-9, F)), False),  # an epsilon isn't nothing
        (one("Mul", np.full((), 1 + 1e-6, F)), False),
        (one("Sub", np.zeros((), F)), True),
        (one("Sub", np.zeros((), F), first=True), False),
        (one("Div", np.ones((), F)), True),
        (one("Div", np.ones((), F), first=True), False),
        (one("Add", np.ones((), F)), False),
        (one("Reshape", ints(2, 3, 4)), True),
        (one("Reshape", ints(0, 3, -1), shape=("n", 3, 4)), True),
        (one("Reshape", ints(3, 2, 4)), False),
        (one("Expand", ints(1, 3, 1)), True),
        (one("Expand", ints(2, 1, 4), shape=("n", 3, 4)), False),
        (one("Slice", ints(0), ints(9), ints(1)), True),
        (one("Slice", ints(1), ints(9), ints(1)), False),
        (one("Slice", ints(-1), ints(-9), ints(1), ints(-1)), False),  # turned round
        (one("Pad", ints(0, 0, 0, 0, 0, 0), mode="reflect"), True),
        (one("Pad", ints(0, 0, 1, 0, 0, 0)), False),
        (one("Pad", opset=10, pads=[0] * 6), True),
        (one("Pad", opset=10, pads=[0, 0, 1, 0, 0, 0]), False),
        (one("Transpose", perm=[0, 1, 2]), True),
        (one("Transpose", perm=[0, 2, 1]), False),
        (one("Transpose"), False),
        (one("Cast", to=1), True),
        (one("Dropout"), True),
        (one("Dropout", opset=10, ratio=0.5), True),
        (one("Concat", axis=1), True),
        (one("Split", axis=1), True),
    ],
)
def test_only_what_does_nothing_goes(proto: ModelProto, gone: bool) -> None:
    assert (left(proto, 1) == ["Relu"]) is gone


def pair(first: Any, second: Any, shape: Any = (2, 3, 4), between: str = "", **weights: NDArray[Any]) -> ModelProto:
    ends = {"y": None, **({"h": None} if between == "given" else {"z": None} if between == "read" else {})}
    nodes = [first, second, *([node("Neg", "h", "z")] if between == "read" else [])]
    return model(nodes, inputs={"x": list(shape)}, outputs=ends, weights=weights, opset=18)  # type: ignore[arg-type]


@pytest.mark.parametrize("between", ["", "read", "given"])
@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        (node("Transpose", "x", "h", perm=[0, 2, 1]), node("Transpose", "h", "y", perm=[2, 0, 1]), True),
        (node("Transpose", "x", "h"), node("Transpose", "h", "y", perm=[1, 2, 0]), True),
        (node("Reshape", "x r", "h"), node("Reshape", "h s", "y"), True),
        (node("Reshape", "x r", "h"), node("Reshape", "h u", "y"), False),  # its zeros are the first one's sizes
        (node("Unsqueeze", "x a", "h"), node("Unsqueeze", "h b", "y"), True),
        (node("Slice", "x one two one", "h"), node("Slice", "h one two minus", "y"), True),
        (node("Slice", "x one two one", "h"), node("Slice", "h zero one one", "y"), False),  # of the same axis
        (node("Concat", "x x", "h", axis=1), node("Concat", "h x", "y", axis=1), True),
    ],
)
def test_pairs_become_one(first: Any, second: Any, merged: bool, between: str) -> None:
    held = {"r": ints(4, 6), "s": ints(2, 12), "u": ints(0, 2, 3), "a": ints(0, 2), "b": ints(-1, 1)}
    held |= {"zero": ints(0), "one": ints(1), "two": ints(3), "minus": ints(-1)}
    proto = pair(first, second, between=between, **held)
    found = left(proto)
    kept = bool(between) or not merged
    if second.op_type == "Concat" and between:
        assert found.count("Concat") == 2
    else:
        assert found.count(second.op_type) == 1 + kept


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        ("a = Mul (x, s) b = Mul (t, z)", 1),
        ("a = Mul (s, x) b = Mul (z, t)", 1),
        ("a = Mul (x, s) b = Mul (t, wide)", 2),  # more axes than the operand has
        ("a = Mul (x, rows) b = Mul (t, s)", 2),
        ("a = Mul (x, s) b = Mul (t, z) also = Relu (b)", 2),
        ("a = Mul (x, s) b = Mul (a, z)", 2),
        ("a = Mul (x, tiny) b = Mul (t, z)", 2),  # FP16 holds the product in few digits
        ("a = Mul (x, s) b = Mul (t, two)", 2),
    ],
)
def test_the_factors_of_a_products_operands_become_one(text: str, factors: int) -> None:
    """As of attention's query and key."""
    net = written(
        f"(float[4,4] x) => (float y{', float also' * ('also' in text)}) {{ t = Transpose (x) {text} y = MatMul (a, b) }}",
        s=np.float32(0.4),
        z=np.full(1, 0.3, np.float32),
        wide=np.full((1, 1, 1), 0.3, np.float32),
        rows=np.full((4, 1), 0.3, np.float32),
        tiny=np.float32(1e-4),
        two=np.float32(2),
    )
    assert left(net).count("Mul") == factors


@pytest.mark.parametrize(
    ("mask", "stays"),
    [
        ("m = Where (hidden, low, zero)", False),
        ("h = Unsqueeze (hidden, axis) w = Where (h, low, zero) e = Expand (w, form) m = Squeeze (e, axis)", False),
        ("m = Where (hidden, none, zero)", True),  # a row may be -inf throughout
        ("m = Where (hidden, x, zero)", True),  # of what nothing is known
    ],
)
@pytest.mark.parametrize(
    "guard", ["n = IsNaN (s) y = Where (n, zero, s)", "n = IsNaN (t) y = Where (n, zero, s)"], ids=["", "of another"]
)
def test_a_guard_goes_where_a_softmax_makes_no_nan(mask: str, stays: bool, guard: str) -> None:
    """PyTorch's exporter writes it behind every Softmax of masked attention."""
    proto = written(
        f"""(float[n, 4, 4] x) => (float[n, 4, 4] y) {{
        hidden = Less (x, zero) {mask} t = Add (x, m) s = Softmax <axis = 2> (t) {guard} }}""",
        low=np.finfo(np.float32).min,
        none=F(-np.inf),
        zero=F(0),
        axis=ints(0),
        form=ints(1, 1, 4, 4),
    )
    assert ("IsNaN" in left(proto)) == (stays or "(t)" in guard)


def test_casts_by_a_narrower_type_stay() -> None:
    half = node("Cast", "x", "h", to=10)
    assert left(pair(half, node("Cast", "h", "y", to=1))) == ["Cast", "Cast"]
    double = pair(node("Cast", "x", "h", to=11), node("Cast", "h", "y", to=1))
    assert left(double)[-1:] == ["Cast"]


def test_sizes_of_shapes_are_numbers_or_stay_as_they_were() -> None:
    proto = written(
        "(float[n,3,8,8] x) => (float[n,3,64] y) { s = Shape (x) b = Gather (s, zero) c = Gather (s, one) "
        "bu = Unsqueeze (b, first) cu = Unsqueeze (c, first) t = Concat <axis = 0> (bu, cu, end) h = Reshape (x, t) "
        "y = Relu (h) }",
        zero=0, one=1, end=[-1], first=[0],
    )  # fmt: skip
    assert left(proto) == ["Reshape", "Relu"]
    shape = next(t for t in fold(proto)[0].graph.initializer if t.name in fold(proto)[0].graph.node[0].input)
    assert onnx.numpy_helper.to_array(shape).tolist() == [0, 3, -1]
