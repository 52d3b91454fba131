from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from trtopt.calibration.text_cache import is_cache, read_cache, write_cache
from trtopt.core.errors import CalibrationError, UsageError


def test_tensorrts_cache_is_read(tmp_path: Path) -> None:
    """Lines as TensorRT writes them: 3c010204 is 1 / 127, a constant's scale is 0."""
    cache = tmp_path / "calib.cache"
    cache.write_text(
        "TRT-8600-EntropyCalibration2\ninput: 3c010204\na: b: 3d4225aa\nconst: 0\n(Unnamed Layer* 3): 3F800000\n"
        "least: 10000000\n"
    )
    found = read_cache(cache)
    assert list(found.amax) == ["input", "a: b", "(Unnamed Layer* 3)", "least"]
    assert found.amax["input"] == pytest.approx(1.0, rel=1e-6)
    assert found.amax["(Unnamed Layer* 3)"] == 127
    assert found.unusable == ("const",)
    assert found.header == "TRT-8600-EntropyCalibration2"
    assert found.digest == hashlib.sha256(cache.read_bytes()).hexdigest()
    cache.write_bytes(b"\xef\xbb\xbfTRT-101301-LegacyCalibration\r\nx\xc2\x85y: 3f800000\r\n\r\n")
    assert is_cache(cache) and dict(read_cache(cache).amax) == {"x\x85y": 127.0}


@pytest.mark.parametrize("digits", ["3d4", "3d4180d", "7f7fffff", "00000001", "7fc00000", "bc010204", "7f800000"])
def test_no_digits_that_were_cut_off_and_nothing_without_sense_pass_for_a_scale(digits: str, tmp_path: Path) -> None:
    cache = tmp_path / "calib.cache"
    cache.write_text(f"TRT-8600-EntropyCalibration2\nb: 3d4180d0\na: {digits}")
    found = read_cache(cache)
    assert found.unusable == ("a",)
    assert list(found.amax) == ["b"]


@given(
    st.dictionaries(
        st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), min_size=1),
        st.floats(1e-20, 1e20),
        min_size=1,
    )
)
def test_a_written_cache_is_read_back(tmp_path_factory: pytest.TempPathFactory, amax: dict[str, float]) -> None:
    path = write_cache(amax, tmp_path_factory.mktemp("cache") / "calib.cache")
    assert path.read_bytes().startswith(b"TRT-8600-EntropyCalibration2\n")
    found = read_cache(path).amax
    assert list(found) == list(amax)
    for name, value in amax.items():
        (scale,) = struct.unpack(">f", struct.pack(">f", value / 127))
        assert found[name] == scale * 127


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its first line is ''"),
        (b"{}\n", "isn't a TensorRT calibration cache"),
        (b"\xff\xfe\x00", "can't be read"),
        (b"TRT-8600-EntropyCalibration2\n", "holds no scales"),
        (b"TRT-8600-EntropyCalibration2\na: 7fc00000\n", "holds no scales"),
        (b"TRT-8600-EntropyCalibration2\na 3c010204\n", "line 2: 'a 3c010204'"),
        (b"TRT-8600-EntropyCalibration2\na: 3c010204\nb: xyz\n", "line 3"),
        (b"TRT-8600-EntropyCalibration2\n\n: 3c010204\n", "line 3: ': 3c010204' isn't NAME: HEX"),
        (b"TRT-8600-EntropyCalibration2\na: 03c010204\n", "line 2"),
        (b"x" * 99, "line is 'x{40}', such as"),
        (b"TRT-8600-EntropyCalibration2\n" + b"a" * 99, "line 2: 'a{60}' isn't"),
        (b"TRT-8600-\na: 3c010204\n", "its first line is 'TRT-8600-'"),
    ],
)
def test_a_bad_cache_names_its_line(content: bytes, message: str, tmp_path: Path) -> None:
    cache = tmp_path / "calib.cache"
    cache.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read_cache(cache)
    assert is_cache(cache) == content.startswith(b"TRT-8600-E")


def test_what_a_cache_cannot_hold_is_refused(tmp_path: Path) -> None:
    for name in ("a\nb", "a\r", ""):
        with pytest.raises(UsageError, match="empty or has a line break"):
            write_cache({name: 1.0}, tmp_path / "c")
    for value in (0.0, -1.0, 1e41, 3.40282357e38, 1e-27, 1e-40, math.inf, math.nan):
        with pytest.raises(CalibrationError, match=r"amax of 'a' is .*; 3e-27 to 3e\+38 is allowed"):
            write_cache({"a": value}, tmp_path / "c")
    assert not list(tmp_path.iterdir())
    assert not is_cache(tmp_path / "absent")
