"""Images from a folder or a list: decoded once per pass in a few threads, unusable ones left out and counted."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.data.batches import Skipped
from trtopt.data.preprocess import Preprocess
from trtopt.errors import DataError, UsageError, require
from trtopt.files import sha256_json
from trtopt.spec import TensorInfo

EXTENSIONS = frozenset([".jpg", ".jpeg", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"])


class ImageBatches:
    """See `trtopt.data.Batches`. Every file is read and decoded when this is made, to know which can be used.

    Which ones a `limit` takes is decided by their content, different ones first: neither names nor order matter.

    Attributes:
        paths: the files used, in the order given (a folder's: by name).
        repeated: how many of them have the same content as another.

    Raises:
        UsageError: no such folder, or an image input doesn't fit the model.
        DataError: no image in it, or none that can be decoded.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
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
        self.preprocess: Preprocess | None = self._prepare
        self._threads = threads or min(4, os.cpu_count() or 1)
        listed = not isinstance(source, (str, os.PathLike))
        paths = [Path(item) for item in source] if listed else _images_in(Path(source))  # type: ignore[union-attr,arg-type]
        if not paths:
            raise DataError("the list of images is empty: give real photos")
        good: list[tuple[str, Path]] = []
        skipped: list[Skipped] = []
        with ThreadPoolExecutor(self._threads) as pool:
            for path, found in zip(paths, pool.map(_digest, paths)):
                if isinstance(found, Skipped):
                    skipped.append(found)
                else:
                    good.append((found, path))
        self.skipped = tuple(skipped)
        if not good:
            some = "; ".join(f"{item.name}: {item.reason}" for item in skipped[:3])
            raise DataError(f"none of the {len(paths)} images can be used ({some}): give real photos")
        if limit is not None:
            good = _chosen(good, limit)
        self.digests = tuple(digest for digest, _ in good)
        self.paths = tuple(path for _, path in good)
        self.samples = len(good)
        self.repeated = len(good) - len(set(self.digests))

    def describe(self) -> dict[str, Any]:
        found = {"kind": "images", "count": self.samples, "digest": sha256_json(sorted(self.digests))}
        return found | ({"repeated": self.repeated} if self.repeated else {})

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        with ThreadPoolExecutor(self._threads) as pool:
            ahead: deque[Future[NDArray[Any]]] = deque()
            waiting = iter(self.paths)
            collected: list[NDArray[Any]] = []
            try:
                while True:
                    while len(ahead) < 2 * max(self.batch, self._threads):
                        path = next(waiting, None)
                        if path is None:
                            break
                        ahead.append(pool.submit(self._load, path))
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

    def _load(self, path: Path) -> NDArray[Any]:
        image = decode(_read(path))
        if isinstance(image, str):  # it could be decoded a moment ago
            raise DataError(f"{path} changed while it was used: {image}")
        return self._prepare(image)


def decode(content: bytes) -> NDArray[np.uint8] | str:
    """A file's content as uint8 height × width × 3 RGB, turned upright by its EXIF tag; or why it can't be.

    Grey images get three equal channels, transparency is dropped, 16 bits become 8.
    """
    cv2 = require("cv2", "ort", "reading images")
    if not content:
        return "the file is empty"
    if content[:2] == b"\xff\xd8" and not _ends(content):
        return "a JPEG cut off before its end"  # OpenCV 4 decodes what there is and fills the rest with grey
    _quiet(cv2)
    try:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)  # 8 bits, BGR, EXIF applied
    except cv2.error as error:
        return f"can't be decoded ({str(error).strip().splitlines()[-1][:80]})"
    if image is None:
        return "isn't an image that can be decoded"
    return np.asarray(image[:, :, ::-1], np.uint8)


@functools.cache
def _quiet(cv2: Any) -> None:
    """Once for the process: turned on and off around each call, threads would restore each other's level."""
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what can't be decoded is reported by trtopt


def _ends(jpeg: bytes) -> bool:
    """The end-of-image marker follows the image data; more may follow it (phones append videos and depth maps).

    Within the data 0xFF is followed by 0x00 or a restart marker, so the marker can't appear by chance; before it, in an
    embedded thumbnail, it can.
    """
    at = 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF:
        kind = jpeg[at + 1]
        if kind == 0xDA:  # start of scan
            return jpeg.find(b"\xff\xd9", at) >= 0
        # 0xFF may be repeated before a marker; the other segments give their length.
        at += 1 if kind == 0xFF else 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return jpeg.rfind(b"\xff\xd9") >= 0  # segments that only the decoder understands


def _chosen(good: list[tuple[str, Path]], limit: int) -> list[tuple[str, Path]]:
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


def _digest(path: Path) -> str | Skipped:
    try:
        content = _read(path)
    except DataError as error:
        return Skipped(path.name, str(error))
    image = decode(content)
    return Skipped(path.name, image) if isinstance(image, str) else hashlib.sha256(content).hexdigest()


def _images_in(folder: Path) -> list[Path]:
    if not folder.exists():
        raise UsageError(f"--images {folder} doesn't exist")
    if not folder.is_dir():
        raise UsageError(f"--images {folder} isn't a folder; give the folder that holds the images")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())
    if not paths:
        raise DataError(f"there is no image in {folder} (looked for {', '.join(sorted(EXTENSIONS))}, subfolders too)")
    return paths
