"""Batcher: single samples from many threads or asyncio tasks, run by a session in large batches.

with trtopt.Session("resnet50.engine") as session, trtopt.Batcher(session) as batcher:
    logits = batcher.run({"input": image})["logits"]  # from any thread
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import Busy, DeviceError, EngineError, UsageError
from trtopt.core.values import ShapeRange, parse_seconds
from trtopt.cuda.arrays import View, like_host, start, view
from trtopt.cuda.tensors import Shape, Tensor, check_array, x
from trtopt.runtime.contexts import MAPPED
from trtopt.runtime.session import Session
from trtopt.runtime.stretch import Stretch, available, copying

Array = NDArray[Any]
Shapes = tuple[Shape, ...]  # of one sample, without the batch axis, for each input
Range = tuple[int, int]  # batches from, to

_LOOK = (
    1.0  # seconds between looks of a thread that waits: garbage collection may close a queue where no notify is heard
)
_REMEMBERED = 4096  # shapes of samples
_VIEWS = 64  # of one buffer
CLOSED = "this batcher is closed; make another one"


@dataclass(frozen=True)
class BatcherStats:
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

    def describe(self) -> dict[str, Any]:
        return asdict(self)


class Batcher:
    """Collects requests of equal shapes into batches that a session runs.

    A request joins the batch of its shape that is filling. A batch is due when it is full, when its oldest request has waited
    `max_delay`, or when more than `max_queue` batches wait. Whenever one of the `slots` is free it takes the due batch whose
    first request is oldest, copies the samples into its page-locked memory and runs them, so that one batch is copied while
    another runs and a third fills. A partial batch runs at the next power of two that the engine takes (its last sample is
    repeated, and the further results are dropped), since each size that runs needs a context and CUDA graphs. A batch doesn't
    start early because the GPU is idle: after a full batch all its callers come back at once, and the first would take the GPU
    for itself; where callers are few, `max_delay=0` starts whatever there is as soon as a slot is free.

    Results are arrays of the caller's own, copied out of the batch's: keeping one keeps no other caller's in memory. Inputs
    must stay as they are while `run` or `run_async` waits; `submit` copies them. Callbacks of futures run in the batcher's
    threads: one that waits there holds up a slot. Many tasks of one event loop are served faster than as many threads, which
    queue for Python's GIL.

    Args:
        session: stays the caller's: close it after the batcher. The first axis of each of its inputs and outputs must be the
            batch.
        max_delay: how long a request waits for others at the most while a slot is free: "2ms", "500us", "0.5s", or seconds
            as a number.
        max_batch: samples a batch at the most; None: the largest batch of the session's profiles.
        max_queue: batches that fill or wait for a slot before `submit` holds its callers up.
        slots: batches that run at the same time, each with page-locked memory for its inputs; None: two for each GPU. No more
            than the session's `contexts` are of use.
        clock: gives seconds that only grow, for tests.

    Raises:
        UsageError: an argument that can't be right, an input or output without a batch axis, or no profile that says how large
            batches may be.
        DeviceError: this process was forked from the one that opened the session.
    """

    def __init__(
        self,
        session: Session,
        *,
        max_delay: str | float = "2ms",
        max_batch: int | None = None,
        max_queue: int = 4,
        slots: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        session._alive()
        delay = parse_seconds(max_delay, "max_delay")
        slots = 2 * max(1, len(session._gpus)) if slots is None else slots
        for name, value in (("max_queue", max_queue), ("slots", slots), ("max_batch", max_batch or 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r}; a number of at least 1 is needed")
        self._session, self._process = session, os.getpid()
        self._inputs = session._signature.inputs
        self._names = tuple(tensor.name for tensor in self._inputs)
        elsewhere = {info.name for info in (*session.inputs, *session.outputs) if info.batch_axis != 0}
        _check_axes(self._inputs, session._signature.outputs, elsewhere)
        self.max_delay = delay
        self.max_batch = self._largest(max_batch)
        self._groups: dict[Shapes, _Group] = {}
        self._queue = _Queue(delay, max_queue, clock)
        self._queue.threads = tuple(
            threading.Thread(target=_serve, args=(session, self._queue), name=f"trtopt-batcher-{index}", daemon=True)
            for index in range(slots)
        )
        _queues.add(self._queue)
        weakref.finalize(self, self._queue.close).atexit = False
        for thread in self._queue.threads:
            thread.start()

    def submit(self, inputs: Mapping[str, Any], *, timeout: float | None = None) -> Future[dict[str, Any]]:
        """Copy samples into a batch and return a future of their results: output name → array, samples along the first axis.

        Args:
            inputs: input name → array in host memory (NumPy, torch, or anything with DLPack): samples along the first axis, one
                or several, the same number in all inputs. They run in one batch.
            timeout: seconds to wait for room where `max_queue` batches wait already; 0: not at all.

        Raises:
            UsageError: a name, dtype or shape that the engine doesn't take, more samples than a batch holds (`max_batch`, or
                the profile of that shape: `Session.run_batches` divides them), or arrays in GPU memory (`Session.run` takes
                them).
            Busy: the queue stayed full.
            DeviceError: this or its session is closed, or this process was forked. What `Session.run` raises goes to every
                request of the batch, by the future's `result()`.
        """
        request = self._request(inputs)
        request.arrays = [array.copy() for array in request.arrays]
        future: Future[dict[str, Any]] = Future()
        request.future = future
        self._queue.enter(request)
        self._queue.wait_for_room(request, timeout)
        return future

    def run(self, inputs: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """The results of samples, when their batch has run.

        Args:
            inputs, timeout: as for `submit`; without `timeout` it waits as long as it takes.

        Raises: as `submit`, and as `Session.run`.
        """
        request = self._request(inputs)
        request.done.acquire()
        self._queue.enter(request)
        try:
            if timeout is not None:
                self._queue.wait_for_room(request, timeout)
            request.done.acquire()
        except BaseException:
            self._queue.leave(request)
            raise
        return request.results()

    async def run_async(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """`run` for asyncio: never blocks the event loop.

        Raises: as `run`, without Busy.
        """
        request = self._request(inputs)
        loop = asyncio.get_running_loop()
        ran: asyncio.Future[None] = loop.create_future()
        request.task = loop, ran
        self._queue.enter(request)
        try:
            await ran
        except BaseException:
            self._queue.leave(request)
            raise
        return request.results()

    def stats(self) -> BatcherStats:
        """What it did so far."""
        return self._queue.stats()

    def close(self, finish: bool = True) -> None:
        """Accept nothing more, and wait until what was accepted is done. A second call does nothing.

        Args:
            finish: run what waits; else it is cancelled, and those who wait for room get a DeviceError.
        """
        if os.getpid() != self._process:  # its threads aren't in the child
            return
        for request in self._queue.close(finish):
            request.cancel()
        self._queue.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=kind is None)

    def _largest(self, wanted: int | None) -> int:
        """Samples a batch at the most."""
        limits = [high for profile in self._session.profiles for _, high in _batches(profile, self._inputs)]
        limits = limits or [size for size in [self._inputs[0].shape[0]] if size != -1]
        if not limits and wanted is None:
            raise UsageError(
                f"max_batch isn't given, and {self._session.engine.name} doesn't say how large its batches may be: give "
                "max_batch=32, for example"
            )
        if wanted is not None and limits and wanted > max(limits):
            raise UsageError(
                f"max_batch is {wanted}; the engine takes batches of at most {max(limits)}: build it with other `shapes=`"
            )
        return wanted or max(limits)

    def _request(self, inputs: Mapping[str, Any]) -> _Request:
        """Check what a caller gave, as the session does."""
        self._session._alive()
        try:
            given = [inputs[name] for name in self._names]
        except (KeyError, IndexError, TypeError):
            self._session._signature.check_names(inputs)
            raise
        if len(given) != len(inputs):
            self._session._signature.check_names(inputs)
        arrays: list[Array] = []
        for tensor, item in zip(self._inputs, given):
            array = view(item, 0)
            if isinstance(array, View):
                raise UsageError(
                    f"input {tensor.name!r} lies in GPU memory; batches are put together in host memory: give a NumPy "
                    "array, or call Session.run"
                )
            if array.dtype != tensor.dtype or array.ndim != len(tensor.shape):
                check_array(tensor, array)
            arrays.append(array)
        samples = arrays[0].shape[0]
        if samples < 1 or any(array.shape[0] != samples for array in arrays):
            counts = ", ".join(f"{tensor.name!r} {array.shape[0]}" for tensor, array in zip(self._inputs, arrays))
            raise UsageError(
                f"samples along the first axes: {counts}; one number of at least 1 is needed for all inputs"
            )
        group = self._group(tuple([array.shape for array in arrays]))
        if samples > group.capacity:
            raise UsageError(
                f"the request has {samples} samples; a batch of this shape holds {group.capacity}: submit them in parts, or "
                "call Session.run_batches"
            )
        return _Request(group, samples, arrays, None if type(given[0]) is np.ndarray else given[0])

    def _group(self, full: Shapes) -> _Group:
        """Which batches samples of these shapes can be in.

        Raises:
            UsageError: no profile takes them; the message is the session's.
        """
        shapes = tuple([shape[1:] for shape in full])
        group = self._groups.get(shapes)
        if group is None:
            signature = self._session._signature
            ranges: list[Range] = []
            for profile in signature.profiles:
                if all(_inside(shape, profile[tensor.name]) for shape, tensor in zip(shapes, self._inputs)):
                    ranges += _batches(profile, self._inputs)
            if not signature.profiles:
                fixed = self._inputs[0].shape[0]
                size = full[0][0] if fixed == -1 else fixed
                signature.profile([(size, *shape) for shape in shapes])
                ranges = [(1, self.max_batch) if fixed == -1 else (fixed, fixed)]
            if not ranges:
                signature.profile(full)  # says why
            if len(self._groups) >= _REMEMBERED:
                self._groups.clear()
            capacity = min(self.max_batch, max(high for _, high in ranges))
            group = self._groups[shapes] = _Group(shapes, capacity, _sizes(ranges, capacity))
        return group


@dataclass(frozen=True)
class _Group:
    """Samples that can run together.

    Attributes:
        shapes: of one sample, for each input.
        capacity: samples a batch at the most.
        sizes: that batches run at, growing; the last is the first that isn't below the capacity.
    """

    shapes: Shapes
    capacity: int
    sizes: tuple[int, ...]


class _Buffer:
    """Memory for the inputs of one batch, of any shape; it only grows."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: dict[str, Array] = {}  # flat
        self._views: dict[tuple[Shapes, int], dict[str, Array]] = {}

    def arrays(self, shapes: Shapes, samples: int) -> dict[str, Array]:
        """Arrays of so many samples, at the start of the memory. The same objects each time, as far as possible: the session
        remembers whose addresses it knows.

        Raises:
            DeviceError: the session is closed, or there is no more page-locked memory.
        """
        arrays = self._views.get((shapes, samples))
        if arrays is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            arrays = {}
            for tensor, shape in zip(self._session._signature.inputs, shapes):
                whole = (samples, *shape)
                held = self._held.get(tensor.name)
                if held is None or held.size < math.prod(whole):
                    self._views.clear()
                    held = self._held[tensor.name] = self._session.pinned(tensor.name, whole).reshape(-1)
                arrays[tensor.name] = held[: math.prod(whole)].reshape(whole)
            self._views[shapes, samples] = arrays
        return arrays


