"""Bound calls: a session's call on arrays that stay where they are. Everything that can be is done once, before the first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trtopt.core.errors import DeviceError, UsageError
from trtopt.cuda.arrays import LEGACY, View, start
from trtopt.cuda.device import after_capture
from trtopt.cuda.memory import Block
from trtopt.cuda.tensors import Shape
from trtopt.runtime.contexts import Source
from trtopt.runtime.slot import Copy, Slot, read_on
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

    def refuse_in_child(self) -> None:
        """Refuse calls from a fork on, so that they needn't ask where they are."""
        self._call, self._lock = _forked, threading.Lock()  # a thread that isn't here may have had the lock

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
    layout = slot.lay_out(bound_context, arrays, out, stream, least=0)
    locations, copies_in, targets, streams = layout
    on_gpu = any(isinstance(array, View) for array in arrays)

    def enqueue() -> None:
        slot.contexts.enqueue(bound_context, arrays, locations, own)

    slot.give_inputs(layout, own)
    enqueue()  # TensorRT wants one before a capture
    copies_out: list[Copy] = []
    for target, landing in zip(targets, bound_context.landing):
        if isinstance(target, np.ndarray) and landing is not None:
            copies_out.append((target, landing))
        elif isinstance(target, Block) and stream is not None:
            target.streams.add(stream)
    results = slot.finish(bound_context, targets, out, stream, True, example)
    graph, note = slot.contexts.captured(bound_context, arrays, locations)
    other_streams = tuple({*streams, *([LEGACY] if on_gpu else [])}) if stream is None else ()
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
            slot.after(other_streams, own)
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


def _forked() -> None:
    raise DeviceError(
        "this call was bound before the process forked, and its session doesn't survive that: open one in the child, or start "
        "workers with multiprocessing's 'spawn'"
    )
