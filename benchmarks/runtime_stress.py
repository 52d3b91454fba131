"""Many threads on one session: right results, wrong inputs, closing in between. Nothing may hang.

Every step has a watchdog: past its time the stacks of all threads go to stderr and the process ends with status 3.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mix = Sequence[tuple[NDArray[Any], NDArray[Any]]]  # inputs and their results


@contextlib.contextmanager
def watchdog(seconds: float, what: str, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End the process if the block takes longer; `before` shows what was found until then."""
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            print(f"{what}: not over after {seconds:.0f} s", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            with contextlib.suppress(Exception):
                before()
            sys.stdout.flush()
            os._exit(3)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass
class Outcome:
    """What threads saw, all together."""

    calls: int = 0
    wrong: int = 0
    worst: float = 0.0  # largest difference of a result from its reference, of the largest value
    refused: int = 0
    accepted: int = 0  # wrong inputs that weren't refused
    ended: int = 0  # calls that said that the session is closed
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        for name in ("calls", "wrong", "refused", "accepted", "ended"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = max(self.worst, other.worst)
        self.errors += other.errors

    @property
    def rate(self) -> float:
        return self.calls / self.seconds

    @property
    def right(self) -> bool:
        return not (self.wrong or self.accepted or self.errors)


class Load:
    """Calls of `session.run` with results compared, by several threads."""

    def __init__(self, session: Any, name: str, output: str, mix: Mix, closed: type[BaseException]) -> None:
        self.session, self.name, self.output, self.mix, self.closed = session, name, output, mix, closed
        self.bytes = [expected.tobytes() for _, expected in mix]

    def once(self, index: int, seen: Outcome) -> None:
        index %= len(self.mix)
        array, expected = self.mix[index]
        found = self.session.run({self.name: array})[self.output]
        seen.calls += 1
        # np.array_equal lets the GIL go twice, and takes longer.
        if found.shape != expected.shape or found.tobytes() != self.bytes[index]:
            seen.wrong += 1
            apart = np.abs(found - expected).max() if found.shape == expected.shape else np.inf
            seen.worst = max(seen.worst, float(apart / np.abs(expected).max()))

    def wrong(self, number: int, seen: Outcome) -> None:
        """One of several inputs that must be refused."""
        array = self.mix[0][0]
        bad: list[Mapping[str, Any]] = [
            {self.name: array.astype(np.float64)},
            {self.name: array[0]},
            {"nobody": array},
            {},
            {self.name: np.broadcast_to(np.uint8(0), (10_000, *array.shape[1:]))},
            {self.name: np.broadcast_to(array[:1], (10_000, *array.shape[1:]))},
        ]
        try:
            self.session.run(bad[number % len(bad)])
            seen.accepted += 1
        except Exception as error:
            if type(error).__name__ == "UsageError":
                seen.refused += 1
            else:
                raise

    def warm(self, count: int) -> Outcome:
        """Contexts made, graphs captured."""
        found = self.threads(count, 200)
        found.add(self.threads(count, 100))
        return found

    def threads(self, count: int, calls: int, *, together: bool = False, wrong_every: int = 0) -> Outcome:
        """`calls` in each of `count` threads.

        Args:
            together: whoever is free makes the next of all these calls, so that all threads have work to the end.
            wrong_every: wrong inputs before every so many right ones; 0: none.
        """
        total = Outcome()
        gate = threading.Barrier(count + 1)
        shared = iter(range(1, count * calls + 1))  # threads may take from it side by side: a step of it keeps the GIL

        def work(seed: int, seen: Outcome) -> None:
            order = list(range(len(self.mix)))
            random.Random(seed).shuffle(order)
            numbers = shared if together else iter(range(1, calls + 1))
            gate.wait()
            self._go_on(numbers, order, wrong_every, seen)

        outcomes = [Outcome() for _ in range(count)]
        workers = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(outcomes)]
        for worker in workers:
            worker.start()
        gate.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        total.seconds = time.perf_counter() - start
        for outcome in outcomes:
            total.add(outcome)
        return total

    def _go_on(self, numbers: Iterator[int], order: Sequence[int], wrong_every: int, seen: Outcome) -> None:
        """Call until the numbers are used up, or a call fails."""
        try:
            for number in numbers:
                if wrong_every and number % wrong_every == 0:
                    self.wrong(number // wrong_every, seen)
                self.once(order[number % len(order)], seen)
        except Exception as error:
            if isinstance(error, self.closed) and "closed" in str(error):
                seen.ended += 1
            else:
                seen.errors.append(f"{type(error).__name__}: {error}")

    def close_during(self, count: int, finish: bool) -> tuple[Outcome, float]:
        """Close while `count` threads call: what they saw, and how long closing took."""
        result: list[Outcome] = []
        runner = threading.Thread(target=lambda: result.append(self.threads(count, 1_000_000_000)), daemon=True)
        runner.start()
        time.sleep(0.3)
        start = time.perf_counter()
        self.session.close(finish)
        took = time.perf_counter() - start
        runner.join()
        return result[0], took


def references(run: Callable[[NDArray[Any]], NDArray[Any]], samples: NDArray[Any], most: int, each: int) -> Mix:
    """`each` different inputs of every batch size up to `most`, from `samples`, and their results, computed alone.

    Each is run until it gives the same twice, as the first calls of a shape may take another way.
    """
    mix = []
    starts = itertools.count()
    for _ in range(each):
        for size in range(1, most + 1):
            first = next(starts)
            array = np.ascontiguousarray(samples[(np.arange(size) + first) % len(samples)])
            results = [np.array(run(array)) for _ in range(3)]
            if not np.array_equal(results[1], results[2]):
                raise SystemExit(f"batch {size}: the same call gives different results, one thread alone")
            mix.append((array, results[2]))
    return mix
