"""Batcher: single samples from many threads or asyncio tasks, run by a session in large batches.

with trtopt.Session("resnet50.engine") as session, trtopt.Batcher(session) as batcher:
    logits = batcher.run({"input": image})["logits"]  # from any thread
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import ctypes
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from trtopt.runtime import gate
from trtopt.runtime.bindings import MAPPED, as_bytes
from trtopt.runtime.gate import Gate
from trtopt.runtime.session import Session
from trtopt.runtime.stretch import WIDTH, Stretch, copying

Array = NDArray[Any]
Shapes = tuple[Shape, ...]  # of one sample, without the batch axis, for each input
Range = tuple[int, int]  # batches from, to

_LOOK = (
    1.0  # seconds between looks of a thread that waits: garbage collection may close a queue where no notify is heard
)
_REMEMBERED = 4096  # shapes of samples
_VIEWS = 64  # of one buffer
_AHEAD = 256  # who waits for room further behind isn't looked at
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

    A request joins the batch of its shape that is filling, and its caller's thread copies the samples into that batch's
    page-locked memory, side by side with the other callers. A batch is due when it is full, when its oldest request has
    waited `max_delay`, or when callers wait for room. Whenever one of the `slots` is free it takes the due batch whose first
    request is oldest, so that one batch is copied in and out while another runs and a third fills. A partial batch runs at the
    next power of two that the engine takes (its last sample is repeated, and the further results are dropped), since each
    size that runs needs a context and CUDA graphs. A batch doesn't start early because the GPU is idle: after a full batch
    all its callers come back at once, and the first would take the GPU for itself; where callers are few, `max_delay=0`
    starts whatever there is as soon as a slot is free.

    Results are arrays of the caller's own, copied out of the batch's: keeping one keeps no other caller's in memory. Once
    `submit` returns, or `run_async` waits for its result, the inputs may be changed. Callbacks of futures run in the batcher's
    threads: one that waits there holds up a slot.

    Args:
        session: stays the caller's: close it after the batcher. The first axis of each of its inputs and outputs must be the
            batch.
        max_delay: how long a request waits for others at the most while a slot is free: "2ms", "500us", "0.5s", or seconds
            as a number.
        max_batch: samples a batch at the most; None: the largest batch of the session's profiles.
        max_queue: batches that fill or wait for a slot at the most; beyond, callers wait. Up to `max_queue + slots` batches of
            inputs are held in page-locked memory.
        slots: batches that run at the same time; None: two for each GPU. No more than the session's `contexts` are of use.
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
        _check_axes(self._inputs, session._signature.outputs)
        self.max_delay = delay
        self.max_batch = self._largest(max_batch)
        self._groups: dict[Shapes, _Group] = {}
        self._here = threading.local()
        self._queue = _Queue(functools.partial(_Buffer, session), delay, max_queue, clock)
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
            DeviceError: this or its session is closed, there is no more page-locked memory, or this process was forked.
                What `Session.run` raises goes to every request of the batch, by the future's `result()`.
        """
        request, arrays = self._request(inputs)
        future: Future[dict[str, Any]] = Future()
        request.future = future
        try:
            self._enter(request, timeout)
            self._fill(request, arrays)
        except BaseException:
            self._queue.abandon(request)
            raise
        return future

    def _enter(self, request: _Request, timeout: float | None) -> None:
        """Wait for rows in a batch."""
        room = threading.Lock()
        room.acquire()
        request.called = lambda _: room.release()
        if self._queue.enter(request):
            return
        if not room.acquire(timeout=-1 if timeout is None else max(0.0, timeout)) and self._queue.leave(request):
            raise Busy(
                f"no room in {timeout:.3g} s: {self._queue.most} batches wait already (max_queue); call less often, "
                "wait longer, or make the batcher with more"
            )
        request.check()

    def run(self, inputs: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """`submit` and wait for the results.

        Raises: as `submit`, and as `Session.run`.
        """
        if gate.available():
            return self._run(inputs, timeout)
        future = self.submit(inputs, timeout=timeout)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _run(self, inputs: Mapping[str, Any], timeout: float | None) -> dict[str, Any]:
        """`run` with one stretch: where many threads queue for Python's GIL, each time one lets it go costs more than all that
        is done here."""
        request, arrays = self._request(inputs)
        caller: _Caller | None = getattr(self._here, "caller", None)
        if caller is None:
            caller = self._here.caller = _Caller(len(self._inputs))
        caller.arrived.value = 0
        request.caller, request.direct = caller, True
        try:
            self._enter(request, timeout)
            if request.direct:
                caller.copy_and_wait(request, [np.ascontiguousarray(array) for array in arrays])
            else:
                self._fill(request, arrays)
                caller.gate.wait(-1)
        except BaseException:
            self._here.caller = None  # somebody may still open its gate
            self._queue.abandon(request)
            raise
        request.check()
        return request.results()

    async def run_async(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """`run` for asyncio: never waits in the event loop, also not while the queue is full; only the copy of the samples is
        done there.

        Raises: as `run`, without Busy.
        """
        request, arrays = self._request(inputs)
        future: Future[dict[str, Any]] = Future()
        request.future = future
        loop = asyncio.get_running_loop()
        room: asyncio.Future[None] = loop.create_future()

        def called(request: _Request) -> None:
            try:
                loop.call_soon_threadsafe(_wake, room)
            except RuntimeError:  # the loop was closed over a task that still waited
                self._queue.abandon(request)

        request.called = called
        try:
            if not self._queue.enter(request):
                await room
                request.check()
            self._fill(request, arrays)
        except BaseException:
            self._queue.abandon(request)
            raise
        return await asyncio.wrap_future(future)

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

    def _request(self, inputs: Mapping[str, Any]) -> tuple[_Request, list[Array]]:
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
        return _Request(group, samples, None if type(given[0]) is np.ndarray else given[0]), arrays

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
            nbytes = tuple(tensor.nbytes(shape) for tensor, shape in zip(self._inputs, shapes))
            group = self._groups[shapes] = _Group(shapes, nbytes, capacity, _sizes(ranges, capacity))
        return group

    def _fill(self, request: _Request, arrays: Sequence[Array]) -> None:
        for target, array in zip(request.rows(), arrays):
            np.copyto(target, array)
        self._queue.filled(request)


@dataclass(frozen=True)
class _Group:
    """Samples that can run together.

    Attributes:
        shapes, nbytes: of one sample, for each input.
        capacity: samples a batch at the most.
        sizes: that batches run at, growing; the last is the first that isn't below the capacity.
    """

    shapes: Shapes
    nbytes: tuple[int, ...]
    capacity: int
    sizes: tuple[int, ...]


class _Buffer:
    """Memory for the inputs of one batch, of any shape; it only grows.

    Attributes:
        gate: for who runs the batch, when all callers that copy without the GIL have done so.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.gate = Gate() if gate.available() else None
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


class _Caller:
    """A thread that calls `run`: its gate, which opens when its batch has run, and the rows of its calls.

    Attributes:
        arrived: 1 if the samples are in the batch.
    """

    def __init__(self, inputs: int) -> None:
        self.gate = Gate()
        self.arrived, self._one = ctypes.c_int64(), ctypes.c_int64(1)
        copies = [copying(0, 0, 0)] * inputs
        arrived = copying(ctypes.addressof(self.arrived), ctypes.addressof(self._one), 8)
        self._stretch = Stretch([self.gate.adding(-1), *copies, self.gate.adding(1), arrived, self.gate.waiting()])

    def copy_and_wait(self, request: _Request, arrays: Sequence[Array]) -> None:
        """Args:
        arrays: the samples, contiguous.
        """
        batch, words, word = request.batch, self._stretch.words, WIDTH
        assert batch is not None
        assert batch.buffer.gate is not None
        for array, whole, nbytes in zip(arrays, batch.arrays.values(), request.group.nbytes):
            words[word + 1], words[word + 2] = start(whole) + request.first * nbytes, start(array)
            words[word + 3] = request.samples * nbytes
            word += WIDTH
        words[word + 1] = batch.buffer.gate.address
        if self._stretch.run():
            self.gate.wait()


class _Request:
    """Samples of one caller.

    Attributes:
        future: of the results; None: `caller` waits for them.
        direct: the caller's thread copies the samples and waits, without the GIL.
        filling: the caller copies the samples some other way, and hasn't yet.
        example: an array of the library that results are made arrays of; None: NumPy's.
        called: runs once, from any thread, when the request has rows in a batch or `error` is set, unless it had at once.
        accepted: when the caller came, in seconds of the queue's clock.
        outputs: of the whole batch; `alone`: it holds nobody else's samples.
    """

    __slots__ = (
        "accepted",
        "alone",
        "batch",
        "called",
        "caller",
        "direct",
        "error",
        "example",
        "filling",
        "first",
        "future",
        "group",
        "outputs",
        "samples",
    )

    def __init__(self, group: _Group, samples: int, example: Any = None) -> None:
        self.group, self.samples, self.example = group, samples, example
        self.future: Future[dict[str, Any]] | None = None
        self.caller: _Caller | None = None
        self.called: Callable[[_Request], object] = bool
        self.error: BaseException | None = None
        self.batch: _Batch | None = None
        self.outputs: Mapping[str, Array] = {}
        self.first, self.accepted = 0, 0.0
        self.alone = self.direct = self.filling = False

    @property
    def part(self) -> slice:
        return slice(self.first, self.first + self.samples)

    def rows(self) -> list[Array]:
        """Where its samples go, for each input."""
        assert self.batch is not None
        return [array[self.part] for array in self.batch.arrays.values()]

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def starts(self) -> bool:
        """Its batch is about to run. False: nobody wants its results any more."""
        return self.error is None if self.future is None else self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        if self.future is None:
            self.error = self.error or CancelledError()
        else:
            self.future.cancel()

    def fail(self, error: BaseException) -> None:
        if self.future is None:
            self.error = self.error or error
        elif not self.future.done():
            self.future.set_exception(error)

    def results(self) -> dict[str, Any]:
        """Arrays of the caller's own."""
        results = {}
        for name, output in self.outputs.items():
            rows = output if self.alone else _copied(output[self.part])
            results[name] = rows if self.example is None else like_host(self.example, rows)
        return results


class _Batch:
    """Requests that run together.

    Attributes:
        filling, direct: requests whose callers still copy, and those whose callers tell the buffer's gate when they have.
        sealed: it takes no more requests, and is due.
        full: it was sealed because there was no more room.
    """

    def __init__(self, group: _Group, buffer: _Buffer, since: float) -> None:
        self.group, self.buffer, self.since = group, buffer, since
        self.arrays = buffer.arrays(group.shapes, group.sizes[-1])  # at once: memory that grows loses what it holds
        self.requests: list[_Request] = []
        self.samples = self.filling = self.direct = 0
        self.sealed = self.full = False


class _Queue:
    """Batches that fill or wait, the oldest first, and those who wait for room.

    Args:
        make: memory for another batch.
        delay: seconds.
        most: batches at the most.
        clock: gives seconds.
    """

    def __init__(self, make: Callable[[], _Buffer], delay: float, most: int, clock: Callable[[], float]) -> None:
        self._make, self._delay, self.most, self._clock = make, delay, most, clock
        self._process = os.getpid()
        self.threads: tuple[threading.Thread, ...] = ()
        # The garbage collector may call `close` in a thread that has the lock.
        self._ready = threading.Condition(threading.RLock())
        self._open: dict[Shapes, _Batch] = {}
        self._waiting: deque[_Batch] = deque()
        self._blocked: deque[_Request] = deque()
        self._free: list[_Buffer] = []  # the last used one is taken first: the session knows its addresses
        self._closing = False
        self._requests = self._samples = self._batches = self._full = 0
        self._waited = self._longest = 0.0

    # Callers ---------------------------------------------------------------------------------------------------------

    def enter(self, request: _Request) -> bool:
        """Give a request rows in a batch; False: it waits for room, until it is called.

        Raises:
            DeviceError: this is closed, or there is no memory for another batch.
        """
        with self._ready:
            if self._closing:
                raise DeviceError(CLOSED)
            request.accepted = self._clock()
            if self._place(request, not self._blocked):
                return True
            request.direct = False  # when there is room, its thread may be busy with something else
            self._blocked.append(request)
            self._ready.notify()  # now the oldest batch is due
            return False

    def leave(self, request: _Request) -> bool:
        """Wait for room no more. False: it came meanwhile."""
        with self._ready:
            if request not in self._blocked:
                return False
            self._blocked.remove(request)
            return True

    def filled(self, request: _Request) -> None:
        """The caller has copied its samples. A second call does nothing."""
        with self._ready:
            if request.batch is None or not request.filling:
                return
            request.filling = False
            request.batch.filling -= 1
            if request.batch.sealed and not request.batch.filling:
                self._ready.notify()

    def abandon(self, request: _Request) -> None:
        """The caller won't copy its samples, or doesn't want its results: nobody shall wait for it."""
        request.cancel()
        with self._ready:
            absent = request.direct and request.caller is not None and not request.caller.arrived.value
            if self.leave(request) or request.batch is None or not (request.filling or absent):
                return
            for rows in request.rows():
                rows[...] = 0  # old memory may hold indices out of range
            self.filled(request)
            if absent and request.batch.buffer.gate is not None:
                gate.add_one([request.batch.buffer.gate])

    def _place(self, request: _Request, may_begin: bool) -> bool:
        """Give a request rows in the batch that it fits in; `may_begin`: or in a new one."""
        group = request.group
        batch = self._open.get(group.shapes)
        if batch is not None and batch.samples + request.samples > group.capacity:
            batch.full = True
            self._seal(batch)
            batch = None
        if batch is None:
            if not may_begin or len(self._waiting) >= self.most:
                return False
            batch = self._open[group.shapes] = self._begin(request)
            self._waiting.append(batch)
            self._ready.notify()  # somebody has to wait for its time
        request.batch, request.first, request.filling = batch, batch.samples, not request.direct
        batch.requests.append(request)
        batch.samples += request.samples
        batch.filling += request.filling
        batch.direct += request.direct
        if batch.samples == group.capacity:
            batch.full = True
            self._seal(batch)
        return True

    def _begin(self, request: _Request) -> _Batch:
        buffer = self._free.pop() if self._free else self._make()
        try:
            return _Batch(request.group, buffer, request.accepted)
        except BaseException:
            self._free.append(buffer)
            raise

    def _seal(self, batch: _Batch) -> None:
        if not batch.sealed:
            batch.sealed = True
            del self._open[batch.group.shapes]
        if not batch.filling:
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
                    self._admit()
                    if self._waiting:
                        self._ready.notify()  # somebody has to wait for its time
                    return batch
                if self._closing and not self._waiting:
                    return None
                ends = [batch.since + self._delay - now for batch in self._waiting if not batch.sealed]
                self._ready.wait(min(_LOOK, *ends) if ends else _LOOK)

    def release(self, buffer: _Buffer) -> None:
        with self._ready:
            self._free.append(buffer)

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
        """The oldest batch that can start. What is due takes no more requests, though its callers may still copy."""
        for index, batch in enumerate(self._waiting):
            hurried = self._closing or (self._blocked and index == 0)
            if not batch.sealed and (hurried or now - batch.since >= self._delay):
                self._seal(batch)
            if batch.sealed and not batch.filling:
                return batch
        return None

    def _admit(self) -> None:
        """Give those who wait for room what there is. A new batch is for who has waited longest; others may only join one."""
        may_begin = True
        for request in tuple(itertools.islice(self._blocked, _AHEAD)):
            if not (may_begin or self._open):
                return
            try:
                if not self._place(request, may_begin):
                    may_begin = False
                    continue
            except Exception as error:
                request.error = error
            self._blocked.remove(request)
            request.called(request)

    # The whole -------------------------------------------------------------------------------------------------------

    def close(self, finish: bool = True) -> list[_Request]:
        """Accept nothing more. Returns: requests to cancel, if what waits shall not be finished."""
        if os.getpid() != self._process:  # a thread that isn't here may have the lock
            return []
        with self._ready:
            self._closing = True
            requests: list[_Request] = []
            if not finish:
                requests = [request for batch in self._waiting for request in batch.requests]
                while self._blocked:
                    request = self._blocked.popleft()
                    request.error = DeviceError(CLOSED)
                    request.called(request)
            self._ready.notify_all()
            return requests

    def join(self) -> None:
        for thread in self.threads:
            if thread is not threading.current_thread():  # close() in a future's callback
                thread.join()
        with self._ready:
            self._free.clear()

    def stats(self) -> BatcherStats:
        with self._ready:
            return BatcherStats(
                requests=self._requests,
                samples=self._samples,
                batches=self._batches,
                full=self._full,
                mean_batch=self._samples / max(1, self._batches),
                queued=sum(batch.samples for batch in self._waiting) + sum(item.samples for item in self._blocked),
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
    while _serve_one(session, queue):
        pass


def _serve_one(session: Session, queue: _Queue) -> bool:
    """Run the next batch. (A function of its own: what it holds is gone while the next is waited for.)"""
    batch = queue.take()
    if batch is None:
        return False
    requests: list[_Request] = []
    try:
        try:
            if batch.direct and batch.buffer.gate is not None:
                batch.buffer.gate.wait(-batch.direct)
            requests = [request for request in batch.requests if request.starts()]
            if requests:
                _run(session, queue, batch, requests)
        finally:
            queue.release(batch.buffer)
        futures = [(request.future, request.results()) for request in requests if request.future is not None]
        for future, results in futures:
            future.set_result(results)
    except BaseException as error:  # whatever it is, nobody shall wait for ever
        for request in batch.requests:
            request.fail(_own(error))
    finally:
        gate.add_one([request.caller.gate for request in batch.requests if request.caller is not None])
        batch.requests.clear()  # they refer to it: its memory shall not wait for the garbage collector
    return True


def _run(session: Session, queue: _Queue, batch: _Batch, requests: Sequence[_Request]) -> None:
    """Give each request the outputs."""
    queue.started(batch, requests)
    size = next(size for size in batch.group.sizes if size >= batch.samples)
    arrays = batch.buffer.arrays(batch.group.shapes, size)
    if size > batch.samples:
        for array in arrays.values():
            array[batch.samples :] = array[batch.samples - 1]
    outputs = session.run(arrays)
    for name, output in outputs.items():
        if output.shape[:1] != (size,):
            raise EngineError(
                f"output {name!r} has shape {x(output.shape)} for a batch of {size}: its first axis isn't the batch, so that "
                "it can't be divided among the requests; call Session.run"
            )
    alone = len(requests) == 1 and requests[0].samples == size
    for request in requests:
        request.outputs, request.alone = outputs, alone


def _copied(rows: Array) -> Array:
    if rows.nbytes > MAPPED:
        return rows.copy()
    copied = np.empty(rows.shape, rows.dtype)
    as_bytes(copied)[:] = as_bytes(rows)  # keeps the GIL
    return copied


def _own(error: BaseException) -> BaseException:
    """An error for one caller alone, where it can be copied: raising one changes its traceback."""
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except Exception:
        return error


def _check_axes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise UsageError unless the first axis of every tensor can be the batch."""
    if not inputs:
        raise UsageError("the engine has no inputs: there is nothing to put together; call Session.run")
    batch = inputs[0].shape[0] if inputs[0].shape else -1
    for role, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors:
            if tensor.on_host or tensor.shape[:1] != (batch,):
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


def _wake(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
