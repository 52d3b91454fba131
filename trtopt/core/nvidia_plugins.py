"""References of TensorRT's own plugins that models name as operators, after their published descriptions and kernels
(NVIDIA/TensorRT, folder plugin, release 10.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.operators import Operator

_Array = NDArray[np.float32]
_CANDIDATES = 5000  # best scores of an image that EfficientNMS looks at


def efficient_nms(
    boxes: _Array,
    scores: _Array,
    *,
    score_threshold: float,
    iou_threshold: float,
    max_output_boxes: int,
    background_class: int,
    score_activation: int,
    box_coding: int,
    class_agnostic: int = 0,
) -> tuple[NDArray[Any], ...]:
    """Return the number of detections (batch × 1), their corners (batch × most × 4), scores and classes (batch × most), zeros
    behind the last one. `boxes` are batch × boxes × 4, or one for each class; `scores` are batch × boxes × classes."""
    batch, _, classes = scores.shape
    boxes = boxes.reshape(batch, scores.shape[1], -1, 4).astype(np.float32)
    if box_coding:  # centre and size
        middle, half = boxes[..., :2], boxes[..., 2:] / 2
        boxes = np.concatenate([middle - half, middle + half], -1)
    least = score_threshold
    if score_activation:
        with np.errstate(divide="ignore"):
            least = float(np.log(score_threshold) - np.log1p(-score_threshold))
    counts = np.zeros((batch, 1), np.int32)
    corners = np.zeros((batch, max_output_boxes, 4), np.float32)
    best, kinds = np.zeros((batch, max_output_boxes), np.float32), np.zeros((batch, max_output_boxes), np.int32)
    for image in range(batch):
        flat = scores[image].reshape(-1).astype(np.float32)
        places = np.flatnonzero((flat >= least) & (np.arange(flat.size) % classes != background_class))
        places = places[np.argsort(-flat[places], kind="stable")][:_CANDIDATES]
        kind = places % classes
        candidates = boxes[image, places // classes, kind if boxes.shape[2] > 1 else 0]
        kept, left = list[int](), np.arange(len(places))
        while left.size and len(kept) < max_output_boxes:
            one, left = left[0], left[1:]
            kept.append(one)
            near = _overlap(candidates[left], candidates[one]) >= iou_threshold
            left = left[~near if class_agnostic else ~near | (kind[left] != kind[one])]
        counts[image], found = len(kept), np.s_[image, : len(kept)]
        corners[found], kinds[found], best[found] = candidates[kept], kind[kept], flat[places[kept]]
    if score_activation:
        best = np.where(np.arange(max_output_boxes) < counts, 1 / (1 + np.exp(-best)), 0).astype(np.float32)
    return counts, corners, best, kinds


def _overlap(boxes: _Array, one: _Array) -> _Array:
    """Intersection over union of each box with one, whichever corner comes first: only here are they put in order."""
    boxes = np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], -1)
    one = np.concatenate([np.minimum(one[:2], one[2:]), np.maximum(one[:2], one[2:])])
    sides = np.minimum(boxes[:, 2:], one[2:]) - np.maximum(boxes[:, :2], one[:2])
    shared = np.clip(sides, 0, None).prod(-1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(-1) + (one[2:] - one[:2]).prod() - shared
    return np.where((shared > 0) & (union > 0), shared / np.where(union > 0, union, 1), 0)


def deformable_attention(
    value: _Array, sizes: NDArray[Any], starts: NDArray[Any], places: _Array, weights: _Array
) -> _Array:
    """Return what queries gather of feature maps of several levels (Zhu et al., Deformable DETR, 2021, equation 3).

    Args:
        value: batch × all positions × heads × channels; sizes: height and width of each level; starts: where it begins.
        places: batch × queries × heads × levels × points × (x, y), from 0 to 1; weights: one for each of these points.

    Returns:
        batch × queries × heads × channels.
    """
    rows, queries, heads = places.shape[:3]
    result = np.zeros((rows, queries, heads, value.shape[-1]), np.float32)
    row, head = np.arange(rows)[:, None, None, None], np.arange(heads)[:, None]
    for level, ((height, width), start) in enumerate(zip(np.asarray(sizes).tolist(), np.asarray(starts).tolist())):
        grid = value[:, start : start + height * width].reshape(rows, height, width, heads, -1)
        x, y = (places[..., level, :, axis] * size - 0.5 for axis, size in enumerate((width, height)))
        left, top = np.floor(x), np.floor(y)
        for down in (0, 1):
            for right in (0, 1):
                column, line = left + right, top + down
                share = (1 - np.abs(x - column)) * (1 - np.abs(y - line)) * weights[..., level, :]
                inside = (column >= 0) & (column < width) & (line >= 0) & (line < height)
                column = np.clip(column, 0, width - 1).astype(int)
                line = np.clip(line, 0, height - 1).astype(int)
                found = grid[row, line, column, head] * np.where(inside, share, 0)[..., None]
                result += found.sum(3)
    return result


def group_normalization(x: _Array, scale: _Array, bias: _Array, *, eps: float = 1e-5, num_groups: int = 32) -> _Array:
    """Return the values of each group of channels with mean 0 and variance 1, times `scale` plus `bias` of their channel."""
    groups = x.reshape(len(x), num_groups, -1).astype(np.float32)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + eps)
    form = (1, -1, *[1] * (x.ndim - 2))
    result: _Array = normal.reshape(x.shape) * scale.reshape(form) + bias.reshape(form)
    return result


def _nms_shapes(boxes: Any, scores: Any, *_: Any, max_output_boxes: int, **__: Any) -> list[Any]:
    batch = boxes[0]
    return [(batch, 1), (batch, max_output_boxes, 4), (batch, max_output_boxes), (batch, max_output_boxes)]


def _attention_shapes(value: Any, sizes: Any, starts: Any, places: Any, weights: Any) -> list[Any]:
    return [(*places[:3], value[3])]


OPERATORS = {
    name: Operator(name, reference, shapes, outputs, ("fp32", "fp16"), source="trtopt 1")
    for name, reference, shapes, outputs in (
        ("EfficientNMS_TRT", efficient_nms, _nms_shapes, ("int32", "", "", "int32")),
        ("MultiscaleDeformableAttnPlugin_TRT", deformable_attention, _attention_shapes, ()),
        ("GroupNormalizationPlugin", group_normalization, lambda x, *_, **__: [x], ()),
    )
}
