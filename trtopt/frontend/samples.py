"""Samples that a module is traced and compared on: the user's images or arrays, or made-up ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, ModelError, UsageError
from trtopt.core.kept import ARRAYS
from trtopt.core.library_output import quiet
from trtopt.core.values import Profile, TensorInfo
from trtopt.data import open_data
from trtopt.data.arrayfiles import stored_arrays
from trtopt.data.arrays import usable
from trtopt.data.rebatch import Arrays, joined
from trtopt.graph.io import Model
from trtopt.graph.synthetic import synthetic_inputs

Sample = str | os.PathLike[str] | Arrays | NDArray[Any]
SIZES = {"batch": 2, "height": 224, "width": 224, "H": 224, "W": 224, "sequence": 16}  # while exporting; others 8
SAMPLES = 4
MADE_UP = "synthetic (seed 0)"


def samples_for(
    infos: tuple[TensorInfo, ...], sample: Sample | None, preprocess: Any, ranges: Profile
) -> tuple[dict[str, NDArray[Any]], str]:
    """Inputs to trace and compare with, and what they are; made-up ones and images are of sizes within `ranges`."""
    sizes = sizes_for(infos, ranges)
    if sample is None:
        return synthetic_inputs(infos, sizes), MADE_UP
    if isinstance(sample, (Mapping, np.ndarray)):
        arrays = sample if isinstance(sample, Mapping) else {infos[0].name: sample}
        if absent := [info.name for info in infos if info.name not in arrays]:
            raise DataError(f"the sample has no input {absent[0]!r}; it has: {', '.join(arrays)}")
        said = "arrays" if isinstance(sample, Mapping) else "an array"
        found = {info.name: usable(arrays[info.name], info, "the sample") for info in infos}
        return {info.name: found[info.name] if info.shape else np.asarray(found[info.name][0]) for info in infos}, said
    path = Path(sample)
    if not path.exists():
        raise UsageError(f"the sample {path} doesn't exist; give .npz, .npy, an image or a folder of images")
    if path.suffix == ".npz" and len({info.shape[:1] for info in infos}) > 1:  # not all begin with the samples
        return samples_for(infos, stored_arrays(path), preprocess, ranges)[0], str(path)
    if path.suffix in ARRAYS:
        batches = open_data(infos, data=path, limit=SAMPLES)
    else:
        images = [path] if path.is_file() else path
        sized = (info.shape[:1] + tuple(sizes.get(str(size), size) for size in info.shape[1:]) for info in infos)
        infos = tuple(replace(info, shape=shape) for info, shape in zip(infos, sized))  # all but the batch
        batches = open_data(infos, images=images, preprocess=preprocess, limit=SAMPLES)
    return joined(batches), os.fspath(sample)


def sizes_for(infos: Sequence[TensorInfo], ranges: Profile) -> dict[str, int]:
    """Return the size of each dynamic dimension while exporting, but for the batch within its range, where a recipe has one.
    All differ from 1 and, where they can, from each other."""
    sizes: dict[str, int] = {}
    for info in infos:
        for axis, name in enumerate(info.shape):
            if isinstance(name, str):
                size = SIZES.get(name, 8)
                if axis and info.name in ranges:
                    size = min(max(size, ranges[info.name].min[axis]), ranges[info.name].max[axis])
                sizes.setdefault(name, size)
    return sizes


@dataclass(frozen=True)
class Subject:
    """A module that takes the inputs in their order (`called`), and samples to run it on, which `sampled` says where from."""

    torch: Any
    text: str
    module: Any
    infos: tuple[TensorInfo, ...]
    arrays: Arrays
    sampled: str

    @property
    def made_up(self) -> bool:
        return self.sampled == MADE_UP

    @property
    def first(self) -> int | str:
        """The size that counts samples: one that is called batch, else the first of the first input that has any."""
        sizes = [size for info in self.infos for size in info.shape]
        return next((size for size in sizes if str(size).lower().startswith("batch")), sizes[0] if sizes else 1)

    @property
    def sizes(self) -> dict[int | str, int]:
        """Return each named size as it is in the samples."""
        return {info.shape[axis]: self.arrays[info.name].shape[axis] for info in self.infos for axis in info.open_axes}

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Two batch sizes where samples are counted by an open size."""
        return (self.first,) if isinstance(self.first, int) else tuple(dict.fromkeys((1, self.sizes[self.first])))

    def batch(self, size: int, sizes: Mapping[Any, int] | None = None) -> dict[str, NDArray[Any]]:
        """Return the first `size` samples, in other sizes of what is open besides, by name; repeated where there is less.

        A state may have the batch behind its layers; a size that is fixed counts as the batch on the first axis alone.
        """
        made, sizes = dict(self.arrays), {self.first: size, **(sizes or {})}
        for info in self.infos:
            for axis, name in enumerate(info.shape):
                if name in sizes and (axis == 0 or isinstance(name, str)):
                    array = made[info.name]
                    made[info.name] = array.take(np.arange(sizes[name]) % array.shape[axis], axis)
        return made

    def tensors(self, batch: Arrays) -> tuple[Any, ...]:
        first = next(self.module.parameters(), None)
        device = "cpu" if first is None else first.device
        return tuple(self.torch.from_numpy(batch[info.name].copy()).to(device) for info in self.infos)

    def __call__(self, batch: Arrays) -> tuple[Any, ...]:
        with self.torch.no_grad(), quiet():
            result: tuple[Any, ...] = self.module(*self.tensors(batch))
        return result

    def outputs(self, batch: Arrays, model: Model) -> dict[str, NDArray[Any]]:
        """PyTorch's outputs under the ONNX file's names."""
        outputs = self(batch)
        if len(outputs) != len(model.outputs):
            raise ModelError(f"PyTorch gives {len(outputs)} outputs, the exported model {len(model.outputs)}")
        for info, value in zip(model.outputs, outputs):
            if value.dtype == self.torch.bfloat16:  # which NumPy has not
                raise ModelError(
                    f"{self.text}: the output {info.name} is bfloat16, which nothing here reads: let forward return it in "
                    "float32 (value.float()); precision is chosen by trtopt build"
                )
        return {info.name: value.detach().cpu().numpy() for info, value in zip(model.outputs, outputs)}
