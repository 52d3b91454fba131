"""Bound calls: a session's call on arrays that stay where they are. Everything that can be is done once, before the first."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trtopt.core.errors import DeviceError, UsageError
from trtopt.cuda.arrays import LEGACY, View, like, like_host, start
from trtopt.cuda.device import after_capture
from trtopt.cuda.memory import Block
from trtopt.cuda.tensors import Shape
from trtopt.runtime.contexts import STAGED, Source
from trtopt.runtime.native_call import NativeCall, copying
from trtopt.runtime.slot import Copy, Slot, location_of, read_on


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
    slot.wait_previous(None)
    slot.shared = True
    bound_context = slot.contexts.bind(arrays, shapes)
    if None in bound_context.outputs:
        raise UsageError("the shape of an output depends on the data, so its array can't stay the same: use run()")
    own, raw = (slot.stream_ptr, slot.stream.raw) if stream is None else (stream, stream)
    if stream is not None:
        read_on(stream, arrays)
    location_list = slot.input_locations(bound_context, arrays, own)
    makers = {number for array in arrays if isinstance(array, View) for number in (LEGACY, array.stream or LEGACY)}
    copies_in: list[Copy] = [
        (staging, array)
        for staging, array, location in zip(bound_context.staging, arrays, location_list)
        if isinstance(array, np.ndarray) and location == STAGED
    ]
    results: dict[str, Any] = {}
    copies_out: list[Copy] = []
    targets = slot.targets(bound_context, out, View in map(type, arrays), own)
    for tensor, shape, landing, target in zip(
        slot.signature.outputs, bound_context.outputs, bound_context.landing, targets
    ):
        assert shape is not None and landing is not None
        value: Any
        if isinstance(target, Block):
            if stream is not None:
                target.streams.add(stream)
            value = slot.wrap(tensor, target, shape, None)
            results[tensor.name] = value if example is None else like(example, value)
        elif isinstance(target, View):
            results[tensor.name] = target.owner
        else:
            value = np.empty(shape, tensor.dtype) if target is None else target
            copies_out.append((value, landing))
            results[tensor.name] = value if example is None or target is not None else like_host(example, value)
        location_list.append(location_of(target))
    locations = tuple(location_list)

    def enqueue() -> None:
        slot.contexts.enqueue(bound_context, arrays, locations, own)

    enqueue()  # TensorRT wants one before a capture
    slot.device.cuda("cudaStreamSynchronize", raw)
    graph, note = slot.contexts.captured(bound_context, arrays, locations)
    other_streams = tuple(makers - {own}) if stream is None else ()
    waits = bool(stream is None or copies_in or copies_out)
    raw_graph, address = (None, 0) if graph is None else (graph.raw, graph.handle)
    native_call = (
        _native_call(slot, other_streams, address, copies_in, copies_out)
        if graph is not None and own == slot.stream_ptr
        else None
    )

    def call() -> None:
        if native_call is not None and not native_call.run_without_gil():
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


def _native_call(
    slot: Slot, streams: Sequence[int], graph: int, copies_in: Sequence[Copy], copies_out: Sequence[Copy]
) -> NativeCall | None:
    """Make one native call of all; None where there can be none, or an array isn't contiguous."""
    work = slot.work(graph, streams)
    if not work or not all(array.flags.c_contiguous for pair in (*copies_in, *copies_out) for array in pair):
        return None
    copies = (
        [copying(start(to), start(source), source.nbytes) for to, source in pairs] for pairs in (copies_in, copies_out)
    )
    before, after = copies
    return NativeCall([*before, *work, *after])


def _closed() -> None:
    raise DeviceError("this bound call is closed, or its session is; bind the arrays again")


_bound: weakref.WeakSet[BoundCall] = weakref.WeakSet()


def _forked() -> None:
    raise DeviceError(
        "this call was bound before the process forked, and its session doesn't survive that: open one in the child, or start "
        "workers with multiprocessing's 'spawn'"
    )


def _refuse_in_child() -> None:
    """At the fork, so that calls needn't ask where they are."""
    for bound_call in tuple(_bound):
        bound_call._call, bound_call._lock = _forked, threading.Lock()  # a thread that isn't here may have had the lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)
