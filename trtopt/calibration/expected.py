"""The statistics that a model keeps of its training inputs, and whether samples look like them.

A BatchNormalization carries the mean and variance that its input had in training. The first one stands next to the input,
so wrong preprocessing shows there before anything nonlinear hides it, as the median over its channels of
|mean − expected mean| / expected std ("shift") and of log(std / expected std) ("spread"); docs/results/calibration-rules.md has
what right and wrong preprocessing give.

Most exported models have no BatchNormalization left: it was folded into the convolution before it. `trtopt export` writes
what is needed into the model; of others only raw 0..255 pixels can be told, by the spread after the first convolution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto

from trtopt.core.documents import Damaged, parsed_json
from trtopt.core.errors import TrtoptError
from trtopt.data.rebatch import Arrays
from trtopt.graph.proto import Links, attribute, empty_as, in_memory, refill, to_array
from trtopt.ort.sessions import OnnxSession

KEY = "trtopt.trained"  # in a model's metadata: what `record` wrote
SHIFT = 0.6
SPREAD = 0.45
CERTAIN = 2.0  # log of the ratio of spreads: beyond, no data can explain it
RAW = 16.0  # larger magnitudes, none negative: pixels as they are in a file
RAW_SPREAD = 10.0  # after the first convolution; folded BatchNormalization leaves some 1
_ADVICE = "check `preprocess=`, or the arrays in `data=`"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """A tensor's mean and standard deviation per channel (axis 1) in training, and where that is known from."""

    tensor: str
    mean: Floats
    std: Floats
    source: str


def statistics(proto: ModelProto) -> Expected | None:
    """Return what the first BatchNormalization in the graph, or else the model's metadata, says; None where neither does."""
    constants = Links(proto.graph).constants
    for node in proto.graph.node:
        if node.op_type != "BatchNormalization" or len(node.input) < 5:
            continue
        if any(name not in constants for name in node.input[3:5]):
            continue
        mean, variance = (to_array(constants[name]).astype(np.float64) for name in node.input[3:5])
        epsilon = attribute(node, "epsilon", 1e-5)
        if not mean.any() and bool((variance == 1).all()):
            return None  # as it was made: never trained
        return Expected(node.input[0], mean, np.sqrt(variance + epsilon), f"BatchNormalization {node.name}".strip())
    return _recorded(proto)


def record(proto: ModelProto, expected: Expected) -> None:
    """Write it into the model's metadata, which folding keeps."""
    refill(proto.metadata_props, [item for item in proto.metadata_props if item.key != KEY])
    text = json.dumps(
        {
            "tensor": expected.tensor,
            "mean": [float(f"{item:.6g}") for item in expected.mean],
            "std": [float(f"{item:.6g}") for item in expected.std],
            "source": expected.source,
        }
    )
    proto.metadata_props.add(key=KEY, value=text)


def producer_of(proto: ModelProto, feed: Arrays, values: NDArray[Any]) -> str | None:
    """Find which of the first convolutions' outputs holds `values` when `feed` is run; None: none does."""
    names = [str(node.output[0]) for node in proto.graph.node if node.op_type == "Conv"][:4]
    scale = float(np.abs(values).max()) or 1.0
    for name in names:
        output = next(_run(proto, name, [feed]))
        if output.shape == values.shape and float(np.abs(output - values).max()) < 1e-3 * scale:
            return name
    return None


def first_layers(proto: ModelProto) -> ModelProto:
    """Return all that `check_preprocessing` needs of a model, so that the rest with its weights needn't be kept until then."""
    recorded = statistics(proto)
    tensor = recorded.tensor if recorded else _first_convolution(proto)
    norms = (node for node in proto.graph.node if node.op_type == "BatchNormalization" and node.input[0] == tensor)
    norm = next(norms, None)
    part = ModelProto() if tensor is None else _upstream(proto, tensor if norm is None else str(norm.output[0]))
    part.metadata_props.extend(proto.metadata_props)
    return part


def check_preprocessing(proto: ModelProto, samples: Sequence[Arrays]) -> dict[str, Any]:
    """Compare samples with what the model was trained on.

    Args:
        samples: input name → array with a first axis of 1.

    Returns:
        Plain JSON: "checked" and "reason" (why not); or "by", "tensor", "shift" and "spread" (a ratio, not its log), None
        where only raw pixels could be looked for; "warning" where they don't look like the model's.
    """
    recorded = statistics(proto)
    tensor = recorded.tensor if recorded else _first_convolution(proto)
    if not samples or tensor is None:
        reason = "the model has no BatchNormalization, no record of one and no convolution"
        return {"checked": False, "reason": reason if samples else "no input looks like an image"}
    try:
        mean, std = _moments(_run(proto, tensor, samples))
    except (TrtoptError, ValueError) as error:
        return {"checked": False, "reason": f"the model's first layers can't be run alone: {str(error)[:200]}"}
    if recorded is None:
        by = "the first convolution; only raw pixels can be told"
        warning = _raw_pixels(samples, float(np.median(std)))
        return {"checked": True, "by": by, "tensor": tensor, "shift": None, "spread": None} | warning
    if mean.shape != recorded.mean.shape:
        reason = f"{tensor} has {mean.size} channels, {recorded.source} {recorded.mean.size}"
        return {"checked": False, "reason": reason}
    alive = recorded.std > 1e-3 * recorded.std.max()  # dead channels say nothing
    shift = float(np.median(np.abs(mean - recorded.mean)[alive] / recorded.std[alive]))
    spread = float(np.median(np.log(np.maximum(std[alive], 1e-12) / recorded.std[alive])))
    found = {"shift": float(f"{shift:.4g}"), "spread": float(f"{math.exp(spread):.4g}")}
    result: dict[str, Any] = {"checked": True, "by": recorded.source, "tensor": tensor, **found}
    if abs(spread) > SPREAD or shift > SHIFT:
        result["warning"] = _sentence(shift, spread, recorded.source)
    return result


