"""A Ray cluster on this machine. Its tables are those of `calibrate`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_runner import SETS, listed, measured, plain
from world import World

import trtopt
from trtopt.core.errors import BackendError, MissingDependency, UsageError, WorkerDied
from trtopt.core.version import to_install
from trtopt.jobs import cluster as module, runner
from trtopt.jobs.cluster import Cluster

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINES = """
[data.arrays]
data = "data.npz"
[[job]]
kind = "build"
model = ["model.onnx", "absent.onnx"]
precision = "int8"
data = "arrays"
target = "sm89"
resource = "accelerator_type:H200"
backend = "rtx"
"""


def mine() -> None:
    return None


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray", reason="Ray isn't installed: pip install 'trtopt[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        found.init(
            address="local",
            num_cpus=2,
            num_gpus=2,  # Ray only counts them
            resources={"accelerator_type:H200": 1},
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        yield found
        found.shutdown()


def test_tables_are_those_of_calibrate_and_engines_are_built(
    rtx: None, ray: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SMALLEST", 1)
    result = trtopt.run_jobs(listed(world, ENGINES), ray="auto")
    by_name = {job.name: job for job in result.jobs}
    table, engine = by_name["model.arrays.auto"], by_name["model.int8.sm89.H200"]
    assert (table.state, table.shards) == ("done", 2), result.jobs
    assert measured(table.output) == plain(world, world.model, "arrays")
    assert (engine.state, engine.targets, engine.resource) == ("done", ("sm89",), "accelerator_type:H200"), result.jobs
    assert Path(engine.output).is_file() and engine.precision_summary.endswith("INT8")
    failed = by_name["absent.arrays.auto"].error  # errors keep their type
    assert failed is not None and (failed["type"], "doesn't exist" in failed["message"]) == ("UsageError", True)
    assert ray.is_initialized()  # the caller's cluster stays
    local = ENGINES.replace('resource = "accelerator_type:H200"', "").replace(', "absent.onnx"', "")
    assert next(iter(trtopt.run_jobs(listed(world, local), workers=1).jobs)).cached  # known without Ray


def test_what_became_of_a_worker_is_told(ray: Any, tmp_path: Path) -> None:
    cluster = Cluster("auto", 1, tmp_path)
    with pytest.raises(ray.exceptions.RayError) as lost:
        ray.get(ray.remote(max_retries=0)(lambda: os._exit(1)).remote())
    assert isinstance(cluster._translated(lost.value), WorkerDied)
    with pytest.raises(BackendError) as raised:  # a module of ours that workers don't have
        cluster.submit(mine).result(60)
    assert to_install("ort", "ray") in str(raised.value)
    with pytest.raises(BackendError, match=r"doesn't see .*absent: every node needs"):
        Cluster("auto", 1, tmp_path / "absent").submit(os.getpid).result(60)


def test_what_the_cluster_lacks_is_told_before_any_work(
    ray: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match="has 2 CPUs; a worker with `threads=64`"):
        trtopt.run_jobs(listed(world, ENGINES), threads=64, ray="auto")
    with pytest.raises(BackendError, match=r"resource 'accelerator_type:L4'; there is .*accelerator_type:H200"):
        trtopt.run_jobs(listed(world, ENGINES.replace("H200", "L4")), ray="auto")
    with pytest.raises(UsageError, match=r"model.int8.sm89.H200 is to be built on a Ray node.*`ray='auto'`"):
        trtopt.run_jobs(listed(world, ENGINES), workers=1)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    calibrations = 'device = "cuda"\n' + SETS["arrays"] + '[[job]]\nmodel = "model.onnx"\ndata = "arrays"\n'
    engines = ENGINES.replace('"rtx"', '"tensorrt"').replace('target = "sm89"', "")
    for text in (calibrations, engines.replace('resource = "accelerator_type:H200"', "")):
        with pytest.raises(BackendError, match="the Ray cluster has no GPU"):
            trtopt.run_jobs(listed(world, text), ray="auto")
    assert not (world.folder / "engines").exists()


def test_a_cluster_that_isnt_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            Cluster(address, 1, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is handler  # Ray takes it
    monkeypatch.setenv("RAY_ADDRESS", address)
    for typed in (address, "auto"):  # Ray itself tries for many minutes
        with pytest.raises(BackendError, match=r"can't be reached.*refused.*ray start --head"):
            Cluster(typed, 1, tmp_path)

    def missing(name: str, extra: str, purpose: str) -> None:
        raise MissingDependency(f"{purpose} needs {name}: {to_install(extra)}")

    monkeypatch.setattr(module, "require", missing)
    with pytest.raises(MissingDependency, match="`ray=` needs ray: pip install 'ray"):
        Cluster("auto", 1, tmp_path)


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
    assert "jobs.toml isn't run" in world.run("jobs", "run", world.folder / "jobs.toml", *typed).err
    assert asked == [address]
