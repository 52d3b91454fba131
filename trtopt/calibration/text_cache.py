"""TensorRT's own calibration cache: a header, then `NAME: HEX`, HEX the big-endian float32 of amax / 127."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from trtopt.errors import CalibrationError, UsageError
from trtopt.files import existing_file, write_bytes

HEADER = "TRT-8600-EntropyCalibration2"
CODES = 127
_HEADER = re.compile(r"TRT-\d+-\w+")


def read_cache(path: str | os.PathLike[str]) -> dict[str, float]:
    """amax by tensor name. Constants, which TensorRT lists with scale 0, are left out.

    Raises:
        UsageError: there is no such file.
        CalibrationError: it isn't such a cache, or a line can't be read; the line is named.
    """
    file = existing_file(path, "the calibration cache")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{file} can't be read as a TensorRT calibration cache: {error}") from None
    if not lines or not _HEADER.fullmatch(lines[0].strip()):
        found = lines[0][:40] if lines else ""
        raise CalibrationError(
            f"{file} isn't a TensorRT calibration cache: its first line is {found!r}, such as {HEADER} is needed"
        )
    amax: dict[str, float] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, colon, digits = line.rpartition(":")
        if not colon or not name or not re.fullmatch(r"[0-9a-fA-F]{1,8}", digits.strip()):
            raise CalibrationError(f"{file}, line {number}: {line[:60]!r} isn't NAME: HEX")
        (scale,) = struct.unpack(">f", int(digits, 16).to_bytes(4, "big"))
        if not math.isfinite(scale) or scale < 0:
            raise CalibrationError(f"{file}, line {number}: the scale of {name!r} is {scale}; it must be 0 or positive")
        if scale > 0:
            amax[name] = scale * CODES
    if not amax:
        raise CalibrationError(f"{file} holds no scales; calibrate again")
    return amax


def write_cache(amax: Mapping[str, float], path: str | os.PathLike[str]) -> Path:
    """Write a cache that TensorRT 8.6 and 10 take from `read_calibration_cache`.

    Raises:
        CalibrationError: an amax isn't positive and finite.
        UsageError: a tensor's name has a line break, which the format can't hold.
        OutputError: the file can't be written.
    """
    lines = [HEADER]
    for name, value in amax.items():
        if not 0 < value < math.inf:
            raise CalibrationError(f"amax of {name!r} is {value}; it must be positive and finite")
        if name.splitlines() != [name]:
            raise UsageError(f"the tensor name {name!r} can't be written to a TensorRT cache: it has a line break")
        lines.append(f"{name}: {struct.pack('>f', value / CODES).hex()}")
    write_bytes(path, ("\n".join(lines) + "\n").encode())
    return Path(path)
