"""--shapes: what is typed becomes profiles, and what a model lacks becomes a line to type."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trtopt.core.errors import UsageError
from trtopt.core.options import spoken
from trtopt.core.shapes import (
    by_input,
    outside,
    parse_profile,
    parse_profiles,
    seen_sizes,
    suggested_shapes,
)
from trtopt.core.values import Profile, ShapeRange, TensorInfo
from trtopt.trt.profiles import validate_profiles


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_:/.]{0,8}[a-z]", fullmatch=True),
        st.lists(st.tuples(*[st.integers(0, 9)] * 3).map(sorted), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_profiles_read_back_what_they_print(sizes: dict[str, list[list[int]]]) -> None:
    profile = {name: ShapeRange(*(tuple(column) for column in zip(*rows))) for name, rows in sizes.items()}
    assert parse_profile(";".join(f"{name}:{shape}" for name, shape in profile.items())) == profile


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("x:1x8;y", "can't be read"),
        ("x:1x8,,y:1x8", "can't be read"),
        (f"x:1x{'9' * 5000}", "can't be read"),
        ("x:1x3,2x3", "can't be read"),
        ("x:1x3,2x3,3", "differ in rank"),
        ("x:4x3,2x3,8x3", "dimension 0 has 4, 2, 8"),
        ("x:1;x:2", "twice"),
    ],
)
def test_profiles_that_can_not_be_right_say_why(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_profile(text)


A, B, C = ShapeRange.parse("1x8,8x32,16x128"), ShapeRange.parse("1x4"), ShapeRange.parse("2x4")


@pytest.mark.parametrize(
    ("typed", "profiles"),
    [
        (["a:1x8,8x32,16x128", "b:1x4"], [{"a": A, "b": B}]),
        (["a:1x8,8x32,16x128;b:1x4"], [{"a": A, "b": B}]),
        (["a:1x8,8x32,16x128,b:1x4"], [{"a": A, "b": B}]),  # as trtexec takes them
        (["a:1x4", "a:2x4"], [{"a": B}, {"a": C}]),
        (["a:1x4;b:1x4", "a:2x4;b:2x4"], [{"a": B, "b": B}, {"a": C, "b": C}]),
        (["a:1x4", "b:1x4", "a:2x4", "b:2x4"], [{"a": B, "b": B}, {"a": C, "b": C}]),
        ([{"a": B, "b": B}, {"b": C, "a": C}], [{"a": B, "b": B}, {"a": C, "b": C}]),
        ({"a": "1x4"}, [{"a": B}]),
        ({"a": (1, 4)}, [{"a": B}]),
        ({"a": [(1, 8), [8, 32], (16, 128)]}, [{"a": A}]),
        ("x:0:1x4,2x4,2x4", [{"x:0": ShapeRange.parse("1x4,2x4,2x4")}]),
    ],
)
def test_different_inputs_are_one_profile_and_an_input_again_is_another(
    typed: list[str | Profile] | str, profiles: list[Profile]
) -> None:
    assert list(parse_profiles(typed)) == profiles


@pytest.mark.parametrize("typed", [["a:1x4", "a:2x4", "b:1x4", "b:2x4"], ["a:1x4;b:1x4", "a:2x4"]])
def test_profiles_that_can_not_be_told_apart_say_so(typed: list[str]) -> None:
    with pytest.raises(UsageError, match=r"can't be divided into profiles.*write each profile whole, `shapes='a:"):
        parse_profiles(typed)


@pytest.mark.parametrize("typed", [[3], [{"a": (1, "y")}], [{"a": [(1, 4), (2, 4)]}], [{"a": "1y4"}], [{"a": 3}]])
def test_profiles_from_python_that_are_something_else_say_so(typed: list[Profile]) -> None:
    with pytest.raises(UsageError, match=r"is needed|are needed|can't be read"):
        parse_profiles(typed)


def _typed(text: str) -> str:
    """Put a message in the command line's words."""
    return spoken(text, {"shapes": "--shapes"})


