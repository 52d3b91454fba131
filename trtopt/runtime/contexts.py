"""The context cache: execution contexts with their shapes set, the buffers they use, and the CUDA graphs captured from them.

Every shape that comes again gets an execution context of its own, which never changes its shape, and CUDA graphs captured
from it: a graph may refer to what its context keeps for the shape. The contexts of a slot never run at the same time, so
they share one block of scratch memory (TensorRT allows that). Shapes seen for the first time run on one fallback context by a
plain enqueue, which TensorRT needs before a capture anyway.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DeviceError, EngineError, UsageError
from trtopt.core.values import x
from trtopt.cuda.arrays import View
from trtopt.cuda.device import DeviceBuffer, Graph, HostBuffer, Stream
from trtopt.cuda.tensors import Shape, Tensor, check_array
from trtopt.runtime.stretch import NativeCall

if TYPE_CHECKING:
    from trtopt.runtime.gpu_engine import GpuEngine

Source: TypeAlias = "NDArray[Any] | View"
Key = tuple[tuple[Shape, ...], tuple[bytes, ...]]
# Places of inputs and outputs: texts, whose hash is kept, since each call looks its graph up by them.
DEVICE = "GPU memory of the caller's"
PINNED = "pinned memory of the caller's, copied inside the graph"
_STAGING = "pinned memory of ours, copied inside the graph"
_RESIDENT = "GPU memory of ours, copied there before"


class Location(NamedTuple):
    """Where an input or output lies; `address`: in memory of the caller's."""

    place: str
    address: int = 0


@functools.lru_cache(256)
def on_device(address: int) -> Location:
    """Return one for each address: each call asks for it."""
    return Location(DEVICE, address)


Locations = tuple[Location, ...]
STAGED, RESIDENT = Location(_STAGING), Location(_RESIDENT)
# A call in one stretch or in two, and the words of the first and of the last where the addresses of the caller's arrays in
# host memory go: of inputs that are copied, and of outputs.
Prepared = tuple[NativeCall, NativeCall, tuple[int, ...], tuple[int, ...]]

_AT_ONCE = 64 << 20  # bytes: buffers up to this are made for the profile's largest shape, so that they never move
MAPPED = 64 << 10  # bytes: results up to this are written by the GPU straight into pinned host memory
REMEMBERED = 64  # shapes and locations seen once
_MIN_IDLE_CALLS = 16  # calls for each shape or graph that is kept, before one of them makes room for another
GRAPHS = 4  # for each shape, on average
# Held while contexts are made and set up, run for the first time and captured: TensorRT doesn't say that this may be done
# concurrently, and some of it keeps Python's GIL. Under compute-sanitizer 8.6 deadlocked, one thread in a context's first run
# and one making another context.
_SETUP_LOCK = threading.RLock()


@dataclass(slots=True)
class Replay:
    """A CUDA graph of a call.

    Attributes:
        last_use: the number of the call that used it last.
        stretches: by the streams that come first, all of a call but where the caller's arrays in host memory lie.
    """

    graph: Graph
    raw: Any
    address: int
    last_use: int = 0
    stretches: dict[tuple[int, ...], Prepared] = field(default_factory=dict)


@dataclass(slots=True)
class BoundContext:
    """A context with its shapes set. `outputs`: None where a shape depends on the data.

    What it prints as leaves out its pinned memory: a traceback that shows a failed call may come after that is freed.
    """

    context: Any
    key: Key | None = None
    profile: int | None = None
    outputs: tuple[Shape | None, ...] = ()
    sizes: tuple[int, ...] = ()  # of the outputs, in bytes
    results: tuple[tuple[Shape, np.dtype[Any]], ...] = ()  # shape and type of outputs of known shape
    staging: tuple[NDArray[Any], ...] = field(default=(), repr=False)  # the inputs' pinned memory in their shapes
    landing: tuple[NDArray[Any] | None, ...] = field(default=(), repr=False)  # the outputs'
    staged: Locations = ()  # `STAGED` for each output
    warm: bool = False  # enqueued once since the shapes were set
    epoch: int = -1
    last_use: int = 0  # the number of the call that used it last
    addresses: dict[str, int] = field(default_factory=dict)  # as the context knows them
    graphs: dict[Locations, Replay | None] = field(default_factory=dict)  # None: capturing failed
    recent_locations: set[Locations] = field(default_factory=set)
    separate: set[Locations] = field(default_factory=set)  # whose inputs and outputs don't overlap
    allocators: dict[str, Any] = field(default_factory=dict)  # TensorRT keeps a bare pointer to each


