from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from skimage import data

from trtopt.core.documents import tomllib
from trtopt.core.errors import UsageError
from trtopt.core.values import ShapeRange, TensorInfo
from trtopt.data.preprocess import CHOICES, PAGE, PRESETS, Preprocess

IMAGE = TensorInfo("input", "float32", ("batch", 3, 224, 224))
PHOTOS = {name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")}


def portrait() -> NDArray[np.uint8]:
    return np.ascontiguousarray(PHOTOS["chelsea"].transpose(1, 0, 2))


@pytest.mark.parametrize("name", PHOTOS)
def test_imagenet_equals_torchvisions_reference_transforms(name: str) -> None:
    """Resize(256), CenterCrop(224), /255, Normalize: equal but for rounding, at most one pixel level either way."""
    from PIL import Image
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as reference

    preset = PRESETS["imagenet"]
    for photo in (PHOTOS[name], np.ascontiguousarray(PHOTOS[name].transpose(1, 0, 2))):
        resized = reference.resize(Image.fromarray(photo), [256], interpolation=InterpolationMode.BILINEAR)
        pixels = np.asarray(reference.center_crop(resized, [224, 224]), np.float64) / 255
        expected = ((pixels - preset.mean) / preset.std).transpose(2, 0, 1)
        found = preset.fitted(IMAGE)(photo)
        levels = (found - expected) * np.array(preset.std)[:, None, None] * 255
        assert found.dtype == np.float32
        assert np.abs(levels).max() < 1.01
        assert abs(levels.mean()) < 0.01


def test_efficientnet_lite_crops_as_its_reference_does() -> None:
    photo = PHOTOS["coffee"]  # 400 × 600
    side = int(224 / (224 + 32) * 400)
    top, left = (400 - side + 1) // 2, (600 - side + 1) // 2
    cut = photo[top : top + side, left : left + side]
    resized = cv2.resize(cut, (224, 224), interpolation=cv2.INTER_CUBIC).astype(np.float32)
    found = PRESETS["efficientnet-lite"].fitted(IMAGE)(photo)
    np.testing.assert_allclose(found, ((resized - 127) / 128).transpose(2, 0, 1), atol=1e-6)


def test_yolo_letterboxes_as_its_reference_does() -> None:
    photo = PHOTOS["rocket"]  # 427 × 640
    found = PRESETS["yolo"].fitted(TensorInfo("images", "float32", (1, 3, 640, 640)))(photo)
    expected = np.full((640, 640, 3), 114, np.uint8)
    expected[(640 - 427) // 2 : (640 - 427) // 2 + 427] = photo
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1) / 255, atol=1e-6)
    tall = PRESETS["yolo"].fitted(TensorInfo("images", "float32", (1, 3, 320, 320)))(portrait())
    assert np.allclose(tall[:, :, 0], 114 / 255)
    assert np.allclose(tall[:, :, -1], 114 / 255)
    assert tall[:, 0].std() > 0.01  # the photo reaches from top to bottom


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "area", "lanczos"])
@pytest.mark.parametrize("antialias", [False, True])
def test_stretch_takes_the_whole_picture(interpolation: str, antialias: bool) -> None:
    photo = PHOTOS["astronaut"]
    found = Preprocess(size=(64, 96), interpolation=interpolation, antialias=antialias)(photo)
    assert found.shape == (3, 64, 96)
    whole = cv2.resize(photo, (96, 64), interpolation=cv2.INTER_AREA).transpose(2, 0, 1)
    assert np.corrcoef(found.ravel(), whole.ravel())[0, 1] > 0.9


