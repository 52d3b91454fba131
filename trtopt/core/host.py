"""Resources that this process may use: cores and memory, containers' limits included; and work shared by threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from trtopt.core.files import whole

Item = TypeVar("Item")
Result = TypeVar("Result")

CGROUP = "/sys/fs/cgroup"


def cores() -> int:
    """CPUs that this process may use: its affinity, and its container's quota."""
    limit = quota()
    return visible_cores() if limit is None else min(visible_cores(), max(1, int(limit)))


def visible_cores() -> int:
    """CPUs that libraries count when they start threads: the affinity; they don't ask for a container's quota."""
    return len(os.sched_getaffinity(0))


def quota() -> float | None:
    """CPUs' worth of time that the container has; None: no limit."""
    words = _words(f"{CGROUP}/cpu.max")  # "200000 100000": microseconds in each period; "max …": no limit
    return int(words[0]) / int(words[1]) if len(words) == 2 and all(map(str.isdigit, words)) else None


def free_memory() -> int | None:
    """Bytes that can still be taken without swapping; None where the system doesn't say."""
    limits = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    limit, used = _words(f"{CGROUP}/memory.max"), _words(f"{CGROUP}/memory.current")
    if limit and used and limit[0].isdigit():
        cached = [int(line.split()[1]) for line in _lines(f"{CGROUP}/memory.stat") if line.startswith("file ")]
        limits.append(max(0, int(limit[0]) - int(used[0]) + sum(cached)))
    return min(limits, default=None)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int, name: str
) -> Iterator[Result]:
    """Yield what `work` makes of each item, in their order: in so many threads, at most `ahead` results before they are taken,
    which bounds memory. The first error is raised in its turn, and what hasn't begun by then isn't begun."""
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"trtopt-{name}")
    try:
        for item in items:
            if len(pending) >= ahead:
                yield pending.popleft().result()
            pending.append(pool.submit(work, item))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _lines(path: str) -> list[str]:
    try:
        return whole(path).decode("ascii", "replace").splitlines()
    except OSError:
        return []


def _words(path: str) -> list[str]:
    return " ".join(_lines(path)).split()
