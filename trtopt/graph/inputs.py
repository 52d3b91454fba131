"""What a network takes and gives: names, types, shapes, and the axis of each on which samples lie.

Samples lie on the first axis unless the graph says otherwise: by a dimension that is called batch, by recurrent layers, which
go along one axis of what they read and keep the samples on another, by a size that all inputs share, or by mixing the first
axis, as attention does where steps come first (`graph.mixed`). Where the axis isn't known of some input then, or isn't an open
size, an array of each input is one sample as a whole: that is right for every model. An input that is a single number has one
for each sample.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from onnx import ModelProto, ValueInfoProto

from trtopt.core.documents import Damaged, parsed_json
from trtopt.core.values import TensorInfo
from trtopt.graph.mixed import kept_apart
from trtopt.graph.proto import LARGE, RECURRENT, STANDARD, attribute, infer_shapes, refill, skeleton, tensor_info

_KEY = "trtopt.batch_axes"  # of a model's metadata
_STATES = slice(5, 7)  # of a recurrent node's inputs: states × samples × values; the first is steps × samples × values


def network_inputs(proto: ModelProto) -> dict[str, TensorInfo]:
    """By name, without those that are weights."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    infos = {value.name: tensor_info(value) for value in proto.graph.input if value.name not in weights}
    axes = _batch_axes(proto, {name: info for name, info in infos.items() if info.shape})
    return {name: replace(info, batch_axis=axes.get(name)) for name, info in infos.items()}


def network_outputs(values: Iterable[ValueInfoProto], inputs: Mapping[str, TensorInfo]) -> tuple[TensorInfo, ...]:
    """In order; where the samples of some input aren't first, those of outputs lie where the dimension's name says.

    Args:
        values: the graph's outputs, with shapes as far as they are known.
        inputs: see `network_inputs`.
    """
    infos = tuple(map(tensor_info, values))
    if all(info.batch_axis == 0 for info in inputs.values()):
        return infos
    sizes = {info.shape[info.batch_axis] for info in inputs.values() if info.batch_axis is not None}
    return tuple(replace(info, batch_axis=_only(info.shape, sizes)) for info in infos)


def record_batch_axes(proto: ModelProto, original: ModelProto) -> None:
    """Write into a model's metadata what its original says, unless samples are first there: a changed graph may say less."""
    axes = {name: info.batch_axis for name, info in network_inputs(original).items() if info.shape}
    if any(axis != 0 for axis in axes.values()) and not any(item.key == _KEY for item in proto.metadata_props):
        proto.metadata_props.add(key=_KEY, value=json.dumps(axes))


def forget_batch_axes(proto: ModelProto) -> None:
    """Take out of a model's metadata what `record_batch_axes` wrote."""
    refill(proto.metadata_props, [item for item in proto.metadata_props if item.key != _KEY])


def _recorded(proto: ModelProto, inputs: Mapping[str, TensorInfo]) -> dict[str, int | None] | None:
    """None where nothing is, or nothing that fits the inputs."""
    text = next((item.value for item in proto.metadata_props if item.key == _KEY), "null")
    with contextlib.suppress(Damaged):
        content = parsed_json(text)
        if isinstance(content, dict) and content.keys() == inputs.keys():
            axes = {name: content[name] for name in inputs}
            if all(axes[name] in (None, 0, *info.open_axes) for name, info in inputs.items()):
                return axes
    return None


def _batch_axes(proto: ModelProto, inputs: Mapping[str, TensorInfo]) -> dict[str, int | None]:
    recorded = _recorded(proto, inputs)
    if recorded is not None:
        return recorded
    known = _by_recurrent_layers(proto, inputs)
    for name, info in inputs.items():
        named = {size for size in info.shape if isinstance(size, str) and size.lower().startswith("batch")}
        if (axis := _only(info.shape, named)) is not None:
            known[name] = axis
    # As of a graph network: edges as 2 × edges, beside nodes × values.
    unlike = len({0 in info.open_axes for info in inputs.values()}) > 1
    if not known and any(
        len(info.shape) < 4 and (info.open_axes[:2] == (0, 1) or (unlike and info.open_axes))
        for info in inputs.values()
    ):
        kept = kept_apart(proto, inputs) or {}
        if any(0 in inputs[name].open_axes and 0 not in axes for name, axes in kept.items()):
            known = {name: axes[0] if axes else None for name, axes in kept.items() if len(axes) < 2}
    sizes = {inputs[name].shape[axis] for name, axis in known.items() if axis is not None}
    if not known and len(inputs) > 1:
        shared = set.intersection(*(set(info.shape) for info in inputs.values()))
        shared = {size for size in shared if isinstance(size, str)}
        # A size that no input begins with may be any: the length of texts of a fixed batch, for one.
        sizes = {size for size in shared if len(shared) == 1 and any(info.shape[0] == size for info in inputs.values())}
    for name, info in inputs.items():
        if name not in known and (axis := _only(info.shape, sizes)) is not None:
            known[name] = axis
    if not known and unlike and any(len(info.shape) > 2 and info.shape[0] == 1 for info in inputs.values()):
        return dict.fromkeys(inputs)  # as of one image with any number of boxes in it
    if all(axis == 0 for axis in known.values()):
        return dict.fromkeys(inputs, 0)
    if all(known.get(name) in info.open_axes for name, info in inputs.items()):
        return known
    return dict.fromkeys(inputs)


def _only(shape: tuple[int | str, ...], names: Iterable[int | str]) -> int | None:
    """The place of the one size that has one of these names."""
    found = [axis for axis, size in enumerate(shape) if isinstance(size, str) and size in names]
    return found[0] if len(found) == 1 else None


def _by_recurrent_layers(proto: ModelProto, inputs: Mapping[str, TensorInfo]) -> dict[str, int | None]:
    """Input → the axis that recurrent layers keep samples on; None: they take all of it for one sample's steps.

    Every size of every input gets a name of its own, and shape inference carries these to the layers.
    """
    nodes = [node for node in proto.graph.node if node.op_type in RECURRENT and node.domain in STANDARD]
    if not nodes:
        return {}
    light = skeleton(proto, LARGE)
    origins: dict[int | str, tuple[str, int]] = {}
    for value in light.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim if value.name in inputs else ()):
            dim.Clear()
            dim.dim_param = f"{value.name}.{axis}"
            origins[dim.dim_param] = value.name, axis
    del light.graph.value_info[:]
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = infer_shapes(light).graph
    shapes = {value.name: tensor_info(value).shape for value in (*graph.input, *graph.value_info)}
    found: dict[str, set[int | None]] = {}
    for node in nodes:
        samples, steps = (0, 1) if attribute(node, "layout", 0) else (1, 0)
        for number, read in enumerate([node.input[0], *node.input[_STATES]]):
            shape = shapes.get(read, ())
            if len(shape) != 3:
                continue
            place: tuple[str, int | None] | None = origins.get(shape[samples])
            if place is None and not number and shape[samples] == 1 and origins.get(shape[steps], ("", 1))[1] == 0:
                place = origins[shape[steps]][0], None
            if place is not None:
                found.setdefault(place[0], set()).add(place[1])
    return {name: axes.pop() for name, axes in found.items() if len(axes) == 1}
