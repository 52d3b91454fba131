"""What a generation is given, and what it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtopt import calibrate
from trtopt.calibration.table import Table
from trtopt.engine import build
from trtopt.graph.fold import fold
from trtopt.lowering import Lowered, lower
from trtopt.progress import Reporter
from trtopt.spec import BuildSpec, Override, Precision
from trtopt.trt import Generation


@pytest.fixture(scope="module")
def block() -> onnx.ModelProto:
    """A residual block whose skip is a convolution."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for name, source, shape in (
        ("first", "x", (32, 32, 1, 1)),
        ("main", "a", (32, 32, 1, 1)),
        ("skip", "x", (32, 32, 1, 1)),
        ("next", "r", (32, 32, 1, 1)),
    ):
        weights.append(numpy_helper.from_array((rng.standard_normal(shape) * 0.2).astype(np.float32), f"w_{name}"))
        nodes.append(helper.make_node("Conv", [source, f"w_{name}"], ["y" if name == "next" else name], name=name))
    nodes.insert(1, helper.make_node("Relu", ["first"], ["a"], name="relu"))
    nodes[4:4] = [
        helper.make_node("Add", ["main", "skip"], ["sum"], name="add"),
        helper.make_node("Relu", ["sum"], ["r"], name="last"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 32, 8, 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "block", values[:1], values[1:], weights)
    return fold(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))[0]


@pytest.fixture(scope="module")
def table(block: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder: Path = tmp_path_factory.mktemp("table")
    samples = np.random.default_rng(1).standard_normal((64, 32, 8, 8)).astype(np.float32)
    calibrate(block, data={"x": samples}, output=folder / "table.json")
    return Table.load(folder / "table.json")


def lowered(block: onnx.ModelProto, table: Table, *, rearranges: bool, **changes: Any) -> Lowered:
    can = SimpleNamespace(max_opset=17, float_only={})
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

    class Heard(Reporter):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    monkeypatch.setattr(Generation, "rearranges", lambda *_: True)
    made = build(block, tmp_path / "b.engine", int8=True, calib=table, target="sm89", backend="rtx", reporter=Heard())
    assert made.truth == "3 of 3 convolutions INT8"
    assert any(text.startswith("1 convolution of residual skips computed by the last one") for text in notes)
