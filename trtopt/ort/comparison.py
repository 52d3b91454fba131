"""A model and what was made of it, run on the same inputs: real samples, or made-up ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        profiles: sizes of dynamic dimensions to try; without any they are guessed.
        samples: real inputs as `before` takes them.
        opened: `before` takes one sample, on the first axis of its inputs, and `after` any number: at the first of the sizes,
            `after` is given two at once, and `before` each of them.

    Raises:
        ModelError: `before` couldn't be run, or isn't on made-up inputs (`_endless`); or it draws random numbers.
    """
    require("onnxruntime", "ort", "comparing the models")
    if drawn(before):
        raise ModelError("it draws random numbers")
    coarse = has_half(before) or any(node.op_type in QDQ for node in all_nodes(before.graph))
    tolerance = COARSE if coarse else TOLERANCE
    before, after = (fp32_typed(proto)[0] for proto in (before, after))
    bounded = [name for node in after.graph.node if node.op_type in ("Sigmoid", "Softmax") for name in node.output]
    if not samples and (why := _endless(before)):
        raise ModelError(f"{why}, which made-up inputs may bring about")
    trials = samples or sizes_to_try(inputs, profiles)
    return gap(before, after, inputs, trials, tolerance, bounded, real=bool(samples), opened=opened)


def _endless(proto: ModelProto) -> str:
    """Return what may keep ONNX Runtime from coming back on values that the model isn't for, if anything."""
    graph = infer_shapes(proto).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    constants = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    divisors = {node.input[1] for node in graph.node if node.op_type in ("Div", "Mod")} - constants
    if any(kinds.get(name) in _INTEGERS for name in divisors):
        return "it divides integers, and by zero ONNX Runtime ends the process"
    return "it holds a Loop, which may never end" if any(node.op_type == "Loop" for node in all_nodes(graph)) else ""


def gap(
    before: ModelProto,
    after: ModelProto,
    inputs: Sequence[TensorInfo],
    trials: Sequence[Mapping[str, Any]],
    tolerance: float,
    bounded: Collection[str],
    *,
    real: bool = False,
    opened: bool = False,
) -> str:
    """Compare on each of `trials`: sizes of dynamic dimensions, as `synthetic_inputs` takes them; or, `real`, inputs."""
    first = OnnxSession(before, optimize=False)
    try:
        second = OnnxSession(after, optimize=False)
    except ModelError as error:
        return _refused(error)
    batched = {info.name for info in inputs if 0 in info.open_axes}
    needed, ran = 1 if opened else 2, 0
    problem = ModelError("there is no size to try")
    for trial in trials:
        try:
            samples = [trial if real else synthetic_inputs(inputs, trial)]
            samples += [{name: np.flip(array).copy() for name, array in samples[0].items()}] if opened else []
            expected = [first(sample) for sample in samples]
        except ModelError as error:
            problem = error
            if ran:
                break
            continue
        try:
            actual = second(
                {
                    name: np.concatenate([sample[name] for sample in samples]) if name in batched else array
                    for name, array in samples[0].items()
                }
            )
        except ModelError as error:
            return _refused(error)
        far = difference(_joined(expected, actual), actual)
        if not far.within(tolerance, bounded=frozenset(bounded)):
            shapes = first.declared.items()
            if not real and not trial and any(_contradicts(expected[0][name], shape) for name, shape in shapes):
                # Values of an input are sizes then, and made-up ones aren't those that the model is for.
                problem = ModelError("made-up inputs give results of other shapes than the model declares")
                continue
            return str(far)
        ran += 1
        if ran == needed:
            return ""
    if not ran:
        raise problem
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
    for guess in TRIED_SIZES:
        for batch in (1, 2):
            sizes: dict[str, int] = {}
            for _, axis, key in keys:
                sizes[key] = batch if axis == 0 else sizes.get(key, guess)
            found.append(sizes)
    return [sizes for number, sizes in enumerate(found) if sizes not in found[:number]]


def _joined(samples: Sequence[Mapping[str, Any]], actual: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of samples, put together along the axis that is longer in the outputs of all at once."""
    joined = dict(samples[0])
    for name, array in joined.items() if len(samples) > 1 else ():
        shape = getattr(actual[name], "shape", ())
        longer = [axis for axis, (one, both) in enumerate(zip(getattr(array, "shape", ()), shape)) if one != both]
        if longer:
            joined[name] = np.concatenate([sample[name] for sample in samples], longer[0])
    return joined


def _contradicts(result: object, declared: Sequence[int | str | None]) -> bool:
    """Return whether an array isn't of the shape that the model declares."""
    shape = getattr(result, "shape", None)
    if shape is None:
        return False
    return len(shape) != len(declared) or any(isinstance(b, int) and a != b for a, b in zip(shape, declared))


def _refused(error: ModelError) -> str:
    """Return what `after` does that `before` doesn't; for want of memory both may fail, or either."""
    if "bad_alloc" in str(error) or "Failed to allocate" in str(error):
        raise error
    return str(error)
