"""An image, or its file's content, as pixels, or why not. The decoders' own words never reach stderr.

Pillow says what a file is and how large; it decodes JPEG and PNG, to OpenCV's very pixels, and OpenCV the others, of which it
reads more kinds.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, MissingDependency, UsageError, require
from trtopt.core.files import existing_file, whole
from trtopt.core.library_output import Shared, unwarned
from trtopt.data.preprocess import check_image

_PIXELS = 1 << 27  # of an image: up to 10 bytes each while it is decoded and resized
_KINDS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF", "GIF")  # as Pillow calls those that are read
_UNKNOWN = "isn't an image that can be decoded"


def decode(source: bytes | str | os.PathLike[str], *, look: bool = False) -> NDArray[np.uint8] | str:
    """Return an image: uint8 height × width × 3 RGB, turned upright by its EXIF tag; or why it can't be decoded.

    Grey images get three equal channels, transparency is dropped, 16 bits become 8, of several images the first is taken.
    Files of up to 256 MiB and 2^27 pixels are read.

    Args:
        source: a file's content, or its path.
        look: only see if it can be decoded; a JPEG's picture may be smaller, which takes a third of the time.
    """
    try:
        content = source if isinstance(source, bytes) else encoded(source)
    except DataError as error:
        return str(error)
    if not content:
        return "the file is empty"
    pillow = require("PIL.Image", "ort", "reading images")
    pillow.init()
    with unwarned:  # of large photos and of damaged EXIF data
        try:
            image = pillow.open(io.BytesIO(content), formats=[kind for kind in _KINDS if kind in pillow.OPEN])
        except pillow.DecompressionBombError:
            return f"claims more pixels than the {_PIXELS} that are read"
        except Exception:  # of any kind, such as struct.error and IndexError
            return _UNKNOWN
    kind = "JPEG" if image.format == "MPO" else str(image.format)  # several JPEGs in a file, as phones write
    width, height = image.size
    if not 0 < width * height <= _PIXELS:  # a few damaged bytes may claim any size
        return f"claims {width}x{height} pixels; 1 to {_PIXELS} are read"
    # The end-of-image marker follows the image data (more may follow it: phones append videos and depth maps). Within the data
    # 0xFF is followed by 0x00 or a restart marker, so the marker can't appear by chance; decoders may fill the rest with grey.
    if (kind == "JPEG" and content.find(b"\xff\xd9", image.fp.tell()) < 0) or (
        kind == "PNG" and b"IEND" not in content
    ):
        return f"a {kind} cut off before its end"
    try:
        with unwarned:
            if look:
                image.draft("RGB", (1, 1))
            array = _by_pillow(pillow, image, content) if kind in ("JPEG", "PNG") else _by_opencv(content)
    except MissingDependency:
        raise
    except Exception as error:
        return f"isn't a {kind} that can be decoded ({str(error).strip()[-80:]})"
    return _UNKNOWN if array is None else array


def encoded(path: str | os.PathLike[str]) -> bytes:
    """Read an image's file; DataError for what can't be one: no file, or one that is too large."""
    try:
        return whole(path)
    except (OSError, ValueError) as error:
        raise DataError(f"can't be read: {getattr(error, 'strerror', None) or error}") from error


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
def _opencv_silenced() -> Iterator[None]:
    cv2 = require("cv2", "ort", "reading images")
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)


_opencv_silent = Shared(_opencv_silenced)


def pixels(image: Any, index: int) -> NDArray[Any]:
    """Return an image, uint8 height × width × 3 in RGB, from a path, an encoded image, or such an array, which errors call by
    its index."""
    if isinstance(image, np.ndarray):
        check_image(image, f"image {index}")
        return image
    if isinstance(image, (bytes, bytearray, memoryview)):
        result, name = decode(bytes(image)), f"image {index}"
    elif isinstance(image, (str, os.PathLike)):
        result, name = decode(existing_file(image, "the image")), str(image)
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
