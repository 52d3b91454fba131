"""Batcher on a fake GPU (tests/fake_cuda.py), and on ONNX Runtime."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from fake_session import Array, FakeCuda, FakeEngine, OnGpu, Open, adding_engine, busy, in_threads
from graphs import conv_relu, values, written

from trtopt import Batcher
from trtopt.core import native
from trtopt.core.errors import Busy, DeviceError, EngineError, UsageError
from trtopt.runtime.batcher import CLOSED
from trtopt.runtime.session import Session

HOUR = 3600.0
WIDE = 20_000  # floats: more bytes than an input that is staged without asking whether it is pinned


class Engine:
    """y = 2 x + k, s = the sum of each sample; x is samples × anything, k one integer a sample. Remembers what ran."""

    def __init__(self, cuda: FakeCuda, batches: Sequence[tuple[int, int]] = ((1, 32),), fixed: int = -1) -> None:
        self.ran: list[Array] = []
        self.wrong: str = ""
        width = 3 if fixed > 0 else -1
        self.engine = FakeEngine(
            cuda,
            {
                "x": ("FLOAT", "float32", (fixed, width), "INPUT", "DEVICE"),
                "k": ("INT32", "int32", (fixed,), "INPUT", "DEVICE"),
                "y": ("FLOAT", "float32", (fixed, width), "OUTPUT", "DEVICE"),
                "s": ("FLOAT", "float32", (fixed,), "OUTPUT", "DEVICE"),
            },
            [
                {"x": tuple((n, 3) if fixed > 0 else (n, w) for n, w in ends), "k": ((low,), (high,), (high,))}
                for low, high in batches
                for ends in [((low, 1), (high, 8), (high, WIDE))]
            ],
            lambda shapes: {"y": shapes["x"], "s": shapes["x"][:1]},
            self.compute,
        )

    def compute(self, arrays: dict[str, Array]) -> dict[str, Array]:
        if self.wrong:
            raise EngineError(self.wrong)
        self.ran.append(arrays["k"].copy())
        return {"y": arrays["x"] * 2 + arrays["k"][:, None], "s": arrays["x"].sum(1)}


def sample(count: int = 1, width: int = 3, seed: int = 0) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    x = generator.integers(-50, 50, size=(count, width)).astype(np.float32)  # sums are exact, in any order
    return {"x": x, "k": np.full(count, seed, np.int32)}


def check(inputs: dict[str, Array], results: dict[str, Any]) -> None:
    assert set(results) == {"y", "s"}
    np.testing.assert_array_equal(results["y"], inputs["x"] * 2 + inputs["k"][:, None])
    np.testing.assert_array_equal(results["s"], inputs["x"].sum(1))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("trtopt-batcher")]


# Results ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["in one stretch", "by NumPy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which samples are copied."""
    if not request.param:
        monkeypatch.setattr("trtopt.runtime.batch.AVAILABLE", False)
    elif native.run is None:
        pytest.skip("the C extension isn't built: it needs a C compiler when trtopt is installed")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("batches", [[(1, 32)], [(4, 8), (16, 24)]])
def test_64_threads_with_any_shapes_get_their_own_results(
    cuda: FakeCuda, open_session: Open, batches: list[tuple[int, int]]
) -> None:
    engine = Engine(cuda, batches)
    with open_session(engine.engine) as session, Batcher(session, max_delay="1ms", max_queue=2) as batcher:

        def work(seed: int) -> None:
            generator = np.random.default_rng(seed)
            for turn in range(8):
                width = WIDE if turn == seed % 16 else int(generator.choice([1, 3, 7]))
                inputs = sample(int(generator.integers(1, 6)), width, seed)
                if turn % 3 == 0:
                    inputs["x"] = np.asfortranarray(inputs["x"])
                if turn % 2:
                    results = batcher.run(inputs)
                else:
                    given = {name: array.copy() for name, array in inputs.items()}
                    future = batcher.submit(given)
                    for array in given.values():
                        array[...] = 99  # they are copied by now
                    results = future.result(30)
                check(inputs, results)
                results["y"][...] = 99  # the caller's own

        assert in_threads(64, work) == []
        stats = batcher.stats()
        assert (stats.requests, stats.queued) == (64 * 8, 0)
        assert stats.batches < stats.requests
        assert stats.mean_batch == stats.samples / stats.batches
    allowed = {size for low, high in batches for size in range(low, high + 1)}
    assert {len(ran) for ran in engine.ran} <= allowed
    assert threads() == []


