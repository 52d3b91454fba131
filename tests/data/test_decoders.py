"""Damaged files and the decoders' own words: nothing that trtopt didn't write reaches stderr."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps
from skimage import data
from sklearn.datasets import load_sample_images

from trtopt.core.errors import UsageError
from trtopt.core.values import TensorInfo
from trtopt.data import open_data
from trtopt.data.decoding import decode
from trtopt.data.preprocess import Preprocess

INPUT = TensorInfo("input", "float32", ("batch", 3, 32, 32))
PLAIN = Preprocess(size=(32, 32))
PHOTO = data.coffee()


def saved(kind: str, image: Any = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (Image.fromarray(PHOTO) if image is None else image).save(buffer, kind, **options)
    return buffer.getvalue()


def test_jpegs_have_the_pixels_that_opencv_reads() -> None:
    photos = [PHOTO, *load_sample_images().images]
    for photo in photos:
        for quality in (40, 95):
            for subsampling in (0, 1, 2):
                content = saved("JPEG", Image.fromarray(photo), quality=quality, subsampling=subsampling)
                expected = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
                found = decode(content)
                assert isinstance(found, np.ndarray)
                assert np.array_equal(found, expected)


def with_exif(jpeg: bytes, tiff: bytes) -> bytes:
    exif = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + jpeg[2:]


@pytest.mark.filterwarnings("error")
def test_damaged_exif_data_does_not_cost_the_photo() -> None:
    jpeg = saved("JPEG")
    for junk in (b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff" + b"\x01" * 40):
        assert np.array_equal(decode(with_exif(jpeg, junk)), decode(jpeg)), junk


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("order", ["little", "big"])
def test_photos_are_turned_as_pillow_and_opencv_turn_them(orientation: int, order: Any) -> None:
    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, order)

    start = (b"II" if order == "little" else b"MM") + number(42, 2) + number(8, 4)
    entries = number(0x0100, 2) + number(3, 2) + number(1, 4) + number(1, 2) + number(0, 2)
    entries += number(0x0112, 2) + number(3, 2) + number(1, 4) + number(orientation, 2) + number(0, 2)
    content = with_exif(saved("JPEG"), start + number(2, 2) + entries + number(0, 4))
    found = decode(content)
    assert np.array_equal(found, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content)))))
    assert np.array_equal(found, cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1])


def test_images_in_memory_stand_beside_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved("PNG"))
    rocket = data.rocket()
    batches = open_data([INPUT], images=[rocket, path, PHOTO, rocket], preprocess=PLAIN, batch=8)
    assert [str(item) for item in batches.paths] == ["image 0", str(path), "image 2", "image 3"]  # type: ignore[attr-defined]
    (part,) = batches
    assert np.array_equal(part["input"], np.stack([PLAIN(item) for item in (rocket, PHOTO, PHOTO, rocket)]))
    assert batches.describe()["repeated"] == 1
    stacked = open_data([INPUT], images=np.stack([PHOTO, PHOTO[::-1]]), preprocess=PLAIN)
    swapped = open_data([INPUT], images=[PHOTO[::-1], PHOTO], preprocess=PLAIN)
    assert stacked.describe() == swapped.describe()
    assert stacked.describe() != open_data([INPUT], images=[PHOTO], preprocess=PLAIN).describe()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (3, "images is int; a folder or a list"),
        (PHOTO, r"images is ndarray of shape \(400, 600, 3\)"),
        ([PHOTO, PHOTO[:, :, 0]], r"image 1 is uint8 \(400, 600\); uint8 height x width x 3 in RGB"),
        ([PHOTO.astype(np.float32)], r"image 0 is float32"),
        ([None], "image 0 is NoneType"),
    ],
)
def test_what_is_no_list_of_images_is_refused(images: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_data([INPUT], images=images, preprocess=PLAIN)