IDS = TensorInfo("input_ids", "int64", ("batch_size", "sequence_length"))
MASK = TensorInfo("attention_mask", "int64", ("batch_size", "sequence_length"))
OPEN = ("p2o.DynamicDimension.0", 3, "p2o.DynamicDimension.1", "p2o.DynamicDimension.2")


@pytest.mark.parametrize(
    ("inputs", "known", "line", "adapt"),
    [
        (
            [IDS, MASK],
            None,
            "--shapes 'input_ids:1x8,1x128,8x512;attention_mask:1x8,1x128,8x512'",
            " (min,opt,max; guesses to adapt: batch_size 1,1,8; sequence_length 8,128,512)",
        ),
        ([IDS, MASK], {"input_ids": A}, "--shapes 'input_ids:1x8,8x32,16x128;attention_mask:1x8,8x32,16x128'", ""),
        (
            [TensorInfo("x", "float32", (-1, 3, 224, 224))],
            None,
            "--shapes x:1x3x224x224,8x3x224x224,32x3x224x224",
            " (min,opt,max; guesses to adapt: batch 1,8,32)",
        ),
        (
            [TensorInfo("x", "float32", OPEN)],
            None,
            "--shapes x:1x3x320x320,1x3x640x640,8x3x960x960",
            " (min,opt,max; guesses to adapt: batch 1,1,8; dimension 2 of x 320,640,960; dimension 3 of x 320,640,960)",
        ),
        (  # as tf2onnx numbers sizes
            [TensorInfo("x", "uint8", ("unk__6", "unk__7", 3))],
            None,
            "--shapes x:1x8x3,1x128x3,8x512x3",
            " (min,opt,max; guesses to adapt: batch 1,1,8; dimension 1 of x 8,128,512)",
        ),
        ([TensorInfo("x", "float32", (1, 3))], None, "", ""),
        (
            [
                TensorInfo("sound", "float32", ("n", "time")),
                TensorInfo("im", "float32", ("n", "h", "h", 3)),
            ],
            None,
            "--shapes 'sound:1x4000,1x16000,8x80000;im:1x320x320x3,1x640x640x3,8x960x960x3'",
            " (min,opt,max; guesses to adapt: n 1,1,8; time 4000,16000,80000; h 320,640,960)",
        ),
        ([IDS], {"input_ids": ShapeRange.parse("0x8,8x32,16x128")}, "--shapes input_ids:0x8,8x32,16x128", ""),
    ],
)
def test_the_option_to_type_is_whole_and_says_what_to_adapt(
    inputs: list[TensorInfo], known: Profile | None, line: str, adapt: str
) -> None:
    said = suggested_shapes(inputs, known)
    assert (_typed(said.option), _typed(str(said))) == (line, line + adapt)
    if line:
        assert said.option == f"`shapes={shlex.split(line)[1]!r}`"
        validate_profiles(inputs, parse_profiles(shlex.split(line)[1]))


def test_values_that_decide_shapes_stand_in_the_same_option() -> None:
    steps_first = [TensorInfo("x", "float32", ("time", "n", 3), 1)]
    assert suggested_shapes(steps_first).option == "`shapes='x:8x1x3,128x1x3,512x8x3'`"
    said = suggested_shapes([TensorInfo("x", "float32", ("n", 3))], values={"size": 2})
    assert said.option == "`shapes='x:1x3,8x3,32x3;size:NxN,NxN,NxN'`"
    assert "the 2 values N of size" in said.guesses
    one = suggested_shapes([], {"size": B, "rank": B}, values={"size": 2, "rank": 1})
    assert (one.option, one.guesses) == ("`shapes='size:1x4;rank:N,N,N'`", ("the 1 value N of rank",))


def test_shapes_are_read_by_people() -> None:
    assert TensorInfo("x", "float32", OPEN).dims == "(?, 3, ?, ?)"
    assert TensorInfo("x", "float32", ("batch", 3, -1, 224)).dims == "(batch, 3, ?, 224)"
    assert TensorInfo("x", "float32").dims == "scalar"


