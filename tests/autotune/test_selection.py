"""Engines against each other: the decision by times and limits, and timing in turns on the fake GPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from fake_session import FakeCuda, FakeEngine, Open

from trtopt.autotune.selection import Candidate, Comparison
from trtopt.core.documents import Damaged, converted
from trtopt.core.values import Precision
from trtopt.evaluation.agreement import Agreement
from trtopt.evaluation.limits import Limits
from trtopt.evaluation.outputs import OutputAgreement
from trtopt.evaluation.timing import Times, by_node, time_in_turns
from trtopt.graph.output_kinds import Kind
from trtopt.runtime.session import Session
from trtopt.runtime.timing import LayerTime, LayerTimes, Spread


def _accuracy(agreement: float | None, snr: float, nonfinite: int = 0) -> dict[str, Any]:
    """Of classes, or with None as their agreement of other values."""
    kind = Kind.OTHER if agreement is None else Kind.CLASSES
    output = OutputAgreement("y", kind, snr, 1.0, 1.0, nonfinite, agreement=agreement, rows=64)
    return Agreement(64, (output,)).describe()


def _candidate(precision: str, *ms: float, agreement: float | None = 1.0, snr: float = 40.0, **more: Any) -> Candidate:
    times = tuple(Times({"x": f"{8 * (index + 1)}x3"}, value) for index, value in enumerate(ms))
    return Candidate(precision, "all of it", 1.0, times, _accuracy(agreement, snr, **more))


def _comparison(*candidates: Candidate) -> Comparison:
    return Comparison("Fake GPU (sm89, 1 GiB)", "real samples", "FP32", candidates)


@pytest.mark.parametrize(
    ("int8", "said"), [(0.96, "0.8 and 0.96"), (0.8, "as fast as INT8"), (0.796, "as fast as INT8")]
)
def test_fp16_is_kept_where_it_is_as_fast(int8: float, said: str) -> None:
    found = _comparison(_candidate("int8", int8), _candidate("fp16", 0.8)).judged(Limits())
    assert found.kept == "fp16"
    assert said in found.why


def test_several_profiles_count_alike() -> None:
    """0.5 × 1.6 < 1: faster on the whole, though slower at one of the shapes."""
    compared = _comparison(_candidate("int8", 0.1, 16.0), _candidate("fp16", 0.2, 10.0))
    assert compared.speedup == pytest.approx((2 * 10 / 16) ** 0.5)
    steady = compared.judged(Limits())
    assert steady.kept == "fp16"
    assert "at x 8x3, x 16x3" in steady.why
    assert "but takes longer than FP16 at x 16x3 (1.60 times its time): `int8=True` with its table" in steady.why
    within = _comparison(_candidate("int8", 0.1, 10.05), _candidate("fp16", 0.2, 10.0)).judged(Limits())
    assert within.kept == "int8" and "takes longer" not in within.why
    alone = _comparison(_candidate("int8", 0.1, 16.0), _candidate("fp16", 0.2, 10.0, snr=3.0)).judged(
        Limits(min_snr=10)
    )
    assert alone.kept == "int8"


def test_a_comparison_comes_back_from_json() -> None:
    found = _comparison(_candidate("int8", 0.5, 0.6), Candidate("fp16", failed="no")).judged(Limits(min_snr=7))
    described = json.loads(json.dumps(found.describe(), allow_nan=False))
    again = converted(described, Comparison)
    assert again == found
    assert again.judged(Limits(0.5)).limits == Limits(0.5)
    with pytest.raises(Damaged):
        converted({"candidates": [{"precision": "int8", "colour": "red"}]}, Comparison)


# On the fake GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def sessions(cuda: FakeCuda, open_session: Open) -> dict[str, Session]:
    """int8: 0.25 ms and some noise on y = 2 x; fp16: 0.75 ms, exact, and FP16 inputs. Two profiles."""

    def opened(kind: str, dtype: str, ms: float, off: float) -> Session:
        engine = FakeEngine(
            cuda,
            {"x": (kind, dtype, (-1, 3), "INPUT", "DEVICE"), "y": ("FLOAT", "float32", (-1, 3), "OUTPUT", "DEVICE")},
            [{"x": ((1, 3), (4, 3), (8, 3))}, {"x": ((16, 3), (32, 3), (64, 3))}],
            lambda shapes: {"y": shapes["x"]},
            lambda arrays: {"y": arrays["x"].astype(np.float32) * 2 + off},
            milliseconds=ms,
        )
        return open_session(engine, contexts=1)

    return {"int8": opened("FLOAT", "float32", 0.25, 0.01), "fp16": opened("HALF", "float16", 0.75, 0.0)}


def _samples(count: int) -> list[dict[str, Any]]:
    values = np.arange(3 * count, dtype=np.float32).reshape(count, 3) / 8
    return [{"x": values[at : at + 4]} for at in range(0, count, 4)]


def test_engines_are_timed_in_turns_at_every_profiles_opt_shapes(sessions: dict[str, Session]) -> None:
    order: list[tuple[str, int]] = []
    for name, session in sessions.items():

        def time(inputs: Any, *counts: int, name: str = name, own: Any = session.time) -> Any:
            order.append((name, len(inputs["x"])))
            return own(inputs, *counts)

        session.time = time  # type: ignore[method-assign]
    times, origin = time_in_turns(sessions, _samples(40))
    assert origin == "real samples"
    assert [item.shapes["x"] for item in times["int8"]] == ["4x3", "32x3"]
    for name, ms in (("int8", 0.25), ("fp16", 0.75)):
        assert all(item.gpu_ms == pytest.approx(ms) for item in times[name])
    rounds = [name for name, batch in order if batch == 4][2:]  # the first two are trials
    assert rounds[:4] == ["int8", "fp16", "fp16", "int8"]
    assert rounds.count("int8") == rounds.count("fp16") >= 5


def test_without_samples_that_fit_made_up_inputs_are_timed_and_said(sessions: dict[str, Session]) -> None:
    times, origin = time_in_turns(sessions, [])
    assert "made-up inputs" in origin
    assert times["fp16"][1].gpu_ms == pytest.approx(0.75)
    assert "made-up" in time_in_turns(sessions, [{"x": np.zeros((4, 5), np.float32)}])[1]


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
