"""Bound calls: a session's call on arrays that stay where they are. Everything that can be is done once, before the first."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trtopt.core.errors import DeviceError, UsageError
from trtopt.cuda.arrays import View, like, like_host, start
from trtopt.cuda.device import after_capture
from trtopt.cuda.tensors import Shape
from trtopt.runtime.contexts import STAGED, Source
from trtopt.runtime.slot import Copy, Slot, check_shape, read_on, wanted_on_host
from trtopt.runtime.stretch import Stretch, copying


class BoundCall:
    """Inference on the same arrays again and again: `session.bind(…)` made it, and calling it runs it.

        with session.bind({"input": frame}) as step:
            while capture(frame):
                show(step()["logits"])

    Nothing is checked or looked up any more, so a call costs what replaying a CUDA graph costs. Until `close` it holds one of
    the session's contexts. Calls from several threads come one after the other.

    Attributes:
        outputs: output name → the array that every call writes.
        note: why calls replay no CUDA graph; empty if they do.
    """

    def __init__(
        self,
        call: Callable[[], object],
        outputs: Mapping[str, Any],
        note: str,
        references: Any,
        release: Callable[[], None],
    ) -> None:
        self.outputs, self.note = outputs, note
        self._call, self._references, self._lock = call, references, threading.Lock()
        self._finalizer = weakref.finalize(self, after_capture, release)
        self._finalizer.atexit = False
        _bound.add(self)

    def __call__(self) -> Mapping[str, Any]:
        """Infer once, on what the input arrays hold now.

        Returns: `outputs`. They are ready, unless `bind` got a stream and every array is in GPU memory: then they will be,
        in the order of that stream.

        Raises:
            DeviceError: a CUDA call failed, this or its session is closed, or this process was forked from the one that bound.
            EngineError: TensorRT couldn't run it.
        """
        with self._lock:
            self._call()
        return self.outputs

    def close(self) -> None:
        """Give the context back. The arrays keep what they hold. A second call does nothing."""
        with self._lock:
            self._call, self._references = _closed, None
        self._finalizer()

    def __enter__(self) -> BoundCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare_call(
    slot: Slot,
    arrays: Sequence[Source],
    shapes: tuple[Shape, ...],
    out: Mapping[str, Source] | None = None,
    stream: int | None = None,
    example: Any = None,
) -> tuple[Callable[[], None], dict[str, Any], str, Any]:
    """A call on these very arrays, read and written where they lie; nobody else may use the slot meanwhile.

    Without `stream`, a call comes after what the legacy default stream, and the streams that made the arrays, have to do by
    then; and it waits for the results, as one with arrays in host memory does.

    Args: as `Slot.run`.

    Returns: the call; output name → the array that each call writes; why it is no CUDA graph; what must live as long as it.

    Raises:
        UsageError: an output's shape depends on the data.
    """
    slot.settle(None)
    slot.shared = True
    bound_context = slot.contexts.bind(arrays, shapes)
    if None in bound_context.outputs:
        raise UsageError("the shape of an output depends on the data, so its array can't stay the same: use run()")
    own, raw = (slot.own, slot.stream.raw) if stream is None else (stream, stream)
    if stream is not None:
        read_on(stream, arrays)
    location_list: list[int] = []
    copies_in: list[Copy] = []
    makers = set[int]()  # streams that may make the arrays
    for tensor, source, staging in zip(slot.signature.inputs, arrays, bound_context.staging):
        if isinstance(source, View):
            if tensor.on_host:
                raise wanted_on_host(tensor)
            makers |= {1, source.stream or 1}
            slot.order(source, own)
            location_list.append(source.address)
        elif not tensor.on_host and (pinned := slot.pinned_at(source)):
            location_list.append(-pinned)
        else:
            copies_in.append((staging, source))
            location_list.append(STAGED)
    results: dict[str, Any] = {}
    copies_out: list[Copy] = []
    on_gpu = View in map(type, arrays)
    for tensor, shape, size, landing in zip(
        slot.signature.outputs, bound_context.outputs, bound_context.sizes, bound_context.landing
    ):
        assert shape is not None
        assert landing is not None
        out_array = out.get(tensor.name) if out else None
        if out_array is not None:
            check_shape(tensor, out_array, shape)
        if isinstance(out_array, View):
            slot.order(out_array, own)
            location_list.append(out_array.address)
            results[tensor.name] = out_array.owner
        elif out_array is None and on_gpu and not tensor.on_host:
            block = slot.blocks.take(size, own)
            location_list.append(block.address)
            if stream is not None:
                block.streams.add(stream)
            value: Any = slot.wrap(tensor, block, shape, None)
            results[tensor.name] = value if example is None else like(example, value)
        else:
            location_list.append(STAGED)
            array = np.empty(shape, tensor.dtype) if out_array is None else out_array
            copies_out.append((array, landing))
            results[tensor.name] = array if example is None or out_array is not None else like_host(example, array)
    for target, source in copies_in:
        np.copyto(target, source)
    locations = tuple(location_list)

    def enqueue() -> None:
        slot.contexts.enqueue(bound_context, arrays, locations, own)

    enqueue()  # TensorRT wants one before a capture
    slot.device.cuda("cudaStreamSynchronize", raw)
    graph, note = slot.contexts.captured(bound_context, arrays, locations)
    other_streams = tuple(makers - {own}) if stream is None else ()
    waits = bool(stream is None or copies_in or copies_out)
    raw_graph, address = (None, 0) if graph is None else (graph.raw, graph.handle)
    stretch = None  # the whole of a call, where that can be
    work = slot.work(address, other_streams) if graph is not None and own == slot.own else []
    if work and all(array.flags.c_contiguous for pair in (*copies_in, *copies_out) for array in pair):
        before, after = (
            [copying(start(to), start(source), source.nbytes) for to, source in pairs]
            for pairs in (copies_in, copies_out)
        )
        stretch = Stretch([*before, *work, *after])

    def call() -> None:
        if stretch is not None and not stretch.run():
            return
        if other_streams:
            slot.after(other_streams)
        for target, source in copies_in:
            np.copyto(target, source)
        if raw_graph is None:
            with slot.device.current():
                enqueue()
        else:
            slot.launch(raw_graph, address, raw, own)
        if waits:
            slot.wait(raw, own)
        for target, source in copies_out:
            np.copyto(target, source)

    return call, results, note, (graph, arrays, out)


def _closed() -> None:
    raise DeviceError("this bound call is closed, or its session is; bind the arrays again")


_bound: weakref.WeakSet[BoundCall] = weakref.WeakSet()


def _forked() -> None:
    raise DeviceError(
        "this call was bound before the process forked, and its session doesn't survive that: open one in the child, or start "
        "workers with multiprocessing's 'spawn'"
    )


def _refuse_in_child() -> None:
    """Refuse calls from the fork on, so that they needn't ask where they are."""
    for bound_call in tuple(_bound):
        bound_call._call, bound_call._lock = _forked, threading.Lock()  # a thread that isn't here may have had the lock


os.register_at_fork(after_in_child=_refuse_in_child)
