"""`shapes=`: profiles read, written as they are typed, and suggested where a model leaves sizes open."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trtopt.core.errors import UsageError
from trtopt.core.values import EXAMPLE, SHAPE, GivenProfile, Profile, ShapeRange, TensorInfo, named_size, x
from trtopt.core.words import named

Key = tuple[str, int] | str  # a dimension, as `TensorInfo.dimension` names it
Sizes = tuple[int, int, int]  # min, opt, max
SeenSizes = Mapping[tuple[str, int], tuple[int, int, int]]  # (input, axis) → least, commonest, largest
DEFAULT_BATCH = (1, 8, 32)  # min, opt, max for a model whose only dynamic dimension is the first
_LENGTH = re.compile("past|length|seq|token|time|step", re.I)  # names of sizes that are no image's, as of caches
_INPUT = re.compile(rf"[;\s]*(?P<name>[^;,\s][^;]*?)\s*:\s*(?P<shapes>{SHAPE}(?:\s*,\s*{SHAPE})*)\s*(?:[;,]|$)")


def parse_profile(text: str) -> dict[str, ShapeRange]:
    """Read `NAME:MIN,OPT,MAX[;NAME:…]`, each shape as 1x3x224x224; one shape alone stands for all three. Between inputs a comma
    does too, as in trtexec's options. UsageError where it can't be read."""
    profile: dict[str, ShapeRange] = {}
    rest = text.strip(" ;")
    while rest:
        match = _INPUT.match(rest)
        if not match:
            raise UsageError(
                f"`shapes=` {rest!r} can't be read; write NAME:MIN,OPT,MAX such as input:{EXAMPLE}, of several inputs "
                "'NAME:…;NAME:…' in quotes"
            )
        name, rest = match["name"], rest[match.end() :].strip(" ;")
        if name in profile:
            raise UsageError(
                f"`shapes=` names the input {name!r} twice in one profile; give `shapes=` again for another profile"
            )
        profile[name] = _range(name, match["shapes"])
    if not profile:
        raise UsageError(f"`shapes=` is empty; write NAME:MIN,OPT,MAX such as input:{EXAMPLE}")
    return profile


def parse_profiles(shapes: str | GivenProfile | Iterable[str | GivenProfile]) -> tuple[Profile, ...]:
    """Profiles from what is given one after the other: an input that comes again begins another profile."""
    profiles: list[dict[str, ShapeRange]] = []
    for item in [shapes] if isinstance(shapes, (str, Mapping)) else shapes:
        part = parse_profile(item) if isinstance(item, str) else _stated(item)
        if not profiles or profiles[-1].keys() & part.keys():
            profiles.append({})
        profiles[-1].update(part)
    if any(profile.keys() != profiles[0].keys() for profile in profiles):
        raise UsageError(
            "`shapes=` can't be divided into profiles, as each must name the same inputs: write each profile whole, "
            "`shapes='a:1x3;b:1x4'`"
        )
    return tuple(profiles)


def _stated(profile: Any) -> dict[str, ShapeRange]:
    """Read a profile from Python: each range as an object, as text, as one shape, or as three."""
    if not isinstance(profile, Mapping):
        raise UsageError(
            f"`shapes=` holds {profile!r}; 'NAME:MIN,OPT,MAX' or a mapping of names to ShapeRange is needed"
        )
    return {name: _range(name, shape) for name, shape in profile.items()}


def _range(name: str, given: Any) -> ShapeRange:
    if isinstance(given, ShapeRange):
        return given
    if isinstance(given, (list, tuple)):
        given = ",".join(map(x, given)) if all(isinstance(item, (list, tuple)) for item in given) else x(given)
    try:
        return ShapeRange.parse(given)
    except UsageError as error:
        raise UsageError(f"`shapes='{name}'`: {error}") from None


def by_input(profiles: Iterable[Profile], inputs: Sequence[TensorInfo]) -> tuple[Profile, ...]:
    """Profiles of the inputs alone: where one gives ranges of sizes by their names, such as past:1,64,128, every input that
    these leave nothing open of, and whose shape it doesn't give itself, has the shape that they make. UsageError where one of
    an input's sizes is given and another isn't."""
    sizes = {size for info in inputs for size in info.shape if named_size(size)} - {info.name for info in inputs}
    return tuple(_of_inputs(profile, inputs, sizes & profile.keys()) for profile in profiles)


def _of_inputs(profile: Profile, inputs: Sequence[TensorInfo], sizes: Collection[Any]) -> Profile:
    ranges: dict[Key, Sizes] = {
        name: (bounds.min[0], bounds.opt[0], bounds.max[0])
        for name, bounds in profile.items()
        if name in sizes and len(bounds.min) == 1
    }
    made = {name: bounds for name, bounds in profile.items() if name not in ranges}
    used = set[str]()
    for info in inputs if ranges else ():
        keys = {axis: info.dimension(axis) for axis in info.open_axes}
        known = {axis: found for axis, key in keys.items() if (found := ranges.get(key) or summed(key, ranges))}
        if not known or info.name in made:
            continue
        if lacking := [key for axis, key in keys.items() if axis not in known]:
            more = ", ".join(f"'{key}:MIN,OPT,MAX'" for key in lacking if named_size(str(key)))
            raise UsageError(
                f"`shapes=` gives {', '.join(map(str, profile))}, and not all sizes of the input {info.name} {info.dims}: add "
                f"{more or f'the whole shape, {info.name}:MIN,OPT,MAX'}"
            )
        used.update(part.strip() for key in keys.values() for part in str(key).split("+"))
        bounds = [known.get(axis) or (int(size),) * 3 for axis, size in enumerate(info.shape)]
        made[info.name] = ShapeRange(*zip(*bounds))
    if idle := [str(name) for name in ranges if name not in used]:
        raise UsageError(
            f"`shapes=` gives {', '.join(idle)}, and the whole shape of each input that has it: give one of the "
            "two, the same in every profile"
        )
    return made


def shapes_option(profile: Mapping[str, ShapeRange | str]) -> str:
    """A profile as an option of messages."""
    return named("shapes", ";".join(f"{name}:{shape}" for name, shape in profile.items()))


class Suggestion(NamedTuple):
    """A whole `shapes=` option, empty where nothing is open, and what of it was guessed: names with their min,opt,max."""

    option: str
    guesses: tuple[str, ...] = ()

    def __str__(self) -> str:
        hint = f" (min,opt,max; guesses to adapt: {'; '.join(self.guesses)})" if self.guesses else ""
        return self.option + hint


NOTHING = Suggestion("")


def batch_alone(inputs: Iterable[TensorInfo]) -> bool:
    """Tell if the first dimension is all that is open: a build then takes `DEFAULT_BATCH`."""
    return all(info.open_axes in ((), (0,)) for info in inputs)


def suggested_shapes(
    inputs: Sequence[TensorInfo],
    given: Profile | None = None,
    values: Mapping[str, int] | None = None,
    longest: Mapping[tuple[str, int], int] | None = None,
    seen: SeenSizes | None = None,
) -> Suggestion:
    """The `shapes=` option for inputs that leave sizes open: of ranges that are `given` (a dimension has the same one wherever
    its name stands), `seen` in samples, or guessed, and no longer than an axis may be (`longest`). "N" stands for the numbers
    of inputs whose `values` decide shapes."""
    values = values or {}
    needing = [info for info in inputs if info.open_axes]
    places = [(info, axis, info.dimension(axis)) for info in needing for axis in info.open_axes]
    ranges = {key: seen[info.name, axis] for info, axis, key in places if seen and (info.name, axis) in seen}
    for info, axis, key in places:
        shape = (given or {}).get(info.name)
        if shape is not None and len(shape.min) == len(info.shape) and min(shape.min) >= 0:
            ranges[key] = shape.min[axis], shape.opt[axis], shape.max[axis]
    alone, labels = batch_alone(needing), dict[Key, str]()
    for info, axis, key in places:
        if key not in ranges:
            ranges[key] = default_range(info, axis, alone)
            unnamed = f"dimension {axis} of {info.name}" if axis != info.batch_axis else "batch"
            labels[key] = str(key) if named_size(info.shape[axis]) else unnamed
        if longest and (end := longest.get((info.name, axis))) is not None:
            low, best, high = ranges[key]
            ranges[key] = min(low, end), min(best, end), min(high, end)
    sums = {key for key in ranges if summed(key, ranges) is not None}
    ranges = {key: summed(key, ranges) or sizes for key, sizes in ranges.items()}
    guesses = [f"{label} {','.join(map(str, ranges[key]))}" for key, label in labels.items() if key not in sums]
    texts: dict[str, ShapeRange | str] = {}
    for info in needing:
        sizes = (
            ranges[info.dimension(axis)] if axis in info.open_axes else (int(size),) * 3
            for axis, size in enumerate(info.shape)
        )
        texts[info.name] = ShapeRange(*zip(*sizes))
    for name, count in values.items():
        if given and name in given and len(given[name].min) == count:
            texts[name] = given[name]
            continue
        texts[name] = ",".join(["x".join("N" * count) or "N"] * 3)
        guesses.append(f"the {count} value{'s' if count != 1 else ''} N of {name}")
    if not values and (short := _by_size(needing, {key: ranges[key] for _, _, key in places if key not in sums})):
        texts = short
    return Suggestion(shapes_option(texts) if texts else "", tuple(guesses))


def _by_size(inputs: Sequence[TensorInfo], ranges: Mapping[Key, Sizes]) -> dict[str, ShapeRange | str]:
    """The ranges by the names of sizes, where many inputs share few, as caches do; empty: they don't, or a name says nothing or
    is an input's."""
    names = {info.name for info in inputs}
    apart = len(inputs) <= 2 * len(ranges) or any(key in names or not named_size(str(key)) for key in ranges)
    return {} if apart else {str(key): ",".join(map(str, sizes)) for key, sizes in ranges.items()}


