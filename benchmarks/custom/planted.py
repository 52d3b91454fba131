"""acme::planted: x times a gate of each sample and channel; its kernel has faults on demand (benchmarks/certify_planted)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import trtopt


@trtopt.operator("acme::planted", shapes=lambda x, *_, **__: [x], types=("fp32", "fp16"), kernel="planted.cu")
def planted(x: NDArray[np.float32], gate: NDArray[np.float32], *, fault: int = 0) -> Any:
    """x (N x C x …) times gate (N x C); `fault` is the kernel's alone."""
    return x * gate.reshape(*gate.shape, *[1] * (x.ndim - 2))
