"""A classifier trained here: what INT8 costs it is counted in wrong answers, on images that neither training nor tuning saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import model, node
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trtopt
from trtopt.calibration.table import Table
from trtopt.ort.runner import OnnxRunner

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
MOST = 0.002  # of top-1


def _trained(images: Any, labels: Any) -> onnx.ModelProto:
    """Inverted bottlenecks with Relu and ReLU6, and a skip, whose channels differ in size as trained ones do."""
    torch = pytest.importorskip("torch")
    layers, threads = torch.nn, torch.get_num_threads()
    torch.set_num_threads(1)  # such small layers take longer on more
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "stem": layers.Conv2d(1, 16, 3, padding=1), "up": layers.Conv2d(16, 48, 1),
            "depthwise": layers.Conv2d(48, 48, 3, stride=2, padding=1, groups=48), "down": layers.Conv2d(48, 16, 1),
            "again": layers.Conv2d(16, 16, 3, padding=1), "fc": layers.Linear(256, 10),
        }  # fmt: skip
        weights = [weight for part in parts.values() for weight in part.parameters()]
        optimizer = torch.optim.Adam(weights, 3e-3)
        inputs, wanted = torch.from_numpy(images), torch.from_numpy(labels)

        def forward(x: Any) -> Any:
            x = torch.relu(parts["stem"](x))
            x = layers.functional.relu6(parts["up"](x))
            x = layers.functional.relu6(parts["depthwise"](x))
            x = parts["down"](x)
            x = torch.relu(x + parts["again"](x))
            return parts["fc"](x.flatten(1))

        for _ in range(12):
            for some in torch.randperm(len(inputs)).split(32):
                optimizer.zero_grad()
                layers.functional.cross_entropy(forward(inputs[some]), wanted[some]).backward()
                optimizer.step()
    torch.set_num_threads(threads)
    held = {
        f"{name}.{kind}": value.numpy() for name, part in parts.items() for kind, value in part.state_dict().items()
    }
    held |= {"low": np.float32(0), "high": np.float32(6)}

    def conv(name: str, reads: str, gives: str, **attributes: Any) -> Any:
        return node("Conv", f"{reads} {name}.weight {name}.bias", gives, name, **attributes)

    nodes = [
        conv("stem", "x", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "ra", "r0"),
        conv("up", "ra", "b"),
        node("Clip", "b low high", "rb", "r1"),
        conv("depthwise", "rb", "c", pads=[1, 1, 1, 1], strides=[2, 2], group=48),
        node("Clip", "c low high", "rc", "r2"),
        conv("down", "rc", "d"),
        conv("again", "d", "e", pads=[1, 1, 1, 1]),
        node("Add", "e d", "s", "skip"),
        node("Relu", "s", "rs", "r3"),
        node("Flatten", "rs", "f", "flat"),
        node("Gemm", "f fc.weight fc.bias", "y", "fc", transB=1),
    ]
    return model(nodes, weights=held, inputs={"x": ("n", 1, 8, 8)}, outputs={"y": ("n", 10)})


def test_a_trained_classifier_loses_next_to_nothing(tmp_path: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    train, test, train_labels, test_labels = train_test_split(images, labels, test_size=1000, random_state=0)
    net = _trained(train, train_labels)

    def correct(graph: Any) -> float:
        found = OnnxRunner(graph, optimize=False)({"x": test})["y"]
        return float((found.argmax(1) == test_labels).mean())

    reference = correct(net)
    assert reference > 0.95
    graph = tmp_path / "tuned.onnx"

    def gain(outputs: Any, given: Any, reference: Any) -> float:  # of top-1
        ours, theirs = ((each["y"].argmax(1) == given).mean() for each in (outputs, reference))
        return float(ours - theirs)

    result = trtopt.tune(
        net, tmp_path / "tuned.engine", data={"x": train[:200]}, labels=train_labels[:200], metric=gain, min=-MOST,
        target="sm89", save_onnx=graph,
    )  # fmt: skip
    assert result.tuning is not None and isinstance(result.tuning.table, Table)
    assert result.tuning.chosen.share > 0.9
    assert reference - correct(graph) <= MOST + 1e-9
