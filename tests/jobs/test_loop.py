from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from trtopt.core.errors import CalibrationError, WorkerDied
from trtopt.jobs.loop import FINISH, OBSERVE, OPEN, Call, Loop, Memory, result_of

GIB = 1 << 30


class Bench:
    """Calls that are done at once, in a loop that they are written down by."""

    def __init__(self, slots: int = 2, memory: int | None = None) -> None:
        self.loop = Loop(slots, Memory(lambda: memory))
        self.started: list[str] = []
        self.ended: list[tuple[str, Any]] = []
        self.most = self.now = 0

    def add(
        self,
        name: str,
        priority: int = OBSERVE,
        *,
        outcomes: tuple[Any, ...] = (None,),
        need: int = 0,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        waiting = list(outcomes)

        def start() -> Future[Any]:
            begin()
            self.started.append(name)
            self.now += 1
            self.most = max(self.most, self.now)
            future: Future[Any] = Future()
            value = waiting.pop(0)
            if isinstance(value, BaseException):
                future.set_exception(value)
            else:
                future.set_result(value)
            return future

        async def steps() -> None:
            try:
                value = await result_of(Call(priority, start, lambda: need))
                self.now -= 1
                if callable(value):
                    value()
                self.ended.append((name, "done"))
            except Exception as error:
                self.ended.append((name, str(error)))

        self.loop.add(steps())


def test_priorities_first_then_the_order_given() -> None:
    bench = Bench(slots=1)
    for name, priority in (("a", OPEN), ("b", OBSERVE), ("c", FINISH), ("d", OBSERVE)):
        bench.add(name, priority)
    bench.loop.run()
    assert bench.started == ["c", "b", "d", "a"]


def test_no_more_at_a_time_than_slots_and_memory_allow() -> None:
    bench = Bench(slots=3)
    for name in "abcdefgh":
        bench.add(name, need=GIB)
    bench.loop.run()
    assert (len(bench.ended), bench.most) == (8, 3)
    short = Bench(slots=3, memory=int(2.5 * GIB))
    for name in "abcdefgh":
        short.add(name, need=GIB)
    short.loop.run()
    assert (len(short.ended), short.most) == (8, 2)
    assert short.loop.memory.in_use == 0


def test_what_never_fits_runs_alone() -> None:
    bench = Bench(slots=3, memory=GIB)
    for name in "abc":
        bench.add(name, need=5 * GIB)
    bench.loop.run()
    assert (len(bench.ended), bench.most) == (3, 1)


def test_memory_is_estimated_then_measured() -> None:
    memory = Memory(lambda: GIB)
    before = memory.need("model", 100 << 20)
    assert before > 3 * (100 << 20)
    assert memory.need("model", 100 << 20, unmeasured=GIB) == before + GIB
    memory.measured("model", 5000)
    assert memory.need("model", 100 << 20) == memory.need("model", 100 << 20, unmeasured=GIB) == 5000
    memory.measured("model", 4000)
    assert memory.need("model", 100 << 20) == 5000
    assert memory.need("another", 100 << 20) == before


def test_a_failure_is_the_calls_own() -> None:
    bench = Bench()
    bench.add("a", outcomes=(CalibrationError("constant"),))
    bench.add("b")
    bench.add("c", outcomes=(ValueError("odd"),))

    def refuse() -> None:
        raise CalibrationError("other versions")

    bench.add("d", outcomes=(refuse,))
    bench.add("e", outcomes=(lambda: {}["what"],))
    bench.loop.run()
    assert sorted(bench.ended) == [
        ("a", "constant"),
        ("b", "done"),
        ("c", "odd"),
        ("d", "other versions"),
        ("e", "'what'"),
    ]


def test_a_lost_worker_is_replaced_once() -> None:
    bench = Bench()
    bench.add("a", outcomes=(WorkerDied("killed"), None))
    bench.add("b", outcomes=(WorkerDied("killed"), WorkerDied("killed again"), None))
    bench.loop.run()
    assert sorted(bench.started) == ["a", "a", "b", "b"]
    assert sorted(bench.ended) == [("a", "done"), ("b", "killed again")]


def test_what_nobody_needs_any_more_is_passed_over() -> None:
    bench = Bench(slots=1)

    def unless_over() -> None:
        if bench.ended:
            raise CalibrationError("nobody needs it")

    bench.add("a", outcomes=(CalibrationError("bad"),))
    bench.add("b", begin=unless_over)
    bench.loop.run()
    assert bench.started == ["a"]
    assert bench.ended == [("a", "bad"), ("b", "nobody needs it")]


def test_steps_may_add_steps_and_an_interrupt_ends_the_loop() -> None:
    bench = Bench()
    bench.add("a", outcomes=(lambda: bench.add("b"),))
    bench.loop.run()
    assert bench.started == ["a", "b"]

    def interrupt() -> None:
        raise KeyboardInterrupt

    bench.add("c", outcomes=(interrupt,))
    with pytest.raises(KeyboardInterrupt):
        bench.loop.run()
    bench.add("d", outcomes=(KeyboardInterrupt(),))
    with pytest.raises(KeyboardInterrupt):
        bench.loop.run()
