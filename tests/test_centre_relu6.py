"""scripts/centre_relu6.py: the same results, from a ReLU6 whose values lie on both sides of zero."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from graphs import model, node, values
from onnx import numpy_helper

from trtopt.ort.runner import OnnxRunner

SCRIPT = Path(__file__).parents[1] / "scripts/centre_relu6.py"


def _net() -> onnx.ModelProto:
    """A ReLU6 in front of convolutions that don't pad, grouped and strided ones too; one in front of one that pads."""
    nodes = [
        node("Conv", "x w0", "a", "c0", pads=[1, 1, 1, 1]),
        node("Clip", "a low high", "ra", "centred"),
        node("Conv", "ra w1 b1", "b", "c1"),
        node("Conv", "ra w2", "c", "c2", group=4),
        node("Add", "b c", "d", "sum"),
        node("Conv", "d w1 b1", "e", "c3"),
        node("Clip", "e low high", "re", "padded"),
        node("Conv", "re w3", "y", "c4", pads=[1, 1, 1, 1]),
    ]
    weights = {
        "w0": values(16, 3, 3, 3), "w1": values(16, 16, 1, 1, seed=1), "b1": values(16, seed=2),
        "w2": values(16, 4, 1, 1, seed=3), "w3": values(8, 16, 3, 3, seed=4), "low": np.float32(0), "high": np.float32(6),
    }  # fmt: skip
    return model(nodes, weights=weights, inputs={"x": ("n", 3, 9, 9)}, outputs={"y": ("n", 8, 9, 9)})


def _run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def test_the_results_stay(tmp_path: Path) -> None:
    net, centred = tmp_path / "net.onnx", tmp_path / "centred.onnx"
    onnx.save(_net(), net)
    said = _run(net, centred)
    assert said.returncode == 0 and said.stdout.startswith("1 ReLU6 centred"), said
    graph = onnx.load(centred).graph
    held = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    bounds = {
        item.name: [float(held[name]) for name in item.input[1:]] for item in graph.node if item.op_type == "Clip"
    }
    assert bounds == {"centred": [-3, 3], "padded": [0, 6]}
    x = {"x": 3 * values(4, 3, 9, 9, seed=9)}
    before, after = (OnnxRunner(path, optimize=False)(x)["y"] for path in (net, centred))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4 * np.abs(before).max())


def test_a_model_without_any_is_left_alone(tmp_path: Path) -> None:
    net = tmp_path / "net.onnx"
    onnx.save(model([node("Relu", "x", "y")], weights={}, inputs={"x": ("n", 4)}, outputs={"y": ("n", 4)}), net)
    said = _run(net, tmp_path / "centred.onnx")
    assert said.returncode == 1 and "nothing was written" in said.stderr
    assert not (tmp_path / "centred.onnx").exists()
