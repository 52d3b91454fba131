"""A TensorRT 12 as it may come: 11's names but three. A row of the table, and a method where more differs, are all it takes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from standins import API, SCRATCH, Simulation
from test_generations import PROBED

import trtopt
from trtopt.engine.inspection import EngineReport
from trtopt.trt.facts import GENERATIONS, Facts
from trtopt.trt.families import FAMILIES
from trtopt.trt.generation import Generation

FLAG, LIMIT = "NetworkDefinitionCreationFlag.STRONGLY_TYPED", "IBuilderConfig.set_memory_pool_limit"
RENAMED = {FLAG: "TYPED", LIMIT: "limit_memory", "ICudaEngine.device_memory_size_v2": "context_bytes"}
EXTRAS = {"tensorrt": "trt12", "lean": "lean12"}
ROW = Facts(first=(12,), before="tensorrt11", extras=EXTRAS, gpus={(12,): range(80, 130)}, renamed=RENAMED)


class TensorRT12(Generation):
    """It wants the flag again."""

    def _network_flags(self, typed: bool) -> tuple[str, ...]:
        return ("STRONGLY_TYPED",)


def test_a_generation_with_three_renamed_calls_builds_and_opens(
    monkeypatch: pytest.MonkeyPatch, with_gpu: Callable[[int | None], None], float_net: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(GENERATIONS, "tensorrt12", ROW)
    monkeypatch.setitem(FAMILIES, "tensorrt12", TensorRT12)
    sim = Simulation("11.4.0", later="12.0.0.1", renamed=RENAMED)
    monkeypatch.setitem(sys.modules, "tensorrt", sim.module)
    with_gpu(90)
    engine = tmp_path / "m.engine"
    trtopt.build(float_net, engine, backend="tensorrt", workspace=1 << 20, timing_cache="none")
    assert sim.configs[-1]._pools == {"WORKSPACE": 1 << 20}
    assert sim.networks[-1]._flags == 1 << int(sim.module.NetworkDefinitionCreationFlag.TYPED)
    report = trtopt.inspect(engine)
    assert isinstance(report, EngineReport) and report.runs_on == "TensorRT 12.0.0.1"
    loaded = trtopt.trt.plan_loader("auto", None).load(engine.read_bytes())
    assert loaded.scratch_bytes == SCRATCH + 1 and loaded.context(256, SCRATCH + 1) is sim.contexts[-1]
    assert sim.missed <= PROBED["11.4.0"]
    lean = Simulation("lean-11.4.0", later="12.0.0.1", renamed=RENAMED)
    monkeypatch.setitem(sys.modules, "tensorrt_lean_bindings", lean.module)
    assert trtopt.trt.plan_loader("lean", None).family == "lean12"


def test_the_names_of_the_installed_one_are_those_of_its_stand_in() -> None:
    module = pytest.importorskip("tensorrt_rtx")
    script = runpy.run_path(str(Path(trtopt.__file__).parents[1] / "scripts" / "tensorrt_names.py"))
    there = API / f"rtx-{module.__version__.rpartition('.')[0]}.json"
    if not there.exists():
        pytest.skip(f"there is no stand-in of {module.__version__}")
    assert script["written"](script["names_of"](module)) == there.read_text()
