"""TensorRT 8.6's parser is given nothing that it passes over; what it is given means the same."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import model, node, values, written
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trtopt.core.errors import UnsupportedOperator
from trtopt.graph.io import load_model
from trtopt.graph.passes.old_parser import readable_model, with_float_weights
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.sessions import OnnxSession


def _ops(proto: ModelProto) -> dict[str, dict[str, Any]]:
    """Operator → attributes of the last node of that kind."""
    return {
        item.op_type: {each.name: helper.get_attribute_value(each) for each in item.attribute}
        for item in proto.graph.node
    }


def _agree(proto: ModelProto, **inputs: Any) -> ModelProto:
    """The model as 8.6's parser reads it, after comparing it with the model."""
    made = load_model(readable_model(proto, 17)).proto
    expected, found = (OnnxSession(item, threads=1)(inputs) for item in (proto, made))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    return made


def _free(proto: ModelProto, dtype: int = TensorProto.FLOAT) -> ModelProto:
    """Without what is said of the first output's shape."""
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].type.tensor_type.elem_type = dtype
    return proto


IMAGES = values(2, 3, 8, 8)


@pytest.mark.parametrize("bounds", [{"end": 1}, {"start": 1}, {"start": -2}, {"start": 1, "end": -1}, {"end": 9}])
def test_a_part_of_a_shape_is_cut_out_afterwards(bounds: dict[str, int]) -> None:
    """PyTorch's exporter asks for the batch so: the parser would give all four sizes."""
    made = _agree(_free(model([node("Shape", "x", "y", "sizes", **bounds)]), TensorProto.INT64), x=IMAGES)
    assert _ops(made)["Shape"] == {}
    assert {item.name: item.op_type for item in made.graph.node} == {"sizes/Shape": "Shape", "sizes": "Slice"}


@pytest.mark.parametrize("index", [-1, -8, [0, -1], [[-2], [1]]])
def test_an_index_from_the_end_of_a_dynamic_axis_is_counted_by_its_size(index: Any) -> None:
    text = "(float[n,3,%s,8] x) => (float[] y) { [last] y = Gather <axis = 2> (x, i) }"
    made = _agree(written(text % "h", i=index), x=IMAGES)
    assert made.graph.node[-1].input[1] != "i"
    fixed = written(text % "8", i=index)
    assert readable_model(fixed, 17) == fixed


def test_defaults_and_missing_inputs_are_written_out() -> None:
    weights = {"s": values(8, seed=1), "ones": np.full(3, 0.1, np.float32)}
    made = _agree(_free(model([node("LayerNormalization", "x s", "y")], weights=weights)), x=IMAGES)
    assert len(made.graph.node[0].input) == 3
    assert _ops(_agree(model([node("Selu", "x", "y")]), x=IMAGES))["Selu"].keys() == {"alpha", "gamma"}
    integers = _free(model([node("Trilu", "x", "y")], dtype=TensorProto.INT64), TensorProto.INT64)
    assert _ops(_agree(integers, x=IMAGES.astype(np.int64)))["Trilu"] == {"upper": 1}
    codes = model([node("DequantizeLinear", "x ones", "y")], weights=weights, dtype=TensorProto.INT8)
    made = readable_model(_free(codes), 17)
    assert len(made.graph.node[0].input) == 3
    assert _ops(made)["DequantizeLinear"] == {"axis": 1}


@pytest.mark.parametrize("form", ["Conv", "ConvTranspose"])
def test_a_kernel_that_is_not_constant_has_its_size_written_out(form: str) -> None:
    text = "(float[n,3,8,8] x) => (float[] y) {{ {} [last] y = {} (x, v) }}"
    codes = {"c": np.arange(3 * 3 * 2 * 3, dtype=np.int8).reshape(3, 3, 2, 3), "s": np.float32(0.1), "z": np.int8(0)}
    made = _agree(written(text.format("v = DequantizeLinear (c, s, z)", form), **codes), x=IMAGES)
    assert _ops(made)[form] == {"kernel_shape": [2, 3]}
    constant = written(text.format("", form), v=values(3, 3, 2, 3))
    assert readable_model(constant, 17) == constant


def test_boxes_without_a_threshold_all_count() -> None:
    proto = written(
        "(float[1,3,4] boxes, float[1,1,3] scores) => (int64[] y) { y = NonMaxSuppression (boxes, scores) }"
    )
    assert [bool(name) for name in readable_model(proto, 17).graph.node[0].input] == [True, True, False, False, True]


def test_bodies_are_read_too_and_other_models_stay_as_they_are() -> None:
    proto = written(
        "(float[n,3,8,8] x, bool flag) => (int64[1] y) { y = If (flag) <then_branch = t () => (int64[1] a) "
        "{ a = Shape <end = 1> (x) }, else_branch = e () => (int64[1] b) { b = Shape <start = -1> (x) }> }"
    )
    for flag in (True, False):
        _agree(proto, x=IMAGES, flag=np.array(flag))
    plain = model([node("Shape", "x", "s"), node("Reshape", "x s", "y")])
    assert readable_model(plain, 17) is plain
    assert readable_model(proto, None) is proto  # later generations read it


IMAGE = "(float[n,3,8,8] x) => (float[] y)"
LOOP = """{ [loop] last, y = Loop <body = b (int64 step, bool go, float[] sum) => (bool go_on, float[] next, float[] kept) {
    top = ReduceMax <keepdims = 0> (sum) go_on = Less (top, limit) next = Add (sum, sum) kept = Identity (next) }>
    (steps, yes, x) }"""

