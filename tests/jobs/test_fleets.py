"""Job lists that build engines, by TensorRT-RTX: each once, none for another's failure, and on from where a run was stopped."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_runner import ROOT, Told, _until, listed
from world import World, has, net, unnumbered

import trtopt
from trtopt.core.errors import UnsupportedRequest
from trtopt.jobs import builders, runner

pytestmark = pytest.mark.usefixtures("rtx")
LIST = """
[data.arrays]
data = "data.npz"
[[job]]
kind = "build"
model = ["model.onnx", "second.onnx"]
precision = ["fp32", "fp16", "int8"]
data = "arrays"
target = ["sm89", "sm120"]
backend = "rtx"
"""
NAMES = [
    f"{model}.{precision}.{target}"
    for model in ("model", "second")
    for precision in ("fp32", "fp16", "int8")
    for target in ("sm89", "sm120")
]


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


def test_engines_are_those_of_build_and_are_made_once(world: World) -> None:
    path, told = listed(world, LIST), Told()
    first = trtopt.run_jobs(path, workers=2, reporter=told)
    assert first.ok, first.jobs
    made = engines(first)
    assert list(made) == NAMES
    assert first.summary == "14 jobs: 14 done"  # with two tables, which the list doesn't name
    calibrated = max(index for index, line in enumerate(told.lines) if ".arrays.auto: done" in line)
    assert calibrated < min(index for index, line in enumerate(told.lines) if line.startswith("model.fp32"))
    for name, target in (("model.int8.sm89", "sm89"), ("second.fp16.sm120", "sm120")):
        alone, job = world.folder / "alone.engine", made[name]
        own: dict[str, Any] = (
            {"int8": True, "data": world.arrays} if "int8" in name else {"fp16": True, "data": world.arrays}
        )
        trtopt.build(job.model, alone, target=target, backend="rtx", **own)
        assert unnumbered(alone.read_bytes()) == unnumbered(Path(job.output).read_bytes())
        assert job.targets == (target,)
    has(made["model.int8.sm89"].outcome, "2 of 2 convolutions INT8", " s; ", "model.int8.sm89.engine")
    before = written(world)
    assert len(before) == 24
    again = trtopt.run_jobs(path, workers=1)
    assert {job.status for job in engines(again).values()} == {"up to date"}
    assert written(world) == before


def test_only_what_changed_is_built_again(world: World, second: Path) -> None:
    path = listed(world, LIST.replace('["sm89", "sm120"]', '"sm89"'))
    trtopt.run_jobs(path, workers=1)
    (world.folder / "engines" / "model.fp16.sm89.engine").unlink()
    second.write_bytes(world.model.read_bytes())
    again = engines(trtopt.run_jobs(path, workers=1))
    assert [name for name, job in again.items() if job.cached] == ["model.fp32.sm89", "model.int8.sm89"]
    reordered = LIST.replace('["sm89", "sm120"]', '"sm89"').replace('["fp32", "fp16", "int8"]', '["int8", "fp32"]')
    assert all(job.cached for job in trtopt.run_jobs(listed(world, reordered), workers=1).jobs)


def test_a_build_that_fails_stops_no_other(world: World) -> None:
    (world.folder / "torn.onnx").write_bytes(world.model.read_bytes()[:500])
    (world.folder / "engines" / "model.fp32.sm89.engine").mkdir(parents=True)
    text = LIST.replace('"second.onnx"]', '"torn.onnx", "absent.onnx"]').replace('["sm89", "sm120"]', '"sm89"')
    result = trtopt.run_jobs(listed(world, text), workers=2)
    errors = {name: (job.error or {}).get("message", "") for name, job in engines(result).items()}
    assert [name for name, said in errors.items() if not said] == ["model.fp16.sm89", "model.int8.sm89"]
    has(errors["model.fp32.sm89"], "model.fp32.sm89.engine")
    has(errors["torn.fp16.sm89"], "torn.onnx")
    has(errors["absent.fp32.sm89"], "absent.onnx", "doesn't exist")
    has(errors["absent.int8.sm89"], "its table wasn't made: absent.arrays.auto: failed: UsageError")
    assert not result.ok


def test_a_limit_tunes_and_best_needs_a_gpu(world: World) -> None:
    text = """
        [data.arrays]
        data = "data.npz"
        [[job]]
        kind = "build"
        model = "model.onnx"
        precision = "int8"
        data = "arrays"
        target = "sm89"
        backend = "rtx"
        min_snr = 30
        save_calib = "tuned.calib.json"
        precision_override = ["conv1=fp32"]
    """
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
    text = text.replace('target = ["sm89", "sm120"]', 'target = ["sm80", "sm89"]')
    message = world.refused("jobs", "run", listed(world, text), "--state", world.output / "state")
    has(message, "can't be built on this machine", "model.fp8.sm80, second.fp8.sm80: ", "nothing was started", "--ray")
    assert "sm89:" not in message
    text = LIST.replace('"rtx"', '"tensorrt"').replace('target = ["sm89", "sm120"]', "")
    with pytest.raises(UnsupportedRequest, match=r"model.fp32, model.fp16, model.int8, …: "):
        trtopt.run_jobs(listed(world, text), workers=1)
    goal = LIST.replace('"rtx"', '"rtx"\nbudget = "9min"')
    with pytest.raises(UnsupportedRequest, match=r"`?budget.*add a limit"):
        trtopt.run_jobs(listed(world, goal), workers=1)
    assert not (world.folder / "engines").exists() and not (world.folder / "jobs.state").exists()


@pytest.mark.parametrize(
    ("gpus", "pinned", "used"),
    [
        (("L4",), "", {"0"}),
        (("L4", "L4"), "", {"0", "1"}),
        (("L4", "T4"), "", {"0"}),
        (("L4", "T4"), "device = 1", {"1"}),
    ],
)
def test_each_gpu_builds_one_engine_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], pinned: str, used: set[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(runner, "_asked", lambda *_: gpus)
    monkeypatch.setattr(builders, "CALL", "place:built")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    text = LIST.replace('["fp32", "fp16", "int8"]', '"fp32"').replace('data = "arrays"\n', f"{pinned}\n")
    text = text.replace('[data.arrays]\ndata = "data.npz"\n', "")
    result = trtopt.run_jobs(listed(world, text), workers=1)
    assert result.ok, result.jobs
    spans: dict[str, list[tuple[float, float]]] = {}
    for job in result.jobs:
        seen, device, start, end = Path(job.output).read_text().split()
        assert device == "0"
        spans.setdefault(seen, []).append((float(start), float(end)))
    assert spans.keys() == used
    for along in spans.values():
        ordered = sorted(along)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))


def test_a_builder_that_dies_fails_its_job_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = runner.Pool.submit

    def deadly(self: Any, function: str, *arguments: Any) -> Any:
        if function == builders.CALL and "fp16" in str(arguments[0].output):
            return submit(self, "os:abort")
        return submit(self, function, *arguments)

    monkeypatch.setattr(runner.Pool, "submit", deadly)
    result = trtopt.run_jobs(listed(world, LIST.replace('["sm89", "sm120"]', '"sm89"')), workers=1)
    assert [job.name for job in result.jobs if job.state == "failed"] == ["model.fp16.sm89", "second.fp16.sm89"]
    assert "SIGABRT" in ((engines(result)["model.fp16.sm89"].error or {})["message"])


def test_ctrl_c_leaves_whole_engines_and_the_next_run_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path, record = listed(world, LIST), runner.State.record
    done: list[str] = []

    def interrupting(self: Any, name: str, content: Any) -> None:
        record(self, name, content)
        if content["state"] == "done" and content.get("kind") == "build":
            done.append(name)
        if len(done) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner.State, "record", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trtopt.run_jobs(path, workers=2)
    shown = {job.name: job.state for job in trtopt.show_jobs(world.folder / "jobs.state").jobs}
    assert sorted(name for name in NAMES if shown[name] == "done") == sorted(done)
    assert {state for name, state in shown.items() if name not in done and name in NAMES} == {"pending"}
    before = written(world)
    result = trtopt.run_jobs(path, workers=2)
    assert result.ok and {name for name, job in engines(result).items() if job.cached} >= set(done)
    assert before.items() <= written(world).items()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_kill_9_and_again_builds_nothing_twice(world: World) -> None:
    path, state = listed(world, LIST), world.folder / "jobs.state"
    command = [sys.executable, "-m", "trtopt", "jobs", "run", str(path), "--workers", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def whole() -> dict[str, int]:
        return {
            name: at for name, at in written(world).items() if (world.folder / "engines" / f"{name}.json").is_file()
        }

    run = start()
    _until(lambda: (world.folder / "engines").is_dir() and len(whole()) >= 3, run)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert "running" not in {job.state for job in trtopt.show_jobs(state).jobs}
    before = whole()
    run = start()
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    result = json.loads(out)
    assert result["states"]["done"] == 14
    cached = {job["engine"].rpartition("/")[2] for job in result["jobs"] if job["kind"] == "build" and job["cached"]}
    assert cached >= before.keys() and len(cached) < 12
    assert before.items() <= written(world).items()
    assert not list((world.folder / "engines").glob(".*"))


def test_the_command_line_says_what_became_of_each_engine(world: World) -> None:
    np.savez(world.folder / "data.npz", x=np.load(world.arrays)["x"][:20])
    text = LIST.replace('["fp32", "fp16", "int8"]', '"int8"').replace('"second.onnx"', '"absent.onnx"')
    found = world.run("jobs", "run", listed(world, text), "--workers", "1", "--json")
    assert found.status == 1
    content = json.loads(found.out)
    by_name = {job["name"]: job for job in content["jobs"]}
    job = by_name["model.int8.sm89"]
    assert (job["state"], job["kind"], job["precision"], job["targets"]) == ("done", "build", "int8", ["sm89"])
    assert Path(job["engine"]).is_file() and job["precision_summary"] and job["seconds"] > 0
    assert by_name["absent.int8.sm89"]["error"]["type"] == "CalibrationError"
    again = world.run("jobs", "run", listed(world, text), "--workers", "1")
    has(again.out, "up to date", "failed", "6 jobs: 3 done, 3 failed")
    shown = world.run("jobs", "show", world.folder / "jobs.state")
    has(shown.out, "model.int8.sm120", "2 of 2 convolutions INT8")


def _typed(world: World, second: Path, name: str, text: str, commands: str) -> list[dict[str, Any]]:
    """What became of the jobs of a printed list, of two models in `zoo`, by what was printed last."""
    zoo = world.folder / "zoo"
    zoo.mkdir()
    second.rename(zoo / "pairs.onnx")
    world.model.rename(zoo / "small.onnx")
    (world.folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-ec", commands.replace("trtopt jobs", f"{shlex.quote(sys.executable)} -m trtopt jobs")],
        cwd=world.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    jobs: list[dict[str, Any]] = json.loads(line)["jobs"]
    built = [job for job in jobs if job["kind"] == "build"]
    assert all((world.folder / "engines" / f"{job['name']}.engine").is_file() for job in built)
    return jobs


def test_the_list_of_engines_in_the_documentation_runs(world: World, second: Path) -> None:
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    _, example = re.findall(r"```toml\n(.*?)```", text, re.S)
    _, commands = re.findall(r"```bash\n(.*?)```", text, re.S)
    assert commands.count("trtopt jobs run fleet.toml") == 2
    jobs = _typed(world, second, "fleet.toml", example, commands)
    assert [job["name"] for job in jobs if job["kind"] == "build"] == [
        f"{model}.{precision}.{target}"
        for model in ("pairs", "small")
        for precision in ("fp16", "int8")
        for target in ("sm89", "sm120")
    ] + ["small-tuned.int8.sm89"]
    assert all(job["cached"] for job in jobs)