def _sentence(shift: float, spread: float, source: str) -> str:
    seen = f"lie {shift:.2g} standard deviations from where they lay in training"
    if abs(spread) > SPREAD:
        seen = f"spread {'only ' * (spread < 0)}{math.exp(spread):.3g} times as far as in training"
    if spread > CERTAIN:
        cause = "pixels seem to arrive as 0..255 where the model wants them normalised"
    elif spread > -SPREAD:
        cause = "the scale or the mean of the preprocessing doesn't seem to be the one the model was trained with"
    else:
        cause = (
            "the preprocessing (0..1 where the model wants mean and std taken off too? normalised twice?) doesn't seem to be "
            "the one the model was trained with, or the images are much darker or flatter"
        )
    return f"at the model's first normalization ({source}) values {seen}: {cause}; {_ADVICE}"


def _raw_pixels(samples: Iterable[Arrays], spread: float) -> dict[str, str]:
    arrays = [array for sample in samples for array in sample.values() if array.ndim == 4]
    low, high = min(float(item.min()) for item in arrays), max(float(item.max()) for item in arrays)
    if low < 0 or high <= RAW or spread <= RAW_SPREAD:
        return {}
    return {
        "warning": f"inputs are {low:.3g} to {high:.3g}, and after the model's first convolution values spread by "
        f"{spread:.3g}, where trained networks have about 1: pixels seem to arrive as 0..255 where the model wants them "
        f"normalised; {_ADVICE}"
    }


def _recorded(proto: ModelProto) -> Expected | None:
    text = next((item.value for item in proto.metadata_props if item.key == KEY), None)
    if text is None:
        return None
    try:
        content = parsed_json(text)
        mean, std = (np.asarray(content[key], np.float64) for key in ("mean", "std"))
        expected = Expected(str(content["tensor"]), mean, std, str(content["source"]))
    except (Damaged, ValueError, KeyError, TypeError):
        return None
    there = any(expected.tensor in node.output for node in proto.graph.node)
    return expected if there and mean.ndim == 1 and mean.shape == std.shape and bool((std >= 0).all()) else None


def _first_convolution(proto: ModelProto) -> str | None:
    return next((str(node.output[0]) for node in proto.graph.node if node.op_type == "Conv"), None)


def _run(proto: ModelProto, tensor: str, feeds: Iterable[Arrays]) -> Iterator[NDArray[Any]]:
    """`tensor` for each feed, from the part of the graph that it needs."""
    part = _upstream(proto, tensor)
    inputs = [value.name for value in part.graph.input]
    session = OnnxSession(part, threads=1)
    for feed in feeds:
        ready = {name: feed[name] for name in inputs}
        if session.batch is not None:  # a fixed batch: the sample as often as it takes
            ready = {name: np.resize(array, (session.batch, *array.shape[1:])) for name, array in ready.items()}
        yield session(ready)[tensor]


def _upstream(proto: ModelProto, tensor: str) -> ModelProto:
    """The model up to one tensor, without what that doesn't need: a large model isn't loaded for its first layer."""
    producers = {name: index for index, node in enumerate(proto.graph.node) for name in node.output}
    pending, needed, names = [tensor], set[int](), set[str]()
    while pending:
        name = pending.pop()
        if name in names:
            continue
        names.add(name)
        index = producers.get(name)
        if index is not None and index not in needed:
            needed.add(index)
            pending += [item for item in proto.graph.node[index].input if item]
    part = empty_as(proto, "part")
    part.graph.node.extend(proto.graph.node[index] for index in sorted(needed))
    part.graph.initializer.extend(item for item in proto.graph.initializer if item.name in names)
    constant = {item.name for item in part.graph.initializer}
    part.graph.input.extend(item for item in proto.graph.input if item.name in names and item.name not in constant)
    part.graph.output.append(ValueInfoProto(name=tensor))
    return in_memory(part)  # read now: the model's file may be gone when they are run


def _moments(outputs: Iterable[NDArray[Any]]) -> tuple[Floats, Floats]:
    """Mean and standard deviation per channel (axis 1) over all of them."""
    count, total, square = 0, np.zeros(()), np.zeros(())
    for item in outputs:
        axes = tuple(axis for axis in range(item.ndim) if axis != 1)
        wide = np.asarray(item, np.float64)
        count += wide.size // wide.shape[1]
        total = total + wide.sum(axes)
        square = square + (wide**2).sum(axes)
    mean = total / count
    return np.asarray(mean), np.sqrt(np.maximum(square / count - mean**2, 0))
