"""The fake GPU fails where a real one would: else the tests on it would prove nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_cuda import Code, CudaFailure, FakeCuda, FakeEngine

TO_GPU, TO_HOST = 1, 2


@pytest.fixture
def cuda() -> FakeCuda:
    fake = FakeCuda()
    assert fake.cudaSetDevice(0) == (Code.cudaSuccess,)
    return fake


def _made(answer: tuple[Any, ...]) -> Any:
    assert answer[0] == Code.cudaSuccess
    return answer[1]


@pytest.fixture
def context(cuda: FakeCuda) -> Any:
    """Of y = 2 x, with everything set as it must be."""
    tensors = {name: ("FLOAT", "float32", (4,), f"{way}PUT", "DEVICE") for name, way in zip("xy", ("IN", "OUT"))}
    engine = FakeEngine(
        cuda, tensors, [{"x": ((4,),) * 3}], lambda shapes: {"y": (4,)}, lambda arrays: {"y": arrays["x"] * 2}
    )
    made = engine.create_execution_context_without_device_memory()
    made.device_memory = _made(cuda.cudaMalloc(4096))
    assert made.set_input_shape("x", (4,))
    for name in "xy":
        assert made.set_tensor_address(name, _made(cuda.cudaMalloc(16)))
    return made


def _fill(cuda: FakeCuda, address: int) -> None:
    cuda.memory(address, 16, "device").view(np.float32)[:] = [1, 2, 3, 4]


def test_freed_buffers(cuda: FakeCuda, context: Any) -> None:
    stream, host = _made(cuda.cudaStreamCreateWithFlags(1)), _made(cuda.cudaHostAlloc(16, 1))
    there = context.addresses["y"]
    assert cuda.cudaMemcpyAsync(host, there, 16, TO_HOST, stream)[0] == Code.cudaSuccess
    assert context.execute_async_v3(stream)
    assert cuda.cudaFree(there) == (Code.cudaSuccess,)
    assert cuda.cudaFree(there)[0] == Code.cudaErrorInvalidValue, "freed twice"
    assert cuda.cudaStreamSynchronize(stream)[0] == Code.cudaErrorIllegalAddress, "freed while work on it was under way"
    assert cuda.cudaMemcpyAsync(host, there, 16, TO_HOST, stream)[0] == Code.cudaErrorIllegalAddress
    assert not context.set_tensor_address("y", there)
    with pytest.raises(CudaFailure) as caught:
        context.execute_async_v3(stream)
    assert caught.value.code == Code.cudaErrorIllegalAddress, "the address that it was given before"


def test_misuse_in_the_thread_that_captures_breaks_the_capture(cuda: FakeCuda) -> None:
    stream, there = _made(cuda.cudaStreamCreateWithFlags(1)), _made(cuda.cudaMalloc(16))
    for misuse in (
        lambda: cuda.cudaFree(there),
        lambda: cuda.cudaMalloc(16),
        lambda: cuda.cudaHostAlloc(16, 1),
        lambda: cuda.cudaStreamSynchronize(stream),
    ):
        cuda.cudaStreamBeginCapture(stream, 1)
        assert misuse()[0] == Code.cudaErrorStreamCaptureUnsupported
        assert cuda.cudaStreamEndCapture(stream)[0] == Code.cudaErrorStreamCaptureInvalidated
    assert cuda.cudaGetLastError()[1] == Code.cudaErrorStreamCaptureInvalidated
    assert cuda.cudaFree(there)[0] == Code.cudaSuccess
    assert cuda.cudaGraphLaunch(5, stream)[0] == Code.cudaErrorInvalidResourceHandle


def test_copies_past_an_end_or_the_wrong_way(cuda: FakeCuda) -> None:
    stream = _made(cuda.cudaStreamCreateWithFlags(1))
    host, there = _made(cuda.cudaHostAlloc(16, 1)), _made(cuda.cudaMalloc(16))
    assert cuda.cudaMemcpyAsync(there, host, 17, TO_GPU, stream)[0] == Code.cudaErrorIllegalAddress
    assert cuda.cudaMemcpyAsync(host, there, 16, TO_GPU, stream)[0] == Code.cudaErrorIllegalAddress
    pageable = np.zeros(16, np.uint8)
    assert cuda.cudaMemcpyAsync(there, pageable.ctypes.data, 16, TO_GPU, stream)[0] == Code.cudaErrorIllegalAddress
    assert cuda.cudaFreeHost(there)[0] == Code.cudaErrorInvalidValue


def test_the_wrong_stream(cuda: FakeCuda, context: Any) -> None:
    mine, other = (_made(cuda.cudaStreamCreateWithFlags(1)) for _ in range(2))
    _fill(cuda, context.addresses["x"])
    assert context.execute_async_v3(mine)
    assert cuda.cudaStreamSynchronize(other) == (Code.cudaSuccess,)
    result = cuda.memory(context.addresses["y"], 16, "device").view(np.float32)
    assert result[0] != 2, "waiting for another stream must not help"
    assert cuda.cudaStreamQuery(mine)[0] == Code.cudaErrorNotReady
    event = _made(cuda.cudaEventCreateWithFlags(2))
    cuda.cudaEventRecord(event, mine)
    cuda.cudaStreamWaitEvent(other, event, 0)
    cuda.cudaStreamSynchronize(other)
    assert result.tolist() == [2, 4, 6, 8], "an event orders them"
    cuda.cudaStreamDestroy(mine)
    for answer in (
        cuda.cudaStreamSynchronize(mine),
        cuda.cudaEventRecord(event, mine),
        cuda.cudaStreamDestroy(mine),
        cuda.cudaStreamBeginCapture(mine, 1),
        cuda.cudaEventRecord(77, other),
    ):
        assert answer[0] == Code.cudaErrorInvalidResourceHandle
    with pytest.raises(CudaFailure) as caught:
        context.execute_async_v3(mine)
    assert caught.value.code == Code.cudaErrorInvalidResourceHandle
