"""Processes of this machine that each run one call at a time: one that dies fails its own call alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from trtopt.core.errors import WorkerDied
from trtopt.core.temporary import remove_leftovers

_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Workers:
    """A process for each of `places`, which say what its environment has besides, such as the GPU that is its own.

    Args:
        threads: of the libraries in each.

    Attributes:
        slots: calls that run at a time; threads: that each may have.
        has_gpus: some calls can have a GPU.
    """

    def __init__(self, places: Sequence[Mapping[str, str]], threads: int = 1) -> None:
        self.slots, self.threads, self.has_gpus = len(places), threads, _VISIBLE in places[0]
        self._workers = [_Worker({**dict.fromkeys(_LIMITS, str(threads)), **place}) for place in places]
        self._free = list(self._workers)  # as many as threads: one is always there
        self._threads = ThreadPoolExecutor(self.slots, "trtopt-jobs")

    def submit(self, function: Callable[..., Any], *args: Any, gpu: bool = False, resource: str = "") -> Future[Any]:
        """Call a function of a module. The Future gives its result, its exception, or WorkerDied.

        Args:
            gpu, resource: of the Ray node that is to run it (`trtopt.jobs.cluster`); unused here.
        """
        return self._threads.submit(self._call, function, args)

    def close(self) -> None:
        """End the processes at once, whatever they do."""
        for worker in self._workers:
            worker.closed = True
            worker.end()
        self._threads.shutdown(cancel_futures=True)
        remove_leftovers(tempfile.gettempdir())

    def _call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        worker = self._free.pop(0)
        try:
            try:
                return worker(function, args)
            except WorkerDied:  # once more: the memory that another took may have ended it
                return worker(function, args)
        finally:
            self._free.append(worker)


class _Worker:
    """A pool of one process, started when it is needed, unless the run is being stopped (`closed`)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment, self.closed = environment, False
        self._executor: ProcessPoolExecutor | None = None
        self._process = 0

    def __call__(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        if (executor := self._executor) is None:
            context = multiprocessing.get_context("spawn")
            executor = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(self._environment, Path.cwd()))
            try:
                self._process = executor.submit(os.getpid).result()
            except BrokenProcessPool:
                raise WorkerDied(
                    "its process can't start, and what it said is above; a script that calls `run_jobs` does so under "
                    "if __name__ == '__main__':"
                ) from None
            self._executor = executor
        if self.closed:  # meanwhile
            self.end()
            raise WorkerDied("the run is being stopped")
        try:
            return executor.submit(function, *args).result()
        except BrokenProcessPool:
            self.end()
            raise WorkerDied(
                "its process was killed or crashed, and what it said is above; the system kills where memory runs out: try "
                "fewer `workers=`"
            ) from None

    def end(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            executor.shutdown()


def _begin(environment: Mapping[str, str], folder: Path) -> None:
    """Set a new process up, before libraries are loaded."""
    os.environ.update(environment)
    os.chdir(folder)  # where the parent is now, not where it was when it began
    os.dup2(2, 1)  # what libraries print isn't the caller's output
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the run's own to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process, whatever it is at, when the run has ended, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def gpu_places(names: Sequence[str]) -> list[dict[str, str]]:
    """For each of these GPUs the environment in which a process sees it alone; of several kinds, for the first one."""
    count = len(names) if len(set(names)) == 1 else 1
    visible = [item.strip() for item in os.environ.get(_VISIBLE, "").split(",") if item.strip()]
    numbers = visible if len(visible) >= count else [str(number) for number in range(count)]
    return [{_VISIBLE: name} for name in numbers[:count]]
