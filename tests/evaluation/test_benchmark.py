"""bench() with a session that is played: what is measured in which order, what is said, what is refused."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from trtopt import cli
from trtopt.core.errors import DeviceError, ModelError, UsageError
from trtopt.core.values import ShapeRange, TensorInfo
from trtopt.cuda.clocks import Clocks
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.evaluation import baselines, benchmark
from trtopt.evaluation.benchmark import bench
from trtopt.runtime.open_engine import MemoryReport
from trtopt.runtime.timing import Spread, Timing


class FakeSession:
    """y = 2 x, for batches up to 8."""

    made: ClassVar[list[FakeSession]] = []
    notes, manifest, preprocess = (), None, None
    embedded: Any = None
    inputs: tuple[TensorInfo, ...] = (TensorInfo("x", "float32", (-1, 3)),)
    outputs = (TensorInfo("y", "float32", (-1, 3)),)
    profiles: tuple[Any, ...] = ({"x": ShapeRange((1, 3), (4, 3), (8, 3))},)

    def __init__(self, engine: Path, *, contexts: int, **_: Any) -> None:
        self.contexts, self.closed = contexts, False
        self.threads: set[str] = set()
        self.given: list[Any] = []
        FakeSession.made.append(self)

    def run(self, inputs: Any) -> dict[str, Any]:
        assert not self.closed
        if not 1 <= len(inputs["x"]) <= 8:
            raise UsageError("outside the engine's shapes")
        self.threads.add(threading.current_thread().name)
        self.given.append(inputs["x"])
        return {"y": inputs["x"] * 2}

    def time(self, inputs: Any, iterations: int, warmup: int) -> Timing:
        return Timing(Spread(0.25, 0.26, 0.27, 0.2), Spread(0.3, 0.31, 0.32, 0.29), iterations, True)

    def memory(self) -> MemoryReport:
        return MemoryReport(2**20, 2**20, 5, None, self.contexts)

    def close(self) -> None:
        self.closed = True


class PixelSession(FakeSession):
    """y = 2 x of pixels / 255, which the engine makes of them itself."""

    embedded = Embedded("x", Preprocess(scale=1 / 255, dtype="float32"))
    inputs = (TensorInfo("x", "uint8", (-1, 4, 5, 3)),)
    profiles = ({"x": ShapeRange((1, 4, 5, 3), (4, 4, 5, 3), (8, 4, 5, 3))},)

    def run(self, inputs: Any) -> dict[str, Any]:
        assert inputs["x"].dtype == np.uint8
        return super().run(self.embedded.from_pixels(inputs))


class StepsSession(FakeSession):
    """y = 2 x, of steps × samples, for 8 steps of up to 8 samples."""

    inputs = (TensorInfo("x", "float32", (-1, -1), 1),)
    profiles = ({"x": ShapeRange((8, 1), (8, 4), (8, 8))},)


class WholeSession(FakeSession):
    """y = 2 x, of one sample alone."""

    inputs = (TensorInfo("x", "float32", (8, 4), None),)
    profiles = ()


class FakeBaseline:
    def __init__(self, name: str = "baseline", factor: float = 2, broken: bool = False) -> None:
        self.name, self.note, self.factor, self.broken, self.closed = name, "as it is", factor, broken, False

    def prepare(self, inputs: Any) -> None:
        if self.broken:
            raise ModelError("no compiler")

    def run(self, inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"] * np.float32(self.factor)}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    FakeSession.made.clear()
    monkeypatch.setattr(benchmark, "Session", FakeSession)
    monkeypatch.setattr(benchmark, "clocks", lambda device, load=None: Clocks(1980, 1980, 0))
    monkeypatch.setattr(benchmark, "probe", lambda: SimpleNamespace(devices=()))
    path = tmp_path / "m.engine"
    path.write_bytes(b"plan")
    return path


def _with(monkeypatch: pytest.MonkeyPatch, *given: FakeBaseline) -> None:
    monkeypatch.setattr(benchmark, "open_baselines", lambda *_: iter(given))


def test_a_row_for_each_batch(engine: Path) -> None:
    bench(engine, streams=6, iterations=1)
    assert FakeSession.made.pop().contexts == 6
    report = bench(engine, batch=(1, 8), streams=3, iterations=7)
    assert [(row.batch, row.streams, row.iterations) for row in report.rows] == [(1, 3, 7), (8, 3, 7)]
    row = report.rows[0]
    assert row.gpu and row.host and row.run and row.throughput
    assert (row.gpu.median, row.host.median) == (0.25, 0.3)
    assert row.run.minimum <= row.run.median <= row.run.p90 <= row.run.p99
    assert "speed only" in report.inputs
    session = FakeSession.made[0]
    assert session.closed and session.contexts == 4
    assert {f"trtopt-bench_{number}" for number in range(3)} <= session.threads
    assert json.loads(json.dumps(report.to_json()))["rows"][1]["run"]["p99"] > 0
    assert "speed only" in str(report)


def test_a_batch_lies_where_the_engine_has_its_samples(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "Session", StepsSession)
    for options, shapes in (({}, {(8, 4)}), ({"batch": (2, 5)}, {(8, 2), (8, 5)})):
        report = bench(engine, iterations=1, **options)
        assert {array.shape for array in FakeSession.made[-1].given} == shapes
        assert [row.batch for row in report.rows] == [shape[1] for shape in sorted(shapes)]
    monkeypatch.setattr(benchmark, "Session", WholeSession)
    bench(engine, iterations=1)
    assert {array.shape for array in FakeSession.made[-1].given} == {(8, 4)}
    with pytest.raises(UsageError, match=r"input 'x' \(8, 4\) has no batch; 1 is all it takes"):
        bench(engine, batch=(2,), iterations=1)


def test_throughput_counts_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 102.0))
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    calls: list[int] = []
    assert benchmark._throughput(lambda: calls.append(1), 4, 3, 10) == 4 * 3 * 10 / 2
    assert len(calls) == 3 * 11


def test_a_slow_way_of_running_is_cut_short(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_SECONDS", 0.05)
    slow = FakeBaseline("slow")
    monkeypatch.setattr(slow, "run", lambda inputs: time.sleep(0.02) or {"y": inputs["x"] * 2})
    _with(monkeypatch, slow)
    row = bench(engine, against=("torch",), iterations=1000, warmup=0).rows[1]
    assert benchmark._ROUNDS <= row.iterations <= 10


def test_a_baseline_gets_the_same_inputs_and_is_compared(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, far = FakeBaseline("good"), FakeBaseline("far", factor=1)
    _with(monkeypatch, good, FakeBaseline("compiled", broken=True), far)
    report = bench(engine, against=("torch",), batch=(2,), iterations=5)
    assert [row.runner for row in report.rows] == ["trtopt", "good", "compiled", "far"]
    assert [row.difference for row in report.rows] == [None, 0.0, None, 0.5]
    assert "0.5 of the largest away" in str(report) and good.closed and far.closed
    assert report.rows[2].run is None and "compiled, batch 2: didn't run: no compiler" in str(report)
    monkeypatch.setattr(benchmark, "Session", PixelSession)
    _with(monkeypatch, FakeBaseline("floats"))  # it gets what the engine makes of its pixels
    assert [row.difference for row in bench(engine, against=("torch",), batch=(2,), iterations=5).rows] == [None, 0.0]


def test_a_shared_or_throttled_gpu_is_told(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "clocks", lambda device, load=None: Clocks(900, 1980, 99, ("power cap",)))
    text = str(bench(engine, iterations=1))
    assert "99 % busy before this started: it is shared" in text
    assert "held back by power cap" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"against": ("tensorflow",)}, "tensorflow"),
        ({"against": "tensorflow"}, "tensorflow"),
        ({"batch": 4}, "list"),
        ({"batch": (1, 1)}, "twice"),
        ({"batch": (0,)}, "`batch=` is 0"),
        ({"streams": 0}, "`streams=` is 0"),
        ({"iterations": 0}, "`iterations=` is 0"),
        ({"source": "m:f", "against": ("onnxruntime",)}, "`source=` has no effect without"),
        ({"against": ("onnxruntime",)}, "`model=`"),
        ({"batch": (9,)}, "outside the engine's shapes"),
    ],
)
def test_refused(engine: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bench(engine, **options)
    assert all(session.closed and not session.given for session in FakeSession.made)


def test_torch_without_a_gpu_is_refused_before_anything_is_measured(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="finds no GPU"):
        bench(engine, against=("torch",), source="torchvision:resnet18")
    assert FakeSession.made[0].given == []


def test_onnxruntime_says_what_it_got(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x) => (float[n,3] y) { y = Add(x, x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    baseline = baselines.OnnxRuntime(tmp_path / "m.onnx")
    inputs = {"x": np.ones((2, 3), np.float32)}
    baseline.prepare(inputs)
    assert "(CPU)" in baseline.name or "(CUDA)" in baseline.name
    np.testing.assert_array_equal(baseline.run(inputs)["y"], 2 * inputs["x"])
    with pytest.raises(UsageError, match="`model=`"):
        baseline.prepare({"z": inputs["x"]})


def test_the_command(engine: Path) -> None:
    typed = ["bench", str(engine), "--batch", "1,2", "--iterations", "3"]
    plain = CliRunner().invoke(cli.app, typed)
    assert plain.exit_code == 0 and "samples/s" in plain.stdout
    found = json.loads(CliRunner().invoke(cli.app, [*typed, "--json"]).stdout)
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    assert isinstance(CliRunner().invoke(cli.app, ["bench", str(engine), "--batch", "many"]).exception, UsageError)
