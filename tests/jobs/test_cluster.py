"""A Ray cluster on this machine. Its shards' tables are those of `calibrate`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_runner import LIST, fixed_batch, listed, measured, on, plain
from world import World, samples

import trtopt
from trtopt.core.errors import BackendError, CalibrationError, DeviceError, MissingDependency, UsageError, WorkerDied
from trtopt.core.version import to_install
from trtopt.jobs import cluster as module
from trtopt.jobs.cluster import Cluster
from trtopt.jobs.joblist import load_jobs
from trtopt.jobs.state import State
from trtopt.jobs.work import open_model, open_samples

ROOT = Path(__file__).resolve().parent.parent.parent


def mine() -> None:
    return None


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray", reason="Ray isn't installed: pip install 'trtopt[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        found.init(
            address="local",
            num_cpus=2,
            num_gpus=2,  # Ray only counts them
            resources={"accelerator_type:H200": 1, "edge": 1},
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OPENCV_FOR_THREADS_NUM": "1"}},
        )
        yield found
        found.shutdown()


@pytest.mark.parametrize(("shard", "observed"), [(40, 2), (10, 5)])
def test_tables_are_those_of_calibrate_for_any_number_of_shards(
    ray: Any, world: World, shard: int, observed: int
) -> None:
    text = LIST.replace('["auto", "entropy"]', '"auto"')
    result = trtopt.run_jobs(listed(world, text), shard=shard, workers=1, ray="auto")
    assert result.ok, result.jobs
    assert result.observed == observed
    arrays, photos = (measured(job.output) for job in result.jobs)
    assert arrays == plain(world, data=world.arrays)
    assert photos == plain(world, images=world.photos, preprocess={"size": [32, 32], "scale": 0.00392156862745098})
    assert ray.is_initialized()  # the caller's cluster stays


def test_a_run_goes_on_with_or_without_ray(ray: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(fixed_batch(4), world.model)
    text = listed(world, on("arrays"))
    taken: list[str] = []
    save = State.save_shard

    def interrupting(self: Any, pass_key: str, shard: str, content: Any) -> None:
        save(self, pass_key, shard, content)
        taken.append(shard)
        if len(taken) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(State, "save_shard", interrupting)
        with pytest.raises(KeyboardInterrupt):
            trtopt.run_jobs(text, shard=8, workers=1, ray="auto")
    result = trtopt.run_jobs(text, workers=1)
    assert (result.reused, result.observed) == (2, 3)
    assert measured(result.jobs[0].output) == plain(world, data=world.arrays)


def test_errors_keep_their_type_and_a_lost_worker_is_told(ray: Any, world: World, tmp_path: Path) -> None:
    values = samples(8)
    values[5] = 3e38
    np.savez(tmp_path / "hot.npz", x=values)
    text = f'[data.hot]\ndata = "{tmp_path / "hot.npz"}"\n[[job]]\nmodel = "model.onnx"\ndata = "hot"\n'
    (job,) = trtopt.run_jobs(listed(world, text), workers=1, ray="auto").jobs
    assert job.error is not None
    assert job.error["type"] == "CalibrationError"
    assert "isn't finite" in job.error["message"]
    engine = Cluster("auto", 1)
    with pytest.raises(ray.exceptions.RayError) as lost:
        ray.get(ray.remote(max_retries=0)(lambda: os._exit(1)).remote())
    assert isinstance(engine._ours(lost.value), WorkerDied)
    with pytest.raises(RuntimeError) as stranger:  # a module of ours that workers don't have
        ray.get(ray.remote(mine).remote())
    told = engine._ours(stranger.value)
    assert isinstance(told, BackendError)
    assert to_install("ort", "ray") in str(told)


def test_samples_are_staged_on_the_cluster_and_models_sent_once(ray: Any, world: World) -> None:
    (arrays, photos) = (job.data for job in load_jobs(listed(world))[::2])
    model = open_model(world.model, (), world.folder / "folded")
    engine = Cluster("auto", 1)
    assert engine.slots == 4
    for data in (arrays, photos):
        opened = open_samples(data, model.inputs, 1, world.folder / "arrays")
        source = engine.stage(opened.samples.part(1, 3)).result(60)
        found = engine.observe(model, source, 1, 2).result(120)
        assert found["samples"] == 2
        engine.release(source)
    assert len(engine._models) == 1
    with pytest.raises(CalibrationError, match="the data changed"):
        engine.observe(model, engine.stage(opened.samples.part(0, 2)).result(60), 0, 3).result(120)
    engine.close()


def test_each_shard_takes_a_gpu(ray: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (data, *_) = (job.data for job in load_jobs(listed(world)))
    model = open_model(world.model, (), world.folder / "folded")
    engine = Cluster("auto", 1, "cpu")  # there is no other device here
    assert engine.slots == 4
    source = engine.stage(open_samples(data, model.inputs, 1, world.folder / "arrays").samples.part(0, 4)).result(60)
    found = engine.observe(model, source, 0, 4).result(120)
    assert found["samples"] == 4
    engine.close()
    assert Cluster("auto", 1).identity() is None
    with pytest.raises(DeviceError, match="CUDAExecutionProvider"):  # as a worker found
        Cluster("auto", 1, "cuda").identity()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(BackendError, match="the Ray cluster has no GPU"):
        trtopt.run_jobs(listed(world, 'device = "cuda"\n' + LIST), workers=1, threads=1, ray="auto")


def test_too_many_threads_for_the_cluster_are_refused(ray: Any, world: World) -> None:
    with pytest.raises(BackendError, match="has 2 CPUs; a worker with `threads=64`"):
        trtopt.run_jobs(listed(world), workers=1, threads=64, ray="auto")


def test_a_cluster_that_isnt_there_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def is_initialized(self) -> bool:
            return False

        def init(self, **_: Any) -> None:
            signal.signal(signal.SIGTERM, lambda *_: None)
            raise ConnectionError("it is no Ray")

    monkeypatch.setattr(module, "require", lambda *_: Absent())
    handler = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BackendError, match=rf"`ray='{address}'`: .*it is no Ray.*ray start --head"):
            trtopt.run_jobs(listed(world), workers=1, ray=address)
    assert signal.getsignal(signal.SIGTERM) is handler  # Ray takes it
    refused = pytest.raises(BackendError, match=r"can't be reached.*refused.*ray start --head")
    with refused:  # Ray itself tries for many minutes
        trtopt.run_jobs(listed(world), workers=1, ray=address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with refused:
        trtopt.run_jobs(listed(world), workers=1, ray="auto")

    def missing(name: str, extra: str, purpose: str) -> None:
        raise MissingDependency(f"{purpose} needs {name}: {to_install(extra)}")

    monkeypatch.setattr(module, "require", missing)
    with pytest.raises(MissingDependency, match="`ray=` needs ray: pip install 'ray"):
        trtopt.run_jobs(listed(world), workers=1, ray="auto")


@pytest.mark.parametrize(
    ("typed", "address"),
    [(["--ray"], "auto"), (["--ray", "--workers", "1"], "auto"), (["--ray", "host:1"], "host:1"), ([], None)],
)
def test_the_address_may_be_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch, typed: list[str], address: str | None
) -> None:
    asked: list[str | None] = []

    def noted(jobs: str, *, ray: str | None, **_: Any) -> Any:
        asked.append(ray)
        raise BackendError(f"{Path(jobs).name} isn't run")

    monkeypatch.setattr(trtopt, "run_jobs", noted, raising=False)
    assert "jobs.toml isn't run" in world.run("jobs", "run", listed(world), *typed).err
    assert asked == [address]


ENGINES = """
[data.arrays]
data = "data.npz"
[[job]]
kind = "build"
model = "model.onnx"
precision = ["fp16", "int8"]
data = "arrays"
target = "sm89"
resource = ["accelerator_type:H200", "edge"]
backend = "rtx"
"""


def test_engines_are_built_where_ray_has_what_they_need(rtx: None, ray: Any, world: World) -> None:
    path = listed(world, ENGINES)
    result = trtopt.run_jobs(path, workers=1, ray="auto")
    assert result.ok, result.jobs
    engines = [job for job in result.jobs if job.kind == "build"]
    assert len(result.jobs) == 5  # with the table
    assert [job.name for job in engines] == [
        f"model.{precision}.sm89.{kind}" for precision in ("fp16", "int8") for kind in ("H200", "edge")
    ]
    for job in engines:
        manifest = trtopt.inspect(job.output).manifest
        assert manifest is not None and manifest.source["path"] == str(world.model)
        assert (job.resource.rpartition(":")[2], job.targets) == (job.name.rpartition(".")[2], ("sm89",))
    before = {job.output: Path(job.output).stat().st_mtime_ns for job in engines}
    again = trtopt.run_jobs(path, workers=1, ray="auto")
    assert all(job.cached for job in again.jobs)
    # What Ray built is known without it, by its content.
    local = listed(
        world,
        ENGINES.replace('resource = ["accelerator_type:H200", "edge"]', "").replace("[[job]]", "[[job]]\nname = 'm'"),
    )
    for engine in engines:
        name = Path(engine.output).name.replace("model.", "m.").replace(f".{engine.name.rpartition('.')[2]}.", ".")
        for end in ("", ".json"):
            Path(engine.output + end).with_name(name + end).write_bytes(Path(engine.output + end).read_bytes())
    assert [job.cached for job in trtopt.run_jobs(local, workers=1).jobs if job.kind == "build"] == [True, True]
    assert {path: Path(path).stat().st_mtime_ns for path in before} == before


def test_samples_travel_to_builds_that_judge_by_them(rtx: None, ray: Any, world: World) -> None:
    text = """
        [data.photos]
        images = "photos"
        preprocess = { size = [32, 32], scale = 0.00392156862745098 }
        [[job]]
        kind = "build"
        model = ["model.onnx", "absent.onnx"]
        precision = "int8"
        data = "photos"
        min_snr = 20
        target = "sm89"
        backend = "rtx"
    """
    result = {job.name: job for job in trtopt.run_jobs(listed(world, text), workers=1, ray="auto").jobs}
    done, failed = result["model.int8.sm89"], result["absent.int8.sm89"]
    assert (done.state, done.precision_summary[-4:]) == ("done", "INT8"), done
    assert failed.error is not None and "its table wasn't made" in failed.error["message"]


def test_what_the_cluster_lacks_is_told_before_any_work(
    ray: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = listed(world, ENGINES.replace("H200", "L4"))
    with pytest.raises(BackendError, match=r"resource 'accelerator_type:L4'; there is .*accelerator_type:H200, edge"):
        trtopt.run_jobs(path, workers=1, ray="auto")
    with pytest.raises(UsageError, match=r"model.fp16.sm89.L4 is to be built on a Ray node.*`ray='auto'`"):
        trtopt.run_jobs(path, workers=1)
    for option in ('timing_cache = "t.cache"', "device = 1"):
        plain = ENGINES.replace('resource = ["accelerator_type:H200", "edge"]', option)
        with pytest.raises(UsageError, match=f"{option.split()[0]} .*`ray=`"):
            trtopt.run_jobs(listed(world, plain), workers=1, ray="auto")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "edge": 1.0})
    text = ENGINES.replace('["accelerator_type:H200", "edge"]', '"edge"').replace('"rtx"', '"tensorrt"')
    with pytest.raises(BackendError, match="is built on a GPU, and the Ray cluster has none"):
        trtopt.run_jobs(listed(world, text.replace('target = "sm89"', "")), workers=1, ray="auto")
    assert not (world.folder / "engines").exists()
