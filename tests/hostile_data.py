"""Sample data that is damaged, odd, or says what isn't so, made by seeded code: what calibrate, verify and run are given."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage import data

PHOTO = np.ascontiguousarray(data.astronaut()[40:136, 180:308])  # 96 x 128
SAMPLES = np.stack([PHOTO[8 * k : 8 * k + 32, 16 * k : 16 * k + 32] for k in range(6)]).transpose(
    0, 3, 1, 2
) / np.float32(255)
SHAPE = SAMPLES.shape


def npy(array: NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return file.getvalue()


def header(text: str) -> bytes:
    """An .npy file with this text as its header, whatever it says."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n" + SAMPLES.tobytes()


def described(shape: Any, descr: Any = "<f4", fortran: Any = False) -> str:
    return str({"descr": descr, "fortran_order": fortran, "shape": shape})


def archive(*members: tuple[str, bytes], kind: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as made:
        for name, content in members:
            made.writestr(zipfile.ZipInfo(name), content, kind)
        made.comment = comment
    return file.getvalue()


def damaged(content: bytes, count: int) -> Iterator[bytes]:
    """Give copies that are cut, have bits flipped, or a number at its largest; half of them at the head."""
    chance = random.Random(len(content))
    for number in range(count):
        broken = bytearray(content)
        end = len(content) - 4 if number % 2 else min(len(content) - 4, 120)
        place = chance.randrange(end)
        if number % 3 == 0:
            del broken[place:]
        elif number % 3 == 1:
            for other in (place, *(chance.randrange(end) for _ in range(2))):
                broken[other] ^= 1 << chance.randrange(8)
        else:
            size = chance.choice((2, 4))
            broken[place : place + size] = b"\xff" * (size - 1) + chance.choice((b"\x7f", b"\xff"))
        yield bytes(broken)


def arrays() -> Iterator[tuple[str, bytes]]:
    """Names of files and what is in them."""
    good = npy(SAMPLES)
    plain, packed = (archive(("x.npy", good), kind=kind) for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    whole = {"version2.npy": npy(SAMPLES, (2, 0)), "plain.npz": plain, "packed.npz": packed}
    yield from whole.items()
    for name, content in whole.items():
        for number, broken in enumerate(damaged(content, 24)):
            yield f"damaged_{number}_{name}", broken
    kinds: dict[str, NDArray[Any]] = {
        "fortran": np.asfortranarray(SAMPLES),
        "big_endian": SAMPLES.astype(">f4"),
        "double": SAMPLES.astype(np.float64),
        "half": SAMPLES.astype(np.float16),
        "complex": SAMPLES.astype(np.complex64),
        "objects": np.full(SHAPE, {}, object),
        "nan": np.where(np.equal(SAMPLES, SAMPLES[3].max()), np.float32(np.nan), SAMPLES),
        "too_large": SAMPLES.astype(np.float64) * 1e300,
    }
    for name, array in kinds.items():
        yield f"{name}.npy", npy(array)
        yield f"{name}.npz", archive(("x.npy", npy(array)), kind=zipfile.ZIP_DEFLATED)
    shapes: tuple[Any, ...] = ((12, *SHAPE[1:]), (3, *SHAPE[1:]), (-6, -3, 32, 32), (10**400, 3, 32, 32))
    headers = [*map(described, shapes), described((6, 3, 32), "(32,)<f4"), "", "__import__('os').abort()", "(" * 4000]
    for number, text in enumerate(headers):
        yield f"header_{number}.npy", header(text)
        yield f"header_{number}.npz", archive(("x.npy", header(text)))
    yield "directory_behind.npz", archive(("x.npy", header(described((7, *SHAPE[1:])))), comment=bytes(50_000))
    yield "longer.npy", good + b"more"
    yield "zip.npy", plain
    yield "array.npz", good
    yield "bz2.npz", archive(("x.npy", good), kind=zipfile.ZIP_BZIP2)
    yield "named.npz", archive(("../x.npy", good))
    yield "twice.npz", archive(("x", good), ("x.npy", good))
    yield "prefixed.npz", b"#!/bin/sh\n" * 9 + plain


def saved(kind: str, image: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def encoded(extension: str, pixels: NDArray[Any], *options: int) -> bytes:
    return cv2.imencode(extension, pixels, options)[1].tobytes()


def good_images() -> Iterator[tuple[str, bytes, NDArray[np.uint8], float]]:
    """Names of files, what is in them, the pixels that must come of it, and how far they may be off in the mean."""
    photo, grey = Image.fromarray(PHOTO), Image.fromarray(PHOTO).convert("L")
    dull, bgr = np.dstack([np.asarray(grey)] * 3), np.ascontiguousarray(PHOTO[:, :, ::-1])
    clear = photo.copy()
    clear.putalpha(Image.fromarray(np.arange(96 * 128, dtype=np.uint32).astype(np.uint8).reshape(96, 128)))
    palette = photo.quantize(64)
    colours = np.asarray(palette.convert("RGB"))
    dots = photo.convert("1")
    wide = np.random.default_rng(1).integers(0, 1 << 16, (96, 128, 3)).astype(np.uint16)
    high = (wide >> 8).astype(np.uint8)
    for kind, ending in (("PNG", "png"), ("TIFF", "tif"), ("BMP", "bmp"), ("PPM", "ppm")):
        yield f"colour.{ending}", saved(kind, photo), PHOTO, 0
        yield f"grey.{ending}", saved(kind, grey), dull, 0
    for kind, ending in (("PNG", "png"), ("BMP", "bmp"), ("TIFF", "tif")):
        yield f"palette.{ending}", saved(kind, palette), colours, 0
        yield f"dots.{ending}", saved(kind, dots), np.asarray(dots.convert("RGB")), 0
    yield "transparent.png", saved("PNG", clear), PHOTO, 0
    yield "grey_transparent.png", saved("PNG", clear.convert("LA")), dull, 0
    yield "palette_transparent.png", saved("PNG", palette, transparency=bytes(range(64))), colours, 0
    yield "transparent.webp", saved("WEBP", clear, lossless=True, exact=True), PHOTO, 0
    yield "wide.png", encoded(".png", wide[:, :, ::-1]), high, 0
    yield "wide_transparent.png", encoded(".png", np.dstack([wide[:, :, ::-1], wide[:, :, 0]])), high, 0
    yield "wide_grey.png", encoded(".png", wide[:, :, 0]), np.dstack([high[:, :, 0]] * 3), 0
    yield "wide.tif", encoded(".tif", wide[:, :, ::-1]), high, 1
    more: dict[str, Any] = {"save_all": True, "append_images": [grey.convert("RGB")]}
    yield "pages.tif", saved("TIFF", photo, **more), PHOTO, 0
    yield "animated.webp", saved("WEBP", photo, lossless=True, **more), PHOTO, 0
    yield "several.jpg", saved("MPO", photo, quality=98, **more), PHOTO, 4
    yield "lossy.webp", saved("WEBP", photo, quality=95), PHOTO, 4
    yield "colour.jp2", encoded(".jp2", bgr), PHOTO, 4
    yield "colour.jpg", saved("JPEG", photo, quality=98), PHOTO, 4
    yield "grey.jpg", saved("JPEG", grey, quality=98), dull, 4
    yield "ink.jpg", saved("JPEG", photo.convert("CMYK"), quality=98), PHOTO, 4
    yield "png.jpg", saved("PNG", photo), PHOTO, 0
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        turns = (None, None, 0, 3, 1, 5, 4, 6, 2)  # Pillow's numbers of what turns it upright
        upright = photo if turns[orientation] is None else photo.transpose(Image.Transpose(turns[orientation]))
        yield f"turned{orientation}.png", saved("PNG", photo, exif=exif), np.asarray(upright), 0
        yield f"turned{orientation}.jpg", saved("JPEG", photo, quality=98, exif=exif), np.asarray(upright), 4
    long = np.resize(PHOTO, (1, 20_000, 3))
    yield "long.png", saved("PNG", Image.fromarray(long)), long, 0


def png(width: int, height: int, content: bytes) -> bytes:
    """A PNG whose checksums are right, whatever is in it."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", content), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bad_images() -> Iterator[tuple[str, bytes]]:
    """Files that can't be used ("never_…"), or not for sure."""
    photo = Image.fromarray(PHOTO)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in PHOTO))
    yield "never_empty.jpg", b""
    yield "never_lines.jpg", b"no image\n" * 50
    yield "never_svg.png", b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
    yield "never_zlib.png", png(128, 96, b"junk" * 99)
    yield "never_filter.png", png(128, 96, zlib.compress(b"\x09" * (96 * 385)))
    for side in (0, 12_000, 32_000, 2**31 - 1, 2**32 - 1):
        yield f"claims_{side}.png", png(side, side, rows)
    yield "never_claims.ppm", b"P6 60000 60000 255\n" + bytes(1000)
    jp2 = encoded(".jp2", PHOTO)
    place = jp2.index(b"\xff\x4f\xff\x51")
    yield "never_claims.jp2", jp2[: place + 8] + struct.pack(">II", 60_000, 60_000) + jp2[place + 16 :]
    yield "array.png", npy(SAMPLES)
    yield "colour.gif.jpg", saved("GIF", photo)
    formats: dict[str, bytes] = {
        "png": saved("PNG", photo),
        "jpg": saved("JPEG", photo),
        "bmp": saved("BMP", photo),
        "tif": saved("TIFF", photo, compression="tiff_lzw"),
        "webp": saved("WEBP", photo),
        "jp2": jp2,
    }
    for ending, content in formats.items():
        for number, broken in enumerate(damaged(content, 12)):
            yield f"damaged_{number}.{ending}", broken