def summed(key: Key, ranges: Mapping[Key, Sizes]) -> Sizes | None:
    """The range of a dimension whose name is a sum of others' and of numbers, as in "past + sequence" or "past + 1"."""
    parts = [part.strip() for part in key.split("+")] if isinstance(key, str) else []
    if len(parts) < 2 or not all(part.isdecimal() or part in ranges for part in parts):
        return None
    low, best, high = map(sum, zip(*((int(part),) * 3 if part.isdecimal() else ranges[part] for part in parts)))
    return low, best, high


def seen_sizes(inputs: Sequence[TensorInfo], batches: Iterable[Mapping[str, Any]]) -> SeenSizes:
    """The least, commonest and largest size that samples (input name → array, samples first) have on each open axis but their
    own."""
    counts: dict[tuple[str, int], Counter[int]] = {}
    for batch in batches:
        for info in (info for info in inputs if info.name in batch):
            shape = list(batch[info.name].shape[1:])
            if info.batch_axis is not None:
                shape.insert(info.batch_axis, 0)
            for axis in info.open_axes if len(shape) == len(info.shape) else ():
                if axis != info.batch_axis:
                    counts.setdefault((info.name, axis), Counter())[shape[axis]] += 1
    return {key: (min(sizes), max(sizes, key=lambda size: sizes[size]), max(sizes)) for key, sizes in counts.items()}


