"""Batcher: single samples from many threads or asyncio tasks, run by a session in large batches.

with trtopt.Session("resnet50.engine") as session, trtopt.Batcher(session) as batcher:
    logits = batcher.run({"input": image})["logits"]  # from any thread
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from trtopt.core.errors import DeviceError, UsageError
from trtopt.core.options import typed
from trtopt.core.values import ShapeRange, TensorInfo, check_timeout, parse_seconds, x
from trtopt.cuda.arrays import View, views
from trtopt.cuda.tensors import Tensor, check_array
from trtopt.runtime.batch_queue import Array, BatcherStats, Group, Queue, Request, Shapes
from trtopt.runtime.batch_threads import serve
from trtopt.runtime.session import Session
from trtopt.runtime.slot_pool import CLOSED

Range = tuple[int, int]  # batches from, to

_REMEMBERED = 4096  # shapes of samples


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
            raise DeviceError(CLOSED)
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
            threading.Thread(target=serve, args=(session, self._queue), name=f"trtopt-batcher-{index}", daemon=True)
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
        return request.results()

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
