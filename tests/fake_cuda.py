"""A stand-in of cuda.bindings.runtime and of a TensorRT engine, in host memory, that fails on misuse.

Work given to a stream runs when something synchronizes with it, not before: a missing synchronize reads old data.
Freed or foreign addresses, unknown handles, forbidden calls during a capture and calls before cudaSetDevice are errors.
A fake clock gives events exact times.
"""

# ruff: noqa: N802, N815  (the names are CUDA's)

from __future__ import annotations

import ctypes
import enum
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class Code(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidDevice = 101
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class CudaFailure(Exception):
    def __init__(self, code: Code) -> None:
        self.code = code


class FakeCuda:
    """The functions that trtopt.cuda.device calls, on `devices` GPUs. `live` counts what was not freed; `used` are the GPUs
    that something was allocated on, or a stream made."""

    cudaStreamNonBlocking = 1
    cudaEventDefault, cudaEventDisableTiming, cudaHostAllocPortable = 0, 2, 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, memory: int = 1 << 30, devices: int = 1) -> None:
        self.left, self.devices = memory, devices
        self.used: set[int] = set()
        self.regions: dict[int, tuple[str, Any]] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.capturing: dict[int, list[Callable[[], None]]] = {}
        self.capturers: dict[int, int] = {}  # stream → the thread that captures it
        self.broken: set[int] = set()
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.executables: dict[int, list[Callable[[], None]]] = {}
        self.events: dict[int, float | None] = {}
        self.recorded: dict[int, list[bool]] = {}
        self.calls: list[str] = []
        self.clock = 0.0
        self.last = Code.cudaSuccess
        self._handles = itertools.count(1000)
        self._thread = threading.local()
        self._running = threading.RLock()  # who waits for a stream that another thread is running waits for that

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cuda") or not callable(value) or name.startswith("cudaGetError"):
            return value

        def checked(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            try:
                result = value(*arguments)
            except CudaFailure as failure:
                self.last = failure.code
                return (failure.code, None)
            return (Code.cudaSuccess,) if result is None else (Code.cudaSuccess, result)

        return checked

    @property
    def live(self) -> int:
        groups = (self.regions, self.streams, self.graphs, self.executables, self.events)
        return sum(map(len, groups))

    # Errors, device

    def cudaGetErrorName(self, code: Code) -> tuple[Code, bytes]:
        return Code.cudaSuccess, code.name.encode()

    def cudaGetErrorString(self, code: Code) -> tuple[Code, bytes]:
        return Code.cudaSuccess, f"text of {code.name}".encode()

    def cudaGetLastError(self) -> Code:
        last, self.last = self.last, Code.cudaSuccess
        return last

    def cudaSetDevice(self, ordinal: int) -> None:
        if ordinal not in range(self.devices):
            raise CudaFailure(Code.cudaErrorInvalidDevice)
        self._thread.device = ordinal

    # The driver's, which answer with a code alone. A context's handle is 100 and the device's number, as an integer.

    def get_current(self, where: Any) -> int:
        device = getattr(self._thread, "device", None)
        where._obj.value = None if device is None else 100 + device
        return 0

    def set_current(self, context: int | None) -> int:
        self._thread.device = None if context is None else context - 100
        return 0

    def cudaMemGetInfo(self) -> tuple[int, int]:
        return self.left, 1 << 30

    def _on_device(self) -> None:
        device = getattr(self._thread, "device", None)
        if device not in range(self.devices):
            raise CudaFailure(Code.cudaErrorInvalidDevice)
        self.used.add(device)

    # Memory

    def _not_captured(self) -> None:
        """What may wait for the whole device breaks the captures of this thread."""
        streams = [stream for stream, thread in self.capturers.items() if thread == threading.get_ident()]
        if streams:
            self.broken.update(streams)
            raise CudaFailure(Code.cudaErrorStreamCaptureUnsupported)

    def _allocate(self, kind: str, size: int) -> int:
        self._on_device()
        self._not_captured()
        if size > self.left:
            raise CudaFailure(Code.cudaErrorMemoryAllocation)
        block = np.full(size, 0xA5, np.uint8)  # never zeros: reading what nobody wrote must show
        address = int(block.ctypes.data)
        self.regions[address] = (kind, block)
        self.left -= size
        return address

    def _free(self, kind: str, address: int) -> None:
        self._not_captured()
        if self.regions.get(address, ("", None))[0] != kind:
            raise CudaFailure(Code.cudaErrorInvalidValue)
        self.left += self.regions.pop(address)[1].size

    def cudaMalloc(self, size: int) -> int:
        return self._allocate("device", size)

    def cudaFree(self, address: int) -> None:
        self._free("device", address)

    def cudaHostAlloc(self, size: int, flags: int) -> int:
        return self._allocate("host", size)

    def cudaFreeHost(self, address: int) -> None:
        self._free("host", address)

    def memory(self, address: int, size: int, *kinds: str) -> Any:
        """The bytes of a live region of one of these kinds, which must hold them all."""
        found, block = self.regions.get(address, ("", None))
        if found not in kinds or size > block.size:
            raise CudaFailure(Code.cudaErrorIllegalAddress)
        return block[:size]

    def cudaMemcpy(self, target: int, source: int, size: int, direction: int) -> None:
        assert direction == 2
        np.frombuffer((ctypes.c_uint8 * size).from_address(target), np.uint8)[:] = self.memory(source, size, "device")

    def cudaMemcpyAsync(self, target: int, source: int, size: int, direction: int, stream: int) -> None:
        kinds = ("device", "host") if direction == 1 else ("host", "device")
        self.memory(target, size, kinds[0])
        self.memory(source, size, kinds[1])

        def copy() -> None:
            self.memory(target, size, kinds[0])[:] = self.memory(source, size, kinds[1])

        self.push(stream, copy)

    # Streams, events, graphs

    def push(self, stream: int, work: Callable[[], None]) -> None:
        self._known(self.capturing if stream in self.capturing else self.streams, stream).append(work)

    def _known(self, table: dict[int, Any], handle: int) -> Any:
        if handle not in table:
            raise CudaFailure(Code.cudaErrorInvalidResourceHandle)
        return table[handle]

    def _take(self, table: dict[int, Any], handle: int) -> Any:
        self._known(table, handle)
        return table.pop(handle)

    def _new(self, table: dict[int, Any], value: Any) -> int:
        handle = next(self._handles)
        table[handle] = value
        return handle

    def cudaStreamCreateWithFlags(self, flags: int) -> int:
        self._on_device()
        return self._new(self.streams, [])

    def cudaStreamDestroy(self, stream: int) -> None:
        self._take(self.streams, stream)

    def cudaStreamSynchronize(self, stream: int) -> None:
        self._known(self.streams, stream)
        if stream in self.capturing:
            self.broken.add(stream)
            raise CudaFailure(Code.cudaErrorStreamCaptureUnsupported)
        with self._running:
            work, self.streams[stream] = self.streams[stream], []
            for step in work:
                step()

    def cudaStreamQuery(self, stream: int) -> None:
        if self.streams.get(stream):
            raise CudaFailure(Code.cudaErrorNotReady)

    def cudaDeviceSynchronize(self) -> None:
        self._on_device()
        for stream in tuple(self.streams):
            self.cudaStreamSynchronize(stream)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> None:
        if stream not in self.streams or stream in self.capturing:
            raise CudaFailure(Code.cudaErrorInvalidResourceHandle)
        self.capturing[stream] = []
        self.capturers[stream] = threading.get_ident()

    def cudaStreamEndCapture(self, stream: int) -> int:
        work = self._take(self.capturing, stream)
        del self.capturers[stream]
        if stream in self.broken:
            self.broken.discard(stream)
            raise CudaFailure(Code.cudaErrorStreamCaptureInvalidated)
        return self._new(self.graphs, work)

    def cudaGraphInstantiate(self, graph: int, flags: int) -> int:
        return self._new(self.executables, list(self._known(self.graphs, graph)))

    def cudaGraphDestroy(self, graph: int) -> None:
        self._take(self.graphs, graph)

    def cudaGraphUpload(self, executable: int, stream: int) -> None:
        self.push(stream, lambda: None)

    def cudaGraphExecDestroy(self, executable: int) -> None:
        self._take(self.executables, executable)

    def cudaGraphLaunch(self, executable: int, stream: int) -> None:
        for step in self._known(self.executables, executable):
            self.push(stream, step)

    def cudaEventCreateWithFlags(self, flags: int) -> int:
        self._on_device()
        return self._new(self.events, None)

    def cudaEventDestroy(self, event: int) -> None:
        self._take(self.events, event)

    def cudaEventRecord(self, event: int, stream: int) -> None:
        self._known(self.events, event)
        recorded = self.recorded[event] = [False]

        def record() -> None:
            recorded[0] = True
            if event in self.events:
                self.events[event] = self.clock

        self.push(stream, record)

    def cudaEventSynchronize(self, event: int) -> None:
        for stream in self.streams:
            self.cudaStreamSynchronize(stream)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self._known(self.events, event)
        recorded = self.recorded.get(event, [True])

        def wait() -> None:  # the other streams' work up to the record comes first
            for other in tuple(self.streams):
                if not recorded[0] and other != stream:
                    self.cudaStreamSynchronize(other)

        self.push(stream, wait)

    def cudaEventElapsedTime(self, start: int, end: int) -> float:
        first, last = self.events[start], self.events[end]
        if first is None or last is None:
            raise CudaFailure(Code.cudaErrorInvalidResourceHandle)
        return last - first


def _member(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name)


class FakeEngine:
    """An engine of one function over its inputs, in the names that the four generations share.

    `tensors`: name → (TensorRT type, NumPy type, shape with -1, "INPUT" or "OUTPUT", "DEVICE" or "HOST").
    `profiles`: for each, input → (min, opt, max). `outputs(shapes)` infers the output shapes, `compute(arrays)` the
    values.
    """

    device_memory_size = 4096

    def __init__(
        self,
        cuda: FakeCuda,
        tensors: dict[str, tuple[str, str, tuple[int, ...], str, str]],
        profiles: list[dict[str, tuple[tuple[int, ...], ...]]],
        outputs: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]],
        compute: Callable[[dict[str, Any]], dict[str, Any]],
        milliseconds: float = 0.25,
        capturable: bool = True,
        shares: bool = True,
        layers: dict[str, float] | None = None,
    ) -> None:
        self.layers = layers or {}  # name → milliseconds, as a profiler is told
        self.cuda, self.tensors, self.profiles = cuda, tensors, profiles
        self.outputs, self.compute, self.milliseconds, self.capturable = outputs, compute, milliseconds, capturable
        self.names = list(tensors)
        self.num_io_tensors, self.num_optimization_profiles = len(tensors), len(profiles)
        self.contexts: list[FakeContext] = []
        self.shares, self.layout = shares, "LINEAR"
        self.lean = False  # whether its bindings lack the types of layouts and places

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return _member(self.tensors[name][0])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][2]

    def get_tensor_mode(self, name: str) -> SimpleNamespace:
        return _member(self.tensors[name][3])

    def get_tensor_location(self, name: str) -> SimpleNamespace:
        self._typed()
        return _member(self.tensors[name][4])

    def is_shape_inference_io(self, name: str) -> bool:
        return self.tensors[name][4] == "HOST"

    def get_tensor_format(self, name: str) -> SimpleNamespace:
        assert name in self.tensors
        self._typed()
        return _member(self.layout)

    def get_tensor_format_desc(self, name: str) -> str:
        return "Row-major linear FP32 format" if self.layout == "LINEAR" else f"{self.layout} format"

    def _typed(self) -> None:
        if self.lean:
            raise TypeError("Unable to convert function return value to a Python type!")

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert self.tensors[name][3] == "INPUT", "profiles are asked of inputs only"
        return list(self.profiles[profile][name])

    def create_execution_context_without_device_memory(self) -> FakeContext:
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.profile = engine, 0
        self.active_optimization_profile = 0 if engine.shares or not engine.contexts else -1
        self.device_memory = 0
        self.allocators: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.last: dict[str, tuple[int, ...]] = {}
        self.enqueued = 0
        self.profiler: Any = None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.engine.cuda.push(stream, lambda: None)
        self.profile = profile
        self.shapes.clear()
        return 0 <= profile < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.profiles[self.profile][name]
        inside = len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high))
        if inside:
            self.shapes[name] = tuple(shape)
        return inside

    def set_tensor_address(self, name: str, address: int) -> bool:
        allowed = ("host",) if self.engine.tensors[name][4] == "HOST" else ("device", "host")  # pinned: mapped too
        if self.engine.cuda.regions.get(address, ("", None))[0] not in allowed:
            return False
        self.addresses[name] = address
        return True

    def _array(self, name: str, shape: tuple[int, ...], addresses: dict[str, int] | None = None) -> Any:
        _, dtype, _, _, location = self.engine.tensors[name]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        kinds = ("host",) if location == "HOST" else ("device", "host")
        address = (addresses or self.addresses)[name]
        return self.engine.cuda.memory(address, size, *kinds).view(dtype).reshape(shape)

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def _inputs(self) -> list[str]:
        return [name for name, tensor in self.engine.tensors.items() if tensor[3] == "INPUT"]

    def _output_shapes(self) -> dict[str, tuple[int, ...]]:
        known: dict[str, Any] = dict(self.shapes)
        for name in self._inputs():
            if self.engine.tensors[name][4] == "HOST":
                known[name] = self._array(name, self.shapes[name]).copy()
        return self.engine.outputs(known)

    def infer_shapes(self) -> list[str]:
        return [
            name
            for name in self._inputs()
            if name not in self.shapes or (self.engine.tensors[name][4] == "HOST" and name not in self.addresses)
        ]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.last:  # as 8.6 does where a shape depends on the data, whatever was set since
            return self.last[name]
        return self.shapes[name] if name in self.shapes else self._output_shapes()[name]

    def execute_async_v3(self, stream: int) -> bool:
        if self.infer_shapes() or set(self.addresses) | set(self.allocators) != set(self.engine.tensors):
            return False
        self.engine.cuda.memory(self.device_memory, 4096, "device")  # still allocated
        if stream in self.engine.cuda.capturing and not self.engine.capturable:
            self.engine.cuda.broken.add(stream)
            return True
        shapes, outputs, addresses = dict(self.shapes), self._output_shapes(), dict(self.addresses)
        if self.allocators:
            assert stream not in self.engine.cuda.capturing, "data-dependent shapes can't be captured"
            self.engine.cuda.cudaStreamSynchronize(stream)
            for name, value in self._results(shapes, addresses).items():
                if name in self.allocators:
                    outputs[name] = value.shape
                    addresses[name] = self.allocators[name].reallocate_output(name, None, value.nbytes, 256)
                    self.allocators[name].notify_shape(name, value.shape)
                    self.last[name] = value.shape
        for name, shape in {**shapes, **outputs}.items():
            self._array(name, shape, addresses)  # addresses live and large enough now…
        self.enqueued += 1

        def work() -> None:  # …and when the stream gets there
            for name, value in self._results(shapes, addresses).items():
                self._array(name, outputs[name], addresses)[...] = value
            self.engine.cuda.clock += self.engine.milliseconds
            if self.profiler is not None:
                for name, milliseconds in self.engine.layers.items():
                    self.profiler.report_layer_time(name, milliseconds)

        self.engine.cuda.push(stream, work)
        return True

    def _results(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> dict[str, Any]:
        given = {name: self._array(name, shapes[name], addresses).copy() for name in self._inputs()}
        return self.engine.compute(given)