def test_channels_layout_and_dtype() -> None:
    photo = PHOTOS["coffee"]
    rgb = Preprocess(size=(32, 48))(photo)
    assert np.array_equal(Preprocess(size=(32, 48), channels="bgr")(photo), rgb[::-1])
    assert np.array_equal(Preprocess(size=(32, 48), layout="nhwc")(photo), rgb.transpose(1, 2, 0))
    grey = Preprocess(size=(32, 48), channels="gray")(photo)
    assert grey.shape == (1, 32, 48)
    expected = cv2.cvtColor(rgb.transpose(1, 2, 0).astype(np.uint8), cv2.COLOR_RGB2GRAY)
    assert np.abs(grey[0] - expected).max() <= 1
    raw = Preprocess(size=(32, 48), dtype="uint8")(photo)
    assert raw.dtype == np.uint8
    assert np.array_equal(raw, rgb)
    assert Preprocess(size=(32, 48), dtype="float16", scale=1 / 255)(photo).dtype == np.float16
    assert rgb.flags["C_CONTIGUOUS"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["stretch", "crop", "letterbox"]),
    st.floats(0.05, 1),
    st.booleans(),
)
def test_any_image_gives_the_size(
    height: int, width: int, rows: int, columns: int, resize: str, crop: float, antialias: bool
) -> None:
    photo = np.ascontiguousarray(PHOTOS["chelsea"][:height, :width])
    found = Preprocess(size=(rows, columns), resize=resize, crop=crop, antialias=antialias)(photo)
    assert found.shape == (3, rows, columns)
    assert np.isfinite(found).all()
    assert found.min() >= 0
    assert found.max() <= 255


@pytest.mark.parametrize("name", PRESETS)
def test_describe_round_trips(name: str) -> None:
    fitted = PRESETS[name].fitted(IMAGE)
    for item in (PRESETS[name], fitted):
        again = Preprocess.load(json.loads(json.dumps(item.describe())))
        assert again == item


