from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from trtopt.core.errors import DataError, MissingDependency, OutputError, UsageError
from trtopt.core.values import TensorInfo
from trtopt.data import open_data
from trtopt.data.samples import load_crops, write_crops

SMALL = """
count = 6
seed = 3
size = 40
scale = [0.3, 0.9]
photos = ["package:skimage/data/coffee.png", "package:sklearn/datasets/images/china.jpg"]
"""


WORDS = 'count = 1\nseed = 0\nsize = 32\nwords = ["a"]\n'


def recipe(folder: Path, text: str = SMALL) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def test_the_recipe_of_the_quickstart_gives_64_different_real_crops(tmp_path: Path) -> None:
    paths = write_crops("imagenet-crops", tmp_path / "crops")
    assert len(paths) == 64
    made = contents(tmp_path / "crops")
    assert len(set(made.values())) == 64
    images = [cv2.imread(str(path)) for path in paths]
    assert {image.shape for image in images} == {(256, 256, 3)}
    assert np.mean([image.std() for image in images]) > 20
    # Photos are smooth where noise isn't: neighbouring pixels are alike.
    assert np.mean([np.corrcoef(image[:, :-1].ravel(), image[:, 1:].ravel())[0, 1] for image in images]) > 0.9
    batches = open_data(
        [TensorInfo("input", "float32", ("n", 3, 224, 224))],
        images=tmp_path / "crops",
        preprocess="efficientnet-lite",
    )
    assert (batches.samples, batches.skipped) == (64, ())


def test_crops_are_the_same_every_time_and_follow_the_seed(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    write_crops(path, tmp_path / "one")
    write_crops(path, tmp_path / "two")
    assert len(contents(tmp_path / "one")) == 6
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    write_crops(recipe(tmp_path, SMALL.replace("seed = 3", "seed = 4")), tmp_path / "other")
    assert not set(contents(tmp_path / "one").values()) & set(contents(tmp_path / "other").values())
    images = [cv2.imread(str(crop)) for crop in sorted((tmp_path / "one").glob("*.png"))]
    blue = [image[..., 0].mean() for image in images]
    assert blue == pytest.approx([66.9, 130.8, 61.1, 109.7, 49.2, 109.5], abs=0.5)  # as on every machine so far


def test_a_finished_folder_is_left_and_an_outdated_one_made_again(tmp_path: Path) -> None:
    target = tmp_path / "crops"
    first = write_crops(recipe(tmp_path), target)
    before = {path: path.stat().st_mtime_ns for path in first}
    assert write_crops(recipe(tmp_path), target) == first
    assert {path: path.stat().st_mtime_ns for path in first} == before
    first[2].unlink()
    assert write_crops(recipe(tmp_path), target) == first and first[2].is_file()
    assert len(write_crops(recipe(tmp_path, SMALL.replace("count = 6", "count = 2")), target)) == 2
    assert len(contents(target)) == 2


def test_somebody_elses_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(UsageError, match="wasn't made from a recipe"):
        write_crops(recipe(tmp_path), tmp_path / "mine")
    assert (tmp_path / "mine" / "holiday.jpg").read_bytes() == b"precious"
    write_crops(recipe(tmp_path), tmp_path / "crops")
    (tmp_path / "crops" / "mine.jpg").write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"\(mine.jpg\)"):
        write_crops(recipe(tmp_path, SMALL.replace("seed = 3", "seed = 4")), tmp_path / "crops")
    with pytest.raises(OutputError, match="can't write the crops into"):
        write_crops(recipe(tmp_path), tmp_path / "absent" / "crops")


def test_nothing_is_left_behind_when_a_photo_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.data.decoding.decode", lambda content: "isn't an image that can be decoded")
    path = recipe(tmp_path)
    with pytest.raises(DataError, match=r"coffee.png: isn't an image"):
        write_crops(path, tmp_path / "crops")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_disk_that_takes_no_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(tmp_path, WORDS.replace("32", "16") + "width = 16")  # the least that words may have
    monkeypatch.setattr("cv2.imwrite", lambda *_: False)
    with pytest.raises(OutputError, match=r"can't write .*crops.crop_000\.png"):
        write_crops(path, tmp_path / "crops")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (SMALL + "colour = 1", UsageError, r"unknown key 'colour'; known: count, description"),
        (SMALL.replace("count = 6", ""), UsageError, "lacks 'count'"),
        (SMALL.replace("count = 6", "count = 0"), UsageError, "count and size must be there"),
        (SMALL.replace("size = 40", "size = 0"), UsageError, "count and size must be there"),
        (SMALL.replace("[0.3, 0.9]", "[0.0, 0.9]"), UsageError, r"0 < scale\[0\]"),
        (SMALL.replace("[0.3, 0.9]", "[0.3, 1.5]"), UsageError, r"scale\[1\] ≤ 1"),
        ("count = 1\nseed = 0\nsize = 32", UsageError, "photos or words, count and size must be there"),
        (WORDS.replace("32", "15") + "width = 64", UsageError, "words go without photos"),
        (SMALL.replace("[0.3, 0.9]", "[0.9, 0.3]"), UsageError, r"scale\[0\] ≤ scale\[1\]"),
        (SMALL.replace("[0.3, 0.9]", "0.5"), UsageError, "scale is 0.5; a list is needed"),
        (SMALL.replace("skimage/data/coffee.png", "no_such_package/a.png"), MissingDependency, "no_such_package"),
        (SMALL.replace("coffee.png", "tea.png"), MissingDependency, "has no data/tea.png"),
        ("count = [", UsageError, "not TOML"),
        (WORDS + "width = 8", UsageError, "words go without photos"),
        (WORDS + 'width = 64\nphotos = ["package:skimage/data/coffee.png"]', UsageError, "words go without photos"),
    ],
)
def test_wrong_recipes_are_refused(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        load_crops(recipe(tmp_path, text))
    with pytest.raises(UsageError, match=r"no sample set 'imagenet'; known: .*imagenet-crops"):
        load_crops("imagenet")


def test_the_crops_to_measure_on_show_no_photo_that_is_calibrated_on() -> None:
    calibration, evaluation = load_crops("imagenet-crops"), load_crops("evaluation-crops")
    assert (len(calibration.photos), evaluation.count >= 200) == (7, True)
    assert evaluation.count % len(evaluation.photos) == 0  # as many of each: their means are compared
    assert len(evaluation.photos) == 20
    assert list(evaluation.photos) == sorted(evaluation.photos)
    assert not {path.read_bytes() for path in calibration.photos} & {path.read_bytes() for path in evaluation.photos}


def test_lines_of_text_are_drawn_alike_each_time(tmp_path: Path) -> None:
    first, again = (write_crops("text-lines", tmp_path / name) for name in ("a", "b"))
    assert len(first) == 48
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    for path in first:
        image = cv2.imread(str(path))
        assert image is not None
        assert image.shape == (48, 320, 3) and image.max() > 180
        assert (image < 140).mean() > 0.01, "there is ink on it"
    assert len({path.read_bytes() for path in first}) == 48
    lines = np.stack([cv2.imread(str(path)) for path in first])
    assert ((lines < 140).mean(), lines.mean(), lines.std()) == (
        pytest.approx(0.219, abs=0.01), pytest.approx(179.9, abs=1), pytest.approx(70.7, abs=1)
    )  # fmt: skip
