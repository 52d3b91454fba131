"""What leaving layers out costs, and that the cheapest placement is the cheapest of all."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from hypothesis import given, settings, strategies as st
from onnx import ModelProto

from trtopt.autotune.costs import Costs, Measured
from trtopt.autotune.layer_times import by_node
from trtopt.calibration.importing import kept_out
from trtopt.core.values import Precision
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.view import to_ir
from trtopt.runtime.timing import LayerTime, LayerTimes, Spread

LAYERS = ("c0", "c1", "c2", "c3", "c4")


def _net() -> ModelProto:
    """Convolutions in a row, the last but one with a skip around it, and a linear layer that stays floating."""
    nodes, weights, value = [], {}, "x"
    for number in range(5):
        weights[f"w{number}"] = values(16, 3 if number == 0 else 16, 3, 3, seed=number)
        nodes.append(node("Conv", f"{value} w{number}", f"a{number}", f"c{number}", pads=[1, 1, 1, 1]))
        if number == 3:
            nodes.append(node("Add", "a3 r2", "s3", "skip"))
        nodes.append(node("Relu", "s3" if number == 3 else f"a{number}", f"r{number}", f"relu{number}"))
        value = f"r{number}"
    nodes += [node("GlobalAveragePool", value, "g", "pool"), node("Flatten", "g", "f", "flat")]
    nodes.append(node("Gemm", "f w b", "y", "fc", transB=1))
    weights |= {"w": values(40, 16, seed=80), "b": values(40, seed=81)}
    return model(nodes, weights=weights, inputs={"x": (1, 3, 16, 16)}, outputs={"y": (1, 40)})


@pytest.fixture(scope="module")
def folded() -> ModelProto:
    return fold(_net())[0]


def _points(folded: ModelProto, left_out: Any = ()) -> Points:
    return find_points(to_ir(folded), overrides=kept_out(left_out))


def _measured(int8: Any, floating: Any, shortest: float = 0.01) -> Measured:
    return Measured(dict(zip(LAYERS, int8)), dict(zip(LAYERS, floating)), [shortest], "played")


def test_conversions_between_types_make_neighbours_cheaper(folded: ModelProto) -> None:
    points = {out: _points(folded, out) for out in ((), ("c1",), ("c0",), ("c0", "c1"), ("c1", "c2"))}
    together, apart = (Costs(folded, {}, apart=apart) for apart in (False, True))
    assert together(points[()]) < together(points["c1",]) < together(points["c1", "c2"])
    assert apart(points["c1",]) - apart(points[()]) > 1.5 * (together(points["c1",]) - together(points[()]))
    assert apart(points["c0", "c1"]) < apart(points["c0",]) + apart(points["c1",]) - apart(points[()])


@settings(max_examples=40)
@given(st.data())
def test_the_cut_is_the_cheapest_of_all_placements(folded: ModelProto, data: Any) -> None:
    share = st.floats(0.01, 0.3)
    int8, floating = (data.draw(st.lists(share, min_size=5, max_size=5)) for _ in range(2))
    forced = data.draw(st.sets(st.sampled_from(LAYERS), max_size=2))
    costs = Costs(folded, {}, apart=True, measured=_measured(int8, floating, data.draw(st.floats(0.001, 0.1))))
    found = costs.cheapest(_points(folded), forced, LAYERS, {})
    assert forced <= set(found)
    every = [item for count in range(6) for item in itertools.combinations(LAYERS, count) if forced <= set(item)]
    best = min(costs(_points(folded, item)) for item in every)
    assert costs(_points(folded, found)) <= best * (1 + 1e-9)


def test_estimates_leave_nothing_out_without_need_and_fill_gaps(folded: ModelProto) -> None:
    costs = Costs(folded, {}, apart=True)
    assert costs.cheapest(_points(folded), (), LAYERS, {}) == ()
    even = _measured([0.02] * 5, [0.03] * 5)
    costs = Costs(folded, {}, apart=True, measured=even)
    assert costs.cheapest(_points(folded), ("c0", "c2"), LAYERS, {})[:3] == ("c0", "c1", "c2")  # between two
    assert Costs(folded, {}, apart=False, measured=even).cheapest(_points(folded), ("c0", "c2"), LAYERS, {}) == (
        "c0",
        "c2",
    )


def test_what_no_kernel_runs_apart_goes_together(folded: ModelProto) -> None:
    costs = Costs(folded, {}, apart=False)
    assert costs.cheapest(_points(folded), ("c2",), LAYERS, {"c2": {"c1"}}) == ("c1", "c2")
    # What the user has in INT8 isn't taken along, nor is anything else then.
    assert costs.cheapest(_points(folded), ("c2",), LAYERS[2:], {"c2": {"c1"}}) == ("c2",)


def test_layers_that_are_slower_in_int8_stay_out(folded: ModelProto) -> None:
    slow = _measured([0.3, 0.01, 0.01, 0.01, 0.01], [0.02] * 5, 0.0)
    costs = Costs(folded, {}, apart=False, measured=slow)
    assert costs.cheapest(_points(folded), (), LAYERS, {}) == ("c0",)
    assert costs.unit == "played"


def test_times_of_fused_and_of_hidden_layers_are_shared_by_their_work() -> None:
    def layer(name: str, ms: float, kind: str = "convolution", *nodes: str) -> LayerTime:
        return LayerTime(name, ms, ms, ms, kind, Precision.INT8, nodes)

    spread = Spread(1, 1, 1, 1)
    layers = (
        layer("a + b", 4, "convolution", "a", "b", "relu"),
        layer("reformat", 1, "other"),
        layer("{ForeignNode[c...d]}", 6, "other"),
    )
    found = by_node(LayerTimes({}, layers, spread, 1), {"a": 30, "b": 10, "c": 100, "d": 200})
    assert found == pytest.approx({"a": 3, "b": 1, "c": 2, "d": 4})
    assert sum(by_node(LayerTimes({}, layers[:2], spread, 1), {"a": 1, "b": 1, "c": 5}).values()) == 4
    assert np.isfinite(list(found.values())).all()
