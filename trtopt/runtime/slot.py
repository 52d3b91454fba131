"""A slot: one stream with contexts and buffers of its own, on which one call at a time runs."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.core.values import x
from trtopt.cuda.arrays import LEGACY, DeviceArray, View, like, like_host, start, writable
from trtopt.cuda.device import Cuda, Device, Event, HostBuffer
from trtopt.cuda.memory import Block, Blocks, Memory
from trtopt.cuda.tensors import Shape, Signature, Tensor, check_array
from trtopt.runtime.contexts import (
    GRAPHS,
    REMEMBERED,
    RESIDENT,
    STAGED,
    BoundContext,
    ContextCache,
    Locations,
    Recalled,
    Replay,
    Source,
)
from trtopt.runtime.stretch import SOURCE, TO, WIDTH, Row, Stretch, available, calling, copying, same
from trtopt.trt.plans import LoadedEngine

Copy = tuple[NDArray[Any], NDArray[Any]]  # to, from
_KNOWN = 256  # arrays whose address is remembered, so that each call needn't find out whose memory it is
PINNED = 64 << 10  # bytes: from this on it is worth asking whether an input already lies in pinned memory


class Slot:
    """Runs an engine on one stream; used by one thread at a time.

    Args:
        graphs: the most shapes with a context and CUDA graphs of their own; 0: plain enqueues only.
        shares: several contexts may use one profile (`LoadedEngine.shares_profiles`); else there is the fallback only.
    """

    def __init__(
        self, device: Device, engine: LoadedEngine, signature: Signature, memory: Memory, *, graphs: int, shares: bool
    ) -> None:
        self.device, self.signature = device, signature
        self._cuda = device.cuda
        kinds = self._cuda.functions.cudaMemcpyKind
        self._to_gpu = kinds.cudaMemcpyHostToDevice
        # Not of `self`: a result that is kept would keep the slot.
        self._fetch = functools.partial(_fetch, device.cuda, kinds.cudaMemcpyDeviceToHost)
        self.stream = device.stream()
        self.own, self._raw = self.stream.handle, self.stream.raw
        self._event = device.event(timing=False)
        self._events: dict[int, Event] = {}
        # id of an array of `Session.pinned` → where it lies.
        self._pinned: dict[int, tuple[weakref.ref[NDArray[Any]], int]] = {}
        self._ordinal = device.info.ordinal
        self._driver = device.cuda.driver
        self._stretches = self._driver is not None and available()  # whole calls without the GIL
        self._here = ctypes.c_int64()  # the thread's current context, where a stretch looks
        self._behind: int | None = None  # a caller's stream on which this slot's last call may still run
        self._dirty = False  # a call ended early: its work may still run
        self.shared = False  # a bound call launched from it (`trtopt.runtime.bound_call`)
        self.contexts = ContextCache(device, self.stream, engine, signature, memory, graphs=graphs, shares=shares)
        self._most_recalled = max(REMEMBERED, GRAPHS * graphs)
        self.blocks = Blocks(memory, functools.partial(_follow_default, device, self._event))
        self.replays = 0

    # The call ------------------------------------------------------------------------------------------------------

    def run(
        self,
        arrays: Sequence[Source],
        shapes: tuple[Shape, ...],
        out: Mapping[str, Source] | None = None,
        stream: int | None = None,
        example: Any = None,
        key: Any = None,
    ) -> dict[str, Any]:
        """Infer once on arrays that fit the signature.

        What happens before the launch is kept short; what can be done while the GPU works, is done then.

        Args:
            out: arrays to write results into.
            stream: a caller's stream to run on. If every array is in GPU memory this returns while it runs.
            example: an array of the library that new results are made arrays of.
            key: what `recall` knows this call by when it comes again.
        """
        if self._dirty or self._behind is not None or self.shared:
            self.settle(stream)
        bound_context = self.contexts.bind(arrays, shapes)
        results = self._again(bound_context, arrays, out, example) if stream is None else None
        if results is None:
            with self.device.current():
                results = self._run(bound_context, arrays, out, stream, example, key)
        return results

    def _again(
        self,
        bound_context: BoundContext,
        arrays: Sequence[Source],
        out: Mapping[str, Source] | None,
        example: Any,
    ) -> dict[str, Any] | None:
        """Infer from arrays in host memory by a graph that was captured before: the common case, short. It needs no current
        device.

        Returns: None if this is no such call, or the stretch failed: then the other way says why, or works.
        """
        if not self._stretches or self.contexts.reads_shapes or (out and not _fits(bound_context, out)):
            return None
        locations: list[int] = []
        copies: list[Copy] = []
        for array, staging in zip(arrays, bound_context.staging):
            if isinstance(array, View) or not array.flags.c_contiguous:
                return None
            if array.base is not None and array.nbytes >= PINNED and (address := self.pinned_at(array)):
                locations.append(-address)
            else:
                locations.append(STAGED)
                copies.append((staging, array))
        replay = bound_context.graphs.get((*locations, *bound_context.staged))
        if replay is None:
            return None
        self._dirty = True
        stretch, sources, targets = replay.prepared or self._prepare(replay, bound_context, copies)
        words = stretch.words
        results: dict[str, Any] = {}
        for word, (_, source) in zip(sources, copies):
            words[word] = start(source)
        for word, (name, shape, dtype) in zip(targets, bound_context.results):
            out_array = None if out is None else out.get(name)
            value: Any = np.empty(shape, dtype) if out_array is None else out_array
            results[name] = value
            words[word] = start(value)
        if stretch.run():
            self.settle(None)
            return None
        self._dirty = False
        replay.last_use = self.contexts.calls
        self.replays += 1
        if example is not None:
            for name in results.keys() - (out or {}).keys():
                results[name] = like_host(example, results[name])
        return results

    def recall(self, key: Any, out: Mapping[str, Source] | None, example: Any) -> dict[str, Any] | None:
        """Infer again on arrays in GPU memory that say of themselves what they said in a call before (`call_key`): nothing is
        checked then, and nothing looked up but the graph. With results in `out`, which are left to the caller to name.

        Returns: None if there was no such call, or it wasn't a replay.
        """
        call = self.contexts.recalled.get(key)
        if call is None:
            return None
        if self._dirty or self._behind is not None or self.shared:
            self.settle(None)
        own = self.own
        blocks = [self.blocks.take(size, own, True) for size in call.sizes]
        entry = call.replays.get(tuple([block.address for block in blocks]))
        if entry is None:
            return None
        replay, stretches = entry
        self._dirty = True
        if stretches is None or stretches[0].hold():
            self.after(call.streams)
            self.launch(replay.raw, replay.address, self._raw, own)
        # The rest, while the GPU works.
        results: dict[str, Any] = {}
        for tensor, shape, block in zip(self.signature.outputs, call.bound.outputs, blocks):
            assert shape is not None
            value = self.wrap(tensor, block, shape, None)
            results[tensor.name] = value if example is None else like(example, value)
        for array in (out or {}).values():
            if isinstance(array, View) and isinstance(array.owner, DeviceArray):
                array.owner.written(None, None)
        self.contexts.calls += 1
        call.bound.last_use = replay.last_use = self.contexts.calls
        self.replays += 1
        if stretches is None or stretches[1].run():
            self.wait(self._raw, own)
        self._dirty = False
        return results

    def _prepare(
        self, replay: Replay, bound_context: BoundContext, copies: Sequence[Copy]
    ) -> tuple[Stretch, tuple[int, ...], tuple[int, ...]]:
        into = [copying(start(to), 0, to.nbytes) for to, _ in copies]
        back = [copying(0, start(array), array.nbytes) for array in bound_context.landing if array is not None]
        rows = [*into, *self.work(replay.address)]
        replay.prepared = (
            Stretch([*rows, *back]),
            tuple(WIDTH * row + SOURCE for row in range(len(into))),
            tuple(WIDTH * (len(rows) + row) + TO for row in range(len(back))),
        )
        return replay.prepared

    def work(self, graph: int, after: Sequence[int] = ()) -> list[Row]:
        """Rows of a stretch: launch the graph at that address, and wait for it. Empty where there can be none.

        Args:
            after: streams. If one of them has work left, or another device is current, whose default stream would be asked,
                this fails before the launch; the method of that name orders it then.
        """
        driver, here = self._driver, ctypes.addressof(self._here)
        if driver is None or not self._stretches or self._cuda.context is None:
            return []
        current = [calling(driver.getting, here), same(here, self._cuda.context)] if after else []
        idle = [calling(driver.querying, stream) for stream in after]
        return [*current, *idle, calling(driver.launching, graph, self.own), calling(driver.synchronizing, self.own)]

    def _run(
        self,
        bound_context: BoundContext,
        arrays: Sequence[Source],
        out: Mapping[str, Source] | None,
        stream: int | None,
        example: Any,
        key: Any,
    ) -> dict[str, Any]:
        target, raw = (self.own, self._raw) if stream is None else (stream, stream)
        self._dirty = True
        on_gpu = View in map(type, arrays)
        location_list = self.locate(bound_context, arrays, target)
        results: Sequence[Block | Source | None] = [None] * len(bound_context.outputs)
        waits = True
        if out is None and not on_gpu:
            location_list += bound_context.staged
        else:
            waits = stream is None or min(location_list, default=1) <= STAGED
            results = self.targets(bound_context, out, on_gpu, target)
            for result in results:
                location = STAGED if result is None or isinstance(result, np.ndarray) else result.address
                waits = waits or location == STAGED
                location_list.append(location)
        locations = tuple(location_list)
        replay = self.contexts.replay(bound_context, arrays, locations)
        if replay is None and min(locations, default=0) < RESIDENT:
            locations = self.uploaded(arrays, locations, target)
            replay = self.contexts.replay(bound_context, arrays, locations)
        if replay is not None:
            self.launch(replay.raw, replay.address, raw, target)
            self.replays += 1
            if key is not None and stream is None:
                self._remember(key, bound_context, arrays, results, locations, replay)
        else:
            self.contexts.enqueue(bound_context, arrays, locations, target)
        if not waits:
            read_on(target, arrays)
        return self.finish(bound_context, results, out, raw, target, waits, example)

    def _remember(
        self,
        key: Any,
        bound_context: BoundContext,
        arrays: Sequence[Source],
        results: Sequence[Block | Source | None],
        locations: Locations,
        replay: Replay,
    ) -> None:
        """This call, for `recall`; unless some of it is in host memory, or some results alone are arrays of the caller's."""
        addresses = tuple([result.address for result in results if isinstance(result, Block)])
        if min(locations, default=0) <= STAGED or len(addresses) not in (0, len(results)):
            return
        views = [item for item in (*arrays, *results) if isinstance(item, View)]
        makers = {item.stream for item in views if item.stream is not None}
        streams = tuple((makers | {LEGACY} if addresses else makers) - {self.own})
        rows = self.work(replay.address, streams)
        stretches = (Stretch(rows[:-1]), Stretch(rows[-1:])) if rows else None
        recalled = self.contexts.recalled
        if key not in recalled and len(recalled) >= self._most_recalled:
            recalled.clear()
        call = recalled.setdefault(key, Recalled(bound_context, streams, bound_context.sizes if addresses else ()))
        call.replays[addresses] = replay, stretches

    def targets(
        self, bound_context: BoundContext, out: Mapping[str, Source] | None, on_gpu: bool, target: int
    ) -> list[Block | Source | None]:
        """Return where each result goes. None: an array in host memory whose shape isn't known yet."""
        results: list[Block | Source | None] = []
        for tensor, shape, size in zip(self.signature.outputs, bound_context.outputs, bound_context.sizes):
            out_array = out.get(tensor.name) if out else None
            if out_array is not None:
                if shape is not None:
                    check_shape(tensor, out_array, shape)
                elif isinstance(out_array, View):
                    raise UsageError(
                        f"the shape of output {tensor.name!r} depends on the data, so it comes in host memory: give a NumPy "
                        "array of the shape that it will have, or leave it out of out"
                    )
                results.append(out_array)
            elif on_gpu and shape is not None and not tensor.on_host:
                results.append(self.blocks.take(size, target))
            else:
                results.append(None if shape is None else np.empty(shape, tensor.dtype))
            if isinstance(out_array, View):
                self.order(out_array, target)
        return results

    def finish(
        self,
        bound_context: BoundContext,
        results: Sequence[Block | Source | None],
        out: Mapping[str, Source] | None,
        raw: Any,
        target: int,
        waits: bool,
        example: Any,
    ) -> dict[str, Any]:
        """Make the results, and wait for them; or not, where they stay in the order of the stream."""
        free = None if waits else target
        outputs: dict[str, Any] = {}
        copies: list[Copy] = []
        for tensor, shape, landing, result in zip(
            self.signature.outputs, bound_context.outputs, bound_context.landing, results
        ):
            value: Any
            if isinstance(result, Block):
                assert shape is not None
                value = self.wrap(tensor, result, shape, free)
                value = value if example is None else like(example, value)
            elif isinstance(result, View):
                value = result.owner
                if isinstance(value, DeviceArray):
                    value.written(free, None if free is None else self._ready(value.address, free))
            else:
                if landing is None:
                    landing = self.contexts.host[tensor.name].array(tensor.dtype, self.contexts.allocated[tensor.name])
                    if result is not None:
                        check_shape(tensor, result, landing.shape)
                value = np.empty(landing.shape, tensor.dtype) if result is None else result
                copies.append((value, landing))
                value = value if example is None or (out and tensor.name in out) else like_host(example, value)
            outputs[tensor.name] = value
        if free is not None:
            self._cuda("cudaEventRecord", self._event.raw, free)
            self._behind = free
        else:
            self.wait(raw, target)
        for array, landing in copies:
            np.copyto(array, landing)
        self._dirty = False
        return outputs

    def launch(self, graph: Any, address: int, raw: Any, stream: int) -> None:
        """Launch a graph. It and `raw`, the stream, are as the runtime takes them."""
        if self._driver is None or stream != self.own or self._driver.launch(address, stream):
            self._cuda("cudaGraphLaunch", graph, raw)

    def wait(self, raw: Any, stream: int) -> None:
        """Wait until what was given to the stream, `raw` to the runtime, is done."""
        if self._driver is None or stream != self.own or self._driver.synchronize(stream):
            self._cuda("cudaStreamSynchronize", raw)

    def settle(self, stream: int | None) -> None:
        """Let what the last call left behind end, or come before what is given to `stream` now."""
        if self.shared:  # given to a stream of the caller's, nobody knows until when
            self.device.synchronize()
            self.shared = False
        if self._dirty:
            self.stream.synchronize()
            if self._behind is not None:
                self._event.synchronize()
            self._dirty, self._behind = False, None
        elif self._behind is not None and self._behind != stream:
            self._cuda("cudaStreamWaitEvent", self._raw if stream is None else stream, self._event.raw, 0)
            self._behind = None

    def locate(
        self, bound_context: BoundContext, arrays: Sequence[Source], target: int, least: int = PINNED
    ) -> list[int]:
        """Copy inputs into pinned memory where they must be there; for each its address on the GPU, `STAGED`, or minus its
        address in pinned memory of the caller's, which is asked for from `least` bytes on."""
        locations: list[int] = []
        for tensor, array, staging in zip(self.signature.inputs, arrays, bound_context.staging):
            if isinstance(array, View):
                if tensor.on_host:
                    raise UsageError(
                        f"input {tensor.name!r} gives a shape: TensorRT reads it on the host; give a NumPy array"
                    )
                if array.stream is not None or array.ordinal != self._ordinal:
                    self.order(array, target)
                locations.append(array.address)
            elif not tensor.on_host and array.nbytes >= least and (address := self.pinned_at(array)):
                locations.append(-address)
            else:
                np.copyto(staging, array)
                locations.append(STAGED)
        return locations

    def uploaded(self, arrays: Sequence[Source], locations: Sequence[int], target: int) -> tuple[int, ...]:
        """The locations after a copy of what lies in pinned memory of the caller's: a graph for each address there is made only
        where addresses come again."""
        location_list = list(locations)
        for index, (tensor, array) in enumerate(zip(self.signature.inputs, arrays)):
            if location_list[index] < RESIDENT:
                assert isinstance(array, np.ndarray)
                inside, address, size = self.contexts.gpu[tensor.name].address, -location_list[index], array.nbytes
                if self._driver is None or target != self.own or self._driver.upload(inside, address, size, target):
                    self._cuda("cudaMemcpyAsync", inside, address, size, self._to_gpu, target)
                location_list[index] = RESIDENT
        return tuple(location_list)

    def pinned_at(self, array: NDArray[Any]) -> int:
        """The array's address if it is whole and page-locked, else 0."""
        if not array.flags.c_contiguous:
            return 0
        entry = self._pinned.get(id(array))
        if entry is not None and entry[0]() is array:
            return entry[1]
        owner: Any = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if owner is None:  # NumPy's own memory: asking CUDA takes longer than the rest of this
            return 0
        address = start(array)
        if not isinstance(owner, HostBuffer):
            return address if self.device.is_pinned(address) else 0
        if len(self._pinned) >= _KNOWN:
            self._pinned.clear()
        self._pinned[id(array)] = weakref.ref(array), address
        return address

    def order(self, array: View, target: int) -> None:
        """Order what is given to `target` after the work that makes `array`."""
        if array.ordinal != self._ordinal:
            raise UsageError(f"an input lies on GPU {array.ordinal}; this engine runs on GPU {self._ordinal}")
        if array.stream is not None and array.stream != target and not self.device.idle(array.stream):
            self.follow(array.stream, target)

    def after(self, streams: Sequence[int]) -> None:
        """Let what the slot's own stream is given from now on come after what those have to do by now."""
        with self.device.current():  # whose default stream is meant
            for stream in streams:
                if not self.device.idle(stream):
                    self.follow(stream, self.own)

    def follow(self, stream: int, target: int) -> None:
        """Let what is given to `target` from now on come after what `stream` has to do by now."""
        self._cuda("cudaEventRecord", self._event.raw, stream)
        self._cuda("cudaStreamWaitEvent", target, self._event.raw, 0)

    def wrap(self, tensor: Tensor, block: Block, shape: Shape, stream: int | None) -> DeviceArray:
        return DeviceArray(
            block.address,
            shape,
            tensor.dtype,
            self._ordinal,
            block,
            stream=stream,
            ready=None if stream is None else self._ready(block.address, stream),
            copy_to_host=self._fetch,
            streams=block.streams,
        )

    def _ready(self, address: int, stream: int) -> Event:
        """An event after what `stream` has to do by now. One for each address: results there follow one another."""
        event = self._events.get(address)
        if event is None:
            event = self._events[address] = self.device.event(timing=False)
        self._cuda("cudaEventRecord", event.raw, stream)
        return event

    def close(self) -> None:
        """Free everything; waits for what still runs."""
        if self.stream.freed:
            return
        with self.device.current():
            self.settle(None)
            self.stream.synchronize()
            self.contexts.close()
            self._event.free()
            self.stream.free()


