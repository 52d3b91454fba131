"""Bound calls: a session's call on arrays that stay where they are. Everything that can be is done once, before the first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trtopt.core.errors import DeviceError, UsageError
from trtopt.cuda.arrays import LEGACY, View
from trtopt.cuda.device import after_capture
from trtopt.cuda.memory import Block
from trtopt.cuda.tensors import Shape
from trtopt.runtime.contexts import Replay, Source
from trtopt.runtime.slot import Slot, read_on


class BoundCall:
    """Inference on the same arrays again and again: `session.bind(…)` made it, and calling it runs it.

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

    def __call__(self) -> Mapping[str, Any]:
        """Infer once, on what the input arrays hold now.

        Returns: `outputs`, ready; or, where `bind` got a stream and every array is in GPU memory, in that stream's order.

        Raises: DeviceError (also if this or its session is closed) and EngineError, as `Session.run`.
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
    locations, copies_in, targets, streams = slot.lay_out(bound_context, arrays, out, stream, least=0)
    if any(isinstance(array, View) for array in arrays):
        streams = tuple({*streams, LEGACY} - {own})
    layout = locations, copies_in, targets, streams

    def enqueue() -> None:
        slot.contexts.enqueue(bound_context, arrays, locations, own)

    slot.give_inputs(layout, own)
    enqueue()  # TensorRT wants one before a capture
    results = slot.finish(bound_context, targets, out, stream, True, example)
    if stream is not None:
        read_on(stream, arrays)
        for target in targets:
            if isinstance(target, Block):
                target.streams.add(stream)
        layout = locations, copies_in, targets, ()
    pairs = zip(targets, bound_context.landing)
    copies_out = [(to, landing) for to, landing in pairs if isinstance(to, np.ndarray) and landing is not None]
    graph, note = slot.contexts.captured(bound_context, arrays, locations)
    waits = bool(stream is None or copies_in or copies_out)
    replay = None if graph is None else Replay(graph, graph.raw, graph.handle)
    stretches = None  # the whole of a call, where that can be
    if replay is not None and stream is None and slot.by_stretch:
        stretches = slot.filled(replay, bound_context, layout, one=True)

    def call() -> None:
        if stretches is not None and not stretches[0].run_without_gil():
            return
        slot.give_inputs(layout, own)
        if replay is None:
            with slot.device.current():
                enqueue()
        else:
            slot.launch(replay.raw, replay.address, raw, own)
        if waits:
            slot.wait(raw, own)
        for target, source in copies_out:
            np.copyto(target, source)

    return call, results, note, (graph, arrays, out)


def _closed() -> None:
    raise DeviceError("this bound call is closed, or its session is; bind the arrays again")
