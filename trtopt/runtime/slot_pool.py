"""A FIFO pool of slots."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from trtopt.core.errors import Busy, DeviceError
from trtopt.core.values import check_timeout

T = TypeVar("T")
_LOOK = 1.0  # seconds between looks for what a finalizer gave back
_PATIENCE = 60  # looks of `close` though nothing comes back: an interrupt at a wrong moment lost it
CLOSED = "this session is closed; open the engine again"


class _Waiter(Generic[T]):
    """A place in the queue. `ready` is released when `item` is there or the end has come."""

    def __init__(self, group: int | None) -> None:
        self.group = group
        self.item: T | None = None
        self.ready = threading.Lock()
        self.ready.acquire()


class SlotPool(Generic[T]):
    """A pool of items in groups, as slots on one GPU; each group has `each` at the most, made when all there are are taken.

    Items go straight from who gives one back to who has waited longest, so nobody is overtaken. Whoever needs one gets it from
    the group that has most free, so that none is idle while another is busy.

    Args:
        makes: for each group what makes an item of it.
        instead: what else than calling less often helps who waits too long.
    """

    def __init__(self, makes: Sequence[Callable[[], T]], each: int, instead: str = "") -> None:
        self._makes, self._each, self._instead = makes, each, instead
        self.most = each * len(makes)
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._counts = [0] * len(makes)  # of the items that were made
        self._free: list[list[T]] = [[] for _ in makes]
        self._homes: dict[T, list[T]] = {}  # item → the list of these that it comes back to
        self._waiting: deque[_Waiter[T]] = deque()
        self._dropped: deque[T] = deque()
        self._closed = False
        self.waits = 0  # askers for whom nothing was free at once

    def take(self, group: int | None = None, timeout: float | None = None) -> T:
        """Return an item for the caller alone, of that group or any; wait for it at most `timeout` seconds, then raise Busy."""
        if timeout is not None:
            check_timeout(timeout)
        waiter: _Waiter[T] | None = None
        with self._lock:
            if self._closed:
                raise DeviceError(CLOSED)
            if self._dropped:
                self._serve()
            if not self._waiting and (item := self._find_free(group)) is not None:
                return item
            number = min(range(len(self._counts)), key=self._counts.__getitem__) if group is None else group
            if self._counts[number] < self._each:
                self._counts[number] += 1
            else:
                waiter = _Waiter(group)
                self._waiting.append(waiter)
                self.waits += 1
                self._serve()
        return self._made(number) if waiter is None else self._wait(waiter, timeout)

    def _made(self, number: int) -> T:
        try:
            item = self._makes[number]()
        except BaseException:
            with self._lock:
                self._counts[number] -= 1
                self._returned.notify_all()
            raise
        self._homes[item] = self._free[number]
        return item

    def _wait(self, waiter: _Waiter[T], timeout: float | None) -> T:
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not waiter.ready.acquire(timeout=max(0.0, min(_LOOK, end - time.monotonic()))):
                with self._lock:
                    self._serve()
                    if waiter.item is None and time.monotonic() >= end:
                        raise Busy(
                            f"nothing came free in {timeout:.3g} s: all {self.most} are in use and "
                            f"{len(self._waiting) - 1} calls wait; call less often, or {self._instead}"
                        )
        except BaseException:
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                elif waiter.item is not None:  # it came meanwhile
                    self._homes[waiter.item].append(waiter.item)
                self._serve()
            raise
        if waiter.item is None:
            raise DeviceError(CLOSED)
        return waiter.item

    def give(self, item: T) -> None:
        """Give an item back."""
        with self._lock:
            self._homes[item].append(item)
            if self._waiting or self._closed:
                self._serve()
                self._returned.notify_all()

    def drop(self, item: T) -> None:
        """Give an item back without a lock, as the garbage collector has to: it may call in a thread that has it."""
        self._dropped.append(item)

    def all(self) -> list[T]:
        """Return those that were made, free or not."""
        return list(self._homes)

    def close(self, finish: bool = True) -> list[T]:
        """Hand out no more, wait until every item is back, and return them all. Those who wait already are served, with
        `finish`; else they get an error."""
        with self._lock:
            self._closed, patience = True, _PATIENCE
            self._serve()
            while sum(map(len, self._free)) < sum(self._counts) or self._waiting:
                while self._waiting and not (finish and patience):
                    self._waiting.popleft().ready.release()
                if not patience:
                    break
                patience = _PATIENCE if self._returned.wait(_LOOK) else patience - 1
                self._serve()
            items = [item for free in self._free for item in free]
            self._free, self._homes, self._counts = [[]], {}, [0]
        return items

    # All of these with the lock held.

    def _serve(self) -> None:
        """Match free items with those who wait, in their order."""
        while self._dropped:
            item = self._dropped.popleft()
            self._homes[item].append(item)
        for waiter in tuple(self._waiting):
            if not any(self._free):
                break
            waiter.item = self._find_free(waiter.group)
            if waiter.item is not None:
                self._waiting.remove(waiter)
                waiter.ready.release()

    def _find_free(self, group: int | None) -> T | None:
        """Take a free item away, the one that was used last: it has the warmest memory."""
        if group is not None:
            free = self._free[group]
        else:
            free = self._free[0] if len(self._free) == 1 else max(self._free, key=len)
        return free.pop() if free else None