def _fetch(cuda: Cuda, to_host: Any, target: NDArray[Any], address: int) -> None:
    cuda("cudaMemcpy", target.ctypes.data, address, target.nbytes, to_host)


def _follow_default(device: Device, event: Event, stream: int) -> None:
    """Let what is given to the stream from now on come after what the current device's default stream has to do by now."""
    if not device.idle(LEGACY):
        device.cuda("cudaEventRecord", event.raw, LEGACY)
        device.cuda("cudaStreamWaitEvent", stream, event.raw, 0)


def _fits(bound_context: BoundContext, out: Mapping[str, Source]) -> bool:
    """Return True if results can be copied as they are into those arrays of the caller's."""
    pairs = [(out[name], shape) for name, shape, _ in bound_context.results if name in out]
    return all(
        not isinstance(array, View) and array.shape == shape and array.flags.c_contiguous for array, shape in pairs
    )


def call_key(arrays: Sequence[Source], out: Mapping[str, Source] | None, originals: Mapping[str, Any] | None) -> Any:
    """Return what tells calls on arrays in GPU memory apart, for `Slot.recall`: all that views say, but not whose they are.

    Args:
        out: views of the arrays to write results into, `originals`, of which the type tells whether they can be written.

    Returns: None if an array lies in host memory.
    """
    views = arrays if out is None else (*arrays, *out.values())
    key: list[Any] = [array.key for array in views if type(array) is View]
    if len(key) < len(views):
        return None
    if out:
        key += out
        key += map(type, (originals or {}).values())
    return tuple(key)


