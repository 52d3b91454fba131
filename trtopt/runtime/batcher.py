"""Batcher: single samples from many threads or asyncio tasks, run by a session in large batches.

with trtopt.Session("resnet50.engine") as session, trtopt.Batcher(session) as batcher:
    logits = batcher.run({"input": image})["logits"]  # from any thread
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtopt.core.documents import Described
from trtopt.core.errors import Busy, DeviceError, UsageError
from trtopt.core.options import typed
from trtopt.core.values import check_timeout, parse_seconds
from trtopt.cuda.arrays import host_views
from trtopt.cuda.tensors import check_array
from trtopt.runtime.batch import Batch, BatchRunner, BatchSizes, Request, Shapes, tell
from trtopt.runtime.session import Session

_IDLE = 0.1  # seconds without a batch after which a thread goes
_NAME = "trtopt-batcher"  # of the threads
CLOSED = "this batcher is closed; make another one"


@dataclass(frozen=True)
class BatcherStats(Described):
    """Counts of what a batcher did since it was made: requests that ran and their samples, batches, those of them that had no
    room for what came next (`full`), samples a batch; samples whose batch hasn't started (`queued`); and the seconds from a
    request's call to the start of its batch.
    """

    requests: int
    samples: int
    batches: int
    full: int
    mean_batch: float
    queued: int
    mean_wait: float
    longest_wait: float


class Batcher(AbstractContextManager["Batcher"]):
    """Collects requests of equal shapes into batches that a session runs.

    A request joins the batch of its shape that is filling. A batch is due when it is full, when its oldest request has waited
    `max_delay`, or when more than `max_queue` batches wait. A free one of the `slots` takes the due batch whose first request
    is oldest, copies its samples into page-locked memory and runs them: one is copied while another runs and a third fills.
    A partial batch runs at the next power of two that the engine takes, since each size needs CUDA graphs of its own.
    Where callers are few, `max_delay=0` starts whatever there is as soon as a slot is free.

    Results are arrays of the caller's own. Inputs must stay as they are while `run` or `run_async` waits; `submit` copies them.
    Callbacks of futures run in the batcher's threads. A process that ends without `close` waits for what was accepted.

    Args:
        session: stays the caller's: close it after the batcher. The first axis of each of its inputs must be the batch,
            and some axis of each output (`batch_axis` in `Session.outputs`).
        max_delay: how long a request waits for others at the most while a slot is free: "2ms", "500us", or seconds.
        max_batch: samples a batch at the most; None: the largest batch of the session's profiles.
        max_queue: batches that fill or wait for a slot before `submit` holds its callers up.
        slots: batches that run at the same time, each in a call of the session; None: two for each GPU.

    Raises: UsageError (also where inputs or outputs have no batch axis) and DeviceError (the session is closed).
    """

    @typed
    def __init__(
        self,
        session: Session,
        *,
        max_delay: str | float = "2ms",
        max_batch: int | None = None,
        max_queue: int = 4,
        slots: int | None = None,
    ) -> None:
        session._check_open()
        self.max_delay = min(parse_seconds(max_delay, "`max_delay=`"), threading.TIMEOUT_MAX)
        slots = 2 * max(1, len(session._gpus)) if slots is None else slots
        for name, value in (("max_queue", max_queue), ("slots", slots), ("max_batch", max_batch)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value!r}; a number of at least 1 is needed")
        self._session, self._signature = session, session._signature
        self._inputs, self._names = self._signature.inputs, session._names
        self._sizes = BatchSizes(session, max_batch)
        self.max_batch, self._max_queue = self._sizes.most, max_queue
        self._runner = BatchRunner(session, self._sizes)
        lock = threading.RLock()  # a finalizer of the caller's may close it in a thread that has it
        self._ready, self._room = threading.Condition(lock), threading.Condition(lock)
        self._open: dict[Shapes, Batch] = {}
        self._waiting: deque[Batch] = deque()
        self._held_up = 0  # callers that wait for room
        self._closing = False
        self._requests = self._samples = self._batches = self._full = 0
        self._waited = self._longest = 0.0
        self._slots, self._serving = slots, 0  # threads that there are
        self._workers = ThreadPoolExecutor(slots, thread_name_prefix=_NAME)

    def submit(self, inputs: Mapping[str, Any], *, timeout: float | None = None) -> Future[dict[str, Any]]:
        """Copy samples into a batch and return a future of their results: output name → array, samples along the first axis.

        Args:
            inputs: input name → array in host memory (NumPy, torch, or anything with DLPack): samples along the first axis, one
                or several, the same number in all inputs. They run in one batch.
            timeout: seconds to wait for room where `max_queue` batches wait already; 0: not at all.

        Raises:
            UsageError: what the engine doesn't take, more samples than a batch holds (`Session.run_batches` divides them), or
                arrays in GPU memory.
            Busy: the queue stayed full.
            DeviceError: this or its session is closed, or this process was forked. What `Session.run` raises goes to every
                request of the batch, by the future's `result()`.
        """
        request = self._request(inputs)
        request.arrays = [array.copy() for array in request.arrays]
        request.future = future = Future[dict[str, Any]]()
        self._enter(request, timeout, holds_up=True)
        return future

    def run(self, inputs: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """`submit`, and wait for the results; without `timeout` also for room, as long as it takes."""
        request = self._request(inputs)
        request.done.acquire()
        self._enter(request, timeout, holds_up=timeout is not None)
        try:
            request.done.acquire()
        except BaseException:
            request.error = CancelledError()
            raise
        return request.results()

    async def run_async(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """`run` for asyncio: never blocks the event loop."""
        request = self._request(inputs)
        request.task = asyncio.get_running_loop().create_future()
        self._enter(request, None, holds_up=False)
        try:
            await request.task
        except BaseException:
            request.error = CancelledError()
            raise
        return request.results()

    def stats(self) -> BatcherStats:
        """Return what it did so far."""
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

    def close(self, finish: bool = True) -> None:
        """Accept nothing more, and wait until what was accepted is done. A second call does nothing.

        Args:
            finish: run what waits; else it is cancelled. Those who wait for room get a DeviceError.
        """
        if self._session._forked:  # its threads aren't in the child
            return
        with self._ready:
            self._closing = True
            self._ready.notify_all()
            self._room.notify_all()
            cancelled = [] if finish else [request for batch in self._waiting for request in batch.requests]
        for request in cancelled:
            if request.future is None:
                request.error = CancelledError()
            else:
                request.future.cancel()
        self._workers.shutdown(wait=not threading.current_thread().name.startswith(_NAME))

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finish=kind is None)

    # Requests --------------------------------------------------------------------------------------------------------

    def _request(self, inputs: Mapping[str, Any]) -> Request:
        """Check what a caller gave, as the session does."""
        self._session._alive()
        self._signature.check_names(inputs)
        values = [inputs[name] for name in self._names]
        instead = "batches are put together in host memory: give a NumPy array, or call Session.run"
        arrays = host_views(values, self._names, instead)
        for tensor, array in zip(self._inputs, arrays):
            check_array(tensor, array)
        samples = arrays[0].shape[0]
        if samples < 1 or any(array.shape[0] != samples for array in arrays):
            counts = ", ".join(f"{tensor.name!r} {array.shape[0]}" for tensor, array in zip(self._inputs, arrays))
            raise UsageError(
                f"samples along the first axes: {counts}; one number of at least 1 is needed for all inputs"
            )
        shapes = tuple([array.shape[1:] for array in arrays])
        capacity = min(self.max_batch, self._sizes.of(shapes)[-1])
        if samples > capacity:
            raise UsageError(
                f"the request has {samples} samples; a batch of this shape holds {capacity}: submit them in parts, or call "
                "Session.run_batches"
            )
        return Request(shapes, capacity, samples, arrays, None if type(values[0]) is np.ndarray else values[0])

    def _enter(self, request: Request, timeout: float | None, *, holds_up: bool) -> None:
        """Put a request into a batch; with `holds_up`, when that needs no batch beyond those that may wait."""
        check_timeout(timeout)
        with self._ready:
            request.accepted = time.monotonic()
            if holds_up and not self._has_room(request):
                self._held_up += 1
                self._ready.notify()  # the oldest batch is due now
                try:
                    seconds = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
                    found = self._room.wait_for(lambda: self._has_room(request), seconds)
                finally:
                    self._held_up -= 1
                if not found:
                    raise Busy(
                        f"no room in {timeout:.3g} s: {self._max_queue} batches wait already (max_queue); call less often, "
                        "wait longer, or make the batcher with more"
                    )
            if self._closing:
                raise DeviceError(CLOSED)
            if (batch := self._joinable(request)) is None:
                if request.shapes in self._open:
                    self._seal(self._open[request.shapes], full=True)
                if self._serving < self._slots:
                    self._workers.submit(self._serve)
                    self._serving += 1
                self._ready.notify()  # a thread has to wait until it is due
                batch = self._open[request.shapes] = Batch(request.shapes, time.monotonic())
                self._waiting.append(batch)
            batch.requests.append(request)
            batch.samples += request.samples
            if batch.samples == request.capacity:
                self._seal(batch, full=True)

    def _joinable(self, request: Request) -> Batch | None:
        """Return the batch that fills with samples of these shapes, if it has room."""
        batch = self._open.get(request.shapes)
        return batch if batch is not None and batch.samples + request.samples <= request.capacity else None

    def _has_room(self, request: Request) -> bool:
        return self._closing or self._joinable(request) is not None or len(self._waiting) < self._max_queue

    # Batches ---------------------------------------------------------------------------------------------------------

    def _seal(self, batch: Batch, *, full: bool = False) -> None:
        batch.sealed, batch.full = True, full
        del self._open[batch.shapes]
        self._ready.notify()

    def _due(self, now: float) -> Batch | None:
        """Return the oldest batch that can start."""
        hurry = self._closing or self._held_up > 0 or len(self._waiting) > self._max_queue
        for batch in self._waiting:
            if not batch.sealed and (hurry or now - batch.since >= self.max_delay):
                self._seal(batch)
            if batch.sealed:
                return batch
            hurry = self._closing
        return None

    def _serve(self) -> None:
        """Run batches as they are due, in a thread that goes when none has come for a while."""
        while (batch := self._next()) is not None:
            self._finish(batch)
            del batch  # what it holds is gone while the next is waited for

    def _next(self) -> Batch | None:
        with self._ready:
            while (batch := self._due(now := time.monotonic())) is None:
                came = self._ready.wait(self._waiting[0].since + self.max_delay - now if self._waiting else _IDLE)
                if not self._waiting and (self._closing or not came):
                    self._serving -= 1
                    return None
            self._waiting.remove(batch)
            self._room.notify_all()
            if self._waiting:
                self._ready.notify()  # a thread has to wait until it is due
            return batch

    def _finish(self, batch: Batch) -> None:
        try:
            requests = [request for request in batch.requests if request.starts()]
            if requests:
                self._run(batch, requests)
        except BaseException as error:  # whatever it is, no caller may wait forever
            for request in batch.requests:
                request.error = request.error or error
        finally:
            tell(batch.requests)

    def _run(self, batch: Batch, requests: Sequence[Request]) -> None:
        with self._ready:
            waits = [time.monotonic() - request.accepted for request in requests]
            self._requests += len(requests)
            self._samples += sum(request.samples for request in requests)
            self._batches += 1
            self._full += batch.full
            self._waited += sum(waits)
            self._longest = max(self._longest, *waits)
        self._runner.run(batch.shapes, requests)
