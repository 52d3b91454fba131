"""Bounds hold for what ONNX Runtime gives, and are kept to what is known."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, nodes, values
from half_models import half, overflowing
from onnx import ModelProto

from trtopt.calibration.histogram import Histogram
from trtopt.calibration.quality import half_ranges
from trtopt.graph.bounds import bounds
from trtopt.ort.ranges import beyond_fp16, measure_ranges
from trtopt.ort.sessions import open_session


def network() -> ModelProto:
    parts = [
        node("Conv", "x w b", "c", pads=[1, 1, 1, 1]), node("Sigmoid", "c", "s"), node("Mul", "c s", "m"),
        node("MaxPool", "m", "p", kernel_shape=[2, 2], strides=[2, 2]), node("Concat", "p p", "j", axis=1),
        node("Conv", "j depthwise", "d", group=8, pads=[2, 2, 2, 2]), node("Relu", "d", "r"), node("Add", "r shift", "a"),
        node("GlobalAveragePool", "a", "g"), node("Flatten", "g", "f"), node("Gemm", "f v", "h", transB=1),
        node("Gemm", "h u bias", "k"), node("HardSwish", "k", "e"), node("MatMul", "e q", "z"), node("Clip", "z low high", "y"),
    ]  # fmt: skip
    weights = {
        "w": values(4, 3, 3, 3), "b": values(4, seed=1), "depthwise": values(8, 1, 3, 3, seed=2),
        "shift": values(8, 1, 1, seed=3), "v": values(6, 8, seed=4), "u": values(6, 5, seed=5), "bias": values(5, seed=6),
        "q": values(5, 7, seed=7), "low": np.float32(-3), "high": np.float32(2),
    }  # fmt: skip
    return model(parts, weights=weights)


def test_everything_lies_within_its_bounds() -> None:
    proto = network()
    names = [name for item in proto.graph.node for name in item.output]
    samples = [values(1, 3, 8, 8, seed=seed) - 0.5 for seed in range(20)]
    known = bounds(proto, {"x": float(np.abs(samples).max())})
    assert set(known) == {"x", *names} and known["y"] == 3
    session = open_session(proto, outputs=names)
    for sample in samples:
        for name, array in zip(names, session.run(names, {"x": sample})):
            assert np.abs(array).max() <= known[name], name


def test_of_what_has_no_rule_and_of_halves_nothing_is_known() -> None:
    proto = model([node("Exp", "x", "e"), node("Relu", "e", "y")])
    assert set(bounds(proto, {"x": 1.0})) == {"x"}
    assert bounds(network(), {"x": 4.0, "c": 0.5})["c"] == 0.5  # seen
    assert bounds(proto, {"e": 3.0}) == {"e": 3.0, "y": 3.0}
    assert set(bounds(half(overflowing()[0]), {"x": 1.0})) == {"x"}
    infinite = model([node("Add", "x k", "y")], weights={"k": np.array(np.inf, np.float32)})
    assert set(bounds(infinite, {"x": 1.0})) == {"x"}
    for text in ("y = Clip (x, k)", "y = MatMul (x, x)", "y = Gemm <alpha = 2.0> (x, k)", "y = own.Relu (x)"):
        assert set(bounds(model(nodes(text), weights={"k": values(2, 2)}), {"x": 1.0})) == {"x"}


@pytest.mark.parametrize("large", [False, True])
def test_tensors_near_fp16s_end_are_the_same_without_running_what_cannot_come_near(large: bool) -> None:
    """`up` gives what comes near in one of them; only `x` and `e` were counted, as calibration counts."""
    proto, data = overflowing()
    feeds = [{"x": item[None] * (1.0 if large else 1e-4)} for item in data["x"].astype(np.float32)]
    feeds = [{"x": item["x"].astype(np.float32)} for item in feeds]
    session = open_session(proto, outputs=["e"])
    counted = {"x": Histogram(), "e": Histogram()}
    for feed in feeds:
        counted["x"].add(feed["x"])
        counted["e"].add(session.run(["e"], feed)[0])
    found = half_ranges(proto, feeds[:4], counted)
    assert found == beyond_fp16(measure_ranges(proto, feeds[:4]))
    assert bool(found) is large
