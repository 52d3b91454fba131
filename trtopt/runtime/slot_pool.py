"""Things of which there are few, handed out first come, first served."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from trtopt.core.errors import Busy, DeviceError
from trtopt.core.values import check_timeout

T = TypeVar("T")
_LOOK = 1.0  # seconds between looks for what got lost
CLOSED = "this session is closed; open the engine again"


class _Token:
    """Lives as long as its thread. (Thread numbers are used again, and current_thread() keeps foreign threads alive.)"""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    def __init__(self) -> None:
        self.token = _Token()
        self.thread = weakref.ref(self.token)


_here = _Here()


class Waiter(Generic[T]):
    """A caller's place in the queue. `notify` runs once, from any thread, when `item` is there or the end has come."""

    __slots__ = ("accepts", "item", "notify", "thread")

    def __init__(self, accepts: Callable[[T], bool] | None, notify: Callable[[], object]) -> None:
        self.accepts, self.notify = accepts, notify
        self.item: T | None = None
        self.thread = _here.thread


class SlotPool(Generic[T]):
    """A pool of `most` items at the most, made by `make` when all there are are taken.

    Items go straight from who gives one back to who has waited longest, so nobody is overtaken.

    Args:
        groups: items with the same number modulo this belong together, as slots on one GPU; whoever needs one gets it from the
            group that has most free, so that none is idle while another is busy.
        owned: an item stays with the thread that took it. Then one that got lost, because an exception was thrown into its
            thread at the wrong moment, is found again: when the thread is gone, or asks for another one.
        instead: what else than calling less often helps who waits too long.
    """

    def __init__(
        self, make: Callable[[int], T], most: int, *, groups: int = 1, owned: bool = False, instead: str = ""
    ) -> None:
        self._make, self.most, self._owned, self._instead = make, most, owned, instead
        self._holders: dict[weakref.ref[_Token], T | None] = {}  # None: being made
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._free: list[list[T]] = [[] for _ in range(groups)]
        self._homes: dict[T, list[T]] = {}  # item → the list of these that it comes back to
        self._waiting: deque[Waiter[T]] = deque()
        self._dropped: deque[T] = deque()  # what was kept and isn't any more
        self._count = 0
        self._closed = False
        self.waits = 0  # askers for whom nothing was free at once

    def take(self, accepts: Callable[[T], bool] | None = None, timeout: float | None = None) -> T:
        """An item for the caller alone, one that `accepts` is true of; waits for it at most `timeout` seconds.

        Raises:
            Busy: none came free in time.
            UsageError: `timeout` is no time.
            DeviceError: `close` was called.
        """
        if timeout is not None:
            check_timeout(timeout)
        if accepts is None:  # the common case, short: it stands between every call and its launch
            thread = _here.thread
            with self._lock:
                free = self._free[0] if len(self._free) == 1 else max(self._free, key=len)
                if free and not (self._waiting or self._closed or self._dropped) and thread not in self._holders:
                    return self._hand(free, -1, thread)
        item = self._now(accepts)
        if item is not None:
            return item
        ready = threading.Lock()
        ready.acquire()
        waiter = self.ask(ready.release, accepts)
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not ready.acquire(timeout=_LOOK if end is None else max(0.0, min(_LOOK, end - time.monotonic()))):
                if end is not None and time.monotonic() >= end:
                    if self.forget(waiter):
                        break
                    raise Busy(
                        f"nothing came free in {timeout:.3g} s: all {self.most} are in use and {len(self._waiting)} calls "
                        f"wait; call less often, or {self._instead}"
                    )
                self._find()
            return self.collect(waiter)
        except BaseException as error:
            if not isinstance(error, (Busy, DeviceError)) and self.forget(waiter):
                self.give(self.collect(waiter))
            raise

    def ask(self, notify: Callable[[], object], accepts: Callable[[T], bool] | None = None) -> Waiter[T]:
        """Queue up without waiting; `notify` runs when `collect` will answer at once (perhaps before this returns)."""
        waiter = Waiter(accepts, notify)
        item = self._now(accepts)
        if item is not None:
            waiter.item = item
            notify()
            return waiter
        with self._lock:
            if self._closed:
                raise DeviceError(CLOSED)
            self._waiting.append(waiter)
            self.waits += 1
            waiters = self._serve()
        _tell(waiters)
        return waiter

    def collect(self, waiter: Waiter[T]) -> T:
        """What `waiter` was called for."""
        if waiter.item is None:
            raise DeviceError(CLOSED)
        return waiter.item

    def forget(self, waiter: Waiter[T]) -> bool:
        """Leave the queue. True if an item had come meanwhile: it is the caller's, by `collect`."""
        with self._lock:
            if waiter.item is not None:
                return True
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            return False

    def keep(self, item: T) -> Callable[[], None]:
        """The item that this thread took is held on to, whatever the thread does, until anybody calls the result.

        That takes no lock: the garbage collector may call it, in a thread that has it.
        """
        with self._lock:
            del self._holders[_here.thread]
        return functools.partial(self._dropped.append, item)

    def give(self, item: T) -> None:
        """Give an item back."""
        with self._lock:
            if self._owned and self._holders.pop(_here.thread, None) is not item:
                raise RuntimeError("given back by a thread that didn't take it")
            self._homes[item].append(item)
            if not (self._waiting or self._closed):
                return
            waiters = self._serve()
            if self._closed:
                self._returned.notify_all()
        _tell(waiters)

    @property
    def items(self) -> int:
        """How many were made."""
        return self._count

    def all(self) -> list[T]:
        """Those that were made, free or not."""
        return list(self._homes)

    def refuse(self, waiting: bool) -> None:
        """Hand out no more; with `waiting`, those who wait already get an error."""
        with self._lock:
            self._closed = True
            waiters: list[Waiter[T]] = []
            if waiting:
                waiters, self._waiting = list(self._waiting), deque()
        _tell(waiters)

    def close(self, finish: bool = True) -> list[T]:
        """Hand out no more, wait until every item is back, and return them all.

        Args:
            finish: serve those who wait already; else they get an error.
        """
        self.refuse(not finish)
        with self._lock:
            self._reclaim(_here.thread)  # who closes isn't in a call
            while sum(map(len, self._free)) < self._count or self._waiting:
                self._returned.wait(_LOOK)
                self._reclaim()
            items = [item for free in self._free for item in free]
            self._free, self._homes = [[]], {}
        return items

    def _now(self, accepts: Callable[[T], bool] | None) -> T | None:
        with self._lock:
            if self._closed:
                raise DeviceError(CLOSED)
            if self._owned:
                self._reclaim(_here.thread)
            if not self._waiting and (item := self._find_free(accepts, _here.thread)) is not None:
                return item
            if self._count >= self.most:
                return None
            number = self._count
            if self._owned:
                self._holders[_here.thread] = None
            self._count += 1
        try:
            item = self._make(number)
        except BaseException:
            with self._lock:
                self._holders.pop(_here.thread, None)
                self._count -= 1
            raise
        self._homes[item] = self._free[number % len(self._free)]
        if self._owned:
            self._holders[_here.thread] = item
        if accepts is None or accepts(item):
            return item
        self.give(item)
        return self._now(accepts)

    def _serve(self) -> list[Waiter[T]]:
        """Match free items with those who wait, in their order. The lock is held."""
        waiters: list[Waiter[T]] = []
        for waiter in tuple(self._waiting):
            if not any(self._free):
                break
            waiter.item = self._find_free(waiter.accepts, waiter.thread)
            if waiter.item is not None:
                self._waiting.remove(waiter)
                waiters.append(waiter)
        return waiters

    def _find_free(self, accepts: Callable[[T], bool] | None, thread: weakref.ref[_Token]) -> T | None:
        """Hand a free item to the thread. The lock is held."""
        for free in sorted(self._free, key=len, reverse=True):
            for index in range(len(free) - 1, -1, -1):  # the last used one has the warmest memory
                if accepts is None or accepts(free[index]):
                    return self._hand(free, index, thread)
        return None

    def _hand(self, free: list[T], index: int, thread: weakref.ref[_Token]) -> T:
        item = free[index]
        if self._owned:
            self._holders[thread] = item  # first: what is in neither place, an exception thrown in here would lose
        del free[index]
        return item

    def _find(self) -> None:
        with self._lock:
            self._reclaim()
            waiters = self._serve()
        _tell(waiters)

    def _reclaim(self, asker: weakref.ref[_Token] | None = None) -> None:
        """Take back what is held by threads that ended, by the one that asks for another, or by nobody any more. The lock is
        held."""
        while self._dropped:
            item = self._dropped.popleft()
            self._homes[item].append(item)
        for thread in [key for key in self._holders if key is asker or key() is None]:
            lost_item = self._holders[thread]
            if lost_item is None:
                self._count -= 1
            elif not any(lost_item is item for item in self._homes[lost_item]):
                self._homes[lost_item].append(lost_item)
            del self._holders[thread]


def _tell(waiters: list[Waiter[T]]) -> None:
    for waiter in waiters:
        waiter.notify()
