"""Time an engine (GPU time between events, host time from launch to synchronized), its layers, and several ways in turns."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Described, converted
from trtopt.core.errors import UsageError
from trtopt.core.values import LayerInfo, Precision, x
from trtopt.cuda.device import Event
from trtopt.runtime.launcher import BoundContext
from trtopt.runtime.layout import DEVICE, PLAIN, RESIDENT, Locations
from trtopt.runtime.open_engine import OpenEngine
from trtopt.runtime.slot import Slot

T = TypeVar("T")
_QUEUED = 64  # timed launches in flight; far below the driver's queue, beyond which a launch would block


@dataclass(frozen=True)
class Spread:
    """Milliseconds over the iterations of one measurement."""

    median: float
    p90: float
    p99: float
    minimum: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Spread:
        p90, p99 = (float(value) for value in np.percentile(milliseconds, (90, 99)))
        return cls(statistics.median(milliseconds), p90, p99, min(milliseconds))


@dataclass(frozen=True)
class Timing(Described):
    """The time of one inference, without copies to and from the host: between CUDA events, with the next launches already
    queued, so the GPU never waits for the host (`gpu`); and from launch to synchronized, one at a time (`host`). Where no CUDA
    graph was replayed, `note` says why."""

    gpu: Spread
    host: Spread
    iterations: int
    cuda_graph: bool
    note: str = ""


@dataclass(frozen=True)
class LayerTime:
    """One layer of the engine: its median, fastest and slowest time, its kind ("convolution", "deconvolution", "matmul" or
    "other"), the precision it computes in (None: not known), and the ONNX nodes that it computes."""

    name: str
    ms: float
    low: float
    high: float
    kind: str = "other"
    precision: Precision | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerTimes:
    """An engine's layers in the order that they run in, on inputs of `shapes`; beside the whole inference's time (`gpu`).
    Theirs add up to more: with a profiler they run one by one, each between two events, and not as a CUDA graph."""

    shapes: Mapping[str, str]
    layers: tuple[LayerTime, ...]
    gpu: Spread
    iterations: int

    @property
    def total_ms(self) -> float:
        """The sum of the layers' times."""
        return sum(layer.ms for layer in self.layers)


def time_engine(engine: OpenEngine, inputs: Mapping[str, Any], iterations: int, warmup: int) -> Timing:
    """Measure inference as `Session.time`, which describes it."""
    arrays = _to_measure(engine, inputs, iterations, warmup)
    slot = engine._slots.take()
    try:
        assert isinstance(slot, Slot)
        with slot.device.current():
            return _time(slot, arrays, iterations, warmup)
    finally:
        engine._slots.give(slot)


def profile_engine(engine: OpenEngine, inputs: Mapping[str, Any], iterations: int, warmup: int) -> LayerTimes:
    """Measure each layer as `Session.profile`, which describes it, in a slot of its own: its context keeps the profiler."""
    arrays = _to_measure(engine, inputs, iterations, warmup)
    if not engine._gpus[0].shares:
        raise UsageError("this engine lets one context use its profile, so none can be profiled: build it with trtopt")
    infos = converted(list(engine.manifest.layers), tuple[LayerInfo, ...]) if engine.manifest else ()
    slot = Slot(engine._gpus[0])
    try:
        with slot.device.current():
            whole = _time(slot, arrays, iterations, warmup)
            runs = _profile(slot, arrays, iterations, warmup)
    finally:
        slot.close()
    by_name, layers = {layer.name: layer for layer in infos}, list[LayerTime]()
    for name in dict.fromkeys(name for run in runs for name in run):
        each, info = [run.get(name, 0.0) for run in runs], by_name.get(name)
        kind, precision, nodes = (info.kind, info.precision, info.nodes) if info else ("other", None, ())
        layers.append(LayerTime(name, statistics.median(each), min(each), max(each), kind, precision, nodes))
    shapes = {info.name: x(array.shape) for info, array in zip(engine.inputs, arrays)}
    return LayerTimes(shapes, tuple(layers), whole.gpu, iterations)


