"""Hands tasks to workers as room and memory allow, and takes their results back, one at a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from trtopt.core.errors import WorkerDied
from trtopt.jobs.engines import Memory

FINISH, OBSERVE, STAGE, OPEN = range(4)  # what goes first: results, then what is decoded, then more to do


@dataclass(order=True)
class Task:
    """One call in a worker.

    Attributes:
        start: makes the call.
        done: takes its result; may add tasks. An error of its own counts as the task's.
        failed: takes its error.
        need: bytes of memory that it takes, asked for when it is about to start.
        skip: says that nobody needs it any more; asked then, too.
    """

    priority: int
    start: Callable[[], Future[Any]] = field(compare=False)
    done: Callable[[Any], None] = field(compare=False)
    failed: Callable[[Exception], None] = field(compare=False)
    need: Callable[[], int] = field(compare=False)
    skip: Callable[[], bool] = field(compare=False, default=lambda: False)
    tries: int = field(compare=False, default=2)
    taken: int = field(compare=False, default=0)


class Loop:
    """`slots` tasks at a time at most."""

    def __init__(self, slots: int, memory: Memory) -> None:
        self.slots, self.memory = slots, memory
        self._ready: list[tuple[Task, int]] = []  # the number keeps tasks of one priority in order
        self._numbers = itertools.count()

    def add(self, task: Task) -> None:
        heapq.heappush(self._ready, (task, next(self._numbers)))

    def run(self) -> None:
        """Until no task is left."""
        under_way: dict[Future[Any], Task] = {}
        while self._ready or under_way:
            while self._ready and len(under_way) < self.slots:
                task = self._ready[0][0]
                task.taken = task.need()
                if not self.memory.fits(task.taken):
                    break
                heapq.heappop(self._ready)
                if task.skip():
                    continue
                try:
                    future = task.start()
                except Exception as error:
                    task.failed(error)
                else:
                    self.memory.taken += task.taken
                    under_way[future] = task
            if under_way:
                # With a limit, so that Ctrl-C is noticed on every system.
                for future in wait(under_way, timeout=1, return_when=FIRST_COMPLETED).done:
                    task = under_way.pop(future)
                    self.memory.taken -= task.taken
                    self._take(task, future)

    def _take(self, task: Task, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, WorkerDied) and task.tries > 1:
            task.tries -= 1  # it may have been killed for the memory that another one took
            self.add(task)
        elif isinstance(error, Exception):
            task.failed(error)
        elif error is not None:
            raise error
        else:
            try:
                task.done(future.result())
            except Exception as wrong:  # what one task's result does wrong is no affair of the others
                task.failed(wrong)
