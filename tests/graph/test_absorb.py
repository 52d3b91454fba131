"""What goes into weights is one number a channel; all else stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import left as operators, model, node, values, written
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.graph.passes.fold import fold

S = 4  # channels, and every other size


def two(
    maker: str, rank: int, op: str, form: tuple[int, ...], *, swapped: bool = False, **attributes: Any
) -> ModelProto:
    """MAKER → OP with a constant of that form; every size is `S`."""
    weight = values(S, S // attributes.get("group", 1), *[1] * (rank - 2)) if rank > 2 else values(S, S)
    inputs = "c h" if swapped else "h c"
    nodes = [node(maker, "x w", "h", "m", **attributes), node(op, inputs, "y", "o")]
    weights = {"w": weight, "c": np.abs(values(*form, seed=1)) + 1}
    return model(nodes, inputs={"x": ["n", *[S] * (rank - 1)]}, weights=weights)


@pytest.mark.parametrize("op", ["Mul", "Add", "Div", "Sub"])
@pytest.mark.parametrize("maker", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("channel", [True, False])
def test_a_constant_along_another_axis_than_the_channels_stays(op: str, maker: str, rank: int, channel: bool) -> None:
    for axis in range(1, rank):
        form = tuple(S if place == axis else 1 for place in range(1, rank))
        taken = (axis == 1) is channel
        found = operators(two(maker, rank, op, (1, *form) if channel else form))
        assert found == ([maker] if axis == 1 else [maker, op]), (form, taken)


@pytest.mark.parametrize("form", [(), (1,), (1, 1, 1, 1)])
def test_one_number_for_all_channels_goes_in(form: tuple[int, ...]) -> None:
    assert operators(two("Conv", 4, "Mul", form)) == ["Conv"] == operators(two("Conv", 4, "Add", form, swapped=True))


@pytest.mark.parametrize("form", [(S, S, 1), (1, S, S), (1, 1, S, 1, 1), (2, 1, 1, 1), (S,)])
def test_maps_rows_and_what_makes_the_result_larger_stay(form: tuple[int, ...]) -> None:
    assert operators(two("Conv", 4, "Mul", form)) == ["Conv", "Mul"]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("maker", ["Conv", "ConvTranspose"])
def test_groups_are_scaled_each_by_its_own(maker: str, group: int) -> None:
    assert operators(two(maker, 4, "Mul", (S, 1, 1), group=group)) == [maker]


def gemm(*after: Any, weights: dict[str, NDArray[Any]], bias: str = "b", **attributes: Any) -> ModelProto:
    held = {"w": values(S, S), "b": values(S, seed=2), "r": np.array([2, 2, S]), **weights}
    return model([node("Gemm", f"x w {bias}", "h", "m", **attributes), *after], inputs={"x": [S, S]}, weights=held)


@pytest.mark.parametrize("attributes", [{}, {"transB": 1}, {"alpha": 0.5, "beta": 2.0}, {"transA": 1, "beta": 0.0}])
@pytest.mark.parametrize("bias", [(S,), (1, S), (S, 1), (S, S), (1,), ()])
@pytest.mark.parametrize("op", ["Mul", "Add"])
def test_gemm_takes_a_number_a_column(op: str, bias: tuple[int, ...], attributes: dict[str, Any]) -> None:
    weights = {"b": values(*bias, seed=3) if bias else np.float32(0.5), "c": values(S, seed=4)}
    assert operators(gemm(node(op, "h c", "y"), weights=weights, **attributes)) == ["Gemm"]  # type: ignore[arg-type]
    rows = {**weights, "c": values(S, 1, seed=4)}
    assert operators(gemm(node(op, "h c", "y"), weights=rows, **attributes)) == ["Gemm", op]  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [False, True])
def test_what_something_else_reads_stays(given: bool) -> None:
    second = [node("Relu", "h", "z")]
    for nodes in ([node("Mul", "h c", "y")], [node("Reshape", "h r", "k"), node("Mul", "k c", "y")]):
        proto = gemm(*nodes, *([] if given else second), weights={"c": values(S, seed=4)})
        proto.graph.output.add(name="h" if given else "z").type.tensor_type.elem_type = 1
        if nodes[0].op_type == "Reshape":
            proto.graph.initializer[2].CopyFrom(onnx.numpy_helper.from_array(np.array([1, S, S]), "r"))
        assert {"Gemm", "Mul"} <= {*operators(proto)}


def test_what_a_branch_reads_stays() -> None:
    form = "float[1,4,4,4]"
    proto = written(
        f"({form} x, bool b) => ({form} y, {form} z) {{ h = Conv (x, w) y = Mul (h, c) z = If (b) <"
        f"then_branch = t () => ({form} o) {{ o = Neg (h) }}, else_branch = e () => ({form} p) {{ p = Abs (h) }}> }}",
        w=values(4, 4, 1, 1), c=values(4, 1, 1, seed=1),
    )  # fmt: skip
    made, report = fold(proto)
    assert not report.problem and [item.op_type for item in made.graph.node] == ["Conv", "Mul", "If"]


def normalized(maker: str, opset: int, outputs: str = "y", **attributes: Any) -> ModelProto:
    weight = values(S, S) if maker == "Gemm" else values(S, S, 1, 1)
    weights = {"w": weight, "v": np.abs(values(S, seed=9)) + 1, **{n: values(S, seed=i) for i, n in enumerate("sbm")}}
    nodes = [
        node(maker, "x w" if opset > 10 or maker != "Gemm" else "x w b", "h", "m"),
        node("BatchNormalization", "h s b m v", outputs, "n", **attributes),
    ]
    return model(nodes, inputs={"x": ["n", *[S] * (1 if maker == "Gemm" else 3)]}, weights=weights, opset=opset)


@pytest.mark.parametrize("opset", [9, 13, 14, 17])
@pytest.mark.parametrize("maker", ["Conv", "ConvTranspose", "Gemm"])
def test_normalization_goes_in(maker: str, opset: int) -> None:
    assert operators(normalized(maker, opset, epsilon=1e-3)) == [maker]


def test_normalization_by_the_batchs_own_statistics_stays() -> None:
    old = fold(normalized("Conv", 9, "y mean variance a b2"))[0]  # before opset 14, five results say so
    assert [item.op_type for item in old.graph.node] == ["Conv", "BatchNormalization"]


IMAGE = "(float[n,3,8,8] x) => (float[] y)"
W, C = values(S, 3, 1, 1), values(S, 1, 1)


@pytest.mark.parametrize(
    ("proto", "left"),
    [
        (written("(float[n,4] x) => (float[] y) { h = MatMul (x, w) y = Add (b, h) }", w=values(S, S), b=values(S)), "Gemm"),
        (
            written("(float[n,4,4] x) => (float[] y) { h = MatMul (x, w) y = Add (b, h) }", w=values(S, S), b=values(S)),
            "MatMul Add",
        ),
        (written(f"{IMAGE} {{ h = Conv (x, w) y = Mul (h, c) }}", w=values(1, 3, 1, 1), c=values(3, 1, 1)), "Conv Mul"),
        (
            written(f"{IMAGE} {{ w = DequantizeLinear (q, s) h = Conv (x, w) y = Mul (h, c) }}",
                    q=np.ones((S, 3, 1, 1), np.int8), s=np.float32(0.5), c=C),
            "DequantizeLinear Conv Mul",
        ),
        (
            written(f"{IMAGE} {{ b = ReduceSum <keepdims = 0> (x) e = Expand (b, f) h = Conv (x, w, e) y = Mul (h, c) }}",
                    w=W, c=C, f=[S]),
            "ReduceSum Expand Conv Mul",
        ),
    ],
    ids=["a product and a sum", "of three dimensions", "one channel made several", "codes", "a bias that is computed"],
)  # fmt: skip
def test_what_a_product_or_convolution_takes_in(proto: ModelProto, left: str) -> None:
    assert operators(proto) == left.split()


@pytest.mark.parametrize(("op", "constant"), [("Mul", 3e38), ("Div", 0)])
def test_factors_beyond_the_type_stay_outside(op: str, constant: float) -> None:
    weight = np.full((S, 3, 1, 1), 9, np.float32)
    made, report = fold(written(f"{IMAGE} {{ h = Conv (x, w) y = {op} (h, c) }}", w=weight, c=np.float32(constant)))
    assert not report.problem and [item.op_type for item in made.graph.node] == ["Conv", op]


@pytest.mark.parametrize(
    ("amounts", "value", "own", "left"),
    [
        ([0, 0, 1, 2, 0, 0, 3, 0], None, {}, ["Conv"]),
        ([0, 0, 1, 2, 0, 0, 3, 0], 0.0, {"pads": [1, 1, 0, 1]}, ["Conv"]),
        ([0, 0, 1, 1, 0, 0, 1, 1], None, {"auto_pad": "VALID"}, ["Conv"]),
        ([0, 0, 1, 1, 0, 0, 1, 1], None, {"auto_pad": "SAME_UPPER"}, ["Pad", "Conv"]),
        ([0, 0, 1, 2, 0, 0, 3, 0], 1.0, {}, ["Pad", "Conv"]),
        ([0, 0, -1, 2, 0, 0, 3, 0], None, {}, ["Pad", "Conv"]),
        ([0, 1, 1, 2, 0, 0, 3, 0], None, {}, ["Pad", "Conv"]),
        ([1, 0, 1, 2, 0, 0, 3, 0], None, {}, ["Pad", "Conv"]),
    ],
)
@pytest.mark.parametrize("opset", [10, 17])
def test_zeros_around_the_input_become_the_convolutions_own(
    amounts: list[int], value: float | None, own: dict[str, Any], left: list[str], opset: int
) -> None:
    channels = 3 + amounts[1] + amounts[5]
    weights = {"w": values(2, channels, 2, 2), "p": np.array(amounts)}
    if opset < 11:
        pad = node("Pad", "x", "h", pads=amounts, **({} if value is None else {"value": value}))
    else:
        pad = node("Pad", "x p" if value is None else "x p v", "h")
        weights |= {} if value is None else {"v": np.array(value, np.float32)}
    assert operators(model([pad, node("Conv", "h w", "y", **own)], weights=weights, opset=opset)) == left


def test_padding_of_named_axes_and_of_several_readers() -> None:
    weights = {"w": values(2, 3, 2, 2), "p": np.array([1, 2, 3, 0]), "a": np.array([-1, 2])}
    pad = onnx.helper.make_node("Pad", ["x", "p", "", "a"], ["h"], "pad")
    nodes = [pad, node("Conv", "h w", "y")]
    assert operators(model(nodes, weights=weights, opset=18)) == ["Conv"]
    both = model([*nodes, node("Relu", "h", "z")], weights=weights, opset=18, outputs={"y": None, "z": None})  # type: ignore[dict-item]
    assert sorted(operators(both)) == ["Conv", "Pad", "Relu"]
    for mode in ("reflect", "edge"):
        around = f'(float[n,3,8,8] x) => (float[] y) {{ h = Pad <mode = "{mode}"> (x, p, , a) y = Conv (h, w) }}'
        assert operators(written(around, 18, **weights)) == ["Pad", "Conv"]
