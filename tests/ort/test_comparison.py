"""Models compared in a process of their own, which may end, hang or starve there."""

from __future__ import annotations

from pathlib import Path

import hostile_models
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
    for proto, words in (
        (hostile_models.integer("Div", hostile_models.INT64_MIN, -1, constant=False), "crashed with SIGFPE"),
        (hostile_models.loop(2**62), "more than 4 s"),
        (hostile_models.filled(28000, 28000), "can't|MiB|more than"),
    ):
        with pytest.raises(ModelError, match=words):
            compared(proto, proto)
    assert list(tmp_path.iterdir()) == []
