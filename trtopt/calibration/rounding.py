"""Rounding a layer's weights so that its output keeps its values, instead of each weight its own.

The output's error has two parts. Its mean is known and goes into the bias (Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", ICCV 2019). What varies is e C eᵀ for each output channel, e the weights' rounding errors and
C the covariance of the layer's inputs; it is quadratic in the choice between the two neighbouring codes (Nagel et al., "Up or
Down? Adaptive Rounding for Post-Training Quantization", ICML 2020), and is lowered here by coordinate descent from nearest
rounding. C comes from few samples, so that its covariances are shrunk towards none and its variances kept (Ledoit and Wolf, "A
Well-Conditioned Estimator for Large-Dimensional Covariance Matrices", 2004; this target: Schäfer and Strimmer, 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from trtopt.graph.passes.repair import Repair, nearest
from trtopt.graph.proto import attribute

Floats = NDArray[np.float64]
# Of a layer's input rows, groups × rows × K, K the weights of an output channel: the sums of their products (groups × K × K),
# their sums (groups × K), and their number.
Moments = tuple[Floats, Floats, int]
_ROWS = 1024  # positions of one sample that are looked at; half as many as a channel has weights, if that is more
SHRINKAGE = 0.35  # of covariances, towards none: few samples show inputs going together that others don't
_DAMPING = 1e-4  # of the mean variance, added to each: what no sample moves counts a little
_SWEEPS = 6
_BLOCK = 64  # weights whose errors are brought to the others together


def unsupported(node: NodeProto, slot: int, axes: int) -> str:
    """Say why the weights of a node, which have so many axes, can't be rounded here; empty: they can."""
    if node.op_type == "Conv":
        return "it pads by auto_pad" if attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b"") else ""
    if node.op_type == "ConvTranspose":
        return "it is a transposed convolution, whose weights keep the nearest codes"
    if node.op_type not in ("Gemm", "MatMul") or slot != 1 or axes != 2:
        return "only convolutions, and matrix products with a matrix on the right, are rounded"
    if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
        return "it scales or transposes what it multiplies"
    return ""


