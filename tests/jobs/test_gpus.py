"""A worker for each GPU. None is here: their number is a stand-in, and models run on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import place
import pytest
from test_runner import LIST, Told, listed, on
from world import World

import trtopt
from trtopt.core.errors import DeviceError, UsageError, WorkerDied
from trtopt.jobs import gpus, runner, work
from trtopt.jobs.engines import Local
from trtopt.jobs.gpus import VISIBLE, Gpus, find_gpus
from trtopt.jobs.joblist import load_jobs
from trtopt.jobs.pool import Pool

TWO = [{VISIBLE: "3"}, {VISIBLE: "GPU-5e"}]


def both(pool: Pool) -> set[str | None]:
    """What workers at work at the same time see: asked until each was."""
    found: set[str | None] = set()
    for _ in range(50):
        found |= {future.result() for future in [pool.submit(f"{place.__name__}:seen") for _ in range(4)]}
        if len(found) == 2:
            break
    return found


def test_each_worker_has_a_place_and_its_successor_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv(VISIBLE, "9")
    pool = Pool(2, 1, TWO)
    try:
        assert both(pool) == {"3", "GPU-5e"}
        for _ in range(3):
            with pytest.raises(WorkerDied):
                pool.submit(f"{place.__name__}:crash").result()
        assert both(pool) == {"3", "GPU-5e"}
    finally:
        pool.close()
    without = Pool(1, 1)
    try:
        assert without.submit(f"{place.__name__}:seen").result() == "9"
    finally:
        without.close()


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        (None, 3, ["0", "1", "2"]),
        ("", 1, ["0"]),
        ("2, 5", 2, ["2", "5"]),
        ("GPU-1a,MIG-2b", 2, ["GPU-1a", "MIG-2b"]),
        ("1,7", 1, ["1"]),  # CUDA stops at the first that isn't there
    ],
)
def test_places_are_among_those_that_the_environment_allows(
    given: str | None, names: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VISIBLE, given)
    assert Gpus(("H200",) * names, {}).places() == [{VISIBLE: item} for item in expected]


def test_gpus_of_different_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["H200", "H200"]
    monkeypatch.setattr(gpus, "require_gpu_provider", lambda: {"device": "H200"})
    monkeypatch.setattr(gpus, "probe", lambda: SimpleNamespace(devices=[SimpleNamespace(name=kind) for kind in kinds]))
    assert find_gpus() == Gpus(("H200", "H200"), {"device": "H200"})
    kinds[1] = "T4"
    with pytest.raises(DeviceError, match=f"0: H200, 1: T4.*{VISIBLE}"):
        find_gpus()


def test_shards_go_to_all_gpus_and_scales_are_those_of_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, calls = {"device": "stand-in"}, list[tuple[Any, str]]()
    monkeypatch.setattr(runner, "versions", lambda _: work.versions())  # as the workers have them
    submit = runner.Pool.submit

    def noted(self: Any, function: str, *arguments: Any) -> Any:
        calls.append((self, function.partition(":")[2]))
        return submit(self, function, *arguments)

    monkeypatch.setattr(runner.Pool, "submit", noted)
    text = 'device = "cuda"\n' + on("arrays").replace('["auto", "entropy"]', '"mse"')
    tables = []
    for count, shard in ((2, 8), (1, 40)):
        calls.clear()
        found = Gpus(("stand-in",) * count, identity, "cpu")
        monkeypatch.setattr(runner, "_asked", lambda _, found=found: found)
        options: dict[str, Any] = {"state": world.folder / f"{count}.state", "workers": 1, "threads": 1}
        result = trtopt.run_jobs(listed(world, text), shard=shard, **options)
        assert result.ok, result.jobs
        assert result.observed == 40 // shard
        (own,) = {pool for pool, name in calls if name == "observe_shard"}
        assert own.workers == count and own not in {pool for pool, name in calls if name != "observe_shard"}
        tables.append(trtopt.Table.load(result.jobs[0].output).to_json()["tensors"])
    assert tables[0] == tables[1]
    assert trtopt.run_jobs(listed(world, text), shard=40, **options).jobs[0].cached
    del tables, options["state"]
    listed(world, text.replace('device = "cuda"\n', ""))
    assert not trtopt.run_jobs(world.folder / "jobs.toml", state=world.folder / "1.state", **options).jobs[0].cached


def test_a_machine_without_a_gpu_says_so_before_any_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")
    told = Told()
    with pytest.raises(DeviceError, match=r"CUDAExecutionProvider"):
        trtopt.run_jobs(listed(world, 'device = "cuda"\n' + LIST), workers=1, reporter=told)
    assert not told.lines
    with pytest.raises(UsageError, match=r"device is 'tpu'; allowed: cpu, cuda"):
        load_jobs(listed(world, 'device = "tpu"\n' + LIST))


def test_workers_leave_the_gpus_to_builds(tmp_path: Path) -> None:
    pool, own = Pool(1, 1), Pool(1, 1)
    try:
        engine = Local(pool, 1, tmp_path, own, "cuda")
        worker = own.submit("os:getpid").result()
        engine.finish()
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
        Local(pool, 1, tmp_path).finish()  # on the CPU they go on
        assert pool.submit("os:getpid").result() != worker
    finally:
        pool.close()
