"""The cost of leaving layers out, and the times of layers by node."""

from __future__ import annotations

import numpy as np
import pytest

from trtopt.autotune.search import Costs, Measured
from trtopt.core.values import Precision
from trtopt.evaluation.timing import by_node
from trtopt.runtime.timing import LayerTime, LayerTimes, Spread


def test_a_cost_is_the_time_that_was_measured_or_the_share_of_the_arithmetic() -> None:
    work = {"a": 30, "b": 10}
    assert (Costs(work)("a"), Costs(work).share(["b"])) == (0.75, 0.25)
    timed = Costs(work, Measured({"a": 0.3, "b": 0.2}, {"a": 0.5, "b": 0.1}, "played"))
    assert timed("a") == pytest.approx(0.2)
    assert timed("b") == pytest.approx(-0.1)  # faster in floating point
    assert timed.unit == "played"


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
