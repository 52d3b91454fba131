"""A model and what was made of it, run on the same inputs: real samples, or made-up ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from trtopt.core.errors import ModelError, require
from trtopt.core.values import Profile, TensorInfo
from trtopt.data.difference import difference
from trtopt.data.rebatch import Arrays
from trtopt.graph.guard import drawn
from trtopt.graph.half import fp32_typed, has_half
from trtopt.graph.op_types import QDQ
from trtopt.graph.proto import all_nodes, infer_shapes
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.ort.sessions import OnnxSession

TOLERANCE = 1e-3  # of an output's largest value: folding rounds differently, it doesn't compute something else
COARSE = 0.05  # where tensors are rounded to eight bits or to a half type: the next code is another value
TRIED_SIZES = (64, 224, 320, 48, 16, 8)  # of dynamic dimensions that aren't the batch, until the model runs
_BOUNDED = ("Sigmoid", "Softmax")
_INTEGERS = {getattr(TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}


def compare(
    before: ModelProto,
    after: ModelProto,
    inputs: Sequence[TensorInfo],
    *,
    profiles: Sequence[Profile] = (),
    samples: Sequence[Arrays] = (),
    opened: bool = False,
) -> str:
    """Return how the outputs differ, if they do: on the samples, or at the first two sizes of made-up inputs at which `before`
    runs. Both run without optimizations, and in FP32 where they are of a half type, whose rounding any rewrite moves.

    Args:
        profiles: sizes of dynamic dimensions to try; without any they are guessed. samples: real inputs of `before`.
        opened: `before` takes one sample, on the first axis of its inputs, and `after` any number: at the first of the sizes,
            `after` is given two at once, and `before` each of them.

    Raises: ModelError where `before` couldn't be run, or isn't fit for it (`_unfit`).
    """
    require("onnxruntime", "ort", "comparing the models")
    if why := _unfit(before, made_up=not samples):
        raise ModelError(why)
    coarse = has_half(before) or any(node.op_type in QDQ for node in all_nodes(after.graph))
    before, after = (fp32_typed(proto)[0] for proto in (before, after))
    bounded = frozenset(name for node in after.graph.node if node.op_type in _BOUNDED for name in node.output)
    first = OnnxSession(before, optimize=False)
    try:
        second = OnnxSession(after, optimize=False)
    except ModelError as error:
        return _refused(error)
    ran, problem = 0, ModelError("there is no size to try")
    sizes = sizes_to_try(inputs, profiles)
    for number in range(len(samples or sizes)):
        try:
            feeds = [samples[number] if samples else synthetic_inputs(inputs, sizes[number])]
            feeds += [{name: np.flip(array).copy() for name, array in feeds[0].items()}] if opened else []
            expected = [first(feed) for feed in feeds]
        except ModelError as error:
            problem = error
            if ran:
                break
            continue
        try:
            actual = second(_at_once(feeds, inputs))
        except ModelError as error:
            return _refused(error)
        far = difference(_joined(expected, actual), actual)
        if not far.within(COARSE if coarse else TOLERANCE, bounded=bounded):
            if samples or sizes[number] or not _contradicts(expected[0], first.declared):
                return str(far)
            # Values of an input are sizes then, and made-up ones aren't those that the model is for.
            problem = ModelError("made-up inputs give results of other shapes than the model declares")
            continue
        ran += 1
        if opened or ran == 2:
            break
    if not ran:
        raise problem
    return ""


def _unfit(proto: ModelProto, *, made_up: bool) -> str:
    """Return why a model can't be compared, or what may keep ONNX Runtime from coming back on made-up inputs, if anything."""
    if drawn(proto):
        return "it draws random numbers"
    graph = infer_shapes(proto).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    constants = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    divisors = {node.input[1] for node in graph.node if node.op_type in ("Div", "Mod")} - constants
    if made_up and any(kinds.get(name) in _INTEGERS for name in divisors):
        return "it divides integers, and by zero, which made-up inputs may bring about, ONNX Runtime ends the process"
    if made_up and any(node.op_type == "Loop" for node in all_nodes(graph)):
        return "it holds a Loop, which made-up inputs may never end"
    return ""


def sizes_to_try(inputs: Sequence[TensorInfo], profiles: Sequence[Profile]) -> list[dict[str, int]]:
    """Sizes of the dynamic dimensions: the profiles' own, at small batches, then guesses; {} alone where none is open."""
    places = [(info.name, axis, info.shape[axis]) for info in inputs for axis in info.open_axes]
    keys = [(name, axis, size if isinstance(size, str) else f"{name}:{axis}") for name, axis, size in places]
    found: list[dict[str, int]] = []
    for profile in profiles:
        for which in ("min", "opt"):
            shapes = {name: getattr(ranges, which) for name, ranges in profile.items()}
            known = {key: (axis, shapes[name][axis]) for name, axis, key in keys if axis < len(shapes.get(name, ()))}
            found.append({key: size if axis or which == "min" else min(2, size) for key, (axis, size) in known.items()})
    batches = {key for _, axis, key in keys if axis == 0}
    for guess in TRIED_SIZES:
        found += [{key: batch if key in batches else guess for _, _, key in keys} for batch in (1, 2)]
    return [sizes for number, sizes in enumerate(found) if sizes not in found[:number]]


def _at_once(feeds: Sequence[Arrays], inputs: Sequence[TensorInfo]) -> Arrays:
    """Put samples together, where inputs have them."""
    batched = {info.name for info in inputs if 0 in info.open_axes}
    return {
        name: np.concatenate([feed[name] for feed in feeds]) if name in batched else array
        for name, array in feeds[0].items()
    }


def _joined(samples: Sequence[Mapping[str, Any]], actual: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of samples, put together along the axis that is longer in the outputs of all at once."""
    joined = dict(samples[0])
    for name, array in joined.items() if len(samples) > 1 else ():
        shape = getattr(actual[name], "shape", ())
        longer = [axis for axis, (one, both) in enumerate(zip(getattr(array, "shape", ()), shape)) if one != both]
        if longer:
            joined[name] = np.concatenate([sample[name] for sample in samples], longer[0])
    return joined


def _contradicts(results: Mapping[str, Any], declared: Mapping[str, Sequence[int | str | None]]) -> bool:
    """Return whether an array isn't of the shape that the model declares."""
    shapes = ((getattr(results[name], "shape", None), sizes) for name, sizes in declared.items())
    return any(
        len(shape) != len(sizes) or any(isinstance(b, int) and a != b for a, b in zip(shape, sizes))
        for shape, sizes in shapes
        if shape is not None
    )


def _refused(error: ModelError) -> str:
    """Return what `after` does that `before` doesn't; for want of memory both may fail, or either."""
    if "bad_alloc" in str(error) or "Failed to allocate" in str(error):
        raise error
    return str(error)
