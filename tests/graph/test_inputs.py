"""On which axes a model's samples lie, by what its graph says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import model, node, values, written as with_weights
from onnx import ModelProto

from trtopt.graph.inputs import network_inputs, network_outputs
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.proto import tensor_info
from trtopt.graph.traced_batch import find_traced_batch

N, H = 8, 16


def recurrent(
    op: str = "LSTM", x: Any = ("T", "N", N), *, before: Any = (), state: Any = None, read: str = "x", **attributes: Any
) -> ModelProto:
    """x → recurrent layer → y, h; with a state where its shape is given."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    inputs = {"x": list(x)} | ({} if state is None else {"h0": list(state)})
    layer = node(op, f"{read} w r", "y h", hidden_size=H, **attributes)
    if state is not None:
        layer.input.extend(["", "", "h0"])
    weights = {"w": values(1, gates * H, N), "r": values(1, gates * H, H, seed=1)}
    return model([*before, layer], inputs=inputs, outputs={"y": None, "h": None}, weights=weights)


def axes(proto: ModelProto) -> dict[str, int | None]:
    return {name: info.batch_axis for name, info in network_inputs(proto).items()}


TURNED = [node("Transpose", "x", "t", perm=[1, 0, 2])]
RAISED = [node("Constant", "", "one", value_ints=[1]), node("Unsqueeze", "x one", "t")]
LAYERS = [node("Softmax", "x", "a"), node("Relu", "a", "t")]


@pytest.mark.parametrize(
    ("proto", "expected"),
    [
        *((recurrent(op), {"x": 1}) for op in ("LSTM", "GRU", "RNN")),
        # Samples first, where the graph transposes them.
        (recurrent(x=("N", "T", N), before=TURNED, read="t"), {"x": 0}),
        (recurrent(x=(4, 7, N), before=TURNED, read="t"), {"x": 0}),
        # States have them behind their layers.
        (recurrent(x=("T", "N", N), state=(1, "N", H)), {"x": 1, "h0": 1}),
        (recurrent(x=("N", "T", N), state=(1, "N", H), before=TURNED, read="t"), {"x": 0, "h0": 1}),
        (recurrent(before=LAYERS, read="t"), {"x": 1}),
        # A batch that is fixed behind the first axis, or steps of one sample alone: an array is one sample.
        *((recurrent(x=x), {"x": None}) for x in ((7, 4, N), ("T", 1, N), ("T", 4, N))),
        (recurrent(x=("T", 4, N), state=(1, 4, H)), {"x": None, "h0": None}),
        (recurrent(x=("T", N), before=RAISED, read="t"), {"x": None}),
    ],
)
def test_a_recurrent_layer_keeps_samples_on_its_second_axis(proto: ModelProto, expected: dict[str, int | None]) -> None:
    assert axes(proto) == expected


def test_layers_that_go_along_both_axes_say_nothing() -> None:
    layers = [
        node("LSTM", "x w r", "y h", hidden_size=H),
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("LSTM", "t w r", "z g", hidden_size=H),
    ]
    weights = {"w": values(1, 4 * H, N), "r": values(1, 4 * H, H, seed=1)}
    proto = model(layers, inputs={"x": ["A", "B", N]}, outputs={"h": None, "g": None}, weights=weights)
    assert axes(proto) == {"x": 0}


def two(x: Any, y: Any, *, z: Any = None) -> ModelProto:
    inputs = {"x": list(x), "y": list(y)} | ({} if z is None else {"z": list(z)})
    nodes = [node("Identity", name, f"{name}_out") for name in inputs]
    return model(nodes, inputs=inputs, outputs={f"{name}_out": None for name in inputs})


@pytest.mark.parametrize(
    ("x", "y", "z", "expected"),
    [
        # A dimension that is called batch.
        (("T", "batch", N), ("T", "batch"), None, [1, 1]),
        (("batch_size", 3), (2, "batch_size", H), None, [0, 1]),
        (("batch", 3), (5, H), None, [0, 0]),
        (("T", "batch"), (5, H), None, [None, None]),
        # A size that all inputs share, where one begins with it.
        (("n", "t"), (2, "n", H), None, [0, 1]),
        ((1, "t"), (1, "t", H), None, [0, 0]),
        (("n", "t"), ("n", "t"), None, [0, 0]),
        (("n", "t"), (2, "m", H), None, [0, 0]),
        # A single number is one for each sample.
        (("batch", "t"), (2, "batch", H), (), [0, 1, None]),
    ],
)
def test_names_of_sizes_say_where_samples_lie(x: Any, y: Any, z: Any, expected: list[int | None]) -> None:
    assert [*axes(two(x, y, z=z)).values()] == expected


