"""Copies and calls in a row that a thread does without Python's GIL: a whole call, by its CUDA graph, in one stretch.

A row is four words: a C function's address and up to three arguments, or what `_native.c` does itself: a copy (`COPY`, to,
from, bytes), or a comparison of what lies at an address. A stretch ends at the first row that gives something else than 0. Only
where the C extension is built (`AVAILABLE`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core import native
from trtopt.cuda.arrays import start
from trtopt.cuda.device import Graph
from trtopt.cuda.driver import Driver
from trtopt.runtime.layout import Layout

COPY, _SAME = 0, 1
_WIDTH, _TO, _SOURCE = 4, 1, 2  # words of a row, and of a copy's row

AVAILABLE = native.run is not None and native.hold is not None


class NativeCall:
    """Rows, done one after another; for one thread at a time. Their numbers, `words`, can be changed."""

    __slots__ = ("_at", "_count", "words")

    def __init__(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        self._count = len(rows)
        self.words = (ctypes.c_int64 * (_WIDTH * self._count))(*[word for row in rows for word in row])
        self._at = ctypes.addressof(self.words)

    def run_without_gil(self) -> int:
        """Do them. What the last one gave, an int32: 0, or why the rows behind it weren't done."""
        assert native.run is not None
        return native.run(self._at, self._count)

    def run_with_gil(self) -> int:
        """The same without letting the GIL go: for a launch, which takes less time than other threads may keep it."""
        assert native.hold is not None
        return native.hold(self._at, self._count)


# A call in one stretch or in two, and the words of the first and of the last where the addresses of the caller's arrays in
# host memory go: of inputs that are copied, and of outputs.
_Prepared = tuple[NativeCall, NativeCall, tuple[int, ...], tuple[int, ...]]
_MOST = 64  # kept of each graph


@dataclass(slots=True)
class Replay:
    """A CUDA graph of a call."""

    graph: Graph
    last_use: int = 0  # the number of the call that used it last
    # By the streams that come first, all of a call but where the caller's arrays in host memory lie.
    prepared: dict[tuple[int, ...], _Prepared] = field(default_factory=dict)


class Stretches:
    """Calls without the GIL, for the stream of one slot on the GPU whose context this is."""

    def __init__(self, driver: Driver, context: int, stream: int) -> None:
        self._driver, self._context, self._stream = driver, context, stream
        self._here = ctypes.c_int64()  # the thread's current context, where a stretch looks

    def fill(
        self, replay: Replay, landing: Sequence[NDArray[Any] | None], layout: Layout, *, one: bool = False
    ) -> tuple[NativeCall, NativeCall] | None:
        """Return the whole of a call in one stretch, twice; or, unless it is to be `one`, in two, where results are in GPU
        memory: the second waits. None where an array isn't contiguous. `landing` is the pinned memory of each output."""
        _, copies, results, streams = layout
        known = replay.prepared.get(streams)
        first, last, sources, targets = known or self._prepare(replay, landing, layout, one)
        for word, (_, source) in zip(sources, copies):
            if not source.flags.c_contiguous:
                return None
            first.words[word] = start(source)
        if targets:
            for word, target in zip(targets, [item for item in results if isinstance(item, np.ndarray)]):
                if not target.flags.c_contiguous:
                    return None
                last.words[word] = start(target)
        return first, last

    def _prepare(self, replay: Replay, landing: Sequence[NDArray[Any] | None], layout: Layout, one: bool) -> _Prepared:
        """Make a call with the graph but for where the caller's arrays in host memory lie. It fails before the launch if a
        stream that comes first has work left, or another device is current, whose default stream would be asked."""
        driver, here = self._driver, ctypes.addressof(self._here)
        _, copies, results, streams = layout
        rows = [(COPY, start(to), 0, to.nbytes) for to, _ in copies]
        sources = tuple(_WIDTH * row + _SOURCE for row in range(len(rows)))
        if streams:
            # Ends here unless that context is the current one.
            rows += [(driver.getting, here, 0, 0), (_SAME, here, self._context, 0)]
        rows += [(driver.querying, stream, 0, 0) for stream in streams]
        rows.append((driver.launching, replay.graph.handle, self._stream, 0))
        pairs = zip(results, landing)
        landings = [place for item, place in pairs if isinstance(item, np.ndarray) and place is not None]
        ends = [(driver.synchronizing, self._stream, 0, 0)]
        ends += [(COPY, 0, start(item), item.nbytes) for item in landings]
        one = one or len(landings) == len(results)
        first = NativeCall([*rows, *ends] if one else rows)
        last, before = (first, len(rows) + 1) if one else (NativeCall(ends), 1)
        if len(replay.prepared) >= _MOST:
            replay.prepared.clear()
        targets = tuple(_WIDTH * (before + row) + _TO for row in range(len(landings)))
        replay.prepared[streams] = prepared = first, last, sources, targets
        return prepared
