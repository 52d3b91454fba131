"""A first-in, first-out pool of execution slots."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from trtopt.core.errors import Busy, DeviceError
from trtopt.core.values import check_timeout

T = TypeVar("T")
_POLL = 1.0  # seconds between looks for items that came back with their lease's last reference
_BEING_MADE: Any = object()
CLOSED = "this session is closed; open the engine again"


class Lease(Generic[T]):
    """An item of a pool, and the right to use it.

    It goes back by `SlotPool.give`; else with the last reference to this, so that an exception thrown into a thread, at
    whatever moment, loses no item.
    """

    __slots__ = ("_returned", "item")

    def __init__(self, item: Any, returned: deque[T]) -> None:
        self.item, self._returned = item, returned

    def drop(self) -> None:
        """Give the item back without taking the pool's lock: the garbage collector may call it in a thread that has it."""
        if self.item is not None:
            self._returned.append(self.item)
            self.item = None

    __del__ = drop


class _Waiter(Generic[T]):
    """A place in the queue; `ready` is released when `lease` is there, or the end has come."""

    def __init__(self, accepts: Callable[[T], bool] | None) -> None:
        self.accepts, self.ready = accepts, threading.Lock()
        self.lease: Lease[T] | None = None
        self.ready.acquire()


class SlotPool(Generic[T]):
    """A pool of `most` items at the most, made by `make` when all there are are taken.

    Items go straight from who gives one back to who has waited longest, so nobody is overtaken.

    Args:
        groups: items with the same number modulo this belong together, as slots on one GPU; whoever needs one gets it from the
            group that has most free, so that none is idle while another is busy.
        instead: what else than calling less often helps who waits too long.
    """

    def __init__(self, make: Callable[[int], T], most: int, *, groups: int = 1, instead: str = "") -> None:
        self._make, self.most, self._instead = make, most, instead
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._free: list[list[Lease[T]]] = [[] for _ in range(groups)]
        self._homes: dict[T, list[Lease[T]]] = {}  # item → the list of these that it comes back to
        self._waiting: deque[_Waiter[T]] = deque()
        self._returned: deque[T] = deque()  # by `Lease.drop`
        self._count = 0
        self._closed = False
        self.waits = 0  # askers for whom nothing was free at once

    def take(self, accepts: Callable[[T], bool] | None = None, timeout: float | None = None) -> Lease[T]:
        """An item for the caller alone, one that `accepts` is true of; waits for it at most `timeout` seconds.

        Raises:
            Busy: none came free in time.
            UsageError: `timeout` is no time.
            DeviceError: `close` was called.
        """
        if timeout is not None:
            check_timeout(timeout)
        if accepts is None:  # the common case, short: it stands between every call and its launch
            with self._lock:
                free = self._free[0] if len(self._free) == 1 else max(self._free, key=len)
                if free and not (self._waiting or self._closed or self._returned):
                    # No call between these two, here and below: nothing that is thrown into the thread strikes between them.
                    lease = free[-1]
                    del free[-1]
                    return lease
        waiter, lease = _Waiter(accepts), Lease(None, self._returned)
        with self._lock:
            if self._closed:
                raise DeviceError(CLOSED)
            self._collect()
            if not self._waiting:
                self._hand(waiter)
            number = self._count
            if waiter.lease is None and number < self.most:
                lease.item = _BEING_MADE
                self._count += 1
        if waiter.lease is not None:
            return waiter.lease
        if lease.item is None:
            return self._wait(waiter, timeout)
        try:
            item = self._make(number)
        except BaseException:
            with self._lock:
                lease.drop()
                self._serve()
            raise
        self._homes[item] = self._free[number % len(self._free)]
        lease.item = item
        if accepts is None or accepts(item):
            return lease
        self.give(lease)
        return self.take(accepts, timeout)

    def give(self, lease: Lease[T]) -> None:
        """Give an item back."""
        home = self._homes[lease.item]
        with self._lock:
            home += [lease]
            if self._waiting or self._closed or self._returned:
                self._serve()

    @property
    def items(self) -> int:
        """The number of items that were made."""
        return self._count

    def all(self) -> list[T]:
        """Those that were made, free or not."""
        return list(self._homes)

    def close(self, finish: bool = True) -> list[T]:
        """Hand out no more, wait until every item is back, and return them all.

        Args:
            finish: serve those who wait already; else they get an error.
        """
        with self._lock:
            self._closed = True
            if not finish:
                for waiter in self._waiting:
                    waiter.ready.release()
                self._waiting.clear()
            self._serve()
            while sum(map(len, self._free)) < self._count or self._waiting:
                self._changed.wait(_POLL)
                self._serve()
            items = list(self._homes)
            for lease in [lease for free in self._free for lease in free]:
                lease.item = None
            self._free, self._homes = [[]], {}
        return items

    def _wait(self, waiter: _Waiter[T], timeout: float | None) -> Lease[T]:
        """Queue up for an item."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            with self._lock:
                self._waiting.append(waiter)
                self.waits += 1
                self._serve()
            while not waiter.ready.acquire(
                timeout=_POLL if end is None else max(0.0, min(_POLL, end - time.monotonic()))
            ):
                with self._lock:
                    self._serve()
                    if end is not None and time.monotonic() >= end and waiter.lease is None:
                        raise Busy(
                            f"nothing came free in {timeout:.3g} s: all {self.most} are in use and {len(self._waiting)} calls "
                            f"wait; call less often, or {self._instead}"
                        )
        except BaseException:
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            if waiter.lease is not None:
                waiter.lease.drop()
            raise
        if waiter.lease is None:
            raise DeviceError(CLOSED)
        return waiter.lease

    def _serve(self) -> None:
        """Match free items with those who wait, in their order. The lock is held."""
        self._collect()
        for waiter in tuple(self._waiting):
            if not any(self._free):
                break
            self._hand(waiter)
            if waiter.lease is not None:
                self._waiting.remove(waiter)
                waiter.ready.release()
        if self._closed:
            self._changed.notify_all()

    def _hand(self, waiter: _Waiter[T]) -> None:
        """Hand over a free item, if one is accepted. The lock is held."""
        for free in sorted(self._free, key=len, reverse=True):
            for index in range(len(free) - 1, -1, -1):  # the last used one has the warmest memory
                if waiter.accepts is None or waiter.accepts(free[index].item):
                    waiter.lease = free[index]
                    del free[index]
                    return

    def _collect(self) -> None:
        """Put items that came back by `Lease.drop` among the free ones. The lock is held."""
        while self._returned:
            item = self._returned.popleft()
            if item is _BEING_MADE:
                self._count -= 1
            elif item in self._homes:
                self._homes[item].append(Lease(item, self._returned))
