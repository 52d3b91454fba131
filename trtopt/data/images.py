"""Images from a folder or a list: decoded in a few threads while earlier ones are used, unusable ones left out and counted.

Always in full: JPEG decoders' smaller images differ visibly after the resize (docs/results/calibration-rules.md).
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, UsageError, require
from trtopt.core.files import sha256_json, sha256_stream
from trtopt.core.host import cores
from trtopt.core.kept import ARRAYS, EXTENSIONS
from trtopt.core.values import TensorInfo
from trtopt.data.batches import Skipped
from trtopt.data.decoding import encoded, read_image
from trtopt.data.preprocess import Preprocess, check_image
from trtopt.data.rebatch import rebatched

Item = Path | NDArray[Any]
_NOTHING = np.empty(0, np.uint8)


class ImageBatches:
    """See `trtopt.data.Batches`. Every file is read when this is made, and those to be used are decoded, to know which can be.

    The source is a folder, or a list of files and of images in memory (uint8, height × width × 3, RGB).
    Which ones a `limit` takes is decided by their content, different ones first: neither names nor order matter. Files that
    it doesn't reach aren't decoded, so of them none is found to be unusable.

    With `lazy` nothing is decoded twice: unusable files are found during the first pass, which leaves them out and gives
    others in their place at its end, where `limit` leaves others. Until it is over (or `check` is called) `samples`, `paths`,
    `digests`, `skipped` and `describe` suppose that all can be used. Which ones are used is the same either way.

    Attributes:
        paths: the files used, in the order given (a folder's: by name); "image N" stands for one in memory.
        names: the same as text, of a folder's files relative to it.

    Raises:
        UsageError: no such folder, no image in it, an image in memory of another kind, or an image input that doesn't fit the
            model.
        DataError: an empty list, or no image that can be decoded.
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
        lazy: bool = False,
    ) -> None:
        require("cv2", "ort", "reading images")
        if threads is not None and threads < 1:
            raise UsageError(f"`threads=` is {threads}; at least 1 is needed")
        self.name, self.batch = info.name, batch
        self._prepare = preprocess.fitted(info)
        self.preprocess: Preprocess | None = self._prepare
        self._threads = threads or min(4, cores())
        self._folder = Path(source) if isinstance(source, (str, os.PathLike)) else None
        items = images_in(self._folder) if self._folder is not None else _listed(source)
        if not items:
            raise DataError("the list of images is empty: give real photos")
        self._bad: dict[int, Skipped] = {}
        usable: list[_Chosen] = []
        with ThreadPoolExecutor(self._threads) as pool:
            for index, digest in enumerate(pool.map(_digest, items)):
                if isinstance(digest, Skipped):
                    self._bad[index] = digest
                else:
                    usable.append(_Chosen(index, digest, items[index]))
        self._image_count = len(items)
        ranked = _ranked(usable)
        self._reserve = ranked[limit:] if limit is not None else []
        self._chosen = sorted(ranked[:limit], key=lambda item: item.index)
        self._checked = False
        self._settle()
        if not lazy:
            self.check()

    def _settle(self) -> None:
        """Draw the public attributes from what is chosen now."""
        self.skipped = tuple(item for _, item in sorted(self._bad.items()))
        if not self._chosen:
            some = "; ".join(f"{item.name}: {item.reason}" for item in self.skipped[:3])
            raise DataError(f"none of the {self._image_count} images can be used ({some}): give real photos")
        self.digests = tuple(item.digest for item in self._chosen)
        self.paths = tuple(item.path for item in self._chosen)
        inside = self._folder
        self.names = tuple(str(path.relative_to(inside) if inside is not None else path) for path in self.paths)
        self.samples = len(self._chosen)

    def check(self) -> None:
        """Decode what isn't known to be usable yet, so that from here on nothing about the samples changes.

        Raises:
            DataError: none can be used.
        """
        if not self._checked:
            deque(self._samples(lambda _: _NOTHING), maxlen=0)

    def describe(self) -> dict[str, Any]:
        return {"kind": "images", "count": self.samples, "digest": sha256_json(sorted(self.digests))}

    def part(self, start: int, stop: int) -> ImageBatches:
        """The samples from `start` to `stop` alone; nothing is read for it, and it can be sent to another process."""
        self.check()
        some = copy.copy(self)
        some._chosen, some._reserve = self._chosen[start:stop], []
        some._settle()
        return some

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        return rebatched(self._samples(self._prepare), self.batch)

    def _samples(self, use: Callable[[NDArray[np.uint8]], NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield what `use` makes of each, one at a time, decoded ahead; afterwards it is known which can be used."""
        with ThreadPoolExecutor(self._threads) as pool:
            ahead: deque[tuple[_Chosen, Future[NDArray[Any] | str]]] = deque()
            waiting = deque(self._chosen)
            try:
                while ahead or waiting:
                    while waiting and len(ahead) < 2 * max(self.batch, self._threads):
                        item = waiting.popleft()
                        ahead.append((item, pool.submit(item.load, use)))
                    item, future = ahead.popleft()
                    sample = future.result()
                    if not isinstance(sample, str):
                        yield {self.name: sample[None]}
                    elif self._checked:
                        raise DataError(f"{item.path} changed while it was used: {sample}")
                    else:
                        self._bad[item.index] = Skipped(item.path.name, sample)
                        self._chosen.remove(item)
                        waiting += self._reserve[:1]
                        self._chosen += self._reserve[:1]
                        del self._reserve[:1]
                        self._settle()
            finally:
                for _, future in ahead:
                    future.cancel()
        if not self._checked:
            self._chosen.sort(key=lambda item: item.index)
            self._checked = True
            self._settle()


@dataclass(frozen=True, eq=False)
class _Chosen:
    """An image that may be used: its place in what was given, its content's digest, and itself."""

    index: int
    digest: str
    item: Item

    @property
    def path(self) -> Path:
        return self.item if isinstance(self.item, Path) else Path(f"image {self.index}")

    def load(self, use: Callable[[NDArray[np.uint8]], NDArray[Any]]) -> NDArray[Any] | str:
        if isinstance(self.item, np.ndarray):
            return use(self.item)
        return read_image(self.item, use)


def _ranked(images: list[_Chosen]) -> list[_Chosen]:
    """Sort by content, repetitions only after all different ones: in the order in which a limit takes them."""
    ranks: list[tuple[int, str, int]] = []
    repetitions: Counter[str] = Counter()
    for item in images:
        ranks.append((repetitions[item.digest], item.digest, len(ranks)))
        repetitions[item.digest] += 1
    return [images[place] for _, _, place in sorted(ranks)]


def _digest(item: Item) -> str | Skipped:
    if isinstance(item, np.ndarray):
        return hashlib.sha256(str(item.shape).encode() + item.tobytes()).hexdigest()
    try:
        with encoded(item) as file:
            return sha256_stream(file)
    except (DataError, OSError) as error:
        return Skipped(item.name, str(error))


def _listed(source: Any) -> list[Item]:
    """Files and images in memory, the latter checked: a wrong one is a mistake in a program, not a damaged file."""
    if not isinstance(source, Iterable) or (isinstance(source, np.ndarray) and source.ndim != 4):
        shape = f" of shape {source.shape}" if isinstance(source, np.ndarray) else ""
        raise UsageError(f"images is {type(source).__name__}{shape}; a folder or a list of files or images is needed")
    items: list[Item] = []
    for index, item in enumerate(source):
        if hasattr(item, "convert") and hasattr(item, "__array_interface__"):  # Pillow's
            item = np.asarray(item.convert("RGB"))
        if isinstance(item, np.ndarray):
            check_image(item, f"image {index}")
        elif not isinstance(item, (str, os.PathLike)):
            raise UsageError(
                f"image {index} is {type(item).__name__}; a file, an image of Pillow, or a uint8 array height x width x 3 in "
                "RGB, is needed"
            )
        items.append(item if isinstance(item, np.ndarray) else Path(item))
    return items


def images_in(folder: Path) -> list[Item]:
    """The image files of a folder and of those below it, in order.

    Raises:
        UsageError: it isn't a folder, or there is none.
    """
    if not os.path.isdir(folder):  # noqa: PTH112  (Path's raises errors for names that are too long)
        problem = (
            "isn't a folder; give the folder that holds the images" if os.path.lexists(folder) else "doesn't exist"
        )
        if folder.suffix in ARRAYS:
            problem = f"holds arrays; give them as `data='{folder}'`"
        raise UsageError(f"`images='{folder}'` {problem}")
    named = [path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS]
    paths: list[Item] = [*sorted(path for path in named if path.is_file() or (path.is_symlink() and not path.exists()))]
    if not paths:
        raise UsageError(f"there is no image in {folder} (looked for {', '.join(sorted(EXTENSIONS))}, subfolders too)")
    return paths