CHOICE = """(float[n,3] x, bool flag) => (float[] y) { [if] a, b = If (flag) <
    then_branch = t () => (float[] c, float[] d) { c = Relu (x) d = Neg (x) },
    else_branch = e () => (float[] f, float[] g) { f = Abs (x) g = Neg (x) }> y = Concat <axis = 0> (a, b) }"""


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (
            written(f'{IMAGE} {{ [a] y = ScatterND <reduction = "add"> (x, i, u) }}', i=[[0]], u=values(1, 3, 8, 8)),
            r"a \(ScatterND\): its reduction 'add' isn't read",
        ),
        (
            written(
                "(float[2,5,3] x) => (float[] y) { [gru] y = GRU <hidden_size = 4, layout = 1> (x, w, r) }",
                w=values(1, 12, 3), r=values(1, 12, 4),
            ),
            r"gru \(GRU\): its layout 1",
        ),
        (
            written(f"{IMAGE} {{ [q] q = QuantizeLinear (x, s, z) y = Cast <to = 1> (q) }}", s=np.float32(1), z=np.uint8(0)),
            r"q \(QuantizeLinear\): it quantizes to uint8",
        ),
        (
            written(f"{IMAGE} {LOOP}", steps=3, yes=True, limit=np.float32(9)),
            r"Loop.*: what it collects has the length of its limit",
        ),
        (
            written(f"{IMAGE} {{ [up] y = ConvTranspose <output_shape = [10, 10]> (x, w) }}", w=values(3, 4, 3, 3)),
            r"up \(ConvTranspose\): it gives its output's shape \[10, 10\]",
        ),
        (
            written(f"{IMAGE} {{ [slice] y = Slice (x, a, b, , a) }}", a=[1], b=[2]),
            r"slice \(Slice\): it has steps without axes",
        ),
        (
            written(CHOICE),
            r"If.*: its outputs, of which it has several",
        ),
        (
            written(f"{IMAGE} {{ [sum] y = ReduceSum <noop_with_empty_axes = 1> (x) }}"),
            r"sum \(ReduceSum\): it reduces no axis",
        ),
        (
            written(f"{IMAGE} {{ [numbers] k = Constant <value_ints = [2, 3, 8, 8]> () y = Reshape (x, k) }}"),
            r"numbers \(Constant\): its \['value_ints'\] isn't read",
        ),
        (
            written("(float[t,t] x) => (float[] y) { [mask] y = Trilu (x, one) }", one=1),
            r"mask \(Trilu\): it multiplies what it cuts away by 0",
        ),
    ],
    ids=["scatter", "recurrent", "uint8", "loop", "transposed", "steps", "if", "sum", "numbers", "mask"],
)  # fmt: skip
def test_what_the_parser_would_compute_otherwise_is_refused_by_name(proto: ModelProto, reason: str) -> None:
    with pytest.raises(UnsupportedOperator, match=reason):
        readable_model(load_model(proto).proto, 17)


@pytest.mark.parametrize("kind", [np.int8, ml_dtypes.float8_e4m3fn])
def test_stored_codes_become_floats_that_are_quantized_to_the_same_codes(kind: Any) -> None:
    """8.6 stops with an assertion at stored codes of a matrix product. A weight for two layers stays one weight."""
    codes = np.random.default_rng(0).integers(-127, 128, (8, 4)).astype(kind)
    scale = np.random.default_rng(1).uniform(1e-4, 0.3, 4).astype(np.float32)
    nodes = [
        node("DequantizeLinear", "w s z", "first", "first/DQ", axis=1),
        node("DequantizeLinear", "w s z", "second", "second/DQ", axis=-1),
        node("DequantizeLinear", "b one none", "bias", "bias/DQ"),
        node("MatMul", "x first", "a", "product"),
        node("Mul", "a bias", "c", "scaled"),
        node("MatMul", "x second", "d", "other"),
        node("Add", "c d", "y", "sum"),
    ]
    weights = {
        "w": codes, "s": scale, "z": np.zeros(4, kind),
        "b": codes[0, :4], "one": np.float32(0.02), "none": np.zeros((), kind),
    }  # fmt: skip
    proto = model(nodes, inputs={"x": ["n", 8]}, weights=weights, opset=19)
    result = with_float_weights(to_ir(proto))
    assert set(result.changes) == {"first/DQ", "second/DQ", "bias/DQ"}
    made = load_model(to_proto(result.model)).proto
    x = values(5, 8)
    stored = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    expected, found = (OnnxSession(item, threads=1)({"x": x})["y"] for item in (proto, made))
    np.testing.assert_array_equal(found, expected)
    assert not [item.name for item in made.graph.initializer if item.data_type == stored and len(item.dims) > 1]
    by_name = {item.name: item for item in made.graph.node}
    assert {item.name for item in proto.graph.node} <= by_name.keys()
    quantize = next(item for item in made.graph.node if item.output[0] == by_name["first/DQ"].input[0])
    held = {item.name: numpy_helper.to_array(item) for item in made.graph.initializer}
    again = (held[quantize.input[0]] / scale).astype(np.float32)
    np.testing.assert_array_equal((np.rint(again) if kind is np.int8 else again).astype(kind), codes)
    assert not with_float_weights(to_ir(made)).changes


def test_codes_whose_scale_is_computed_stay_codes() -> None:
    nodes = [node("Abs", "t", "s"), node("DequantizeLinear", "w s", "f"), node("MatMul", "x f", "y")]
    proto = model(nodes, inputs={"x": ["n", 8], "t": []}, weights={"w": np.ones((8, 4), np.int8)})
    assert not with_float_weights(to_ir(proto)).changes