def test_sizes_are_those_of_samples_where_there_are_some() -> None:
    mask = TensorInfo("mask", "float32", ("n", "h", "w"))
    batches = [{"mask": np.zeros((count, height, 128))} for count, height in ((4, 64), (4, 96), (1, 96), (2, 80))]
    seen = seen_sizes([mask], batches)
    assert seen == {("mask", 1): (64, 96, 96), ("mask", 2): (128,) * 3}
    said = suggested_shapes([mask], seen=seen)
    assert (said.option, said.guesses) == ("`shapes='mask:1x64x128,1x96x128,8x96x128'`", ("n 1,1,8",))
    beyond = suggested_shapes([mask], seen=seen, longest={("mask", 1): 80})  # what the model takes is proposed, no more
    assert beyond.option == "`shapes='mask:1x64x128,1x80x128,8x80x128'`"
    steps_first = TensorInfo("x", "float32", ("steps", "n", 3), batch_axis=1)
    assert seen_sizes([steps_first], [{"x": np.zeros((5, 7, 3))}]) == {("x", 0): (7, 7, 7)}


PAST = TensorInfo("past", "float32", ("batch", "past", 16))
NOW = TensorInfo("now", "float32", ("batch", "now", 16))


def test_sizes_that_are_named_as_sums_are_the_sums() -> None:
    mask = TensorInfo("mask", "float32", ("batch", "past + now"))
    one = TensorInfo("one", "float32", ("batch", "past + 1"))
    said = suggested_shapes([PAST, NOW, mask, one])
    assert said.option.endswith("mask:1x16,1x256,8x1024;one:1x9,1x129,8x513'`")
    assert not any("mask" in guess for guess in said.guesses)
    with pytest.raises(
        UsageError, match=r"'past \+ now' is 8/8/8 for mask, where these add up to 16/16/16. Write .*mask:1x16"
    ):
        validate_profiles([PAST, NOW, mask], parse_profiles("past:1x8x16;now:1x8x16;mask:1x8"))


STEPS = TensorInfo("s", "float32", ("t", "n", 3), batch_axis=1)
FREE = TensorInfo("f", "float32", ("k", 2), batch_axis=None)
RANGES = "n:1x4x16,2x4x16,3x8x16;s:2x1x3,2x4x3,5x4x3;f:1x2,2x2,3x2"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"n": (9, 4, 16), "s": (9, 2, 3), "f": (1, 3, 2)},
            "",
        ),  # however many at a time; those without samples are whole
        ({"n": (1, 8, 16), "fixed": (1, 7)}, ""),
        ({"n": (1, 9, 16)}, "samples of n 9x16 are outside the engine's shapes, n 1x4x16 to 3x8x16"),
        (
            {"n": (1, 3, 16), "s": (1, 6, 3), "f": (1, 3, 2)},
            "samples of n 3x16, s 6x3 are outside the engine's shapes, n 1x4x16 to 3x8x16 or s 2x1x3 to 5x4x3",
        ),
        ({"f": (1, 4, 2)}, "samples of f 4x2 are outside the engine's shapes, f 1x2 to 3x2"),
    ],
)
def test_samples_that_no_profile_takes_are_named(sizes: dict[str, tuple[int, ...]], said: str) -> None:
    now, fixed = TensorInfo("n", "float32", ("b", "now", 16)), TensorInfo("fixed", "float32", (1, 3))
    samples = {name: np.zeros(shape) for name, shape in sizes.items()}
    profiles = parse_profiles(RANGES)
    assert outside(profiles, [now, STEPS, FREE, fixed], samples) == said
    wide = parse_profiles("n:1x1x1,1x1x1,9x9x16;s:1x1x3,1x1x3,9x9x3;f:1x2,1x2,9x2")
    assert outside((*profiles, *wide), [now, STEPS, FREE], samples) == outside((), [now], samples) == ""


# Ranges by the names of sizes ---------------------------------------------------------------------------------------------

TOKENS = TensorInfo("tokens", "int64", ("batch", 1))
STEP_MASK = TensorInfo("mask", "int64", ("batch", "past + 1"))
STEP = [TOKENS, STEP_MASK, *(TensorInfo(f"past_{n}", "float32", ("batch", 2, "past", 32)) for n in range(4))]


