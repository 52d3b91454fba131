"""Measure what the tensors of a model hold on real samples: how large they get, and where they stop being finite.

Each sample runs alone on one thread, so that the figures are the same whatever the batches and the number of threads. Of a
model that holds FP16 or BF16 each result is looked at before it is rounded to its type as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from trtopt.core.host import cores, in_order
from trtopt.data.rebatch import Arrays
from trtopt.graph.half import EXACT, widen
from trtopt.graph.inputs import network_inputs
from trtopt.graph.passes.typed import FP16_MAX, MASK, SENTINEL, near_fp16_end
from trtopt.graph.proto import infer_shapes, to_array
from trtopt.ort.sessions import open_session, run_session

PURPOSE = "measuring ranges"
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class TensorRange:
    """The values seen of one tensor."""

    largest: float = 0.0  # magnitude of its finite values, but for those that mean minus infinity (`typed.MASK`)
    nonfinite: int = 0  # values that are NaN or infinite


def measure_ranges(
    proto: ModelProto, feeds: Iterable[Arrays], *, threads: int | None = None, but: Collection[str] = ()
) -> dict[str, TensorRange]:
    """Return the ranges of all floating tensors outside of bodies, inputs first, then in graph order.

    Args:
        proto: any model; one that holds FP16 or BF16 is widened (`trtopt.graph.half.widen`), and the largest magnitude of its
            tensors is that before rounding.
        feeds: the model's inputs, one run each; what a run gives is dropped before the thread's next.
        threads: runs at the same time; None: one per core.
        but: tensors to leave out. What only they need isn't computed, and nothing is run where no other is left.
    """
    wide = widen(proto)
    graph = infer_shapes(wide).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    nodes = [node for node in proto.graph.node if node.op_type != "Constant"]
    own = {name for node in nodes for name in node.output if name}
    own |= {f"{name}{EXACT}" for name in own} if wide is not proto else set()
    results = [name for node in wide.graph.node for name in node.output if name in own]
    # What has no known type is asked for as well: operators of other domains give floats, too.
    floating = [name for name in results if kinds.get(name, TensorProto.FLOAT) in (*_FLOATS, TensorProto.UNDEFINED)]
    names = [name for name in floating if name not in but]
    session = open_session(wide, outputs=names, threads=1, memory_pattern=False, purpose=PURPOSE) if names else None
    fed = [name for name, info in network_inputs(wide).items() if info.floating]
    inputs = [name for name in fed if name not in but]
    if not names and not inputs:
        return {}

    def run(feed: Arrays) -> dict[str, tuple[float, int]]:
        values = {} if session is None else run_session(session, names, feed)
        counts = {name: _counted(np.asarray(feed[name])) for name in inputs}
        for name in names:
            value = values.pop(name)  # freed as soon as it is counted
            if isinstance(value, np.ndarray) and value.dtype.kind == "f":
                counts[name] = _counted(value)
        return counts

    totals: dict[str, tuple[float, int]] = {}
    workers = threads or cores()
    for counts in in_order(run, feeds, workers, 2 * workers, "ranges"):
        for name, figures in counts.items():
            largest, nonfinite = totals.get(name, (0.0, 0))
            totals[name] = max(largest, figures[0]), nonfinite + figures[1]
    ranges = {}
    for name in (*inputs, *(name for node in nodes for name in node.output)):
        if name not in totals:
            continue
        largest, nonfinite = totals[name]
        ranges[name] = TensorRange(max(largest, totals.get(f"{name}{EXACT}", totals[name])[0]), nonfinite)
    return ranges


def not_finite(proto: ModelProto, ranges: Mapping[str, TensorRange]) -> dict[str, str]:
    """Node → what it gives, of those that give NaN or infinity where all that they read is finite."""
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    fp16 = any(tensor.data_type == TensorProto.FLOAT16 for tensor in proto.graph.initializer)
    reasons: dict[str, str] = {}
    for node in proto.graph.node:
        bad = [name for name in node.output if name in ranges and ranges[name].nonfinite]
        if not bad or any(ranges[name].nonfinite for name in node.input if name in ranges):
            continue
        held = [to_array(constants[name]) for name in node.input if name in constants]
        if all(np.isfinite(item.astype(np.float32)).all() for item in held if item.dtype.kind in "fV"):
            worst = ranges[bad[0]]
            what = f"{worst.nonfinite} values that aren't finite"
            if fp16 and worst.largest > FP16_MAX:
                what = f"{worst.largest:,.0f} > {FP16_MAX:,.0f}, FP16's largest number, and so {what}"
            reasons[node.name] = f"gives {what}"
    return reasons


def _counted(values: NDArray[Any]) -> tuple[float, int]:
    """The largest magnitude, and how many aren't finite."""
    if not values.size:
        return 0.0, 0
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    low, high, nonfinite = float(values.min()), float(values.max()), 0  # NaN if any value is
    if not (low > MASK and high < SENTINEL):
        finite = np.isfinite(values)
        nonfinite = int(values.size - np.count_nonzero(finite))
        values = values[finite & (values > MASK) & (values < SENTINEL)]
        low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    return max(0.0, high, -low), nonfinite


def beyond_fp16(ranges: Mapping[str, TensorRange]) -> dict[str, float]:
    """Tensor → its largest magnitude, of those that come near FP16's largest number, or go beyond (`typed.near_fp16_end`)."""
    return {name: item.largest for name, item in ranges.items() if near_fp16_end(item.largest)}
