"""Sessions called from threads, futures and asyncio, on a fake GPU (tests/fake_cuda.py); real ones are in tests/gpu."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_cuda import Code, CudaFailure
from fake_session import (
    FakeContext,
    FakeCuda,
    FakeEngine,
    OnGpu,
    Open,
    adding_engine,
    busy,
    check_run,
    in_threads,
    inputs_of,
    large_engine,
)

from trtopt.core.errors import Busy, DeviceError, UsageError
from trtopt.cuda.arrays import start
from trtopt.cuda.device import Stream
from trtopt.cuda.driver import Driver, address_of
from trtopt.runtime.bound_call import prepare_call
from trtopt.runtime.session import Session
from trtopt.runtime.slot import Slot
from trtopt.runtime.slot_pool import SlotPool
from trtopt.runtime.stretch import AVAILABLE, NativeCall


def test_threads_run_side_by_side_and_every_result_is_right(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), contexts=3) as session:

        def work(seed: int) -> None:
            for batch in (1, 8, 16, 3) * 3:
                check_run(session, inputs_of(batch, seed))
                if seed == 5:
                    with pytest.raises(UsageError):
                        session.run({"x": np.zeros((1, 3))})

        assert in_threads(8, work) == []
        assert session.memory().slots <= 3


def test_contexts_are_made_and_first_run_one_at_a_time(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT 8.6 stood still, under compute-sanitizer, where one was made beside another's first run."""
    busy, most = [0], [0]

    def watched(call: Callable[..., Any], cold: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        def slowly(*args: Any) -> Any:
            if not cold(*args):
                return call(*args)
            busy[0] += 1
            most[0] = max(most[0], busy[0])
            time.sleep(0.002)
            try:
                return call(*args)
            finally:
                busy[0] -= 1

        return slowly

    def first(context: FakeContext, stream: int) -> bool:
        return not context.enqueued or stream in cuda.capturing

    make = FakeEngine.create_execution_context_without_device_memory
    monkeypatch.setattr(FakeEngine, make.__name__, watched(make))
    monkeypatch.setattr(FakeContext, "execute_async_v3", watched(FakeContext.execute_async_v3, first))
    together = threading.Barrier(4)
    with open_session(adding_engine(cuda), contexts=4) as session:

        def work(seed: int) -> None:
            together.wait(30)
            for call in range(9):
                check_run(session, inputs_of(1 + (seed + call) % 3, seed))

        assert in_threads(4, work) == []
        assert session.memory().slots > 1
    assert most == [1]


def test_an_exception_thrown_into_a_thread_mid_call_costs_no_context(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(BaseException):
        pass

    with open_session(adding_engine(cuda), contexts=1) as session:
        check_run(session, inputs_of(4))
        with monkeypatch.context() as patch:
            patch.setattr(type(session._slots._free[0][0]), "finish", Mock(side_effect=Stop))
            with pytest.raises(Stop):
                session.run(inputs_of(4))
        for seed in range(3):
            check_run(session, inputs_of(4, seed))


def test_submit_gives_futures_and_holds_back_when_full(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), contexts=1, queue=2) as session:
        inputs = inputs_of(2)
        np.testing.assert_array_equal(session.submit(inputs).result(10)["s"], inputs["x"].sum(1))
        with busy(session):
            waiting = [session.submit(inputs), session.submit(inputs)]
            with pytest.raises(Busy, match="all 2 are in use"):
                session.submit(inputs, timeout=0.05)
        for future in waiting:
            np.testing.assert_array_equal(future.result(10)["s"], inputs["x"].sum(1))
        with pytest.raises(UsageError, match="missing 'row'"):
            session.submit({"x": inputs["x"]}).result(10)


def test_asyncio_runs_without_blocking_the_loop(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), contexts=1, queue=2) as session:

        async def main() -> None:
            inputs = [inputs_of(1 + seed % 8, seed) for seed in range(40)]
            results = await asyncio.wait_for(asyncio.gather(*map(session.run_async, inputs)), 30)
            for given, result in zip(inputs, results):
                np.testing.assert_array_equal(result["y"], given["x"] + given["row"])
            wrong = asyncio.gather(*map(session.run_async, (inputs[0], inputs_of(9))), return_exceptions=True)
            assert [type(item) for item in await asyncio.wait_for(wrong, 30)] == [dict, UsageError]
            with busy(session):
                calls = [asyncio.ensure_future(session.run_async(inputs[0])) for _ in range(4)]
                await asyncio.sleep(0.05)  # the loop turns though the queue is full
                for call in calls[2:]:  # those wait for a place in the queue
                    call.cancel()
            done = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
            assert [isinstance(item, asyncio.CancelledError) for item in done] == [False, False, True, True]
            await asyncio.wait_for(session.run_async(inputs[1]), 10)  # no place was lost

        asyncio.run(main())


