"""A slot: one stream with contexts and buffers of its own, on which one call at a time runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.cuda.arrays import LEGACY, DeviceArray, View, like, like_host, start
from trtopt.cuda.device import Event, HostBuffer, Stream
from trtopt.cuda.memory import Block, Blocks
from trtopt.runtime.contexts import ContextCache
from trtopt.runtime.gpu_engine import GpuEngine
from trtopt.runtime.launcher import BoundContext, Launcher
from trtopt.runtime.layout import (
    DEVICE,
    PINNED,
    PLAIN,
    STAGED,
    Copy,
    Layout,
    Location,
    Result,
    Source,
    Wanted,
    check_shape,
)
from trtopt.runtime.stretch import AVAILABLE, Replay, Stretches

_LARGE = 64 << 10  # bytes: from this on a graph of its own is worth it for an input in pinned memory


class Slot:
    """Runs an engine on one stream; used by one thread at a time."""

    def __init__(self, engine: GpuEngine) -> None:
        device = engine.device
        self.device, self.signature = device, engine.signature
        self._ordinal, self._fetch = device.info.ordinal, device.fetch
        self.stream = Stream(device)
        self.stream_ptr = self.stream.handle
        self._event = Event(device, timing=False)
        self._events: dict[int, Event] = {}
        self.stretches: Stretches | None = None  # for whole calls without the GIL
        if device.driver is not None and device.context is not None and AVAILABLE:
            self.stretches = Stretches(device.driver, device.context, self.stream_ptr)
        self._pending_stream: int | None = None  # a caller's stream on which this slot's last call may still run
        self._incomplete = False  # a call ended early: its work may still run
        self.shared = False  # a bound call launched from it (`trtopt.runtime.bound_call`)
        self.launcher = Launcher(engine, self.stream)
        self.contexts = ContextCache(engine, self.launcher)
        self.blocks = Blocks(engine.memory, self._event)
        self.replays = 0

    def run(self, arrays: Sequence[Source], wanted: Wanted = PLAIN) -> dict[str, Any]:
        """Infer once.

        What happens before the launch is kept short; what can be done while the GPU works, is done then. On a caller's
        stream this returns while it runs, if every array is in GPU memory.
        """
        if self._incomplete or self._pending_stream is not None or self.shared:
            self.wait_previous(wanted.stream)
        bound_context = self.contexts.bind(arrays)
        self._incomplete = True
        layout = self.lay_out(bound_context, arrays, wanted)
        outputs = None
        if self.stretches is not None and wanted.stream is None:
            replay = bound_context.graphs.get(layout[0])
            outputs = None if replay is None else self._replay(self.stretches, replay, bound_context, layout, wanted)
        if outputs is None:
            with self.device.current():
                outputs = self._run(bound_context, arrays, layout, wanted)
        self._incomplete = False
        return outputs

    def lay_out(
        self, bound_context: BoundContext, arrays: Sequence[Source], wanted: Wanted, least: int = _LARGE
    ) -> Layout:
        """Find where each input and output of a call lies; from `least` bytes on, whether an input is in pinned memory. Nothing
        is copied or waited for yet."""
        locations: list[Location] = []
        copies: list[Copy] = []
        streams: set[int] = set()
        on_gpu = False
        for tensor, array, staging in zip(self.signature.inputs, arrays, bound_context.staging):
            if isinstance(array, View):
                if tensor.on_host:
                    raise UsageError(
                        f"input {tensor.name!r} gives a shape: TensorRT reads it on the host; give a NumPy array"
                    )
                locations.append(self._seen(array, streams))
                on_gpu = True
            elif array.base is not None and array.nbytes >= least and not tensor.on_host and _is_pinned(array):
                locations.append((PINNED, start(array)))
            else:
                locations.append(STAGED)
                copies.append((staging, array))
        results: list[Result] = []
        out, stream = wanted.out, wanted.stream
        if not out and not on_gpu and len(bound_context.results) == len(bound_context.outputs):
            results += [np.empty(shape, dtype) for shape, dtype in bound_context.results]
            return (*locations, *bound_context.staged), copies, results, ()
        target = self.stream_ptr if stream is None else stream
        for tensor, shape, size in zip(self.signature.outputs, bound_context.outputs, bound_context.sizes):
            given = out.get(tensor.name)
            if given is None and on_gpu and shape is not None and not tensor.on_host:
                results.append(block := self.blocks.take(size, target, stream is None))
                locations.append((DEVICE, block.address))
                if stream is None:
                    streams.add(LEGACY)
                continue
            if given is not None and shape is not None:
                check_shape(tensor, given, shape)
            elif isinstance(given, View):
                raise UsageError(
                    f"the shape of output {tensor.name!r} depends on the data, so it comes in host memory: give a NumPy "
                    "array of the shape that it will have, or leave it out of out"
                )
            results.append(np.empty(shape, tensor.dtype) if given is None and shape is not None else given)
            locations.append(self._seen(given, streams) if isinstance(given, View) else STAGED)
        streams.discard(self.stream_ptr)
        return tuple(locations), copies, results, tuple(streams)

    def _seen(self, array: View, streams: set[int]) -> Location:
        if array.ordinal != self._ordinal:
            raise UsageError(f"an input lies on GPU {array.ordinal}; this engine runs on GPU {self._ordinal}")
        if array.stream is not None:
            streams.add(array.stream)
        return DEVICE, array.address

    def _replay(
        self, stretches: Stretches, replay: Replay, bound_context: BoundContext, layout: Layout, wanted: Wanted
    ) -> dict[str, Any] | None:
        """Infer by a graph that was captured before: the common case, short. It needs no current device. None where a stretch
        can't: a stream has work left that comes first, an array isn't contiguous, a call failed."""
        if (filled := stretches.fill(replay, bound_context.landing, layout)) is None:
            return None
        (first, last), results = filled, layout[2]
        if first.run_without_gil() if layout[1] or last is first else first.run_with_gil():
            return None
        replay.last_use = self.contexts.calls
        self.replays += 1
        if last is first and wanted.example is None:
            return dict(zip(self.signature.results, results))
        outputs, late = self._outputs(bound_context, results, wanted, None)  # while the GPU works
        if last is not first and last.run_without_gil():
            self.device("cudaStreamSynchronize", self.stream_ptr)
            for target, landing in late:
                np.copyto(target, landing)
        return outputs

    def _run(
        self, bound_context: BoundContext, arrays: Sequence[Source], layout: Layout, wanted: Wanted
    ) -> dict[str, Any]:
        locations, target = layout[0], self.stream_ptr if wanted.stream is None else wanted.stream
        waits = wanted.stream is None or any(place != DEVICE for place, _ in locations)
        replay = self.contexts.replay(bound_context, locations)
        if replay is None and any(place == PINNED for place, _ in locations):
            # Graphs for addresses there are few: as if it lay elsewhere, then.
            return self._run(bound_context, arrays, self.lay_out(bound_context, arrays, wanted, sys.maxsize), wanted)
        self.give_inputs(layout, target)
        if replay is not None:
            replay.graph.launch(target)
            self.replays += 1
        else:
            self.launcher.enqueue(bound_context, locations, target)
        if not waits:
            read_on(target, arrays)
        return self.finish(bound_context, layout[2], wanted, waits)

    def give_inputs(self, layout: Layout, target: int) -> None:
        """Let what `target` is given from now on come after the work that makes the arrays, and copy those in host memory. The
        default stream is the current device's, which must be this one."""
        _, copies, _, streams = layout
        for stream in streams:
            if stream != target and not self.device.idle(stream):
                self.device("cudaEventRecord", self._event.raw, stream)
                self.device("cudaStreamWaitEvent", target, self._event.raw, 0)
        for staging, array in copies:
            np.copyto(staging, array)

    def finish(
        self, bound_context: BoundContext, results: Sequence[Result], wanted: Wanted, waits: bool
    ) -> dict[str, Any]:
        """Make the results, and wait for them; or not, where they stay in the order of the caller's stream."""
        free = None if waits else wanted.stream
        outputs, copies = self._outputs(bound_context, results, wanted, free)
        if free is not None:
            self.device("cudaEventRecord", self._event.raw, free)
            self._pending_stream = free
        else:
            self.device("cudaStreamSynchronize", self.stream_ptr if wanted.stream is None else wanted.stream)
        for array, landing in copies:
            np.copyto(array, landing)
        return outputs

    def _outputs(
        self, bound_context: BoundContext, results: Sequence[Result], wanted: Wanted, free: int | None
    ) -> tuple[dict[str, Any], list[Copy]]:
        """Return what the caller gets, in the order of the stream `free` if that isn't None, and the copies that are to be made
        into those in host memory when the GPU is done."""
        outputs: dict[str, Any] = {}
        copies: list[Copy] = []
        example = wanted.example
        tensors = zip(self.signature.outputs, bound_context.outputs, bound_context.landing, results)
        for tensor, shape, landing, result in tensors:
            value: Any
            if isinstance(result, Block):
                assert shape is not None
                value = DeviceArray(
                    result.address,
                    shape,
                    tensor.dtype,
                    self._ordinal,
                    result,
                    stream=free,
                    ready=None if free is None else self._ready(result.address, free),
                    copy_to_host=self._fetch,
                    streams=result.streams,
                )
                value = value if example is None else like(example, value)
            elif isinstance(result, View):
                value = result.owner
                if isinstance(value, DeviceArray):
                    value.written(free, None if free is None else self._ready(value.address, free))
            else:
                if landing is None:
                    shape = self.launcher.allocated[tensor.name]
                    landing = self.launcher.host[tensor.name].array(tensor.dtype, shape)
                    if result is not None:
                        check_shape(tensor, result, landing.shape)
                value = np.empty(landing.shape, tensor.dtype) if result is None else result
                copies.append((value, landing))
                value = value if example is None or tensor.name in wanted.out else like_host(example, value)
            outputs[tensor.name] = value
        return outputs, copies

    def wait_previous(self, stream: int | None) -> None:
        """Let what the last call left behind end, or come before what is given to `stream` now."""
        if self.shared:  # given to a stream of the caller's, nobody knows until when
            self.device.synchronize()
            self.shared = False
        if self._incomplete:
            self.stream.synchronize()
            if self._pending_stream is not None:
                self._event.synchronize()
            self._incomplete, self._pending_stream = False, None
        elif self._pending_stream is not None and self._pending_stream != stream:
            self.device("cudaStreamWaitEvent", self.stream_ptr if stream is None else stream, self._event.raw, 0)
            self._pending_stream = None

    def _ready(self, address: int, stream: int) -> Event:
        """An event after what `stream` has to do by now. One for each address: results there follow one another."""
        event = self._events.get(address)
        if event is None:
            event = self._events[address] = Event(self.device, timing=False)
        self.device("cudaEventRecord", event.raw, stream)
        return event

    def close(self) -> None:
        """Free everything; waits for what still runs."""
        with self.device.current():
            self.wait_previous(None)
            self.stream.synchronize()
            self.contexts.close()
            self._event.free()
            self.stream.free()


def _is_pinned(array: NDArray[Any]) -> bool:
    """Return True for an array of `Session.pinned`, or a whole part of one."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, HostBuffer) and array.flags.c_contiguous


def read_on(stream: int, arrays: Sequence[Source]) -> None:
    """Arrays of ours may be let go of before the stream has read them."""
    for array in arrays:
        if isinstance(array, View) and isinstance(array.owner, DeviceArray):
            array.owner.streams.add(stream)
