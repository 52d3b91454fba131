"""Profiles against inputs, without any TensorRT."""

from __future__ import annotations

import pytest

from trtopt.core.errors import UsageError
from trtopt.core.values import ShapeRange, TensorInfo
from trtopt.trt.profiles import profile_problems, validate_profiles

IDS = TensorInfo("input_ids", "int64", ("batch", "sequence"))
MASK = TensorInfo("attention_mask", "int64", ("batch", "sequence"))
IMAGE = TensorInfo("image", "float32", (-1, 3, 224, 224))
SIZES = TensorInfo("sizes", "int64", (2,))


def same(*shape: int) -> ShapeRange:
    return ShapeRange(shape, shape, shape)


def test_every_problem_at_once() -> None:
    profiles = (
        {"imaeg": same(1, 3, 224, 224)},
        {"image": same(1, 224, 224)},
        {"image": ShapeRange((1, 3, 224, 224), (1, 3, 224, 256), (1, 3, 224, 256))},
    )
    assert profile_problems([IMAGE], profiles) == [
        "profile 0: there is no input 'imaeg'; inputs: image (?, 3, 224, 224)",
        "profile 0: the dynamic input image (?, 3, 224, 224) is missing",
        "profile 1: image has rank 4 (?, 3, 224, 224), the shapes given have rank 3",
        "profile 2: image has a fixed size of 224 in dimension 3, given 224, 256, 256",
    ]
    with pytest.raises(
        UsageError, match=r"imaeg.*rank 4.*fixed size.*Write `shapes='image:1x3x224x224,8x3x224x224,32x3x224x224'`"
    ):
        validate_profiles([IMAGE], profiles)


def test_dynamic_inputs_need_a_profile_and_static_ones_do_not() -> None:
    assert "no `shapes=` gives their range: image" in profile_problems([IMAGE], ())[0]
    with pytest.raises(
        UsageError, match=r"no `shapes=` gives their range: image .*\. Write `shapes='image:1x3x224x224,8x3"
    ):
        validate_profiles([IMAGE], ())
    with pytest.raises(UsageError, match=r"in dimension 3, given 8\. Write `shapes='image:2x3x224x224'`"):
        validate_profiles([IMAGE], ({"image": same(2, 3, 224, 8)}, {"image": same(4, 3, 224, 224)}))
    assert (
        profile_problems([IMAGE], ({"image": ShapeRange((1, 3, 224, 224), (4, 3, 224, 224), (8, 3, 224, 224))},)) == []
    )
    assert profile_problems([TensorInfo("x", "float32", (1, 3))], ()) == []
    assert profile_problems([TensorInfo("x", "float32", (1, 3))], ({"x": same(1, 3)},)) == []


def test_dimensions_of_one_name_are_one_size() -> None:
    wide = {"input_ids": ShapeRange((1, 8), (4, 64), (8, 128)), "attention_mask": ShapeRange((1, 8), (4, 64), (8, 256))}
    assert profile_problems([IDS, MASK], (wide,)) == [
        "dimension 'sequence' is 8/64/128 for input_ids and 8/64/256 for attention_mask; one name means one size"
    ]
    assert profile_problems([IDS, MASK], (dict.fromkeys(wide, wide["input_ids"]),)) == []


def test_shape_inputs() -> None:
    assert profile_problems([SIZES], ({"sizes": same(7, 9)},)) == []  # without a parser: it may be one
    assert "fixed size of 2" in profile_problems([TensorInfo("m", "int64", (2, 2))], ({"m": same(7, 9)},))[0]
    known = frozenset({"sizes"})
    assert "sizes:NxN with 2 numbers" in profile_problems([SIZES], (), shape_inputs=known)[0]
    assert profile_problems([SIZES], ({"sizes": same(-1, 9)},), shape_inputs=known) == []  # values, not sizes
    assert profile_problems([SIZES], ({"sizes": same(7, 9)},), shape_inputs=known) == []
    assert profile_problems([SIZES, IMAGE], ({"sizes": same(7)},), shape_inputs=known) == [
        "sizes is a shape input of 2 values, 1 were given", "the dynamic input image (?, 3, 224, 224) is missing"
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"the values of the shape input sizes \(2\) are missing\. Write .*;sizes:NxN"):
        validate_profiles([IMAGE, SIZES], ({"image": same(1, 3, 224, 224)},), shape_inputs=known)
    with pytest.raises(
        UsageError, match=r"^the values of the input n decide .*: n:N with 1 number, or.*Write `shapes='n:N,"
    ):
        validate_profiles([TensorInfo("n", "int64")], (), shape_inputs=frozenset({"n"}))
    # the parser says it is an ordinary input of shape (2,)
    assert "rank 1" in profile_problems([SIZES], ({"sizes": same(7, 9)},), shape_inputs=frozenset())[0]
    assert "negative" in profile_problems([TensorInfo("x", "float32", (-1, 3))], ({"x": same(-2, 3)},))[0]


def test_sizes_beyond_a_models_constants_are_named() -> None:
    longest, profile = {("input_ids", 1): 128}, {"input_ids": ShapeRange((1, 8), (4, 64), (8, 129))}
    assert profile_problems([IDS], (profile,), longest=longest) == [
        "input_ids goes up to 129 on axis 1, and the model's constants (its position embeddings) to 128"
    ]
    assert profile_problems([IDS], (profile,), longest={("input_ids", 1): 129}) == []
    with pytest.raises(UsageError, match=r"Write `shapes='input_ids:1x8,4x64,8x128'`"):
        validate_profiles([IDS], (profile,), longest=longest)


def test_where_nothing_is_open_the_line_says_so() -> None:
    fixed = TensorInfo("x", "float32", (1, 3))
    with pytest.raises(
        UsageError, match=r"fixed size of 3 .* given 4\. Write no `shapes=`: the model leaves no size open$"
    ):
        validate_profiles([fixed], ({"x": same(1, 4)},))
    with pytest.raises(UsageError, match=r"Write NAME:MIN,OPT,MAX$"):
        validate_profiles([fixed, SIZES], ({"x": same(1, 4)},))
