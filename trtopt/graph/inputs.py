"""Inputs and outputs of a network: names, types, shapes, and the axis of each on which samples lie.

Samples lie on the first axis unless the graph says otherwise: by a dimension that is called batch, by recurrent layers, which
go along one axis of what they read and keep the samples on another, by a size that all inputs share, or by mixing the first
axis, as attention does where steps come first (`independent_axes`). Where the axis isn't known of some input then, or isn't an
open size, an array of each input is one sample as a whole: that is right for every model. A single number as an input is one
for each sample. Outputs have them on the one axis that grows with the batch, by shapes inferred at two batches.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, ValueInfoProto

from trtopt.core.documents import Damaged, parsed_json
from trtopt.core.values import TensorInfo
from trtopt.data.rebatch import counting
from trtopt.graph.independent_axes import independent_axes
from trtopt.graph.op_types import RECURRENT, RESHAPING, STATES
from trtopt.graph.proto import (
    LARGE,
    STANDARD,
    Links,
    attribute,
    forget_output_shapes,
    infer_shapes,
    inferred_values,
    refill,
    skeleton,
    tensor_info,
    to_array,
)
from trtopt.graph.work import GUESSES, shapes_at

_KEY = "trtopt.batch_axes"  # of a model's metadata
_BATCH = "the batch"  # a name that no exporter gives
_ALONG_AN_AXIS = ("Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin", "TopK", "LpNormalization")


def network_inputs(proto: ModelProto) -> dict[str, TensorInfo]:
    """Return the inputs by name, without those that are weights."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    infos = {value.name: tensor_info(value) for value in proto.graph.input if value.name not in weights}
    axes = _batch_axes(proto, {name: info for name, info in infos.items() if info.shape})
    return {name: replace(info, batch_axis=axes.get(name)) for name, info in infos.items()}


def network_outputs(
    proto: ModelProto, inputs: Mapping[str, TensorInfo], inferred: Iterable[ValueInfoProto] | None = None
) -> tuple[TensorInfo, ...]:
    """Return the outputs in order. Declared shapes, perhaps from before a change, give way to those that follow from inputs.

    Args:
        inputs: see `network_inputs`.
        inferred: the outputs as shape inference has them by itself; None: it is done here.
    """
    if inferred is None:
        light = skeleton(proto, LARGE)
        forget_output_shapes(light)
        inferred = infer_shapes(light).graph.output
    known = {value.name: value for value in inferred}
    axes = counting(inputs.values())
    names = {inputs[name].shape[axis] for name, axis in axes.items()}
    infos = [_as_inferred(value, known.get(value.name, value), names) for value in proto.graph.output]
    infos = [replace(info, batch_axis=_only(info.shape, names)) for info in infos]
    unknown = {info.name for info in infos if info.batch_axis is None and info.shape}
    if axes and unknown:
        growth = _Growth(proto, inputs, axes, unknown)
        infos = [growth.placed(info, names) if info.name in unknown else info for info in infos]
    return tuple(infos)


def declare_outputs(proto: ModelProto, outputs: Iterable[TensorInfo]) -> None:
    """Write the shapes of `network_outputs` where the model declares fixed sizes that are others."""
    for value, info in zip(proto.graph.output, outputs):
        declared, dims = tensor_info(value).shape, value.type.tensor_type.shape.dim
        if declared and len(declared) != len(info.shape):
            refill(dims, [TensorShapeProto.Dimension() for _ in info.shape])
            declared = (0,) * len(info.shape)
        for dim, old, new in zip(dims, declared, info.shape):
            if isinstance(old, int) and old not in (-1, new):
                dim.Clear()
                if isinstance(new, str):
                    dim.dim_param = new
                elif new >= 0:
                    dim.dim_value = new


def _as_inferred(declared: ValueInfoProto, inferred: ValueInfoProto, names: Collection[int | str]) -> TensorInfo:
    """Inferred sizes, and where these have none, or a name that isn't the batch's, declared ones; types stay as declared."""
    info, other = tensor_info(declared), tensor_info(inferred)
    if not inferred.type.tensor_type.HasField("shape"):
        return info
    if len(info.shape) != len(other.shape):
        return replace(info, shape=other.shape)
    sizes = list(other.shape)
    for axis, (old, new) in enumerate(zip(info.shape, sizes)):
        if new == -1 or (
            isinstance(new, str) and new not in names and (new.startswith("unk__") or isinstance(old, str))
        ):
            sizes[axis] = old
    return replace(info, shape=tuple(sizes))


