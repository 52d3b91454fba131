"""Preprocessing that an engine does itself, and how one side's samples become the other's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from pixels import PIXELS, preprocessings
from skimage import data

from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import ShapeRange, TensorInfo
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import PRESETS, Preprocess

IMAGE = TensorInfo("x", "float32", ("batch", 3, 224, 224))


def _embedded(info: TensorInfo = IMAGE, **changes: Any) -> Embedded:
    return Embedded.of(Preprocess(**changes), [info])


@given(preprocessings())
@settings(max_examples=60)
def test_pixels_come_back_from_what_was_made_of_them(preprocess: Preprocess) -> None:
    embedded = Embedded("x", preprocess)
    pixels = np.stack([embedded.outside(image) for image in PIXELS])
    assert pixels.dtype == np.uint8
    assert pixels.shape == (2, 5, 7, preprocess.count)
    outside = np.stack([preprocess(image) for image in PIXELS])
    back = embedded.to_pixels({"x": outside})["x"].astype(int)
    assert np.abs(back - pixels).max() <= (1 if preprocess.channels == "gray" else 0)  # gray halfway between two levels
    again = embedded.from_pixels({"x": pixels})["x"]
    assert again.dtype == outside.dtype
    if preprocess.channels == "gray":  # rounded to whole levels on the way in
        assert (
            np.abs(again - outside.astype(np.float64)).max() <= 0.51 * np.abs(embedded.preprocess.factor).max() + 0.02
        )
    else:
        assert np.array_equal(again, outside)


@pytest.mark.parametrize("preset", PRESETS)
def test_photos_are_the_same_on_both_ways(preset: str) -> None:
    fitted = PRESETS[preset].fitted(IMAGE)
    embedded = Embedded.of(fitted, [IMAGE])
    for photo in (data.astronaut(), data.chelsea(), data.coffee()):
        assert np.array_equal(fitted(photo), embedded.from_pixels({"x": embedded.outside(photo)})["x"])


def test_other_inputs_and_pixels_stay_what_they_are() -> None:
    embedded, other = _embedded(), np.ones(3)
    found = embedded.to_pixels({"x": PIXELS, "y": other})
    assert found["x"] is PIXELS
    assert found["y"] is other


@pytest.mark.parametrize("wrong", [0.4, 300.0, -3.0, np.nan, np.inf, 1e30])
def test_what_was_not_made_of_pixels_is_refused(wrong: float) -> None:
    embedded = _embedded(scale=1 / 255)
    array = np.zeros((1, 3, 4, 4), np.float32)
    array[0, 1, 2, 3] = wrong / 255
    with pytest.raises(DataError, match=r"samples of 'x' aren't 8-bit pixels.*\(pixel - 0\) x 0\.00392157, RGB, NCHW"):
        embedded.to_pixels({"x": array})


def test_shapes_and_profiles_are_those_of_pixels() -> None:
    other = TensorInfo("y", "float32", ("batch", 4))
    embedded = _embedded(TensorInfo("x", "float32", ("batch", 3, "h", "w")))
    taken = TensorInfo("x", "uint8", ("batch", "h", "w", 3))
    assert embedded.inputs([TensorInfo("x", "float32", ("batch", 3, "h", "w")), other]) == (taken, other)
    sizes, fixed = ShapeRange((1, 3, 8, 9), (2, 3, 16, 18), (4, 3, 32, 36)), ShapeRange((1, 4), (2, 4), (4, 4))
    moved = ShapeRange((1, 8, 9, 3), (2, 16, 18, 3), (4, 32, 36, 3))
    assert embedded.profiles([{"x": sizes, "y": fixed}]) == ({"x": moved, "y": fixed},)
    last = _embedded(TensorInfo("x", "float32", (1, 8, 9, "c")), layout="nhwc")
    assert last.inputs([TensorInfo("x", "float32", (1, 8, 9, "c"))])[0].shape == (1, 8, 9, 3)
    assert last.profiles([{"x": moved}]) == ({"x": moved},)


def test_the_image_is_found_among_other_inputs() -> None:
    others = [
        TensorInfo("ids", "int64", (1, 8)),
        TensorInfo("mask", "float32", (1, 1, 8, 8)),
        TensorInfo("size", "float32", (1, 2)),
    ]
    assert Embedded.of(PRESETS["imagenet"], [*others, IMAGE]).input == "x"


@pytest.mark.parametrize(
    ("inputs", "preprocess", "message"),
    [
        ([IMAGE], None, r"needs to know how pixels become .*`preprocess=`, one of imagenet, .*`scale=`"),
        ([IMAGE, TensorInfo("z", "float32", (1, 3, 8, 8))], {}, r"takes several \(x, z\): leave it out"),
        ([TensorInfo("ids", "int64", (1, 8))], {}, r"finds no image input: the input ids has shape \(1, 8\)"),
        ([IMAGE], {"layout": "nhwc"}, r"the input x has 224 channels in NHWC"),
        ([IMAGE], {"channels": "gray"}, r"the input x has 3 channels in NCHW, the preprocessing gives 1"),
        ([TensorInfo("x", "uint8", (1, 3, 8, 8))], {}, "takes uint8 already"),
        ([TensorInfo("x", "bfloat16", (1, 3, 8, 8))], {}, "takes bfloat16"),
        ([], {}, "there is none"),
    ],
)
def test_what_can_not_be_embedded_says_why(inputs: list[TensorInfo], preprocess: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Embedded.of(None if preprocess is None else Preprocess(**preprocess), inputs)


def test_only_what_is_outside_may_be_changed() -> None:
    embedded = Embedded.of(PRESETS["imagenet"], [IMAGE])
    given = Preprocess.load({"preset": "imagenet", "resize": "stretch", "size": [64, 48], "interpolation": "area"})
    left = embedded.leaving(given)
    assert (left.resize, left.size, left.interpolation, left.dtype, left.layout) == (
        "stretch", (64, 48), "area", "uint8", "nhwc",
    )  # fmt: skip
    for change, named in (
        ({"channels": "bgr"}, "another channels"),
        ({"scale": 1.0}, "another scale, mean or std"),
        ({"std": 1.0}, "another scale, mean or std"),
    ):
        with pytest.raises(UsageError, match=f"does its preprocessing itself .*{named}: drop it"):
            embedded.leaving(Preprocess.load({"preset": "imagenet", **change}))
    assert Embedded.load(embedded.describe()) == embedded
