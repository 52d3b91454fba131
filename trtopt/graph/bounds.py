"""Bound the values of tensors by what others were seen to hold: interval arithmetic, node by node.

What weights make of a tensor is bounded by all their products with its ends at once, which is often ten times what occurs. Most
tensors are still shown to stay far from FP16's end that way, and needn't be measured for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trtopt.graph.half import has_half
from trtopt.graph.proto import STANDARD, attribute, to_array

Interval = tuple[float, float]  # the least and the greatest value, or zero where that lies beyond them
_Constants = Mapping[str, TensorProto]
_ROUNDING = 0.05  # of the larger end: more than FP32 adds to a sum of 100,000 products, in whatever order
# What they give lies between the ends of what they read first.
_WITHIN = (
    "AveragePool", "Dropout", "Flatten", "Gather", "GlobalAveragePool", "GlobalMaxPool", "HardSwish", "Identity", "MaxPool",
    "ReduceMean", "Relu", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip


def bounds(proto: ModelProto, measured: Mapping[str, Interval]) -> dict[str, Interval]:
    """Tensor → two finite values that all of its values lie between, of those that this is known of.

    Args:
        proto: a model; of one that holds FP16 or BF16 nothing is known but what was seen.
        measured: tensor → its least and greatest value in some runs, for which the bounds hold.
    """
    intervals = {name: _with_zero(*ends) for name, ends in measured.items()}
    if has_half(proto):
        return intervals
    constants = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    for node in proto.graph.node:
        if node.domain not in STANDARD or all(name in intervals for name in node.output):
            continue
        interval = _result(node, intervals, constants)
        if interval is not None and all(map(math.isfinite, interval)):
            for name in node.output:
                intervals.setdefault(name, _with_zero(*interval))
    return intervals


def _with_zero(low: float, high: float) -> Interval:
    """Extend an interval to include zero, which padding adds."""
    return min(low, 0.0), max(high, 0.0)


def _result(node: NodeProto, intervals: Mapping[str, Interval], constants: _Constants) -> Interval | None:
    """Bound what a node gives; None: nothing is known of it."""
    op = node.op_type
    if op in _WITHIN:
        return intervals.get(node.input[0])
    if op in ("HardSigmoid", "Sigmoid", "Softmax"):
        return 0.0, 1.0
    if op in ("Conv", "Gemm", "MatMul"):
        return _weighted(node, intervals, constants)
    if op not in ("Add", "Clip", "Concat", "Mul"):
        return None
    ends = []
    for name in node.input[op == "Clip" :]:
        found = intervals.get(name)
        if name in constants and (array := to_array(constants[name])).size:
            found = float(array.min()), float(array.max())
        if found is None:
            return None
        ends.append(found)
    if op == "Clip":
        return (ends[0][0], ends[1][1]) if len(ends) == 2 else None
    if op == "Mul":
        products = [one * other for one in ends[0] for other in ends[1]]
        return min(products), max(products)
    lows, highs = zip(*ends)
    return (sum(lows), sum(highs)) if op == "Add" else (min(lows), max(highs))


def _weighted(node: NodeProto, intervals: Mapping[str, Interval], constants: _Constants) -> Interval | None:
    """Bound a convolution or matrix product with constant weights, positive and negative ones of each output apart."""
    data, names = intervals.get(node.input[0]), [name for name in node.input[1:] if name]
    if data is None or any(name not in constants for name in names):
        return None
    weights, *bias = (to_array(constants[name]) for name in names)
    if node.op_type == "Conv":
        axes = tuple(range(1, weights.ndim))
    elif node.op_type == "MatMul":
        axes = (max(0, weights.ndim - 2),)
    elif attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0:
        axes = (1 if attribute(node, "transB", 0) else 0,)
    else:
        return None
    positive = np.maximum(weights, 0).sum(axes, np.float64)
    negative = weights.sum(axes, np.float64) - positive
    low = float((positive * data[0] + negative * data[1] + sum(bias)).min())
    high = float((positive * data[1] + negative * data[0] + sum(bias)).max())
    rounding = _ROUNDING * max(high, -low)
    return low - rounding, high + rounding
