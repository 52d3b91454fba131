"""Requests, and the batches that they wait in: what a batcher's callers and its threads share."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Described
from trtopt.core.errors import Busy, DeviceError
from trtopt.core.values import TensorInfo
from trtopt.cuda.arrays import like_host
from trtopt.cuda.tensors import Shape
from trtopt.data.rebatch import share
from trtopt.runtime.contexts import MAPPED

Array = NDArray[Any]
Shapes = tuple[Shape, ...]  # of one sample, without the batch axis, for each input

# Seconds between looks of a thread that waits: garbage collection may close a queue where no notify is heard.
_LOOK = 1.0
CLOSED = "this batcher is closed; make another one"


@dataclass(frozen=True)
class BatcherStats(Described):
    """What a batcher did since it was made.

    Attributes:
        requests: that ran; cancelled ones aren't counted.
        samples: of these requests.
        batches: that ran.
        full: batches that had no room for another sample, or for the request that came next.
        mean_batch: samples a batch.
        queued: samples that were accepted and whose batch hasn't started yet.
        mean_wait: seconds from a request's call to the start of its batch.
        longest_wait: the same, of the request that waited longest.
    """

    requests: int
    samples: int
    batches: int
    full: int
    mean_batch: float
    queued: int
    mean_wait: float
    longest_wait: float


@dataclass(frozen=True)
class Group:
    """Samples that can run together.

    Attributes:
        shapes: of one sample, for each input.
        capacity: samples a batch at the most.
        sizes: that batches run at, growing; the last is the first that isn't below the capacity.
    """

    shapes: Shapes
    capacity: int
    sizes: tuple[int, ...]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Samples of one caller, who waits for `done`, for the future of a `task`, or for `future`.

    Attributes:
        arrays: the inputs.
        example: an array of the library that results are made arrays of; None: NumPy's.
        accepted: when the caller came, in seconds of the queue's clock.
        first: where its samples are in the batch.
        outputs: of the whole batch of `size` samples; `infos`: where these lie.
    """

    group: Group
    samples: int
    arrays: list[Array]
    example: Any = None
    done: threading.Lock = field(default_factory=threading.Lock)
    task: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
    future: Future[dict[str, Any]] | None = None
    batch: Batch | None = None
    error: BaseException | None = None
    outputs: Mapping[str, Array] = field(default_factory=dict)
    infos: Sequence[TensorInfo] = ()
    first: int = 0
    size: int = 0
    accepted: float = 0.0

    @property
    def part(self) -> slice:
        return slice(self.first, self.first + self.samples)

    def starts(self) -> bool:
        """Its batch is about to run. False: nobody wants its results any more."""
        return self.error is None if self.future is None else self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        if self.future is not None:
            self.future.cancel()
        elif self.error is None:
            self.error = CancelledError()

    def fail(self, error: BaseException) -> None:
        if self.future is None:
            self.error = self.error or error
        elif not self.future.done():
            self.future.set_exception(error)

    def results(self) -> dict[str, Any]:
        """Arrays of the caller's own.

        Raises: what went wrong.
        """
        if self.error is not None:
            raise self.error
        results = {}
        for info in self.infos:
            output = self.outputs[info.name]
            rows = share(output, info, self.size, self.first, self.first + self.samples)
            rows = rows if rows is output else _copied(rows)
            results[info.name] = rows if self.example is None else like_host(self.example, rows)
        return results


class Batch:
    """Requests that run together.

    Attributes:
        since: when the first one came.
        sealed: it takes no more requests, and is due.
        full: it was sealed because there was no more room.
    """

    def __init__(self, group: Group, since: float) -> None:
        self.group, self.since = group, since
        self.requests: list[Request] = []
        self.samples = 0
        self.sealed = self.full = False


