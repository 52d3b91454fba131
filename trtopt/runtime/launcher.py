"""Execution contexts with their shapes set, in the memory of one slot: set up, enqueued, captured."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DeviceError, EngineError, UsageError
from trtopt.core.values import x
from trtopt.cuda.device import DeviceBuffer, Graph, HostBuffer, Stream
from trtopt.cuda.tensors import Shape, Tensor
from trtopt.runtime.gpu_engine import GpuEngine
from trtopt.runtime.layout import DEVICE, RESIDENT, STAGED, Locations, Source
from trtopt.runtime.stretch import Replay

Key = tuple[tuple[Shape, ...], tuple[bytes, ...]]  # shapes of all inputs, and values of those that give shapes
_AT_ONCE = 64 << 20  # bytes: buffers up to this are made for the profile's largest shape, so that they never move
MAPPED = 64 << 10  # bytes: results up to this are written by the GPU straight into pinned host memory
_SEPARATE = 64  # locations of a context that are known not to overlap
# Held while contexts are made and set up, run for the first time and captured: TensorRT doesn't say that this may be done
# concurrently, and some of it keeps Python's GIL. Under compute-sanitizer 8.6 deadlocked, one thread in a context's first run
# and one making another context.
_SETUP_LOCK = threading.RLock()


@dataclass(slots=True)
class BoundContext:
    """A context with its shapes set. `outputs`: None where a shape depends on the data.

    What it prints as leaves out its pinned memory: a traceback that shows a failed call may come after that is freed.
    """

    context: Any
    key: Key | None = None
    profile: int | None = None
    outputs: tuple[Shape | None, ...] = ()
    given: tuple[int, ...] = ()  # bytes of the inputs
    sizes: tuple[int, ...] = ()  # bytes of the outputs
    results: tuple[tuple[Shape, np.dtype[Any]], ...] = ()  # shape and type of outputs of known shape
    staging: tuple[NDArray[Any], ...] = field(default=(), repr=False)  # the inputs' pinned memory in their shapes
    landing: tuple[NDArray[Any] | None, ...] = field(default=(), repr=False)  # the outputs'
    staged: Locations = ()  # `STAGED` for each output
    warm: bool = False  # enqueued once since the shapes were set
    epoch: int = -1  # the launcher's when they were set
    last_use: int = 0  # the number of the call that used it last
    addresses: dict[str, int] = field(default_factory=dict)  # as the context knows them
    graphs: dict[Locations, Replay | None] = field(default_factory=dict)  # None: capturing failed
    recent_locations: set[Locations] = field(default_factory=set)
    separate: set[Locations] = field(default_factory=set)  # whose inputs and outputs don't overlap
    allocators: dict[str, Any] = field(default_factory=dict)  # TensorRT keeps a bare pointer to each

    def forget_graphs(self) -> None:
        """Free its graphs, and what is known of addresses."""
        for replay in self.graphs.values():
            if replay is not None:
                replay.graph.free()
        for collection in (self.graphs, self.recent_locations, self.separate):
            collection.clear()

    def address(self, name: str, address: int) -> None:
        """Tell the context where an input or output lies."""
        if self.addresses.get(name) != address:
            _done(self.context.set_tensor_address(name, address), f"the address of {name!r}")
            self.addresses[name] = address


def _done(accepted: bool, what: str) -> None:
    if not accepted:
        raise EngineError(f"TensorRT refused {what}; its log says why")


class Launcher:
    """TensorRT's calls for one slot: its contexts share one block of scratch memory, and the memory of inputs and outputs."""

    def __init__(self, engine: GpuEngine, stream: Stream) -> None:
        self._device, self._stream = engine.device, stream
        self.loaded, self._signature, self._memory = engine.loaded, engine.signature, engine.memory
        self._to_gpu, self._to_host = engine.device.to_gpu, engine.device.to_host
        self.reads_shapes = any(item.on_host for item in self._signature.inputs)  # TensorRT does, on the host
        self._scratch = self._memory.gpu(self.loaded.scratch_bytes)
        self.epoch = 0  # grows when memory of these moves: what was set up or captured before is stale
        self.gpu: dict[str, DeviceBuffer] = {}
        self.host: dict[str, HostBuffer] = {}
        self.allocated: dict[str, Shape] = {}  # in the last call, of outputs whose shape depends on the data
        self._roomy: set[int] = set()  # profiles for whose largest shapes there is memory
        self._unsized: set[str] = set()  # outputs whose shape depends on the data

    def context(self) -> BoundContext:
        with _SETUP_LOCK, self._device.current():
            return BoundContext(self.loaded.context(self._scratch.handle, self._scratch.nbytes))

    # Setting up ----------------------------------------------------------------------------------------------------

    def set_up(self, bound_context: BoundContext, key: Key, arrays: Sequence[Source]) -> None:
        """Set the shapes of a context, and find out those of its outputs."""
        with _SETUP_LOCK, self._device.current():
            bound_context.key = None  # until it is complete: an error on the way must not leave half of it in force
            bound_context.forget_graphs()
            bound_context.addresses.clear()
            bound_context.warm = False
            self._choose_profile(bound_context, key[0])
            self._give_inputs(bound_context, key[0], arrays)
            shapes = self._output_shapes(bound_context)
        inputs, outputs = self._signature.inputs, self._signature.outputs
        pairs = list(zip(outputs, shapes))
        bound_context.outputs, bound_context.key, bound_context.epoch = shapes, key, self.epoch
        bound_context.given = tuple(tensor.nbytes(shape) for tensor, shape in zip(inputs, key[0]))
        bound_context.sizes = tuple(0 if shape is None else tensor.nbytes(shape) for tensor, shape in pairs)
        bound_context.staging = tuple(
            self.host[tensor.name].array(tensor.dtype, shape) for tensor, shape in zip(inputs, key[0])
        )
        bound_context.landing = tuple(
            None if shape is None else self.host[tensor.name].array(tensor.dtype, shape) for tensor, shape in pairs
        )
        bound_context.results = tuple((shape, tensor.dtype) for tensor, shape in pairs if shape is not None)
        bound_context.staged = (STAGED,) * len(outputs)

    def _choose_profile(self, bound_context: BoundContext, shapes: tuple[Shape, ...]) -> None:
        context, number = bound_context.context, self._signature.profile(shapes)
        if bound_context.profile is None:
            bound_context.profile = max(0, int(context.active_optimization_profile))
        if number != bound_context.profile:
            _done(context.set_optimization_profile_async(number, self._stream.handle), f"profile {number}")
            self._stream.synchronize()
            bound_context.profile = number
        if number not in self._roomy and self._signature.profiles and not self.reads_shapes:
            self._roomy.add(number)
            self._room_for_largest(context, number)

    def _give_inputs(self, bound_context: BoundContext, shapes: tuple[Shape, ...], arrays: Sequence[Source]) -> None:
        for tensor, shape, array in zip(self._signature.inputs, shapes, arrays):
            self._room(tensor, shape)
            if tensor.on_host:
                np.copyto(self.host[tensor.name].array(tensor.dtype, shape), np.asarray(array))
            _done(bound_context.context.set_input_shape(tensor.name, shape), f"shape {x(shape)} of {tensor.name!r}")
            # Also of shape tensors, which `infer_shapes` reads.
            bound_context.address(tensor.name, self.buffer(tensor).handle)
        if missing := bound_context.context.infer_shapes():
            raise EngineError(f"TensorRT can't infer the output shapes; it lacks {', '.join(map(str, missing))}")

    def _output_shapes(self, bound_context: BoundContext) -> tuple[Shape | None, ...]:
        """Ask for them, and make room; None: it depends on the data."""
        shapes: list[Shape | None] = []
        for tensor in self._signature.outputs:
            shape = tuple(int(size) for size in bound_context.context.get_tensor_shape(tensor.name))
            if min(shape, default=0) < 0:
                self._unsized.add(tensor.name)  # after a run, 8.6 gives that run's shape here
            if tensor.name in self._unsized:
                self._allocate(bound_context, tensor)
                shapes.append(None)
            else:
                self._room(tensor, shape)
                shapes.append(shape)
        return tuple(shapes)

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
        _done(bound_context.context.set_output_allocator(tensor.name, allocator), f"an allocator for {tensor.name!r}")
        bound_context.allocators[tensor.name] = allocator

    def buffer(self, tensor: Tensor) -> DeviceBuffer | HostBuffer:
        """Return where TensorRT reads or writes a tensor, unless it lies in memory of the caller's."""
        return self.host[tensor.name] if tensor.on_host else self.gpu[tensor.name]

    def _room_for_largest(self, context: Any, number: int) -> None:
        """Make buffers for the profile's largest shapes, unless they are very large: before results take the memory."""
        inputs, outputs = self._signature.inputs, self._signature.outputs
        largest = [self._signature.profiles[number][item.name].max for item in inputs]
        if all(context.set_input_shape(item.name, shape) for item, shape in zip(inputs, largest)):
            results = [tuple(int(size) for size in context.get_tensor_shape(item.name)) for item in outputs]
            for tensor, shape in zip((*inputs, *outputs), (*largest, *results)):
                if min(shape, default=0) >= 0 and tensor.nbytes(shape) <= _AT_ONCE:
                    self._room(tensor, shape)

    def _room(self, tensor: Tensor, shape: Shape) -> None:
        size, name = tensor.nbytes(shape), tensor.name
        host, gpu = self.host.get(name), self.gpu.get(name)
        if host is None or host.nbytes < size:
            if host is not None:
                self._stream.synchronize()  # a copy of the last call may still read or write the old one
                self.epoch += 1
            self.host[name] = self._memory.pinned(size)
            if host is not None:
                host.free()
        if not tensor.on_host and (gpu is None or gpu.nbytes < size):
            if gpu is not None:
                self.epoch += 1
                self.gpu.pop(name).free()
            self.gpu[name] = self._memory.gpu(size)

    # Launching -----------------------------------------------------------------------------------------------------

    def enqueue(self, bound_context: BoundContext, locations: Locations, target: int) -> None:
        """Give copies in, the inference and copies out to the stream `target`."""
        if bound_context.warm:
            self._enqueue(bound_context, locations, target)
            return
        with _SETUP_LOCK:
            self._enqueue(bound_context, locations, target)
        bound_context.warm = True

    def _enqueue(self, bound_context: BoundContext, locations: Locations, target: int) -> None:
        if locations not in bound_context.separate:
            self._check_overlap(bound_context, locations)
        for tensor, size, location in zip(self._signature.inputs, bound_context.given, locations):
            place, address = location
            if tensor.on_host or place == DEVICE:
                bound_context.address(tensor.name, address or self.buffer(tensor).handle)
                continue
            inside = self.gpu[tensor.name].handle
            bound_context.address(tensor.name, inside)
            if location != RESIDENT:
                source = address or self.host[tensor.name].handle
                self._copy(inside, source, size, self._to_gpu, target)
        back: list[tuple[Tensor, int]] = []
        outputs = list(zip(self._signature.outputs, bound_context.outputs, locations[len(bound_context.given) :]))
        for tensor, shape, (place, address) in outputs:
            if shape is None:
                self.allocated.pop(tensor.name, None)  # the last call's must not stand for this one's
            elif place == DEVICE:
                bound_context.address(tensor.name, address)
            elif tensor.on_host or tensor.nbytes(shape) <= MAPPED:
                bound_context.address(tensor.name, self.host[tensor.name].handle)
            else:
                bound_context.address(tensor.name, self.gpu[tensor.name].handle)
                back.append((tensor, tensor.nbytes(shape)))
        if not bound_context.context.execute_async_v3(target):
            raise EngineError("TensorRT couldn't enqueue the inference; its log says why")
        back += [
            (item, self._allocated_bytes(bound_context, item, target)) for item, shape, _ in outputs if shape is None
        ]
        for tensor, size in back:
            self._copy(self.host[tensor.name].handle, self.gpu[tensor.name].handle, size, self._to_host, target)

    def _allocated_bytes(self, bound_context: BoundContext, tensor: Tensor, target: int) -> int:
        """Return the size of a result whose shape is known by now, since TensorRT has waited for it; with room for it."""
        bound_context.allocators[tensor.name].check()
        if tensor.name not in self.allocated:
            self._device("cudaStreamSynchronize", target)
        if tensor.name not in self.allocated:
            raise EngineError(f"TensorRT gave no shape for output {tensor.name!r}, which depends on the data")
        size = tensor.nbytes(self.allocated[tensor.name])
        if tensor.name not in self.host or self.host[tensor.name].nbytes < size:
            self.host[tensor.name] = self._memory.pinned(2 * size)
        return size

    def _check_overlap(self, bound_context: BoundContext, locations: Locations) -> None:
        """Raise UsageError where TensorRT would write a result over an input that it still reads."""
        inputs, outputs = self._signature.inputs, self._signature.outputs
        for result, size, (to, at) in zip(outputs, bound_context.sizes, locations[len(inputs) :]):
            for tensor, given, (place, address) in zip(inputs, bound_context.given, locations):
                over = at < address + given and address < at + size
                if to == place == DEVICE and over and not self.loaded.aliases(tensor.name, result.name):
                    raise UsageError(
                        f"out[{result.name!r}] and input {tensor.name!r} lie in the same GPU memory: TensorRT would write "
                        "over what it still reads; give an array of its own"
                    )
        if len(bound_context.separate) > _SEPARATE:
            bound_context.separate.clear()
        bound_context.separate.add(locations)

    def _copy(self, to: int, source: int, nbytes: int, kind: Any, target: int) -> None:
        if nbytes:
            self._device("cudaMemcpyAsync", to, source, nbytes, kind, target)

    def capture(self, bound_context: BoundContext, locations: Locations) -> tuple[Graph | None, str]:
        """Return a CUDA graph of a call; or why there is none."""
        if self.loaded.captures_itself:
            return None, "plain enqueues: TensorRT-RTX captures graphs itself"
        if None in bound_context.outputs:
            return None, "plain enqueues: an output's shape depends on data"
        try:
            with _SETUP_LOCK, self._device.capturing:
                own = self._stream.handle
                return self._stream.capture(lambda: self._enqueue(bound_context, locations, own)), ""
        except (DeviceError, EngineError) as error:
            return None, f"plain enqueues: capturing a CUDA graph failed: {error}"

    def close(self) -> None:
        """Free the memory; nothing may run in it any more, and no context may be left."""
        for buffer in (*self.gpu.values(), *self.host.values(), self._scratch):
            buffer.free()
        self.gpu.clear()
        self.host.clear()
