"""profile: the layers' times as a table, by a session that is played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trtopt
from trtopt import cli
from trtopt.core.errors import DeviceError, UsageError
from trtopt.core.values import Precision, ShapeRange, TensorInfo
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.diagnosis import profiling
from trtopt.evaluation import benchmark
from trtopt.runtime.timing import LayerTime, LayerTimes, Spread

LAYERS = (
    LayerTime("reformat", 0.05, 0.04, 0.06),
    LayerTime("conv1 + relu1", 0.3, 0.29, 0.31, "convolution", Precision.INT8, ("conv1", "relu1")),
    LayerTime("fc", 0.15, 0.1, 0.2, "matmul", Precision.FP16, ("fc",)),
)


class PlayedSession:
    def __init__(self, path: Path, **_: Any) -> None:
        self.inputs = (TensorInfo("x", "float32", (-1, 3)),)
        self.profiles = ({"x": ShapeRange((1, 3), (4, 3), (8, 3))},)
        self.notes: list[str] = []
        self.manifest, self.preprocess, self.embedded = None, None, None

    def __enter__(self) -> PlayedSession:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def profile(self, inputs: Any, iterations: int, warmup: int) -> LayerTimes:
        size = len(inputs["x"])
        if size > 8:
            raise UsageError("inputs x 9x3 are outside the engine's shapes")
        layers = tuple(
            LayerTime(item.name, item.ms * size, item.low, item.high, item.kind, item.precision, item.nodes)
            for item in LAYERS
        )
        return LayerTimes({"x": f"{size}x3"}, layers, Spread(0.4 * size, 0.41, 0.42, 0.39), iterations)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    info = DeviceInfo(0, "Played GPU", 89, 1 << 30)
    monkeypatch.setattr(benchmark, "probe", lambda: Probe((info,), (13, 0)))
    monkeypatch.setattr(profiling, "Session", PlayedSession)
    path = tmp_path / "m.engine"
    path.write_bytes(b"plan")
    return path


def test_the_slowest_layers_come_first_and_all_are_counted(engine: Path) -> None:
    found = trtopt.profile(engine, batch=(1, 2))
    _, rows = found.table(2)
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    assert rows[0] == ("1", "0.3000", "60.0%", "INT8", "convolution", "conv1 + relu1")
    said = "\n".join(found.remarks(2))
    assert "3 layers take 0.5000 ms one by one (INT8 60%, FP16 30%, not known 10%)" in said
    assert "the whole inference takes 0.4000 ms" in said and "1 more layers take 0.0500 ms" in said
    assert "without a manifest" in said and "Played GPU" in said
    assert len(found.table()[1]) == 6 and "reformat" in str(found)


def test_the_command_and_its_json(engine: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(cli.app, ["profile", str(engine), "--batch", "1", "--top", "1"])
    assert run.exit_code == 0, run.output
    assert "conv1" in run.output and "more layers take" in run.output
    run = CliRunner().invoke(cli.app, ["profile", str(engine), "--json"])
    [batch] = json.loads(run.stdout)["batches"]
    assert batch["batch"] == 4 and len(batch["layers"]) == 3 and batch["total_ms"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": (9,)}, "outside the engine's shapes"),
        ({"batch": 4}, "`batch=` is 4; a list, each a whole number, is needed"),
        ({"batch": (2, 2)}, "names a size twice"),
        ({"batch": (0,)}, "`batch=` is 0; at least 1 is needed"),
        ({"iterations": 0}, "`iterations=` is 0"),
        ({"top": -1}, "`top=` is -1"),
    ],
)
def test_requests_that_can_not_be_right(engine: Path, options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trtopt.profile(engine, **options)


def test_without_a_gpu_it_says_so(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "probe", lambda: Probe((), None, "no NVIDIA driver"))
    with pytest.raises(DeviceError, match=r"needs an NVIDIA GPU: no NVIDIA driver.*trtopt inspect .*--layers"):
        trtopt.profile(engine)
