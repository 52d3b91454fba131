"""Job lists that build engines, by TensorRT-RTX: each once, none for another's failure, and on from where a run was stopped."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import onnx
import pytest
from test_runner import deadly, documented, listed
from world import Heard, World, has, net, unnumbered

import trtopt
from trtopt.core.errors import DeviceError, UnsupportedRequest
from trtopt.jobs import runner, work
from trtopt.jobs.workers import Workers

pytestmark = pytest.mark.usefixtures("rtx")
LIST = """
[data.arrays]
data = "data.npz"
[[job]]
kind = "build"
model = ["model.onnx", "second.onnx"]
precision = ["fp32", "fp16", "int8"]
data = "arrays"
target = "sm89"
backend = "rtx"
"""
NAMES = [f"{model}.{precision}.sm89" for model in ("model", "second") for precision in ("fp32", "fp16", "int8")]


@pytest.fixture(autouse=True)
def second(world: World) -> Path:
    """Another model than `model.onnx`."""
    model = net()
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(2 * weight, "w1"))
    onnx.save(model, world.folder / "second.onnx")
    return world.folder / "second.onnx"


def engines(result: Any) -> dict[str, Any]:
    return {job.name: job for job in result.jobs if job.kind == "build"}


def written(world: World) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (world.folder / "engines").glob("[!.]*")}


def test_engines_are_those_of_build_and_only_what_changed_is_built_again(world: World, second: Path) -> None:
    path, told = listed(world, LIST), Heard()
    first = trtopt.run_jobs(path, workers=2, reporter=told)
    assert first.ok, first.jobs
    made = engines(first)
    assert list(made) == NAMES
    assert first.summary == "8 jobs: 8 done"  # with two tables, which the list doesn't name
    calibrated = max(index for index, line in enumerate(told.notes) if ".arrays.auto: done" in line)
    assert calibrated < min(index for index, line in enumerate(told.notes) if line.startswith("model.fp32"))
    alone, job = world.folder / "alone.engine", made["model.int8.sm89"]
    trtopt.build(job.model, alone, int8=True, data=world.arrays, target="sm89", backend="rtx")
    assert unnumbered(alone.read_bytes()) == unnumbered(Path(job.output).read_bytes())
    assert job.targets == ("sm89",)
    has(job.outcome, "2 of 2 convolutions INT8", " s; ", "model.int8.sm89.engine")
    before = written(world)
    (world.folder / "engines" / "model.fp16.sm89.engine").unlink()
    second.write_bytes(world.model.read_bytes())
    again = engines(trtopt.run_jobs(path, workers=1))
    assert [name for name, job in again.items() if job.cached] == ["model.fp32.sm89", "model.int8.sm89"]
    kept = {name: at for name, at in written(world).items() if name.startswith(("model.fp32", "model.int8"))}
    assert kept.items() <= before.items()


def test_a_build_that_fails_stops_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.folder / "torn.onnx").write_bytes(world.model.read_bytes()[:500])
    (world.folder / "engines" / "model.fp32.sm89.engine").mkdir(parents=True)
    deadly(monkeypatch, work.build_engine, lambda request: "second.fp16" in str(request.output))
    text = LIST.replace('"second.onnx"]', '"second.onnx", "torn.onnx", "absent.onnx"]')
    found = world.run("jobs", "run", listed(world, text), "--workers", "2", "--json")
    assert found.status == 1
    content = json.loads(found.out)
    by_name = {job["name"]: job for job in content["jobs"]}
    errors = {name: (job["error"] or {}).get("message", "") for name, job in by_name.items() if job["kind"] == "build"}
    done = ["model.fp16.sm89", "model.int8.sm89", "second.fp32.sm89", "second.int8.sm89"]
    assert [name for name, said in errors.items() if not said] == done
    has(errors["model.fp32.sm89"], "model.fp32.sm89.engine")
    has(errors["second.fp16.sm89"], "killed or crashed")
    has(errors["torn.fp16.sm89"], "torn.onnx")
    has(errors["absent.fp32.sm89"], "absent.onnx", "doesn't exist")
    has(errors["absent.int8.sm89"], "its table wasn't made: absent.arrays.auto: failed: UsageError")
    job = by_name["model.int8.sm89"]
    assert (job["state"], job["precision"], job["targets"]) == ("done", "int8", ["sm89"])
    assert Path(job["engine"]).is_file() and job["precision_summary"] and job["seconds"] > 0
    has(world.run("jobs", "show", world.folder / "jobs.state").out, "model.int8.sm89", "2 of 2 convolutions INT8")


def test_a_limit_tunes_and_best_needs_a_gpu(world: World) -> None:
    text = LIST.replace('["model.onnx", "second.onnx"]', '"model.onnx"').replace('["fp32", "fp16", "int8"]', '"int8"')
    text += 'min_snr = 30\nsave_calib = "tuned.calib.json"\nprecision_override = ["conv1=fp32"]\n'
    result = engines(trtopt.run_jobs(listed(world, text), workers=1))["model.int8.sm89"]
    assert result.state == "done", result
    assert result.precision_summary.startswith("1 of 2 convolutions FP32, 1 of 2 INT8")
    assert trtopt.Table.load(world.folder / "tuned.calib.json").repairs is not None
    missing = engines(trtopt.run_jobs(listed(world, text.replace("conv1=", "none*=")), workers=1))[
        "model.int8.sm89"
    ].error
    assert missing is not None and missing["message"].startswith("precision_override = ['none*=fp32'] matches no node")
    text = text.replace('precision = "int8"', "best = true").replace('save_calib = "tuned.calib.json"', "")
    with pytest.raises(UnsupportedRequest, match=r"model.best.sm89: best = true needs an NVIDIA GPU"):
        trtopt.run_jobs(listed(world, text), workers=1)


def test_what_cant_be_built_here_is_refused_before_any_work(world: World) -> None:
    text = LIST.replace('precision = ["fp32", "fp16", "int8"]', 'precision = ["fp16", "fp8"]')
    text = text.replace('target = "sm89"', 'target = ["sm80", "sm89"]')
    message = world.refused("jobs", "run", listed(world, text), "--state", world.output / "state")
    has(message, "can't be built on this machine", "model.fp8.sm80, second.fp8.sm80: ", "nothing was started", "--ray")
    assert "sm89:" not in message
    text = LIST.replace('"rtx"', '"tensorrt"').replace('target = "sm89"', "")
    with pytest.raises(UnsupportedRequest, match=r"model.fp32, model.fp16, model.int8, …: "):
        trtopt.run_jobs(listed(world, text), workers=1)
    goal = LIST.replace('"rtx"', '"rtx"\nmin = 0.9')
    with pytest.raises(UnsupportedRequest, match=r"metric.*go together"):
        trtopt.run_jobs(listed(world, goal), workers=1)
    with pytest.raises(DeviceError, match='no GPU can be used here; drop device = "cuda"'):
        trtopt.run_jobs(listed(world, 'device = "cuda"\n' + LIST), workers=1)
    assert not (world.folder / "engines").exists() and not (world.folder / "jobs.state").exists()


def test_each_gpu_is_a_workers_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []

    class Noted(Workers):
        def __init__(self, given: Any, threads: int = 1) -> None:
            places.append((given, threads))
            super().__init__([{}], threads)

        def submit(self, function: Any, *arguments: Any, **named: Any) -> Future[Any]:
            if function is not work.examine_builds:
                return super().submit(function, *arguments, **named)
            (there := Future[Any]()).set_result(("L4", "L4"))
            return there

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(runner, "Workers", Noted)
    text = LIST.replace('["fp32", "fp16", "int8"]', '"fp32"').replace('data = "arrays"\n', "")
    assert trtopt.run_jobs(listed(world, text.replace('[data.arrays]\ndata = "data.npz"\n', "")), workers=3).ok
    assert [given for given, _ in places] == [[{}], [{}] * 3, [{"CUDA_VISIBLE_DEVICES": number} for number in "01"]]


def test_the_list_of_engines_in_the_documentation_runs(world: World) -> None:
    jobs = documented(world, 1, "fleet.toml")
    built = [job for job in jobs if job["kind"] == "build"]
    assert [job["name"] for job in built] == [
        f"small.{precision}.{target}" for precision in ("fp16", "int8") for target in ("sm89", "sm120")
    ] + ["small-tuned.int8.sm89"]
    assert all(job["cached"] for job in jobs)
    assert all((world.folder / "engines" / f"{job['name']}.engine").is_file() for job in built)
