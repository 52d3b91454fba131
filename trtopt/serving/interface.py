"""The inputs and outputs of an engine, as Triton has to be told it: types, shapes, profiles, and whether it takes batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trtopt.core.errors import UsageError
from trtopt.core.shapes import DEFAULT_BATCH
from trtopt.core.values import Profile, ShapeRange, TensorInfo, named_size
from trtopt.engine.manifest import Manifest, as_built


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs, and the ranges of the inputs.

    Attributes:
        profiles: ranges of all inputs, one entry a profile; empty where nothing is known of them.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    profiles: tuple[Profile, ...]


class Batching(NamedTuple):
    """The largest batch that Triton may put together; 0: none, and why."""

    most: int
    why: str = ""


def read_interface(engine: Path, manifest: Manifest, runtime: str) -> Interface:
    """Return the interface of a plan, or of the graph that stands in for it.

    Raises:
        UsageError: an input decides shapes by its values.
    """
    if runtime == "onnxruntime":
        from trtopt.graph.io import load_model  # loads onnx, which an engine doesn't need

        model = load_model(engine.parent / str(manifest.graph_file), lazy=True)
        inputs, outputs = model.inputs, model.outputs
    else:
        inputs, outputs = (as_built(items, manifest) for items in (manifest.inputs, manifest.outputs))
    fixed = {info.name: ShapeRange(*[info.sizes] * 3) for info in inputs if not info.open_axes}
    ranges = manifest.ranges or ({},)
    for info in inputs:
        for item in (profile[info.name] for profile in ranges if info.name in profile):
            other = any(
                size >= 0 and not low == size == high for size, low, high in zip(info.sizes, item.min, item.max)
            )
            if other or len(item.min) != len(info.shape):
                raise UsageError(
                    f"the input {info.name!r} decides shapes by its values, which no configuration tells Triton: run the "
                    "engine in `trtopt.Session`"
                )
    profiles = tuple({**fixed, **item} for item in ranges)
    complete = all(info.name in profile for info in inputs for profile in profiles)
    return Interface(inputs, outputs, profiles if complete else ())


# Batches -----------------------------------------------------------------------------------------------------------------


def find_batching(interface: Interface) -> Batching:
    """Tell if the first dimension of every tensor is the same open one, by its name, and how large it may be."""
    if not interface.inputs:
        return Batching(0, "there is no input")
    for what, infos in (("input", interface.inputs), ("output", interface.outputs)):
        for info in infos:
            if not info.shape:
                return Batching(0, f"{what} {info.name!r} is a scalar")
            if info.batch_axis != 0:
                return Batching(0, f"the first dimension of {what} {info.name!r} doesn't count samples")
            if 0 not in info.open_axes:
                return Batching(0, f"the first dimension of {what} {info.name!r} is always {info.shape[0]}")
    names = {str(info.shape[0]) for info in interface.inputs if named_size(info.shape[0])}
    if len(names) > 1:
        return Batching(0, f"the first dimensions of the inputs have different names: {', '.join(sorted(names))}")
    most = DEFAULT_BATCH[2]
    if interface.profiles:
        ranges: list[tuple[int, int]] = []
        for number, profile in enumerate(interface.profiles):
            each = {(item.min[0], item.max[0]) for item in profile.values()}
            if len(each) > 1:
                return Batching(0, f"the first dimensions of the inputs have different ranges in profile {number}")
            ranges += each
        most = 0
        for low, high in sorted(ranges):
            if low > most + 1:
                break
            most = max(most, high)
        if not most:
            return Batching(0, f"no profile takes a batch of 1; the smallest is {min(ranges)[0]}")
    if most == 1:
        return Batching(0, "no profile takes more than one sample at a time")
    [name] = names or {""}
    unknown = next((info.name for info in interface.outputs if not name or str(info.shape[0]) != name), None)
    why = (
        f"that the first dimension of output {unknown!r} is the batch isn't known: name the inputs' first one (trtopt check "
        f"MODEL.onnx --set {interface.inputs[0].name}:batchx… --fix OUT.onnx), and build that"
    )
    return Batching(most) if unknown is None else Batching(0, why)
