"""Sessions on a fake GPU (tests/fake_cuda.py), for tests: engines of one sum, arrays in its memory, busy slots."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeContext as FakeContext, FakeCuda, FakeEngine
from numpy.typing import NDArray

from trtopt.cuda.device import Device, DeviceBuffer, DeviceInfo, Probe
from trtopt.runtime.session import Session
from trtopt.trt.loader import Loader
from trtopt.trt.plans import LoadedEngine

Array = NDArray[Any]
Open = Callable[..., Session]


class _Allocator:
    """IOutputAllocator's base."""


class _Profiler:
    """IProfiler."""


class FakeLoader(Loader):
    """TensorRT 8.6.0 that gives an engine of a test's."""

    family, version, lean = "tensorrt8", "8.6.0", False

    def __init__(self, load: Callable[..., LoadedEngine], version: str = "8.6.0") -> None:
        self.version = version
        self.load = load  # type: ignore[method-assign]


def checked_cuda() -> Iterator[FakeCuda]:
    """For a fixture: a fake CUDA of which everything must be freed at the end."""
    fake = FakeCuda()
    yield fake
    gc.collect()
    assert fake.live == 0, "something was not freed"


def opening(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """For a fixture: opens sessions on a fake engine; closes them at the end."""
    info = DeviceInfo(0, "Fake GPU", 89, 1 << 30)
    plan = tmp_path / "net.engine"
    plan.write_bytes(b"plan")
    opened: weakref.WeakSet[Session] = weakref.WeakSet()  # some tests let go of theirs
    monkeypatch.setattr("trtopt.runtime.gpu_engine.probe", lambda: Probe((info,), (12, 4)))
    monkeypatch.setattr("trtopt.runtime.gpu_engine.Device", lambda ordinal: Device(functions=cuda, info=info))

    def start(engine: FakeEngine, **options: Any) -> Session:
        def load(plan: bytes, name: str, **_: Any) -> LoadedEngine:
            return LoadedEngine(SimpleNamespace(IOutputAllocator=_Allocator, IProfiler=_Profiler), engine, None)

        generation = FakeLoader(load)
        monkeypatch.setattr("trtopt.runtime.gpu_engine.plan_loader", lambda *_: generation)
        session = Session(plan, **{"trust": True, **options})  # no manifest describes it
        opened.add(session)
        return session

    yield start
    for session in tuple(opened):
        session.close()


def adding_engine(cuda: FakeCuda, **options: Any) -> FakeEngine:
    """y = x + row, s = the sum of each sample; two profiles: batch 1..8, and batch 16..64."""
    return FakeEngine(
        cuda,
        {
            "x": ("FLOAT", "float32", (-1, 3), "INPUT", "DEVICE"),
            "row": ("HALF", "float16", (3,), "INPUT", "DEVICE"),
            "y": ("FLOAT", "float32", (-1, 3), "OUTPUT", "DEVICE"),
            "s": ("FLOAT", "float32", (-1,), "OUTPUT", "DEVICE"),
        },
        [
            {"x": ((1, 3), (4, 3), (8, 3)), "row": ((3,),) * 3},
            {"x": ((16, 3), (32, 3), (64, 3)), "row": ((3,),) * 3},
        ],
        lambda shapes: {"y": shapes["x"], "s": shapes["x"][:1]},
        lambda arrays: {"y": arrays["x"] + arrays["row"], "s": arrays["x"].sum(1)},
        **options,
    )


def large_engine(cuda: FakeCuda) -> FakeEngine:
    """y = 2 x, with more bytes than are mapped or staged without asking."""
    size = 40_000
    return FakeEngine(
        cuda,
        {
            "x": ("FLOAT", "float32", (-1, size), "INPUT", "DEVICE"),
            "y": ("FLOAT", "float32", (-1, size), "OUTPUT", "DEVICE"),
        },
        [{"x": ((1, size), (1, size), (4, size))}],
        lambda shapes: {"y": shapes["x"]},
        lambda arrays: {"y": arrays["x"] * 2},
    )


def inputs_of(batch: int, seed: int = 0) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(batch, 3)).astype(np.float32), "row": np.array([1, 2, 3], np.float16)}


def check_run(session: Session, inputs: dict[str, Array]) -> None:
    results = session.run(inputs)
    assert set(results) == {"y", "s"}
    np.testing.assert_array_equal(results["y"], inputs["x"] + inputs["row"])
    np.testing.assert_array_equal(results["s"], inputs["x"].sum(1))


class OnGpu:
    """An array of another library's in the fake GPU's memory."""

    def __init__(self, device: Device, values: Array, stream: int | None = None, *, read_only: bool = False) -> None:
        self.buffer = DeviceBuffer(device, values.nbytes)
        ctypes.memmove(self.buffer.handle, values.ctypes.data, values.nbytes)
        self.values, self.stream, self.read_only = values, stream, read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.buffer.handle, self.read_only),
            "version": 3,
            "stream": self.stream,
        }

    def now(self) -> Array:
        return np.frombuffer(ctypes.string_at(self.buffer.handle, self.values.nbytes), self.values.dtype).reshape(
            self.values.shape
        )


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    wrong: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,), daemon=True) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread hangs"
    return wrong


@contextmanager
def busy(session: Session) -> Iterator[None]:
    """Another thread holds the session's one slot."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        slot = session._slots.take()
        held.set()
        done.wait(30)
        session._slots.give(slot)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        yield
    finally:
        done.set()
        thread.join(10)