class _Request:
    """Samples of one caller, who waits for `done`, for the future of a `task`, or for `future`.

    Attributes:
        arrays: the inputs.
        example: an array of the library that results are made arrays of; None: NumPy's.
        accepted: when the caller came, in seconds of the queue's clock.
        first: where its samples are in the batch.
        outputs: of the whole batch; `alone`: it holds nobody else's samples.
    """

    __slots__ = (
        "accepted",
        "alone",
        "arrays",
        "batch",
        "done",
        "error",
        "example",
        "first",
        "future",
        "group",
        "outputs",
        "samples",
        "task",
    )

    def __init__(self, group: _Group, samples: int, arrays: list[Array], example: Any = None) -> None:
        self.group, self.samples, self.arrays, self.example = group, samples, arrays, example
        self.done = threading.Lock()
        self.task: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.future: Future[dict[str, Any]] | None = None
        self.batch: _Batch | None = None
        self.error: BaseException | None = None
        self.outputs: Mapping[str, Array] = {}
        self.first, self.accepted, self.alone = 0, 0.0, False

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
        for name, output in self.outputs.items():
            rows = output if self.alone else _copied(output[self.part])
            results[name] = rows if self.example is None else like_host(self.example, rows)
        return results


class _Batch:
    """Requests that run together.

    Attributes:
        since: when the first one came.
        sealed: it takes no more requests, and is due.
        full: it was sealed because there was no more room.
    """

    def __init__(self, group: _Group, since: float) -> None:
        self.group, self.since = group, since
        self.requests: list[_Request] = []
        self.samples = 0
        self.sealed = self.full = False