def test_a_signal_ends_the_wait_of_its_thread_alone(cuda: FakeCuda, open_session: Open) -> None:
    class Enough(Exception):
        pass

    def handler(*_: object) -> None:
        raise Enough

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with open_session(Engine(cuda).engine) as session, Batcher(session, max_delay=HOUR, max_batch=3) as batcher:
            other = batcher.submit(sample(seed=1))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Enough):
                batcher.run(sample(seed=2))
            assert not other.done()
            check(sample(seed=3), batcher.run(sample(seed=3)))
            check(sample(seed=1), other.result(20))
            assert batcher.stats().requests == 2  # nothing is run for who has left
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_full_batch_starts_without_waiting(cuda: FakeCuda, open_session: Open) -> None:
    engine = Engine(cuda)
    with open_session(engine.engine) as session, Batcher(session, max_delay=HOUR, max_batch=4) as batcher:
        futures = [batcher.submit(sample(1, seed=seed)) for seed in range(8)]
        for seed, future in enumerate(futures):
            check(sample(1, seed=seed), future.result(20))
        stats = batcher.stats()
        assert (stats.batches, stats.full, stats.mean_batch) == (2, 2, 4.0)
        assert stats.describe()["samples"] == 8
    assert sorted(map(list, engine.ran)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_request_counts_as_its_samples_and_is_never_divided(cuda: FakeCuda, open_session: Open) -> None:
    engine = Engine(cuda)
    with open_session(engine.engine) as session, Batcher(session, max_delay=HOUR, max_batch=8) as batcher:
        first, second = batcher.submit(sample(5, seed=1)), batcher.submit(sample(4, seed=2))
        check(sample(5, seed=1), first.result(20))  # full: the next didn't fit
        third = batcher.submit(sample(4, seed=3))
        check(sample(4, seed=2), second.result(20))
        check(sample(4, seed=3), third.result(20))
    assert [list(ran) for ran in engine.ran] == [[1] * 8, [2] * 4 + [3] * 4]  # 5 samples run as 8: the last repeated


def test_torch_in_torch_out(cuda: FakeCuda, open_session: Open) -> None:
    torch = pytest.importorskip("torch")
    with open_session(Engine(cuda).engine) as session, Batcher(session, max_delay=0) as batcher:
        inputs = sample(2, seed=4)
        results = batcher.run({name: torch.from_numpy(array) for name, array in inputs.items()})
        assert isinstance(results["y"], torch.Tensor)
        check(inputs, {name: result.numpy() for name, result in results.items()})


def test_what_has_its_samples_elsewhere_is_not_cut_on_the_first_axis(tmp_path: Path) -> None:
    proto = conv_relu(inputs={"x": ["steps", 3, "batch", 8]}, outputs={"y": ["steps", 4, "batch", 8]})
    onnx.save(proto, tmp_path / "net.onnx")
    with Session(tmp_path / "net.onnx", backend="onnxruntime") as session:
        assert [info.batch_axis for info in (*session.inputs, *session.outputs)] == [2, 2]
        x = values(2, 3, 5, 8)
        assert np.array_equal(session.run_batches({"x": x})["y"], session.run({"x": x})["y"])
        with pytest.raises(UsageError, match=r"input 'x' has shape .*requests can't be put together"):
            Batcher(session, max_batch=4)


# Time and order -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("trtopt.runtime.batcher.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def without_threads(batcher: Batcher) -> Callable[[], list[int]]:
    """Give the batcher no threads; return a function that runs the next batch, and gives its requests' numbers."""
    batcher._workers.shutdown()
    batcher._workers = SimpleNamespace(submit=lambda task: None, shutdown=lambda wait: None)  # type: ignore[assignment]
    ran: list[int] = []
    run = batcher._run

    def remembered(batch: Any, requests: Any) -> None:
        ran[:] = [int(request.arrays[1][0]) for request in requests]
        run(batch, requests)

    batcher._run = remembered  # type: ignore[method-assign]

    def serve() -> list[int]:
        ran.clear()
        batch = batcher._next()
        assert batch is not None
        batcher._finish(batch)
        return list(ran)

    return serve


def test_a_batch_starts_when_its_oldest_request_has_waited(cuda: FakeCuda, open_session: Open, clock: Any) -> None:
    with open_session(Engine(cuda).engine) as session, Batcher(session, max_delay="500ms") as batcher:
        serve = without_threads(batcher)
        batcher.submit(sample(seed=1))
        clock.now = 0.4
        batcher.submit(sample(seed=2))
        assert batcher._due(0.4999) is None
        clock.now = 0.5
        assert serve() == [1, 2]
        stats = batcher.stats()
        assert (stats.batches, stats.full, stats.longest_wait) == (1, 0, 0.5)
        assert stats.mean_wait == pytest.approx(0.3)


def test_of_batches_that_are_due_the_one_with_the_oldest_request_goes_first(
    cuda: FakeCuda, open_session: Open, clock: Any
) -> None:
    with (
        open_session(Engine(cuda).engine) as session,
        Batcher(session, max_delay=1.0, max_batch=4, max_queue=8) as batcher,
    ):
        serve = without_threads(batcher)
        batcher.submit(sample(1, 2, seed=99))
        clock.now = 0.5
        for seed in range(12):
            batcher.submit(sample(seed=seed))
        assert serve() == [0, 1, 2, 3]  # full, while the old one may wait for others yet
        clock.now = 1.0
        assert serve() == [99]
        assert serve() == [4, 5, 6, 7]
        batcher.submit(sample(1, 2, seed=98))
        assert serve() == [8, 9, 10, 11]
        clock.now = 2.0
        assert serve() == [98]


def test_a_batch_starts_early_where_others_would_wait_for_room(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        open_session(Engine(cuda).engine) as session,
        Batcher(session, max_delay=HOUR, max_queue=1) as batcher,
    ):
        first, joining = batcher.submit(sample(seed=1)), batcher.submit(sample(seed=2))
        assert batcher.stats().queued == 2
        second = batcher.submit(sample(1, 2, seed=3), timeout=20)
        check(sample(seed=1), first.result(20))
        check(sample(seed=2), joining.result(20))
        assert not second.done()
        in_threads(1, lambda _: batcher._enter(batcher._request(sample()), None, holds_up=False))  # as `run` does it
        check(sample(1, 2, seed=3), second.result(20))


def test_the_next_batch_is_filled_and_launched_while_one_runs(cuda: FakeCuda, open_session: Open) -> None:
    engine = Engine(cuda)
    with open_session(engine.engine, contexts=2) as session, Batcher(session, max_delay=0) as batcher:
        running, on = threading.Barrier(3, timeout=20), threading.Event()
        run = session.run

        def slow(*arguments: Any, **options: Any) -> Any:
            running.wait()
            on.wait(20)
            return run(*arguments, **options)

        session.run = slow  # type: ignore[method-assign]
        first = batcher.submit(sample(1, seed=1))
        until(lambda: batcher.stats().batches == 1)
        second = batcher.submit(sample(1, seed=2))
        running.wait()  # both are in `run`
        third = batcher.submit(sample(1, seed=3))
        assert batcher.stats().queued == 1
        running.reset()
        session.run = run  # type: ignore[method-assign]
        on.set()
        for seed, future in enumerate((first, second, third), 1):
            check(sample(1, seed=seed), future.result(20))


# Bounds and errors --------------------------------------------------------------------------------------------------


def test_a_full_queue_makes_callers_wait_or_says_so(cuda: FakeCuda, open_session: Open) -> None:
    with (
        open_session(Engine(cuda).engine, contexts=1) as session,
        Batcher(session, max_delay=0, max_batch=1, max_queue=2, slots=1) as batcher,
    ):
        with busy(session):
            futures = [batcher.submit(sample(1, seed=0))]
            until(lambda: batcher.stats().queued == 0)
            futures += [batcher.submit(sample(1, seed=seed)) for seed in (1, 2)]
            with pytest.raises(Busy, match="2 batches wait already"):
                batcher.submit(sample(1), timeout=0)
            with pytest.raises(Busy):
                batcher.run(sample(1), timeout=0.01)
            results: list[Any] = []
            waiting = threading.Thread(target=lambda: results.append(batcher.run(sample(1, seed=3))))
            waiting.start()
            until(lambda: batcher.stats().queued == 3)
        for seed, future in enumerate(futures):
            check(sample(1, seed=seed), future.result(20))
        waiting.join(20)
        check(sample(1, seed=3), results[0])


def test_what_a_caller_gives_wrongly_is_its_own_error(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(Engine(cuda).engine) as session, Batcher(session, max_delay=HOUR, max_batch=4) as batcher:
        good = batcher.submit(sample(2, seed=1))
        x, k = sample(1)["x"], sample(1)["k"]
        for inputs, message in (
            ({"x": x}, "missing 'k'"),
            ({"x": x, "k": k, "z": k}, "unknown 'z'"),
            ([x, k], "names with arrays"),
            ({"x": x.astype(np.float64), "k": k}, "float64; the engine takes float32"),
            ({"x": x[0], "k": k}, "rank 1"),
            ({"x": x, "k": np.zeros(2, np.int32)}, "'x' 1, 'k' 2"),
            ({"x": x[:0], "k": k[:0]}, "at least 1"),
            ({"x": np.zeros((1, WIDE + 1), np.float32), "k": k}, "outside the engine's shapes"),
            (sample(5), "5 samples; a batch of this shape holds 4"),
            ({"x": "text", "k": k}, "'x' is <U4"),
        ):
            with pytest.raises(UsageError, match=message):
                batcher.submit(inputs)  # type: ignore[arg-type]
        on_gpu = OnGpu(session._gpus[0].device, x)
        with pytest.raises(UsageError, match="GPU memory"):
            batcher.run({"x": on_gpu, "k": k})
        rest = batcher.submit(sample(2, seed=2))
        check(sample(2, seed=1), good.result(20))
        check(sample(2, seed=2), rest.result(20))
        assert batcher.stats().samples == 4


def test_an_error_of_the_run_goes_to_the_whole_batch_and_no_further(cuda: FakeCuda, open_session: Open) -> None:
    engine = Engine(cuda)
    with open_session(engine.engine) as session, Batcher(session, max_delay=HOUR, max_batch=2) as batcher:
        engine.wrong = "the engine is on fire"
        futures = [batcher.submit(sample(1)) for _ in range(2)]
        errors = [future.exception(20) for future in futures]
        assert [str(error) for error in errors] == ["the engine is on fire"] * 2
        assert all(isinstance(error, EngineError) for error in errors)
        raised = in_threads(4, lambda seed: batcher.run(sample(seed=seed)))
        assert [str(error) for error in raised] == [engine.wrong] * 4
        engine.wrong = ""
        futures = [batcher.submit(sample(1, seed=seed)) for seed in range(2)]
        for seed, future in enumerate(futures):
            check(sample(1, seed=seed), future.result(20))


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ("y = Transpose<perm = [1, 0, 2]>(x)", lambda x: x.transpose(1, 0, 2)),
        ("shape = Constant<value_ints = [-1, 2]>() y = Reshape(x, shape)", lambda x: x.reshape(-1, 2)),
    ],
    ids=["time first", "rows"],
)
def test_each_request_gets_its_part_wherever_samples_lie(tmp_path: Path, nodes: str, wanted: Any) -> None:
    proto = written(f"(float[batch,3,2] x) => (float y) {{ {nodes} }}", 18)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "m.onnx")
    x = values(7, 3, 2)
    with (
        Session(tmp_path / "m.onnx", backend="onnxruntime") as session,
        Batcher(session, max_batch=8, max_delay="500ms") as batcher,
    ):
        parts = [batcher.submit({"x": part}) for part in (x[:1], x[1:4], x[4:])]
        for part, given in zip(parts, (x[:1], x[1:4], x[4:])):
            np.testing.assert_array_equal(part.result()["y"], wanted(given))
        assert batcher.stats().batches == 1


