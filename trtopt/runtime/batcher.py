"""Batcher: single samples from many threads or asyncio tasks, run by a session in large batches.

with trtopt.Session("resnet50.engine") as session, trtopt.Batcher(session) as batcher:
    logits = batcher.run({"input": image})["logits"]  # from any thread
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Described
from trtopt.core.errors import Busy, DeviceError, UsageError
from trtopt.core.options import typed
from trtopt.core.values import ShapeRange, TensorInfo, check_timeout, parse_seconds, x
from trtopt.cuda.arrays import View, like_host, start, views
from trtopt.cuda.tensors import Shape, Tensor, check_array
from trtopt.data.rebatch import share
from trtopt.runtime.contexts import MAPPED
from trtopt.runtime.native_call import NativeCall, available, copying
from trtopt.runtime.session import Session
from trtopt.runtime.slot_pool import CLOSED as SESSION_CLOSED

Array = NDArray[Any]
Shapes = tuple[Shape, ...]  # of one sample, without the batch axis, for each input
Range = tuple[int, int]  # batches from, to

_REMEMBERED = 4096  # shapes of samples
_VIEWS = 64  # of one buffer
_POLL = (
    1.0  # seconds between looks of a thread that waits: garbage collection may close a queue where no notify is heard
)
CLOSED = "this batcher is closed; make another one"


@dataclass(frozen=True)
class BatcherStats(Described):
    """The work of a batcher since it was made.

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


