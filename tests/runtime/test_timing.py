"""Several ways of running a model, timed in turns; and each layer, as TensorRT's profiler tells it."""

from __future__ import annotations

import pytest
from fake_cuda import FakeCuda
from fake_session import Open, adding_engine, check_run, inputs_of

from trtopt.core.errors import UsageError
from trtopt.runtime import timing


class Ways:
    """Plays a clock: each measurement of a way takes its milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **milliseconds: float) -> None:
        self.now, self.order = 0.0, ""
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        self.ways = {name: lambda name=name, ms=ms: self._take(name, ms) for name, ms in milliseconds.items()}

    def _take(self, name: str, ms: float) -> float:
        self.order += name
        self.now += ms / 1e3
        return ms


def test_ways_take_turns_and_every_other_round_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Ways(monkeypatch, a=1, b=2)
    times = timing.in_turns(played.ways, 10, rounds=5)
    assert played.order == "aabbbbaaaabbbbaaaabb"
    assert times == {"a": [1] * 10, "b": [2] * 10}


def test_a_slow_way_is_cut_short_but_measured_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Ways(monkeypatch, slow=20, slower=900, fast=0.01)
    times = timing.in_turns(played.ways, 100, rounds=5, seconds=0.25)
    assert {name: len(each) for name, each in times.items()} == {"slow": 15, "slower": 5, "fast": 100}


LAYERS = {"conv": 0.5, "add": 0.25, "conv ": 0.125}


def test_layers_come_in_their_order_with_the_whole_beside(cuda: FakeCuda, open_session: Open) -> None:
    engine = adding_engine(cuda, layers=LAYERS)
    session = open_session(engine)
    contexts = len(engine.contexts)
    found = session.profile(inputs_of(4), iterations=5, warmup=2)
    assert [(layer.name, layer.ms) for layer in found.layers] == list(LAYERS.items())
    assert found.total_ms == pytest.approx(0.875)
    assert found.gpu.median == pytest.approx(engine.milliseconds)
    assert found.shapes == {"x": "4x3", "row": "3"} and found.iterations == 5
    profiled = [context for context in engine.contexts if context.profiler is not None]
    assert len(profiled) == 1 and engine.contexts.index(profiled[0]) >= contexts
    for _ in range(3):
        check_run(session, inputs_of(4))
    assert profiled[0] in engine.contexts[contexts:]


def test_what_was_taken_is_given_back(cuda: FakeCuda, open_session: Open) -> None:
    session = open_session(adding_engine(cuda, layers=LAYERS))
    session.run(inputs_of(32))
    live = cuda.live
    session.profile(inputs_of(32), iterations=1, warmup=0)
    session.profile(inputs_of(32), iterations=1, warmup=0)
    assert cuda.live == live


def test_what_can_not_be_profiled_says_why(cuda: FakeCuda, open_session: Open) -> None:
    alone = open_session(adding_engine(cuda, shares=False))
    with pytest.raises(UsageError, match="lets one context use its profile"):
        alone.profile(inputs_of(4))
    session = open_session(adding_engine(cuda))
    with pytest.raises(UsageError, match="iterations is 0"):
        session.profile(inputs_of(4), iterations=0)
    with pytest.raises(UsageError, match=r"batch|profile|shape"):
        session.profile(inputs_of(1000))
    session.close()
    with pytest.raises(Exception, match="closed"):
        session.profile(inputs_of(4))
