"""Optimization profiles checked against the network's inputs before TensorRT sees them, every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtopt.core.errors import UsageError
from trtopt.core.shapes import suggested_shapes
from trtopt.core.values import Profile, ShapeRange, TensorInfo


def may_be_values(info: TensorInfo) -> bool:
    """Whether a profile may give this input's *values* (a shape tensor: integers, rank 0 or 1, known length)."""
    return info.dtype.startswith(("int", "uint")) and len(info.shape) <= 1 and not info.open_axes


def profile_problems(
    inputs: Sequence[TensorInfo], profiles: Sequence[Profile], *, shape_inputs: frozenset[str] | None = None
) -> list[str]:
    """Everything wrong with `profiles` for a network with these inputs, one sentence each; empty when they fit.

    Args:
        shape_inputs: names of inputs whose values, not shapes, a profile bounds, where the parser has said so;
            None: unknown, so a small static integer input may be given either way.
    """
    by_name = {info.name: info for info in inputs}
    listing = ", ".join(f"{info.name} {info.dims}" for info in inputs) or "none"
    problems: list[str] = []
    needing = [info for info in inputs if info.open_axes or (shape_inputs is not None and info.name in shape_inputs)]
    if needing and not profiles:
        problems += _uncovered(needing, shape_inputs or frozenset())
    for number, profile in enumerate(profiles):
        where = "" if len(profiles) == 1 else f"profile {number}: "
        for name, shape in profile.items():
            if name not in by_name:
                problems.append(f"{where}there is no input {name!r}; inputs: {listing}")
                continue
            values = may_be_values(by_name[name]) if shape_inputs is None else name in shape_inputs
            problems += [where + text for text in _against(by_name[name], shape, values)]
        absent = [info for info in needing if info.name not in profile]
        for info in absent:
            what = "values of the shape input" if info.name in (shape_inputs or ()) else "dynamic input"
            problems.append(f"{where}the {what} {info.name} {info.dims} {'are' if 'values' in what else 'is'} missing")
        problems += [where + text for text in _disagreements(inputs, profile)]
    return problems


def validate_profiles(
    inputs: Sequence[TensorInfo], profiles: Sequence[Profile], *, shape_inputs: frozenset[str] | None = None
) -> None:
    """Raise one UsageError that lists every problem of `profile_problems`, with the line to type."""
    problems = profile_problems(inputs, profiles, shape_inputs=shape_inputs)
    if not problems:
        return
    values = {
        info.name: int(info.shape[0]) if info.shape else 1 for info in inputs if info.name in (shape_inputs or ())
    }
    line = str(suggested_shapes(inputs, profiles[0] if profiles else None, values))
    if not profiles:
        raise UsageError(f"{'; '.join(problems)}. Write {line}")
    if not line and not any(map(may_be_values, inputs)):
        line = "no `shapes=`: the model leaves no size open"
    raise UsageError(f"`shapes=` doesn't fit the model: {'; '.join(problems)}. Write {line or 'NAME:MIN,OPT,MAX'}")


def _uncovered(needing: Sequence[TensorInfo], shape_inputs: frozenset[str]) -> list[str]:
    """What is missing altogether: ranges of sizes, and of the values that decide sizes."""
    dynamic = ", ".join(f"{info.name} {info.dims}" for info in needing if info.name not in shape_inputs)
    problems = [f"the model leaves sizes open, and no `shapes=` gives their range: {dynamic}"] if dynamic else []
    for info in needing:
        if info.name in shape_inputs:
            count = int(info.shape[0]) if info.shape else 1
            example = "x".join("N" * count) or "N"
            problems.append(
                f"the values of the input {info.name} decide shapes inside, so TensorRT needs their range, not the input's own "
                f"shape: {info.name}:{example} with {count} number{'s' if count > 1 else ''}, or MIN,OPT,MAX of such"
            )
    return problems


def _against(info: TensorInfo, shape: ShapeRange, values: bool) -> list[str]:
    if values:
        length = int(info.shape[0]) if info.shape else 1
        if len(shape.min) == length:
            return []
        return [f"{info.name} is a shape input of {length} values, {len(shape.min)} were given"]
    if len(shape.min) != len(info.shape):
        return [f"{info.name} has rank {len(info.shape)} {info.dims}, the shapes given have rank {len(shape.min)}"]
    problems = []
    if min(shape.min, default=0) < 0:
        problems.append(f"{info.name} can't have negative sizes ({'x'.join(map(str, shape.min))})")
    for axis, size in enumerate(info.shape):
        given = {shape.min[axis], shape.opt[axis], shape.max[axis]}
        if isinstance(size, int) and size >= 0 and given != {size}:
            sizes = f"{shape.min[axis]}, {shape.opt[axis]}, {shape.max[axis]}" if len(given) > 1 else str(given.pop())
            problems.append(f"{info.name} has a fixed size of {size} in dimension {axis}, given {sizes}")
    return problems


def _disagreements(inputs: Sequence[TensorInfo], profile: Mapping[str, ShapeRange]) -> list[str]:
    """Dimensions of one name are equal by the ONNX rules; different ranges for them can never all be used."""
    seen: dict[str, tuple[str, tuple[int, int, int]]] = {}
    problems = []
    for info in inputs:
        shape = profile.get(info.name)
        if shape is None or len(shape.min) != len(info.shape):
            continue
        for axis, size in enumerate(info.shape):
            if not isinstance(size, str) or size in ("", "?"):  # "?" is how some exporters write "unknown"
                continue
            given = (shape.min[axis], shape.opt[axis], shape.max[axis])
            other, before = seen.setdefault(size, (info.name, given))
            if before != given:
                problems.append(
                    f"dimension {size!r} is {'/'.join(map(str, before))} for {other} and "
                    f"{'/'.join(map(str, given))} for {info.name}; one name means one size"
                )
    return problems
