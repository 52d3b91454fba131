"""The context cache: execution contexts with their shapes set, and the CUDA graphs captured from them.

Every shape that comes again gets an execution context of its own, which never changes its shape, and CUDA graphs captured
from it: a graph may refer to what its context keeps for the shape. The contexts of a slot never run at the same time, so
they share one block of scratch memory (TensorRT allows that). Shapes seen for the first time run on one fallback context by a
plain enqueue, which TensorRT needs before a capture anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from trtopt.cuda.tensors import check_array
from trtopt.runtime.gpu_engine import GpuEngine
from trtopt.runtime.launcher import BoundContext, Key, Launcher
from trtopt.runtime.layout import DEVICE, PINNED, Locations, Source
from trtopt.runtime.stretch import Replay

_REMEMBERED = 64  # shapes and locations seen once
_MIN_IDLE_CALLS = 16  # calls for each shape or graph that is kept, before one of them makes room for another
_GRAPHS = 4  # for each shape, on average


class ContextCache:
    """The contexts of one slot; the fallback only where several can't share a profile. It counts calls, and `evictions`:
    contexts and graphs that were replaced."""

    def __init__(self, engine: GpuEngine, launcher: Launcher) -> None:
        self._device, self._signature, self._launcher = engine.device, engine.signature, launcher
        self._shares, self._reads_shapes = engine.shares, launcher.reads_shapes
        self._recent_keys: OrderedDict[Key, None] = OrderedDict()
        self._contexts: dict[Key, BoundContext] = {}
        self._most_contexts, self._most_graphs = engine.graphs, _GRAPHS * engine.graphs
        self._full = 0  # calls: until then no graph can go, so none is looked for: that takes long beside a call
        self._fallback: BoundContext | None = launcher.context()
        self.calls = self.evictions = 0

    def bind(self, arrays: Sequence[Source]) -> BoundContext:
        """Return a context set up for the shapes of these arrays, and for values that give shapes."""
        for tensor, array in zip(self._signature.inputs, arrays):
            if array.dtype != tensor.dtype:  # ranks and shapes are checked where they are new
                check_array(tensor, array)
        shapes = tuple([array.shape for array in arrays])
        values: tuple[bytes, ...] = ()
        if self._reads_shapes:
            pairs = zip(self._signature.inputs, arrays)
            values = tuple(np.asarray(array).tobytes() for tensor, array in pairs if tensor.on_host)
        key = shapes, values
        bound_context = self._contexts.get(key)
        self.calls += 1
        if bound_context is None or bound_context.key is None or bound_context.epoch != self._launcher.epoch:
            for tensor, array in zip(self._signature.inputs, arrays):
                check_array(tensor, array)
            self._signature.profile(shapes)
            bound_context = bound_context or self._another(key)
            if bound_context.key != key or bound_context.epoch != self._launcher.epoch:
                self._set_up(bound_context, key, arrays)
        bound_context.last_use = self.calls
        return bound_context

    def _set_up(self, bound_context: BoundContext, key: Key, arrays: Sequence[Source]) -> None:
        """Set a context up; graphs of all that refer to memory which moved meanwhile go."""
        before, self._full = self._launcher.epoch, 0
        try:
            self._launcher.set_up(bound_context, key, arrays)
        finally:
            if self._launcher.epoch != before:
                for other in self._contexts.values():
                    other.forget_graphs()

    def _another(self, key: Key) -> BoundContext:
        """Return the fallback; or, for a shape that comes again, one that stays with it."""
        again = key in self._recent_keys or not self._signature.dynamic
        self._recent_keys[key] = None
        self._recent_keys.move_to_end(key)
        if len(self._recent_keys) > _REMEMBERED:
            self._recent_keys.popitem(last=False)
        cached = [(item.last_use, self._contexts, key) for key, item in self._contexts.items()]
        may_stay = again and self._shares and self._most_contexts
        if may_stay and self._makes_room(self._most_contexts, cached):
            bound_context, self._fallback = self._fallback, None
            if bound_context is None or bound_context.key not in (key, None):  # the fallback serves another shape
                bound_context, self._fallback = self._launcher.context(), bound_context
            self._contexts[key] = bound_context
            return bound_context
        if self._fallback is None:
            self._fallback = self._launcher.context()
        return self._fallback

    def _makes_room(self, most: int, kept: list[tuple[int, dict[Any, Any], Any]]) -> bool:
        """Make room for one more context or graph: of more than `most`, the one used longest ago goes; of each `kept` are known
        the number of the call that used it last, the dict that it is in, and its key there.

        But one that was used in the last 16 calls for each that is kept stays, and there is no room: where more shapes take
        turns than there is room for, replacing them all the time would cost more than it gains.
        """
        if len(kept) >= most:
            last_call, cache, key = min(kept, key=lambda item: item[0])
            if self.calls - last_call < _MIN_IDLE_CALLS * most:
                return False
            self._device.synchronize()  # it may still run, on a stream of the caller's too
            item = cache.pop(key)
            if isinstance(item, Replay):
                item.graph.free()
            else:
                item.forget_graphs()
                self._full = 0
            self.evictions += 1
        return True

    def all(self) -> list[BoundContext]:
        """Return the contexts that are kept. Any thread may ask."""
        return [*list(self._contexts.values()), *([fallback] if (fallback := self._fallback) else [])]

    def replay(self, bound_context: BoundContext, locations: Locations) -> Replay | None:
        """Return the CUDA graph for these locations; a new one, if they are worth it and there is room."""
        if (replay := bound_context.graphs.get(locations)) is not None:
            replay.last_use = self.calls
            return replay
        full = self.calls < self._full
        if full or locations in bound_context.graphs or not self._worth(bound_context, locations):
            return None
        cached = [
            (replay.last_use, other.graphs, key)
            for other in self._contexts.values()
            for key, replay in other.graphs.items()
            if replay is not None
        ]
        if not self._makes_room(self._most_graphs, cached):
            self._full = min(last_call for last_call, *_ in cached) + _MIN_IDLE_CALLS * self._most_graphs
            return None
        graph, _ = self._launcher.capture(bound_context, locations)
        replay = bound_context.graphs[locations] = None if graph is None else Replay(graph, self.calls)
        return replay

    def _worth(self, bound_context: BoundContext, locations: Locations) -> bool:
        """Return True to capture now: a shape that stays, run once before, at addresses that came before."""
        can = bound_context.warm and None not in bound_context.outputs and not self._launcher.loaded.captures_itself
        if not self._most_contexts or not can:
            return False
        foreign = any(place in (DEVICE, PINNED) for place, _ in locations)
        if not foreign or locations in bound_context.recent_locations:
            return bound_context is not self._fallback or not self._shares
        if len(bound_context.recent_locations) > _REMEMBERED:
            bound_context.recent_locations.clear()
        bound_context.recent_locations.add(locations)
        return False

    def close(self) -> None:
        """Let go of all contexts, none of which may run any more, and of the memory that they work in."""
        for bound_context in self.all():
            bound_context.forget_graphs()
            bound_context.context = None  # before what it points to
        self._contexts.clear()
        self._fallback = None
        self._launcher.close()