BAD: list[tuple[dict[str, Any], str]] = [
    ({"resise": "crop"}, r"unknown key resise; did you mean resize\? docs/preprocessing.md describes every key"),
    ({"resize": "zoom"}, r"resize is 'zoom'; allowed: stretch, crop, letterbox"),
    ({"preset": ["imagenet"]}, "preprocess is list; a preset"),
    ({"preset": "imagnet"}, r"'imagnet' is neither a preset \(imagenet, efficientnet-lite, yolo\) nor"),
    ({"size": [224]}, r"size is list; a list of 2 is needed"),
    ({"size": "big"}, r"size\[0\] is 'big'; a whole number"),
    ({"mean": [1, 2]}, r"mean has 2 values; 1 or 3"),
    ({"mean": "0.5"}, r"mean\[0\] is '0.5'; a number"),
    ({"std": 0}, r"std is 0"),
    ({"scale": float("nan")}, r"scale"),
    ({"scale": float("inf")}, r"finite"),
    ({"crop": 1.5}, r"crop is 1.5"),
    ({"pad": 300}, r"pad is 300"),
    ({"pad": 1.5}, r"pad is 1.5; a whole number"),
    ({"dtype": "int4"}, r"dtype is 'int4'; allowed: float32, float16, uint8"),
    ({"preset": "imagenet", "dtype": "uint8"}, r"dtype is uint8, raw pixels"),
    ({"antialias": 1}, r"antialias is 1; true or false"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_wrong_values_are_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Preprocess.load(content)


def test_size_and_dtype_come_from_the_model() -> None:
    preset = PRESETS["imagenet"]
    fitted = preset.fitted(TensorInfo("x", "float16", (-1, 3, 192, 160)))
    assert (fitted.size, fitted.dtype) == ((192, 160), "float16")
    assert fitted(PHOTOS["coffee"]).dtype == np.float16
    own = replace(preset, size=(96, 96)).fitted(TensorInfo("x", "float32", ("n", 3, "h", "w")))
    assert own.size == (96, 96)
    assert replace(preset, layout="nhwc").fitted(TensorInfo("x", "float32", (1, 64, 48, 3))).size == (64, 48)


@pytest.mark.parametrize(
    ("preprocess", "shape", "dtype", "message"),
    [
        ({}, ("n", 1, 28, 28), "float32", r"has 1 channels in NCHW, the preprocessing gives 3 \(rgb\)"),
        ({"channels": "gray"}, ("n", 3, 28, 28), "float32", r"has 3 channels in NCHW, the preprocessing gives 1"),
        ({"layout": "nhwc"}, ("n", 3, 28, 28), "float32", r"has 28 channels in NHWC"),
        ({}, ("n", 3, "h", "w"), "float32", r"x \(n, 3, h, w\) leaves its size open: give `size='HEIGHTxWIDTH'`"),
        ({"size": 64}, ("n", 3, 32, 32), "float32", r"makes images of 64x64, the input x takes \(n, 3, 32, 32\)"),
        ({}, ("n", 16), "float32", r"has shape \(n, 16\); images need four dimensions"),
        ({"dtype": "float16"}, ("n", 3, 8, 8), "float32", r"takes float32, the preprocessing gives float16"),
        ({}, ("n", 3, 8, 8), "int64", r"takes int64"),
        ({"scale": 2}, ("n", 3, 8, 8), "uint8", r"raw pixels"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    preprocess: dict[str, Any], shape: tuple[int | str, ...], dtype: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Preprocess.load(preprocess).fitted(TensorInfo("x", dtype, shape))


def test_a_mapping_starts_from_a_preset_a_file_or_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('preset = "yolo"\nmean = 0.5\n')
    made = Preprocess.load({"preset": str(path), "size": 640})
    assert made == replace(PRESETS["yolo"], mean=(0.5,), size=(640, 640))
    assert Preprocess.load({"size": 64}, made) == replace(made, size=(64, 64))
    assert Preprocess.load({"size": 64}) == Preprocess(size=(64, 64))
    path.write_text(f'preset = "{path}"\n')
    with pytest.raises(UsageError, match=r"own\.toml: preset .* isn't known"):
        Preprocess.load({"preset": str(path)})


def test_the_opt_size_serves_where_nothing_else_says_one() -> None:
    open_size, profile = TensorInfo("x", "float32", ("n", 3, "h", "w")), {"x": ShapeRange.parse("1x3x64x32")}
    assert PRESETS["yolo"].at_opt([open_size], [profile]).size == (64, 32)
    nhwc = Preprocess(layout="nhwc").at_opt(
        [replace(open_size, shape=("n", "h", "w", 3))], [{"x": ShapeRange.parse("1x64x32x3")}]
    )
    assert nhwc.size == (64, 32)
    own = replace(PRESETS["yolo"], size=(48, 48))
    assert own.at_opt([open_size], [profile]) is own
    for inputs, profiles in [
        ([IMAGE], [profile]),
        ([open_size] * 2, [profile]),
        ([open_size], []),
        ([open_size], [{}]),
    ]:
        assert PRESETS["yolo"].at_opt(inputs, profiles).size is None


# docs/preprocessing.md ------------------------------------------------------------------------------------------------

TEXT = (Path(__file__).resolve().parents[2] / PAGE).read_text(encoding="utf-8")
ROWS = {
    name.strip(" `"): [cell.strip() for cell in cells]
    for name, *cells in (line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| `"))
}


@pytest.mark.parametrize("name", [item.name for item in fields(Preprocess)])
def test_the_page_has_every_key_with_its_values_and_its_default(name: str) -> None:
    values, default, meaning = ROWS[name]
    assert meaning
    if name in CHOICES:
        assert tuple(re.findall(r"`(\w+)`", values)) == CHOICES[name]
    mine = getattr(Preprocess(), name)
    if mine is None:
        assert default.startswith("the model's own")
    else:
        (mine,) = mine if isinstance(mine, tuple) else (mine,)
        assert default == f"`{str(mine).lower()}`"


def test_the_page_has_no_other_keys_and_every_preset() -> None:
    assert set(ROWS) == {"preset", *(item.name for item in fields(Preprocess)), *PRESETS}
    assert tuple(re.findall(r"`([\w-]+)`", ROWS["preset"][0])) == tuple(PRESETS)
    for name, preset in PRESETS.items():
        written = "\n".join(re.findall(r"`([^`]+)`", ROWS[name][0]))
        found, wanted = Preprocess.load(tomllib.loads(written)).describe(), preset.describe()
        assert found.pop("crop") == pytest.approx(wanted.pop("crop"))
        assert found == wanted


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (("n", "h", "w", 3), "nhwc"),
        (("n", 64, 64, 1), "nhwc"),
        (("n", 3, "h", 3), "nchw"),
        (("n", 3, "h", "w"), "nchw"),
    ],
)
def test_the_layout_is_the_inputs_own(shape: tuple[int | str, ...], layout: str) -> None:
    channels = "gray" if shape[3] == 1 else "rgb"
    found = Preprocess(size=(64, 64 if shape[3] != 3 or layout == "nhwc" else 3), channels=channels).fitted(
        TensorInfo("x", "uint8", shape)
    )
    assert (found.layout, found.dtype) == (layout, "uint8")
    assert not found.unlike(Preprocess(channels=channels)) and found.unlike(
        Preprocess(channels=channels, layout="nchw" if layout == "nhwc" else "NHWC")
    )
