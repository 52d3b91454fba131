"""Bound the magnitudes of tensors by those that others were seen to have, node by node.

What weights make of a tensor is bounded by all their products with its largest magnitude at once, which is often ten times what
occurs. Most tensors are still shown to stay far from FP16's end that way, and needn't be measured for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trtopt.graph.half import has_half
from trtopt.graph.op_types import SIGMOIDS
from trtopt.graph.proto import STANDARD, attribute, to_array

_ROUNDING = 0.05  # more than FP32 adds to a sum of 100,000 products, in whatever order
_COMBINED: dict[str, Callable[[list[float]], float]] = {"Add": sum, "Clip": max, "Concat": max, "Mul": math.prod}
# What they give is no larger than what they read first.
_WITHIN = (
    "AveragePool", "Dropout", "Flatten", "Gather", "GlobalAveragePool", "GlobalMaxPool", "HardSwish", "Identity", "MaxPool",
    "ReduceMean", "Relu", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip


def bounds(proto: ModelProto, measured: Mapping[str, float]) -> dict[str, float]:
    """Tensor → a finite magnitude that none of its values passes, of those that this is known of.

    Args:
        proto: a model; of one that holds FP16 or BF16 nothing is known but what was seen.
        measured: tensor → its largest magnitude in some runs, for which the bounds hold.
    """
    known = dict(measured)
    if has_half(proto):
        return known
    constants = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    for node in proto.graph.node:
        unknown = [name for name in node.output if name not in known] if node.domain in STANDARD else []
        if unknown and math.isfinite(largest := _largest(node, known, constants)):
            known.update(dict.fromkeys(unknown, largest))
    return known


def _largest(node: NodeProto, known: Mapping[str, float], constants: Mapping[str, TensorProto]) -> float:
    """Bound what a node gives; infinite: nothing is known of it."""
    op = node.op_type
    if op in _WITHIN:
        return known.get(node.input[0], math.inf)
    if op in (*SIGMOIDS, "Softmax"):
        return 1.0
    if op in ("Conv", "Gemm", "MatMul"):
        return _weighted(node, known, constants)
    if op not in _COMBINED or (op == "Clip" and len(node.input) < 3):
        return math.inf
    read = [
        float(np.abs(to_array(constants[name])).max(initial=0.0)) if name in constants else known.get(name, math.inf)
        for name in node.input[op == "Clip" :]
    ]
    return _COMBINED[op](read)


def _weighted(node: NodeProto, known: Mapping[str, float], constants: Mapping[str, TensorProto]) -> float:
    """Bound a convolution or matrix product with constant weights."""
    names = [name for name in node.input[1:] if name]
    if node.input[0] not in known or any(name not in constants for name in names):
        return math.inf
    weights, *bias = (np.abs(to_array(constants[name])) for name in names)
    if node.op_type == "Conv":
        axes = tuple(range(1, weights.ndim))
    elif node.op_type == "MatMul":
        axes = (max(0, weights.ndim - 2),)
    elif attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0:
        axes = (1 if attribute(node, "transB", 0) else 0,)
    else:
        return math.inf
    most = weights.sum(axes, np.float64) * known[node.input[0]] + sum(bias)
    return float(most.max()) * (1 + _ROUNDING)
