"""A pool of slots, handed out first come, first served."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from trtopt.core.errors import Busy, DeviceError
from trtopt.core.values import check_timeout

T = TypeVar("T")
_LOOK = 1.0  # seconds between looks for what a finalizer gave back, or a thread that ended has lost
CLOSED = "this session is closed; open the engine again"


class _Waiter(Generic[T]):
    """A place in the queue. `ready` is released when `item` is there or the end has come."""

    def __init__(self, accepts: Callable[[T], bool] | None) -> None:
        self.accepts, self.thread = accepts, threading.get_ident()
        self.item: T | None = None
        self.ready = threading.Lock()
        self.ready.acquire()


class SlotPool(Generic[T]):
    """A pool of `most` items at the most, made by `make` when all there are are taken.

    Items go straight from who gives one back to who has waited longest, so nobody is overtaken. A thread has one at a time:
    one that got lost, because an exception was thrown into it at the wrong moment, comes back when it asks again or has ended.

    Args:
        groups: items with the same number modulo this belong together, as slots on one GPU; whoever needs one gets it from the
            group that has most free, so that none is idle while another is busy.
        instead: what else than calling less often helps who waits too long.

    Attributes:
        waits: askers for whom nothing was free at once.
    """

    def __init__(self, make: Callable[[int], T], most: int, *, groups: int = 1, instead: str = "") -> None:
        self._make, self.most, self._instead = make, most, instead
        self._holders: dict[int, T] = {}  # thread → what it has
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._free: list[list[T]] = [[] for _ in range(groups)]
        self._homes: dict[T, list[T]] = {}  # item → the list of these that it comes back to
        self._waiting: deque[_Waiter[T]] = deque()
        self._dropped: deque[T] = deque()  # what was kept and isn't any more
        self._count = 0
        self._closed = False
        self.waits = 0

    def take(self, accepts: Callable[[T], bool] | None = None, timeout: float | None = None) -> T:
        """Return an item for the caller alone, one that `accepts` is true of; wait for it at most `timeout` seconds.

        Raises:
            Busy: none came free in time.
            UsageError: `timeout` is no time.
            DeviceError: `close` was called.
        """
        if timeout is not None:
            check_timeout(timeout)
        thread = threading.get_ident()
        waiter: _Waiter[T] | None = None
        with self._lock:
            if accepts is None:  # the common case, short: it stands between every call and its launch
                free = self._free[0] if len(self._free) == 1 else max(self._free, key=len)
                if free and not (self._waiting or self._closed or self._dropped) and thread not in self._holders:
                    return self._hand(free, -1, thread)
            if self._closed:
                raise DeviceError(CLOSED)
            self._reclaim(thread)
            if not self._waiting and (item := self._find_free(accepts, thread)) is not None:
                return item
            number = self._count
            if number < self.most:
                self._count += 1
            else:
                waiter = _Waiter(accepts)
                self._waiting.append(waiter)
                self.waits += 1
                self._serve()
        if waiter is not None:
            return self._wait(waiter, timeout)
        item = self._made(number)
        if accepts is None or accepts(item):
            return item
        self.give(item)
        return self.take(accepts, timeout)

    def _made(self, number: int) -> T:
        try:
            item = self._make(number)
        except BaseException:
            with self._lock:
                self._count -= 1
                self._returned.notify_all()
            raise
        with self._lock:
            self._homes[item] = self._free[number % len(self._free)]
            self._holders[threading.get_ident()] = item
        return item

    def _wait(self, waiter: _Waiter[T], timeout: float | None) -> T:
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not waiter.ready.acquire(
                timeout=_LOOK if end is None else max(0.0, min(_LOOK, end - time.monotonic()))
            ):
                with self._lock:
                    self._reclaim()
                    self._serve()
                    if waiter.item is None and end is not None and time.monotonic() >= end:
                        others = len(self._waiting) - 1
                        raise Busy(
                            f"nothing came free in {timeout:.3g} s: all {self.most} are in use and {others} calls wait; call "
                            f"less often, or {self._instead}"
                        )
        except BaseException:
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                self._reclaim(waiter.thread)  # it may have come meanwhile
                self._serve()
            raise
        if waiter.item is None:
            raise DeviceError(CLOSED)
        return waiter.item

    def keep(self, item: T) -> Callable[[], None]:
        """Hold on to the item that this thread took, whatever the thread does, until anybody calls the result.

        That takes no lock: the garbage collector may call it, in a thread that has it.
        """
        with self._lock:
            del self._holders[threading.get_ident()]
        return functools.partial(self._dropped.append, item)

    def give(self, item: T) -> None:
        """Give an item back."""
        with self._lock:
            if self._holders.pop(threading.get_ident(), None) is not item:
                raise RuntimeError("given back by a thread that didn't take it")
            self._homes[item].append(item)
            if self._waiting or self._closed:
                self._serve()
                self._returned.notify_all()

    def all(self) -> list[T]:
        """Return those that were made, free or not."""
        return list(self._homes)

    def close(self, finish: bool = True) -> list[T]:
        """Hand out no more, wait until every item is back, and return them all.

        Args:
            finish: serve those who wait already; else they get an error.
        """
        with self._lock:
            self._closed = True
            while self._waiting and not finish:
                self._waiting.popleft().ready.release()
            self._reclaim(threading.get_ident())  # who closes isn't in a call
            self._serve()
            while sum(map(len, self._free)) < self._count or self._waiting:
                self._returned.wait(_LOOK)
                self._reclaim()
                self._serve()
            items = [item for free in self._free for item in free]
            self._free, self._homes, self._count = [[]], {}, 0
        return items

    # All of these with the lock held.

    def _serve(self) -> None:
        """Match free items with those who wait, in their order."""
        for waiter in tuple(self._waiting):
            if not any(self._free):
                break
            waiter.item = self._find_free(waiter.accepts, waiter.thread)
            if waiter.item is not None:
                self._waiting.remove(waiter)
                waiter.ready.release()

    def _find_free(self, accepts: Callable[[T], bool] | None, thread: int) -> T | None:
        """Hand a free item to the thread."""
        for free in sorted(self._free, key=len, reverse=True):
            for index in range(len(free) - 1, -1, -1):  # the last used one has the warmest memory
                if accepts is None or accepts(free[index]):
                    return self._hand(free, index, thread)
        return None

    def _hand(self, free: list[T], index: int, thread: int) -> T:
        item = free[index]
        self._holders[thread] = item  # first: what is in neither place, an exception thrown in here would lose
        del free[index]
        return item

    def _reclaim(self, thread: int | None = None) -> None:
        """Take back what nobody keeps any more, and what threads lost that have ended, or ask for another as `thread` does."""
        gone = self._holders.keys() - sys._current_frames().keys() if thread is None else {thread}
        lost = [self._holders.pop(number) for number in gone if number in self._holders]
        while self._dropped:
            lost.append(self._dropped.popleft())
        for item in lost:
            if item not in self._homes[item]:
                self._homes[item].append(item)
