from __future__ import annotations

import hashlib
import io
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from skimage import data
from sklearn.datasets import load_sample_images

from trtopt.core.errors import DataError, MissingDependency, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data import ImageBatches, images as module, open_data
from trtopt.data.decoding import decode
from trtopt.data.preprocess import Preprocess

INPUT = TensorInfo("input", "float32", ("batch", 3, 32, 32))
PLAIN = Preprocess(size=(32, 32))
PHOTO = data.coffee()


def saved(kind: str, image: Any = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PHOTO if image is None else image).save(buffer, kind, **options)
    return buffer.getvalue()


def crops(count: int) -> list[NDArray[np.uint8]]:
    photo = data.astronaut()
    return [photo[16 * index : 16 * index + 100, 8 * index : 8 * index + 120] for index in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine crops of a photo, some in subfolders."""
    root = tmp_path / "photos"
    for index, crop in enumerate(crops(9)):
        place = root / ("a" if index % 3 else "b/c")
        place.mkdir(parents=True, exist_ok=True)
        kind, ending = ("JPEG", "JPG") if index % 2 else ("PNG", "png")
        (place / f"{index}.{ending}").write_bytes(saved(kind, crop))
    return root


def read(source: Any, **options: Any) -> ImageBatches:
    return ImageBatches(source, INPUT, PLAIN, **options)


def test_gives_every_image_of_the_folder_and_below(folder: Path) -> None:
    batches = read(folder, batch=4)
    parts = list(batches)
    assert [len(part["input"]) for part in parts] == [4, 4, 1]
    assert batches.samples == 9
    assert batches.skipped == ()
    given = np.concatenate([part["input"] for part in parts])
    assert given.shape == (9, 3, 32, 32)
    assert given.dtype == np.float32
    for image, name in zip(given, batches.names):
        assert np.array_equal(image, PLAIN(cv2.imread(str(folder / name))[:, :, ::-1]))
    assert len({image.tobytes() for image in given}) == 9


def test_passes_are_equal_whatever_the_batch_and_the_threads(folder: Path) -> None:
    first = read(folder, batch=4, threads=1)
    expected = np.concatenate([part["input"] for part in first])
    for batches in (first, read(folder, batch=1, threads=2), read(folder, batch=50, threads=3)):
        assert np.array_equal(np.concatenate([part["input"] for part in batches]), expected)
        assert batches.describe() == first.describe()


def test_names_and_order_are_nothing_to_the_description_and_the_limit(folder: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for index, path in enumerate(reversed(files)):
        shutil.copy(path, renamed / f"{index}{path.suffix}")
    for limit in (None, 1, 4, 9, 20):
        one, other = read(folder, limit=limit), read(renamed, limit=limit)
        assert one.samples == min(limit or 9, 9)
        assert one.describe() == other.describe()
        assert {hashlib.sha256((renamed / name).read_bytes()).hexdigest() for name in other.names} == set(one.digests)
    assert read(folder, limit=4).describe() != read(folder, limit=5).describe()
    assert set(read(folder, limit=4).digests) < set(read(folder, limit=5).digests)


def test_a_link_to_nothing_and_an_empty_list_say_so(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(DataError, match=r"the 1 images? can be used.*photo\.jpg"):
        read(tmp_path)
    with pytest.raises(DataError, match="list of images is empty"):
        read([])


def test_a_list_keeps_its_order_and_its_repetitions(folder: Path) -> None:
    files = sorted(folder.rglob("*.png"), reverse=True)
    batches = read([files[0], files[1], files[0]])
    assert batches.names == (str(files[0]), str(files[1]), str(files[0]))
    (part,) = batches
    assert np.array_equal(part["input"][0], part["input"][2])
    missing = read([files[0], folder / "gone.png"])
    assert [item.name for item in missing.skipped] == ["gone.png"]
    assert missing.samples == 1


def test_repetitions_come_last(folder: Path) -> None:
    for index in range(3):
        shutil.copy(next(folder.rglob("*.png")), folder / f"again{index}.png")
    for limit, different in ((None, 9), (9, 9), (10, 9), (8, 8)):
        batches = read(folder, limit=limit)
        assert (batches.samples, len(set(batches.digests))) == (limit or 12, different)


def test_the_end_of_a_jpeg_is_found_where_it_is() -> None:
    jpeg = saved("JPEG")
    video = b"\0\0\0\x18ftypmp42" + bytes(100_000)  # phones append one to the photo
    assert isinstance(decode(jpeg + video), np.ndarray)
    assert isinstance(decode(jpeg + b"\0"), np.ndarray)
    thumbnail = saved("JPEG", PHOTO[:40, :40])
    whole = with_exif(jpeg, b"II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail)
    assert b"\xff\xd9" in whole[: len(whole) // 2]
    assert isinstance(decode(whole), np.ndarray)
    assert decode(whole[:-2]) == "a JPEG cut off before its end"
    progressive = saved("JPEG", progressive=True)
    assert isinstance(decode(progressive), np.ndarray)
    assert isinstance(decode(progressive[:-2]), str)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the images that are decoded from here on."""
    seen: list[Path] = []
    monkeypatch.setattr(module, "decode", lambda path: (seen.append(path), decode(path))[1])
    return seen


def test_decoding_runs_ahead_by_a_bounded_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory doesn't grow with the number of images: a reader that stops leaves the rest undecoded."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) * 10
    batches = read(files, batch=2, threads=2)
    loaded = counted(monkeypatch)
    iterator = iter(batches)
    next(iterator)
    assert 2 <= len(loaded) <= 2 + 4 + 2
    del iterator
    assert len(loaded) <= 2 + 4 + 2


def test_a_file_that_changes_meanwhile_is_named(folder: Path) -> None:
    batches = read(folder)
    next(folder.rglob("*.png")).write_bytes(b"")
    with pytest.raises(DataError, match=r"changed while it was used: the file is empty"):
        list(batches)


def test_open_data_refuses_what_does_not_go_together(folder: Path) -> None:
    image = [INPUT]
    with pytest.raises(UsageError, match="no data: give `images=DIR` or `data="):
        open_data(image)
    with pytest.raises(UsageError, match="both `images=` and `data=`"):
        open_data(image, images=folder, data={"input": np.zeros((1, 3, 32, 32))})
    with pytest.raises(UsageError, match=r"`images=` needs `preprocess=`.*imagenet, efficientnet-lite, yolo"):
        open_data(image, images=folder)
    with pytest.raises(UsageError, match="`preprocess=` is for `images=`"):
        open_data(image, data={}, preprocess="imagenet")
    with pytest.raises(UsageError, match=r"one input; this one has input, other"):
        open_data([*image, TensorInfo("other", "float32", ("n", 2))], images=folder, preprocess="imagenet")


def test_parts_are_the_samples_in_order_and_travel(folder: Path, tmp_path: Path) -> None:
    whole = read(folder, batch=4)
    (expected,) = [np.concatenate([batch["input"] for batch in whole])]
    parts = [pickle.loads(pickle.dumps(whole.part(start, start + 4))) for start in (0, 4, 8)]
    assert [part.samples for part in parts] == [4, 4, 1]
    assert np.array_equal(np.concatenate([batch["input"] for part in parts for batch in part]), expected)
    assert parts[1].describe()["digest"] == read([folder / name for name in whole.names[4:8]]).describe()["digest"]
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="can't be read"):
        list(parts[0])


