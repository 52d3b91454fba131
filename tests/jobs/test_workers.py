"""Processes that each run one call at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from trtopt.core.errors import DataError, WorkerDied
from trtopt.core.host import cores, free_memory
from trtopt.jobs.workers import Workers, gpu_places


def double(value: int) -> int:
    print("this must not get between the caller's lines")
    return 2 * value


def environment(*names: str) -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, names))


def refuse(text: str) -> None:
    raise DataError(text)


def end(how: int) -> None:
    os.kill(os.getpid(), how)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with closing(Workers([{"PLACE": "0"}, {"PLACE": "1"}], threads=3)) as made:
        yield made


def test_calls_give_results_and_exceptions(workers: Workers, capfd: pytest.CaptureFixture[str]) -> None:
    answers = [workers.submit(double, value) for value in range(6)]
    assert [answer.result(60) for answer in answers] == [2 * value for value in range(6)]
    with pytest.raises(DataError, match="a bad file"):
        workers.submit(refuse, "a bad file").result(60)
    assert capfd.readouterr().out == ""


def test_each_has_its_place_and_its_threads(workers: Workers) -> None:
    found = {workers.submit(environment, "PLACE", "OMP_NUM_THREADS").result(60) for _ in range(4)}
    assert found == {("0", "3"), ("1", "3")}  # they take turns


def test_a_crash_ends_one_call_only(workers: Workers) -> None:
    other = workers.submit(time.sleep, 1.0)
    with pytest.raises(WorkerDied, match="killed or crashed"):
        workers.submit(end, signal.SIGKILL).result(60)
    assert other.result(60) is None
    assert [workers.submit(double, 1).result(60) for _ in range(2)] == [2, 2]


def test_closing_ends_calls_at_once() -> None:
    workers = Workers([{}])
    assert workers.submit(double, 1).result(60) == 2
    resting, waiting = workers.submit(time.sleep, 300), workers.submit(double, 1)
    while not resting.running():
        time.sleep(0.01)
    workers.close()
    assert isinstance(resting.exception(60), WorkerDied)
    assert waiting.cancelled()


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom trtopt.jobs.workers import Workers\nprint(Workers([{}]).submit(os.getpid).result())\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)
    assert "under if __name__ == '__main__':" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nfrom trtopt.jobs.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    workers = Workers([{}])\n"
        "    print(workers.submit(os.getpid).result(), flush=True)\n"
        "    workers.submit(time.sleep, 300).result()\n"
    )
    run = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    worker = int(run.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("names", "visible", "places"),
    [
        (["L4"], "", ["0"]),
        (["L4", "L4"], "", ["0", "1"]),
        (["L4", "T4"], "", ["0"]),
        (["L4", "L4"], "3,GPU-5", ["3", "GPU-5"]),
    ],
)
def test_each_worker_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch, names: list[str], visible: str, places: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_places(names) == [{"CUDA_VISIBLE_DEVICES": name} for name in places]


def test_the_machine_is_measured() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    free = free_memory()
    assert free is not None
    assert 1 << 20 < free < 1 << 50