@pytest.mark.parametrize("finish", [True, False])
def test_closing_during_calls_ends_them_all(cuda: FakeCuda, open_session: Open, finish: bool) -> None:
    session = open_session(adding_engine(cuda), contexts=2, queue=8)
    futures: list[Future[Any]] = []
    ended: list[type[BaseException]] = []

    def work(seed: int) -> None:
        while True:
            try:
                check_run(session, inputs_of(1 + seed, seed))
                futures.append(session.submit(inputs_of(1 + seed, seed)))
            except DeviceError as error:  # noqa: PERF203
                assert "closed" in str(error)
                ended.append(type(error))
                return

    closer = threading.Timer(0.1, session.close, [finish])
    closer.start()
    assert in_threads(6, work) == []
    closer.join(30)
    assert not closer.is_alive(), "close hangs"
    assert len(ended) == 6
    for future in futures:
        assert future.cancelled() or future.exception(5) is None or isinstance(future.exception(5), DeviceError)
        assert future.done()
        if finish and not future.cancelled():
            assert future.exception() is None
    with pytest.raises(DeviceError, match="closed"):
        session.run(inputs_of(1))


def test_a_session_without_close_goes_with_its_last_reference(cuda: FakeCuda, open_session: Open) -> None:
    session = open_session(adding_engine(cuda))
    check_run(session, inputs_of(3))
    gc.collect()
    gc.disable()
    try:
        del session
        assert cuda.live == 0, "it is in a cycle"
    finally:
        gc.enable()
    session = open_session(adding_engine(cuda))
    session.submit(inputs_of(2)).result(10)
    del session
    end = time.monotonic() + 10
    while cuda.live and time.monotonic() < end:  # the worker thread lets go of its last call a little later
        gc.collect()
        time.sleep(0.01)
    assert cuda.live == 0


