"""Images from a folder or a list: decoded in a few threads while earlier ones are used, unusable ones left out and counted.

Always in full: JPEG decoders' smaller images differ visibly after the resize (docs/results/calibration-rules.md).
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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

    Raises: UsageError (no such folder, no image in it, or one that doesn't fit the model) and DataError (an empty list, or no
    image that can be decoded).
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
        bad, digests, chosen = dict[int, Skipped](), dict[int, str](), list[int]()
        with ThreadPoolExecutor(self._threads) as pool:
            for index, digest in enumerate(pool.map(_digest, items)):
                if isinstance(digest, Skipped):
                    bad[index] = digest
                else:
                    digests[index] = digest
            ranked = _ranked(digests)
            most = len(ranked) if limit is None else limit
            while ranked and len(chosen) < most:
                some, ranked = ranked[: most - len(chosen)], ranked[most - len(chosen) :]
                for index, problem in zip(some, pool.map(_problem, [items[index] for index in some])):
                    if problem is not None:
                        bad[index] = problem
                    else:
                        chosen.append(index)
        self.skipped = tuple(item for _, item in sorted(bad.items()))
        if not chosen:
            why = "; ".join(f"{item.name}: {item.reason}" for item in self.skipped[:3])
            raise DataError(f"none of the {len(items)} images can be used ({why}): give real photos")
        self._choose([(digests[index], _name(items[index], index, folder), items[index]) for index in sorted(chosen)])

    def _pieces(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield one sample at a time, decoded ahead."""
        items, ahead = (item for _, _, item in self._chosen), 2 * max(self.batch, self._threads)
        for array in in_order(self._sample, items, self._threads, ahead, "images"):
            yield {self.name: array[None]}

    def _sample(self, item: Item) -> NDArray[Any]:
        image = item if isinstance(item, np.ndarray) else decode(item)
        if isinstance(image, str):
            raise DataError(f"{item} changed while it was used: {image}")
        return self._prepare(image)


def _name(item: Item, index: int, folder: Path | None) -> str:
    if isinstance(item, np.ndarray):
        return f"image {index}"
    return str(item if folder is None else item.relative_to(folder))


def _problem(item: Item) -> Skipped | None:
    """Tell why an image can't be used; None: it can."""
    if isinstance(item, np.ndarray):
        return None
    image = decode(item, look=True)
    return Skipped(item.name, image) if isinstance(image, str) else None


def _ranked(digests: Mapping[int, str]) -> list[int]:
    """Sort by content, repetitions only after all different ones: in the order in which a limit takes them."""
    seen = Counter[str]()

    def rank(index: int) -> tuple[int, str]:  # which `sorted` asks once for each, in their order
        seen[digests[index]] += 1
        return seen[digests[index]], digests[index]

    return sorted(digests, key=rank)


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