def test_outputs_have_them_where_the_name_of_the_size_is() -> None:
    outputs = load_model(recurrent(x=("T", "batch", N))).outputs
    assert [(info.name, info.batch_axis) for info in outputs] == [("y", 2), ("h", 1)]
    assert [info.batch_axis for info in load_model(recurrent(x=(7, 4, N))).outputs] == [None, None]


def test_folding_keeps_what_the_graph_said() -> None:
    proto = recurrent(x=(7, 4, N))
    folded, _ = fold(proto)
    again, _ = fold(folded)
    assert again.SerializeToString(deterministic=True) == folded.SerializeToString(deterministic=True)
    del folded.graph.node[:], folded.graph.output[:]
    assert axes(folded) == {"x": None}
    assert not fold(two(("batch", 3), (5, H)))[0].metadata_props


@pytest.mark.parametrize("text", ["", "[1]", '{"x": 7}', '{"x": "1"}', '{"z": 1}', "{"])
def test_a_record_that_cannot_be_right_is_not_believed(text: str) -> None:
    proto = recurrent()
    proto.metadata_props.add(key="trtopt.batch_axes", value=text)
    assert axes(proto) == {"x": 1}


def test_one_image_with_any_number_of_boxes_is_one_sample() -> None:
    boxes = [node("ReduceMax", "image", "top", keepdims=0), node("Add", "rois top", "y")]
    made = model(boxes, inputs={"image": [1, 3, 8, 8], "rois": ["boxes", 5]})
    assert axes(made) == {"image": None, "rois": None}
    named = model(boxes, inputs={"image": [1, 3, 8, 8], "rois": ["batch", 5]})
    assert axes(named) == {"image": 0, "rois": 0}
    assert axes(model(boxes, inputs={"image": ["n", 3, 8, 8], "rois": ["boxes", 5]})) == {"image": 0, "rois": 0}


# Outputs ----------------------------------------------------------------------------------------------------------------

ROWS = "{ t = Transpose<perm = [%s]>(x) y = Reshape(t, s) }"


