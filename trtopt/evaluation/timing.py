"""Times of engines: in turns, at the shapes that their profiles are tuned for, and layer by layer."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from trtopt.core.values import Profile, TensorInfo, x
from trtopt.data.rebatch import Arrays, filled, laid_out, rebatched, samples_first
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.runtime.session import Session
from trtopt.runtime.timing import LayerTimes, in_turns
from trtopt.trt.layers import REGION

MADE_UP = "made-up inputs, good for speed only"
_ROUNDS = 7
_ROUND_MS = 150.0  # of one engine's GPU time in each round


@dataclass(frozen=True)
class Times:
    """GPU time of one inference at a profile's opt shapes, in milliseconds.

    Attributes:
        shapes: input → "32x3x224x224".
        gpu_ms: median of the rounds' medians.
    """

    shapes: Mapping[str, str]
    gpu_ms: Annotated[float, Meta(gt=1e-6, lt=1e9)]


def time_in_turns(
    sessions: Mapping[str, Session], samples: Iterable[Arrays]
) -> tuple[dict[str, tuple[Times, ...]], str]:
    """Times of engines with the same profiles, at the opt shapes of each, and what they were measured on: `samples` where they
    fit, elsewhere made-up inputs of the same shapes."""
    first = next(iter(sessions.values()))
    times: dict[str, list[Times]] = {name: [] for name in sessions}
    origins = set()
    for profile in first.profiles or ({},):
        inputs, origin = at_opt(first.inputs, profile, map(first.taken, samples))
        origins.add(origin)
        shapes = {name: x(array.shape) for name, array in inputs.items()}
        ways: dict[str, Callable[[], float]] = {}
        for name, session in sessions.items():
            trial = functools.partial(session.time, session.taken(inputs))
            count = int(np.clip(_ROUND_MS / max(trial(3, 3).gpu.median, 1e-4), 3, 200))
            ways[name] = lambda trial=trial, count=count: trial(count, 3).gpu.median  # type: ignore[misc]
        for name, medians in in_turns(ways, _ROUNDS, rounds=_ROUNDS).items():
            times[name].append(Times(shapes, statistics.median(medians)))
    return {name: tuple(each) for name, each in times.items()}, " and ".join(sorted(origins))


def tuned_infos(inputs: Sequence[TensorInfo], profile: Profile, size: int | None = None) -> list[TensorInfo]:
    """Return the inputs in the shapes that a profile is tuned for; of `size` samples, where that is given."""
    infos = []
    for info in inputs:
        sizes: Sequence[int | str] = profile[info.name].opt if info.name in profile else info.shape
        shape = [item if isinstance(item, int) and item >= 0 else 1 for item in sizes]
        if size is not None and shape and info.batch_axis is not None:
            shape[info.batch_axis] = size
        infos.append(replace(info, shape=tuple(shape)))
    return infos


def at_opt(
    inputs: Sequence[TensorInfo], profile: Profile, samples: Iterable[Arrays]
) -> tuple[dict[str, NDArray[Any]], str]:
    """Return one batch in the shapes that a profile is tuned for, of samples repeated as often as it takes."""
    infos = tuned_infos(inputs, profile)
    if infos and all(info.shape for info in infos):
        empty = {info.name: np.broadcast_to(0, info.sizes) for info in infos}
        batch_shapes = {name: array.shape for name, array in samples_first(empty, inputs).items()}
        fitting_samples = (
            item for item in samples if all(item[name].shape[1:] == size[1:] for name, size in batch_shapes.items())
        )
        batch = next(rebatched(fitting_samples, max(1, *(shape[0] for shape in batch_shapes.values()))), None)
        if batch is not None:
            whole = {name: filled({name: batch[name]}, size[0])[name] for name, size in batch_shapes.items()}
            return laid_out(whole, inputs), "real samples"
    return synthetic_inputs(infos, {}), MADE_UP


def layer_shares(
    sessions: Sequence[Session], samples: Iterable[Arrays], work: Mapping[str, int]
) -> list[dict[str, float]]:
    """Profile engines of one model, with the same profiles, at the opt shapes of each: node → its share of the first one's
    time, mean over the profiles. The nodes of a fused layer share its time by their `work`, multiply-accumulates."""
    runs = []
    for profile in sessions[0].profiles or ({},):
        inputs, _ = at_opt(sessions[0].inputs, profile, map(sessions[0].taken, samples))
        runs.append([session.profile(session.taken(inputs)) for session in sessions])
    totals = [run[0].total_ms for run in runs]
    shares = []
    for times in zip(*runs):
        each = [{node: ms / total for node, ms in by_node(item, work).items()} for item, total in zip(times, totals)]
        shares.append({node: statistics.fmean(item[node] for item in each) for node in each[0]})
    return shares


def by_node(times: LayerTimes, work: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of each node with products. The nodes of a layer share its time by their work, and those that no layer
    names share that of the layers with products, or whole regions, that name none."""
    shared = [([node for node in layer.nodes if work.get(node)], layer) for layer in times.layers]
    named_nodes = {node for nodes, _ in shared for node in nodes}
    whole = [layer for nodes, layer in shared if not nodes and (layer.kind != "other" or REGION in layer.name)]
    unnamed_nodes = [node for node in work if node not in named_nodes]
    milliseconds = dict.fromkeys(work, 0.0)
    for nodes, ms in [*((nodes, layer.ms) for nodes, layer in shared), (unnamed_nodes, sum(item.ms for item in whole))]:
        for node in nodes:
            milliseconds[node] += ms * work[node] / sum(work[other] for other in nodes)
    return milliseconds
