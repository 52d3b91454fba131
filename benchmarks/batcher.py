"""What single-image callers get through trtopt.Batcher, beside large batches and beside calls of their own. One table.

    PYTHONPATH=. PY benchmarks/batcher.py ENGINE [--callers 64] [--batch 32] [--max-delay 2ms] [--slots N] [--contexts 16]
                                             [--seconds 2] [--rounds 5] [--backend auto]

ENGINE is a plan that takes batches of 1 to --batch (or, with --backend onnxruntime, what was kept beside it, or an ONNX file).
Needs trtopt with what runs ENGINE, and NumPy. Four ways take turns, --seconds each, in --rounds rounds after one that isn't
counted; every call takes ordinary arrays and gives arrays of its own:

    large      one thread, Session.run on batches of --batch
    alone      --callers threads, Session.run on one image each
    batcher    --callers threads, Batcher.run on one image each
    asyncio    --callers tasks of one event loop, Batcher.run_async on one image each

Images a second are the median of the rounds, latencies those of all calls. Exit status 1: the batcher's results aren't those of
the same images run alone (--tolerance, of the largest value).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trtopt

Inputs = dict[str, NDArray[Any]]


class Way:
    """One way to call, and what was measured of it."""

    def __init__(self, what: str, callers: int, images: int, call: Callable[[int], object] | None) -> None:
        self.what, self.callers, self.images, self.call = what, callers, images, call
        self.rates: list[float] = []
        self.latencies: list[float] = []

    def measure(self, seconds: float, counted: bool) -> None:
        latencies: list[list[float]] = [[] for _ in range(self.callers)]
        errors: list[BaseException] = []
        gate = threading.Barrier(self.callers + 1)

        def work(number: int) -> None:
            own, call = latencies[number], self.call
            assert call is not None
            gate.wait()
            try:
                end = time.perf_counter() + seconds
                while (start := time.perf_counter()) < end:
                    call(number)
                    own.append(time.perf_counter() - start)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(self.callers)]
        for thread in threads:
            thread.start()
        gate.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        self.note(latencies, time.perf_counter() - start, counted)
        if errors:
            raise errors[0]

    def note(self, latencies: list[list[float]], seconds: float, counted: bool) -> None:
        if counted:
            self.rates.append(self.images * sum(map(len, latencies)) / seconds)
            self.latencies += [latency for own in latencies for latency in own]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def row(self, large: Way, alone: Way) -> str:
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1e3
        ratios = f"{self.rate / large.rate:.3f}× | {self.rate / alone.rate:.3f}×"
        return f"| {self.what} | {self.rate:.0f} | {ratios} | {p50:.2f} | {p99:.2f} |"


class Tasks(Way):
    """Callers that are tasks of one event loop."""

    def __init__(self, what: str, callers: int, batcher: trtopt.Batcher, samples: list[Inputs]) -> None:
        super().__init__(what, callers, 1, None)
        self.batcher, self.samples = batcher, samples

    def measure(self, seconds: float, counted: bool) -> None:
        latencies: list[list[float]] = [[] for _ in range(self.callers)]

        async def work(number: int, end: float) -> None:
            while (start := time.perf_counter()) < end:
                await self.batcher.run_async(self.samples[number])
                latencies[number].append(time.perf_counter() - start)

        async def everybody() -> None:
            end = time.perf_counter() + seconds
            await asyncio.gather(*[work(number, end) for number in range(self.callers)])

        start = time.perf_counter()
        asyncio.run(everybody())
        self.note(latencies, time.perf_counter() - start, counted)


def made(session: trtopt.Session, samples: int, seed: int) -> Inputs:
    """Inputs of so many samples, in the shapes that the last profile is tuned for."""
    generator = np.random.default_rng(seed)
    inputs: Inputs = {}
    for tensor in session.inputs:
        shape = session.profiles[-1][tensor.name].opt[1:] if session.profiles else tensor.shape[1:]
        if any(not isinstance(size, int) or size < 1 for size in shape):
            raise SystemExit(f"input {tensor.name!r} has shape {tensor.shape}: give an engine, whose profiles say more")
        values = generator.standard_normal((samples, *map(int, shape)))
        inputs[tensor.name] = np.abs(values).astype(tensor.dtype)
    return inputs


def difference(session: trtopt.Session, batcher: trtopt.Batcher, samples: list[Inputs]) -> float:
    """The largest one between what images give alone and together, as a share of the output's largest value."""
    futures = [batcher.submit(sample) for sample in samples]
    largest = 0.0
    for sample, future in zip(samples, futures):
        together = future.result()
        for name, one in session.run(sample).items():
            scale = max(float(np.abs(one.astype(np.float64)).max(initial=0)), 1e-30)
            apart = np.abs(one.astype(np.float64) - together[name].astype(np.float64)).max(initial=0)
            largest = max(largest, float(apart) / scale)
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure trtopt's batcher.")
    parser.add_argument("engine")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-delay", default="2ms")
    parser.add_argument("--slots", type=int, help="default: two for each GPU")
    parser.add_argument("--contexts", type=int, default=16, help="of the session")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tolerance", type=float, default=0.02)
    given = parser.parse_args()
    if min(given.callers, given.batch, given.rounds) < 1 or given.seconds <= 0:
        parser.error("--callers, --batch, --rounds and --seconds are at least 1, and more than 0")
    session = trtopt.Session(given.engine, backend=given.backend, contexts=given.contexts)
    options = {"max_batch": given.batch, "slots": given.slots}
    with session, trtopt.Batcher(session, max_delay=given.max_delay, **options) as batcher:
        samples = [made(session, 1, seed) for seed in range(given.callers)]
        batch = made(session, given.batch, 0)
        size = 1
        while size <= given.batch:  # each size that the batcher runs
            batcher.run(made(session, size, 0))
            size *= 2
        apart = difference(session, batcher, samples)
        large = Way(
            f"one thread, batches of {given.batch}, Session.run", 1, given.batch, lambda number: session.run(batch)
        )
        alone = Way(
            f"{given.callers} threads, one image, Session.run",
            given.callers,
            1,
            lambda number: session.run(samples[number]),
        )
        through = Way(
            f"{given.callers} threads, one image, Batcher.run",
            given.callers,
            1,
            lambda number: batcher.run(samples[number]),
        )
        tasks = Tasks(f"{given.callers} tasks, one image, Batcher.run_async", given.callers, batcher, samples)
        ways = (large, alone, through, tasks)
        for turn in range(given.rounds + 1):
            for way in ways:
                way.measure(given.seconds if turn else min(given.seconds, 1.0), counted=turn > 0)
        print("| way | images/s | of large batches | of calls alone | p50, ms | p99, ms |\n|---|---|---|---|---|---|")
        for way in ways:
            print(way.row(large, alone))
        stats = batcher.stats()
        print(
            f"\nmax_delay {given.max_delay}, Python {sys.version.split()[0]}, NumPy {np.__version__}: batches of "
            f"{stats.mean_batch:.1f} on average, {stats.full} of {stats.batches} full; requests waited "
            f"{stats.mean_wait * 1e3:.2f} ms on average; results differ by {apart:.2g} of the largest value"
        )
    return int(not apart <= given.tolerance)


if __name__ == "__main__":
    sys.exit(main())
