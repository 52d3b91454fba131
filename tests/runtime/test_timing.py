"""Several ways of running a model, timed in turns."""

from __future__ import annotations

import pytest

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


def test_the_time_of_a_call_comes_with_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Ways(monkeypatch, call=7)
    ms, result = timing.timed(played.ways["call"])
    assert (ms, result) == (pytest.approx(7), 7)