class Group(NamedTuple):
    """Samples that can run together: their shapes, how many a batch holds, and the sizes that batches run at, growing."""

    shapes: Shapes
    capacity: int
    sizes: tuple[int, ...]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Samples of one caller, who waits for `done`, for the future of a `task`, or for `future`.

    Attributes:
        example: an array of the library that results are made arrays of; None: NumPy's.
        accepted: when the caller came, in seconds of the queue's clock.
    """

    group: Group
    samples: int
    arrays: list[Array]
    example: Any = None
    done: threading.Lock = field(default_factory=threading.Lock)
    task: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
    future: Future[dict[str, Any]] | None = None
    batch: Batch | None = None
    results: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    accepted: float = 0.0

    def starts(self) -> bool:
        """Tell that its batch is about to run. False: nobody wants its results any more."""
        return self.error is None if self.future is None else self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        if self.future is not None:
            self.future.cancel()
        self.error = self.error or CancelledError()

    def collect(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return self.results


class Batch:
    """Requests that run together; `since`: when the first one came; `sealed`: it takes no more, and is due."""

    def __init__(self, group: Group, since: float) -> None:
        self.group, self.since = group, since
        self.requests: list[Request] = []
        self.samples = 0
        self.sealed = self.full = False


class Queue:
    """Batches that fill or wait, the oldest first: what callers and the threads that run batches share.

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

    def enter(self, request: Request) -> None:
        """Put a request into a batch; DeviceError if this is closed."""
        group = request.group
        with self._ready:
            if self._closing:
                raise DeviceError(CLOSED)
            request.accepted = self._clock()
            batch = self._open.get(group.shapes)
            if batch is not None and batch.samples + request.samples > group.capacity:
                self._seal(batch, full=True)
                batch = None
            if batch is None:
                batch = self._open[group.shapes] = Batch(group, request.accepted)
                self._waiting.append(batch)
                self._ready.notify()  # a thread has to wait until it is due
            request.batch = batch
            batch.requests.append(request)
            batch.samples += request.samples
            if batch.samples == group.capacity:
                self._seal(batch, full=True)

    def wait_for_room(self, request: Request, timeout: float | None) -> None:
        """Wait until no more than `most` batches are to run before its own has.

        Raises:
            Busy: there were, for `timeout` seconds; the request has left.
            DeviceError: this was closed without finishing.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            with self._ready:
                while self._is_beyond(request):
                    seconds = _POLL if end is None else end - time.monotonic()
                    if seconds <= 0:
                        raise Busy(
                            f"no room in {timeout:.3g} s: {self.most} batches wait already (max_queue); call less often, "
                            "wait longer, or make the batcher with more"
                        )
                    self._room.wait(min(seconds, _POLL))
                if self._dropping:
                    raise DeviceError(CLOSED)
        except BaseException:
            self.leave(request)
            raise

    def leave(self, request: Request) -> None:
        """Take out a request whose caller doesn't want its results."""
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

    def _is_beyond(self, request: Request) -> bool:
        places = (index for index, batch in enumerate(self._waiting) if batch is request.batch)
        return next(places, 0) >= self.most and not self._dropping

    def _seal(self, batch: Batch, full: bool = False) -> None:
        if not batch.sealed:
            batch.sealed, batch.full = True, full
            del self._open[batch.group.shapes]
            self._ready.notify()

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
                self._ready.wait(min([_POLL, *(batch.since + self._delay - now for batch in self._waiting)]))

    def started(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Count a batch that runs now."""
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

    def close(self, finish: bool = True) -> None:
        """Accept nothing more; without `finish`, cancel what waits."""
        if os.getpid() != self._process:  # a thread that isn't here may have the lock
            return
        with self._ready:
            self._closing, self._dropping = True, self._dropping or not finish
            self._ready.notify_all()
            self._room.notify_all()
            requests = [] if finish else [request for batch in self._waiting for request in batch.requests]
        for request in requests:
            request.cancel()

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


# Threads that run batches ------------------------------------------------------------------------------------------


class _Runner:
    """A thread's loop, and its memory for the inputs of one batch, of any shape; that only grows."""

    def __init__(self, session: Session, queue: Queue) -> None:
        self._session, self._queue = session, queue
        self._memory: dict[str, Array] = {}  # flat
        self._views: dict[tuple[Shapes, int], dict[str, Array]] = {}

    def __call__(self) -> None:
        """Run batches until the queue is closed and empty."""
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next batch. (A function of its own: its locals are gone while the next is waited for.)"""
        batch = self._queue.take()
        if batch is None:
            return False
        try:
            requests = [request for request in batch.requests if request.starts()]
            if requests:
                self._run(batch, requests)
        except BaseException as error:  # whatever it is, no caller may wait forever
            for request in batch.requests:
                request.error = request.error or _own(error)
        finally:
            _deliver(batch.requests)
            batch.requests.clear()  # they refer to it: results must be freed without the garbage collector
        return True

    def _run(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Run requests together and give each its rows: arrays of the caller's own."""
        self._queue.started(batch, requests)
        ends = list(itertools.accumulate(request.samples for request in requests))
        parts = [slice(end - request.samples, end) for request, end in zip(requests, ends)]
        size = next(size for size in batch.group.sizes if size >= ends[-1])
        arrays = self._arrays(batch.group.shapes, size)
        copies = []
        for index, target in enumerate(arrays.values()):
            for request, part in zip(requests, parts):
                source = request.arrays[index]
                if available() and source.flags.c_contiguous:
                    copies.append(copying(start(target) + part.start * target.strides[0], start(source), source.nbytes))
                else:
                    np.copyto(target[part], source)
        if copies:
            NativeCall(copies).run_without_gil()
        if size > ends[-1]:
            for array in arrays.values():
                array[ends[-1] :] = array[ends[-1] - 1]
        outputs = self._session.run(arrays)
        for request, part in zip(requests, parts):
            for info in self._session.outputs:
                output = outputs[info.name]
                rows = share(output, info, size, part.start, part.stop)
                rows = rows if rows is output else _copied(rows)
                request.results[info.name] = rows if request.example is None else like_host(request.example, rows)

    def _arrays(self, shapes: Shapes, samples: int) -> dict[str, Array]:
        """Arrays of so many samples, at the start of the memory. The same objects each time, as far as possible: the session
        remembers whose addresses it knows."""
        arrays = self._views.get((shapes, samples))
        if arrays is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            arrays = {}
            for tensor, shape in zip(self._session._signature.inputs, shapes):
                whole = (samples, *shape)
                memory = self._memory.get(tensor.name)
                if memory is None or memory.size < math.prod(whole):
                    self._views.clear()
                    memory = self._memory[tensor.name] = self._session.pinned(tensor.name, whole).reshape(-1)
                arrays[tensor.name] = memory[: math.prod(whole)].reshape(whole)
            self._views[shapes, samples] = arrays
        return arrays


def _deliver(requests: Sequence[Request]) -> None:
    """Settle futures, and wake who waits: each thread, and each event loop once for all its tasks."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for request in requests:
        if request.task is not None:
            loops.setdefault(request.task[0], []).append(request.task[1])
        elif request.future is None:
            request.done.release()
        elif not request.future.done():
            if request.error is None:
                request.future.set_result(request.results)
            else:
                request.future.set_exception(request.error)
    for loop, futures in loops.items():
        with contextlib.suppress(RuntimeError):  # it was closed over its tasks
            loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _own(error: BaseException) -> BaseException:
    """An error for one caller alone, where it can be copied: raising one changes its traceback."""
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except Exception:
        return error


class Batcher:
    """Collects requests of equal shapes into batches that a session runs.

    A request joins the batch of its shape that is filling. A batch is due when it is full, when its oldest request has waited
    `max_delay`, or when more than `max_queue` batches wait; whenever one of the `slots` is free it takes the due batch whose
    first request is oldest. A partial batch runs at the next power of two that the engine takes (its last sample is repeated),
    since each size that runs needs a context and CUDA graphs. It doesn't start early because the GPU is idle: after a full
    batch all its callers come back at once, and the first would take the GPU for itself; `max_delay=0` is for few callers.

    Results are arrays of the caller's own. Inputs must stay as they are while `run` or `run_async` waits; `submit` copies them.
    Callbacks of futures run in the batcher's threads: one that waits there holds up a slot. Many tasks of one event loop are
    served faster than as many threads, which queue for Python's GIL.

    Args:
        session: stays the caller's: close it after the batcher. The first axis of each of its inputs must be the batch,
            and some axis of each output (`batch_axis` in `Session.outputs`).
        max_delay: how long a request waits for others at the most while a slot is free: "2ms", "500us", "0.5s", or seconds
            as a number.
        max_batch: samples a batch at the most; None: the largest batch of the session's profiles.
        max_queue: batches that fill or wait for a slot before `submit` holds its callers up.
        slots: batches that run at the same time, each with page-locked memory for its inputs, at the most as many as calls of
            the session (`contexts`, on each GPU); None: two for each GPU.
        clock: gives seconds that only grow, for tests.

    Raises:
        UsageError: an argument that can't be right, an input or output without a batch axis, or no profile that says how large
            batches may be.
        DeviceError: the session is closed, or this process was forked from the one that opened it.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        session._alive()
        if session._closing:
            raise DeviceError(SESSION_CLOSED)
        delay = parse_seconds(max_delay, "`max_delay=`")
        usual, most = 2 * max(1, len(session._gpus)), session._slots.most
        slots = usual if slots is None else slots
        for name, value in (("max_queue", max_queue), ("slots", slots), ("max_batch", max_batch)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value!r}; a number of at least 1 is needed")
        if slots > max(usual, most):
            raise UsageError(
                f"slots is {slots}; the session runs {most} calls at the same time, and more are of no use"
            )
        self._session, self._process = session, os.getpid()
        self._inputs = session._signature.inputs
        self._names = tuple(tensor.name for tensor in self._inputs)
        _check_axes(self._inputs, session._signature.outputs, (*session.inputs, *session.outputs))
        self.max_delay = delay
        self.max_batch = self._largest(max_batch)
        self._groups: dict[Shapes, Group] = {}
        self._queue = Queue(delay, max_queue, clock)
        self._queue.threads = tuple(
            threading.Thread(target=_Runner(session, self._queue), name=f"trtopt-batcher-{index}", daemon=True)
            for index in range(slots)
        )
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
        check_timeout(timeout)
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
        check_timeout(timeout)
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
        return request.collect()

    async def run_async(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """`run` for asyncio: never blocks the event loop.

        Raises: as `run`, without Busy.
        """
        request = self._request(inputs)
        loop = asyncio.get_running_loop()
        signal: asyncio.Future[None] = loop.create_future()
        request.task = loop, signal
        self._queue.enter(request)
        try:
            await signal
        except BaseException:
            self._queue.leave(request)
            raise
        return request.collect()

    def stats(self) -> BatcherStats:
        """Return what it did so far."""
        return self._queue.stats()

    def close(self, finish: bool = True) -> None:
        """Accept nothing more, and wait until what was accepted is done. A second call does nothing.

        Args:
            finish: run what waits; else it is cancelled, and those who wait for room get a DeviceError.
        """
        if os.getpid() != self._process:  # its threads aren't in the child
            return
        self._queue.close(finish)
        self._queue.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finish=kind is None)

    def _largest(self, max_batch: int | None) -> int:
        """Samples a batch at the most."""
        limits = [high for profile in self._session.profiles for _, high in _batches(profile, self._inputs)]
        limits = limits or [size for size in [self._inputs[0].shape[0]] if size != -1]
        if not limits and max_batch is None:
            raise UsageError(
                f"max_batch isn't given, and {self._session.engine.name} doesn't say how large its batches may be: give "
                "max_batch=32, for example"
            )
        if max_batch is not None and limits and max_batch > max(limits):
            raise UsageError(
                f"max_batch is {max_batch}; the engine takes batches of at most {max(limits)}: build it with other `shapes=`"
            )
        return max_batch or max(limits)

    def _request(self, inputs: Mapping[str, Any]) -> Request:
        """Check what a caller gave, as the session does."""
        self._session._alive()
        try:
            values = [inputs[name] for name in self._names]
        except (KeyError, IndexError, TypeError):
            self._session._signature.check_names(inputs)
            raise
        if len(values) != len(inputs):
            self._session._signature.check_names(inputs)
        arrays: list[Array] = []
        for tensor, array in zip(self._inputs, views(values, 0, self._names)):
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
        return Request(group, samples, arrays, None if type(values[0]) is np.ndarray else values[0])

    def _group(self, full: Shapes) -> Group:
        """Return the batches that samples of these shapes can be in.

        Raises:
            UsageError: no profile takes them; the message is the session's.
        """
        shapes = tuple([shape[1:] for shape in full])
        group = self._groups.get(shapes)
        if group is None:
            signature = self._session._signature
            ranges: list[Range] = []
            for profile in signature.profiles:
                bounds = [profile[tensor.name] for tensor in self._inputs]
                if all(item.holds((item.min[0], *shape)) for shape, item in zip(shapes, bounds)):
                    ranges += _batches(profile, self._inputs)
            if not signature.profiles:
                batch = self._inputs[0].shape[0]
                size = full[0][0] if batch == -1 else batch
                signature.profile([(size, *shape) for shape in shapes])
                ranges = [(1, self.max_batch) if batch == -1 else (batch, batch)]
            if not ranges:
                signature.profile(full)  # says why
            if len(self._groups) >= _REMEMBERED:
                self._groups.clear()
            capacity = min(self.max_batch, max(high for _, high in ranges))
            group = self._groups[shapes] = Group(shapes, capacity, _sizes(ranges, capacity))
        return group


def _check_axes(inputs: Sequence[Tensor], outputs: Sequence[Tensor], infos: Iterable[TensorInfo]) -> None:
    """Raise UsageError unless the first axis of every input can be the batch, and that of `infos` in every output."""
    if not inputs:
        raise UsageError("the engine has no inputs: there is nothing to put together; call Session.run")
    batch = inputs[0].shape[0] if inputs[0].shape else -1
    axes = {info.name: info.batch_axis for info in infos}
    for role, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            axis = axes[tensor.name]
            size = tensor.shape[axis] if axis is not None and axis < len(tensor.shape) else 0
            fits = size == batch or (role == "output" and size > 0 < batch and size % batch == 0)
            if tensor.on_host or not fits or (role == "input" and axis):
                raise UsageError(
                    f"{role} {tensor.name!r} has shape {x(tensor.shape)}, and its first axis isn't a batch of "
                    f"{'any size' if batch == -1 else batch}: requests can't be put together; call Session.run"
                )


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