@pytest.mark.parametrize("what", ["session", "bound call"])
def test_garbage_collected_during_a_capture_does_not_break_it(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    old = adding_engine(cuda, capturable=False)  # the fake's graphs would keep its contexts
    forgotten: Any = open_session(old)
    for _ in range(3):
        check_run(forgotten, inputs_of(3))
    if what == "bound call":  # which outlives its session
        forgotten = forgotten.bind(inputs_of(3))
    forgotten.itself = forgotten  # so that only the garbage collector finds it
    captured: list[bool] = []  # for each of its contexts, whether it went during a capture
    for context in old.contexts:
        weakref.finalize(context, lambda: captured.append(bool(cuda.capturing)))
    count = len(old.contexts)
    del context
    old.contexts.clear()
    execute, collections = FakeContext.execute_async_v3, []

    def execute_and_collect(self: FakeContext, stream: int) -> bool:
        if stream in cuda.capturing:
            collections.append(gc.collect())
        return execute(self, stream)

    with open_session(adding_engine(cuda)) as session:
        check_run(session, inputs_of(4))
        monkeypatch.setattr(FakeContext, "execute_async_v3", execute_and_collect)
        del forgotten
        for seed in range(3):
            check_run(session, inputs_of(4, seed))
        assert len(collections) == 1
        assert session.stats().graphs == 1
        assert captured == [False] * count


def test_binding_while_the_session_closes(cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(adding_engine(cuda), contexts=2)
    first = session.bind(inputs_of(2))
    closer = threading.Thread(target=session.close)

    def prepare_slowly(*arguments: Any) -> Any:
        prepared = prepare_call(*arguments)
        closer.start()
        while first._call.__name__ != "_closed":  # `close` has ended the bound calls that it knew of
            time.sleep(0.001)
        return prepared

    monkeypatch.setattr("trtopt.runtime.session.prepare_call", prepare_slowly)
    with pytest.raises(DeviceError, match="closed"):
        session.bind(inputs_of(2))
    closer.join(10)
    assert not closer.is_alive(), "it waits for the context that the bound call has"
    assert cuda.live == 0


# Python's GIL ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stretches() -> None:
    """The test is about calls in one stretch, without the GIL."""
    if not AVAILABLE:
        pytest.skip("the C extension isn't built: it needs a C compiler when trtopt is installed")


@pytest.fixture(params=["stretch", "python"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in one stretch, and in Python."""
    if request.param == "stretch":
        request.getfixturevalue("stretches")
    else:
        monkeypatch.setattr("trtopt.runtime.slot.AVAILABLE", False)


def driver(cuda: FakeCuda, asked: list[str], works: bool) -> tuple[Driver, Any]:
    """Its functions, for calls without the GIL; and what must live as long as they."""

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    def launch(graph: int, stream: int) -> int:
        asked.append("launch")
        return int(cuda.cudaGraphLaunch(graph, stream)[0]) if works else 201  # CUDA_ERROR_INVALID_CONTEXT

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
    def synchronize(stream: int) -> int:
        asked.append("wait")
        return int(cuda.cudaStreamSynchronize(stream)[0]) if works else 201

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
    def query(stream: int) -> int:
        asked.append("query")
        return int(cuda.cudaStreamQuery(stream)[0])

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
    def get(where: Any) -> int:
        return cuda.get_current(SimpleNamespace(_obj=where.contents))

    native = launch, synchronize, query, get
    return Driver(query, cuda.get_current, cuda.set_current, *map(address_of, native)), native


@pytest.mark.usefixtures("stretches")
def test_while_a_stretch_runs_other_threads_have_the_gil() -> None:
    sleep = address_of(ctypes.CDLL(None).usleep), 600_000, 0, 0
    thread = threading.Thread(target=NativeCall([sleep]).run_without_gil)
    thread.start()
    started, steps = time.monotonic(), 0
    while thread.is_alive() and time.monotonic() - started < 10:
        steps += 1
        time.sleep(0.001)
    thread.join()
    assert steps > 4


@pytest.mark.usefixtures("stretches")
@pytest.mark.parametrize("works", [True, False])
def test_threads_copy_launch_and_wait_without_the_gil(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """Where the driver's call fails, the runtime's says why, or works."""
    asked: list[str] = []
    held, _kept = driver(cuda, asked, works)
    with open_session(large_engine(cuda), contexts=3) as session:
        hold(session, held, 3)

        def work(seed: int) -> None:
            x = session.pinned("x", (2, 40_000)) if seed % 2 else np.empty((2, 40_000), np.float32)
            for call in range(5):
                x[:] = np.random.default_rng(9 * seed + call).normal(size=x.shape)
                np.testing.assert_array_equal(session.run({"x": x})["y"], x * 2)
            with session.bind({"x": x}) as bound:
                x[:] = 3
                assert (bound()["y"] == 6).all()

        assert in_threads(2, work) == []
        assert asked.count("launch") >= 4
        # Where a launch fails, nothing after it is done, and all of it is made again.
        assert asked.count("wait") == (asked.count("launch") if works else 0)
        with pytest.raises(UsageError):
            session.run({"x": np.zeros((9, 40_000), np.float32)})
        with monkeypatch.context() as patch, pytest.raises(DeviceError):
            patch.setattr(
                FakeCuda, "cudaStreamSynchronize", Mock(side_effect=CudaFailure(Code.cudaErrorIllegalAddress))
            )
            session.run({"x": np.zeros((1, 40_000), np.float32)})


@pytest.mark.usefixtures("stretches")
@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("graphs", [0, 16])
def test_arrays_in_any_order_of_memory_are_copied_without_the_gil_or_with_it(
    cuda: FakeCuda, open_session: Open, graphs: int, works: bool
) -> None:
    held, _kept = driver(cuda, [], works)
    with open_session(large_engine(cuda), contexts=3, graphs=graphs) as session:
        hold(session, held, 3)

        def work(seed: int) -> None:
            chosen = np.random.default_rng(seed)
            for call in range(12):
                rows = 1 + (seed + call) % 4
                x = chosen.normal(size=(rows, 40_000)).astype(np.float32)
                given = np.asfortranarray(x) if call % 2 else x
                out = np.zeros((rows, 80_000), np.float32)[:, ::2] if call % 3 else np.zeros(x.shape, np.float32)
                np.testing.assert_array_equal(session.run({"x": given}, out={"y": out})["y"], x * 2)
                np.testing.assert_array_equal(session.run({"x": given})["y"], out)

        assert in_threads(3, work) == []


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("before", [None, 101])
def test_calls_leave_the_threads_current_device_as_it_was(
    cuda: FakeCuda, open_session: Open, before: int | None
) -> None:
    held, _kept = driver(cuda, [], True)
    x = np.ones((2, 40_000), np.float32)
    with open_session(large_engine(cuda), contexts=3) as session:
        hold(session, held, 3)

        def work(_: int) -> None:
            def check(result: Any) -> None:
                y = result["y"]
                assert ((y if isinstance(y, np.ndarray) else y.numpy()) == 2).all()
                assert held.current() == before

            cuda.set_current(before)
            for given in (x, OnGpu(session._gpus[0].device, x), np.asfortranarray(x)):
                for _ in range(4):
                    check(session.run({"x": given}))
                with session.bind({"x": given}) as bound:
                    check(bound())
            check(session.run({"x": x}, out={"y": np.empty_like(x)}))
            check({"y": session.pinned("x", x.shape) * 0 + 2})
            session.time({"x": x}, 2)
            session.memory()
            assert held.current() == before

        assert in_threads(3, work) == []
        cuda.set_current(before)
    assert held.current() == before


def _put(x: OnGpu, values: Any) -> None:
    ctypes.memmove(x.buffer.handle, values.ctypes.data, values.nbytes)


def _calls_on_the_gpu(session: Session, cuda: FakeCuda) -> list[Any]:
    """What calls give on arrays that stay, move, change at their address, are made, held, let go of, and refused."""
    device, said = session._gpus[0].device, list[Any]()
    row = OnGpu(device, inputs_of(4)["row"])

    def check(x: OnGpu, values: Any, **options: Any) -> Any:
        result = session.run({"x": x, "row": row}, **options)
        for name, wanted in (("y", values + row.values), ("s", values.sum(1))):
            found = result[name].now() if isinstance(result[name], OnGpu) else result[name].numpy()
            np.testing.assert_array_equal(found, wanted)
            said.append(found.tobytes())
        return result

    held = list[Any]()
    with Stream(device) as maker:
        for seed in range(60):
            inputs = inputs_of(4, seed)["x"]
            if seed % 15 == 0:
                x = OnGpu(device, inputs, maker.handle if seed % 2 else 1)
                out = {"y": OnGpu(device, inputs), "s": OnGpu(device, inputs[:, 0].copy())}
            if seed % 2:  # written late, on the stream that the array names or on the default one
                cuda.push(x.stream, partial(_put, x, inputs))
            else:
                _put(x, inputs)
            made = check(x, inputs)
            check(x, inputs, out=out)
            held = [*held[-1:], made] if seed % 3 else []
            if seed % 7 == 0:  # the same array, but as it can't be taken
                x.values = x.values.astype(np.int32)
                with pytest.raises(UsageError, match="int32"):
                    session.run({"x": x, "row": row})
                x.values = inputs
                out["s"].read_only = True
                with pytest.raises(UsageError, match="read-only"):
                    session.run({"x": x, "row": row}, out=out)
                out["s"].read_only = False
                x.values = inputs[:2]
                check(x, inputs[:2])
                x.values = inputs
            x.values = inputs
    said.append(session.stats().replays)
    held.clear()
    return said


def test_calls_on_the_gpu_give_the_same_in_one_stretch_and_in_python(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch, stretches: None
) -> None:
    found = []
    for way in ("stretch", "driver that fails", "python"):
        cuda.streams[1] = []
        asked: list[str] = []
        held, _kept = driver(cuda, asked, way != "driver that fails")
        with monkeypatch.context() as patch:
            if way == "python":
                patch.setattr("trtopt.runtime.slot.AVAILABLE", False)
            with open_session(adding_engine(cuda), contexts=1) as session:
                hold(session, held, 1)
                found.append(_calls_on_the_gpu(session, cuda))
                assert session.stats().replays >= 100
                assert (asked.count("launch") >= 50) == (way != "python")
        del cuda.streams[1]
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("either_way")
def test_the_default_stream_comes_before_what_is_written_into_memory_of_ours_alone(
    cuda: FakeCuda, open_session: Open
) -> None:
    """Such memory may have been read there; arrays of the caller's say themselves which streams they are used on."""
    cuda.streams[1], done = [], list[int]()
    held, _kept = driver(cuda, [], True)
    with open_session(adding_engine(cuda), contexts=1) as session:
        hold(session, held, 1)
        device, values = session._gpus[0].device, inputs_of(4)
        given = {name: OnGpu(device, array) for name, array in values.items()}
        out = {"y": OnGpu(device, values["x"]), "s": OnGpu(device, values["x"][:, 0].copy())}
        for _ in range(4):
            session.run(given, out=out)
            session.run(given)
        before = session.stats().replays
        cuda.push(1, partial(done.append, 1))
        session.run(given, out=out)
        assert not done
        session.run(given)
        assert done
        assert session.stats().replays == before + 2
        del given, out
    del cuda.streams[1]


def test_shapes_and_addresses_that_take_turns_stay_right_when_graphs_go(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), contexts=1, graphs=1) as session:
        device = session._gpus[0].device
        x, row = (OnGpu(device, array) for array in inputs_of(4).values())
        for _ in range(5):
            session.run({"x": x, "row": row})
        for seed in range(40):
            check_run(session, inputs_of(2, seed))
        assert session.stats().evictions > 0
        result = session.run({"x": x, "row": row})["y"]
        np.testing.assert_array_equal(result.numpy(), x.values + row.values)
        arrays = [x, *(OnGpu(device, inputs_of(4, seed)["x"]) for seed in range(1, 6))]
        for array in arrays:  # more than there is room for graphs of; the last one comes until the first is put out
            for _ in range(80):
                result = session.run({"x": array, "row": row})["y"]
        assert session.stats().graphs == 4
        for array in arrays:
            result = session.run({"x": array, "row": row})["y"]
            np.testing.assert_array_equal(result.numpy(), array.values + row.values)


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("current", [None, 100, 101])
@pytest.mark.usefixtures("stretches")
def test_a_bound_call_on_the_gpu_comes_after_the_stream_that_makes_its_array(
    cuda: FakeCuda,
    open_session: Open,
    current: int | None,
    busy: bool,
) -> None:
    """In one stretch where that stream is idle and the GPU is current."""
    asked: list[str] = []
    held, _kept = driver(cuda, asked, True)
    cuda.streams[1] = []  # the default one
    with open_session(large_engine(cuda)) as session:
        hold(session, held, 1)
        device, values = session._gpus[0].device, np.ones((2, 40_000), np.float32)
        with Stream(device) as maker:
            x = OnGpu(device, values, maker.handle)
            with session.bind({"x": x}) as bound:
                to, values[:] = x.buffer.handle, 3
                for stream in (1, maker.handle) if busy else ():
                    cuda.push(stream, partial(ctypes.memmove, to, start(values), values.nbytes))
                    cuda.set_current(current)
                    asked.clear()
                    cuda.calls.clear()
                    y = bound()["y"]
                    assert held.current() == current
                    assert cuda.calls.count("cudaStreamWaitEvent") == 1
                    cuda.set_current(100)
                    assert (y.numpy() == values * 2).all()
                    values += 1
                cuda.set_current(current)
                asked.clear()
                cuda.calls.clear()
                y = bound()["y"]
                assert (asked == ["query", "query", "launch", "wait"]) == (current == 100)
                assert cuda.calls == ["cudaStreamQuery"] * 2 + ["cudaGraphLaunch", "cudaStreamSynchronize"]
                assert held.current() == current
                cuda.set_current(100)
    del cuda.streams[1]


@pytest.mark.parametrize("before", [None, 101])
def test_a_stream_of_the_callers_is_met_on_its_device(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    """It may be the default one, of which every device has its own."""
    held, _kept = driver(cuda, [], True)
    there: list[int | None] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: FakeCuda, *arguments: Any) -> Any:
            if int(arguments[-1]) == number:
                there.append(held.current())
            return real(self, *arguments)

        return call

    with open_session(large_engine(cuda)) as session:
        mine = Stream(session._gpus[0].device)
        number = mine.handle
        for name in ("cudaGraphLaunch", "cudaStreamSynchronize"):
            monkeypatch.setattr(FakeCuda, name, watched(getattr(FakeCuda, name)))
        hold(session, held, 1)
        x = np.ones((2, 40_000), np.float32)
        cuda.set_current(before)
        with session.bind({"x": x}, stream=number) as bound:
            assert (bound()["y"] == 2).all()
        for _ in range(3):
            assert (session.run({"x": x}, stream=number)["y"] == 2).all()
        assert set(there) == {100}
        assert len(there) >= 8
        assert held.current() == before
        mine.free()


def hold(session: Session, held: Driver, contexts: int) -> None:
    """Give the session's GPU driver's functions, and slots that know of them."""
    at = session._gpus[0].device
    at.driver, at.context = held, held.current()
    session._slots.close()  # made before
    session._slots = SlotPool([partial(Slot, session._gpus[0])], contexts)
