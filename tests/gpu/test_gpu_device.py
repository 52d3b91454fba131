"""The device layer on real CUDA; needs no TensorRT."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from trtopt.core.errors import DeviceError
from trtopt.cuda.device import Device, DeviceBuffer, Event, HostBuffer, Stream


def test_copies_and_graphs_give_back_what_went_in(gpu: Device) -> None:
    values = np.arange(1 << 20, dtype=np.float32)
    with (
        HostBuffer(gpu, values.nbytes) as source,
        HostBuffer(gpu, values.nbytes) as target,
        DeviceBuffer(gpu, values.nbytes) as memory,
        Stream(gpu) as stream,
    ):

        def round_trip() -> None:
            stream.to_device(memory, source, values.nbytes)
            gpu("cudaMemcpyAsync", target.handle, memory.handle, values.nbytes, gpu.to_host, stream.handle)

        with stream.capture(round_trip) as graph:
            for factor in (1, 3):
                source.array(np.float32, values.shape)[:] = values * factor
                graph.launch(stream.handle)
                stream.synchronize()
                np.testing.assert_array_equal(target.array(np.float32, values.shape), values * factor)


def test_a_capture_that_fails_leaves_the_stream_usable(gpu: Device) -> None:
    with Stream(gpu) as stream, HostBuffer(gpu, 4) as host, DeviceBuffer(gpu, 4) as memory:
        with pytest.raises(DeviceError, match="cudaStreamSynchronize failed"):
            stream.capture(stream.synchronize)
        stream.to_device(memory, host, 4)
        stream.synchronize()


def test_events_measure_time_in_order(gpu: Device) -> None:
    size = 64 << 20
    with HostBuffer(gpu, size) as host, DeviceBuffer(gpu, size) as memory, Stream(gpu) as stream:
        start, end = Event(gpu), Event(gpu)
        stream.record(start)
        stream.to_device(memory, host, size)
        stream.record(end)
        end.synchronize()
        assert 0 < end.milliseconds_since(start) < 1000


def test_too_much_memory_is_an_error_that_leaves_the_device_usable(gpu: Device) -> None:
    with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation"):
        DeviceBuffer(gpu, 1 << 50)
    DeviceBuffer(gpu, 1 << 20).free()


def test_memory_comes_back(gpu: Device) -> None:
    DeviceBuffer(gpu, 1).free()
    gc.collect()
    before = gpu("cudaMemGetInfo")[0]
    for _ in range(20):
        DeviceBuffer(gpu, 256 << 20)  # collected as soon as nothing refers to it
    gc.collect()
    assert gpu("cudaMemGetInfo")[0] >= before - (64 << 20)