class _Queue:
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
        self._open: dict[Shapes, _Batch] = {}
        self._waiting: deque[_Batch] = deque()
        self._closing = self._dropping = False
        self._requests = self._samples = self._batches = self._full = 0
        self._waited = self._longest = 0.0

    # Callers ---------------------------------------------------------------------------------------------------------

    def enter(self, request: _Request) -> None:
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
                batch = self._open[group.shapes] = _Batch(group, request.accepted)
                self._waiting.append(batch)
                self._ready.notify()  # somebody has to wait for its time
            request.batch = batch
            batch.requests.append(request)
            batch.samples += request.samples
            if batch.samples == group.capacity:
                batch.full = True
                self._seal(batch)

    def wait_for_room(self, request: _Request, timeout: float | None) -> None:
        """Until no more than `most` batches are to run before its own has.

        Raises:
            Busy: there were, for `timeout` seconds; the request has left.
            DeviceError: this was closed without finishing.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            with self._ready:
                while self._beyond(request):
                    left = _LOOK if end is None else end - time.monotonic()
                    if left <= 0:
                        raise Busy(
                            f"no room in {timeout:.3g} s: {self.most} batches wait already (max_queue); call less often, "
                            "wait longer, or make the batcher with more"
                        )
                    self._room.wait(min(left, _LOOK))
                if self._dropping:
                    raise DeviceError(CLOSED)
        except BaseException:
            self.leave(request)
            raise

    def leave(self, request: _Request) -> None:
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

    def _beyond(self, request: _Request) -> bool:
        places = (index for index, batch in enumerate(self._waiting) if batch is request.batch)
        return next(places, 0) >= self.most and not self._dropping

    def _seal(self, batch: _Batch) -> None:
        if not batch.sealed:
            batch.sealed = True
            del self._open[batch.group.shapes]
            self._ready.notify()

    # Threads that run batches ------------------------------------------------------------------------------------------

    def take(self) -> _Batch | None:
        """The next batch to run, when there is one; None: this is closed, and nothing is left."""
        with self._ready:
            while True:
                now = self._clock()
                batch = self._due(now)
                if batch is not None:
                    self._waiting.remove(batch)
                    self._room.notify_all()
                    if self._waiting:
                        self._ready.notify()  # somebody has to wait for its time
                    return batch
                if self._closing and not self._waiting:
                    return None
                ends = [batch.since + self._delay - now for batch in self._waiting]
                self._ready.wait(min(_LOOK, *ends) if ends else _LOOK)

    def started(self, batch: _Batch, requests: Sequence[_Request]) -> None:
        with self._ready:
            now = self._clock()
            waits = [now - request.accepted for request in requests]
            self._requests += len(requests)
            self._samples += sum(request.samples for request in requests)
            self._batches += 1
            self._full += batch.full
            self._waited += sum(waits)
            self._longest = max(self._longest, *waits)

    def _due(self, now: float) -> _Batch | None:
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

    def close(self, finish: bool = True) -> list[_Request]:
        """Accept nothing more. Returns: requests to cancel, if what waits shall not be finished."""
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


_queues: weakref.WeakSet[_Queue] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """At the end of the process, what was accepted is done: a thread that dies inside a CUDA call may crash."""
    for queue in tuple(_queues):
        queue.close()
        if queue._process == os.getpid():
            queue.join()


def _serve(session: Session, queue: _Queue) -> None:
    buffer = _Buffer(session)
    while _serve_one(session, queue, buffer):
        pass


def _serve_one(session: Session, queue: _Queue, buffer: _Buffer) -> bool:
    """Run the next batch. (A function of its own: what it holds is gone while the next is waited for.)"""
    batch = queue.take()
    if batch is None:
        return False
    try:
        requests = [request for request in batch.requests if request.starts()]
        if requests:
            _run(session, queue, buffer, batch, requests)
        results = [(request.future, request.results()) for request in requests if request.future is not None]
        for future, result in results:
            future.set_result(result)
    except BaseException as error:  # whatever it is, nobody shall wait for ever
        for request in batch.requests:
            request.fail(_own(error))
    finally:
        _tell(batch.requests)
        batch.requests.clear()  # they refer to it: results shall not wait for the garbage collector
    return True


def _run(session: Session, queue: _Queue, buffer: _Buffer, batch: _Batch, requests: Sequence[_Request]) -> None:
    """Give each request the outputs."""
    queue.started(batch, requests)
    samples = 0
    for request in requests:
        request.first = samples
        samples += request.samples
    size = next(size for size in batch.group.sizes if size >= samples)
    arrays = buffer.arrays(batch.group.shapes, size)
    _copy(requests, arrays)
    if size > samples:
        for array in arrays.values():
            array[samples:] = array[samples - 1]
    outputs = session.run(arrays)
    for name, output in outputs.items():
        if output.shape[:1] != (size,):
            raise EngineError(
                f"output {name!r} has shape {x(output.shape)} for a batch of {size}: its first axis isn't the batch, so that "
                "it can't be divided among the requests; call Session.run"
            )
    for request in requests:
        request.outputs, request.alone = outputs, request.samples == size


def _copy(requests: Sequence[_Request], arrays: Mapping[str, Array]) -> None:
    """Samples into the batch; as far as possible in one stretch, without the GIL."""
    rows = []
    for index, target in enumerate(arrays.values()):
        for request in requests:
            source = request.arrays[index]
            if available() and source.flags.c_contiguous:
                rows.append(copying(start(target) + request.first * target.strides[0], start(source), source.nbytes))
            else:
                np.copyto(target[request.part], source)
    if rows:
        Stretch(rows).run()


def _tell(requests: Sequence[_Request]) -> None:
    """Wake who waits: each thread, and each event loop once for all its tasks."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for request in requests:
        if request.task is not None:
            loops.setdefault(request.task[0], []).append(request.task[1])
        elif request.future is None:
            request.done.release()
    for loop, futures in loops.items():
        with contextlib.suppress(RuntimeError):  # it was closed over its tasks
            loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _copied(rows: Array) -> Array:
    copied: Array = np.empty(rows.shape, rows.dtype)
    if rows.nbytes > MAPPED:
        np.copyto(copied, rows)
    else:
        _bytes(copied)[:] = _bytes(rows)  # keeps the GIL: letting it go takes longer where threads queue for it
    return copied


