"""Calls in threads of their own, of which so many are held at the most; those beyond wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trtopt.core.errors import DeviceError
from trtopt.runtime.slot_pool import CLOSED, SlotPool

Call = Callable[[], dict[str, Any]]
_NAME = "trtopt-session"  # of the threads


class Background:
    """Runs calls for `Session.submit` and `Session.run_async`.

    Args:
        queue: calls that wait or run, at the most.
        threads: calls that run at the same time.
    """

    def __init__(self, queue: int, threads: int) -> None:
        self._places = SlotPool(lambda number: number, queue, instead="open the session with a longer `queue=`")
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix=_NAME)
        self._closed = False

    def submit(self, call: Call, timeout: float | None) -> Future[dict[str, Any]]:
        """A future of the call, when there is a place for it.

        Raises:
            Busy: there was none for `timeout` seconds.
            DeviceError: `close` was called.
        """
        return self._start(self._places.take(timeout=timeout), call)

    async def run(self, call: Call) -> dict[str, Any]:
        """What the call gives; the event loop isn't blocked meanwhile, also not while all places are taken."""
        loop, places = asyncio.get_running_loop(), self._places
        signal: asyncio.Future[None] = loop.create_future()

        def turn() -> None:
            try:
                loop.call_soon_threadsafe(wake, [signal])
            except RuntimeError:  # the loop was closed over a task that still waited: nobody will come for the place
                leave()

        def leave() -> None:
            if places.forget(waiter):
                places.give(places.collect(waiter))

        waiter = places.ask(turn)
        try:
            await signal
        except BaseException:
            leave()
            raise
        return await asyncio.wrap_future(self._start(places.collect(waiter), call))

    def _start(self, place: int, call: Call) -> Future[dict[str, Any]]:
        try:
            future = self._workers.submit(call)
        except BaseException as error:
            self._places.give(place)
            if isinstance(error, RuntimeError):  # the pool was shut down meanwhile, or Python ends
                raise DeviceError(CLOSED if self._closed else f"no thread for this call ({error}): use run") from None
            raise
        future.add_done_callback(lambda _: self._places.give(place))
        return future

    def close(self, finish: bool) -> None:
        """Take no more, and wait for what was taken.

        Args:
            finish: let calls that wait run too; else they are cancelled.
        """
        self._closed = True
        self._places.refuse(not finish)
        inside = threading.current_thread().name.startswith(_NAME)
        self._workers.shutdown(wait=not inside, cancel_futures=not finish)


def wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