def test_arguments_that_cannot_be_right(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(Engine(cuda).engine) as session:
        for options, message in (
            ({"max_delay": "2 minutes"}, "`max_delay=` is '2 minutes'"),
            ({"max_delay": -1}, "`max_delay=` is -1"),
            ({"max_delay": float("nan")}, "`max_delay=` is nan"),
            ({"max_delay": None}, "`max_delay=` is NoneType; a text or a number is needed"),
            ({"max_batch": 33}, "at most 32"),
            ({"max_batch": 1.5}, "`max_batch=` is 1.5; a whole number is needed"),
            ({"max_batch": 0}, "max_batch is 0"),
            ({"max_queue": 0}, "max_queue is 0"),
            ({"slots": -1}, "slots is -1"),
            ({"max_delay": "5"}, "`max_delay=` is '5', .* a number with its unit, such as 2ms"),
        ):
            with pytest.raises(UsageError, match=message):
                Batcher(session, **options)  # type: ignore[arg-type]
    with open_session(adding_engine(cuda)) as session, pytest.raises(UsageError, match="'row' has shape 3"):
        Batcher(session)
    with pytest.raises(UsageError, match=r"`session=` is NoneType; a trtopt\.Session is needed"):
        Batcher(None)  # type: ignore[arg-type]
    assert threads() == []


def test_cancelled_requests_are_dropped(cuda: FakeCuda, open_session: Open) -> None:
    engine = Engine(cuda)
    with open_session(engine.engine) as session, Batcher(session, max_delay=HOUR, max_batch=2) as batcher:
        assert batcher.submit(sample(1, seed=1)).cancel()
        check(sample(1, seed=2), batcher.run(sample(1, seed=2)))
        for _ in range(2):
            assert batcher.submit(sample(1, 5)).cancel()  # nobody is left: nothing runs
    assert len(engine.ran) == 1
    assert batcher.stats().requests == 1


# The end ------------------------------------------------------------------------------------------------------------


def test_close_finishes_what_was_accepted_and_refuses_the_rest(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(Engine(cuda).engine) as session:
        batcher = Batcher(session, max_delay=HOUR)
        futures = [batcher.submit(sample(1, seed % 4 + 1, seed)) for seed in range(7)]
        batcher.close()
        assert threads() == []
        for seed, future in enumerate(futures):
            check(sample(1, seed % 4 + 1, seed), future.result(0))
        for call in (batcher.submit, batcher.run, lambda inputs: asyncio.run(batcher.run_async(inputs))):
            with pytest.raises(DeviceError, match=CLOSED):
                call(sample(1))
        batcher.close()
        slots: list[Any] = [
            slot for free in session._slots._free for slot in free
        ]  # what they hold is all that is left
        assert session.memory().pinned == sum(held.nbytes for slot in slots for held in slot.launcher.host.values())


def test_close_without_finishing_cancels(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(Engine(cuda).engine, contexts=1) as session:
        batcher = Batcher(session, max_delay=0, max_batch=1, max_queue=1, slots=1)
        refused: list[BaseException] = []

        def wait(call: Callable[..., Any], inputs: Any) -> threading.Thread:
            thread = threading.Thread(target=lambda: refused.extend(in_threads(1, lambda _: call(inputs))))
            thread.start()
            return thread

        with busy(session):
            runs = batcher.submit(sample(1, seed=1))
            until(lambda: batcher.stats().queued == 0)
            waits = batcher.submit(sample(1, seed=2))
            blocked = wait(batcher.submit, sample(1))
            until(lambda: batcher._held_up == 1)
            running = wait(batcher.run, sample(1))
            until(lambda: batcher.stats().queued == 2)
            closing = threading.Thread(target=batcher.close, args=(False,))
            closing.start()
            blocked.join(20)
            with pytest.raises(CancelledError):
                waits.result(20)
        closing.join(20)
        running.join(20)
        check(sample(1, seed=1), runs.result(0))
        assert [str(refused[0]), type(refused[1])] == [CLOSED, CancelledError]
        assert threads() == []


def test_a_closed_session_is_every_requests_error(cuda: FakeCuda, open_session: Open) -> None:
    session = open_session(Engine(cuda).engine)
    with Batcher(session, max_delay=HOUR, max_batch=2) as batcher:
        first = batcher.submit(sample(1))
        session.close()
        second = batcher.submit(sample(1))
        for future in (first, second):
            assert isinstance(future.exception(20), DeviceError)
        del future, first, second
    with pytest.raises(DeviceError, match="this session is closed"):
        Batcher(session)
    del batcher, session


def test_close_in_a_callback_does_not_wait_for_itself(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(Engine(cuda).engine) as session:
        batcher = Batcher(session, max_delay=HOUR)
        future, done = batcher.submit(sample(1)), threading.Event()

        def close(_: object) -> None:
            batcher.close()
            done.set()

        future.add_done_callback(close)
        for seed in range(31):  # now it is full
            batcher.submit(sample(seed=seed))
        assert done.wait(20)
        until(lambda: threads() == [])


def test_a_batcher_that_nobody_has_any_more_finishes_and_ends(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(Engine(cuda).engine) as session:
        batcher = Batcher(session, max_delay=0.1)
        future, gone = batcher.submit(sample(1, seed=3)), weakref.ref(batcher)
        del batcher
        check(sample(1, seed=3), future.result(20))
        until(lambda: gc.collect() >= 0 and gone() is None and threads() == [])


def test_a_process_that_closes_nothing_ends_and_finishes(tmp_path: Path) -> None:
    onnx.save(conv_relu(), tmp_path / "net.onnx")
    script = (
        "import numpy as np, sys, trtopt\n"
        "session = trtopt.Session(sys.argv[1], backend='onnxruntime')\n"
        "batcher = trtopt.Batcher(session, max_delay=0.5, max_batch=8)\n"
        "future = batcher.submit({'x': np.ones((1, 3, 8, 8), np.float32)})\n"
        "future.add_done_callback(lambda done: print(done.result()['y'].shape, flush=True))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "net.onnx")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "(1, 4, 8, 8)\n"), ended.stderr


# asyncio --------------------------------------------------------------------------------------------------------------


def test_asyncio_tasks_share_batches_and_wait_for_room_without_blocking(cuda: FakeCuda, open_session: Open) -> None:
    with (
        open_session(Engine(cuda).engine) as session,
        Batcher(session, max_delay="1ms", max_batch=4, max_queue=1) as batcher,
    ):

        async def one(seed: int) -> None:
            inputs = sample(1 + seed % 3, 3 + seed % 2, seed)
            check(inputs, await batcher.run_async(inputs))

        async def everything() -> None:
            await asyncio.wait_for(asyncio.gather(*map(one, range(100))), 30)
            with pytest.raises(UsageError, match="missing 'k'"):
                await batcher.run_async({"x": sample(1)["x"]})

        asyncio.run(everything())
        stats = batcher.stats()
        assert stats.requests == 100
        assert stats.batches < 100


def test_a_task_that_is_cancelled_leaves_no_trace(cuda: FakeCuda, open_session: Open) -> None:
    engine = Engine(cuda)
    with (
        open_session(engine.engine, contexts=1) as session,
        Batcher(session, max_delay=0, max_batch=1, max_queue=1, slots=1) as batcher,
    ):

        async def cancel() -> None:
            with busy(session):
                tasks = [asyncio.create_task(batcher.run_async(sample(1, seed=seed))) for seed in range(4)]
                while batcher.stats().queued != 3:  # one runs, one has rows, two wait for room
                    await asyncio.sleep(0.001)
                for task in tasks[1:3]:
                    task.cancel()
                await asyncio.wait(tasks[1:3])
                assert all(task.cancelled() for task in tasks[1:3])
            check(sample(1, seed=0), await asyncio.wait_for(tasks[0], 20))
            check(sample(1, seed=3), await asyncio.wait_for(tasks[3], 20))

        asyncio.run(cancel())
        assert [list(ran) for ran in engine.ran] == [[0], [3]]
