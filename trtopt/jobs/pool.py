"""Workers on this machine: processes of their own, so that a crash or a shortage of memory ends one task, not the run.

A worker is a fresh Python (not a fork, and not a copy of the caller's main module) that reads pickled calls from its standard
input. When the run ends, even by kill -9, that input closes, and the worker ends too.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from trtopt.core.errors import WorkerDied
from trtopt.core.host import import_path
from trtopt.core.temporary import remove_leftovers

_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Pool:
    """`workers` processes, each with libraries limited to `threads` threads.

    Functions are named as "module:function", and arguments and results are pickled.

    Args:
        places: what each worker's environment has besides, such as the GPU that is its own; None: nothing.
    """

    def __init__(self, workers: int, threads: int, places: Sequence[Mapping[str, str]] | None = None) -> None:
        self.workers, self._threads = workers, threads
        self._places: list[Mapping[str, str]] = list(places or [{}] * workers)[:workers]
        self._callers = ThreadPoolExecutor(workers, thread_name_prefix="trtopt-jobs")
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._all: set[_Worker] = set()
        self._closing, self._guard = False, threading.Lock()

    def submit(self, function: str, *args: Any) -> Future[Any]:
        """Call it in a worker; the Future gives its result, its own exception, or WorkerDied."""
        return self._callers.submit(self._call, function, args)

    def close(self) -> None:
        """End the workers at once, whatever they do."""
        with self._guard:
            self._closing = True
            for worker in self._all:
                worker.process.kill()
        self._callers.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.end()
        remove_leftovers(tempfile.gettempdir())  # of the workers

    def _call(self, function: str, args: tuple[Any, ...]) -> Any:
        worker = self._worker()
        try:
            done, value = worker.call(function, args)
        except BaseException:
            worker.end()
            with self._guard:
                self._all.discard(worker)
                self._places.append(worker.place)
            raise
        self._idle.put(worker)
        if not done:
            raise value
        return value

    def _worker(self) -> _Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        with self._guard:
            if self._closing:
                raise WorkerDied("the run is being stopped")
            worker = _Worker(self._threads, self._places[0])
            del self._places[0]
            self._all.add(worker)
        return worker


class _Worker:
    def __init__(self, threads: int, place: Mapping[str, str]) -> None:
        self.place = place
        environment = {**os.environ, **dict.fromkeys(_LIMITS, str(threads)), "OPENCV_FOR_THREADS_NUM": "1", **place}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trtopt.jobs.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | import_path(),
            start_new_session=True,  # Ctrl-C in a terminal is the run's own to handle
        )

    def call(self, function: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        assert self.process.stdin and self.process.stdout
        content = pickle.dumps((function, args), protocol=5)
        try:
            self.process.stdin.write(len(content).to_bytes(8, "little") + content)
            self.process.stdin.flush()
            answer = _message(self.process.stdout)
        except OSError:
            answer = None
        if answer is None:
            raise WorkerDied(_epitaph(self.process.wait()))
        done, value = pickle.loads(answer)  # from our own child
        return done, value

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


def _epitaph(status: int) -> str:
    if status == -signal.SIGKILL:
        return "its process was killed, as the system does where memory runs out: try fewer `workers=`"
    if status < 0:
        return f"its process crashed with {signal.Signals(-status).name}"
    return f"its process ended with status {status}; what it said is above"


def _message(stream: IO[bytes]) -> bytes | None:
    head = stream.read(8)
    if len(head) < 8:
        return None
    size = int.from_bytes(head, "little")
    content = stream.read(size)
    return content if len(content) == size else None


def _serve() -> None:
    """The worker's own loop."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        while (content := _message(sys.stdin.buffer)) is not None:
            calls.put(content)
        os._exit(0)  # the run has ended: so does this, whatever it is at

    threading.Thread(target=listen, daemon=True).start()
    while True:
        answer = _answer(*pickle.loads(calls.get()))
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


def _answer(function: str, args: tuple[Any, ...]) -> bytes:
    try:
        module, _, name = function.partition(":")
        called: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return pickle.dumps((True, called(*args)), protocol=5)
    except Exception as error:
        try:
            content = pickle.dumps((False, error), protocol=5)
            pickle.loads(content)
        except Exception:  # an exception that can't travel
            content = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")), protocol=5)
        return content


if __name__ == "__main__":
    from trtopt.jobs import pool  # under its own name, so that what it pickles is found again

    pool._serve()
