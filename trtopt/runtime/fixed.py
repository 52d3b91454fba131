"""Calls whose arrays stay the same: everything that can be is done once, before the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.cuda.arrays import View, like, like_host, start
from trtopt.cuda.device import Graph
from trtopt.cuda.tensors import Shape
from trtopt.runtime.bindings import COPIED, STAGED, Source
from trtopt.runtime.lane import Copy, Lane, check_shape, read_on, wanted_on_host
from trtopt.runtime.stretch import Stretch, copying


@dataclass(frozen=True)
class Fixed:
    """A call that can be made again and again.

    Attributes:
        call: runs it. Without a stream of the caller's, or with arrays in host memory, it waits for the results.
        results: output name → the array that each call writes.
        note: why it is no CUDA graph; empty if it is.
        kept: what must live as long as `call`.
    """

    call: Callable[[], None]
    results: Mapping[str, Any]
    note: str
    kept: Any


def fix(
    lane: Lane,
    arrays: Sequence[Source],
    shapes: tuple[Shape, ...],
    out: Mapping[str, Source] | None = None,
    stream: int | None = None,
    example: Any = None,
) -> Fixed:
    """A call on these very arrays, read and written where they lie; nobody else may use the lane meanwhile.

    Without `stream`, a call comes after what the legacy default stream, and the streams that made the arrays, have to do by
    then.

    Args: as `Lane.run`.

    Raises:
        UsageError: an output's shape depends on the data.
    """
    lane.settle(None)
    lane.shared = True
    binding = lane.bindings.bind(arrays, shapes)
    if None in binding.outputs:
        raise UsageError("the shape of an output depends on the data, so its array can't stay the same: use run()")
    own, raw = (lane.own, lane.stream.raw) if stream is None else (stream, stream)
    if stream is not None:
        read_on(stream, arrays)
    places, stages, makers = _inputs(lane, arrays, binding.staging, own)
    results: dict[str, Any] = {}
    copies: list[Copy] = []
    on_gpu = View in map(type, arrays)
    outputs = zip(lane.signature.outputs, binding.outputs, binding.sizes, binding.landing)
    for tensor, shape, size, landing in outputs:
        assert shape is not None
        assert landing is not None
        given = out.get(tensor.name) if out else None
        if given is not None:
            check_shape(tensor, given, shape)
        if isinstance(given, View):
            lane.order(given, own)
            places.append(given.address)
            results[tensor.name] = given.owner
        elif given is None and on_gpu and not tensor.on_host:
            block = lane.blocks.take(size, own)
            places.append(block.address)
            if stream is not None:
                block.streams.add(stream)
            value: Any = lane.wrap(tensor, block, shape, None)
            results[tensor.name] = value if example is None else like(example, value)
        else:
            places.append(STAGED)
            array = np.empty(shape, tensor.dtype) if given is None else given
            copies.append((array, landing))
            results[tensor.name] = array if example is None or given is not None else like_host(example, array)
    for target, source in stages:
        np.copyto(target, source)
    there = tuple(places)

    def enqueue() -> None:
        lane.bindings.enqueue(binding, arrays, there, own)

    enqueue()  # TensorRT wants one before a capture
    lane.device.cuda("cudaStreamSynchronize", raw)
    graph, note = lane.bindings.captured(binding, arrays, there)
    waits = bool(stream is None or stages or copies)
    others = tuple(makers - {own}) if stream is None else ()
    call = _call(lane, others, stages, graph, enqueue, raw, own, waits, copies)
    return Fixed(call, results, note, (graph, arrays, out))


def _inputs(
    lane: Lane, arrays: Sequence[Source], staging: Sequence[NDArray[Any]], own: int
) -> tuple[list[int], list[Copy], set[int]]:
    """Where each input is; what to copy into pinned memory at each call; the streams that may make the arrays."""
    places: list[int] = []
    stages: list[Copy] = []
    makers = set()
    for tensor, array, target in zip(lane.signature.inputs, arrays, staging):
        if isinstance(array, View):
            if tensor.on_host:
                raise wanted_on_host(tensor)
            makers |= {1, array.stream or 1}
            lane.order(array, own)
            places.append(array.address)
        elif not tensor.on_host and (address := lane.pinned_at(array)):
            places.append(-address)
        else:
            stages.append((target, array))
            places.append(STAGED)
    return places, stages, makers


def _call(
    lane: Lane,
    others: Sequence[int],
    stages: Sequence[Copy],
    graph: Graph | None,
    enqueue: Callable[[], None],
    raw: Any,
    stream: int,
    waits: bool,
    copies: Sequence[Copy],
) -> Callable[[], None]:
    """Args:
    graph: what is launched; None: `enqueue` is called.
    raw: the stream as the runtime takes it.
    """
    known, address = (None, 0) if graph is None else (graph.raw, graph.handle)
    at_once = _at_once(lane, others, address, stages, copies) if known is not None and stream == lane.own else None

    def call() -> None:
        if at_once is not None and not at_once.run():
            return
        if others:
            lane.after(others)
        for target, source in stages:
            np.copyto(target, source)
        if known is None:
            with lane.device.current():
                enqueue()
        else:
            lane.launch(known, address, raw, stream)
        if waits:
            lane.wait(raw, stream)
        for target, source in copies:
            np.copyto(target, source)

    return call


def _at_once(
    lane: Lane, others: Sequence[int], graph: int, stages: Sequence[Copy], copies: Sequence[Copy]
) -> Stretch | None:
    """The whole of a call in one stretch; None where there can be none, or an array isn't contiguous."""
    work = lane.work(graph, others)
    if not work or not all(array.flags.c_contiguous for pair in (*stages, *copies) for array in pair):
        return None
    into = [copying(start(to), start(source), source.nbytes) for to, source in stages]
    return Stretch([*into, *work, *(copying(start(to), start(source), source.nbytes) for to, source in copies)])


def bare(lane: Lane, arrays: Sequence[Source], shapes: tuple[Shape, ...]) -> tuple[Callable[[], None], bool, str]:
    """To measure with: copy the inputs in, and give a function that launches the inference alone, with results left in the
    lane's GPU memory; whether that is a CUDA graph, and if not, why."""
    lane.settle(None)
    binding = lane.bindings.bind(arrays, shapes)
    places = lane.uploaded(arrays, lane.place(binding, arrays, lane.own), lane.own)
    lane.bindings.enqueue(binding, arrays, (*places, *[STAGED] * len(binding.outputs)), lane.own)
    lane.stream.synchronize()
    inside = [COPIED if place == STAGED else place for place in places]
    for tensor, shape in zip(lane.signature.outputs, binding.outputs):
        inside.append(COPIED if shape is None else lane.bindings.buffer(tensor).handle)
    graph, note = lane.bindings.captured(binding, arrays, tuple(inside))
    if graph is None:
        return (lambda: lane.bindings.enqueue(binding, arrays, tuple(inside), lane.own)), False, note
    return (lambda: graph.launch(lane.stream)), True, ""