def _to_measure(engine: OpenEngine, inputs: Mapping[str, Any], iterations: int, warmup: int) -> list[NDArray[Any]]:
    if not (isinstance(iterations, int) and isinstance(warmup, int)) or iterations < 1 or warmup < 0:
        raise UsageError(f"iterations is {iterations!r} and warmup {warmup!r}; at least 1 and 0 are needed")
    engine._alive()
    if not engine._gpus:
        raise UsageError("times of an engine need a GPU; this session runs in ONNX Runtime")
    engine._signature.check_names(inputs)
    return [np.asarray(inputs[item.name]) for item in engine.inputs]


def _time(slot: Slot, arrays: Sequence[NDArray[Any]], iterations: int, warmup: int) -> Timing:
    """Measure inference alone on `arrays`, which are copied to the GPU once."""
    launch, note = _bare(slot, arrays)
    stream = slot.stream
    for _ in range(warmup):
        launch()
    stream.synchronize()
    events = [Event(slot.device) for _ in range(min(iterations, _QUEUED) + 1)]
    gpu: list[float] = []
    while len(gpu) < iterations:
        count = min(iterations - len(gpu), _QUEUED)
        stream.record(events[0])
        for event in events[1 : count + 1]:
            launch()
            stream.record(event)
        stream.synchronize()
        gpu += [events[i + 1].milliseconds_since(events[i]) for i in range(count)]
    host: list[float] = []
    for _ in range(iterations):
        start = time.perf_counter()
        launch()
        stream.synchronize()
        host.append((time.perf_counter() - start) * 1e3)
    return Timing(Spread.of(gpu), Spread.of(host), iterations, not note, note)


def _run_once(slot: Slot, arrays: Sequence[NDArray[Any]]) -> tuple[BoundContext, Locations]:
    """Copy the inputs in and run; what is bound then, and where each input and output is."""
    slot.wait_previous(None)
    bound_context = slot.contexts.bind(arrays)
    layout = slot.lay_out(bound_context, arrays, PLAIN)
    slot.give_inputs(layout, slot.stream_ptr)
    slot.launcher.enqueue(bound_context, layout[0], slot.stream_ptr)
    slot.stream.synchronize()
    return bound_context, layout[0]


def _bare(slot: Slot, arrays: Sequence[NDArray[Any]]) -> tuple[Callable[[], None], str]:
    """Copy the inputs in; return a function that launches the inference alone, and why it is no CUDA graph's, if it isn't."""
    bound_context, locations = _run_once(slot, arrays)
    inside = [location if location[0] == DEVICE else RESIDENT for location in locations[: len(arrays)]]
    for tensor, shape in zip(slot.signature.outputs, bound_context.outputs):
        inside.append(RESIDENT if shape is None else (DEVICE, slot.launcher.buffer(tensor).handle))
    graph, note = slot.launcher.capture(bound_context, tuple(inside))
    enqueue = functools.partial(slot.launcher.enqueue, bound_context, tuple(inside))
    return functools.partial(enqueue if graph is None else graph.launch, slot.stream_ptr), note


def _profile(slot: Slot, arrays: Sequence[NDArray[Any]], iterations: int, warmup: int) -> list[dict[str, float]]:
    """Return each layer's time in each run. The slot can't be used for anything else afterwards."""
    bound_context, locations = _run_once(slot, arrays)
    times: dict[str, float] = {}

    def note(name: str, milliseconds: float) -> None:
        times[name] = times.get(name, 0.0) + milliseconds  # of a loop's body, each time that it ran

    runs: list[dict[str, float]] = []
    bound_context.context.profiler = profiler = slot.launcher.loaded.profiler(note)
    for number in range(warmup + iterations):
        times.clear()
        slot.launcher.enqueue(bound_context, locations, slot.stream_ptr)
        slot.stream.synchronize()
        if number >= warmup:
            runs.append(dict(times))
    del profiler
    return runs


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Milliseconds of one call on the host's clock, and what it gave."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def in_turns(
    ways: Mapping[str, Callable[[], float]], count: int, *, rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Measure several ways of running a model, each by a function that gives milliseconds, in rounds, so that falling clocks or
    a busy machine meet each alike; every other round goes from the last to the first. `count` times each; fewer where they take
    longer than `seconds` in all, but once in each round.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        total = count * (number + 1) // rounds
        for name in list(ways)[:: -1 if number % 2 else 1]:
            end = time.perf_counter() + seconds / rounds
            while len(times[name]) < total:
                times[name].append(ways[name]())
                if time.perf_counter() > end:
                    break
    return times
