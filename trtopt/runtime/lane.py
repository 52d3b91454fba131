"""A lane: one stream with its own scratch memory and buffers, on which one call at a time runs.

Every shape that comes again gets an execution context of its own, which never changes its shape, and CUDA graphs captured
from it: a graph may refer to what its context keeps for the shape. The contexts of a lane never run at the same time, so
they share one block of scratch memory (TensorRT allows that). Shapes seen for the first time run on one loose context by a
plain enqueue, which TensorRT needs before a capture anyway.

Measured on an H200 with TensorRT 8.6 (EfficientNet-Lite0, one image): a context 3.4 ms and 0.5 MiB, a capture 0.3 ms, a
replay 187 us, and 8 us less per call when a small output is written to pinned host memory by the GPU itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtopt.errors import DeviceError, EngineError, UsageError
from trtopt.runtime.arrays import DeviceArray, View, like, like_host
from trtopt.runtime.device import Device, DeviceBuffer, Event, Graph, HostBuffer
from trtopt.runtime.memory import Block, Blocks, Memory
from trtopt.runtime.tensors import Shape, Signature, Tensor, check_array, x
from trtopt.trt.plans import LoadedEngine

Source: TypeAlias = "NDArray[Any] | View"
Key = tuple[tuple[Shape, ...], tuple[bytes, ...]]
Places = tuple[int, ...]  # where each input and output is: its address on the GPU, STAGED or COPIED

MAPPED = 64 << 10  # bytes: results up to this are written by the GPU straight into pinned host memory
PINNED = 64 << 10  # bytes: from this on it is worth asking whether an input already lies in pinned memory
_AT_ONCE = 64 << 20  # bytes: buffers up to this are made for the profile's largest shape, so that they never move
_REMEMBERED = 64  # shapes seen once
_LATELY = 16  # calls for each shape or graph that is kept, before one of them makes place for another
_ADDRESSES = 4  # graphs for each shape, on average
_CREATING = threading.Lock()  # TensorRT doesn't say that contexts of one engine may be made side by side
# Not in GPU memory of the caller's: in pinned memory of the lane's, copied from there or to there inside the graph; or in its
# GPU memory, copied there before. Less than these: minus the address of pinned memory of the caller's, copied inside the graph.
STAGED, COPIED = 0, -1


@dataclass(slots=True)
class _Replay:
    graph: Graph
    raw: Any
    address: int
    used: int = 0  # the number of the call that used it last


@dataclass(slots=True)
class Binding:
    """A context with its shapes set. `outputs`: None where a shape depends on the data."""

    context: Any
    key: Key | None = None
    profile: int | None = None
    outputs: tuple[Shape | None, ...] = ()
    sizes: tuple[int, ...] = ()  # of the outputs, in bytes
    staging: tuple[NDArray[Any], ...] = ()  # the inputs' pinned memory in their shapes
    landing: tuple[NDArray[Any] | None, ...] = ()  # the outputs'
    warm: bool = False  # enqueued once since the shapes were set
    epoch: int = -1
    used: int = 0  # the number of the call that used it last
    addresses: dict[str, int] = field(default_factory=dict)
    graphs: dict[Places, _Replay | None] = field(default_factory=dict)  # None: capturing failed
    seen: set[Places] = field(default_factory=set)
    allocators: dict[str, Any] = field(default_factory=dict)  # TensorRT keeps a bare pointer to each


class Lane:
    """Runs an engine on one stream; used by one thread at a time.

    Args:
        graphs: the most shapes with a context and CUDA graphs of their own; 0: plain enqueues only.
        shares: several contexts may use one profile (`LoadedEngine.shares_profiles`); else there is the loose one only.
    """

    def __init__(
        self, device: Device, loaded: LoadedEngine, signature: Signature, memory: Memory, *, graphs: int, shares: bool
    ) -> None:
        self.device, self.signature = device, signature
        self._loaded, self._memory, self._most = loaded, memory, graphs
        self._cuda = device.cuda
        kinds = self._cuda.functions.cudaMemcpyKind
        self._to_gpu, self._to_host = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        self._launch, self._wait = self._cuda.functions.cudaGraphLaunch, self._cuda.functions.cudaStreamSynchronize
        self.stream = device.stream()
        self.own, self._raw = self.stream.handle, self.stream.raw
        self._reads_shapes = any(item.on_host for item in signature.inputs)
        self._scratch = memory.gpu(loaded.scratch_bytes)
        self._done = device.event(timing=False)
        self._events: dict[int, Event] = {}
        self._ordinal = device.info.ordinal
        self._held = device.held
        self._behind: int | None = None  # a caller's stream on which this lane's last call may still run
        self._dirty = False  # a call ended early: its work may still run
        self.shared = False  # somebody else launched from it (`trtopt.runtime.fixed`)
        self._epoch = 0
        self._gpu: dict[str, DeviceBuffer] = {}
        self._host: dict[str, HostBuffer] = {}
        self.blocks = Blocks(memory)
        self._allocated: dict[str, Shape] = {}
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._fixed: dict[Key, Binding] = {}
        self._unsized: set[str] = set()  # outputs whose shape depends on the data
        self._loose: Binding | None = self._context()
        self._shares = shares
        self._calls = 0
        self._roomy: set[int] = set()
        self.note = ""
        self.replays = self.enqueues = self.captures = 0

    # The call ------------------------------------------------------------------------------------------------------

    def run(
        self,
        arrays: Sequence[Source],
        shapes: tuple[Shape, ...],
        out: Mapping[str, Source] | None = None,
        stream: int | None = None,
        example: Any = None,
    ) -> dict[str, Any]:
        """Infer once on arrays that fit the signature.

        What happens before the launch is kept short; what can be done while the GPU works, is done then.

        Args:
            out: arrays to write results into.
            stream: a caller's stream to run on. If every array is in GPU memory this returns while it runs.
            example: an array of the library that new results are made arrays of.
        """
        self.device.enter()
        if self._dirty or self._behind is not None or self.shared:
            self.settle(stream)
        bound = self.bind(arrays, shapes)
        target, raw = (self.own, self._raw) if stream is None else (stream, stream)
        self._dirty = True
        found = self.place(bound, arrays, target)
        on_gpu = View in map(type, arrays)
        waits = stream is None or STAGED in found or COPIED in found
        results: list[Block | Source | None] = []  # of each output; None: an array in host memory, still to be made
        for tensor, shape, size in zip(self.signature.outputs, bound.outputs, bound.sizes):
            given = out.get(tensor.name) if out else None
            if given is not None:
                check_shape(tensor, given, shape)
                results.append(given)
            elif on_gpu and shape is not None and not tensor.on_host:
                results.append(self.blocks.take(size))
            else:
                results.append(None)
            result = results[-1]
            if isinstance(result, View):
                self.order(result, target)
            waits = waits or isinstance(result, np.ndarray) or result is None
            found.append(STAGED if isinstance(result, np.ndarray) or result is None else result.address)
        places = tuple(found)
        replay = bound.graphs.get(places) or self._capture(bound, arrays, places)
        if replay is not None:
            if self._held is None or stream is not None or self._held.launch(replay.address, target):
                (code,) = self._launch(replay.raw, raw)
                if code:
                    self._cuda.check("cudaGraphLaunch", code)
            replay.used = self._calls
            self.replays += 1
        else:
            self.device.use()
            self.enqueue(bound, arrays, places, target)
            bound.warm = True
            self.enqueues += 1
        return self._finish(bound, results, raw, None if waits else target, example)

    def _finish(
        self, bound: Binding, results: Sequence[Block | Source | None], raw: Any, free: int | None, example: Any
    ) -> dict[str, Any]:
        """Make the results, and wait for them; or not, where they stay in the order of stream `free`."""
        wrapped: dict[str, Any] = {}
        copies: list[tuple[NDArray[Any], NDArray[Any]]] = []
        small: list[tuple[memoryview, memoryview]] = []
        lent = False
        for tensor, shape, landing, result in zip(self.signature.outputs, bound.outputs, bound.landing, results):
            value: Any
            if isinstance(result, Block):
                assert shape is not None
                lent = True
                value = self.wrap(tensor, result, shape, free)
                value = value if example is None else like(example, value)
            elif isinstance(result, View):
                value = result.owner
                if isinstance(value, DeviceArray):
                    value.written(free, None if free is None else self._ready(value.address, free))
            else:
                if landing is None:
                    shape = self._allocated[tensor.name]
                    landing = self._host[tensor.name].array(tensor.dtype, shape)
                value = np.empty(landing.shape, tensor.dtype) if result is None else result
                if landing.nbytes <= MAPPED and value.flags.c_contiguous:
                    small.append((_bytes(value), _bytes(landing)))
                else:
                    copies.append((value, landing))
                value = value if example is None or result is not None else like_host(example, value)
            wrapped[tensor.name] = value
        if free is not None:
            self._cuda("cudaEventRecord", self._done.raw, free)
            self._behind = free
        elif not (lent and self.blocks.wait()):
            (code,) = self._wait(raw)
            if code:
                self._cuda.check("cudaStreamSynchronize", code)
        for there, here in small:
            there[:] = here
        for array, landing in copies:
            np.copyto(array, landing)
        self._dirty = False
        return wrapped

    def settle(self, stream: int | None) -> None:
        """What the last call left behind is over, or comes before what is given to `stream` now."""
        if self.shared:  # given to a stream of the caller's, nobody knows until when
            self.device.synchronize()
            self.shared = False
        if self._dirty:
            self.stream.synchronize()
            if self._behind is not None:
                self._done.synchronize()
            self._dirty, self._behind = False, None
        elif self._behind is not None and self._behind != stream:
            self._cuda("cudaStreamWaitEvent", self._raw if stream is None else stream, self._done.raw, 0)
            self._behind = None

    def place(self, bound: Binding, arrays: Sequence[Source], target: int) -> list[int]:
        """Bring the inputs on their way: for each its address on the GPU, `STAGED` or `COPIED`."""
        places: list[int] = []
        for tensor, array, staging in zip(self.signature.inputs, arrays, bound.staging):
            if isinstance(array, View):
                if tensor.on_host:
                    raise UsageError(
                        f"input {tensor.name!r} gives a shape: TensorRT reads it on the host; give a NumPy array"
                    )
                if array.stream is not None or array.ordinal != self._ordinal:
                    self.order(array, target)
                places.append(array.address)
            elif not tensor.on_host and array.nbytes >= PINNED and (address := self.pinned_at(array)):
                inside, size = self._gpu[tensor.name].address, array.nbytes
                if self._held is None or target != self.own or self._held.upload(inside, address, size, target):
                    self._copy(inside, address, size, self._to_gpu, target)
                places.append(COPIED)
            else:
                np.copyto(staging, array)
                places.append(STAGED)
        return places

    def pinned_at(self, array: NDArray[Any]) -> int:
        """The array's address if it is whole and page-locked, else 0."""
        owner: Any = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if owner is None or not array.flags.c_contiguous:  # NumPy's own memory: asking CUDA takes microseconds
            return 0
        address: int = array.__array_interface__["data"][0]
        return address if isinstance(owner, HostBuffer) or self.device.is_pinned(address) else 0

    def order(self, array: View, target: int) -> None:
        """Order what is given to `target` after the work that makes `array`."""
        if array.ordinal != self._ordinal:
            raise UsageError(f"an input lies on GPU {array.ordinal}; this engine runs on GPU {self._ordinal}")
        if array.stream is not None and array.stream != target and not self.device.idle(array.stream):
            self.follow(array.stream, target)

    def follow(self, stream: int, target: int) -> None:
        """What is given to `target` from now on comes after what `stream` has to do by now."""
        self._cuda("cudaEventRecord", self._done.raw, stream)
        self._cuda("cudaStreamWaitEvent", target, self._done.raw, 0)

    def wrap(self, tensor: Tensor, block: Block, shape: Shape, stream: int | None) -> DeviceArray:
        done = None if stream is None else self._ready(block.address, stream)
        cuda, to_host = self._cuda, self._to_host

        def copy(target: NDArray[Any], address: int) -> None:
            cuda("cudaMemcpy", target.ctypes.data, address, target.nbytes, to_host)

        return DeviceArray(
            block.address, shape, tensor.dtype, self._ordinal, block, stream=stream, ready=done, copy_to_host=copy
        )

    def _ready(self, address: int, stream: int) -> Event:
        """An event after what `stream` has to do by now. One for each address: results there follow one another."""
        event = self._events.get(address)
        if event is None:
            event = self._events[address] = self.device.event(timing=False)
        self._cuda("cudaEventRecord", event.raw, stream)
        return event

    # Contexts ------------------------------------------------------------------------------------------------------

    def _context(self) -> Binding:
        with _CREATING:
            return Binding(self._loaded.context(self._scratch.handle, self._scratch.nbytes))

    def bind(self, arrays: Sequence[Source], shapes: tuple[Shape, ...]) -> Binding:
        """A context set up for these shapes and values."""
        values: tuple[bytes, ...] = ()
        if self._reads_shapes:
            pairs = zip(self.signature.inputs, arrays)
            values = tuple(np.asarray(array).tobytes() for tensor, array in pairs if tensor.on_host)
        key = shapes, values
        bound = self._fixed.get(key) or self._another(key)
        self._calls += 1
        bound.used = self._calls
        if bound.key != key or bound.epoch != self._epoch:
            self._set_up(bound, key, arrays)
        return bound

    def _another(self, key: Key) -> Binding:
        """The loose context; or, for a shape that comes again, one that stays with it."""
        again = key in self._seen or not self.signature.dynamic
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        if again and self._shares and self._most and self._place_for_one_more():
            fixed, self._loose = (self._loose, None) if self._loose_serves(key) else (None, self._loose)
            self._fixed[key] = fixed = fixed or self._context()
            return fixed
        if self._loose is None:
            self._loose = self._context()
        return self._loose

    def _loose_serves(self, key: Key) -> bool:
        return self._loose is not None and self._loose.key in (key, None)

    def _place_for_one_more(self) -> bool:
        """Whether another shape may stay. One that was used lately isn't put out: that would cost more than it gains."""
        if len(self._fixed) < self._most:
            return True
        key, oldest = min(self._fixed.items(), key=lambda item: item[1].used)
        if self._calls - oldest.used < _LATELY * self._most:
            return False
        self.settle(None)
        self.stream.synchronize()
        self._drop(self._fixed.pop(key))
        return True

    def _drop(self, bound: Binding) -> None:
        for replay in bound.graphs.values():
            if replay is not None:
                replay.graph.free()
        bound.graphs.clear()
        bound.seen.clear()

    def _set_up(self, bound: Binding, key: Key, arrays: Sequence[Source]) -> None:
        self.device.use()
        bound.key = None  # until it is complete: an error on the way must not leave half of it in force
        self._drop(bound)
        bound.addresses.clear()
        bound.warm = False
        shapes, context = key[0], bound.context
        inputs, outputs = self.signature.inputs, self.signature.outputs
        number = self.signature.profile(shapes)
        if bound.profile is None:
            bound.profile = max(0, int(context.active_optimization_profile))
        if number != bound.profile:
            if not context.set_optimization_profile_async(number, self.stream.handle):
                raise EngineError(f"TensorRT refused optimization profile {number}; its log says why")
            self.stream.synchronize()
            bound.profile = number
        self._room_at_once(context, number)
        for tensor, shape, array in zip(inputs, shapes, arrays):
            self._room(tensor, shape)
            if tensor.on_host:
                np.copyto(self._host[tensor.name].array(tensor.dtype, shape), np.asarray(array))
            if not context.set_input_shape(tensor.name, shape):
                raise EngineError(f"TensorRT refused shape {x(shape)} for input {tensor.name!r}; its log says why")
            self._address(bound, tensor.name, self.buffer(tensor).handle)  # shape tensors are read by infer_shapes
        missing = context.infer_shapes()
        if missing:
            raise EngineError(f"TensorRT can't infer the output shapes; it lacks {', '.join(map(str, missing))}")
        found: list[Shape | None] = []
        for tensor in outputs:
            shape = tuple(int(size) for size in context.get_tensor_shape(tensor.name))
            if min(shape, default=0) < 0:
                self._unsized.add(tensor.name)  # after a run, 8.6 gives that run's shape here
            if tensor.name in self._unsized:
                self._allocate(bound, tensor)
                found.append(None)
            else:
                self._room(tensor, shape)
                found.append(shape)
        bound.outputs, bound.key, bound.epoch = tuple(found), key, self._epoch
        bound.sizes = tuple(0 if shape is None else tensor.nbytes(shape) for tensor, shape in zip(outputs, found))
        bound.staging = tuple(
            self._host[tensor.name].array(tensor.dtype, shape) for tensor, shape in zip(inputs, shapes)
        )
        bound.landing = tuple(
            None if shape is None else self._host[tensor.name].array(tensor.dtype, shape)
            for tensor, shape in zip(outputs, found)
        )

    def _allocate(self, bound: Binding, tensor: Tensor) -> None:
        """Let TensorRT ask for the memory of an output whose shape depends on the data."""

        def reallocate(name: str, nbytes: int, alignment: int) -> int:
            held = self._gpu.get(name)
            if held is None or held.nbytes < nbytes:
                self._gpu[name] = held = self._memory.gpu(max(nbytes, 2 * held.nbytes if held else 0))
            return held.handle

        allocator = self._loaded.output_allocator(reallocate, self._allocated.__setitem__)
        if not bound.context.set_output_allocator(tensor.name, allocator):
            raise EngineError(f"TensorRT refused an allocator for output {tensor.name!r}; its log says why")
        bound.allocators[tensor.name] = allocator

    # Buffers -------------------------------------------------------------------------------------------------------

    def _mapped(self, tensor: Tensor, nbytes: int) -> bool:
        return tensor.on_host or nbytes <= MAPPED

    def buffer(self, tensor: Tensor) -> DeviceBuffer | HostBuffer:
        return self._host[tensor.name] if tensor.on_host else self._gpu[tensor.name]

    def _room_at_once(self, context: Any, number: int) -> None:
        """Buffers for the profile's largest shapes, unless they are very large: then they never move again."""
        if number in self._roomy or not self.signature.profiles:
            return
        self._roomy.add(number)
        if any(item.on_host for item in self.signature.inputs):
            return
        largest = [self.signature.profiles[number][item.name].max for item in self.signature.inputs]
        if not all(context.set_input_shape(item.name, shape) for item, shape in zip(self.signature.inputs, largest)):
            return
        results = [tuple(int(size) for size in context.get_tensor_shape(item.name)) for item in self.signature.outputs]
        for tensor, shape in zip((*self.signature.inputs, *self.signature.outputs), (*largest, *results)):
            if min(shape, default=0) >= 0 and tensor.nbytes(shape) <= _AT_ONCE:
                self._room(tensor, shape)

    def _room(self, tensor: Tensor, shape: Shape) -> None:
        """Buffers that hold `shape`; they only grow, and what was captured with old ones is dropped."""
        size = tensor.nbytes(shape)
        name = tensor.name
        held = self._host.get(name)
        if held is None or held.nbytes < size:
            if held is not None:
                self.stream.synchronize()  # a copy of the last call may still read or write the old one
                self._moved()
            self._host[name] = self._memory.pinned(size)
            if held is not None:
                held.free()
        if tensor.on_host:
            return
        gpu = self._gpu.get(name)
        if gpu is None or gpu.nbytes < size:
            if gpu is not None:
                self._moved()
                self._gpu.pop(name).free()
            self._gpu[name] = self._memory.gpu(size)

    def _moved(self) -> None:
        self._epoch += 1
        for bound in self._fixed.values():
            self._drop(bound)

    def _address(self, bound: Binding, name: str, address: int) -> None:
        if bound.addresses.get(name) != address:
            if not bound.context.set_tensor_address(name, address):
                raise EngineError(f"TensorRT refused the address of {name!r}; its log says why")
            bound.addresses[name] = address

    # Launching -----------------------------------------------------------------------------------------------------

    def enqueue(self, bound: Binding, arrays: Sequence[Source], places: Places, target: int) -> None:
        """Copies in, the inference, copies out: given to `target`, or captured from it."""
        inputs, outputs = self.signature.inputs, self.signature.outputs
        for tensor, array, place in zip(inputs, arrays, places):
            if tensor.on_host:
                self._address(bound, tensor.name, self._host[tensor.name].handle)
            elif place > 0:
                self._address(bound, tensor.name, place)
            else:
                inside = self._gpu[tensor.name].handle
                self._address(bound, tensor.name, inside)
                if place != COPIED:
                    source = -place or self._host[tensor.name].handle
                    self._copy(inside, source, tensor.nbytes(array.shape), self._to_gpu, target)
        back: list[tuple[Tensor, int]] = []
        for tensor, shape, place in zip(outputs, bound.outputs, places[len(inputs) :]):
            if shape is None:
                continue
            size = tensor.nbytes(shape)
            if place:
                self._address(bound, tensor.name, place)
            elif self._mapped(tensor, size):
                self._address(bound, tensor.name, self._host[tensor.name].handle)
            else:
                self._address(bound, tensor.name, self._gpu[tensor.name].handle)
                back.append((tensor, size))
        for tensor, shape in zip(outputs, bound.outputs):
            if shape is None:
                self._allocated.pop(tensor.name, None)  # the last call's must not stand for this one's
        if not bound.context.execute_async_v3(target):
            raise EngineError("TensorRT couldn't enqueue the inference; its log says why")
        for tensor, shape in zip(outputs, bound.outputs):
            if shape is None:  # known by now: TensorRT has waited for it
                bound.allocators[tensor.name].check()
                if tensor.name not in self._allocated:
                    self._cuda("cudaStreamSynchronize", target)
                if tensor.name not in self._allocated:
                    raise EngineError(f"TensorRT gave no shape for output {tensor.name!r}, which depends on the data")
                size = tensor.nbytes(self._allocated[tensor.name])
                if tensor.name not in self._host or self._host[tensor.name].nbytes < size:
                    self._host[tensor.name] = self._memory.pinned(2 * size)
                back.append((tensor, size))
        for tensor, size in back:
            self._copy(self._host[tensor.name].handle, self._gpu[tensor.name].handle, size, self._to_host, target)

    def _copy(self, to: int, source: int, nbytes: int, kind: Any, target: int) -> None:
        if nbytes:
            self._cuda("cudaMemcpyAsync", to, source, nbytes, kind, target)

    def _worth(self, bound: Binding, places: Places) -> bool:
        """Whether to capture now: a shape that stays, run once before, at addresses that came before."""
        if not self._most or not bound.warm or None in bound.outputs or self._loaded.captures_itself:
            return False
        foreign = any(place > 0 for place in places)
        if not foreign or places in bound.seen:
            return bound is not self._loose or not self._shares
        if len(bound.seen) > _REMEMBERED:
            bound.seen.clear()
        bound.seen.add(places)
        return False

    def _capture(self, bound: Binding, arrays: Sequence[Source], places: Places) -> _Replay | None:
        """A new CUDA graph for these places, if it is worth one and there is room."""
        if places in bound.graphs or not self._worth(bound, places) or not self._graph_for_one_more():
            return None
        graph, note = self.captured(bound, arrays, places)
        if graph is None:
            self.note, bound.graphs[places] = note, None
            return None
        replay = bound.graphs[places] = _Replay(graph, graph.raw, graph.handle)
        self.captures += 1
        return replay

    def _graph_for_one_more(self) -> bool:
        """One shape may meet many addresses. A graph that was used lately isn't put out, as with contexts."""
        most = _ADDRESSES * self._most
        kept = [
            (replay.used, bound, places)
            for bound in self._fixed.values()
            for places, replay in bound.graphs.items()
            if replay is not None
        ]
        if len(kept) < most:
            return True
        used, bound, places = min(kept, key=lambda item: item[0])
        if self._calls - used < _LATELY * most:
            return False
        old = bound.graphs.pop(places)
        assert old is not None
        self.stream.synchronize()
        old.graph.free()
        return True

    def captured(self, bound: Binding, arrays: Sequence[Source], places: Places) -> tuple[Graph | None, str]:
        """A CUDA graph of a call; or why there is none."""
        if self._loaded.captures_itself:
            return None, "plain enqueues: TensorRT-RTX captures graphs itself"
        if None in bound.outputs:
            return None, "plain enqueues: an output's shape depends on data"
        self.device.use()
        try:
            with self.device.capturing:
                return self.stream.capture(lambda: self.enqueue(bound, arrays, places, self.own)), ""
        except (DeviceError, EngineError) as error:
            return None, f"plain enqueues: capturing a CUDA graph failed: {error}"

    def close(self) -> None:
        """Free everything; waits for what still runs."""
        if self.stream.freed:
            return
        self.device.use()
        self.settle(None)
        self.stream.synchronize()
        for bound in (*self._fixed.values(), *([self._loose] if self._loose else [])):
            self._drop(bound)
            bound.context = None  # before what it points to
        self._fixed.clear()
        self._loose = None
        for held in (*self._gpu.values(), *self._host.values(), self._scratch, self._done, self.stream):
            held.free()
        self._gpu.clear()
        self._host.clear()


def _bytes(array: NDArray[Any]) -> memoryview:
    """To copy without letting Python's GIL go, as NumPy does: where threads queue for it, that takes longer than the copy."""
    return array.reshape(-1).view(np.uint8).data


def check_shape(tensor: Tensor, given: Source, shape: Shape | None) -> None:
    if shape is not None and tuple(given.shape) != shape:
        raise UsageError(f"out[{tensor.name!r}] has shape {x(given.shape)}; this call gives {x(shape)}")


def check_out(signature: Signature, out: Mapping[str, Any]) -> None:
    """Raise UsageError unless each of `out` is an output, of its type and rank, and can be written."""
    known = {item.name: item for item in signature.outputs}
    for name, array in out.items():
        if name not in known:
            raise UsageError(f"out has {name!r}; the engine gives {', '.join(map(repr, known))}")
        check_array(known[name], array, "out")
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise UsageError(f"out[{name!r}] is read-only")