def _bytes(array: Array) -> memoryview:
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # nothing in it, or a type such as bfloat16, which buffers don't know
        return array.reshape(-1).view(np.uint8).data


def _own(error: BaseException) -> BaseException:
    """An error for one caller alone, where it can be copied: raising one changes its traceback."""
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except Exception:
        return error


def _check_axes(inputs: Sequence[Tensor], outputs: Sequence[Tensor], elsewhere: Collection[str]) -> None:
    """Raise UsageError unless the first axis of every tensor can be the batch; `elsewhere` are those that have it elsewhere."""
    if not inputs:
        raise UsageError("the engine has no inputs: there is nothing to put together; call Session.run")
    batch = inputs[0].shape[0] if inputs[0].shape else -1
    for role, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            if tensor.on_host or tensor.name in elsewhere or tensor.shape[:1] != (batch,):
                raise UsageError(
                    f"{role} {tensor.name!r} has shape {x(tensor.shape)}, and its first axis isn't a batch of "
                    f"{'any size' if batch == -1 else batch}: requests can't be put together; call Session.run"
                )


def _inside(shape: Shape, allowed: ShapeRange) -> bool:
    """Whether one sample's shape is in a profile's range."""
    low, high = allowed.min[1:], allowed.max[1:]
    return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high))


def _batches(profile: Mapping[str, ShapeRange], inputs: Sequence[Tensor]) -> list[Range]:
    """The batches that a profile takes; none, if its inputs have none in common."""
    low = max(profile[tensor.name].min[0] for tensor in inputs)
    high = min(profile[tensor.name].max[0] for tensor in inputs)
    return [(max(1, low), high)] if max(1, low) <= high else []


def _sizes(ranges: Sequence[Range], capacity: int) -> tuple[int, ...]:
    """The sizes that batches of 1 to `capacity` samples run at, growing: powers of two, the ends of ranges, the capacity."""
    candidates = {
        capacity,
        *(end for ends in ranges for end in ends),
        *(1 << bit for bit in range(capacity.bit_length())),
    }
    sizes = sorted(size for size in candidates if any(low <= size <= high for low, high in ranges))
    return tuple(size for index, size in enumerate(sizes) if not index or sizes[index - 1] < capacity)
