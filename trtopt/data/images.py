"""Images from a folder or a list: decoded once per pass in a few threads, unusable ones left out and counted."""

from __future__ import annotations

import hashlib
import os
from collections import deque
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

    Which ones a `limit` takes is decided by their content, and identical files count once: neither names nor order matter.

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
        self.preprocess: Preprocess | None = preprocess.fitted(info)
        self._prepare = preprocess.fitted(info)
        self._threads = threads or min(4, os.cpu_count() or 1)
        listed = not isinstance(source, (str, os.PathLike))
        paths = [Path(item) for item in source] if listed else _images_in(Path(source))  # type: ignore[union-attr,arg-type]
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
        if not listed:
            good = [
                good[index]
                for index in sorted({digest: i for i, (digest, _) in reversed(list(enumerate(good)))}.values())
            ]
        if limit is not None and limit < len(good):
            taken = set(sorted(digest for digest, _ in good)[:limit])
            good = [item for item in good if item[0] in taken][:limit]
        self.digests = tuple(digest for digest, _ in good)
        self.paths = tuple(path for _, path in good)
        self.samples = len(good)

    def describe(self) -> dict[str, Any]:
        return {"kind": "images", "count": self.samples, "digest": sha256_json(sorted(self.digests))}

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
    level = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)  # 8 bits, BGR, EXIF applied
    except cv2.error as error:
        return f"can't be decoded ({str(error).strip().splitlines()[-1][:80]})"
    finally:
        cv2.utils.logging.setLogLevel(level)
    if image is None:
        return "isn't an image that can be decoded"
    if content[:2] == b"\xff\xd8" and b"\xff\xd9" not in content[-4096:]:
        return "a JPEG cut off before its end"  # OpenCV decodes what there is and fills the rest with grey
    return np.asarray(image[:, :, ::-1], np.uint8)


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
