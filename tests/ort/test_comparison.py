"""Models compared on made-up inputs, which they may not be for."""

from __future__ import annotations

import pytest
from graphs import conv_relu, written
from onnx import ModelProto

from trtopt.core.errors import ModelError
from trtopt.core.values import ShapeRange
from trtopt.graph.io import load_model
from trtopt.ort import comparison


def compared(before: ModelProto, after: ModelProto, *sizes: int) -> str:
    profiles = [{"x": ShapeRange(*[(1, 3, size, size)] * 3)} for size in sizes]
    return comparison.compare(before, after, load_model(before).inputs, profiles=profiles)


def changed() -> ModelProto:
    proto = conv_relu()
    proto.graph.node[1].op_type = "Neg"
    return proto


def test_equal_and_different_models() -> None:
    assert compared(conv_relu(), conv_relu()) == ""
    assert "largest difference" in compared(conv_relu(), changed())


def test_sizes_that_the_model_does_not_run_at_are_passed_over() -> None:
    nine = "(float[batch,3,side,side] x) => (float[n,243] y) <int64[2] to = {-1, 243}> { %s (x) y = Reshape (h, to) }"
    same, other = (written(nine % text) for text in ("h = Identity", "h = Neg"))
    assert compared(same, same, 7, 9) == ""
    assert "largest difference" in compared(same, other, 7, 9)
    with pytest.raises(ModelError, match="can't run"):
        compared(same, same, 7)


def test_made_up_values_that_give_other_shapes_than_declared_say_nothing() -> None:
    given = "(float[0, 3] x, int64[2] sizes) => (float[4, 0] y) { y = Reshape <allowzero: int = 1> (x, sizes) }"
    folded = given.replace("{ y", "<int64[2] to = {4, 0}> { y").replace("(x, sizes)", "(x, to)")
    with pytest.raises(ModelError, match="other shapes than the model declares"):
        compared(written(given), written(folded))
    free = [written(text.replace("float[4, 0]", "float[N, 0]")) for text in (given, folded)]
    assert "largest difference" in compared(*free)


NUMBERS = "<int64 zero = {0}, int64 least = {-9223372036854775808}, int64 minus = {-1}>"
# Both operands come of the input, so that nothing computes them before.
DIVISION = "{ i = Cast <to = 7> (x) z = Mul (i, zero) a = Add (z, least) b = Add (z, minus) d = Div (a, b) "
BODY = "body (int64 i, bool go, float[4] s) => (bool on, float[4] t) { on = Identity (go) t = Neg (s) }"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{NUMBERS} {DIVISION} y = Cast <to = 1> (d) }}", "it divides integers, and by zero, .* made-up inputs"),
        (
            f"<int64 count = {{4611686018427387904}}, bool yes = {{1}}> {{ y = Loop <body = {BODY}> (count, yes, x) }}",
            "it holds a Loop, which made-up inputs may never end",
        ),
    ],
)
def test_what_made_up_inputs_may_not_end_is_not_run(text: str, said: str) -> None:
    proto = written(f"(float[4] x) => (float[4] y) {text}")
    with pytest.raises(ModelError, match=said):
        compared(proto, proto)