class Queue:
    """Batches that fill or wait, the oldest first.

    Args:
        delay: seconds.
        most: batches before callers of `wait_for_room` wait.
        clock: gives seconds.
    """

    def __init__(self, delay: float, most: int, clock: Callable[[], float]) -> None:
        self._delay, self.most, self._clock = delay, most, clock
        self._process = os.getpid()
        self.threads: tuple[threading.Thread, ...] = ()
        lock = threading.RLock()  # the garbage collector may call `close` in a thread that has it
        self._ready, self._room = threading.Condition(lock), threading.Condition(lock)
        self._open: dict[Shapes, Batch] = {}
        self._waiting: deque[Batch] = deque()
        self._closing = self._dropping = False
        self._requests = self._samples = self._batches = self._full = 0
        self._waited = self._longest = 0.0
        _queues.add(self)

    # Callers ---------------------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Put a request into a batch.

        Raises:
            DeviceError: this is closed.
        """
        group = request.group
        with self._ready:
            if self._closing:
                raise DeviceError(CLOSED)
            request.accepted = self._clock()
            batch = self._open.get(group.shapes)
            if batch is not None and batch.samples + request.samples > group.capacity:
                batch.full = True
                self._seal(batch)
                batch = None
            if batch is None:
                batch = self._open[group.shapes] = Batch(group, request.accepted)
                self._waiting.append(batch)
                self._ready.notify()  # a thread has to wait until it is due
            request.batch = batch
            batch.requests.append(request)
            batch.samples += request.samples
            if batch.samples == group.capacity:
                batch.full = True
                self._seal(batch)

    def wait_for_room(self, request: Request, timeout: float | None) -> None:
        """Until no more than `most` batches are to run before its own has.

        Raises:
            Busy: there were, for `timeout` seconds; the request has left.
            DeviceError: this was closed without finishing.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            with self._ready:
                while self._beyond(request):
                    seconds = _LOOK if end is None else end - time.monotonic()
                    if seconds <= 0:
                        raise Busy(
                            f"no room in {timeout:.3g} s: {self.most} batches wait already (max_queue); call less often, "
                            "wait longer, or make the batcher with more"
                        )
                    self._room.wait(min(seconds, _LOOK))
                if self._dropping:
                    raise DeviceError(CLOSED)
        except BaseException:
            self.leave(request)
            raise

    def leave(self, request: Request) -> None:
        """The caller doesn't want its results."""
        request.cancel()
        with self._ready:
            batch = request.batch
            if batch is None or batch not in self._waiting or request not in batch.requests:
                return
            batch.requests.remove(request)
            batch.samples -= request.samples
            if not batch.requests:
                self._waiting.remove(batch)
                self._seal(batch)

    def _beyond(self, request: Request) -> bool:
        places = (index for index, batch in enumerate(self._waiting) if batch is request.batch)
        return next(places, 0) >= self.most and not self._dropping

    def _seal(self, batch: Batch) -> None:
        if not batch.sealed:
            batch.sealed = True
            del self._open[batch.group.shapes]
            self._ready.notify()

    # Threads that run batches ------------------------------------------------------------------------------------------

    def take(self) -> Batch | None:
        """The next batch to run, when there is one; None: this is closed, and nothing is left."""
        with self._ready:
            while True:
                now = self._clock()
                batch = self._due(now)
                if batch is not None:
                    self._waiting.remove(batch)
                    self._room.notify_all()
                    if self._waiting:
                        self._ready.notify()  # a thread has to wait until it is due
                    return batch
                if self._closing and not self._waiting:
                    return None
                ends = [batch.since + self._delay - now for batch in self._waiting]
                self._ready.wait(min(_LOOK, *ends) if ends else _LOOK)

    def started(self, batch: Batch, requests: Sequence[Request]) -> None:
        with self._ready:
            now = self._clock()
            waits = [now - request.accepted for request in requests]
            self._requests += len(requests)
            self._samples += sum(request.samples for request in requests)
            self._batches += 1
            self._full += batch.full
            self._waited += sum(waits)
            self._longest = max(self._longest, *waits)

    def _due(self, now: float) -> Batch | None:
        """The oldest batch that can start."""
        hurry = self._closing or len(self._waiting) > self.most
        for batch in self._waiting:
            if not batch.sealed and (hurry or now - batch.since >= self._delay):
                self._seal(batch)
            if batch.sealed:
                return batch
            hurry = self._closing
        return None

    # The whole -------------------------------------------------------------------------------------------------------

    def close(self, finish: bool = True) -> list[Request]:
        """Accept nothing more. Returns: requests to cancel, if what waits isn't to run."""
        if os.getpid() != self._process:  # a thread that isn't here may have the lock
            return []
        with self._ready:
            self._closing, self._dropping = True, self._dropping or not finish
            self._ready.notify_all()
            self._room.notify_all()
            return [] if finish else [request for batch in self._waiting for request in batch.requests]

    def join(self) -> None:
        for thread in self.threads:
            if thread is not threading.current_thread():  # close() in a future's callback
                thread.join()

    def stats(self) -> BatcherStats:
        with self._ready:
            return BatcherStats(
                requests=self._requests,
                samples=self._samples,
                batches=self._batches,
                full=self._full,
                mean_batch=self._samples / max(1, self._batches),
                queued=sum(batch.samples for batch in self._waiting),
                mean_wait=self._waited / max(1, self._requests),
                longest_wait=self._longest,
            )


_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """At the end of the process, what was accepted is done: a thread that dies inside a CUDA call may crash."""
    for queue in tuple(_queues):
        queue.close()
        if queue._process == os.getpid():
            queue.join()


def _copied(rows: Array) -> Array:
    copy: Array = np.empty(rows.shape, rows.dtype)
    if rows.nbytes > MAPPED:
        np.copyto(copy, rows)
    else:
        _bytes(copy)[:] = _bytes(rows)  # keeps the GIL: letting it go takes longer where threads queue for it
    return copy


def _bytes(array: Array) -> memoryview:
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # nothing in it, or a type such as bfloat16, which buffers don't know
        return array.reshape(-1).view(np.uint8).data
