"""Whole job lists, on real photos: the same tables as `calibrate`, no work done twice, no failure that spreads."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from world import Heard, World, has, net, samples

import trtopt
from trtopt.core.errors import OutputError, UsageError
from trtopt.jobs import runner
from trtopt.jobs.state import State
from trtopt.jobs.workers import Workers

ROOT = Path(__file__).resolve().parent.parent.parent
PREPROCESS = {"size": [32, 32], "scale": 0.00392156862745098}
SETS = {
    "arrays": '[data.arrays]\ndata = "data.npz"\n',
    "photos": '[data.photos]\nimages = "photos"\npreprocess = { size = [32, 32], scale = 0.00392156862745098 }\n',
}
JOB = '[[job]]\nmodel = "model.onnx"\ndata = ["arrays", "photos"]\nmethod = ["auto", "entropy"]\n'
LIST = "".join(SETS.values()) + JOB
SMALL = SETS["arrays"] + '[[job]]\nmodel = "model.onnx"\ndata = "arrays"\n'


def listed(world: World, text: str = LIST) -> Path:
    path = world.folder / "jobs.toml"
    path.write_text(text, encoding="utf-8")
    return path


def measured(path: str | Path) -> dict[str, Any]:
    """Read a table without the time that it took."""
    content = json.loads(Path(path).read_bytes())
    del content["seconds"]
    return dict(content)


def plain(world: World, model: Path, data: str, **options: Any) -> dict[str, Any]:
    """Return what `calibrate` makes of it."""
    source: dict[str, Any] = {"images": world.photos, "preprocess": PREPROCESS}
    path = world.folder / "plain.calib.json"
    given = {"data": world.arrays} if data == "arrays" else source
    trtopt.calibrate(model, path, cache=False, threads=1, **given, **options)
    return measured(path)


def deadly(monkeypatch: pytest.MonkeyPatch, work: Any, of: Callable[[Any], bool]) -> None:
    """Let the worker die that does this work of some first argument."""
    submit = Workers.submit

    def submitted(self: Any, function: Any, *arguments: Any, **needs: Any) -> Any:
        if function is work and of(arguments[0]):
            return submit(self, os.abort)
        return submit(self, function, *arguments, **needs)

    monkeypatch.setattr(Workers, "submit", submitted)


def fixed_batch(size: int) -> onnx.ModelProto:
    model = net()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    return model


@pytest.mark.parametrize(("largest", "workers", "shards"), [(256, 1, [1, 1]), (9, 2, [5, 4])])
def test_tables_are_those_of_calibrate_for_any_number_of_shards(
    world: World, monkeypatch: pytest.MonkeyPatch, largest: int, workers: int, shards: list[int]
) -> None:
    monkeypatch.setattr(runner, "LARGEST", largest)
    monkeypatch.setattr(runner, "SMALLEST", 1)
    onnx.save(fixed_batch(4), world.folder / "fixed.onnx")
    result = trtopt.run_jobs(
        listed(world, LIST.replace('"model.onnx"', '["model.onnx", "fixed.onnx"]')), workers=workers
    )
    assert result.ok, result.jobs
    assert [job.name for job in result.jobs] == [
        f"{model}.{data}.{method}"
        for model in ("model", "fixed")
        for data in ("arrays", "photos")
        for method in ("auto", "entropy")
    ]
    assert [result.jobs[index].shards for index in (0, 4)] == shards  # of 9, and of 12 samples
    for job in result.jobs[::3]:
        assert measured(job.output) == plain(world, Path(job.model), job.data, method=job.method)
        assert trtopt.Table.load(job.output).digest == job.digest


def test_one_failure_never_stops_the_rest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(world.model, world.folder / "good.onnx")
    shutil.copy(world.model, world.folder / "deadly.onnx")
    (world.folder / "torn.onnx").write_bytes(world.model.read_bytes()[:500])
    np.savez(world.folder / "constant.npz", x=np.full((40, 3, 32, 32), 0.5, np.float32))
    np.savez(world.folder / "copies.npz", x=np.repeat(samples(1), 20, 0))
    values = samples(40)
    values[33] = 3e38  # finite, but what the network makes of it isn't
    np.savez(world.folder / "hot.npz", x=values)
    text = """
        [data]
        good.data = "data.npz"
        constant.data = "constant.npz"
        hot.data = "hot.npz"
        absent.data = "absent.npz"
        copies.data = "copies.npz"
        insisted = { data = "copies.npz", allow_unusual_data = true }
        [[job]]
        model = ["torn.onnx", "absent.onnx", "deadly.onnx", "good.onnx"]
        data = "good"
        [[job]]
        model = "good.onnx"
        data = ["constant", "hot", "absent", "copies", "insisted"]
    """
    deadly(monkeypatch, runner.work.open_pass, lambda job: job.model.name == "deadly.onnx")
    told = Heard()
    result = trtopt.run_jobs(listed(world, text), workers=1, reporter=told)
    failed = {job.name: job.error or {} for job in result.jobs if job.state == "failed"}
    kinds = ["InvalidModel", "UsageError", "WorkerDied", "DataError", "CalibrationError", "UsageError", "DataError"]
    assert [error["type"] for error in failed.values()] == kinds
    assert [job.name for job in result.jobs if job.state == "done"] == ["good.good.auto", "good.insisted.auto"]
    has(failed["torn.good.auto"]["message"], "torn.onnx")
    has(failed["absent.good.auto"]["message"], "absent.onnx", "doesn't exist")
    has(failed["deadly.good.auto"]["message"], "killed or crashed", "fewer `workers=`")
    has(failed["good.constant.auto"]["message"], "are the same one")
    has(failed["good.hot.auto"]["message"], "isn't finite", "sample 33 ")
    has(failed["good.copies.auto"]["message"], "are the same one", "allow_unusual_data = true")
    assert "--allow-unusual-data" not in failed["good.copies.auto"]["message"]  # which jobs run hasn't
    assert any(line.startswith("good.hot.auto: failed: CalibrationError: ") for line in told.warnings)
    assert "good.good.auto: running" in told.notes
    assert not Path(result.jobs[0].output).exists()


def test_what_cant_be_written_is_told_before_the_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.folder / "tables").write_text("a file")
    monkeypatch.setattr(Workers, "submit", None)  # nothing is started
    path = listed(world, 'output = "tables"\n' + SMALL)
    (job,) = trtopt.run_jobs(path, workers=1).jobs
    assert job.error is not None
    has(job.error["message"], "can't make the folder", "make room, change output in the list")
    with pytest.raises(OutputError, match="`state=`"):
        trtopt.run_jobs(path, state=world.model / "state")

    def full(path: Path, value: Any) -> None:
        raise OutputError(f"can't write {path}: No space left on device", "give another `output=`")

    monkeypatch.setattr("trtopt.jobs.state.write_json", full)
    with pytest.raises(OutputError, match=r"make room, or give another file with `state=`$"):
        trtopt.run_jobs(path, workers=1)


def test_only_what_changed_or_failed_is_done_again(world: World) -> None:
    text = LIST.replace('["auto", "entropy"]', '"minmax"')
    late = '[[job]]\nmodel = "late.onnx"\ndata = "arrays"\n'
    first = trtopt.run_jobs(listed(world, text + late), workers=1)
    assert [job.state for job in first.jobs] == ["done", "done", "failed"]
    before = [Path(job.output).stat().st_mtime_ns for job in first.jobs[:2]]
    shutil.copy(world.model, world.folder / "late.onnx")
    sets = "".join(SETS.values())
    second = trtopt.run_jobs(listed(world, sets + late + text.removeprefix(sets)), workers=1)  # reordered
    assert [(job.name, job.cached) for job in second.jobs] == [
        ("late.arrays.auto", False),
        ("model.arrays.minmax", True),
        ("model.photos.minmax", True),
    ]
    assert [Path(job.output).stat().st_mtime_ns for job in second.jobs[1:]] == before
    assert [job.digest for job in second.jobs[1:]] == [job.digest for job in first.jobs[:2]]
    Path(second.jobs[0].output).write_text("{}", encoding="utf-8")
    next(world.photos.glob("*.jpg")).unlink()
    third = trtopt.run_jobs(world.folder / "jobs.toml", workers=1)
    assert [job.cached for job in third.jobs] == [False, True, False]
    assert (third.jobs[0].digest, third.jobs[2].samples) == (second.jobs[0].digest, 3)


def test_ctrl_c_stops_workers_and_leaves_what_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(world.model, world.folder / "other.onnx")
    path = listed(world, SMALL.replace('"model.onnx"', '["model.onnx", "other.onnx"]'))
    record = State.record

    def interrupting(self: Any, name: str, content: Any) -> None:
        record(self, name, content)
        if content["state"] == "done":
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(State, "record", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trtopt.run_jobs(path, workers=1)
    assert [job.state for job in trtopt.show_jobs(path).jobs] == ["done", "pending"]
    assert not list(world.folder.glob(".trtopt-jobs-*"))
    assert [job.cached for job in trtopt.run_jobs(path, workers=1).jobs] == [True, False]


def test_kill_9_and_again_repeats_nothing_and_changes_no_bit(rtx: None, world: World) -> None:
    names = [f"model{number}" for number in range(4)]
    for name in names:
        shutil.copy(world.model, world.folder / f"{name}.onnx")
    build = '[[job]]\nkind = "build"\nmodel = "model0.onnx"\ndata = "arrays"\nprecision = "int8"\ntarget = "sm89"\n'
    path = listed(world, SMALL.replace('"model.onnx"', '"model?.onnx"') + build)
    command = [sys.executable, "-m", "trtopt", "jobs", "run", str(path), "--workers", "1", "--json"]

    def start() -> subprocess.Popen[str]:
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)

    def made() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in world.folder.glob("calibrated/[!.]*.json")}

    run, deadline = start(), time.monotonic() + 120
    while len(made()) < 2:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.02)
    run.kill()
    run.communicate()
    assert "running" not in {job.state for job in trtopt.show_jobs(path).jobs}
    before = made()
    out, err = start().communicate(timeout=120)
    jobs = {job["name"]: job for job in json.loads(out)["jobs"]}
    assert all(job["state"] == "done" for job in jobs.values()), err
    assert (
        1 <= sum(job["cached"] for job in jobs.values()) <= 3
    )  # a table may have been written, and not yet noted down
    kept = {path: at for path, at in before.items() if jobs[path.name.removesuffix(".calib.json")]["cached"]}
    assert kept.items() <= made().items()
    for name in (names[0], names[3]):
        assert measured(jobs[f"{name}.arrays.auto"]["table"]) == plain(world, world.folder / f"{name}.onnx", "arrays")
    assert Path(jobs["model0.int8.sm89"]["engine"]).is_file()
    assert not list(world.folder.glob(".trtopt-jobs-*"))


def test_the_command_line_says_what_became_of_each(world: World) -> None:
    path = listed(world, SMALL + '[[job]]\nmodel = "absent.onnx"\ndata = "arrays"\n')
    found = world.run("jobs", "run", path, "--workers", "1", "--json")
    assert found.status == 1
    content = json.loads(found.out)
    assert content["states"] == {"pending": 0, "running": 0, "done": 1, "failed": 1}
    assert (content["ok"], content["jobs"][1]["error"]["type"]) == (False, "UsageError")
    assert "model.arrays.auto: running" in found.err
    again = world.run("jobs", "run", path, "--workers", "1")
    assert again.status == 1
    has(
        again.out, "model.arrays.auto", "done before", "absent.arrays.auto", "doesn't exist", "2 jobs: 1 done, 1 failed"
    )
    shown = world.run("jobs", "show", world.folder / "jobs.state", "--json")
    assert shown.status == 0
    assert [job["digest"] for job in json.loads(shown.out)["jobs"]] == [content["jobs"][0]["digest"], None]
    has(world.run("jobs", "show", path).out, "absent.arrays.auto", "failed")


def test_bad_requests_are_refused_before_any_work(world: World) -> None:
    path = listed(world)
    for option in ("--workers", "--threads"):
        has(world.refused("jobs", "run", path, option, "0"), f"{option} is 0", "at least 1")
    has(world.refused("jobs", "show", path), "no state file", "jobs.state", f"trtopt jobs run {path}")
    assert not (world.folder / "jobs.state").exists()
    with State.locked(world.folder / "held"), pytest.raises(UsageError, match="another run"):
        trtopt.run_jobs(path, state=world.folder / "held")


def documented(world: World, number: int, name: str) -> list[dict[str, Any]]:
    """Return what became of the jobs of a list that the documentation prints, by the last command below it."""
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    example, commands = (re.findall(rf"```{kind}\n(.*?)```", text, re.S)[number] for kind in ("toml", "bash"))
    assert commands.count(f"trtopt jobs run {name}") == 2
    zoo = world.folder / "zoo"
    zoo.mkdir()
    proto = net()
    proto.graph.node[2].name = "head"  # which an override of the list names
    onnx.save(proto, zoo / "small.onnx")
    world.arrays.rename(world.folder / "crops.npz")
    (world.folder / name).write_text(example, encoding="utf-8")
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
    return jobs


def test_the_list_in_the_documentation_runs(world: World) -> None:
    jobs = documented(world, 0, "jobs.toml")
    combinations = [(data, method) for data in ("photos", "crops") for method in ("auto", "entropy")]
    assert [job["name"] for job in jobs] == [
        *(f"small.{data}.{method}" for data, method in combinations),
        "head-in-fp32.photos.auto",
    ]
    assert all(job["cached"] for job in jobs)
    assert all((world.folder / "tables" / f"{job['name']}.calib.json").is_file() for job in jobs)


def test_shards_of_other_versions_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.work, "versions", lambda: {"trtopt": "0", "onnxruntime": "1.0"})  # here alone
    told = Heard()
    (job,) = trtopt.run_jobs(listed(world, SMALL), workers=1, threads=1000, reporter=told).jobs
    has((job.error or {})["message"], "'onnxruntime': '1.0'", "install the same versions")
    assert any("1 workers with 1000 threads each share" in line for line in told.warnings)
