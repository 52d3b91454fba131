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


def header(text: str | bytes, content: bytes = SAMPLES.tobytes(), version: int = 1) -> bytes:
    """An .npy file with this text as its header, whatever it says."""
    text = text if isinstance(text, bytes) else text.encode()
    size = struct.pack("<H" if version == 1 else "<I", len(text) + 1)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + b"\n" + content


def described(shape: Any, descr: Any = "<f4", fortran: Any = False) -> str:
    return str({"descr": descr, "fortran_order": fortran, "shape": shape})


def archive(*members: tuple[str, bytes], kind: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as made:
        for name, content in members:
            made.writestr(zipfile.ZipInfo(name), content, kind)
        made.comment = comment
    return file.getvalue()


def flipped(content: bytes, seed: int, start: int = 0, stop: int | None = None, count: int = 3) -> bytes:
    """Some bytes between `start` and `stop` changed."""
    chance, broken = random.Random(seed), bytearray(content)
    for _ in range(count):
        broken[chance.randrange(start, stop or len(broken))] ^= 1 << chance.randrange(8)
    return bytes(broken)


def arrays() -> Iterator[tuple[str, bytes]]:
    """Names of files and what is in them."""
    good = npy(SAMPLES)
    for version in ((1, 0), (2, 0), (3, 0)):
        yield f"version{version[0]}.npy", npy(SAMPLES, version)
    broken = np.equal(SAMPLES, SAMPLES[3].max())
    kinds: dict[str, NDArray[Any]] = {
        "fortran": np.asfortranarray(SAMPLES),
        "big_endian": SAMPLES.astype(">f4"),
        "double": SAMPLES.astype(np.float64),
        "half": SAMPLES.astype(np.float16),
        "whole_numbers": (SAMPLES * 255).astype(np.uint8),
        "complex": SAMPLES.astype(np.complex64),
        "text": np.full(SHAPE, "1.5"),
        "objects": np.full(SHAPE, {}, object),
        "no_samples": SAMPLES[:0],
        "empty_samples": np.zeros((5, 3, 0, 32), np.float32),
        "scalar": np.float32(3).reshape(()),
        "nan": np.where(broken, np.float32(np.nan), SAMPLES),
        "infinite": np.where(broken, np.float32(np.inf), SAMPLES),
        "too_large": SAMPLES.astype(np.float64) * 1e300,
    }
    for name, array in kinds.items():
        yield f"{name}.npy", npy(array)
        yield f"{name}.npz", archive(("x.npy", npy(array)), kind=zipfile.ZIP_DEFLATED)
    shapes: dict[str, Any] = {
        "claims_more": (12, *SHAPE[1:]),
        "claims_less": (3, *SHAPE[1:]),
        "negative": (-6, -3, 32, 32),
        "milliard_of_nothing": (10**9, 0, 32, 32),
        "huge": (10**400, *SHAPE[1:]),
    }
    for name, shape in shapes.items():
        yield f"{name}.npy", header(described(shape))
        yield f"{name}.npz", archive(("x.npy", header(described(shape))))
    yield "claims_more_packed.npz", archive(("x.npy", header(described((12, *SHAPE[1:])))), kind=zipfile.ZIP_DEFLATED)
    yield "directory_behind.npz", archive(("x.npy", header(described((7, *SHAPE[1:])))), comment=bytes(50_000))
    headers: dict[str, str | bytes] = {
        "subarray": described((6, 3, 32), "(32,)<f4"),
        "no_header": "",
        "a_call": "__import__('os').abort()",
        "deep": "(" * 4000 + ")" * 4000,
    }
    for name, text in headers.items():
        yield f"header_{name}.npy", header(text)
    yield "version9.npy", b"\x93NUMPY\x09\x00" + good[8:]
    yield "header_beyond.npy", good[:8] + b"\xff\xff" + good[10:]
    for size in (0, 9, 128, len(good) - 1):
        yield f"cut_{size}.npy", good[:size]
    yield "longer.npy", good + b"more"
    yield "zip.npy", archive(("x.npy", good))
    yield "array.npz", good
    yield "pickle.npy", pickle.dumps([1, 2])
    for seed in range(4):
        yield f"flipped_{seed}.npy", flipped(good, seed, 0, 128)

    plain, packed = (archive(("x.npy", good), kind=kind) for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    yield "plain.npz", plain
    yield "packed.npz", packed
    yield "bz2.npz", archive(("x.npy", good), kind=zipfile.ZIP_BZIP2)
    yield "nested.npz", archive(("x.npy", plain))
    for name in ("../x.npy", "x", "x\nerror: y.npy", "\x1b[31mx.npy"):
        yield f"named_{len(name)}.npz", archive((name, good))
    yield "twice.npz", archive(("x", good), ("x.npy", good))
    yield "more.npz", archive(("x.npy", good), ("readme.txt", b"hello"))
    yield "nothing.npz", archive()
    yield "prefixed.npz", b"#!/bin/sh\n" * 9 + plain
    directory = plain.rindex(b"PK\x01\x02")
    for size in (20, len(plain) // 2, len(plain) - 1):
        yield f"cut_{size}.npz", plain[:size]
    for name, at, value in (  # fields of the directory: flags, method, checksum, sizes, place
        ("encrypted", 8, 1),
        ("method", 10, 99),
        ("checksum", 16, 1),
        ("held", 20, 1000),
        ("size", 24, 1000),
        ("place", 42, 2**31),
    ):
        lying = bytearray(plain)
        struct.pack_into("<H" if at < 16 else "<I", lying, directory + at, value)
        yield f"directory_{name}.npz", bytes(lying)
    for seed in range(4):
        yield f"flipped_data_{seed}.npz", flipped(plain, seed, 200, directory, 1)
        yield f"flipped_packed_{seed}.npz", flipped(packed, seed, count=2)
        yield f"flipped_directory_{seed}.npz", flipped(plain, seed, directory)


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
    for compression in ("tiff_deflate", "tiff_lzw"):
        yield f"{compression}.tif", saved("TIFF", photo, compression=compression), PHOTO, 0
    more: dict[str, Any] = {"save_all": True, "append_images": [grey.convert("RGB")]}
    yield "pages.tif", saved("TIFF", photo, **more), PHOTO, 0
    yield "animated.webp", saved("WEBP", photo, lossless=True, **more), PHOTO, 0
    yield "animated.png", saved("PNG", photo, **more), PHOTO, 0
    yield "several.jpg", saved("MPO", photo, quality=98, **more), PHOTO, 4
    yield "lossy.webp", saved("WEBP", photo, quality=95), PHOTO, 4
    yield "colour.jp2", encoded(".jp2", bgr), PHOTO, 4
    yield "colour.jpg", saved("JPEG", photo, quality=98), PHOTO, 4
    yield "grey.jpg", saved("JPEG", grey, quality=98), dull, 4
    yield "ink.jpg", saved("JPEG", photo.convert("CMYK"), quality=98), PHOTO, 4
    yield "progressive.jpg", saved("JPEG", photo, quality=98, progressive=True), PHOTO, 4
    yield "png.jpg", saved("PNG", photo), PHOTO, 0
    yield "jpeg.png", saved("JPEG", photo, quality=98), PHOTO, 4
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        turns = (None, None, 0, 3, 1, 5, 4, 6, 2)  # Pillow's numbers of what turns it upright
        upright = photo if turns[orientation] is None else photo.transpose(Image.Transpose(turns[orientation]))
        yield f"turned{orientation}.png", saved("PNG", photo, exif=exif), np.asarray(upright), 0
        yield f"turned{orientation}.jpg", saved("JPEG", photo, quality=98, exif=exif), np.asarray(upright), 4
    for height, width in ((1, 1), (1, 20_000), (20_000, 1)):
        long = np.resize(PHOTO, (height, width, 3))
        for kind in ("PNG", "BMP", "JPEG"):
            near = 30 if kind == "JPEG" else 0
            yield f"{height}x{width}.{kind.lower()}", saved(kind, Image.fromarray(long)), long, near


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(
    width: int, height: int, content: bytes, depth: int = 8, kind: int = 2, *between: bytes, interlaced: int = 0
) -> bytes:
    """A PNG whose checksums are right, whatever is in it."""
    size = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + b"".join(between) + chunk(b"IDAT", content) + chunk(b"IEND", b"")
    )


def bad_images() -> Iterator[tuple[str, bytes]]:
    """Files that can't be used, or not for sure."""
    photo = Image.fromarray(PHOTO)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in PHOTO))
    yield "empty.jpg", b""
    yield "lines.jpg", b"no image\n" * 50
    yield "array.png", npy(SAMPLES)
    yield "svg.png", b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
    yield "colour.gif.jpg", saved("GIF", photo)
    yield "animated.gif.jpg", saved("GIF", photo, save_all=True, append_images=[photo.rotate(90)])
    yield "float.tif", saved("TIFF", Image.fromarray(SAMPLES[0, 0]))
    yield "ink.tif", saved("TIFF", photo.convert("CMYK"))
    yield "radiance.jpg", encoded(".hdr", PHOTO.astype(np.float32))
    yield "no_size.png", png(0, 0, rows)
    yield "no_width.png", png(0, 96, rows)
    yield "short_interlaced.png", png(128, 96, rows[:-4], interlaced=1)
    yield "no_zlib.png", png(128, 96, b"junk" * 99)
    yield "bad_filter.png", png(128, 96, zlib.compress(b"\x09" * (96 * 385)))
    yield "bad_depth.png", png(128, 96, rows, 3)
    yield "bad_kind.png", png(128, 96, rows, 8, 5)
    yield "no_palette.png", png(128, 96, rows, 8, 3)
    yield "long_palette.png", png(128, 96, rows, 8, 3, chunk(b"PLTE", bytes(3000)))
    yield "odd_palette.png", png(128, 96, rows, 8, 3, chunk(b"PLTE", bytes(4)))
    yield (
        "two_headers.png",
        png(128, 96, rows, 8, 2, chunk(b"IHDR", struct.pack(">IIBBBBB", 9999, 9999, 8, 2, 0, 0, 0))),
    )
    for side in (12_000, 32_000, 2**31 - 1, 2**32 - 1):
        yield f"claims_{side}.png", png(side, side, rows)
    formats: dict[str, bytes] = {
        "png": saved("PNG", photo),
        "jpg": saved("JPEG", photo),
        "bmp": saved("BMP", photo),
        "tif": saved("TIFF", photo, compression="tiff_lzw"),
        "webp": saved("WEBP", photo),
        "lossless.webp": saved("WEBP", photo, lossless=True),
        "animated.webp": saved("WEBP", photo, save_all=True, append_images=[photo.rotate(90)]),
        "ppm": saved("PPM", photo),
        "jp2": encoded(".jp2", PHOTO),
    }
    sizes = {
        "bmp": (18, "<ii"),
        "webp": (26, "<HH"),
        "lossless.webp": (21, "<HH"),
        "animated.webp": (24, "<IH"),
        "jp2": (0, ""),
    }
    for ending, content in formats.items():
        for size in (2, 12, 30, len(content) // 2, len(content) - 3):
            yield f"cut_{size}.{ending}", content[:size]
        for seed in range(2):
            yield f"flipped_{seed}.{ending}", flipped(content, seed)
            yield f"flipped_header_{seed}.{ending}", flipped(content, seed, 2, 60)
        at, form = sizes.get(ending, (0, ""))
        if form:
            lying = bytearray(content)
            struct.pack_into(form, lying, at, *(0x7FFFFFFF if code == "i" else 0xFFFF for code in form[1:]))
            yield f"claims.{ending}", bytes(lying)
    yield "claims.ppm", b"P6 60000 60000 255\n" + bytes(1000)
    yield "comment.ppm", b"P6\n# a\n # b\n60000\n# c\n60000 255\n" + bytes(1000)
    place = formats["jp2"].index(b"\xff\x4f\xff\x51")
    yield "claims.jp2", formats["jp2"][: place + 8] + struct.pack(">II", 60_000, 60_000) + formats["jp2"][place + 16 :]
