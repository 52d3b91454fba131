from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto

from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.mixing import mixing
from trtopt.graph.fixed_inputs import fix_inputs

WIDTH = 16


def attention(steps: int, shape: Any = ("a", "b", WIDTH), last: str = "Asinh") -> ModelProto:
    """Softmax(x · xᵀ) · x · w over the axis `steps` of x, 0 or 1; then an operator that isn't known."""
    perm = [1, 0, 2] if steps == 0 else [0, 1, 2]
    nodes = [
        node("Transpose", "x", "t", perm=perm),
        node("Transpose", "t", "k", perm=[0, 2, 1]),
        node("MatMul", "t k", "scores"),
        node("Softmax", "scores", "shares", axis=-1),
        node("MatMul", "shares t", "mixed"),
        node("Transpose", "mixed", "back", perm=perm),
        node("MatMul", "back w", "product"),
        node(last, "product", "y"),
    ]
    return model(nodes, inputs={"x": list(shape)}, weights={"w": values(WIDTH, WIDTH)})


def probes(*shape: int, count: int = 2) -> list[dict[str, NDArray[Any]]]:
    return [{"x": values(1, *shape, seed=seed, scale=0.3)} for seed in range(count)]


def test_what_depends_on_the_samples_beside_it_is_told() -> None:
    said = mixing(attention(0), probes(5, WIDTH))
    assert "('y') depends on the samples beside it, so the first axis of x (a, b, 16) doesn't count samples" in said
    assert "`inputs=['x:sequence,batch,…']`" in said and "`set='x:steps,batch,16'` `fix='OUT.onnx'`" in said
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
    as_told = calibrate(fix_inputs(attention(0), ["x:steps,batch,16"]), data=values(5, 20, WIDTH), cache=False)
    assert as_told.table.samples == 20 and "depends on" not in " ".join(as_told.notes)
    named = calibrate(attention(0, ("steps", "batch", WIDTH)), data=values(5, 20, WIDTH), cache=False)
    assert named.table.samples == 20
    assert "depends on" not in " ".join(named.notes)
    assert np.isfinite(named.table.tensors["back"].amax)


def test_steps_first_are_calibrated_as_the_same_samples_with_steps_second() -> None:
    x = values(20, 5, WIDTH, scale=0.3)
    first = calibrate(attention(0, last="Relu"), data=np.ascontiguousarray(x.transpose(1, 0, 2)), cache=False)
    second = calibrate(attention(1, last="Relu"), data=x, cache=False)
    assert first.table.samples == second.table.samples == 20
    assert not any("depends on" in note for note in first.notes)
    # Folding may move a Transpose away from one of the two, and its tensor's name with it.
    assert sorted(entry.amax for entry in first.table.tensors.values()) == sorted(
        entry.amax for entry in second.table.tensors.values()
    )