def read_on(stream: int, arrays: Sequence[Source]) -> None:
    """Arrays of ours may be let go of before the stream has read them."""
    for array in arrays:
        if isinstance(array, View) and isinstance(array.owner, DeviceArray):
            array.owner.streams.add(stream)


def check_shape(tensor: Tensor, array: Source, shape: Shape) -> None:
    if tuple(array.shape) != shape:
        raise UsageError(f"out[{tensor.name!r}] has shape {x(array.shape)}; this call gives {x(shape)}")


def check_out(signature: Signature, out: Mapping[str, Any], originals: Mapping[str, Any]) -> None:
    """Raise UsageError unless each of `out`, views of `originals`, is an output, of its type and rank, and can be written."""
    outputs = signature.results
    for name, array in out.items():
        if name not in outputs:
            raise UsageError(f"out has {name!r}; the engine gives {', '.join(map(repr, outputs))}")
        check_array(outputs[name], array, "out")
        if not writable(originals[name]):
            raise UsageError(
                f"out[{name!r}] is {type(originals[name]).__name__}, which can't be written into: give a NumPy array, or a "
                "torch or CuPy tensor"
            )
        if array.read_only if isinstance(array, View) else not array.flags.writeable:
            raise UsageError(f"out[{name!r}] is read-only: give an array that may be written into")
    if len(out) > 1:
        _check_no_overlap(out)


def _check_no_overlap(out: Mapping[str, Source]) -> None:
    """Raise UsageError where one result would be written over another."""
    ranges = []
    for name, array in out.items():
        if isinstance(array, View):
            ranges.append((array.address, array.address + math.prod(array.shape) * array.dtype.itemsize, name))
        elif array.flags.c_contiguous:  # others may lie side by side in one block
            first = start(array)
            ranges.append((first, first + array.nbytes, name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(ranges):
        if begin < end:
            raise UsageError(f"out[{name!r}] and out[{other!r}] lie in the same memory: give an array for each")
