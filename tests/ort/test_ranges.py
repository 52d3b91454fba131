"""What tensors hold on samples: magnitudes, and the nodes that make what isn't finite."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import model, node, nodes as graph_nodes, values
from half_models import half, overflowing

from trtopt.core.errors import ModelError
from trtopt.ort.ranges import TensorRange, beyond_fp16, measure_ranges, not_finite


def test_magnitudes_over_all_runs() -> None:
    proto = model(graph_nodes("m = Mul (x, k) y = Neg (m)"), weights={"k": np.array(3, np.float32)})
    feeds = [{"x": np.full((1, 3, 8, 8), value, np.float32)} for value in (1, -20_000, 2e-5, 0)]
    ranges = measure_ranges(proto, feeds, threads=2)
    assert list(ranges) == ["x", "m", "y"]
    assert ranges["x"] == TensorRange(20_000)
    assert ranges["m"].largest == 60_000
    assert beyond_fp16(ranges) == {"m": 60_000, "y": 60_000}
    assert ranges == measure_ranges(proto, feeds, threads=1)


def test_the_first_that_is_not_finite_is_named() -> None:
    proto = model([node("Log", "x", "l", "log"), node("Mul", "l l", "s", "square"), node("Relu", "s", "y", "relu")])
    x = np.abs(values(1, 3, 8, 8))
    x[0, 0, 0, :3] = -1
    ranges = measure_ranges(proto, [{"x": x}])
    assert ranges["l"].nonfinite == 3
    assert not_finite(proto, ranges) == {"log": "gives 3 values that aren't finite"}
    assert not not_finite(proto, measure_ranges(proto, [{"x": np.abs(x)}]))


def test_an_infinite_constant_is_meant() -> None:
    proto = model(
        graph_nodes("[positive] c = Greater (x, zero) [mask] m = Where (c, x, low) [soft] y = Softmax (m)"),
        weights={"zero": np.array(0, np.float32), "low": np.array(-np.inf, np.float32)},
    )
    ranges = measure_ranges(proto, [{"x": 1 + np.abs(values(1, 3, 8, 8))}])
    assert ranges["m"].largest < 10
    x = np.abs(values(1, 3, 8, 8))
    x[..., 0] = -1
    ranges = measure_ranges(proto, [{"x": x}])
    assert ranges["m"].nonfinite == 24 and ranges["m"].largest < 10
    assert not_finite(proto, ranges) == {}


def test_of_fp16_the_value_before_it_became_infinite_is_known() -> None:
    proto, data = overflowing()
    typed = half(proto)
    feed = {"x": data["x"][:1].astype(np.float16)}
    ranges = measure_ranges(typed, [feed])
    exact = float(np.abs(feed["x"].astype(np.float32) @ onnx.numpy_helper.to_array(typed.graph.initializer[0])).max())
    assert ranges["h"].nonfinite > 0
    assert ranges["h"].largest == pytest.approx(exact, rel=1e-3)
    found = not_finite(typed, ranges)
    assert list(found) == ["up"]
    assert f"gives {ranges['h'].largest:,.0f} > 65,504, FP16's largest number, and so" in found["up"]


def test_what_is_left_out_is_not_computed_and_what_cannot_be_run_is_an_error() -> None:
    proto = model([node("Neg", "x", "n"), node("Abs", "x", "y")])
    feed = {"x": values(1, 3, 8, 8)}
    assert list(measure_ranges(proto, [feed], but={"x", "n"})) == ["y"]
    impossible = {"x": np.ones((1, 5, 8, 8), np.float32)}
    assert measure_ranges(proto, [impossible], but={"x", "n", "y"}) == {}
    with pytest.raises(ModelError, match="ONNX Runtime can't run the model"):
        measure_ranges(proto, [impossible])