def default_range(info: TensorInfo, axis: int, alone: bool) -> tuple[int, int, int]:
    """A range for an open size: samples, an image's side, its channels, or the length of a sequence or of sound."""
    if axis == info.batch_axis:
        return DEFAULT_BATCH if alone else (1, 1, 8)
    if len(info.shape) == 4 and not _LENGTH.search(str(info.shape[axis])):
        return (3, 3, 3) if axis == (3 if info.channels_last else 1) else (320, 640, 960)
    return (4000, 16000, 80000) if info.floating and len(info.shape) == 2 else (8, 128, 512)


def outside(profiles: Sequence[Profile], inputs: Sequence[TensorInfo], samples: Mapping[str, Any]) -> str:
    """Return what of these samples no profile takes, however many go in at a time; empty: nothing. Inputs of one shape aren't
    looked at: the range of one is of its values, if it has any."""
    infos = [info for info in inputs if info.open_axes and info.name in samples]
    shapes = {info.name: tuple(samples[info.name].shape[1:]) for info in infos}

    def taken(info: TensorInfo, bounds: ShapeRange) -> bool:
        shape, axis = shapes[info.name], info.batch_axis
        return bounds.holds(shape if axis is None else (*shape[:axis], *bounds.min[axis : axis + 1], *shape[axis:]))

    missed = [[i.name for i in infos if not taken(i, item[i.name])] for item in profiles]
    if not missed or not all(missed):
        return ""
    names = missed[0]
    ranges = dict.fromkeys(f"{name} {x(item[name].min)} to {x(item[name].max)}" for item in profiles for name in names)
    listed = ", ".join(f"{name} {x(shapes[name])}" for name in names)
    return f"samples of {listed} are outside the engine's shapes, {' or '.join(ranges)}"
