"""acme::deform: the sampling of multi-scale deformable attention (Zhu et al., Deformable DETR, 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import trtopt
from trtopt.core.nvidia_plugins import deformable_attention


def _shape(value: Any, places: Any, weights: Any, **_: Any) -> list[Any]:
    return [(places[0], places[1], value[2] * value[3])]


@trtopt.operator("acme::deform", shapes=_shape, types=("fp32", "fp16"), fp32_inputs=(1,), kernel="deform.cu")
def deform(
    value: NDArray[np.float32], places: NDArray[np.float32], weights: NDArray[np.float32], *, sizes: Any = (1, 1)
) -> NDArray[np.float32]:
    """Gather from levels of `sizes` (height, width, height, …): batch × queries × (heads · channels)."""
    levels = np.array(sizes).reshape(-1, 2)
    starts = np.cumsum([0, *levels.prod(1)])[:-1]
    return deformable_attention(value, levels, starts, places, weights).reshape(*places.shape[:2], -1)
