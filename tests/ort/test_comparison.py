"""Models compared in a process of their own, which may end, hang or starve there."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from graphs import conv_relu
from onnx import ModelProto
from onnx.parser import parse_model

from trtopt.core.errors import ModelError
from trtopt.graph.io import load_model
from trtopt.ort import comparison


def compared(before: ModelProto, after: ModelProto) -> str:
    return comparison.compare(before, after, load_model(before).inputs)


def gap(before: ModelProto, after: ModelProto, *trials: dict[str, int]) -> str:
    return comparison.gap(before, after, load_model(before).inputs, trials, 1e-3, ())


def changed() -> ModelProto:
    proto = conv_relu()
    proto.graph.node[1].op_type = "Neg"
    return proto


def test_equal_and_different_models() -> None:
    assert gap(conv_relu(), conv_relu(), {"batch": 1}, {"batch": 2}) == ""
    assert "largest difference" in compared(conv_relu(), changed())


def test_sizes_that_the_model_does_not_run_at_are_passed_over() -> None:
    fixed = conv_relu(inputs={"x": ["batch", 3, "side", "side"]})
    assert gap(fixed, fixed, {"side": 0}, {"side": 8}) == ""
    with pytest.raises(ModelError, match="can't run"):
        gap(fixed, fixed, {"side": 0})


def test_made_up_values_that_give_other_shapes_than_declared_say_nothing() -> None:
    graph = '<ir_version: 8, opset_import: ["": 14]> g (float[0, 3] x, int64[2] sizes) => (float[{}, 0] y)'
    given = "{ y = Reshape <allowzero: int = 1> (x, sizes) }"
    folded = "<int64[2] to = {4, 0}> { y = Reshape <allowzero: int = 1> (x, to) }"
    with pytest.raises(ModelError, match="other shapes than the model declares"):
        compared(parse_model(graph.format(4) + given), parse_model(graph.format(4) + folded))
    assert "largest difference" in compared(
        parse_model(graph.format("N") + given), parse_model(graph.format("N") + folded)
    )


def test_a_crash_a_hang_and_too_much_memory_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SECONDS", 4)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) '
    sizes = "<int64[2] sizes = {28000, 28000}>"
    numbers = "<int64 zero = {0}, int64 least = {-9223372036854775808}, int64 minus = {-1}>"
    # Both operands come of the input, so that nothing computes them before.
    division = "{ i = Cast <to = 7> (x) z = Mul (i, zero) a = Add (z, least) b = Add (z, minus) d = Div (a, b) "
    division += "y = Cast <to = 1> (d) }"
    body = "body (int64 i, bool go, float[4] s) => (bool on, float[4] t) { on = Identity (go) t = Neg (s) }"
    for text, words in (
        (numbers + division, "crashed with SIGFPE"),
        (f"<int64 count = {{4611686018427387904}}, bool yes = {{1}}> {{ y = Loop <body = {body}> (count, yes, x) }}",
         "more than 4 s"),
        (f"{sizes} {{ big = ConstantOfShape (sizes) top = ReduceMax <keepdims = 0> (big) y = Add (x, top) }}",
         "can't|MiB|more than"),
    ):  # fmt: skip
        proto = parse_model(head + text)
        with pytest.raises(ModelError, match=words):
            compared(proto, proto)
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_cores_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 64 cores NumPy's OpenBLAS held 2.6 GB beside the limit of 1.5 GB, and nothing was compared."""
    environments = []

    def run(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        environments.append(options["env"])
        return subprocess.CompletedProcess(args, 1)

    monkeypatch.setattr(subprocess, "run", run)
    text = '<ir_version: 8, opset_import: ["": 17]> g (int64[4] x) => (int64[4] y) { y = Div (x, x) }'
    with pytest.raises(ModelError, match="failed with status 1"):
        compared(parse_model(text), parse_model(text))
    assert environments[0]["OPENBLAS_NUM_THREADS"] == "1"
