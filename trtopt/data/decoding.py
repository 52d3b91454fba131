"""An image, or its file's content, as pixels, or why not. The decoders' own words never reach stderr."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import DataError, UsageError, require
from trtopt.core.files import existing_file, opened_regular
from trtopt.core.library_output import Shared
from trtopt.data.preprocess import check_image

T = TypeVar("T")
_BYTES = 1 << 28  # of a file
_PIXELS = 1 << 27  # of an image: up to 10 bytes each while it is decoded and resized
_HEAVY = 4  # JPEG 2000, AVIF and GIF count so many times, by what their decoders take
_SCANS = 200  # of a progressive JPEG: each costs as much time as all pixels, and some ten are usual
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = (b"IHDR", b"PLTE", b"eXIf", b"IDAT", b"IEND")  # what the pixels depend on, but for transparency
_JPEG_DROPPED = (*range(0xE1, 0xEE), 0xEF, 0xFE)  # all but JFIF's (0xE0) and Adobe's (0xEE): colours depend on them
_TURNS = {  # EXIF orientation → what turns the image upright
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_CUT = "a JPEG cut off before its end"


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
    """What `use` makes of an image: uint8 height × width × 3 RGB, turned upright by its EXIF tag; or why it can't be decoded.

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
    if content[:2] == b"\xff\xd8":
        needed, orientation = _jpeg_segments(content)
        if needed is None:
            return _CUT  # decoders may fill the rest with grey
        if (scans := needed.count(b"\xff\xda")) > _SCANS:
            return f"a JPEG of {scans} scans; up to {_SCANS} are read"
        return _by_pillow("Jpeg", needed, orientation, use)
    if content[: len(_PNG)] == _PNG:
        chunks = _png_chunks(content)
        return chunks if isinstance(chunks, str) else _by_pillow("Png", *chunks, use)
    size = _frame(content)
    if size is None:
        return "isn't an image that can be decoded"
    width, height, weight = size
    if reason := _excess(width, height, weight):
        return reason
    cv2 = require("cv2", "ort", "reading images")
    with _images.taken(weight * width * height), _opencv_silent:
        try:
            image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)  # 8 bits, BGR, EXIF applied
        except cv2.error as error:
            return f"can't be decoded ({str(error).strip().splitlines()[-1][:80]})"
        if image is None:
            return "isn't an image that can be decoded"
        return use(np.asarray(image[:, :, ::-1], np.uint8))


def _excess(width: int, height: int, weight: int = 1) -> str:
    """Why an image of this size isn't decoded; "" if it is. A few damaged bytes may claim any size."""
    if 0 < width * height * weight <= _PIXELS:
        return ""
    return f"claims {width}x{height} pixels; 1 to {_PIXELS // weight} are read"


@contextlib.contextmanager
def _opencv_silenced() -> Iterator[None]:
    """Without OpenCV's own words: what can't be decoded is reported by trtopt."""
    cv2 = require("cv2", "ort", "reading images")
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)


_opencv_silent = Shared(_opencv_silenced)


def _by_pillow(kind: str, content: bytes, orientation: int, use: Callable[[NDArray[np.uint8]], T]) -> T | str:
    """JPEG and PNG: the same pixels as OpenCV's, but libjpeg's and libpng's own words don't reach stderr."""
    pillow = require("PIL.Image", "ort", f"reading {kind.upper()} images")
    plugin = require(f"PIL.{kind}ImagePlugin", "ort", f"reading {kind.upper()} images")
    with contextlib.ExitStack() as held:
        try:
            image = getattr(plugin, f"{kind}ImageFile")(io.BytesIO(content))  # Image.open would warn of large photos
            if reason := _excess(image.width, image.height):
                return reason
            held.enter_context(_images.taken(image.width * image.height))
            if image.mode.startswith("I"):  # 16 bits of grey
                image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode != "RGB":
                image = image.convert("RGB")
            last = np.asarray(image.crop((0, max(0, image.height - 2), *image.size)))
            if kind == "Png" and (image.height == 1 or not last.any(axis=(1, 2)).all()) and _short(content):
                return "a PNG with too little data"  # of which Pillow leaves the rest black
            if orientation in _TURNS:
                image = image.transpose(getattr(pillow.Transpose, _TURNS[orientation]))
            pixels = np.asarray(image)
            del image
        except Exception as error:  # of any kind, such as struct.error and IndexError
            return f"isn't a {kind.upper()} that can be decoded ({str(error)[:80]})"
        return use(pixels)


def _jpeg_segments(content: bytes) -> tuple[bytes | None, int]:
    """What the pixels depend on, None if the end is missing; and the EXIF orientation.

    The end-of-image marker follows the image data; more may follow it (phones append videos and depth maps). Within the data
    0xFF is followed by 0x00 or a restart marker, so the marker can't appear by chance; before it, in an embedded thumbnail,
    it can.
    """
    segments, at, orientation = [content[:2]], 2, 1
    while at + 4 <= len(content) and content[at] == 0xFF:
        kind = content[at + 1]
        if kind == 0xFF:  # may be repeated before a marker
            at += 1
            continue
        if kind == 0xDA:  # start of scan
            break
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        if kind == 0xE1 and content[at + 4 : at + 10] == b"Exif\0\0":
            orientation = _orientation(content[at + 10 : end]) or orientation
        if kind not in _JPEG_DROPPED:
            segments.append(content[at:end])
        at = end
    if content.find(b"\xff\xd9", at) < 0:
        return None, orientation
    return b"".join([*segments, content[at:]]), orientation