@pytest.mark.parametrize("limit", [None, 5, 9, 11])
def test_others_stand_in_for_what_cannot_be_used(folder: Path, limit: int | None) -> None:
    good = read(folder).digests
    for index in range(4):
        (folder / f"bad{index}.jpg").write_bytes(b"no image %d" % index)
    batches = read(folder, limit=limit, batch=3)
    assert batches.samples == min(limit or 9, 9) == sum(len(part["input"]) for part in batches)
    assert set(batches.digests) <= set(good)


def test_a_pass_decodes_each_image_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = read(folder)
    seen = counted(monkeypatch)
    assert sum(len(part["input"]) for part in batches) == 9 == len(set(seen)) == len(seen)


def test_samples_are_named_by_their_files(folder: Path) -> None:
    (folder / "a" / "broken.png").write_bytes(b"no picture")
    batches = read(folder, batch=4)
    assert len(batches.names) == batches.samples == 9
    assert str(Path("b", "c", "0.png")) in batches.names
    one = read([*sorted(folder.rglob("*.png"))[1:3], crops(1)[0]])
    assert one.names == (*map(str, sorted(folder.rglob("*.png"))[1:3]), "image 2")
    assert read(folder).part(2, 4).names == batches.names[2:4]


def test_images_of_pillow_are_taken_as_rgb() -> None:
    photo = np.arange(48 * 3, dtype=np.uint8).reshape(6, 8, 3)
    whole, shape = Image.fromarray(photo), TensorInfo("x", "float32", ("n", 3, 4, 4))
    how = {"size": 4, "scale": 1.0}
    [batch] = open_data([shape], images=[whole, whole.convert("RGBA"), whole.convert("L")], preprocess=how)
    [same] = open_data([shape], images=[photo], preprocess=how)
    first, alpha, grey = batch["x"]
    assert np.array_equal(first, same["x"][0]) and np.array_equal(alpha, first) and np.array_equal(grey[0], grey[2])


# Decoders and images in memory


def test_jpegs_have_the_pixels_that_opencv_reads() -> None:
    photos = [PHOTO, *load_sample_images().images]
    for photo in photos:
        for quality in (40, 95):
            for subsampling in (0, 1, 2):
                content = saved("JPEG", photo, quality=quality, subsampling=subsampling)
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


def test_a_decoder_that_is_not_installed_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved("BMP")
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingDependency, match="reading images needs cv2, which is"):
        decode(content)


def test_images_in_memory_stand_beside_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved("PNG"))
    rocket = data.rocket()
    batches = open_data([INPUT], images=[rocket, path, PHOTO, rocket], preprocess=PLAIN, batch=8)
    assert batches.names == ("image 0", str(path), "image 2", "image 3")
    (part,) = batches
    assert np.array_equal(part["input"], np.stack([PLAIN(item) for item in (rocket, PHOTO, PHOTO, rocket)]))
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
