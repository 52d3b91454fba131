"""Running an engine: one execution context, one stream, arrays in and out.

Written once for the four generations over the names they share (execute_async_v3, set_input_shape, set_tensor_address,
infer_shapes). The engine comes from `trtopt.trt`; nothing here imports TensorRT.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.errors import DeviceError, EngineError, UsageError
from trtopt.runtime.device import Device, DeviceBuffer, Event, Graph, HostBuffer
from trtopt.spec import ShapeRange, TensorInfo
from trtopt.trt.plans import LoadedEngine

Shape = tuple[int, ...]

# TensorRT's name of an I/O type → NumPy's (through ml_dtypes where NumPy has none).
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
_QUEUED = 64  # timed launches in flight; far below the driver's queue, beyond which a launch would block


@dataclass(frozen=True)
class Spread:
    """Milliseconds over the iterations of one measurement."""

    median: float
    p90: float
    p99: float
    minimum: float

    @classmethod
    def of(cls, milliseconds: list[float]) -> Spread:
        p90, p99 = (float(value) for value in np.percentile(milliseconds, (90, 99)))
        return cls(statistics.median(milliseconds), p90, p99, min(milliseconds))


@dataclass(frozen=True)
class Timing:
    """How long one inference takes, without copies to and from the host.

    Attributes:
        gpu: between CUDA events, with the next launches already queued, so the GPU never waits for the host.
        host: wall time from launch to synchronized, one at a time.
        cuda_graph: whether a CUDA graph was replayed; if not, `note` says why and each launch was a plain enqueue.
    """

    gpu: Spread
    host: Spread
    iterations: int
    cuda_graph: bool
    note: str = ""

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Tensor:
    """An input or output of the engine. `on_host`: TensorRT reads it on the host (a shape tensor)."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    is_input: bool
    on_host: bool

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.name, self.dtype.name, self.shape)

    def nbytes(self, shape: Shape) -> int:
        return int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize


