"""The benchmarks of the runtime run, and notice what is wrong."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda, FakeEngine
from graphs import conv_relu

import trtopt
from trtopt.core.errors import DeviceError, UsageError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("wrong", [False, True])
def test_the_batchers_prints_a_row_for_each_way_and_judges_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: bool
) -> None:
    onnx.save(conv_relu(), tmp_path / "net.onnx")
    options = "--backend onnxruntime --callers 4 --batch 4 --seconds 0.05 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["batcher.py", str(tmp_path / "net.onnx"), *options.split()])
    if wrong:
        run = trtopt.Session.run

        def shifted(session: Any, inputs: Any) -> Any:
            return {name: array + (len(array) > 1) for name, array in run(session, inputs).items()}

        monkeypatch.setattr(trtopt.Session, "run", shifted)
    assert importlib.import_module("batcher").main() == int(wrong)
    rows = re.findall(r"^\| (.*?) \| (\d+) \| ([\d.]+)× \| ([\d.]+)× \|", capsys.readouterr().out, re.M)
    assert [row[0].split(",")[0] for row in rows] == ["one thread", "4 threads", "4 threads", "4 tasks"]
    assert all(int(row[1]) > 0 for row in rows)
    assert rows[0][2] == rows[1][3] == "1.000"


def test_bare_loops_compute_the_right_thing_and_notice_what_is_wrong() -> None:
    loops, cuda = importlib.import_module("runtime_loops"), FakeCuda()
    tensors = {
        name: ("FLOAT", "float32", (-1, n), f"{way}PUT", "DEVICE") for name, n, way in zip("yx", (2, 3), ("OUT", "IN"))
    }
    engine = FakeEngine(
        cuda,
        tensors,
        [{"x": ((1, 3), (4, 3), (8, 3))}],
        lambda shapes: {"y": (shapes["x"][0], 2)},
        lambda arrays: {"y": arrays["x"][:, :2] * np.float32(3)},
    )
    made = [np.random.default_rng(size).normal(size=(size, 3)).astype(np.float32) for size in (1, 4, 8, 4)]
    mix = [(array, array[:, :2] * np.float32(3)) for array in made]
    slots = [loops.Bare(cuda, engine, [(1, 3), (4, 3), (8, 3)]) for _ in range(2)]
    for array, expected in mix[:2]:
        np.testing.assert_array_equal(slots[0].copying(array.shape, array)(), expected)
        slots[0].places[array.shape][...] = array
        slots[0].call(array.shape)()
        np.testing.assert_array_equal(slots[0].results[array.shape], expected)
    rate, wrong = loops.pipelined(slots, mix, 23)
    assert rate > 0 and wrong == 0
    mix[1] = (mix[1][0], mix[1][1] + 1)
    assert loops.pipelined(slots, mix, 23)[1] == 6  # calls 1, 5, 9, 13, 17 and 21
    for slot in slots:
        slot.close()
    assert cuda.live == 0


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


def test_the_stress_test_notices_a_session_that_is_wrong_and_ends_with_one_that_is_right() -> None:
    stress = importlib.import_module("runtime_stress")
    mix = stress.references(
        lambda array: array * 2, np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), 8, 2
    )

    def load(**options: Any) -> Any:
        return stress.Load(Doubling(**options), "x", "y", mix, DeviceError)

    right = load().threads(4, 200, wrong_every=10)
    assert right.right and (right.calls, right.refused) == (800, 80)
    wrong = load(wrong_at=37).threads(2, 100)
    assert wrong.wrong == 1 and wrong.worst > 0 and not wrong.right
    closed, _ = load().close_during(3, False)
    assert closed.right and closed.ended == 3 and closed.calls > 0
    code = (
        f"import sys, time; sys.path.insert(0, {str(BENCHMARKS)!r})\nimport runtime_stress\n"
        "with runtime_stress.watchdog(0.2, 'the step', lambda: print('found so far')):\n    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (3, "found so far\n")
    assert "the step: not over" in ended.stderr
