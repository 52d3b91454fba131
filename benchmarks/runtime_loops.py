"""The loops that a session is measured against, written on cuda.bindings.runtime with nothing in between.

`cuda` is that module (or its stand-in in tests), `engine` a TensorRT engine with one input and one output.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]


def checked(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code):
        raise RuntimeError(f"CUDA answers {code}")
    return values[0] if values else None


class Bare:
    """One stream with its buffers, and for each shape a context and two graphs: with the copies, and without."""

    def __init__(self, cuda: Any, engine: Any, shapes: Sequence[Shape], ordinal: int = 0) -> None:
        self.cuda, self.engine = cuda, engine
        checked(cuda.cudaSetDevice(ordinal))
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.input, self.output = sorted(names, key=lambda name: engine.get_tensor_mode(name).name != "INPUT")
        self.stream = checked(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
        scratch = max(1, int(engine.device_memory_size))
        self.scratch = checked(cuda.cudaMalloc(scratch))
        self.contexts: list[Any] = []
        self.whole: dict[Shape, Any] = {}
        self.alone: dict[Shape, Any] = {}
        self.sizes: dict[Shape, tuple[int, int]] = {}
        self.results: dict[Shape, NDArray[Any]] = {}
        self.places: dict[Shape, NDArray[Any]] = {}
        made = []
        for shape in shapes:
            context = engine.create_execution_context_without_device_memory()
            context.device_memory = int(self.scratch)
            if not context.set_input_shape(self.input, shape):
                raise RuntimeError(f"TensorRT refuses {shape}")
            made.append((shape, context, tuple(context.get_tensor_shape(self.output))))
        most_in = max(4 * int(np.prod(shape)) for shape in shapes)
        most_out = max(4 * int(np.prod(shape)) for _, _, shape in made)
        self.gpu_in, self.gpu_out = checked(cuda.cudaMalloc(most_in)), checked(cuda.cudaMalloc(most_out))
        self.host_in = checked(cuda.cudaHostAlloc(most_in, cuda.cudaHostAllocPortable))
        self.host_out = checked(cuda.cudaHostAlloc(most_out, cuda.cudaHostAllocPortable))
        for shape, context, result in made:
            self.sizes[shape] = 4 * int(np.prod(shape)), 4 * int(np.prod(result))
            self.places[shape] = _floats(int(self.host_in), shape)
            self.results[shape] = _floats(int(self.host_out), result)
            context.set_tensor_address(self.input, int(self.gpu_in))
            context.set_tensor_address(self.output, int(self.gpu_out))
            self.contexts.append(context)
            self.copy_in(shape)
            self._enqueue(context)
            self.synchronize()
            self.alone[shape] = self._captured(lambda context=context: self._enqueue(context))  # type: ignore[misc]
            self.whole[shape] = self._captured(lambda shape=shape, context=context: self._all(shape, context))  # type: ignore[misc]

    def _enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(int(self.stream)):
            raise RuntimeError("TensorRT can't enqueue")

    def _all(self, shape: Shape, context: Any) -> None:
        self.copy_in(shape)
        self._enqueue(context)
        self.copy_out(shape)

    def _captured(self, work: Callable[[], None]) -> Any:
        cuda = self.cuda
        checked(cuda.cudaStreamBeginCapture(self.stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
        work()
        graph = checked(cuda.cudaStreamEndCapture(self.stream))
        ready = checked(cuda.cudaGraphInstantiate(graph, 0))
        checked(cuda.cudaGraphDestroy(graph))
        return ready

    def copy_in(self, shape: Shape) -> None:
        kind = self.cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.cuda.cudaMemcpyAsync(self.gpu_in, self.host_in, self.sizes[shape][0], kind, self.stream)

    def copy_out(self, shape: Shape) -> None:
        kind = self.cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.cuda.cudaMemcpyAsync(self.host_out, self.gpu_out, self.sizes[shape][1], kind, self.stream)

    def synchronize(self) -> None:
        checked(self.cuda.cudaStreamSynchronize(self.stream))

    def call(self, shape: Shape) -> Callable[[], None]:
        """Pinned copy, graph replay, pinned copy, synchronize; every look-up done before."""
        cuda, stream, (size_in, size_out) = self.cuda, self.stream, self.sizes[shape]
        copy, launch, wait = cuda.cudaMemcpyAsync, cuda.cudaGraphLaunch, cuda.cudaStreamSynchronize
        to_gpu, to_host = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice, cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        host_in, gpu_in, host_out, gpu_out = self.host_in, self.gpu_in, self.host_out, self.gpu_out
        graph = self.alone[shape]

        def call() -> None:
            copy(gpu_in, host_in, size_in, to_gpu, stream)
            launch(graph, stream)
            copy(host_out, gpu_out, size_out, to_host, stream)
            wait(stream)

        return call

    def copying(self, shape: Shape, array: NDArray[Any]) -> Callable[[], NDArray[Any]]:
        """The same for an ordinary array: copied into pinned memory first, and the result out of it."""
        bare, place, result = self.call(shape), self.places[shape], self.results[shape]

        def call() -> NDArray[Any]:
            np.copyto(place, array)
            bare()
            return result.copy()

        return call

    def replay(self, shape: Shape) -> Callable[[], None]:
        """Graph replay without copies, synchronize."""
        launch, wait, graph, stream = (
            self.cuda.cudaGraphLaunch,
            self.cuda.cudaStreamSynchronize,
            self.alone[shape],
            self.stream,
        )

        def call() -> None:
            launch(graph, stream)
            wait(stream)

        return call

    def close(self) -> None:
        cuda = self.cuda
        self.synchronize()
        for graph in (*self.whole.values(), *self.alone.values()):
            checked(cuda.cudaGraphExecDestroy(graph))
        self.contexts.clear()
        self.places.clear()
        self.results.clear()
        for address in (self.gpu_in, self.gpu_out, self.scratch):
            checked(cuda.cudaFree(address))
        for address in (self.host_in, self.host_out):
            checked(cuda.cudaFreeHost(address))
        checked(cuda.cudaStreamDestroy(self.stream))


def _floats(address: int, shape: Shape) -> NDArray[Any]:
    held = (ctypes.c_uint8 * (4 * int(np.prod(shape)))).from_address(address)
    return np.frombuffer(held, np.float32).reshape(shape)


def in_rounds(ways: Mapping[str, Callable[[], object]], rounds: int, calls: int, warmup: int) -> dict[str, float]:
    """Median microseconds of each; they take turns."""
    times: dict[str, list[int]] = {name: [] for name in ways}
    for call in ways.values():
        for _ in range(warmup):
            call()
    for _ in range(rounds):
        for name, call in ways.items():
            kept = times[name]
            for _ in range(calls):
                start = time.perf_counter_ns()
                call()
                kept.append(time.perf_counter_ns() - start)
    return {name: statistics.median(kept) / 1e3 for name, kept in times.items()}


def pipelined(slots: Sequence[Bare], mix: Sequence[tuple[NDArray[Any], NDArray[Any]]], calls: int) -> tuple[float, int]:
    """One thread, slots in turn: calls a second, and how many results weren't exactly what the mix says.

    Args:
        mix: inputs and their results, taken again and again in order.
    """
    launch, cuda = slots[0].cuda.cudaGraphLaunch, slots[0].cuda
    waiting: list[tuple[Shape, NDArray[Any]] | None] = [None] * len(slots)
    wrong = 0
    start = time.perf_counter()
    turns = itertools.cycle(range(len(slots)))
    for (array, expected), index in zip(itertools.islice(itertools.cycle(mix), calls), turns):
        slot = slots[index]
        before = waiting[index]
        if before is not None:
            checked(cuda.cudaStreamSynchronize(slot.stream))
            wrong += not np.array_equal(slot.results[before[0]].copy(), before[1])
        np.copyto(slot.places[array.shape], array)
        launch(slot.whole[array.shape], slot.stream)
        waiting[index] = (array.shape, expected)
    for slot, before in zip(slots, waiting):
        if before is not None:
            slot.synchronize()
            wrong += not np.array_equal(slot.results[before[0]].copy(), before[1])
    return calls / (time.perf_counter() - start), wrong