def written(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> g {text}')


@pytest.mark.parametrize(
    ("text", "shape", "axis"),
    [
        ("(float[n,3,5] x) => (float[n,3,5] y) { y = Neg(x) }", ("n", 3, 5), 0),
        ("(float[?,3,5] x) => (float[5,?,3] y) { y = Transpose<perm = [2, 0, 1]>(x) }", (5, -1, 3), 1),
        ("(float[n,3,w] x) => (float[a,b,3] y) { y = Transpose<perm = [2, 0, 1]>(x) }", ("a", "n", 3), 1),
        ("(float[1,3,5] x) => (float[5,1,3] y) { y = Transpose<perm = [2, 0, 1]>(x) }", (5, 1, 3), 1),
        ("(float[4,3,4] x) => (float[4,4,3] y) { y = Transpose<perm = [2, 0, 1]>(x) }", (4, 4, 3), 1),
        ("(float[n,3] x) => (float y) { y = ReduceMean<keepdims = 0>(x) }", (), None),
        ("(float[n,3] x) => (float[1,3] y) <int64[1] a = {0}> { y = ReduceMean(x, a) }", (1, 3), None),
        ("(float[n,3] x) => (float[m,n] y) { t = Transpose<perm = [1, 0]>(x) y = MatMul(x, t) }", ("n", "n"), None),
        ("(float[n,3] x) => (float[r,3] y) <float[1,3] k = {1, 1, 1}> { y = Concat<axis = 0>(x, k) }", ("r", 3), None),
        ("(float[n,3] x) => (int64[2,r] y) { y = NonZero(x) }", (2, "r"), None),
        ("(float[n,3,5] x, float[4] k) => (float[4] y) { y = Identity(k) }", (4,), None),
        # Rows of samples: one sample's after the other's, or mixed.
        ("(float[n,3,5] x) => (float[r,5] y) <int64[2] s = {-1, 5}> { z = Reshape(x, s) y = Neg(z) }", ("r", 5), 0),
        (f"(float[n,3,5] x) => (float[r,3] y) <int64[2] s = {{-1, 3}}> {ROWS % '0, 2, 1'}", ("r", 3), 0),
        (f"(float[n,3,5] x) => (float[r,5] y) <int64[2] s = {{-1, 5}}> {ROWS % '1, 0, 2'}", ("r", 5), None),
        (f"(float[n,3,5] x) => (float[3,r] y) <int64[2] s = {{3, -1}}> {ROWS % '1, 0, 2'}", (3, "r"), 1),
        (f"(float[n,3,5] x) => (float[3,r] y) <int64[2] s = {{3, -1}}> {ROWS % '1, 2, 0'}", (3, "r"), None),
        (
            "(float[n,6,5] x) => (float[r,5] y) <int64[2] s = {-1, 5}, int64[3] u = {-1, 2, 5}> "  # noqa: ISC004
            "{ z = Reshape(x, s) q = Reshape(z, u) p = Neg(q) y = Reshape(p, s) }",
            ("r", 5),
            0,
        ),
        (
            "(float[n,w,5] x) => (float[r,5] y) <int64[2] s = {-1, 5}> { y = Reshape(x, s) }",
            ("r", 5),
            0,
        ),
        (
            "(float[n,3,5] x) => (float[r,5] y) <int64[2] s = {-1, 5}> "  # noqa: ISC004
            "{ t = Transpose<perm = [1, 0, 2]>(x) z = Reshape(t, s) p = Neg(z) y = Abs(p) }",
            ("r", 5),
            None,
        ),
        (  # a width that only one length goes with
            "(float[n,w] x) => (float[r,2] y) <int64[2] s = {-1, 2}, int64[2] u = {64, 4}> "  # noqa: ISC004
            "{ m = ConstantOfShape(u) z = MatMul(x, m) y = Reshape(z, s) }",
            ("r", 2),
            0,
        ),
        # Declared sizes that aren't true any more.
        ("(float[n,3] x) => (float[1,3] y) { y = Neg(x) }", ("n", 3), 0),
        ("(float[?,3] x) => (float[1,3] y) { y = Neg(x) }", (-1, 3), 0),
        ("(float[1,4] x) => (float[4] y) { y = Neg(x) }", (1, 4), 0),
        ("(float[n,3,5] x) => (float[3,5] y) <int64[2] s = {-1, 5}> { y = Reshape(x, s) }", (-1, 5), 0),
        # What inference doesn't know stays as it is declared.
        ("(float[n,3] x) => (float[n,7] y) { y = com.acme.Own(x) }", ("n", 7), 0),
        ("(float[n,3] x) => (float[7,q] y) { y = com.acme.Own(x) }", (7, "q"), None),
        ("(float[2,3] x) => (float[2,2] y) { y = com.acme.Own(x) }", (2, 2), None),
        ("(float[1,3] x) => (float[7,1,1] y) { y = com.acme.Own(x) }", (7, 1, 1), 1),
    ],
)  # fmt: skip
def test_an_output_has_samples_where_it_grows_with_them(text: str, shape: Any, axis: int | None) -> None:
    proto = written(text)
    if "acme" in text:
        proto.opset_import.add(domain="com.acme", version=1)
    (info,) = network_outputs(proto, network_inputs(proto))
    assert (info.name, info.dtype, info.shape, info.batch_axis) == (
        "y",
        "int64" if "NonZero" in text else "float32",
        shape,
        axis,
    )
    loaded = load_model(proto)
    assert loaded.outputs == (info,)
    declared = tensor_info(loaded.proto.graph.output[0])
    assert declared.sizes == info.sizes


def test_what_is_opened_for_any_batch_declares_any_batch() -> None:
    proto = written("(float[n,4] x) => (float[1,2,2] y) <int64[3] s = {1, 2, 2}> { y = Reshape(x, s) }")
    opened = find_traced_batch(proto).dynamic_model
    assert opened is not None
    assert tensor_info(opened.graph.output[0]).shape == ("n", 2, 2)
    folded, _ = fold(load_model(written("(float[n,3] x) => (float[1,3] y) { y = Neg(x) }")).proto)
    assert tensor_info(folded.graph.output[0]).shape == ("n", 3)


@pytest.mark.parametrize("first", ["n", "batch"])
@pytest.mark.parametrize(
    ("last", "opset", "mixes"),
    [
        ("y = Softmax <axis = 0> (h)", 17, True),
        ("y = Softmax <axis = 1> (h)", 17, False),
        ("m = ReduceMean <axes = [0]> (h) y = Sub (h, m)", 17, True),
        ("m = ReduceMean (h, zero) y = Sub (h, m)", 18, True),
        ("m = ReduceMax <axes = [0], keepdims = 0> (w) y = Add (h, m)", 17, False),
        ("best, at = TopK <axis = 0> (w, two) y = Add (h, h)", 17, False),
    ],
)
def test_rows_that_a_model_mixes_are_no_samples(first: str, last: str, opset: int, mixes: bool) -> None:
    """Else `run` would cut them into calls, and each row would depend on the others of its call."""
    constants = {"w": values(8, 8), "zero": np.array([0]), "two": np.array([2])}
    loaded = load_model(
        with_weights(f"(float[{first},8] x) => (float[] y) {{ h = MatMul (x, w) {last} }}", opset, **constants)
    )
    assert [info.batch_axis for info in (*loaded.inputs, *loaded.outputs)] == [None if mixes else 0] * 2
