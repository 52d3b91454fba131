# ruff: noqa: N802  (FakeDriver has libcuda's names)
from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda

from trtopt.core.errors import DeviceError
from trtopt.cuda import device as module
from trtopt.cuda.device import Device, DeviceBuffer, DeviceInfo, Event, HostBuffer, Stream, probe, require_gpu

INFO = DeviceInfo(0, "Fake GPU", 89, 1 << 30)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def gpu(cuda: FakeCuda) -> Iterator[Device]:
    yield Device(functions=cuda, info=INFO)
    gc.collect()
    assert cuda.live == 0, "something was not freed"


def test_freeing_twice_is_harmless_and_use_after_it_is_refused(gpu: Device, cuda: FakeCuda) -> None:
    memory, host, stream = DeviceBuffer(gpu, 16), HostBuffer(gpu, 16), Stream(gpu)
    memory.free()
    memory.free()
    assert cuda.calls.count("cudaFree") == 1
    assert memory.freed
    with pytest.raises(DeviceError, match="DeviceBuffer was freed"):
        stream.to_device(memory, host, 16)
    stream.free()
    with pytest.raises(DeviceError, match="Stream was freed"):
        stream.synchronize()


def test_memory_is_returned_when_nothing_refers_to_it_but_not_while_a_view_does(gpu: Device, cuda: FakeCuda) -> None:
    view = HostBuffer(gpu, 8).array(np.int32, (2,))
    gc.collect()
    assert len(cuda.regions) == 1
    view[:] = 7
    del view
    gc.collect()
    assert not cuda.regions


def test_an_error_code_becomes_an_error_with_name_text_and_advice(gpu: Device) -> None:
    with pytest.raises(DeviceError, match=r"cudaMalloc failed: cudaErrorMemoryAllocation .*smaller batch"):
        DeviceBuffer(gpu, 1 << 40)


def test_events_measure_gpu_time(gpu: Device, cuda: FakeCuda) -> None:
    with Event(gpu) as start, Event(gpu) as end, Stream(gpu) as stream:
        stream.record(start)
        with pytest.raises(DeviceError, match="cudaEventElapsedTime"):
            end.milliseconds_since(start)
        cuda.push(stream.handle, lambda: setattr(cuda, "clock", cuda.clock + 2.5))
        stream.record(end)
        end.synchronize()
        assert end.milliseconds_since(start) == 2.5


def test_a_captured_graph_replays(gpu: Device) -> None:
    with (
        HostBuffer(gpu, 4) as source,
        HostBuffer(gpu, 4) as target,
        DeviceBuffer(gpu, 4) as memory,
        Stream(gpu) as stream,
    ):

        def round_trip() -> None:
            stream.to_device(memory, source, 4)
            gpu("cudaMemcpyAsync", target.handle, memory.handle, 4, gpu.to_host, stream.handle)

        with stream.capture(round_trip) as graph:
            for value in (3, 5):
                source.array(np.int32, (1,))[0] = value
                graph.launch(stream.handle)
                stream.synchronize()
                assert target.array(np.int32, (1,))[0] == value


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_let_go_of_during_a_capture_is_freed_after_it(gpu: Device, cuda: FakeCuda, fails: bool) -> None:
    with HostBuffer(gpu, 4) as source, DeviceBuffer(gpu, 4) as memory, Stream(gpu) as stream:
        cycle: list[Any] = [DeviceBuffer(gpu, 8), HostBuffer(gpu, 8)]
        cycle.append(cycle)
        held = [cycle, DeviceBuffer(gpu, 8)]
        del cycle
        before = cuda.live

        def enqueue() -> None:
            held.clear()
            gc.collect()
            assert cuda.live == before, "in a real capture that is an error"
            elsewhere = threading.Thread(target=lambda: DeviceBuffer(gpu, 8).free())  # other threads may
            elsewhere.start()
            elsewhere.join()
            stream.to_device(memory, source, 4)
            if fails:
                raise KeyError("from the caller")

        if fails:
            with pytest.raises(KeyError):
                stream.capture(enqueue)
            assert cuda.live == before - 3
        else:
            with stream.capture(enqueue) as graph:
                assert cuda.live == before - 3 + 1
                graph.launch(stream.handle)
        DeviceBuffer(gpu, 8).free()  # at once again
        assert cuda.live == before - 3