def _orientation(exif: bytes) -> int:
    """Tag 0x0112 of EXIF data, 1 to 8; 0 if there is none."""
    value = _tags(exif).get(0x0112, 0)
    return value if value <= 8 else 0


def _tags(tiff: bytes) -> dict[int, int]:
    """The whole numbers in a TIFF's first directory by their tags. Slices past the end are empty: damage reads as 0."""
    orders: dict[bytes, Any] = {b"II": "little", b"MM": "big"}
    order = orders.get(tiff[:2], "little")

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    big = number(2, 2) == 43  # BigTIFF, of 64 bits
    first, count, entry, value = (number(8, 8), 8, 20, 12) if big else (number(4, 4), 2, 12, 8)
    values: dict[int, int] = {}
    for at in range(first + count, min(first + count + entry * number(first, count), len(tiff)), entry):
        tag, size = number(at, 2), {3: 2, 4: 4, 16: 8}.get(number(at + 2, 2), 0)
        values[tag] = max(values.get(tag, 0), number(at + value, size))
    return values


def _frame(content: bytes) -> tuple[int, int, int] | None:
    """Width, height and weight that a file's header claims (see `_HEAVY`); None: of no kind that is known.

    Where a header can be repeated, the largest counts.
    """

    def number(at: int, size: int, order: Literal["little", "big"] = "little") -> int:
        return int.from_bytes(content[at : at + size], order)

    start = content[:4]
    if start[:2] == b"BM":
        if number(14, 4) == 12:
            return number(18, 2), number(20, 2), 1
        return number(18, 4), min(number(22, 4), 2**32 - number(22, 4)), 1  # a negative height: from top to bottom
    if start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        tags = _tags(content)
        width, height, tile_width, tile_height = (tags.get(tag, 0) for tag in (256, 257, 322, 323))
        return (tile_width, tile_height, 1) if tile_width * tile_height > width * height > 0 else (width, height, 1)
    if start == b"RIFF" and content[8:12] == b"WEBP":
        kind = content[12:16]
        if kind == b"VP8X":
            return 1 + number(24, 3), 1 + number(27, 3), 1
        if kind == b"VP8L":
            return 1 + (number(21, 4) & 0x3FFF), 1 + (number(21, 4) >> 14 & 0x3FFF), 1
        return number(26, 2) & 0x3FFF, number(28, 2) & 0x3FFF, 1
    if start == b"GIF8":
        return number(6, 2), number(8, 2), _HEAVY
    if header := re.match(rb"P[1-6]\s+(?:#[^\n]*\n\s*)*(\d{1,9})\s+(?:#[^\n]*\n\s*)*(\d{1,9})\s", content):
        return int(header[1]), int(header[2]), 1
    mark = b""
    if start == b"\xff\x4f\xff\x51" or content[4:12] == b"jP  \r\n\x87\n":
        mark = b"\xff\x4f\xff\x51"  # before SIZ of JPEG 2000's code stream
    elif content[4:8] == b"ftyp" and b"avi" in content[8:64]:
        mark = b"ispe"
    places = [match.end() for match in re.finditer(mark, content)] if mark else []
    sizes = [(number(at + 4, 4, "big"), number(at + 8, 4, "big")) for at in places]
    return (*max(sizes, key=math.prod), _HEAVY) if sizes else None


def _png_chunks(content: bytes) -> tuple[bytes, int] | str:
    """The chunks that the pixels depend on, each with a right checksum, and the EXIF orientation."""
    chunks, at, orientation = [_PNG], len(_PNG), 1
    while at + 12 <= len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        kind = content[at + 4 : at + 8]
        if end > len(content):
            break
        if kind in _PNG_CHUNKS:
            if zlib.crc32(memoryview(content)[at + 4 : end - 4]) != int.from_bytes(content[end - 4 : end], "big"):
                return "a damaged PNG: a checksum is wrong"
            if kind == b"eXIf":
                orientation = _orientation(content[at + 8 : end - 4]) or orientation
            else:
                chunks.append(content[at:end])
        if kind == b"IEND":
            return b"".join(chunks), orientation
        at = end
    return "a PNG cut off before its end"


def _short(png: bytes) -> bool:
    """Whether a PNG's data ends before its last row. It is unpacked once more: asked only where the last rows are black."""
    width, height, depth, kind, *_, interlaced = struct.unpack_from(">IIBBBBB", png, 16)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(kind, 1)
    steps = [(0, 0, 1, 1)]  # first column and row of each pass, and the steps
    if interlaced:
        steps = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    sizes = [(-(-(width - left) // right), -(-(height - top) // down)) for left, top, right, down in steps]
    remaining: int = sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns > 0 and rows > 0)
    unpacking, at = zlib.decompressobj(), len(_PNG)
    while at < len(png) and remaining > 0:
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")
        packed = png[at + 8 : end - 4] if png[at + 4 : at + 8] == b"IDAT" else b""
        while packed and remaining > 0:
            remaining -= len(unpacking.decompress(packed, 1 << 20))
            packed = unpacking.unconsumed_tail
        at = end
    return remaining > 0


def pixels(image: Any, index: int, use: Callable[[NDArray[np.uint8]], T]) -> T:
    """What `use` makes of an image, height × width × 3 in RGB, from a path, an encoded image, or such an array.

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
