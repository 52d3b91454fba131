"""Images from a folder or a list: decoded once per pass in a few threads, unusable ones left out and counted."""

from __future__ import annotations

import copy
import hashlib
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.data.batches import Skipped
from trtopt.data.decoding import decode
from trtopt.data.preprocess import Preprocess
from trtopt.errors import DataError, UsageError, require
from trtopt.files import sha256_json
from trtopt.spec import TensorInfo

EXTENSIONS = frozenset([".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"])
Item = Path | NDArray[Any]


class ImageBatches:
    """See `trtopt.data.Batches`. Every file is read and decoded when this is made, to know which can be used.

    The source is a folder, or a list of files and of images in memory (uint8, height × width × 3, RGB).
    Which ones a `limit` takes is decided by their content, different ones first: neither names nor order matter.

    Attributes:
        paths: the files used, in the order given (a folder's: by name); "image N" stands for one in memory.
        repeated: how many of them have the same content as another.

    Raises:
        UsageError: no such folder, an image in memory of another kind, or an image input that doesn't fit the model.
        DataError: no image in it, or none that can be decoded.
    """

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
        if threads is not None and threads < 1:
            raise UsageError(f"--threads is {threads}; at least 1 is needed")
        self.name, self.batch = info.name, batch
        self._prepare = preprocess.fitted(info)
        self.preprocess: Preprocess | None = self._prepare
        self._threads = threads or min(4, os.cpu_count() or 1)
        items = _images_in(Path(source)) if isinstance(source, (str, os.PathLike)) else _listed(source)
        if not items:
            raise DataError("the list of images is empty: give real photos")
        good: list[tuple[str, int]] = []
        skipped: list[Skipped] = []
        with ThreadPoolExecutor(self._threads) as pool:
            for index, found in enumerate(pool.map(_digest, items)):
                if isinstance(found, Skipped):
                    skipped.append(found)
                else:
                    good.append((found, index))
        self.skipped = tuple(skipped)
        if not good:
            some = "; ".join(f"{item.name}: {item.reason}" for item in skipped[:3])
            raise DataError(f"none of the {len(items)} images can be used ({some}): give real photos")
        if limit is not None:
            good = _chosen(good, limit)
        self.digests = tuple(digest for digest, _ in good)
        self._items: list[Item | bytes] = [items[index] for _, index in good]
        self.paths = tuple(
            Path(f"image {index}") if isinstance(item, np.ndarray) else item
            for item, index in ((items[index], index) for _, index in good)
        )
        self.samples = len(good)
        self.repeated = len(good) - len(set(self.digests))

    def describe(self) -> dict[str, Any]:
        found = {"kind": "images", "count": self.samples, "digest": sha256_json(sorted(self.digests))}
        return found | ({"repeated": self.repeated} if self.repeated else {})

    def part(self, start: int, stop: int) -> ImageBatches:
        """The samples from `start` to `stop` alone; nothing is read for it, and it can be sent to another process."""
        some = copy.copy(self)
        some._items, some.paths = self._items[start:stop], self.paths[start:stop]
        some.digests = self.digests[start:stop]
        some.samples, some.repeated = len(some._items), len(some._items) - len(set(some.digests))
        return some

    def loaded(self) -> ImageBatches:
        """The same with the files' content in memory, still encoded: it can be sent to a machine that lacks the files."""
        some = copy.copy(self)
        some._items = [_read(item) if isinstance(item, Path) else item for item in self._items]
        return some

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        with ThreadPoolExecutor(self._threads) as pool:
            ahead: deque[Future[NDArray[Any]]] = deque()
            waiting = iter(self._items)
            collected: list[NDArray[Any]] = []
            try:
                while True:
                    while len(ahead) < 2 * max(self.batch, self._threads):
                        item = next(waiting, None)
                        if item is None:
                            break
                        ahead.append(pool.submit(self._load, item))
                    if not ahead:
                        break
                    collected.append(ahead.popleft().result())
                    if len(collected) == self.batch:
                        yield {self.name: np.stack(collected)}
                        collected = []
                if collected:
                    yield {self.name: np.stack(collected)}
            finally:
                for future in ahead:
                    future.cancel()

    def _load(self, item: Item | bytes) -> NDArray[Any]:
        if isinstance(item, np.ndarray):
            return self._prepare(item)
        image = decode(item if isinstance(item, bytes) else _read(item))
        if isinstance(image, str):  # it could be decoded a moment ago
            raise DataError(f"{item if isinstance(item, Path) else 'an image'} changed while it was used: {image}")
        return self._prepare(image)


def _chosen(good: list[tuple[str, int]], limit: int) -> list[tuple[str, int]]:
    """`limit` of the files by content, repetitions only when the different ones are used up; the order stays."""
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, str, int]] = []
    for index, (digest, _) in enumerate(good):
        ranked.append((seen[digest], digest, index))
        seen[digest] += 1
    return [good[index] for index in sorted(index for _, _, index in sorted(ranked)[:limit])]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error


def _digest(item: Item) -> str | Skipped:
    if isinstance(item, np.ndarray):
        return hashlib.sha256(str(item.shape).encode() + item.tobytes()).hexdigest()
    try:
        content = _read(item)
    except DataError as error:
        return Skipped(item.name, str(error))
    image = decode(content)
    return Skipped(item.name, image) if isinstance(image, str) else hashlib.sha256(content).hexdigest()


def _listed(source: Any) -> list[Item]:
    """Files and images in memory, the latter checked: a wrong one is a mistake in a program, not a damaged file."""
    if not isinstance(source, Iterable) or (isinstance(source, np.ndarray) and source.ndim != 4):
        shape = f" of shape {source.shape}" if isinstance(source, np.ndarray) else ""
        raise UsageError(f"images is {type(source).__name__}{shape}; a folder or a list of files or images is needed")
    items: list[Item] = []
    for index, item in enumerate(source):
        if isinstance(item, (str, os.PathLike)):
            items.append(Path(item))
        elif isinstance(item, np.ndarray) and item.ndim == 3 and item.shape[2] == 3 and item.dtype == np.uint8:
            items.append(item)
        else:
            found = f"{item.dtype} {item.shape}" if isinstance(item, np.ndarray) else type(item).__name__
            raise UsageError(f"image {index} is {found}; a file, or a uint8 array height x width x 3 in RGB, is needed")
    return items


def _images_in(folder: Path) -> list[Item]:
    if not folder.exists():
        raise UsageError(f"--images {folder} doesn't exist")
    if not folder.is_dir():
        raise UsageError(f"--images {folder} isn't a folder; give the folder that holds the images")
    paths: list[Item] = []
    paths += sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())
    if not paths:
        raise DataError(f"there is no image in {folder} (looked for {', '.join(sorted(EXTENSIONS))}, subfolders too)")
    return paths