class Executor:
    """Runs an engine on NumPy arrays. Calls from several threads wait for each other.

    Args:
        loaded: a deserialized engine (`Generation.load`); kept alive as long as this.
        device: the GPU; by default the first one. The engine must have been deserialized on it.

    Raises:
        DeviceError: no GPU, or CUDA can't use it.
        EngineError: an input or output has a type that NumPy arrays can't hold, or no context can be made.
    """

    def __init__(self, loaded: LoadedEngine, device: Device | None = None) -> None:
        self.device = device or Device()
        self._loaded: LoadedEngine | None = loaded
        engine = loaded.engine
        self._tensors = tuple(_describe(engine, engine.get_tensor_name(i)) for i in range(engine.num_io_tensors))
        self.inputs = tuple(tensor.info for tensor in self._tensors if tensor.is_input)
        self.outputs = tuple(tensor.info for tensor in self._tensors if not tensor.is_input)
        self.profiles = tuple(
            {item.name: _profile_range(engine, item.name, index) for item in self.inputs}
            for index in range(engine.num_optimization_profiles)
        )
        self._lock = threading.Lock()
        self._stream = self.device.stream()
        self._gpu: dict[str, DeviceBuffer] = {}
        self._host: dict[str, HostBuffer] = {}
        self._shapes: dict[str, Shape] = {}
        self._bound: object = None  # what the context is set up for: profile, input shapes, values of shape tensors
        self._profile = 0
        self._context: Any = engine.create_execution_context()
        if self._context is None:
            free = self.device.free_memory() / 2**30
            self.close()
            raise EngineError(f"TensorRT made no execution context ({free:.1f} GiB of GPU memory free); see its log")

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Infer once.

        Args:
            inputs: one array for each of `self.inputs`, of its dtype, with a shape inside one of `self.profiles`.

        Returns:
            One new array for each of `self.outputs`.

        Raises:
            UsageError: a name, dtype or shape that the engine doesn't take; the message gives those it takes.
            EngineError: TensorRT couldn't run it.
            DeviceError: a CUDA call failed, or this is closed.
        """
        with self._lock:
            self._load(inputs)
            self._enqueue()
            results = [tensor for tensor in self._tensors if not tensor.is_input]
            for tensor in results:
                if not tensor.on_host:
                    size = tensor.nbytes(self._shapes[tensor.name])
                    self._stream.to_host(self._host[tensor.name], self._gpu[tensor.name], size)
            self._stream.synchronize()
            return {
                tensor.name: self._host[tensor.name].array(tensor.dtype, self._shapes[tensor.name]).copy()
                for tensor in results
            }

    def time(self, inputs: Mapping[str, NDArray[Any]], iterations: int = 100, warmup: int = 10) -> Timing:
        """Measure inference on `inputs`, which are copied to the GPU once.

        Raises: as `run`.
        """
        if iterations < 1 or warmup < 0:
            raise UsageError(f"iterations is {iterations} and warmup {warmup}; at least 1 and 0 are needed")
        with self._lock:
            self._load(inputs)
            self._enqueue()  # TensorRT finishes setting up a new shape in the first call, which must not be captured
            self._stream.synchronize()
            graph, note = self._capture()
            try:
                for _ in range(warmup):
                    self._launch(graph)
                self._stream.synchronize()
                gpu = self._gpu_times(graph, iterations)
                host: list[float] = []
                for _ in range(iterations):
                    start = time.perf_counter()
                    self._launch(graph)
                    self._stream.synchronize()
                    host.append((time.perf_counter() - start) * 1e3)
            finally:
                if graph is not None:
                    graph.free()
        return Timing(Spread.of(gpu), Spread.of(host), iterations, graph is not None, note)

    def close(self) -> None:
        """Free the context, the buffers and the stream; waits for a call in flight. A second call does nothing."""
        with self._lock:
            if self._stream.freed:
                return
            self._context = self._loaded = None  # before what the context points to
            for buffer in (*self._gpu.values(), *self._host.values(), self._stream):
                buffer.free()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Setting up ----------------------------------------------------------------------------------------------------

    def _load(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        if self._context is None:
            raise DeviceError("this executor is closed; open the engine again")
        arrays = self._check(inputs)
        self.device.use()
        shapes = {name: array.shape for name, array in arrays.items()}
        values = [arrays[item.name].tobytes() for item in self._tensors if item.is_input and item.on_host]
        bound = (tuple(shapes.values()), tuple(values))
        changed = bound != self._bound
        if changed:
            self._bound = None  # until it is complete: an error on the way must not leave half of it in force
            self._select_profile(shapes)
        for tensor in self._tensors:
            if tensor.is_input:
                self._room(tensor, shapes[tensor.name])
                host = self._host[tensor.name]
                np.copyto(host.array(tensor.dtype, shapes[tensor.name]), arrays[tensor.name])
                if not tensor.on_host:
                    self._stream.to_device(self._gpu[tensor.name], host, tensor.nbytes(shapes[tensor.name]))
        if changed:
            self._bind(shapes)
            self._bound = bound

    def _check(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        known = {tensor.name: tensor for tensor in self._tensors if tensor.is_input}
        wrong = [f"unknown {name!r}" for name in inputs if name not in known]
        wrong += [f"missing {name!r}" for name in known if name not in inputs]
        if wrong:
            raise UsageError(f"inputs: {', '.join(wrong)}; the engine takes {', '.join(map(repr, known))}")
        arrays: dict[str, NDArray[Any]] = {}
        for name, tensor in known.items():
            array = np.asarray(inputs[name])
            if array.dtype != tensor.dtype:
                raise UsageError(
                    f"input {name!r} is {array.dtype}; the engine takes {tensor.dtype}: convert it with .astype"
                )
            if array.ndim != len(tensor.shape):
                raise UsageError(
                    f"input {name!r} has shape {_x(array.shape)}, rank {array.ndim}; "
                    f"the engine takes rank {len(tensor.shape)}, {_x(tensor.shape)}"
                )
            arrays[name] = array
        return arrays

    def _select_profile(self, shapes: Mapping[str, Shape]) -> None:
        fitting = [
            index
            for index, profile in enumerate(self.profiles)
            if all(_inside(shape, profile[name]) for name, shape in shapes.items())
        ]
        if not fitting:
            allowed = " or ".join(
                "; ".join(f"{name} {_x(item.min)} to {_x(item.max)}" for name, item in profile.items())
                for profile in self.profiles
            )
            given = "; ".join(f"{name} {_x(shape)}" for name, shape in shapes.items())
            raise UsageError(f"inputs {given} are outside the engine's shapes: {allowed}; build it with other --shapes")
        best = min(fitting, key=lambda index: _distance(shapes, self.profiles[index]))
        if best != self._profile:
            if not self._context.set_optimization_profile_async(best, self._stream.handle):
                raise EngineError(f"TensorRT refused optimization profile {best}; its log says why")
            self._stream.synchronize()
            self._profile = best

    def _room(self, tensor: _Tensor, shape: Shape) -> None:
        """Make sure that the buffers of `tensor` hold `shape`; they only grow."""
        size = tensor.nbytes(shape)
        name = tensor.name
        if name not in self._host or self._host[name].nbytes < size:
            if name in self._host:
                self._stream.synchronize()  # a copy of the last call may still read or write the old one
                self._host.pop(name).free()
            self._host[name] = self.device.pinned(size)
        if not tensor.on_host and (name not in self._gpu or self._gpu[name].nbytes < size):
            if name in self._gpu:
                self._gpu.pop(name).free()
            self._gpu[name] = self.device.buffer(size)

    def _bind(self, shapes: Mapping[str, Shape]) -> None:
        context = self._context
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise EngineError(f"TensorRT refused shape {_x(shape)} for input {name!r}; its log says why")
        for tensor in self._tensors:
            if tensor.is_input:
                self._address(tensor)  # before infer_shapes, which reads the values of shape tensors
        missing = context.infer_shapes()
        if missing:
            raise EngineError(f"TensorRT can't infer the output shapes; it lacks {', '.join(map(str, missing))}")
        self._shapes = dict(shapes)
        for tensor in self._tensors:
            if not tensor.is_input:
                shape = tuple(int(size) for size in context.get_tensor_shape(tensor.name))
                if min(shape, default=0) < 0:
                    raise EngineError(
                        f"the shape of output {tensor.name!r} depends on the data ({_x(shape)}); this executor runs "
                        "engines whose output shapes follow from the input shapes"
                    )
                self._shapes[tensor.name] = shape
                self._room(tensor, shape)
                self._address(tensor)

    def _address(self, tensor: _Tensor) -> None:
        buffer = self._host[tensor.name] if tensor.on_host else self._gpu[tensor.name]
        if not self._context.set_tensor_address(tensor.name, buffer.handle):
            raise EngineError(f"TensorRT refused the address of {tensor.name!r}; its log says why")

    # Launching -----------------------------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._stream.handle):
            raise EngineError("TensorRT couldn't enqueue the inference; its log says why")

    def _launch(self, graph: Graph | None) -> None:
        if graph is None:
            self._enqueue()
        else:
            graph.launch(self._stream)

    def _capture(self) -> tuple[Graph | None, str]:
        capturable = getattr(self._context, "is_stream_capturable", None)  # TensorRT-RTX says so beforehand
        if capturable is not None and not capturable(self._stream.handle):
            return None, "plain enqueues: this engine can't be captured in a CUDA graph"
        try:
            return self._stream.capture(self._enqueue), ""
        except (DeviceError, EngineError) as error:
            return None, f"plain enqueues: capturing a CUDA graph failed: {error}"

    def _gpu_times(self, graph: Graph | None, iterations: int) -> list[float]:
        events: list[Event] = [self.device.event() for _ in range(min(iterations, _QUEUED) + 1)]
        times: list[float] = []
        try:
            while len(times) < iterations:
                count = min(iterations - len(times), _QUEUED)
                self._stream.record(events[0])
                for event in events[1 : count + 1]:
                    self._launch(graph)
                    self._stream.record(event)
                self._stream.synchronize()
                times += [events[i + 1].milliseconds_since(events[i]) for i in range(count)]
        finally:
            for event in events:
                event.free()
        return times


def _describe(engine: Any, name: str) -> _Tensor:
    kind = engine.get_tensor_dtype(name).name
    if kind not in _DTYPES:
        raise EngineError(f"tensor {name!r} has type {kind}; allowed for inputs and outputs: {', '.join(_DTYPES)}")
    return _Tensor(
        name,
        _numpy_dtype(_DTYPES[kind]),
        tuple(int(size) for size in engine.get_tensor_shape(name)),
        engine.get_tensor_mode(name).name == "INPUT",
        engine.get_tensor_location(name).name == "HOST",
    )


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with onnx

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


def _profile_range(engine: Any, name: str, index: int) -> ShapeRange:
    low, best, high = engine.get_tensor_profile_shape(name, index)
    return ShapeRange(*(tuple(int(size) for size in shape) for shape in (low, best, high)))


def _inside(shape: Shape, allowed: ShapeRange) -> bool:
    return all(low <= size <= high for low, size, high in zip(allowed.min, shape, allowed.max))


def _distance(shapes: Mapping[str, Shape], profile: Mapping[str, ShapeRange]) -> int:
    """How far from the shapes that the profile's kernels were chosen for."""
    return sum(abs(size - best) for name, shape in shapes.items() for size, best in zip(shape, profile[name].opt))


def _x(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"
