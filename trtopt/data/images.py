"""Images from a folder or a list: decoded in a few threads while earlier ones are used, unusable ones left out and counted.

Always in full: JPEG decoders' smaller images differ visibly after the resize (docs/results/calibration-rules.md).
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, UsageError, require
from trtopt.core.host import cores, in_order
from trtopt.core.kept import ARRAYS, EXTENSIONS
from trtopt.core.values import TensorInfo
from trtopt.data.decoding import decode, encoded, pixels
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import Batches, Skipped

Item = Path | NDArray[Any]


class ImageBatches(Batches):
    """Samples of images. Every file is read when this is made, and those to be used are looked at.

    The source is a folder, or a list of files and of images in memory (uint8, height × width × 3, RGB).
    Which ones a `limit` takes is decided by their content, different ones first: neither names nor order matter. Files that
    it doesn't reach aren't decoded, so of them none is found to be unusable.

    Attributes:
        names: the files used, in the order given (a folder's: by name, and relative to it); "image N" for one in memory.

    Raises:
        UsageError: no such folder, no image in it, an image in memory of another kind, or an image input that doesn't fit the
            model.
        DataError: an empty list, or no image that can be decoded.
    """

    kind = "images"

    def __init__(
        self,
        source: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | NDArray[np.uint8]],
        info: TensorInfo,
        preprocess: Preprocess,
        *,
        limit: int | None = None,
        batch: int = 8,
        threads: int | None = None,
    ) -> None:
        require("cv2", "ort", "reading images")
        self.name, self.batch = info.name, batch
        self._prepare = preprocess.fitted(info)
        self.preprocess = self._prepare
        self._threads = threads or min(4, cores())
        folder = Path(source) if isinstance(source, (str, os.PathLike)) else None
        items = images_in(folder) if folder is not None else _listed(source)
        if not items:
            raise DataError("the list of images is empty: give real photos")
        bad: dict[int, Skipped] = {}
        usable, chosen = list[_Chosen](), list[_Chosen]()
        with ThreadPoolExecutor(self._threads) as pool:
            for index, digest in enumerate(pool.map(_digest, items)):
                if isinstance(digest, Skipped):
                    bad[index] = digest
                else:
                    usable.append(_Chosen(index, digest, items[index]))
            ranked = _ranked(usable)
            most = len(ranked) if limit is None else limit
            while ranked and len(chosen) < most:
                some, ranked = ranked[: most - len(chosen)], ranked[most - len(chosen) :]
                for item, reason in zip(some, pool.map(_Chosen.problem, some)):
                    if reason:
                        bad[item.index] = Skipped(item.path.name, reason)
                    else:
                        chosen.append(item)
        self.skipped = tuple(item for _, item in sorted(bad.items()))
        if not chosen:
            why = "; ".join(f"{item.name}: {item.reason}" for item in self.skipped[:3])
            raise DataError(f"none of the {len(items)} images can be used ({why}): give real photos")
        chosen.sort(key=lambda item: item.index)
        names = [item.path if folder is None else item.path.relative_to(folder) for item in chosen]
        self._choose([(item.digest, str(name), item) for item, name in zip(chosen, names)])

    def _pieces(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield one sample at a time, decoded ahead."""
        items, ahead = (item for _, _, item in self._chosen), 2 * max(self.batch, self._threads)
        for array in in_order(lambda item: item.load(self._prepare), items, self._threads, ahead, "images"):
            yield {self.name: array[None]}


@dataclass(frozen=True, eq=False)
class _Chosen:
    """An image that may be used: its place in what was given, its content's digest, and itself."""

    index: int
    digest: str
    item: Item

    @property
    def path(self) -> Path:
        return self.item if isinstance(self.item, Path) else Path(f"image {self.index}")

    def problem(self) -> str:
        """Tell why it can't be used; empty: it can."""
        image = self.item if isinstance(self.item, np.ndarray) else decode(self.item, look=True)
        return image if isinstance(image, str) else ""

    def load(self, prepare: Preprocess) -> NDArray[Any]:
        image = self.item if isinstance(self.item, np.ndarray) else decode(self.item)
        if isinstance(image, str):
            raise DataError(f"{self.path} changed while it was used: {image}")
        return prepare(image)


def _ranked(images: list[_Chosen]) -> list[_Chosen]:
    """Sort by content, repetitions only after all different ones: in the order in which a limit takes them."""
    seen = Counter[str]()

    def rank(item: _Chosen) -> tuple[int, str]:  # which `sorted` asks once for each, in their order
        seen[item.digest] += 1
        return seen[item.digest], item.digest

    return sorted(images, key=rank)


def _digest(item: Item) -> str | Skipped:
    if isinstance(item, np.ndarray):
        return hashlib.sha256(str(item.shape).encode() + item.tobytes()).hexdigest()
    try:
        return hashlib.sha256(encoded(item)).hexdigest()
    except DataError as error:
        return Skipped(item.name, str(error))


def _listed(source: Any) -> list[Item]:
    """Files and images in memory, the latter checked: a wrong one is a mistake in a program, not a damaged file."""
    if not isinstance(source, Iterable) or (isinstance(source, np.ndarray) and source.ndim != 4):
        shape = f" of shape {source.shape}" if isinstance(source, np.ndarray) else ""
        raise UsageError(f"images is {type(source).__name__}{shape}; a folder or a list of files or images is needed")
    return [_item(item, index) for index, item in enumerate(source)]


def _item(item: Any, index: int) -> Item:
    if isinstance(item, (str, os.PathLike)):
        return Path(item)
    if hasattr(item, "convert") and hasattr(item, "__array_interface__"):  # Pillow's
        item = np.asarray(item.convert("RGB"))
    return pixels(item, index)


def images_in(folder: Path) -> list[Item]:
    """The image files of a folder and of those below it, in order."""
    if not os.path.isdir(folder):  # noqa: PTH112  (Path's raises errors for names that are too long)
        problem = "isn't a folder; give the folder that holds the images"
        if folder.suffix in ARRAYS:
            problem = f"holds arrays; give them as `data='{folder}'`"
        elif not os.path.lexists(folder):
            problem = "doesn't exist"
        raise UsageError(f"`images='{folder}'` {problem}")
    named = [path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS]
    paths: list[Item] = [*sorted(path for path in named if path.is_file() or (path.is_symlink() and not path.exists()))]
    if not paths:
        raise UsageError(f"there is no image in {folder} (looked for {', '.join(sorted(EXTENSIONS))}, subfolders too)")
    return paths
