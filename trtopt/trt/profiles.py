"""Optimization profiles checked against the network's inputs before TensorRT sees them, every problem at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trtopt.core.errors import UsageError
from trtopt.core.shapes import Key, SeenSizes, Sizes, suggested_shapes, summed
from trtopt.core.values import Profile, ShapeRange, TensorInfo, x


def may_be_values(info: TensorInfo) -> bool:
    """Tell whether a profile may give this input's *values* (a shape tensor: integers, rank 0 or 1, known length)."""
    return info.dtype.startswith(("int", "uint")) and len(info.shape) <= 1 and not info.open_axes


def value_count(info: TensorInfo) -> int:
    return int(info.shape[0]) if info.shape else 1


def profile_problems(
    inputs: Sequence[TensorInfo],
    profiles: Sequence[Profile],
    *,
    shape_inputs: frozenset[str] | None = None,
    longest: Mapping[tuple[str, int], int] | None = None,
) -> list[str]:
    """All that is wrong with `profiles` for a network with these inputs, one sentence each; empty when they fit.

    Args:
        shape_inputs: names of inputs whose values, not shapes, a profile bounds, where the parser has said so;
            None: unknown, so a small static integer input may be given either way.
        longest: the largest size that an input may have on an axis (`trtopt.graph.lengths`), where that is known.
    """
    by_name = {info.name: info for info in inputs}
    values = by_name.keys() & (shape_inputs or ())
    open_inputs = [info for info in inputs if info.open_axes or info.name in values]
    if open_inputs and not profiles:
        return _uncovered(open_inputs, values)
    problems: list[str] = []
    for number, profile in enumerate(profiles):
        listing = ", ".join(f"{info.name} {info.dims}" for info in inputs) or "none"
        own = [f"there is no input {name!r}; inputs: {listing}" for name in profile if name not in by_name]
        for name, info in by_name.items():
            if name not in profile:
                what = "values of the shape input {} are" if name in values else "dynamic input {} is"
                own += [f"the {what.format(f'{name} {info.dims}')} missing"] if info in open_inputs else []
            elif name in values or (shape_inputs is None and may_be_values(info)):
                count, length = value_count(info), len(profile[name].min)
                own += [f"{name} is a shape input of {count} values, {length} were given"] if length != count else []
            else:
                own += _against(info, profile[name]) or _too_long(info, profile[name], longest or {})
        own += _disagreements(inputs, profile)
        problems += own if len(profiles) == 1 else [f"profile {number}: {text}" for text in own]
    return problems


def validate_profiles(
    inputs: Sequence[TensorInfo],
    profiles: Sequence[Profile],
    *,
    shape_inputs: frozenset[str] | None = None,
    longest: Mapping[tuple[str, int], int] | None = None,
    seen: SeenSizes | None = None,
) -> None:
    """Raise one UsageError that lists every problem of `profile_problems`, with the line to type, for samples of the sizes
    that were seen."""
    problems = profile_problems(inputs, profiles, shape_inputs=shape_inputs, longest=longest)
    if not problems:
        return
    values = {info.name: value_count(info) for info in inputs if info.name in (shape_inputs or ())}
    line = str(suggested_shapes(inputs, profiles[0] if profiles else None, values, longest, seen))
    if not profiles:
        raise UsageError(f"{'; '.join(problems)}. Write {line}")
    if not line and not any(map(may_be_values, inputs)):
        line = "no `shapes=`: the model leaves no size open"
    raise UsageError(f"`shapes=` doesn't fit the model: {'; '.join(problems)}. Write {line or 'NAME:MIN,OPT,MAX'}")


def _too_long(info: TensorInfo, shape: ShapeRange, longest: Mapping[tuple[str, int], int]) -> list[str]:
    """Sizes beyond the constants that the model has for them."""
    return [
        f"{info.name} goes up to {size} on axis {axis}, and the model's constants (its position embeddings) to {end}"
        for axis, size in enumerate(shape.max)
        if (end := longest.get((info.name, axis), size)) < size
    ]


def _uncovered(open_inputs: Sequence[TensorInfo], values: Collection[str]) -> list[str]:
    """List what is missing altogether: ranges of sizes, and of the values that decide sizes."""
    dynamic = ", ".join(f"{info.name} {info.dims}" for info in open_inputs if info.name not in values)
    problems = [f"the model leaves sizes open, and no `shapes=` gives their range: {dynamic}"] if dynamic else []
    counts = {info.name: value_count(info) for info in open_inputs if info.name in values}
    return problems + [
        f"the values of the input {name} decide shapes inside, so TensorRT needs their range, not the input's own shape: "
        f"{name}:{'x'.join('N' * count) or 'N'} with {count} number{'s' * (count > 1)}, or MIN,OPT,MAX of such"
        for name, count in counts.items()
    ]


def _against(info: TensorInfo, shape: ShapeRange) -> list[str]:
    if len(shape.min) != len(info.shape):
        return [f"{info.name} has rank {len(info.shape)} {info.dims}, the shapes given have rank {len(shape.min)}"]
    problems = []
    if min(shape.min, default=0) < 0:
        problems.append(f"{info.name} can't have negative sizes ({x(shape.min)})")
    for axis, (size, sizes) in enumerate(zip(info.shape, zip(shape.min, shape.opt, shape.max))):
        if axis not in info.open_axes and {*sizes} != {size}:
            text = ", ".join(map(str, sizes if len({*sizes}) > 1 else sizes[:1]))
            problems.append(f"{info.name} has a fixed size of {size} in dimension {axis}, given {text}")
    return problems


def _disagreements(inputs: Sequence[TensorInfo], profile: Mapping[str, ShapeRange]) -> list[str]:
    """Dimensions of one name are equal by the ONNX rules; different ranges for them can never all be used."""
    first: dict[Key, tuple[str, Sizes]] = {}
    problems = []
    for info in inputs:
        shape = profile.get(info.name)
        if shape is None or len(shape.min) != len(info.shape):
            continue
        for axis, sizes in enumerate(zip(shape.min, shape.opt, shape.max)):
            size = info.dimension(axis)
            other, before = first.setdefault(size, (info.name, sizes))
            if before != sizes:
                problems.append(
                    f"dimension {size!r} is {'/'.join(map(str, before))} for {other} and "
                    f"{'/'.join(map(str, sizes))} for {info.name}; one name means one size"
                )
    ranges = {size: sizes for size, (_, sizes) in first.items()}
    for size, (name, sizes) in first.items():
        if (total := summed(size, ranges)) is not None and total != sizes:
            given, needed = ("/".join(map(str, item)) for item in (sizes, total))
            problems.append(f"dimension {size!r} is {given} for {name}, where these add up to {needed}")
    return problems
