"""How long each layer of an engine takes, as TensorRT's own profiler tells."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtopt.core.values import LayerInfo, Precision, x
from trtopt.cuda.tensors import Shape
from trtopt.runtime.contexts import Source
from trtopt.runtime.slot import Slot
from trtopt.runtime.timing import Spread, run_once, time_slot
from trtopt.trt.plans import LoadedEngine


@dataclass(frozen=True)
class LayerTime:
    """One layer of the engine; of a fused one `nodes` are all that it computes.

    Attributes:
        ms: median over the inferences; low, high: the fastest and the slowest of them.
        kind: "convolution", "deconvolution", "matmul" or "other"; precision: it computes in; None: not known.
        nodes: of the ONNX graph.
    """

    name: str
    ms: float
    low: float
    high: float
    kind: str = "other"
    precision: Precision | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerTimes:
    """An engine's layers in the order that they run in.

    Attributes:
        shapes: input → "32x3x224x224".
        gpu: the whole inference between CUDA events, without the profiler. The layers' times add up to more: with a profiler
            they run one by one, each between two events, and not as a CUDA graph.
    """

    shapes: Mapping[str, str]
    layers: tuple[LayerTime, ...]
    gpu: Spread
    iterations: int

    @property
    def total_ms(self) -> float:
        """What the layers' times add up to."""
        return sum(layer.ms for layer in self.layers)


def profile_slot(
    slot: Slot,
    engine: LoadedEngine,
    arrays: Sequence[Source],
    shapes: tuple[Shape, ...],
    layer_infos: Sequence[LayerInfo],
    iterations: int,
    warmup: int,
) -> LayerTimes:
    """Time each layer on `arrays`.

    Args:
        slot: one that nothing else uses, now or later: its context keeps the profiler.
        layer_infos: what the manifest says of the layers.
    """
    whole = time_slot(slot, arrays, shapes, iterations, warmup)
    bound_context, locations = run_once(slot, arrays, shapes)
    times: dict[str, float] = {}

    def note(name: str, milliseconds: float) -> None:
        times[name] = times.get(name, 0.0) + milliseconds  # of a loop's body, each time that it ran

    runs: list[dict[str, float]] = []
    bound_context.context.profiler = profiler = engine.profiler(note)
    for number in range(warmup + iterations):
        times.clear()
        slot.contexts.enqueue(bound_context, arrays, locations, slot.stream_ptr)
        slot.stream.synchronize()
        if number >= warmup:
            runs.append(dict(times))
    del profiler
    by_name = {layer.name: layer for layer in layer_infos}
    layers = []
    for name in dict.fromkeys(name for run in runs for name in run):
        each, info = [run.get(name, 0.0) for run in runs], by_name.get(name)
        kind, precision, nodes = (info.kind, info.precision, info.nodes) if info else ("other", None, ())
        layers.append(LayerTime(name, statistics.median(each), min(each), max(each), kind, precision, nodes))
    shapes_text = {tensor.name: x(shape) for tensor, shape in zip(slot.signature.inputs, shapes)}
    return LayerTimes(shapes_text, tuple(layers), whole.gpu, iterations)
