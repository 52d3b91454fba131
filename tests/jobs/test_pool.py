from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trtopt.core.errors import DataError, WorkerDied
from trtopt.core.host import cores, forget_peak, free_memory, peak_memory
from trtopt.jobs.pool import Pool

HERE = __name__
ROOT = Path(__file__).resolve().parent.parent.parent


def double(value: int) -> int:
    print("this must not get between the answers")
    return 2 * value


def environment(name: str) -> tuple[int, str | None]:
    return os.getpid(), os.environ.get(name)


def refuse(text: str) -> None:
    raise DataError(text)


def unpicklable() -> None:
    class Local(Exception):
        pass

    raise Local("what happened")


def end(how: int) -> None:
    os.kill(os.getpid(), how)


def rest(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(2, 1)
    yield made
    made.close()


def test_calls_give_results_and_exceptions(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    answers = [pool.submit(f"{HERE}:double", value) for value in range(20)]
    assert [answer.result(60) for answer in answers] == [2 * value for value in range(20)]
    with pytest.raises(DataError, match="a bad file"):
        pool.submit(f"{HERE}:refuse", "a bad file").result(60)
    with pytest.raises(RuntimeError, match="Local: what happened"):
        pool.submit(f"{HERE}:unpicklable").result(60)
    assert pool.submit(f"{HERE}:double", 4).result(60) == 8
    assert capfd.readouterr().out == ""


def test_large_arguments_travel(pool: Pool) -> None:
    array = np.arange(5_000_000)
    assert pool.submit("numpy:sum", array).result(60) == array.sum()


def test_libraries_are_limited_to_the_threads(pool: Pool) -> None:
    process, limit = pool.submit(f"{HERE}:environment", "OMP_NUM_THREADS").result(60)
    assert process != os.getpid()
    assert limit == "1"


def test_a_crash_ends_one_task_only(pool: Pool) -> None:
    other = pool.submit(f"{HERE}:rest", 1.0)
    with pytest.raises(WorkerDied, match="memory"):
        pool.submit(f"{HERE}:end", signal.SIGKILL).result(60)
    with pytest.raises(WorkerDied, match="SIGSEGV"):
        pool.submit(f"{HERE}:end", signal.SIGSEGV).result(60)
    assert pool.submit(f"{HERE}:double", 1).result(60) == 2
    other.result(60)


def test_closing_ends_workers_at_once() -> None:
    pool = Pool(1, 1)
    assert pool.submit(f"{HERE}:double", 1).result(60) == 2
    resting, waiting = pool.submit(f"{HERE}:rest", 300), pool.submit(f"{HERE}:double", 1)
    while not resting.running():
        time.sleep(0.01)
    pool.close()
    assert isinstance(resting.exception(60), WorkerDied)
    assert waiting.cancelled()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_workers_end_with_a_run_that_is_killed() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from trtopt.jobs.pool import Pool\n"
        "pool = Pool(1, 1)\n"
        "print(pool.submit('test_pool:environment', 'HOME').result()[0], flush=True)\n"
        "pool.submit('test_pool:rest', 300).result()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_the_machine_is_measured() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    free = free_memory()
    assert free is not None
    assert 1 << 20 < free < 1 << 50
    before = peak_memory()
    block = np.ones(1 << 27, np.uint8)
    assert peak_memory() >= before
    assert peak_memory() > block.nbytes
    del block
    forget_peak()
    assert peak_memory() < before + (1 << 27)
