"""TensorRT's own calibration cache: a header, then `NAME: HEX`, HEX the big-endian float32 of amax / 127.

The format is the same from TensorRT 5 to 10; what differs is which tensors are listed. The headers' algorithms:
EntropyCalibration2 and MinMaxCalibration measure the network before its layers are fused, so every tensor is there;
EntropyCalibration and LegacyCalibration measure it afterwards, so of `Conv → Relu` only the last one is (TensorRT Developer
Guide, "Post-Training Quantization Using Calibration"). Constants are listed with scale 0.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.errors import CalibrationError, UsageError
from trtopt.core.files import existing_file, opened_regular, whole, write_bytes

HEADER = "TRT-8600-EntropyCalibration2"
CODES = 127
# Beyond these it is no scale: a line that was cut off has fewer than 8 digits, which say less than 2**-95; and amax is FP32.
SMALLEST, LARGEST = 2.0**-95, (2 - 2.0**-23) * 2.0**127 / CODES
_HEADER = re.compile(r"TRT-(\d{1,9})-(\w+)")


@dataclass(frozen=True)
class TextCache:
    """The content of a cache file.

    Attributes:
        amax: tensor name → scale × 127, in file order.
        unusable: names without a scale: with 0, as TensorRT lists constants, or one that is infinite, NaN, negative or beyond
            all sense: calibration went wrong there, or the line was cut off.
        digest: SHA-256 of the file.
    """

    header: str
    amax: Mapping[str, float]
    unusable: tuple[str, ...]
    digest: str


def is_cache(path: Any) -> bool:
    """True where it is a file that begins as a TensorRT calibration cache does; False if it can't be read."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    try:
        with opened_regular(path) as file:
            return re.match(rb"(\xef\xbb\xbf)?TRT-\d+-\w+", file.read(64)) is not None
    except OSError:
        return False


def read_cache(path: str | os.PathLike[str]) -> TextCache:
    """Read a TensorRT calibration cache."""
    file = existing_file(path, "the calibration cache")
    try:
        content = whole(file)
        # Not splitlines: a name may hold what Unicode takes for a line's end. utf-8-sig: editors add a mark.
        lines = [line.removesuffix("\r") for line in content.decode("utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{file} can't be read as a TensorRT calibration cache: {error}") from None
    header = lines[0].strip()
    if not _HEADER.fullmatch(header):
        raise CalibrationError(
            f"{file} isn't a TensorRT calibration cache: its first line is {header[:40]!r}, such as {HEADER} is needed"
        )
    scales: dict[str, float] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, colon, digits = line.rpartition(":")
        if not colon or not name or not re.fullmatch(r"[0-9a-fA-F]{1,8}", digits.strip()):
            raise CalibrationError(f"{file}, line {number}: {line[:60]!r} isn't NAME: HEX")
        (scale,) = struct.unpack(">f", int(digits, 16).to_bytes(4, "big"))
        scales[name] = scale
    amax = {name: scale * CODES for name, scale in scales.items() if SMALLEST <= scale <= LARGEST}
    if not amax:
        raise CalibrationError(f"{file} holds no scales; calibrate again")
    unusable = tuple(name for name in scales if name not in amax)
    return TextCache(header, amax, unusable, hashlib.sha256(content).hexdigest())


def write_cache(amax: Mapping[str, float], path: str | os.PathLike[str]) -> Path:
    write_bytes(path, cache_of(amax))
    return Path(path)


def cache_of(amax: Mapping[str, float]) -> bytes:
    """Return a cache that TensorRT 8.6 and 10 take from `read_calibration_cache`."""
    for name, value in amax.items():
        if not SMALLEST <= value / CODES <= LARGEST:
            allowed = f"{SMALLEST * CODES:.1g} to {LARGEST * CODES:.1g}"
            raise CalibrationError(f"amax of {name!r} is {value}; {allowed} is allowed")
        if not name or "\n" in name or "\r" in name:
            raise UsageError(f"a TensorRT cache can't hold the tensor name {name!r}: it is empty or has a line break")
    lines = [HEADER, *(f"{name}: {struct.pack('>f', value / CODES).hex()}" for name, value in amax.items())]
    return ("\n".join(lines) + "\n").encode()
