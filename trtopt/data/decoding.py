"""An image, or its file's content, as pixels, or why not. The decoders' own words never reach stderr."""

from __future__ import annotations

import functools
import io
import os
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.errors import DataError, UsageError, require
from trtopt.files import existing_file

_PIXELS = 1 << 30  # OpenCV's limit as well: a few damaged bytes may claim any size
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = frozenset([b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"IEND"])  # what the pixels depend on
_JPEG_DROPPED = frozenset(
    [*range(0xE1, 0xEE), 0xEF, 0xFE]
)  # all but JFIF's (0xE0) and Adobe's (0xEE): colours depend on them
_CUT = "a JPEG cut off before its end"


def decode(content: bytes) -> NDArray[np.uint8] | str:
    """A file's content as uint8 height × width × 3 RGB, turned upright by its EXIF tag; or why it can't be.

    Grey images get three equal channels, transparency is dropped, 16 bits become 8.
    """
    cv2 = require("cv2", "ort", "reading images")
    if not content:
        return "the file is empty"
    if content[:2] == b"\xff\xd8":
        return _jpeg(content)
    if content[: len(_PNG)] == _PNG:
        chunks = _png_chunks(content)
        if isinstance(chunks, str):
            return chunks
        content = chunks
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


def _jpeg(content: bytes) -> NDArray[np.uint8] | str:
    """By Pillow: the same pixels as OpenCV's (both use libjpeg-turbo), but libjpeg's own words don't reach stderr."""
    needed, orientation = _jpeg_segments(content)
    if needed is None:
        return _CUT  # decoders may fill the rest with grey
    plugin = require("PIL.JpegImagePlugin", "ort", "reading JPEG images")
    try:
        image = plugin.JpegImageFile(io.BytesIO(needed))  # Image.open would warn on stderr of large photos
        if image.width * image.height > _PIXELS:
            return f"claims {image.width}x{image.height} pixels; up to {_PIXELS} are read"
        return _upright(np.asarray(image.convert("RGB"), np.uint8), orientation)
    except (OSError, SyntaxError, ValueError) as error:
        return f"isn't a JPEG that can be decoded ({str(error)[:80]})"


def _jpeg_segments(content: bytes) -> tuple[bytes | None, int]:
    """What the pixels depend on, None if the end is missing; and the EXIF orientation.

    The end-of-image marker follows the image data; more may follow it (phones append videos and depth maps). Within the data
    0xFF is followed by 0x00 or a restart marker, so the marker can't appear by chance; before it, in an embedded thumbnail,
    it can.
    """
    kept, at, orientation = [content[:2]], 2, 1
    while at + 4 <= len(content) and content[at] == 0xFF:
        kind = content[at + 1]
        if kind == 0xFF:  # may be repeated before a marker
            at += 1
            continue
        if kind == 0xDA:  # start of scan
            break
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        if kind == 0xE1:
            orientation = _orientation(content[at + 4 : end]) or orientation
        if kind not in _JPEG_DROPPED:
            kept.append(content[at:end])
        at = end
    if content.find(b"\xff\xd9", at) < 0:
        return None, orientation
    return b"".join([*kept, content[at:]]), orientation


def _orientation(exif: bytes) -> int:
    """Tag 0x0112 of an EXIF segment, 1 to 8; 0 if there is none. Slices past the end are empty: damage reads as 0."""
    orders: dict[bytes, Any] = {b"II": "little", b"MM": "big"}
    order = orders.get(exif[6:8])
    if exif[:6] != b"Exif\0\0" or order is None:
        return 0
    tiff = exif[6:]
    first = int.from_bytes(tiff[4:8], order)
    for at in range(first + 2, first + 2 + 12 * int.from_bytes(tiff[first : first + 2], order), 12):
        if int.from_bytes(tiff[at : at + 2], order) == 0x0112:
            value = int.from_bytes(tiff[at + 8 : at + 10], order)
            return value if 1 <= value <= 8 else 0
    return 0


def _upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    if orientation >= 5:  # stored with rows and columns exchanged
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


def _png_chunks(content: bytes) -> bytes | str:
    """The chunks that the pixels depend on, each with a right checksum: libpng writes of others to stderr."""
    kept, at = [_PNG], len(_PNG)
    while at + 12 <= len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        kind = content[at + 4 : at + 8]
        if end > len(content):
            break
        if kind in _PNG_CHUNKS:
            if zlib.crc32(memoryview(content)[at + 4 : end - 4]) != int.from_bytes(content[end - 4 : end], "big"):
                return "a damaged PNG: a checksum is wrong"
            kept.append(content[at:end])
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    return "a PNG cut off before its end"


def pixels(image: Any, index: int) -> NDArray[np.uint8]:
    """Height × width × 3 in RGB, from a path, an encoded image, or such an array; `index` names it in messages.

    Raises:
        UsageError: it is nothing of that kind.
        DataError: it can't be decoded.
    """
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise UsageError(f"image {index} is {image.dtype} {image.shape}; uint8 height x width x 3 in RGB is needed")
        return image
    if isinstance(image, (bytes, bytearray, memoryview)):
        content, name = bytes(image), f"image {index}"
    elif not isinstance(image, (str, os.PathLike)):
        raise UsageError(
            f"image {index} is {type(image).__name__}; a path, an encoded image as bytes, or a uint8 array height x width x 3 "
            "in RGB is needed"
        )
    else:
        name = str(image)
        content = existing_file(image, "the image").read_bytes()
    found = decode(content)
    if isinstance(found, str):
        raise DataError(f"{name}: {found}")
    return found
