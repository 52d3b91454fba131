"""The threads of a batcher: each takes the batch that is due, copies its samples together and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np

from trtopt.cuda.arrays import start
from trtopt.data.rebatch import share
from trtopt.runtime.background import wake
from trtopt.runtime.batch_queue import Array, Batch, Queue, Request, Shapes
from trtopt.runtime.session import Session
from trtopt.runtime.stretch import Stretch, available, copying

_VIEWS = 64  # of one buffer


def serve(session: Session, queue: Queue) -> None:
    """What each thread does, until the queue is closed and empty."""
    buffer = _Buffer(session)
    while _serve_one(session, queue, buffer):
        pass


def _serve_one(session: Session, queue: Queue, buffer: _Buffer) -> bool:
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
    except BaseException as error:  # whatever it is, no caller may wait forever
        for request in batch.requests:
            request.fail(_own(error))
    finally:
        _tell(batch.requests)
        batch.requests.clear()  # they refer to it: results must be freed without the garbage collector
    return True


def _run(session: Session, queue: Queue, buffer: _Buffer, batch: Batch, requests: Sequence[Request]) -> None:
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
    for info in session.outputs:
        share(outputs[info.name], info, size, 0, size)  # refuses what can't be divided
    for request in requests:
        request.outputs, request.infos, request.size = outputs, session.outputs, size


def _copy(requests: Sequence[Request], arrays: Mapping[str, Array]) -> None:
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


def _tell(requests: Sequence[Request]) -> None:
    """Wake who waits: each thread, and each event loop once for all its tasks."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for request in requests:
        if request.task is not None:
            loops.setdefault(request.task[0], []).append(request.task[1])
        elif request.future is None:
            request.done.release()
    for loop, futures in loops.items():
        with contextlib.suppress(RuntimeError):  # it was closed over its tasks
            loop.call_soon_threadsafe(wake, futures)


def _own(error: BaseException) -> BaseException:
    """An error for one caller alone, where it can be copied: raising one changes its traceback."""
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except Exception:
        return error


class _Buffer:
    """Memory for the inputs of one batch, of any shape; it only grows."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrays: dict[str, Array] = {}  # flat
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
                memory = self._arrays.get(tensor.name)
                if memory is None or memory.size < math.prod(whole):
                    self._views.clear()
                    memory = self._arrays[tensor.name] = self._session.pinned(tensor.name, whole).reshape(-1)
                arrays[tensor.name] = memory[: math.prod(whole)].reshape(whole)
            self._views[shapes, samples] = arrays
        return arrays
