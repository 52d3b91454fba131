"""Calibration images of a sample set, `calibration/*.toml`: real crops of photos that installed packages carry, or lines of
text that are drawn here."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Damaged, converted, read_toml
from trtopt.core.errors import OutputError, UsageError, require
from trtopt.core.files import sha256_file, sha256_json, whole
from trtopt.core.temporary import folder_in
from trtopt.core.words import first_of
from trtopt.data.decoding import pixels
from trtopt.recipes.loader import check_keys, package_file, shipped

FOLDER = shipped("calibration")
_MARK = "recipe.sha256"  # in a finished folder: what it was made from


@dataclass(frozen=True)
class CropRecipe:
    """`count` square crops, `size` pixels wide, each a seeded choice of place and size in one of `photos`; or, of a recipe with
    `words`, lines of these, `size` pixels high and `width` wide, in seeded fonts and grays, on paper that isn't quite even."""

    count: int
    seed: int
    size: int
    photos: tuple[Path, ...] = ()
    scale: tuple[float, float] = (1.0, 1.0)
    words: tuple[str, ...] = ()
    width: int = 0
    description: str = ""
    requires: str = ""

    @property
    def digest(self) -> str:
        return sha256_json(
            [[sha256_file(path) for path in self.photos], self.count, self.seed, self.size, list(self.scale)]
            + ([list(self.words), self.width] if self.words else [])
        )


def load_crops(name: str | os.PathLike[str]) -> CropRecipe:
    """Read a sample set by its name under `calibration/`, or by its path."""
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{os.fspath(name)[:200]}.toml"  # more no file is called
    if not path.is_file():
        recipes = ", ".join(sorted(item.stem for item in FOLDER.glob("*.toml"))) or "none"
        raise UsageError(
            f"there is no sample set {os.fspath(name)[:200]!r}; known: {recipes}, or the path of a .toml file"
        )
    try:
        content = read_toml(path)
        check_keys(content, [item.name for item in fields(CropRecipe)])
        recipe = converted(content, CropRecipe)
    except Damaged as error:
        raise UsageError(f"{path}: {error}; see {FOLDER / 'imagenet-crops.toml'}") from None
    references = [package_file(str(item), recipe.requires) for item in recipe.photos]
    photos = [
        photo for path in references for photo in (sorted(path.parent.glob(path.name)) if "*" in path.name else [path])
    ]
    if recipe.words and (photos or recipe.width < recipe.size or recipe.size < 16):
        raise UsageError(f"{path}: words go without photos, with a size of at least 16 and a width of at least that")
    drawn = bool(photos or recipe.words)
    if not drawn or recipe.count < 1 or recipe.size < 1 or not 0 < recipe.scale[0] <= recipe.scale[1] <= 1:
        raise UsageError(f"{path}: photos or words, count and size must be there, and 0 < scale[0] ≤ scale[1] ≤ 1")
    return replace(recipe, photos=tuple(photos))


def write_crops(name: str | os.PathLike[str], folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write a recipe's crops as PNG files into `folder`, whole or not at all; a finished folder is left as it is.
    UsageError where it holds something else, which is never touched."""
    recipe, target = load_crops(name), Path(os.path.realpath(folder))
    paths = tuple(target / f"crop_{number:03}.png" for number in range(recipe.count))
    mark = target / _MARK
    made_of = whole(mark).decode(errors="replace").strip() if mark.is_file() else ""
    if made_of == recipe.digest and all(path.is_file() for path in paths):
        return paths
    others = [target.name] if target.exists() and not mark.is_file() else []
    others += [item.name for item in target.glob("*") if not item.match("crop_*.png") and item != mark]
    if others:
        what = f"{target} holds what wasn't made from a recipe ({first_of(others)})"
        raise UsageError(f"{what}: give another folder, or use it with `images=`")
    try:
        with folder_in(target.parent, ".crops.") as place:
            made = place / target.name
            made.mkdir()
            _write(recipe, made)
            (made / _MARK).write_text(recipe.digest + "\n")
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
    except OSError as error:
        raise OutputError(f"can't write the crops into {target}: {error.strerror or error}") from error
    return paths


def _write(recipe: CropRecipe, folder: Path) -> None:
    cv2 = require("cv2", "ort", "cropping photos")
    random = np.random.default_rng(recipe.seed)
    photos = [pixels(path, index) for index, path in enumerate(recipe.photos)]
    for number in range(recipe.count):
        if recipe.words:
            image = _line(cv2, random, recipe)
        else:
            image = _crop(cv2, random, recipe, photos[number % len(photos)])
        if not cv2.imwrite(str(folder / f"crop_{number:03}.png"), image):
            raise OutputError(f"can't write {folder / f'crop_{number:03}.png'}")


def _crop(cv2: Any, random: np.random.Generator, recipe: CropRecipe, photo: NDArray[np.uint8]) -> Any:
    height, width = photo.shape[:2]
    side = max(1, int(min(height, width) * random.uniform(*recipe.scale)))
    top, left = int(random.integers(0, height - side + 1)), int(random.integers(0, width - side + 1))
    crop = photo[top : top + side, left : left + side, ::-1]
    kind = cv2.INTER_AREA if side > recipe.size else cv2.INTER_CUBIC
    return cv2.resize(np.ascontiguousarray(crop), (recipe.size, recipe.size), interpolation=kind)


def _line(cv2: Any, random: np.random.Generator, recipe: CropRecipe) -> Any:
    """Words, as many as fit, as one who photographs a page gets them."""
    size = (recipe.size, recipe.width)
    paper = int(random.integers(190, 250)) + random.normal(0, 3, size)
    fonts = (cv2.FONT_HERSHEY_SIMPLEX, cv2.FONT_HERSHEY_DUPLEX, cv2.FONT_HERSHEY_COMPLEX, cv2.FONT_HERSHEY_TRIPLEX)
    font, scale = fonts[int(random.integers(len(fonts)))], recipe.size / 34 * random.uniform(0.8, 1.0)
    text, margin = "", recipe.size // 6
    for _ in range(20):
        longer = f"{text} {recipe.words[int(random.integers(len(recipe.words)))]}".strip()
        if cv2.getTextSize(longer, font, scale, 1)[0][0] > recipe.width - 2 * margin:
            break
        text = longer
    ink = np.zeros(size, np.uint8)
    cv2.putText(ink, text, (margin, round(recipe.size * 0.7)), font, scale, 255, 1 + int(recipe.size > 40), cv2.LINE_AA)
    weight = cv2.GaussianBlur(ink, (3, 3), float(random.uniform(0.3, 0.9))) / 255.0
    gray = paper * (1 - weight) + int(random.integers(0, 90)) * weight
    return np.repeat(np.clip(gray, 0, 255).astype(np.uint8)[..., None], 3, axis=2)
