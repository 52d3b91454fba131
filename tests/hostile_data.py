"""Sample data that is damaged, odd, or says what isn't so, made by seeded code: what calibrate, verify and run are given."""

from __future__ import annotations

import io
import pickle
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
            broken[place] ^= 1 << chance.randrange(8)
        else:
            broken[place : place + 4] = b"\xff\xff\xff\x7f"
        yield bytes(broken)


def arrays() -> Iterator[tuple[str, bytes]]:
    """Names of files and what is in them."""
    good = npy(SAMPLES)
    plain, packed = (archive(("x.npy", good), kind=kind) for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    whole = {"version2.npy": npy(SAMPLES, (2, 0)), "plain.npz": plain, "packed.npz": packed}
    yield from whole.items()
    for name, content in whole.items():
        for number, broken in enumerate(damaged(content, 36)):
            yield f"damaged_{number}_{name}", broken
    kinds: dict[str, NDArray[Any]] = {
        "fortran": np.asfortranarray(SAMPLES),
        "objects": np.full(SHAPE, {}, object),
        "text": np.full(SHAPE, "1.5"),
        "no_samples": SAMPLES[:0],
        "nan": np.where(np.equal(SAMPLES, SAMPLES[3].max()), np.float32(np.nan), SAMPLES),
        "too_large": SAMPLES.astype(np.float64) * 1e300,
    }
    types = {"big_endian": ">f4", "double": "f8", "half": "f2", "whole_numbers": "u1", "complex": "c8"}
    kinds |= {name: SAMPLES.astype(kind) for name, kind in types.items()}
    for name, array in kinds.items():
        yield f"{name}.npy", npy(array)
        yield f"{name}.npz", archive(("x.npy", npy(array)), kind=zipfile.ZIP_DEFLATED)
    six, rest = SHAPE[0], SHAPE[1:]
    shapes: tuple[Any, ...] = ((2 * six, *rest), (3, *rest), (-6, -3, 32, 32), (10**9, 0, 32, 32), (10**400, 3, 32, 32))
    headers = [*map(described, shapes), described((6, 3, 32), "(32,)<f4"), "", "__import__('os').abort()", "(" * 4000]
    for number, text in enumerate(headers):
        yield f"header_{number}.npy", header(text)
        yield f"header_{number}.npz", archive(("x.npy", header(text)))
    yield "directory_behind.npz", archive(("x.npy", header(described((7, *SHAPE[1:])))), comment=bytes(50_000))
    yield from (
        ("longer.npy", good + b"more"),
        ("zip.npy", plain),
        ("array.npz", good),
        ("pickle.npy", pickle.dumps([1, 2])),
    )
    yield "nested.npz", archive(("x.npy", plain))
    for name in ("../x.npy", "x", "x\nerror: y.npy", "\x1b[31mx.npy"):
        yield f"named_{len(name)}.npz", archive((name, good))
    yield "twice.npz", archive(("x", good), ("x.npy", good))
    yield "more.npz", archive(("x.npy", good), ("readme.txt", b"hello"))
    yield "nothing.npz", archive()
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
    dull, clear, palette, dots = np.dstack([np.asarray(grey)] * 3), photo.copy(), photo.quantize(64), photo.convert("1")
    clear.putalpha(Image.fromarray(np.arange(96 * 128, dtype=np.uint32).astype(np.uint8).reshape(96, 128)))
    colours = np.asarray(palette.convert("RGB"))
    wide = np.random.default_rng(1).integers(0, 1 << 16, (96, 128, 3)).astype(np.uint16)
    high = (wide >> 8).astype(np.uint8)
    for kind, ending in (("PNG", "png"), ("TIFF", "tif"), ("BMP", "bmp"), ("PPM", "ppm")):
        yield f"colour.{ending}", saved(kind, photo), PHOTO, 0
        yield f"grey.{ending}", saved(kind, grey), dull, 0
        if kind != "PPM":
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
    for name, kind in (("pages.tif", "TIFF"), ("animated.webp", "WEBP"), ("animated.png", "PNG"), ("png.jpg", "PNG")):
        yield name, saved(kind, photo, lossless=True, **more if name != "png.jpg" else {}), PHOTO, 0
    yield "lzw.tif", saved("TIFF", photo, compression="tiff_lzw"), PHOTO, 0
    yield "lossy.webp", saved("WEBP", photo, quality=95), PHOTO, 4
    yield "colour.jp2", encoded(".jp2", np.ascontiguousarray(PHOTO[:, :, ::-1])), PHOTO, 4
    yield "several.jpg", saved("MPO", photo, quality=98, **more), PHOTO, 4
    yield "grey.jpg", saved("JPEG", grey, quality=98), dull, 4
    yield "ink.jpg", saved("JPEG", photo.convert("CMYK"), quality=98), PHOTO, 4
    yield "progressive.jpg", saved("JPEG", photo, quality=98, progressive=True), PHOTO, 4
    for name in ("colour.jpg", "jpeg.png"):
        yield name, saved("JPEG", photo, quality=98), PHOTO, 4
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        turns = (None, None, 0, 3, 1, 5, 4, 6, 2)  # Pillow's numbers of what turns it upright
        upright = photo if turns[orientation] is None else photo.transpose(Image.Transpose(turns[orientation]))
        yield f"turned{orientation}.png", saved("PNG", photo, exif=exif), np.asarray(upright), 0
        yield f"turned{orientation}.jpg", saved("JPEG", photo, quality=98, exif=exif), np.asarray(upright), 4
    for height, width in ((1, 1), (1, 20_000), (20_000, 1)):
        long = np.resize(PHOTO, (height, width, 3))
        yield f"{height}x{width}.png", saved("PNG", Image.fromarray(long)), long, 0


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
    yield "ink.tif", saved("TIFF", photo.convert("CMYK"))
    again = [photo.rotate(90)]
    formats: dict[str, bytes] = {kind.lower(): saved(kind, photo) for kind in ("PNG", "JPEG", "BMP", "WEBP", "PPM")}
    formats |= {"tif": saved("TIFF", photo, compression="tiff_lzw"), "jp2": jp2}
    formats["animated.webp"] = saved("WEBP", photo, save_all=True, append_images=again)
    for ending, content in formats.items():
        for number, broken in enumerate(damaged(content, 18)):
            yield f"damaged_{number}.{ending}", broken
