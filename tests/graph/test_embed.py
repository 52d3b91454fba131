"""Preprocessing inside a graph: the same values as outside, and what TensorRT may be given."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import conv_relu, model, node, typed, values, written
from hypothesis import given, settings
from onnx import ModelProto, TensorProto
from pixels import PIXELS, preprocessings

from trtopt.core.errors import InvalidModel
from trtopt.core.values import Precision
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import PRESETS, Preprocess
from trtopt.graph.io import load_model
from trtopt.graph.passes.embed import embed, embedded_in
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.sessions import open_session


def embedding(proto: ModelProto, preprocess: Preprocess) -> tuple[ModelProto, Embedded]:
    embedded = Embedded.of(preprocess, load_model(proto).inputs)
    found = to_proto(embed(to_ir(proto), embedded).model)
    onnx.checker.check_model(found, full_check=True)
    return found, embedded


def outputs(proto: ModelProto, feed: dict[str, Any]) -> list[Any]:
    return list(open_session(proto, optimize=False, purpose="a test").run(None, feed))


@given(preprocessings())
@settings(max_examples=60)
def test_the_arithmetic_is_that_of_preprocess(preprocess: Preprocess) -> None:
    dtype = TensorProto.FLOAT if preprocess.dtype == "float32" else TensorProto.FLOAT16
    count = preprocess.count
    shape = ["n", count, "h", "w"] if preprocess.layout == "nchw" else ["n", "h", "w", count]
    net = model([node("Identity", "x", "y")], inputs={"x": shape}, outputs={"y": shape}, dtype=dtype)
    inside, embedded = embedding(net, preprocess)
    assert embedded_in(inside) == embedded
    assert embedded_in(net) is None
    [taken] = load_model(inside).inputs
    assert (taken.dtype, taken.shape) == ("uint8", ("n", "h", "w", count))
    pixels = np.stack([embedded.outside(image) for image in PIXELS])
    [found] = outputs(inside, {"x": pixels})
    expected = embedded.from_pixels({"x": pixels})["x"]
    assert found.dtype == expected.dtype
    exact = (embedded.from_pixels({"x": pixels})["x"]).astype(np.float64)
    epsilon = np.finfo(expected.dtype).eps
    # Outside, the pixel is rounded before the mean is taken off: of its size is what both may lose.
    size = 255 * np.abs(embedded.preprocess.factor).max() + np.abs(exact).max()
    assert np.abs(found.astype(np.float64) - exact).max() <= 2 * epsilon * size


def test_nothing_that_does_nothing_is_added() -> None:
    raw, _ = embedding(conv_relu(), Preprocess())
    assert [item.op_type for item in raw.graph.node] == ["Cast", "Transpose", "Conv", "Relu"]
    lite, _ = embedding(conv_relu(), PRESETS["efficientnet-lite"])
    assert [item.op_type for item in lite.graph.node] == ["Cast", "Transpose", "Mul", "Add", "Conv", "Relu"]
    whole, _ = embedding(conv_relu(), Preprocess(channels="bgr", scale=1 / 255))
    assert [item.op_type for item in whole.graph.node][:4] == ["Cast", "Gather", "Transpose", "Mul"]
    shape = ["n", 8, 8, 3]
    last = model([node("Identity", "x", "y")], inputs={"x": shape}, outputs={"y": shape})
    assert [item.op_type for item in embedding(last, Preprocess(layout="nhwc"))[0].graph.node] == ["Cast", "Identity"]


def test_a_cast_to_fp32_alone_reads_the_pixels_and_the_arithmetic_is_in_fp32() -> None:
    half = typed(conv_relu(), Precision.FP16, io_fp32=False)
    embedded = Embedded.of(PRESETS["imagenet"], load_model(conv_relu()).inputs)
    inside = to_proto(embed(to_ir(half), embedded).model)
    onnx.checker.check_model(inside, full_check=True)
    readers = [item for item in inside.graph.node if "x" in item.input]
    assert [(item.op_type, item.attribute[0].i) for item in readers] == [("Cast", TensorProto.FLOAT)]
    assert {item.data_type for item in inside.graph.initializer if item.name.startswith("x_")} == {TensorProto.FLOAT}
    kinds = [item.op_type for item in inside.graph.node]
    assert kinds[:5] == ["Cast", "Transpose", "Mul", "Add", "Cast"]
    assert inside.graph.node[4].attribute[0].i == TensorProto.FLOAT16
    assert embedded.preprocess.dtype == "float32"  # the model's own


def test_other_inputs_stay_in_their_places_and_names_that_are_taken_too() -> None:
    net = written(
        "(float[n,4,1,1] a, float[n,3,4,4] x, float[2] b) => (float[] y, float[] z) { x_cast = "
        "Add (a, x_prepared) h = Conv (x, w) y = Add (h, x_cast) z = Relu (x) }",
        w=values(4, 3, 1, 1), x_prepared=values(4, 1, 1),
    )  # fmt: skip
    net.graph.node[0].name = "x_cast/Cast"
    inside, embedded = embedding(net, PRESETS["imagenet"])
    assert [item.name for item in inside.graph.input] == ["a", "x", "b"]
    assert [item.name for item in inside.graph.output] == ["y", "z"]
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    feed = {"a": values(2, 4, 1, 1), "x": pixels, "b": values(2)}
    for one, two in zip(outputs(inside, feed), outputs(net, embedded.from_pixels(feed))):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_an_input_that_a_body_reads_is_prepared_there_too() -> None:
    net = written(
        "(float[n,3,4,4] x) => (float[] y) { y = If (c) <then_branch = t () => (float[] a) { a = Relu (x) }, "
        "else_branch = e () => (float[] b) { b = Neg (x) }> }",
        c=True,
    )
    inside, embedded = embedding(net, PRESETS["imagenet"])
    feed = {"x": np.random.default_rng(0).integers(0, 256, (1, 4, 4, 3), dtype=np.uint8)}
    np.testing.assert_allclose(outputs(inside, feed)[0], outputs(net, embedded.from_pixels(feed))[0], atol=1e-5)


@pytest.mark.parametrize(
    "said", ["", "[]", "{}", '{"input": "z", "preprocess": {}}', '{"input": "x", "preprocess": {"std": 0}}', "\xff"]
)
def test_metadata_that_can_not_be_read_is_an_error_that_names_it(said: str) -> None:
    inside, _ = embedding(conv_relu(), PRESETS["imagenet"])
    inside.metadata_props[0].value = said
    with pytest.raises(InvalidModel, match=r"metadata trtopt\.embedded"):
        embedded_in(inside)