class ContextCache:
    """The contexts of one slot, for its stream; the fallback only where several can't share a profile.

    Attributes:
        gpu, host: tensor name → its memory on the GPU, and its page-locked memory.
        allocated: outputs whose shape depends on the data → their shape in the last call.
        note: why the last capture failed.
        reads_shapes: an input gives a shape: TensorRT reads it on the host.
        evictions: contexts and graphs that were replaced.
    """

    def __init__(self, engine: GpuEngine, stream: Stream) -> None:
        assert engine.loaded is not None
        self._device, self._stream, self._cuda = engine.device, stream, engine.device.cuda
        self.loaded, self._signature, self._memory = engine.loaded, engine.signature, engine.memory
        self._shares = engine.shares
        kinds = self._cuda.functions.cudaMemcpyKind
        self._to_gpu, self._to_host = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        self.reads_shapes = any(item.on_host for item in self._signature.inputs)
        self._scratch = self._memory.gpu(self.loaded.scratch_bytes)
        self._epoch = 0  # grows when buffers move: what was set up or captured before is stale
        self.gpu: dict[str, DeviceBuffer] = {}
        self.host: dict[str, HostBuffer] = {}
        self.allocated: dict[str, Shape] = {}
        self._recent_keys: OrderedDict[Key, None] = OrderedDict()
        self._contexts: dict[Key, BoundContext] = {}
        self._most_contexts, self._most_graphs = engine.graphs, GRAPHS * engine.graphs
        self._full = 0  # calls: until then no graph can go, so none is looked for: that takes long beside a call
        self._roomy: set[int] = set()
        self._unsized: set[str] = set()  # outputs whose shape depends on the data
        with _SETUP_LOCK:
            self._fallback: BoundContext | None = self._context()
        self.note = ""
        self.calls = self.evictions = 0

    def _context(self) -> BoundContext:
        return BoundContext(self.loaded.context(self._scratch.handle, self._scratch.nbytes))

    def bind(self, arrays: Sequence[Source], shapes: tuple[Shape, ...]) -> BoundContext:
        """A context set up for these shapes and values."""
        values: tuple[bytes, ...] = ()
        if self.reads_shapes:
            pairs = zip(self._signature.inputs, arrays)
            values = tuple(np.asarray(array).tobytes() for tensor, array in pairs if tensor.on_host)
        key = shapes, values
        bound_context = self._contexts.get(key)
        self.calls += 1
        if bound_context is None or bound_context.key is None or bound_context.epoch != self._epoch:
            for tensor, array in zip(self._signature.inputs, arrays):
                check_array(tensor, array)
            self._signature.profile(shapes)
            with _SETUP_LOCK, self._device.current():
                bound_context = bound_context or self._another(key)
                if bound_context.key != key or bound_context.epoch != self._epoch:
                    self._set_up(bound_context, key, arrays)
        bound_context.last_use = self.calls
        return bound_context

    def _another(self, key: Key) -> BoundContext:
        """The fallback; or, for a shape that comes again, one that stays with it."""
        again = key in self._recent_keys or not self._signature.dynamic
        self._recent_keys[key] = None
        self._recent_keys.move_to_end(key)
        if len(self._recent_keys) > REMEMBERED:
            self._recent_keys.popitem(last=False)
        cached = [(item.last_use, self._contexts, key) for key, item in self._contexts.items()]
        may_stay = again and self._shares and self._most_contexts
        if may_stay and self._makes_room(self._most_contexts, cached):
            bound_context, self._fallback = self._fallback, None
            if bound_context is None or bound_context.key not in (key, None):  # the fallback serves another shape
                bound_context, self._fallback = self._context(), bound_context
            self._contexts[key] = bound_context
            return bound_context
        if self._fallback is None:
            self._fallback = self._context()
        return self._fallback

    def _makes_room(self, most: int, kept: list[tuple[int, dict[Any, Any], Any]]) -> bool:
        """Make room for one more context or graph: of more than `most`, the one used longest ago goes; of each `kept` are known
        the number of the call that used it last, the dict that it is in, and its key there.

        But one that was used in the last 16 calls for each that is kept stays, and there is no room: where more shapes take
        turns than there is room for, replacing them all the time would cost more than it gains.
        """
        if len(kept) >= most:
            last_call, cache, key = min(kept, key=lambda item: item[0])
            if self.calls - last_call < _MIN_IDLE_CALLS * most:
                return False
            self._device.synchronize()  # it may still run, on a stream of the caller's too
            item = cache.pop(key)
            if isinstance(item, Replay):
                item.graph.free()
            else:
                self._forget(item)
            self.evictions += 1
        return True

    def _forget(self, bound_context: BoundContext) -> None:
        """Free a context's graphs."""
        self._full = 0
        for replay in bound_context.graphs.values():
            if replay is not None:
                replay.graph.free()
        for collection in (bound_context.graphs, bound_context.recent_locations, bound_context.separate):
            collection.clear()

    def _set_up(self, bound_context: BoundContext, key: Key, arrays: Sequence[Source]) -> None:
        bound_context.key = None  # until it is complete: an error on the way must not leave half of it in force
        self._forget(bound_context)
        bound_context.addresses.clear()
        bound_context.warm = False
        shapes, context = key[0], bound_context.context
        inputs, outputs = self._signature.inputs, self._signature.outputs
        number = self._signature.profile(shapes)
        if bound_context.profile is None:
            bound_context.profile = max(0, int(context.active_optimization_profile))
        if number != bound_context.profile:
            if not context.set_optimization_profile_async(number, self._stream.handle):
                raise EngineError(f"TensorRT refused optimization profile {number}; its log says why")
            self._stream.synchronize()
            bound_context.profile = number
        self._room_at_once(context, number)
        for tensor, shape, array in zip(inputs, shapes, arrays):
            self._room(tensor, shape)
            if tensor.on_host:
                np.copyto(self.host[tensor.name].array(tensor.dtype, shape), np.asarray(array))
            if not context.set_input_shape(tensor.name, shape):
                raise EngineError(f"TensorRT refused shape {x(shape)} for input {tensor.name!r}; its log says why")
            # Also of shape tensors, which `infer_shapes` reads.
            self._address(bound_context, tensor.name, self.buffer(tensor).handle)
        missing_inputs = context.infer_shapes()
        if missing_inputs:
            raise EngineError(f"TensorRT can't infer the output shapes; it lacks {', '.join(map(str, missing_inputs))}")
        output_shapes: list[Shape | None] = []
        for tensor in outputs:
            shape = tuple(int(size) for size in context.get_tensor_shape(tensor.name))
            if min(shape, default=0) < 0:
                self._unsized.add(tensor.name)  # after a run, 8.6 gives that run's shape here
            if tensor.name in self._unsized:
                self._allocate(bound_context, tensor)
                output_shapes.append(None)
            else:
                self._room(tensor, shape)
                output_shapes.append(shape)
        bound_context.outputs, bound_context.key, bound_context.epoch = tuple(output_shapes), key, self._epoch
        bound_context.sizes = tuple(
            0 if shape is None else tensor.nbytes(shape) for tensor, shape in zip(outputs, output_shapes)
        )
        bound_context.staging = tuple(
            self.host[tensor.name].array(tensor.dtype, shape) for tensor, shape in zip(inputs, shapes)
        )
        bound_context.landing = tuple(
            None if shape is None else self.host[tensor.name].array(tensor.dtype, shape)
            for tensor, shape in zip(outputs, output_shapes)
        )
        pairs = zip(outputs, output_shapes)
        bound_context.results = tuple((shape, tensor.dtype) for tensor, shape in pairs if shape is not None)
        bound_context.staged = (STAGED,) * len(outputs)

    def _allocate(self, bound_context: BoundContext, tensor: Tensor) -> None:
        """Let TensorRT ask for the memory of an output whose shape depends on the data."""
        # Not self: in a cycle, contexts would go when the garbage collector comes.
        buffers, memory = self.gpu, self._memory

        def reallocate(name: str, nbytes: int, alignment: int) -> int:
            buffer = buffers.get(name)
            if buffer is None or buffer.nbytes < nbytes:
                buffers[name] = buffer = memory.gpu(max(nbytes, 2 * buffer.nbytes if buffer else 0))
            return buffer.handle

        allocator = self.loaded.output_allocator(reallocate, self.allocated.__setitem__)
        if not bound_context.context.set_output_allocator(tensor.name, allocator):
            raise EngineError(f"TensorRT refused an allocator for output {tensor.name!r}; its log says why")
        bound_context.allocators[tensor.name] = allocator

    # Buffers -------------------------------------------------------------------------------------------------------

    def buffer(self, tensor: Tensor) -> DeviceBuffer | HostBuffer:
        return self.host[tensor.name] if tensor.on_host else self.gpu[tensor.name]

    def _room_at_once(self, context: Any, number: int) -> None:
        """Buffers for the profile's largest shapes, unless they are very large: before results take the memory."""
        if number in self._roomy or not self._signature.profiles or self.reads_shapes:
            return
        self._roomy.add(number)
        inputs, outputs = self._signature.inputs, self._signature.outputs
        largest = [self._signature.profiles[number][item.name].max for item in inputs]
        if all(context.set_input_shape(item.name, shape) for item, shape in zip(inputs, largest)):
            results = [tuple(int(size) for size in context.get_tensor_shape(item.name)) for item in outputs]
            for tensor, shape in zip((*inputs, *outputs), (*largest, *results)):
                if min(shape, default=0) >= 0 and tensor.nbytes(shape) <= _AT_ONCE:
                    self._room(tensor, shape)

    def _room(self, tensor: Tensor, shape: Shape) -> None:
        """Buffers that hold `shape`; they only grow, and what was captured with old ones is dropped."""
        size = tensor.nbytes(shape)
        name = tensor.name
        host = self.host.get(name)
        if host is None or host.nbytes < size:
            if host is not None:
                self._stream.synchronize()  # a copy of the last call may still read or write the old one
                self._moved()
            self.host[name] = self._memory.pinned(size)
            if host is not None:
                host.free()
        if tensor.on_host:
            return
        gpu = self.gpu.get(name)
        if gpu is None or gpu.nbytes < size:
            if gpu is not None:
                self._moved()
                self.gpu.pop(name).free()
            self.gpu[name] = self._memory.gpu(size)

    def _moved(self) -> None:
        self._epoch += 1
        for bound_context in self._contexts.values():
            self._forget(bound_context)

    def _address(self, bound_context: BoundContext, name: str, address: int) -> None:
        if bound_context.addresses.get(name) != address:
            if not bound_context.context.set_tensor_address(name, address):
                raise EngineError(f"TensorRT refused the address of {name!r}; its log says why")
            bound_context.addresses[name] = address

    @property
    def contexts(self) -> int:
        return len(self._all())

    @property
    def graphs(self) -> int:
        """CUDA graphs that are kept. Any thread may ask."""
        return sum(replay is not None for context in self._all() for replay in list(context.graphs.values()))

    def _all(self) -> list[BoundContext]:
        return [*list(self._contexts.values()), *([fallback] if (fallback := self._fallback) else [])]

    # Launching -----------------------------------------------------------------------------------------------------

    def enqueue(self, bound_context: BoundContext, arrays: Sequence[Source], locations: Locations, target: int) -> None:
        """Copies in, the inference, copies out: given to `target`."""
        if bound_context.warm:
            self._enqueue(bound_context, arrays, locations, target)
            return
        with _SETUP_LOCK:
            self._enqueue(bound_context, arrays, locations, target)
        bound_context.warm = True

    def _enqueue(
        self, bound_context: BoundContext, arrays: Sequence[Source], locations: Locations, target: int
    ) -> None:
        inputs, outputs = self._signature.inputs, self._signature.outputs
        if locations not in bound_context.separate:
            self._check_overlap(bound_context, arrays, locations)
        for tensor, array, (place, address) in zip(inputs, arrays, locations):
            if tensor.on_host:
                self._address(bound_context, tensor.name, self.host[tensor.name].handle)
            elif place == DEVICE:
                self._address(bound_context, tensor.name, address)
            else:
                inside = self.gpu[tensor.name].handle
                self._address(bound_context, tensor.name, inside)
                if place != _RESIDENT:
                    source = address or self.host[tensor.name].handle
                    self._copy(inside, source, tensor.nbytes(array.shape), self._to_gpu, target)
        back: list[tuple[Tensor, int]] = []
        for tensor, shape, (place, address) in zip(outputs, bound_context.outputs, locations[len(inputs) :]):
            if shape is None:
                continue
            size = tensor.nbytes(shape)
            if place == DEVICE:
                self._address(bound_context, tensor.name, address)
            elif tensor.on_host or size <= MAPPED:
                self._address(bound_context, tensor.name, self.host[tensor.name].handle)
            else:
                self._address(bound_context, tensor.name, self.gpu[tensor.name].handle)
                back.append((tensor, size))
        for tensor, shape in zip(outputs, bound_context.outputs):
            if shape is None:
                self.allocated.pop(tensor.name, None)  # the last call's must not stand for this one's
        if not bound_context.context.execute_async_v3(target):
            raise EngineError("TensorRT couldn't enqueue the inference; its log says why")
        for tensor, shape in zip(outputs, bound_context.outputs):
            if shape is None:  # known by now: TensorRT has waited for it
                bound_context.allocators[tensor.name].check()
                if tensor.name not in self.allocated:
                    self._cuda("cudaStreamSynchronize", target)
                if tensor.name not in self.allocated:
                    raise EngineError(f"TensorRT gave no shape for output {tensor.name!r}, which depends on the data")
                size = tensor.nbytes(self.allocated[tensor.name])
                if tensor.name not in self.host or self.host[tensor.name].nbytes < size:
                    self.host[tensor.name] = self._memory.pinned(2 * size)
                back.append((tensor, size))
        for tensor, size in back:
            self._copy(self.host[tensor.name].handle, self.gpu[tensor.name].handle, size, self._to_host, target)

    def _check_overlap(self, bound_context: BoundContext, arrays: Sequence[Source], locations: Locations) -> None:
        """Raise UsageError where TensorRT would write a result over an input that it still reads."""
        inputs, outputs = self._signature.inputs, self._signature.outputs
        for result, size, (to, at) in zip(outputs, bound_context.sizes, locations[len(inputs) :]):
            for tensor, array, (place, address) in zip(inputs, arrays, locations):
                over = at < address + tensor.nbytes(array.shape) and address < at + size
                if to == place == DEVICE and over and not self.loaded.aliases(tensor.name, result.name):
                    raise UsageError(
                        f"out[{result.name!r}] and input {tensor.name!r} lie in the same GPU memory: TensorRT would write "
                        "over what it still reads; give an array of its own"
                    )
        if len(bound_context.separate) > REMEMBERED:
            bound_context.separate.clear()
        bound_context.separate.add(locations)

    def _copy(self, to: int, source: int, nbytes: int, kind: Any, target: int) -> None:
        if nbytes:
            self._cuda("cudaMemcpyAsync", to, source, nbytes, kind, target)

    def _worth(self, bound_context: BoundContext, locations: Locations) -> bool:
        """Return True to capture now: a shape that stays, run once before, at addresses that came before."""
        can = bound_context.warm and None not in bound_context.outputs and not self.loaded.captures_itself
        if not self._most_contexts or not can:
            return False
        foreign = any(location.place in (DEVICE, PINNED) for location in locations)
        if not foreign or locations in bound_context.recent_locations:
            return bound_context is not self._fallback or not self._shares
        if len(bound_context.recent_locations) > REMEMBERED:
            bound_context.recent_locations.clear()
        bound_context.recent_locations.add(locations)
        return False

    def replay(self, bound_context: BoundContext, arrays: Sequence[Source], locations: Locations) -> Replay | None:
        """The CUDA graph for these locations; a new one, if they are worth it and there is room."""
        if (replay := bound_context.graphs.get(locations)) is not None:
            replay.last_use = self.calls
            return replay
        full = self.calls < self._full
        if full or locations in bound_context.graphs or not self._worth(bound_context, locations):
            return None
        cached = [
            (replay.last_use, other.graphs, key)
            for other in self._contexts.values()
            for key, replay in other.graphs.items()
            if replay is not None
        ]
        if not self._makes_room(self._most_graphs, cached):
            self._full = min(last_call for last_call, *_ in cached) + _MIN_IDLE_CALLS * self._most_graphs
            return None
        graph, note = self.captured(bound_context, arrays, locations)
        if graph is None:
            self.note, bound_context.graphs[locations] = note, None
            return None
        replay = bound_context.graphs[locations] = Replay(graph, graph.raw, graph.handle, self.calls)
        return replay

    def captured(
        self, bound_context: BoundContext, arrays: Sequence[Source], locations: Locations
    ) -> tuple[Graph | None, str]:
        """A CUDA graph of a call; or why there is none."""
        if self.loaded.captures_itself:
            return None, "plain enqueues: TensorRT-RTX captures graphs itself"
        if None in bound_context.outputs:
            return None, "plain enqueues: an output's shape depends on data"
        try:
            with _SETUP_LOCK, self._device.capturing:
                return self._stream.capture(
                    lambda: self._enqueue(bound_context, arrays, locations, self._stream.handle)
                ), ""
        except (DeviceError, EngineError) as error:
            return None, f"plain enqueues: capturing a CUDA graph failed: {error}"

    def close(self) -> None:
        """Free everything; nothing of it may run any more."""
        for bound_context in self._all():
            self._forget(bound_context)
            bound_context.context = None  # before what it points to
        self._contexts.clear()
        self._fallback = None
        for buffer in (*self.gpu.values(), *self.host.values(), self._scratch):
            buffer.free()
        self.gpu.clear()
        self.host.clear()
