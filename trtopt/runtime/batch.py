"""Batches of several callers' samples: their sizes, the requests in them, and how one runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.core.values import x
from trtopt.cuda.arrays import like_host, start
from trtopt.cuda.tensors import Shape
from trtopt.data.rebatch import share
from trtopt.runtime.launcher import MAPPED
from trtopt.runtime.session import Session
from trtopt.runtime.stretch import AVAILABLE, COPY, NativeCall

Array = NDArray[Any]
Shapes = tuple[Shape, ...]  # of one sample, without the batch axis, for each input
_REMEMBERED = 4096  # shapes of samples
_VIEWS = 64  # of one thread's buffers


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Samples of one caller, who waits for `done`, for the future of a `task`, or for `future`."""

    shapes: Shapes
    capacity: int  # the most samples that a batch of these shapes holds
    samples: int
    arrays: list[Array]
    example: Any = None  # an array of the library that results are made arrays of; None: NumPy's
    done: threading.Lock = field(default_factory=threading.Lock)
    task: asyncio.Future[None] | None = None
    future: Future[dict[str, Any]] | None = None
    error: BaseException | None = None  # CancelledError where nobody wants its results any more
    rows: dict[str, Array] = field(default_factory=dict)  # its part of each output of the batch
    accepted: float = 0.0  # seconds

    def starts(self) -> bool:
        """Return False if nobody wants its results any more; its batch is about to run."""
        return self.error is None if self.future is None else self.future.set_running_or_notify_cancel()

    def results(self) -> dict[str, Any]:
        """Return arrays of the caller's own, or raise what went wrong."""
        if self.error is not None:
            raise self.error
        results = {}
        for name, rows in self.rows.items():
            if rows.base is not None:  # not all of a batch's output, which is new
                copied = np.empty(rows.shape, rows.dtype)
                if rows.nbytes > MAPPED:
                    np.copyto(copied, rows)
                else:  # keeps the GIL: letting it go takes longer where threads queue for it
                    _bytes(copied)[:] = _bytes(rows)
                rows = copied
            results[name] = rows if self.example is None else like_host(self.example, rows)
        return results


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that run together, the first of which came at `since`. Once `sealed` it takes no more, and is due."""

    shapes: Shapes
    since: float
    requests: list[Request] = field(default_factory=list)
    samples: int = 0
    sealed: bool = False
    full: bool = False


class BatchSizes:
    """The sizes that batches for a session run at: powers of two and the ends of its profiles, and at the most `most`."""

    def __init__(self, session: Session, max_batch: int | None) -> None:
        _check_axes(session)
        self._signature = session._signature
        limits = set[int]()  # the ends of what profiles take
        for profile in session.profiles:
            ranges = [profile[tensor.name] for tensor in self._signature.inputs]
            limits |= {max(1, *(item.min[0] for item in ranges)), min(item.max[0] for item in ranges)}
        limits = limits or {self._signature.inputs[0].shape[0]} - {-1}
        if not limits and max_batch is None:
            raise UsageError(
                f"max_batch isn't given, and {session.engine.name} doesn't say how large its batches may be: give "
                "max_batch=32, for example"
            )
        if max_batch is not None and limits and max_batch > max(limits):
            raise UsageError(
                f"max_batch is {max_batch}; the engine takes batches of at most {max(limits)}: build it with other `shapes=`"
            )
        self.most = max_batch or max(limits)
        powers = (1 << bit for bit in range(max(limits, default=self.most).bit_length()))
        self._all = sorted({*powers, *limits, self.most})
        self.of = functools.lru_cache(_REMEMBERED)(self._find)

    def _find(self, shapes: Shapes) -> tuple[int, ...]:
        """Return the sizes that batches of these samples run at; UsageError, the session's, where no profile takes them."""
        sizes: list[int] = []
        for size in self._all:
            with contextlib.suppress(UsageError):
                self._signature.profile([(size, *shape) for shape in shapes])
                sizes.append(size)
            if sizes and sizes[-1] >= self.most:
                break
        if not sizes:
            self._signature.profile([(self._all[0], *shape) for shape in shapes])  # says why
        return tuple(sizes)


