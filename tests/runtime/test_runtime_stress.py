"""The stress test itself: it must notice a session that is wrong, and end with one that is right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from trtopt.core.errors import DeviceError, UsageError

_PATH = Path(__file__).parents[2] / "benchmarks" / "runtime_stress.py"
_spec = importlib.util.spec_from_file_location("runtime_stress", _PATH)
assert _spec and _spec.loader
stress = importlib.util.module_from_spec(_spec)
sys.modules["runtime_stress"] = stress
_spec.loader.exec_module(stress)


class Doubling:
    def __init__(self, wrong_at: int = -1) -> None:
        self.calls, self.wrong_at, self.closed = 0, wrong_at, False

    def run(self, inputs: Any) -> dict[str, Any]:
        if self.closed:
            raise DeviceError("this session is closed; open the engine again")
        array = inputs.get("x")
        if array is None or array.dtype != np.float32 or array.ndim != 2 or len(array) > 8:
            raise UsageError("outside")
        self.calls += 1
        return {"y": array * 2 + (self.calls == self.wrong_at)}

    def close(self, finish: bool = True) -> None:
        self.closed = True


def _load(session: Any) -> Any:
    samples = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    mix = stress.references(lambda array: array * 2, samples, 8, 2)
    assert [len(array) for array, _ in mix] == [*range(1, 9)] * 2
    return stress.Load(session, "x", "y", mix, DeviceError)


def test_all_right() -> None:
    found = _load(Doubling()).threads(4, 200, wrong_every=10)
    assert found.right and found.calls == 800 and found.refused == 80


def test_one_wrong_result_is_noticed() -> None:
    found = _load(Doubling(wrong_at=37)).threads(2, 100)
    assert found.wrong == 1 and found.worst > 0 and not found.right


def test_killed_threads_go_on() -> None:
    session = Doubling()
    plain = session.run

    def slow(inputs: Any) -> dict[str, Any]:
        time.sleep(0.001)
        return plain(inputs)

    session.run = slow  # type: ignore[method-assign]
    found = _load(session).threads(3, 100, killer=True)
    assert found.right and found.killed > 0


def test_closing_ends_every_thread() -> None:
    found, _ = _load(Doubling()).close_during(3, False)
    assert found.ended == 3 and found.calls > 0 and found.right


def test_the_watchdog_ends_what_hangs() -> None:
    code = (
        f"import sys, time; sys.path.insert(0, {str(_PATH.parent)!r})\nimport runtime_stress\n"
        "with runtime_stress.watchdog(0.2, 'the step', lambda: print('found so far')):\n    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 3
    assert "the step: not over" in ended.stderr and "time.sleep" not in ended.stdout
    assert "found so far" in ended.stdout
