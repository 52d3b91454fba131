from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.mixing import mixing

WIDTH = 16


def attention(steps: int, shape: Any = ("a", "b", WIDTH)) -> ModelProto:
    """Softmax(x · xᵀ) · x · w over the axis `steps` of x, 0 or 1."""
    perm = [1, 0, 2] if steps == 0 else [0, 1, 2]
    nodes = [
        node("Transpose", "x", "t", perm=perm),
        node("Transpose", "t", "k", perm=[0, 2, 1]),
        node("MatMul", "t k", "scores"),
        node("Softmax", "scores", "shares", axis=-1),
        node("MatMul", "shares t", "mixed"),
        node("Transpose", "mixed", "back", perm=perm),
        node("MatMul", "back w", "y"),
    ]
    return model(nodes, inputs={"x": list(shape)}, weights={"w": values(WIDTH, WIDTH)})


def probes(*shape: int, count: int = 2) -> list[dict[str, NDArray[Any]]]:
    return [{"x": values(1, *shape, seed=seed, scale=0.3)} for seed in range(count)]


def test_what_depends_on_the_samples_beside_it_is_told() -> None:
    said = mixing(attention(0), probes(5, WIDTH))
    assert "('y') depends on the samples beside it, so the first axis of x (a, b, 16) doesn't count samples" in said
    assert "`inputs=['x:sequence,batch,…']`" in said
    assert not mixing(attention(1), probes(5, WIDTH))


@pytest.mark.parametrize("shape", [("a", 5, WIDTH), (1, "b", WIDTH), ("a", "batch", WIDTH)])
def test_nothing_is_tried_where_samples_can_lie_nowhere_else_or_the_graph_says_where(shape: Any) -> None:
    assert not mixing(attention(0, shape), probes(5, WIDTH))


def test_samples_of_different_shapes_are_not_put_together() -> None:
    assert not mixing(attention(0), [*probes(5, WIDTH)[:1], *probes(4, WIDTH)[:1]])
    assert mixing(attention(0), [*probes(5, WIDTH)[:1], *probes(4, WIDTH)[:1], *probes(5, WIDTH)[1:]])
    assert not mixing(attention(0), probes(5, WIDTH, count=1))


def test_calibrate_warns() -> None:
    said = [
        " ".join(calibrate(attention(steps), data=values(20, 5, WIDTH, scale=0.3), cache=False).notes)
        for steps in (0, 1)
    ]
    assert ["depends on the samples beside it" in text for text in said] == [True, False]
    named = calibrate(attention(0, ("steps", "batch", WIDTH)), data=values(5, 20, WIDTH), cache=False)
    assert named.table.samples == 20
    assert "depends on" not in " ".join(named.notes)
    assert np.isfinite(named.table.tensors["back"].amax)
