"""GPUs for job lists with device = "cuda": which there are, and a worker's engine on its own one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onnx import ModelProto

from trtopt.calibration.observe import Engine
from trtopt.calibration.torch_engine import TorchEngine, engine_identity, gpu_names
from trtopt.core.errors import DeviceError

VISIBLE = "CUDA_VISIBLE_DEVICES"
HOST_MEMORY = 3 << 30  # bytes: PyTorch with CUDA, before a model is loaded


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use.

    Attributes:
        names: of each.
        identity: what values counted on them depend on (`engine_identity`).
        device: as PyTorch names it in a process that sees one of them alone.
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
    """Asked in a process of its own, as it loads PyTorch.

    Raises:
        MissingDependency: PyTorch or onnx2pytorch isn't installed.
        DeviceError: PyTorch sees no GPU, or GPUs of different kinds, on which values differ in their last bits.
    """
    identity, names = engine_identity("cuda"), gpu_names()
    if len(set(names)) > 1:
        listed = ", ".join(f"{number}: {name}" for number, name in enumerate(names))
        raise DeviceError(
            f"the GPUs are of different kinds ({listed}), whose tables differ in their last bits: name those of one kind "
            f"in {VISIBLE}"
        )
    return Gpus(names, identity)


def torch_engine(folder: Path | str, device: str) -> Callable[[ModelProto, Sequence[str]], Engine]:
    """What makes the engine of a model; the last one stays for the shards that follow.

    Args:
        folder: stands for the model: its folder, or its fingerprint.
        device: as PyTorch names it.
    """
    return partial(_engine, str(folder), device)


def _engine(model: str, device: str, proto: ModelProto, outputs: Sequence[str]) -> Engine:
    key = (model, device, tuple(outputs))
    if key not in _engines:
        _engines.clear()  # first: two models need not fit
        _engines[key] = TorchEngine(proto, outputs, device)
    return _engines[key]


_engines: dict[tuple[str, str, tuple[str, ...]], Engine] = {}