def test_a_range_of_a_size_is_that_of_every_input_that_has_it() -> None:
    [profile] = by_input(parse_profiles(["batch:1,2,4", "past:1,64,96"]), STEP)
    assert profile["tokens"] == ShapeRange((1, 1), (2, 1), (4, 1))
    assert profile["mask"] == ShapeRange((1, 2), (2, 65), (4, 97))
    assert profile["past_3"] == ShapeRange((1, 2, 1, 32), (2, 2, 64, 32), (4, 2, 96, 32))
    validate_profiles(STEP, [profile])
    first, second = by_input(parse_profiles(["batch:1;past:1,64,96", "batch:8;past:1,64,96"]), STEP)
    assert first["tokens"].static and second["tokens"] == ShapeRange((8, 1), (8, 1), (8, 1))


def test_an_input_that_is_called_as_a_size_is_meant_and_one_with_a_shape_keeps_it() -> None:
    given = parse_profiles("past:1x8x16;mask:1x9")
    assert by_input(given, [PAST, TensorInfo("mask", "float32", ("batch", "past + 1"))]) == given
    [profile] = by_input(parse_profiles("batch:1,2,4;past:1,64,96;past_0:4x2x8x32"), STEP)
    assert profile["past_0"] == ShapeRange(*[(4, 2, 8, 32)] * 3) and profile["past_1"].max == (4, 2, 96, 32)


def test_a_size_that_lacks_is_asked_for() -> None:
    with pytest.raises(
        UsageError, match=r"gives past, and not all sizes of the input mask .*: add 'batch:MIN,OPT,MAX'"
    ):
        by_input(parse_profiles("past:1,64,96"), STEP)
    unnamed = TensorInfo("x", "float32", ("batch", "?"))
    with pytest.raises(UsageError, match=r"the input x \(batch, \?\): add the whole shape, x:MIN,OPT,MAX"):
        by_input(parse_profiles("batch:1,2,4"), [unnamed])


@pytest.mark.parametrize(
    "options", [["x:1x8,2x8,4x8", "batch:5,6,7"], ["batch:5,6,7", "x:1x8,2x8,4x8"], ["x:1x8;batch:5"]]
)
def test_a_range_that_no_input_takes_is_refused(options: list[str]) -> None:
    """Else it is a profile, or a range, that nobody sees go."""
    with pytest.raises(
        UsageError, match="gives batch, and the whole shape of each input that has it: give one of the two"
    ):
        by_input(parse_profiles(options), [TensorInfo("x", "float32", ("batch", 8))])


def test_each_range_is_of_an_input_that_is_left_to_it() -> None:
    """The caches have their shapes, and the mask takes `past` by a sum: without it nothing would."""
    caches = ";".join(f"past_{n}:1x2x8x32" for n in range(4))
    given = parse_profiles(f"batch:1;past:8;{caches}")
    assert by_input(given, STEP)[0]["mask"].max == (1, 9)
    with pytest.raises(UsageError, match="gives past, and the whole shape of each input that has it"):
        by_input(parse_profiles(f"batch:1;past:8;mask:1x9;{caches}"), STEP)


def test_names_that_are_no_sizes_are_said() -> None:
    with pytest.raises(UsageError, match=r"gives batch, width, and not all sizes of the input mask"):
        by_input(parse_profiles("batch:1,2,4;width:1,64,96"), STEP)


def test_few_sizes_of_many_inputs_are_suggested_by_name_and_caches_are_no_images() -> None:
    said = suggested_shapes(STEP)
    assert said.option == "`shapes='batch:1,1,8;past:8,128,512'`"
    validate_profiles(STEP, by_input(parse_profiles(said.option[len("`shapes='") : -2]), STEP))
    called = [TensorInfo(f"x{n}", "float32", ("batch", 2, "x0", 32)) for n in range(9)]  # "x0" is an input, too
    assert suggested_shapes(called).option.startswith("`shapes='x0:1x2x320x32,")
    assert suggested_shapes(STEP[:4]).option.startswith("`shapes='tokens:1x1,")  # few inputs: each is said