def _check_axes(session: Session) -> None:
    """Raise UsageError unless the first axis of every input can be the batch, and some axis of every output."""
    signature = session._signature
    if not signature.inputs:
        raise UsageError("the engine has no inputs: there is nothing to put together; call Session.run")
    batch = signature.inputs[0].shape[0] if signature.inputs[0].shape else -1
    for tensors, infos in ((signature.inputs, session.inputs), (signature.outputs, session.outputs)):
        for tensor, axis in zip(tensors, (info.batch_axis for info in infos)):
            size = tensor.shape[axis] if axis is not None and axis < len(tensor.shape) else 0
            role, odd = ("input", axis) if tensors is signature.inputs else ("output", False)
            fits = size == batch or (role == "output" and size > 0 < batch and size % batch == 0)
            if tensor.on_host or odd or not fits:
                raise UsageError(
                    f"{role} {tensor.name!r} has shape {x(tensor.shape)}, and its first axis isn't a batch of "
                    f"{'any size' if batch == -1 else batch}: requests can't be put together; call Session.run"
                )


class BatchRunner:
    """Runs batches in a session, from page-locked memory of each thread, which only grows."""

    def __init__(self, session: Session, sizes: BatchSizes) -> None:
        self._session, self._sizes, self._memory = session, sizes, threading.local()

    def run(self, shapes: Shapes, requests: Sequence[Request]) -> None:
        stops = list(itertools.accumulate(request.samples for request in requests))
        parts, samples = list(zip(requests, (0, *stops), stops)), stops[-1]
        size = next(size for size in self._sizes.of(shapes) if size >= samples)
        arrays = self._arrays(shapes, size)
        rows = []  # of samples that are copied in one stretch, without the GIL
        for index, target in enumerate(arrays.values()):
            for request, first, stop in parts:
                source = request.arrays[index]
                if AVAILABLE and source.flags.c_contiguous:
                    rows.append((COPY, start(target) + first * target.strides[0], start(source), source.nbytes))
                else:
                    target[first:stop] = source
        if rows:
            NativeCall(rows).run_without_gil()
        for array in arrays.values() if size > samples else ():
            array[samples:] = array[samples - 1]
        outputs = self._session.run(arrays)
        for info in self._session.outputs:
            for request, first, stop in parts:
                request.rows[info.name] = share(outputs[info.name], info, size, first, stop)

    def _arrays(self, shapes: Shapes, samples: int) -> Mapping[str, Array]:
        """Return arrays of so many samples, at the start of this thread's memory: the same objects each time, as far as
        possible."""
        memory: dict[str, Array] = self._memory.__dict__.setdefault("flat", {})
        seen: dict[Any, dict[str, Array]] = self._memory.__dict__.setdefault("views", {})
        arrays = seen.get((shapes, samples))
        if arrays is None:
            arrays = {}
            for info, shape in zip(self._session.inputs, shapes):
                name, whole = info.name, (samples, *shape)
                if name not in memory or memory[name].size < math.prod(whole):
                    seen.clear()
                    memory[name] = self._session.pinned(name, whole).reshape(-1)
                arrays[name] = memory[name][: math.prod(whole)].reshape(whole)
            if len(seen) >= _VIEWS:
                seen.clear()
            seen[shapes, samples] = arrays
        return arrays


def tell(requests: Sequence[Request]) -> None:
    """Wake who waits: each thread, each event loop once for all its tasks, and then futures, with what they call."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for request in requests:
        if request.task is not None:
            loops.setdefault(request.task.get_loop(), []).append(request.task)
        elif request.future is None:
            request.done.release()
    for loop, futures in loops.items():
        with contextlib.suppress(RuntimeError):  # it was closed over its tasks
            loop.call_soon_threadsafe(_wake, futures)
    for request in requests:
        if request.future is not None and not request.future.done():
            try:
                request.future.set_result(request.results())
            except BaseException as error:  # whatever it is, no caller may wait forever
                request.future.set_exception(error)


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data  # as bytes: buffers don't know types such as bfloat16
