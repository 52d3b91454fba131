"""Values as JSON has them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import plain, read_toml
from trtopt.core.values import Precision


@dataclass(frozen=True)
class Part:
    where: Path
    precision: Precision


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    figures: dict[str, Any]


def test_a_result_is_the_same_after_json() -> None:
    whole = Whole(
        (Part(Path("a/b"), Precision.INT8),), {"dB": math.inf, "list": [1.5, None, -math.inf, math.nan, True]}
    )
    found = plain(whole)
    assert found == {
        "parts": [{"where": "a/b", "precision": "int8"}],
        "figures": {"dB": "inf", "list": [1.5, None, "-inf", "nan", True]},
    }
    assert type(found["parts"][0]["precision"]) is str
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_toml_as_an_editor_of_windows_saves_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b'\xef\xbb\xbfsize = 3\r\n[part]\r\nname = "\xc3\xa8"\r\n')
    assert read_toml(tmp_path / "a.toml") == {"size": 3, "part": {"name": "\u00e8"}}
