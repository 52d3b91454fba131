"""Runs coroutines that wait for calls in workers: calls start as room and memory allow, and results come one at a time."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from trtopt.core.errors import WorkerDied
from trtopt.core.host import free_memory

FINISH, OBSERVE, STAGE, OPEN, BUILD = range(5)  # what goes first: results, then what is decoded, then more to do
_BASE = 300 << 20  # bytes: Python, NumPy, ONNX Runtime
_THREAD = 64 << 20  # bytes: one sample's tensors
_SHARE = 0.9  # of the free memory may be used


class Memory:
    """How much the calls under way may take together; what a model needs is estimated first, then measured."""

    def __init__(self, free: Callable[[], int | None] = free_memory) -> None:
        nbytes = free()
        self.limit = None if nbytes is None else int(nbytes * _SHARE)
        self.in_use = 0
        self._measured: dict[str, int] = {}

    def need(self, key: str, nbytes: int, threads: int = 1, unmeasured: int = 0) -> int:
        """Bytes for a process that works on files of `nbytes`; `unmeasured`: further ones, while it wasn't measured."""
        return self._measured.get(key) or _BASE + threads * _THREAD + 3 * nbytes + unmeasured

    def measured(self, key: str, peak: int) -> None:
        self._measured[key] = max(peak, self._measured.get(key, 0))

    def fits(self, need: int) -> bool:
        """Always for the first call: one must run, and may fail by itself."""
        return self.limit is None or self.in_use == 0 or self.in_use + need <= self.limit


@dataclass(frozen=True)
class Call:
    """To be awaited: one call in a worker.

    Attributes:
        start: makes it.
        need: bytes of memory that it takes, asked for when it is about to start.
    """

    priority: int
    start: Callable[[], Future[Any]]
    need: Callable[[], int]

    def __await__(self) -> Generator[Call, Any, Any]:
        return (yield self)


async def result_of(call: Call) -> Any:
    """What the call gives, or its error. A worker that is lost is replaced once: another's memory may have killed it."""
    try:
        return await call
    except WorkerDied:
        return await call


Steps = Coroutine[Call, Any, None]


class Loop:
    """`slots` calls at a time at most."""

    def __init__(self, slots: int, memory: Memory) -> None:
        self.slots, self.memory = slots, memory
        self._ready: list[tuple[int, int, Call, Steps]] = []  # the number keeps calls of one priority in order
        self._numbers = itertools.count()

    def add(self, steps: Steps) -> None:
        """Run a coroutine up to its first call; `run` goes on with it. It handles its calls' errors itself."""
        self._advance(partial(steps.send, None), steps)

    def run(self) -> None:
        """Until no call is left."""
        under_way: dict[Future[Any], tuple[Steps, int]] = {}
        while self._ready or under_way:
            while self._ready and len(under_way) < self.slots:
                _, _, call, steps = self._ready[0]
                need = call.need()
                if not self.memory.fits(need):
                    break
                heapq.heappop(self._ready)
                try:
                    future = call.start()
                except Exception as error:
                    self._advance(partial(steps.throw, error), steps)
                else:
                    self.memory.in_use += need
                    under_way[future] = steps, need
            if under_way:
                # With a limit, so that Ctrl-C is noticed on every system.
                for future in wait(under_way, timeout=1, return_when=FIRST_COMPLETED).done:
                    steps, need = under_way.pop(future)
                    self.memory.in_use -= need
                    if failure := future.exception():
                        self._advance(partial(steps.throw, failure), steps)
                    else:
                        self._advance(partial(steps.send, future.result()), steps)

    def _advance(self, go_on: Callable[[], Call], steps: Steps) -> None:
        with contextlib.suppress(StopIteration):
            call = go_on()
            heapq.heappush(self._ready, (call.priority, next(self._numbers), call, steps))
