"""The loops that the session is measured against compute the right thing, and free what they took."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeEngine

_PATH = Path(__file__).parents[2] / "benchmarks" / "runtime_loops.py"
_spec = importlib.util.spec_from_file_location("runtime_loops", _PATH)
assert _spec and _spec.loader
loops = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(loops)


@pytest.fixture
def engine() -> Any:
    cuda = FakeCuda()
    tensors = {
        "y": ("FLOAT", "float32", (-1, 2), "OUTPUT", "DEVICE"),
        "x": ("FLOAT", "float32", (-1, 3), "INPUT", "DEVICE"),
    }
    return FakeEngine(
        cuda,
        tensors,
        [{"x": ((1, 3), (4, 3), (8, 3))}],
        lambda shapes: {"y": (shapes["x"][0], 2)},
        lambda arrays: {"y": arrays["x"][:, :2] * np.float32(3)},
    )


def _arrays(*sizes: int) -> list[Any]:
    made = [np.random.default_rng(size).normal(size=(size, 3)).astype(np.float32) for size in sizes]
    return [(array, array[:, :2] * np.float32(3)) for array in made]


def test_bare_calls(engine: Any) -> None:
    bare = loops.Bare(engine.cuda, engine, [(1, 3), (4, 3)])
    (array, expected), (other, wanted) = _arrays(4, 1)
    np.testing.assert_array_equal(bare.copying((4, 3), array)(), expected)
    np.testing.assert_array_equal(bare.copying((1, 3), other)(), wanted)
    bare.places[4, 3][...] = array
    bare.call((4, 3))()
    np.testing.assert_array_equal(bare.results[4, 3], expected)
    bare.replay((4, 3))()
    bare.close()
    assert engine.cuda.live == 0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_pipelined_loop_checks_every_result(engine: Any, count: int) -> None:
    mix = _arrays(1, 4, 8, 4)
    slots = [loops.Bare(engine.cuda, engine, [(1, 3), (4, 3), (8, 3)]) for _ in range(count)]
    rate, wrong = loops.pipelined(slots, mix, 23)
    assert rate > 0 and wrong == 0
    mix[1] = (mix[1][0], mix[1][1] + 1)
    assert loops.pipelined(slots, mix, 23)[1] == 6  # calls 1, 5, 9, 13, 17 and 21


def test_rounds_take_turns() -> None:
    order: list[str] = []
    found = loops.in_rounds({name: lambda name=name: order.append(name) for name in "ab"}, 2, 3, 1)  # type: ignore[misc]
    assert "".join(order) == "ab" + "aaabbb" * 2
    assert set(found) == {"a", "b"}