class _Growth:
    """Shapes at two samples and at three, which tell what grows with the batch, so that the `wanted` outputs are known."""

    def __init__(
        self, proto: ModelProto, inputs: Mapping[str, TensorInfo], axes: Mapping[str, int], wanted: set[str]
    ) -> None:
        light = skeleton(proto, LARGE)
        for value in light.graph.input:
            if value.name in axes:
                value.type.tensor_type.shape.dim[axes[value.name]].dim_param = _BATCH
        self.makers = Links(light.graph).makers
        others = any(axis != axes.get(name) for name, info in inputs.items() for axis in info.open_axes)
        for guess in GUESSES if others else GUESSES[:1]:
            self.two, self.three = (shapes_at(light, {_BATCH: size}, guess) for size in (2, 3))
            if wanted <= self.two.keys() & self.three.keys():
                break

    def placed(self, info: TensorInfo, names: set[int | str]) -> TensorInfo:
        """An output with the axis of its samples; sizes that the model declares as fixed, and that grow, are open.

        Args:
            names: what the batch is called, or its fixed size.
        """
        two, three = self.two.get(info.name, ()), self.three.get(info.name, ())
        if not len(two) == len(three) == len(info.shape):
            fixed = [axis for axis, size in enumerate(info.sizes) if size >= 0 and {size} == names]
            return replace(info, batch_axis=fixed[0] if len(fixed) == 1 or (fixed and names == {1}) else None)
        batch = next(iter(names)) if len(names) == 1 else -1
        sizes = list(info.shape)
        for axis, (a, b) in enumerate(zip(two, three)):
            if a != b and isinstance(sizes[axis], int) and (isinstance(batch, str) or batch < 0):
                sizes[axis] = batch if a == 2 else -1
        place = self._place(info.name) if self._in_order(info.name) else None
        return replace(info, shape=tuple(sizes), batch_axis=place and place[0])

    def _place(self, name: str) -> tuple[int, int] | None:
        """The one axis that grows, and by how many rows a sample."""
        two, three = self.two.get(name, ()), self.three.get(name, ())
        grown = [axis for axis, (a, b) in enumerate(zip(two, three)) if a != b]
        if len(grown) != 1 or len(two) != len(three) or 3 * two[grown[0]] != 2 * three[grown[0]]:
            return None
        return grown[0], two[grown[0]] // 2

    def _in_order(self, name: str) -> bool:
        """Return whether a sample's rows lie together: several do by a Reshape alone that keeps what lies outside samples."""
        pending, seen = [name], {name}
        while pending:
            result = pending.pop()
            if (place := self._place(result)) is None:
                return False
            if place[1] > 1:
                node = self.makers[result]
                reads = {item: held for item in node.input if (held := self._place(item))}
                if node.op_type in RESHAPING:
                    outside = [math.prod(self.two[item][:at]) for item, (at, _) in (*reads.items(), (result, place))]
                    fits = len({*outside}) == 1 < len(outside)
                else:
                    fits = {rows for _, rows in reads.values()} == {place[1]}
                if not fits:
                    return False
                pending += reads.keys() - seen
                seen |= reads.keys()
        return True


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
    doubtful = not known and any(
        len(info.shape) < 4 and (info.open_axes[:2] == (0, 1) or (unlike and info.open_axes))
        for info in inputs.values()
    )
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    if doubtful or any(_goes_along_first(node, constants) for node in proto.graph.node):
        kept = independent_axes(proto, inputs) or {}
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


def _goes_along_first(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    """Return whether a node normalizes or picks along the first axis of what it reads, where samples may lie."""
    if node.op_type.startswith("Reduce"):
        held = constants.get(node.input[1]) if len(node.input) > 1 else None
        return 0 in (attribute(node, "axes", ()) if held is None else to_array(held).ravel())
    return node.op_type in _ALONG_AN_AXIS and attribute(node, "axis", -1) == 0


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
    forget_output_shapes(light)
    shapes = {name: tensor_info(value).shape for name, value in inferred_values(light).items()}
    found: dict[str, set[int | None]] = {}
    for node in nodes:
        samples, steps = (0, 1) if attribute(node, "layout", 0) else (1, 0)
        for number, read in enumerate([node.input[0], *node.input[STATES]]):
            shape = shapes.get(read, ())
            if len(shape) != 3:
                continue
            place: tuple[str, int | None] | None = origins.get(shape[samples])
            if place is None and not number and shape[samples] == 1 and origins.get(shape[steps], ("", 1))[1] == 0:
                place = origins[shape[steps]][0], None
            if place is not None:
                found.setdefault(place[0], set()).add(place[1])
    return {name: axes.pop() for name, axes in found.items() if len(axes) == 1}