@pytest.mark.parametrize("own_error", [True, False])
def test_a_capture_that_fails_leaves_the_stream_usable(gpu: Device, cuda: FakeCuda, own_error: bool) -> None:
    with Stream(gpu) as stream:

        def misuse() -> None:
            if own_error:
                raise KeyError("from the caller")
            cuda.cudaStreamSynchronize(stream.handle)

        with pytest.raises(KeyError if own_error else DeviceError):
            stream.capture(misuse)
        assert cuda.last == 0, "the capture's error would be reported by a later call"
        stream.synchronize()


class FakeDriver:
    """libcuda with given answers; a code for a function makes it fail."""

    def __init__(self, devices: int = 1, **codes: int) -> None:
        self.devices, self.codes = devices, codes

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.codes.get(name, 0) or getattr(self, "_" + name)(*arguments) or 0

    def _set(self, reference: Any, value: Any) -> None:
        reference._obj.value = value

    def _cuInit(self, flags: int) -> None:
        pass

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        self._set(text, b"text of it")

    def _cuDriverGetVersion(self, out: Any) -> None:
        self._set(out, 12060)

    def _cuDeviceGetCount(self, out: Any) -> None:
        self._set(out, self.devices)

    def _cuDeviceGet(self, out: Any, ordinal: int) -> None:
        self._set(out, ordinal)

    def _cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:
        name.value = b"Fake GPU"

    def _cuDeviceTotalMem_v2(self, out: Any, device: Any) -> None:
        self._set(out, 48 << 30)

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> None:
        self._set(out, {75: 12, 76: 0}[attribute])


def test_probe_describes_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "driver_library", lambda: FakeDriver(2))
    found = probe()
    assert found
    assert found.driver == (12, 6)
    assert found.devices[1] == DeviceInfo(1, "Fake GPU", 120, 48 << 30)
    assert str(found.devices[1]) == "Fake GPU (sm120, 48 GiB)"
    assert require_gpu("a test", 1).ordinal == 1
    with pytest.raises(DeviceError, match="GPU 2 was asked for; this machine has 0 to 1"):
        require_gpu("a test", 2)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "no NVIDIA driver"),
        (FakeDriver(0), "finds no GPU"),
        (FakeDriver(cuInit=100), r"cuInit with error 100 \(text of it\)"),
        (FakeDriver(cuDeviceGetName=3), "cuDeviceGetName with error 3"),
        (ctypes.CDLL(None), "cuInit"),  # which isn't CUDA's
    ],
)
def test_probe_gives_the_reason_for_no_gpu(monkeypatch: pytest.MonkeyPatch, driver: Any, reason: str) -> None:
    monkeypatch.setattr(module, "driver_library", lambda: driver)
    assert not probe()
    with pytest.raises(DeviceError, match=f"a test needs an NVIDIA GPU: .*{reason}"):
        require_gpu("a test")


def test_the_real_bindings_have_every_name_that_is_used() -> None:
    """The fake proves the logic; this proves that its names are cuda-python's own."""
    real = pytest.importorskip("cuda.bindings.runtime")
    used = [name for name in dir(FakeCuda) if name.startswith("cuda")]
    assert len(used) > 20
    assert [name for name in used if not hasattr(real, name)] == []
    for name in ("cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"):
        assert hasattr(real.cudaMemcpyKind, name)
    assert hasattr(real.cudaStreamCaptureMode, "cudaStreamCaptureModeThreadLocal")
    for name in ("cudaStreamNonBlocking", "cudaEventDefault", "cudaEventDisableTiming", "cudaHostAllocPortable"):
        assert int(getattr(real, name)) == getattr(FakeCuda, name)