def moments(node: NodeProto, shape: Sequence[int], given: NDArray[Any]) -> Moments:
    """Sum over what the layer multiplies with its weights, which have this shape, for one run: `given` is its input."""
    array = np.asarray(given, np.float32)
    if node.op_type == "Conv":
        rows = _patches(node, shape, array)
    else:
        rows = array.reshape(-1, array.shape[-1]).T[None]
        rows = rows[:, :, :: max(1, rows.shape[2] // max(_ROWS, rows.shape[1] // 2))]
    # So that sums don't depend on BLAS's threads as far as anybody could see.
    exact = np.ascontiguousarray(rows, np.float64).reshape(len(rows), rows.shape[1], -1)
    return np.matmul(exact, exact.transpose(0, 2, 1)), exact.sum(2), exact.shape[2]


def _patches(node: NodeProto, shape: Sequence[int], array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Groups × K × positions, as a view as far as that goes."""
    kernel, channels = shape[2:], shape[1]
    axes = len(kernel)
    strides, dilations = (attribute(node, name, [1] * axes) for name in ("strides", "dilations"))
    pads, groups = attribute(node, "pads", [0] * 2 * axes), attribute(node, "group", 1)
    padded = np.pad(array, [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:])]) if any(pads) else array
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilations)]
    # Typed for one axis alone in some of the NumPy versions that are supported.
    view: Any = np.lib.stride_tricks.sliding_window_view
    windows: NDArray[np.float32] = view(padded, spans, tuple(range(2, 2 + axes)))
    windows = windows[_stepped(strides, dilations)]
    size = int(np.prod(kernel)) * channels
    # Every so many positions along each axis: neighbours say much the same.
    positions = len(array) * int(np.prod(windows.shape[2 : 2 + axes]))
    step = max(1, round((positions / max(_ROWS, size // 2)) ** (1 / axes)))
    windows = windows[_stepped([step] * axes, [1] * axes)]
    shaped = windows.reshape(len(array), groups, channels, *windows.shape[2:])
    order = (1, 2, *range(3 + axes, 3 + 2 * axes), 0, *range(3, 3 + axes))  # the longest last, which is copied fastest
    rows: NDArray[np.float32] = shaped.transpose(order).reshape(groups, size, -1)
    return rows


def _stepped(strides: Sequence[int], dilations: Sequence[int]) -> tuple[slice, ...]:
    """An index into samples × channels × positions × windows."""
    return tuple(slice(None, None, step) for step in (1, 1, *strides, *dilations))


def rounded(node: NodeProto, weight: NDArray[np.float32], axis: int | None, moments: Moments, corrects: bool) -> Repair:
    """The weights' codes that lose least of the layer's output.

    Args:
        corrects: the bias takes the mean of the error; else the codes have to keep it small too.
    """
    codes, scale = nearest(weight, axis)
    channels_first = node.op_type == "Conv" or bool(attribute(node, "transB", 0))
    squares, sums, count = moments
    groups, size = sums.shape

    def rows(values: NDArray[np.generic]) -> Floats:
        """Groups × output channels of a group × K."""
        full = np.broadcast_to(values, weight.shape).astype(np.float64)
        return (full if channels_first else full.T).reshape(groups, -1, size)

    mean, second = sums / count, squares / count
    if corrects:
        second = second - mean[:, :, None] * mean[:, None, :]
    variance = np.einsum("gkk->gk", second)
    diagonal = SHRINKAGE * variance + _DAMPING * variance.mean(1)[:, None]
    second = (1 - SHRINKAGE) * second + diagonal[:, :, None] * np.eye(size)
    start, steps = rows(codes), rows(scale)[:, :, :1]
    exact = rows(weight)
    best = _descended(start, exact / steps, second)
    offsets = (best - start).astype(np.int8)
    offsets = offsets.reshape(weight.shape if channels_first else weight.shape[::-1])
    bias = None
    if corrects:
        error = np.einsum("gok,gk->go", best * steps - exact, mean)
        bias = np.asarray(-error.reshape(-1), np.float32)
    return Repair(np.ascontiguousarray(offsets if channels_first else offsets.T), bias)


def _descended(start: Floats, exact: Floats, second: Floats) -> Floats:
    """Codes after coordinate descent: each is the one below or above the exact weight, and those at the ends stay, since they
    give the scale.

    Args:
        exact: weights in codes, as `start`: groups × output channels of a group × K.
    """
    groups, channels, size = start.shape
    if groups > 1 and size > _BLOCK:
        each = (slice(number, number + 1) for number in range(groups))
        return np.concatenate([_descended(start[one], exact[one], second[one]) for one in each])
    group = np.repeat(np.arange(groups), channels)
    codes, exact = start.reshape(-1, size), exact.reshape(-1, size)
    errors = codes - exact
    slopes = np.matmul(errors.reshape(start.shape), second).reshape(errors.shape)
    half = np.einsum("gkk->gk", second)[group] * (0.5 + 1e-9)
    half[np.abs(codes) >= 127] = np.inf
    for _ in range(_SWEEPS):
        changed = False
        for first in range(0, size, _BLOCK):
            block = slice(first, first + _BLOCK)
            # A step to the other neighbour goes against the error: it gains where the slope along the error is steep enough.
            steep = (slopes[:, block] * np.sign(errors[:, block]) > half[:, block]).any(1)
            rows: Any = slice(None) if steep.all() else np.flatnonzero(steep)
            if not steep.any():
                continue
            own, wrong, enough = (np.array(item[rows, block].T, order="C") for item in (slopes, errors, half))
            near = second[:, block, block].transpose(1, 2, 0)
            near = near if groups == 1 else near[:, :, group[rows]]
            for index in range(len(own)):
                sign = np.sign(wrong[index])
                good = own[index] * sign > enough[index]
                if good.any():
                    move = sign * good
                    wrong[index] -= move
                    own[index + 1 :] -= near[index + 1 :, index] * move
            moved = wrong.T - errors[rows, block]
            errors[rows, block] = wrong.T
            if groups == 1:
                slopes[rows] += moved @ second[0, block]
            else:
                slopes[rows] += np.einsum("rj,rjk->rk", moved, second[group[rows], block])
            changed = True
        if not changed:
            break
    return np.asarray(np.rint(errors + exact)).reshape(start.shape)
