"""GPUs for job lists with device = "cuda": which there are, and the environment in which a worker sees its own one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trtopt.calibration.observe import require_gpu_provider
from trtopt.core.errors import DeviceError
from trtopt.cuda.device import probe

VISIBLE = "CUDA_VISIBLE_DEVICES"
HOST_MEMORY = 3 << 30  # bytes: ONNX Runtime with CUDA, before a model is loaded


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use.

    Attributes:
        names: of each.
        identity: what values counted on them depend on (`require_gpu_provider`).
        device: its name in a process that sees one of them alone.
    """

    names: tuple[str, ...]
    identity: Mapping[str, str]
    device: str = "cuda"

    def places(self) -> list[dict[str, str]]:
        """For each GPU the environment in which a process sees that one alone."""
        return places(len(self.names))


def places(count: int) -> list[dict[str, str]]:
    """For each of so many GPUs the environment in which a process sees that one alone."""
    visible = [item.strip() for item in os.environ.get(VISIBLE, "").split(",") if item.strip()]
    numbers = visible if len(visible) >= count else [str(number) for number in range(count)]
    return [{VISIBLE: name} for name in numbers[:count]]


def find_gpus() -> Gpus:
    """Asked in a process of its own, as it makes a CUDA context.

    Raises:
        MissingDependency: ONNX Runtime isn't installed.
        DeviceError: ONNX Runtime can use no GPU, or there are several kinds, whose values differ in their last bits.
    """
    identity, names = require_gpu_provider(), tuple(device.name for device in probe().devices)
    if len(set(names)) > 1:
        listed = ", ".join(f"{number}: {name}" for number, name in enumerate(names))
        raise DeviceError(
            f"the GPUs are of different kinds ({listed}), whose tables differ in their last bits: name those of one kind "
            f"in {VISIBLE}"
        )
    return Gpus(names, identity)
