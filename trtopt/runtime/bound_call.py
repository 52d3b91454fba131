"""Bound calls: a session's call on arrays that stay where they are. Everything that can be is done once, before the first."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from trtopt.core.errors import DeviceError, UsageError
from trtopt.cuda.arrays import LEGACY, View
from trtopt.cuda.device import after_capture
from trtopt.cuda.memory import Block
from trtopt.runtime.layout import Source, Wanted
from trtopt.runtime.slot import Slot, read_on
from trtopt.runtime.stretch import Replay


class BoundCall(AbstractContextManager["BoundCall"]):
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

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare_call(
    slot: Slot, arrays: Sequence[Source], wanted: Wanted
) -> tuple[Callable[[], None], dict[str, Any], str, Any]:
    """Prepare a call, as `Slot.run`, on these very arrays, read and written where they lie; nobody else may use the slot.

    Without a stream of the caller's, a call comes after what the legacy default stream, and the streams that made the arrays,
    have to do by then; and it waits for the results, as one with arrays in host memory does.

    Returns: the call, in one stretch where that can be; output name → the array that each call writes; why it replays no CUDA
    graph; what must live as long as it.
    """
    slot.wait_previous(None)
    slot.shared = True
    bound_context = slot.contexts.bind(arrays)
    if None in bound_context.outputs:
        raise UsageError("the shape of an output depends on the data, so its array can't stay the same: use run()")
    stream = wanted.stream
    own = slot.stream_ptr if stream is None else stream
    locations, copies, targets, streams = slot.lay_out(bound_context, arrays, wanted, least=0)
    if any(isinstance(array, View) for array in arrays):
        streams = tuple({*streams, LEGACY} - {own})
    launch = functools.partial(slot.launcher.enqueue, bound_context, locations, own)
    slot.give_inputs((locations, copies, targets, streams), own)
    launch()  # TensorRT wants one before a capture
    results = slot.finish(bound_context, targets, wanted, True)
    if stream is not None:
        streams = ()
        read_on(stream, arrays)
        for target in targets:
            if isinstance(target, Block):
                target.streams.add(stream)
    layout, filled = (locations, copies, targets, streams), None
    graph, note = slot.launcher.capture(bound_context, locations)
    if graph is not None:
        launch = functools.partial(graph.launch, own)
        if stream is None and slot.stretches is not None:
            filled = slot.stretches.fill(Replay(graph), bound_context.landing, layout, one=True)
    whole = None if filled is None else filled[0]
    pairs = zip(targets, bound_context.landing)
    copies_out = [(to, landing) for to, landing in pairs if isinstance(to, np.ndarray) and landing is not None]
    waits = bool(stream is None or copies or copies_out)

    def call() -> None:
        if whole is not None and not whole.run_without_gil():
            return
        with slot.device.current():
            slot.give_inputs(layout, own)
            launch()
            if waits:
                slot.device("cudaStreamSynchronize", own)
        for target, source in copies_out:
            np.copyto(target, source)

    return call, results, note, (graph, arrays, wanted)


def _closed() -> None:
    raise DeviceError("this bound call is closed, or its session is; bind the arrays again")
