"""What a generation is given, and what it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from graphs import model, node, values
from world import Heard

from trtopt import calibrate
from trtopt.calibration.table import Table
from trtopt.engine import build
from trtopt.graph.fold import fold
from trtopt.lowering import Lowered, lower
from trtopt.spec import BuildSpec, Override, Precision
from trtopt.trt import Generation


@pytest.fixture(scope="module")
def block() -> onnx.ModelProto:
    """A residual block whose skip is a convolution."""
    nodes = [
        node("Conv", "x w0", "f", "first"),
        node("Relu", "f", "a"),
        node("Conv", "a w1", "m", "main"),
        node("Conv", "x w2", "s", "skip"),
        node("Add", "m s", "sum", "add"),
        node("Relu", "sum", "r"),
        node("Conv", "r w3", "y", "next"),
    ]
    weights = {f"w{index}": values(32, 32, 1, 1, seed=index, scale=0.2) for index in range(4)}
    return fold(model(nodes, inputs={"x": ["n", 32, 8, 8]}, weights=weights))[0]


@pytest.fixture(scope="module")
def table(block: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder: Path = tmp_path_factory.mktemp("table")
    calibrate(block, data={"x": values(64, 32, 8, 8)}, output=folder / "table.json")
    return Table.load(folder / "table.json")


def lowered(block: onnx.ModelProto, table: Table, *, rearranges: bool, **changes: Any) -> Lowered:
    can = SimpleNamespace(max_opset=17, float_only={}, grouped="")
    generation: Any = SimpleNamespace(typed=lambda _: False, capabilities=can, rearranges=lambda _: rearranges)
    return lower(block, BuildSpec(precision=Precision.INT8, **changes), generation, table)


def test_what_another_node_computes_is_not_looked_for(block: onnx.ModelProto, table: Table) -> None:
    plain, made = (lowered(block, table, rearranges=wanted) for wanted in (False, True))
    assert plain.merged == {}
    assert plain.asked == dict.fromkeys(["first", "main", "skip", "next"], Precision.INT8)
    assert made.merged == {"skip": "main"}
    assert made.asked == dict.fromkeys(["first", "main", "next"], Precision.INT8)
    assert {node.name for node in made.proto.graph.node} >= set(made.asked)
    assert made.quantized


def test_a_node_with_a_precision_of_its_own_stays(block: onnx.ModelProto, table: Table) -> None:
    made = lowered(block, table, rearranges=True, overrides=(Override("add", Precision.FP32),))
    assert made.merged == {}
    assert made.layer_precision["add"] is Precision.FP32
    assert made.asked["skip"] is Precision.INT8


def test_a_real_builder_takes_rearranged_graphs_and_the_user_is_told(
    block: onnx.ModelProto, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")

    heard = Heard()
    monkeypatch.setattr(Generation, "rearranges", lambda *_: True)
    made = build(block, tmp_path / "b.engine", int8=True, calib=table, target="sm89", backend="rtx", reporter=heard)
    assert made.truth == "3 of 3 convolutions INT8"
    assert any(text.startswith("1 convolution of residual skips computed by the last one") for text in heard.notes)
