"""What no TensorRT takes, said by the tensor's or the node's name before a parser is asked."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from graphs import conv_relu, model, node, written
from onnx import ModelProto, TensorProto

from trtopt.graph.limits import issues

TYPES = {"float32", "float64", "float16", "int8", "int32", "int64", "bool", "uint8", "float8_e4m3fn", "int4"}
FP8, BAD = np.zeros((), ml_dtypes.float8_e4m3fn), np.array([0.1, 0, np.inf], np.float32)
PAIR = "[q] q = QuantizeLinear (x, s, z) r = Reshape (q, form) [d] y = DequantizeLinear (r, s, z)"


def image(text: str, opset: int = 17, **weights: object) -> ModelProto:
    return written(f"(float[n,3,8,8] x) => (float[] y) {{ {text} }}", opset, **weights)


@pytest.mark.parametrize(
    ("proto", "told"),
    [
        (conv_relu(), []),
        (
            model([node("Identity", "x", "y")], dtype=TensorProto.STRING),
            [("x", "the input is of type string"), ("y", "the output is of type string")],
        ),
        (
            image("[to16] a = Cast <to = 5> (x) [add] b = Add (a, c) y = Cast <to = 1> (b)", c=np.zeros(1, np.int16)),
            [
                ("to16", "gives 'a' in type int16"),
                ("add", "reads the constant 'c' of type int16"),
                ("add", "gives 'b'"),
            ],
        ),
        (written("(seq(float[n]) x) => (int64 y) { y = SequenceLength (x) }"), [("x", "of type sequence")]),
        (image(PAIR, 19, s=np.float32(0.1), z=FP8, form=[-1]), []),
        (
            written("(float[2,3] x, float s, int8 z, int64[1] form) => (float[] y) { " + PAIR + " }"),
            [("q", "its zero point 'z' isn't constant"), ("d", "its zero point 'z' isn't constant")],
        ),
        (
            written("(float[1,4,4] b, float[1,1,4] s) => (int64[n,3] y) { [nms] y = NonMaxSuppression (b, s) }"),
            [("nms", "nobody runs it")],
        ),
        (written("(float[2] x) => (float[2] x, float[2] y) { y = Relu (x) }"), [("x", "an input, too")]),
        (
            image(PAIR, s=BAD, z=np.zeros(3, np.int8), form=[0, 0, 0, 0]),
            [
                (
                    name,
                    f"its scale 's', of '{of}', is 0 in channel 1 and others; TensorRT takes positive, finite ones only",
                )
                for name, of in (("q", "x"), ("d", "r"))
            ],
        ),
        (
            image("[to8] a = Cast <to = 17> (x) [back] y = Cast <to = 1> (a)", 19),
            [(name, "casts values of float8_e4m3fn") for name in ("to8", "back")],
        ),
        (image("y, i = TopK (x, k)", k=[3840]), []),
        (
            image("[top] y, i = TopK (x, k)", k=[3841]),
            [("top", "takes the best 3841, and TensorRT's at most 3840: export the model with a smaller k")],
        ),
    ],
)
def test_what_can_not_be_built_is_named(proto: ModelProto, told: list[tuple[str, str]]) -> None:
    found = issues(proto, TYPES, {"NonMaxSuppression": "nobody runs it"})
    assert [item.node for item in found] == [name for name, _ in told], found
    assert all(words in item.reason for item, (_, words) in zip(found, told)), found
