"""An image, or its file's content, as pixels, or why not. The decoders' own words never reach stderr.

Pillow says what a file is and how large; it decodes JPEG and PNG, to OpenCV's very pixels, and OpenCV the others, of which it
reads more kinds.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, UsageError, require
from trtopt.core.files import existing_file, opened_regular
from trtopt.core.library_output import Shared
from trtopt.data.preprocess import check_image

T = TypeVar("T")
_BYTES = 1 << 28  # of a file
_PIXELS = 1 << 27  # of an image: up to 10 bytes each while it is decoded and resized
_KINDS = {"JPEG": 1, "PNG": 1, "BMP": 1, "TIFF": 1, "WEBP": 1, "PPM": 1, "JPEG2000": 4, "AVIF": 4, "GIF": 4}
"""Pillow's names of the kinds that are read, and how many times a pixel counts, by what the decoder takes."""
_SCANS = 200  # of a progressive JPEG: each costs as much time as all pixels, and some ten are usual
_UNKNOWN = "isn't an image that can be decoded"


class _Room:
    """Room for so much at a time in all threads; who needs more than is free waits."""

    def __init__(self, size: int) -> None:
        self._free, self._changed = size, threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _make_rooms() -> None:
    global _files, _images
    _files, _images = _Room(_BYTES), _Room(_PIXELS)


_files: _Room
_images: _Room
_make_rooms()
if hasattr(os, "register_at_fork"):  # the threads that would give back what they took don't live in a child
    os.register_at_fork(after_in_child=_make_rooms)


def decode(source: bytes | str | os.PathLike[str]) -> NDArray[np.uint8] | str:
    """An image as `read_image` gives it, or why it can't be decoded."""
    return read_image(source, lambda image: image)


def read_image(source: bytes | str | os.PathLike[str], use: Callable[[NDArray[np.uint8]], T]) -> T | str:
    """Return what `use` makes of an image: uint8 height × width × 3 RGB, turned upright by its EXIF tag; or why not.

    Grey images get three equal channels, transparency is dropped, 16 bits become 8, of several images the first is taken.
    Files of up to 256 MiB and 2^27 pixels are read (JPEG 2000, AVIF, GIF: 2^25), and in all threads together no more are in
    memory at a time until `use` has ended.

    Args:
        source: a file's content, or its path.
    """
    if isinstance(source, bytes):
        return _decoded(source, use)
    try:
        with encoded(source) as file, _files.taken(size := os.fstat(file.fileno()).st_size):
            return _decoded(file.read(size), use)
    except (DataError, OSError) as error:
        return str(error)


def encoded(path: str | os.PathLike[str]) -> io.BufferedReader:
    """An image's file, opened; DataError for what can't be one: no file, or one that is too large."""
    try:
        file = opened_regular(path)
    except (OSError, ValueError) as error:
        raise DataError(f"can't be read: {getattr(error, 'strerror', None) or error}") from error
    if (size := os.fstat(file.fileno()).st_size) > _BYTES:
        file.close()
        raise DataError(f"has {size} bytes; up to {_BYTES} are read")
    return file


def _decoded(content: bytes, use: Callable[[NDArray[np.uint8]], T]) -> T | str:
    if not content:
        return "the file is empty"
    pillow = require("PIL.Image", "ort", "reading images")
    pillow.init()
    with _silent:
        try:
            image = pillow.open(io.BytesIO(content), formats=[kind for kind in _KINDS if kind in pillow.OPEN])
        except pillow.DecompressionBombError:
            return f"claims more pixels than the {_PIXELS} that are read"
        except Exception:  # of any kind, such as struct.error and IndexError
            return _UNKNOWN
    kind = "JPEG" if image.format == "MPO" else str(image.format)  # several JPEGs in a file, as phones write
    weight, (width, height) = _KINDS[kind], image.size
    if not 0 < width * height * weight <= _PIXELS:  # a few damaged bytes may claim any size
        return f"claims {width}x{height} pixels; 1 to {_PIXELS // weight} are read"
    if kind == "JPEG" and (reason := _jpeg_damage(content, image.fp.tell())):
        return reason
    if kind == "PNG" and b"IEND" not in content:
        return "a PNG cut off before its end"
    with _images.taken(weight * width * height):
        try:
            with _silent:
                array = _by_pillow(pillow, image, content) if kind in ("JPEG", "PNG") else _by_opencv(content)
        except Exception as error:
            return f"isn't a {kind} that can be decoded ({str(error).strip()[-80:]})"
        del image
        return _UNKNOWN if array is None else use(array)


def _jpeg_damage(content: bytes, start: int) -> str:
    """Say why a JPEG whose first scan is at `start` isn't decoded; empty if it is.

    The end-of-image marker follows the image data; more may follow it (phones append videos and depth maps). Within the data
    0xFF is followed by 0x00 or a restart marker, so the marker can't appear by chance.
    """
    end = content.find(b"\xff\xd9", start)
    if end < 0:
        return "a JPEG cut off before its end"  # decoders may fill the rest with grey
    scans = 1 + content.count(b"\xff\xda", start, end)
    return f"a JPEG of {scans} scans; up to {_SCANS} are read" if scans > _SCANS else ""


def _by_pillow(pillow: Any, image: Any, content: bytes) -> NDArray[np.uint8]:
    pillow_ops = require("PIL.ImageOps", "ort", "reading images")
    if image.format == "PNG":
        pillow.open(io.BytesIO(content), formats=["PNG"]).verify()  # checksums, which decoding doesn't look at
    image.load()
    # Damaged EXIF data costs no photo; in place it is turned before that is written.
    with contextlib.suppress(Exception):
        pillow_ops.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16 bits of grey
        image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _by_opencv(content: bytes) -> NDArray[np.uint8] | None:
    cv2 = require("cv2", "ort", "reading images")
    with _opencv_silent:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)  # 8 bits, BGR, EXIF applied
    return None if image is None else np.asarray(image[:, :, ::-1], np.uint8)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Pillow warns of large photos and of damaged EXIF data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _opencv_silenced() -> Iterator[None]:
    cv2 = require("cv2", "ort", "reading images")
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)


_silent, _opencv_silent = Shared(_without_warnings), Shared(_opencv_silenced)


def pixels(image: Any, index: int, use: Callable[[NDArray[np.uint8]], T]) -> T:
    """Return what `use` makes of an image, height × width × 3 in RGB, from a path, an encoded image, or such an array.

    Args:
        index: names it in messages.

    Raises:
        UsageError: it is nothing of that kind.
        DataError: it can't be decoded.
    """
    if isinstance(image, np.ndarray):
        check_image(image, f"image {index}")
        return use(image)
    if isinstance(image, (bytes, bytearray, memoryview)):
        result, name = read_image(bytes(image), use), f"image {index}"
    elif isinstance(image, (str, os.PathLike)):
        result, name = read_image(existing_file(image, "the image"), use), str(image)
    else:
        ways = {
            "convert": "np.asarray(image.convert('RGB'))",
            "read": "its bytes, image.read()",
            "numpy": "image.numpy()",
        }
        instead = next((f": give {way}" for name, way in ways.items() if callable(getattr(image, name, None))), "")
        raise UsageError(
            f"image {index} is {type(image).__name__}; a path, an encoded image as bytes, or a uint8 array height x width x 3 "
            f"in RGB is needed{instead}"
        )
    if isinstance(result, str):
        raise DataError(f"{name}: {result}")
    return result
