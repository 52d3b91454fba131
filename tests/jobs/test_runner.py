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
from world import World, has, net, samples

import trtopt
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.progress import Reporter
from trtopt.jobs import runner, work

ROOT = Path(__file__).resolve().parent.parent.parent
SETS = {
    "arrays": '[data.arrays]\ndata = "data.npz"\n',
    "photos": '[data.photos]\nimages = "photos"\npreprocess = { size = [32, 32], scale = 0.00392156862745098 }\n',
}
JOB = """
[[job]]
model = "model.onnx"
data = ["arrays", "photos"]
method = ["auto", "entropy"]
"""
LIST = "".join(SETS.values()) + JOB


def on(name: str) -> str:
    """The list with one of its data sets alone."""
    return SETS[name] + JOB.replace('["arrays", "photos"]', f'"{name}"')


class Told(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(f"warning: {text}")


def listed(world: World, text: str = LIST) -> Path:
    path = world.folder / "jobs.toml"
    path.write_text(text, encoding="utf-8")
    return path


def measured(path: str | Path) -> dict[str, Any]:
    """A table without the time that it took."""
    content = json.loads(Path(path).read_bytes())
    del content["seconds"]
    return dict(content)


def plain(world: World, **options: Any) -> dict[str, Any]:
    """What `calibrate` makes of it."""
    path = world.folder / "plain.calib.json"
    trtopt.calibrate(world.model, path, cache=False, threads=1, **options)
    return measured(path)


def fixed_batch(size: int) -> onnx.ModelProto:
    model = net()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    return model


def test_shards_are_of_calibrations(tmp_path: Path) -> None:
    text = '[[job]]\nkind = "build"\nmodel = "m.onnx"\nprecision = "fp16"\n'
    (tmp_path / "jobs.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"`shard=` is for calibrations, and .*jobs\.toml has none: drop it"):
        trtopt.run_jobs(tmp_path / "jobs.toml", shard=4)


@pytest.mark.parametrize(("shard", "workers", "shards"), [(40, 1, 1), (10, 2, 4)])
def test_tables_are_those_of_calibrate_for_any_number_of_shards(
    world: World, shard: int, workers: int, shards: int
) -> None:
    result = trtopt.run_jobs(listed(world), shard=shard, workers=workers)
    assert result.ok
    assert [job.name for job in result.jobs] == [
        f"model.{data}.{method}" for data in ("arrays", "photos") for method in ("auto", "entropy")
    ]
    assert (result.jobs[0].shards, result.jobs[0].samples) == (shards, 40)
    assert result.observed == shards + 1  # of both methods together, and four photos
    for job in (result.jobs[0], result.jobs[3]):
        source: dict[str, Any] = {"data": world.arrays}
        if job.data == "photos":
            source = {"images": world.photos, "preprocess": {"size": [32, 32], "scale": 0.00392156862745098}}
        assert measured(job.output) == plain(world, method=job.method, **source)
        assert trtopt.Table.load(job.output).digest == job.digest


@pytest.mark.parametrize("batch", [4, 16])
def test_a_fixed_batch_is_filled_as_calibrate_fills_it(world: World, batch: int) -> None:
    onnx.save(fixed_batch(batch), world.model)
    result = trtopt.run_jobs(listed(world, on("arrays")), shard=9, workers=1)
    assert result.ok
    assert result.observed == {4: 4, 16: 3}[batch]  # shards of 12 and of 16
    assert measured(result.jobs[0].output) == plain(world, data=world.arrays)


def test_images_are_decoded_once_for_all_models(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = net()
    other.graph.input[0].name = "picture"
    for node in other.graph.node:
        node.input[:] = ["picture" if name == "x" else name for name in node.input]
    onnx.save(other, world.folder / "other.onnx")
    calls: list[str] = []
    submit = runner.Pool.submit

    def counted(self: Any, function: str, *arguments: Any) -> Any:
        calls.append(function.partition(":")[2])
        return submit(self, function, *arguments)

    monkeypatch.setattr(runner.Pool, "submit", counted)
    text = on("photos").replace('"model.onnx"', '["model.onnx", "other.onnx"]')
    result = trtopt.run_jobs(listed(world, text), shard=2, workers=1)
    assert result.ok
    assert sorted(set(calls)) == ["decode_to_file", "make_tables", "observe_shard", "open_model", "open_samples"]
    assert [calls.count(name) for name in ("open_model", "open_samples", "decode_to_file", "observe_shard")] == [
        2,
        1,
        2,
        4,
    ]
    first, _, other_first, _ = result.jobs
    assert trtopt.Table.load(first.output).amax["x"] == trtopt.Table.load(other_first.output).amax["picture"]
    assert not list((world.folder / "jobs.state").glob("scratch/*"))


def test_one_failure_never_stops_the_rest(world: World) -> None:
    shutil.copy(world.model, world.folder / "good.onnx")
    (world.folder / "torn.onnx").write_bytes(world.model.read_bytes()[:500])
    np.savez(world.folder / "constant.npz", x=np.full((40, 3, 32, 32), 0.5, np.float32))
    values = samples(40)
    values[33] = 3e38  # finite, but what the network makes of it isn't
    np.savez(world.folder / "hot.npz", x=values)
    text = """
        [data.good]
        data = "data.npz"
        [data.constant]
        data = "constant.npz"
        [data.hot]
        data = "hot.npz"
        [data.absent]
        data = "absent.npz"
        [[job]]
        model = ["torn.onnx", "absent.onnx", "good.onnx"]
        data = "good"
        [[job]]
        model = "good.onnx"
        data = ["constant", "hot", "absent"]
    """
    told = Told()
    result = trtopt.run_jobs(listed(world, text), shard=16, workers=2, reporter=told)
    assert not result.ok
    errors = {job.name: (job.error or {}).get("message", "") for job in result.jobs}
    assert [job.state for job in result.jobs] == ["failed", "failed", "done", "failed", "failed", "failed"]
    has(errors["torn.good.auto"], "torn.onnx")
    has(errors["absent.good.auto"], "absent.onnx", "doesn't exist")
    has(errors["good.constant.auto"], "one colour", "0.5 everywhere")
    has(errors["good.hot.auto"], "isn't finite", "sample 1 ", "number 32 of the data set")
    has(errors["good.absent.auto"], "absent.npz", "doesn't exist")
    assert {(job.error or {}).get("type") for job in result.jobs} == {
        None, "InvalidModel", "UsageError", "DataError", "CalibrationError"
    }  # fmt: skip
    assert measured(result.jobs[2].output) == {
        **plain(world, data=world.arrays),
        "model": {**plain(world, data=world.arrays)["model"], "name": "good.onnx"},
    }
    assert any(line.startswith("warning: good.hot.auto: failed: CalibrationError: ") for line in told.lines)
    assert told.lines.index("good.good.auto: running") < len(told.lines) - 1
    assert not Path(result.jobs[0].output).exists()


def test_tables_that_cannot_be_written_are_told_before_the_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.folder / "tables").write_text("a file")
    monkeypatch.setattr(runner.Pool, "submit", None)  # nothing is started
    result = trtopt.run_jobs(listed(world, 'output = "tables"\n' + on("arrays")), workers=1)
    assert [job.state for job in result.jobs] == ["failed"] * len(result.jobs)
    has(result.jobs[0].error["message"], "can't make the folder", "make room, change output in the list")  # type: ignore[index]
    assert trtopt.show_jobs(world.folder / "jobs.state").jobs[0].kind == "calibrate"


def test_a_state_that_cannot_be_written_names_its_own_option(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: Any) -> None:
        raise OutputError(f"can't write {path}: No space left on device", "give another `output=`")

    monkeypatch.setattr("trtopt.jobs.state.write_json", full)
    with pytest.raises(OutputError, match=r"make room, or give another folder with `state=`$"):
        trtopt.run_jobs(listed(world, on("arrays")), workers=1)


def test_finished_jobs_are_not_done_again_and_failed_ones_are(world: World) -> None:
    text = LIST + '[[job]]\nmodel = "late.onnx"\ndata = "arrays"\n'
    first = trtopt.run_jobs(listed(world, text), workers=1)
    assert [job.state for job in first.jobs] == ["done"] * 4 + ["failed"]
    before = {job.output: Path(job.output).stat().st_mtime_ns for job in first.jobs[:4]}
    shutil.copy(world.model, world.folder / "late.onnx")
    head, job, late = text.partition("[[job]]\n")[0], text.split("[[job]]\n")[1], text.split("[[job]]\n")[2]
    reordered = f"{head}[[job]]\n{late}[[job]]\n{job}"
    second = trtopt.run_jobs(listed(world, reordered), workers=1)
    assert [(job.name, job.cached) for job in second.jobs][:2] == [
        ("late.arrays.auto", False),
        ("model.arrays.auto", True),
    ]
    assert second.ok
    assert (second.observed, second.reused) == (0, first.jobs[0].shards)  # the same model under another name
    assert {path: Path(path).stat().st_mtime_ns for path in before} == before
    assert {job.name: job.digest for job in first.jobs[:4]}.items() <= {
        job.name: job.digest for job in second.jobs
    }.items()


def test_a_lost_or_changed_table_is_made_again_from_its_shards(world: World) -> None:
    path = listed(world)
    first = trtopt.run_jobs(path, workers=1)
    lost, changed = Path(first.jobs[0].output), Path(first.jobs[3].output)
    expected = [measured(lost), measured(changed)]
    lost.unlink()
    changed.write_text("{}", encoding="utf-8")
    second = trtopt.run_jobs(path, workers=1)
    assert [job.cached for job in second.jobs] == [False, True, True, False]
    assert second.observed == 0
    assert [measured(lost), measured(changed)] == expected


def test_what_a_job_depends_on_is_noticed(world: World) -> None:
    path = listed(world, LIST.replace('["auto", "entropy"]', '"minmax"'))
    first = trtopt.run_jobs(path, workers=1)
    next(world.photos.glob("*.jpg")).unlink()
    second = trtopt.run_jobs(path, workers=1)
    assert [job.cached for job in second.jobs] == [True, False]
    assert (second.jobs[0].digest, second.jobs[1].samples) == (first.jobs[0].digest, 3)
    model = onnx.load(world.model)
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(2 * weight, "w1"))
    onnx.save(model, world.model)
    third = trtopt.run_jobs(path, workers=1)
    assert [job.cached for job in third.jobs] == [False, False]
    assert third.jobs[0].digest != first.jobs[0].digest
    assert measured(third.jobs[0].output) == plain(world, data=world.arrays, method="minmax")


def shards(world: World) -> dict[str, set[str]]:
    folders = (path for path in (world.folder / "jobs.state" / "shards").iterdir() if path.is_dir())
    return {path.name: {file.name for file in path.iterdir()} for path in folders}


def test_shards_that_no_job_comes_from_any_more_are_removed(world: World) -> None:
    path = listed(world)
    trtopt.run_jobs(path, workers=1, shard=20)
    first = shards(world)
    assert sorted(map(len, first.values())) == [1, 2]
    told = Told()
    (world.folder / "jobs.state" / "jobs" / "model.photos.auto.json").unlink()
    next(world.photos.glob("*.jpg")).unlink()  # other photos: another pass
    trtopt.run_jobs(path, workers=1, reporter=told)
    second = shards(world)
    assert len(second) == 2 and len(second.keys() & first.keys()) == 1
    assert "removed 1 shard that no job comes from any more" in told.lines
    listed(world, LIST.replace('["auto", "entropy"]', '["auto", "mse"]'))
    more = trtopt.run_jobs(path, workers=1)
    assert more.observed == 0 and shards(world) == second  # another method needs them
    Path(more.jobs[0].output).unlink()
    assert trtopt.run_jobs(path, workers=1, shard=10).observed == 4
    third = shards(world)
    assert sorted(map(len, third.values())) == [1, 4]  # the two of the first cut are gone


def test_shards_are_kept_where_it_isnt_known_what_needs_them(world: World) -> None:
    path = listed(world)
    trtopt.run_jobs(path, workers=1)
    stale = world.folder / "jobs.state" / "shards" / ("0" * 32) / f"{'1' * 32}.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    both = LIST.replace('"model.onnx"', '["model.onnx", "broken.onnx"]')
    (world.folder / "broken.onnx").write_text("not a model")
    listed(world, both)
    assert not trtopt.run_jobs(path, workers=1).ok
    assert stale.exists()  # what the broken model would need can't be told
    listed(world)
    assert trtopt.run_jobs(path, workers=1).ok
    assert stale.exists()  # it left the list unfinished
    for record in (world.folder / "jobs.state" / "jobs").glob("broken*"):
        record.unlink()
    trtopt.run_jobs(path, workers=1)
    assert not stale.parent.exists() and len(shards(world)) == 2


def test_a_worker_that_dies_fails_its_job_alone(world: World) -> None:
    shutil.copy(world.model, world.folder / "other.onnx")
    sharing = listed(world, LIST.replace('"model.onnx"', '["model.onnx", "other.onnx"]'))
    submit = runner.Pool.submit

    def deadly(self: Any, function: str, *arguments: Any) -> Any:
        if function.endswith(":open_model") and arguments[0].name == "other.onnx":
            return submit(self, "os:abort")
        return submit(self, function, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.Pool, "submit", deadly)
        result = trtopt.run_jobs(sharing, workers=2)
    assert {job.state for job in result.jobs if job.name.startswith("model.")} == {"done"}
    lost = [job.error for job in result.jobs if job.name.startswith("other.")]
    assert [(error or {}).get("type") for error in lost] == ["WorkerDied"] * 4
    assert "SIGABRT" in (lost[0] or {})["message"]
    assert trtopt.run_jobs(sharing, workers=2).ok


def test_compressed_arrays_are_unpacked_once_and_not_kept(world: World) -> None:
    with np.load(world.arrays) as arrays:
        np.savez_compressed(world.folder / "packed.npz", **arrays)
    text = on("arrays").replace("data.npz", "packed.npz")
    inputs = work.open_model(world.model, (), world.folder / "folded").inputs
    (job, _) = runner.load_jobs(listed(world, text))
    opened = work.open_samples(job.data, inputs, 1, world.folder / "unpacked")
    assert len(list((world.folder / "unpacked").rglob("*.npy"))) == 1
    os.unlink(world.folder / "packed.npz")  # a shard reads the unpacked file
    assert len(work.decode(opened.samples.part(8, 24))["x"]) == 16
    with np.load(world.arrays) as arrays:
        np.savez_compressed(world.folder / "packed.npz", **arrays)
    result = trtopt.run_jobs(listed(world, text), shard=10, workers=2)
    assert result.ok and result.observed == 4
    assert measured(result.jobs[0].output) == plain(world, data=world.arrays)
    assert not list((world.folder / "jobs.state" / "scratch").glob("*"))


def test_copies_are_refused_unless_the_list_insists(world: World) -> None:
    np.savez(world.arrays, x=np.repeat(samples(1), 20, 0))
    text = on("arrays").replace('["auto", "entropy"]', '"auto"')
    (job,) = trtopt.run_jobs(listed(world, text), workers=1).jobs
    assert job.error is not None
    has(job.error["message"], "are the same one", "allow_unusual_data = true")
    assert "--allow-unusual-data" not in job.error["message"]  # which jobs run hasn't
    insisting = text.replace('"data.npz"', '"data.npz"\nallow_unusual_data = true')
    result = trtopt.run_jobs(listed(world, insisting), workers=1)
    assert result.ok
    assert result.observed == 0
    assert result.jobs[0].notes


def test_ctrl_c_stops_workers_and_leaves_what_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []
    save = runner.State.save_shard

    def interrupting(self: Any, pass_key: str, shard: str, content: Any) -> None:
        save(self, pass_key, shard, content)
        saved.append(shard)
        if len(saved) == 3:
            raise KeyboardInterrupt

    path = listed(world)
    with monkeypatch.context() as patch:
        patch.setattr(runner.State, "save_shard", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trtopt.run_jobs(path, shard=5, workers=2)
    shown = trtopt.show_jobs(world.folder / "jobs.state")
    assert {job.state for job in shown.jobs} == {"pending"}
    result = trtopt.run_jobs(path, workers=2)
    assert result.ok
    assert (result.reused, result.observed) == (3, 6)
    assert measured(result.jobs[0].output) == plain(world, data=world.arrays)


def _until(condition: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_kill_9_and_again_repeats_nothing_and_changes_no_bit(world: World) -> None:
    model = net()
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(2 * weight, "w1"))
    onnx.save(model, world.folder / "second.onnx")
    np.savez(world.arrays, x=samples(60))
    text = on("arrays").replace('"model.onnx"', '["model.onnx", "second.onnx"]')
    path, state = listed(world, text), world.folder / "jobs.state"
    command = [sys.executable, "-m", "trtopt", "jobs", "run", str(path), "--shard", "2", "--workers", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def shards() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in state.glob("shards/[!.]*/*.json")}

    def finished() -> set[str]:
        return {job.name for job in trtopt.show_jobs(state).jobs if job.state == "done"} if state.exists() else set()

    for enough in (lambda: len(shards()) >= 3, lambda: len(finished()) >= 2):
        run = start()
        _until(enough, run)
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        assert "running" not in {job.state for job in trtopt.show_jobs(state).jobs}
    done, made = shards(), finished()
    assert 30 <= len(done) < 60
    assert len(made) in (2, 3)
    written = {name: (world.folder / "calibrated" / f"{name}.calib.json").stat().st_mtime_ns for name in made}
    run = start()
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    result = json.loads(out)
    assert result["shards"]["observed"] == 60 - len(done)
    assert {job["name"] for job in result["jobs"] if job["cached"]} == made
    assert {name: (world.folder / "calibrated" / f"{name}.calib.json").stat().st_mtime_ns for name in made} == written
    assert done.items() <= shards().items()  # not one written again
    assert len(shards()) == 60
    for job in result["jobs"][::3]:  # each model and each method once
        name, _, method = job["name"].split(".")
        other = world.folder / "plain.calib.json"
        trtopt.calibrate(world.folder / f"{name}.onnx", other, data=world.arrays, method=method, cache=False, threads=1)
        assert measured(job["table"]) == measured(other)


def test_the_command_line_says_what_became_of_each(world: World) -> None:
    path = listed(world, LIST + '[[job]]\nmodel = "absent.onnx"\ndata = "arrays"\n')
    found = world.run("jobs", "run", path, "--workers", "1", "--json")
    assert found.status == 1
    content = json.loads(found.out)
    assert content["states"] == {"pending": 0, "running": 0, "done": 4, "failed": 1}
    assert (content["ok"], content["jobs"][4]["error"]["type"]) == (False, "UsageError")
    assert "model.arrays.auto: running" in found.err
    again = world.run("jobs", "run", path, "--workers", "1")
    assert again.status == 1
    has(
        again.out,
        "model.arrays.entropy",
        "done before",
        "absent.arrays.auto",
        "doesn't exist",
        "5 jobs: 4 done, 1 failed",
    )
    shown = world.run("jobs", "show", world.folder / "jobs.state", "--json")
    assert shown.status == 0
    by_name = {job["name"]: job for job in json.loads(shown.out)["jobs"]}
    assert by_name["model.photos.auto"]["digest"] == content["jobs"][2]["digest"]
    has(world.run("jobs", "show", world.folder / "jobs.state").out, "absent.arrays.auto", "failed")
    assert world.run("jobs", "show", path).out == world.run("jobs", "show", world.folder / "jobs.state").out


def test_bad_requests_are_refused_before_any_work(world: World) -> None:
    path = listed(world)
    for option in ("--workers", "--threads", "--shard"):
        has(world.refused("jobs", "run", path, option, "0"), f"{option} is 0", "at least 1")
    has(world.refused("jobs", "show", world.folder), "isn't the state folder", "trtopt jobs run")
    has(world.refused("jobs", "show", path), "no state folder", "jobs.state", f"trtopt jobs run {path}")
    assert not (world.folder / "jobs.state").exists()
    with pytest.raises(OutputError, match="`state=`"):
        trtopt.run_jobs(path, state=world.model / "state")
    with runner.State.locked(world.folder / "held"), pytest.raises(UsageError, match="another run"):
        trtopt.run_jobs(path, state=world.folder / "held")


def test_a_table_that_cant_be_written_says_what_to_change_in_the_list(world: World) -> None:
    text = on("arrays").replace('["auto", "entropy"]', '"auto"')
    (world.folder / "calibrated" / "model.arrays.auto.calib.json" / "in the way").mkdir(parents=True)
    (job,) = trtopt.run_jobs(listed(world, text), workers=1).jobs
    assert job.error is not None and job.error["type"] == "OutputError"
    has(job.error["message"], "can't write", "change output in the list", "`state=`")
    assert "`output=`" not in job.error["message"]


def test_too_many_threads_are_told(world: World) -> None:
    told = Told()
    assert trtopt.run_jobs(listed(world), workers=1, threads=1000, reporter=told).ok
    assert any("1 workers with 1000 threads each share" in line for line in told.lines)


def test_shards_of_other_versions_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "versions", lambda engine: {**work.versions(engine), "onnxruntime": "1.0"})
    result = trtopt.run_jobs(listed(world), workers=1)
    assert {(job.error or {}).get("type") for job in result.jobs} == {"CalibrationError"}
    has((result.jobs[0].error or {})["message"], "'onnxruntime': '1.0'", "install the same versions")


def test_the_list_in_the_documentation_runs(world: World) -> None:
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    example, _ = re.findall(r"```toml\n(.*?)```", text, re.S)
    commands, _ = re.findall(r"```bash\n(.*?)```", text, re.S)
    zoo = world.folder / "zoo"
    zoo.mkdir()
    onnx.save(net(), zoo / "small.onnx")
    onnx.save(fixed_batch(2), zoo / "pairs.onnx")
    world.arrays.rename(world.folder / "crops.npz")
    listed(world, example)
    assert commands.count("trtopt jobs ") == 3
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = commands.replace("trtopt jobs", f"{shlex.quote(sys.executable)} -m trtopt jobs")
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=world.folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    jobs = json.loads(line)["jobs"]
    assert [job["name"] for job in jobs] == [
        f"{model}.{data}.{method}"
        for model in ("pairs", "small")
        for data in ("photos", "crops")
        for method in ("auto", "entropy")
    ] + ["head-in-fp32.photos.auto"]
    assert all(job["cached"] for job in jobs)
    assert all((world.folder / "tables" / f"{job['name']}.calib.json").is_file() for job in jobs)
