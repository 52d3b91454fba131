"""Documents are read within limits, and what is wrong in one is told with its place, its value and what is needed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from msgspec import Meta

from trtopt.core import documents
from trtopt.core.documents import (
    Count,
    Damaged,
    Digest,
    Duration,
    Name,
    Positive,
    Share,
    TypeName,
    checked,
    converted,
    one_of,
    parsed,
    parsed_json,
    plain,
    read_json,
    read_toml,
    spelled,
)
from trtopt.core.values import Precision, ShapeRange


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


@dataclass(frozen=True)
class Item:
    name: Name
    share: Share = 1.0
    file: Path | None = None
    kind: Annotated[str, one_of(("a.b", "c"))] = "c"
    sizes: Annotated[tuple[Count | str, ...], Meta(min_length=1, max_length=3)] = (1,)
    by_key: dict[Annotated[str, spelled("a short name", "a|bc")], Annotated[float, Meta(gt=2)]] | None = None
    exact: Annotated[list[int], Meta(min_length=2, max_length=2)] | None = None
    on: bool = False
    digest: Digest | None = None
    inner: Item | None = None
    count: Positive = 1
    seconds: Duration = 0
    dtype: TypeName = "int8"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "it is list; a mapping is needed"),
        ({}, "it lacks 'name'"),
        ({"name": " \n"}, "name is ' \\n'; a text that isn't blank is needed"),
        ({"name": 3}, "name is 3; a text is needed"),
        ({"name": "x" * 70, "kind": "y" * 70}, f"kind is '{'y' * 59}; a.b or c is needed"),
        ({"kind": "azb"}, "kind is 'azb'; a.b or c is needed"),
        ({"share": 1.5}, "share is 1.5; a number of at most 1.0 is needed"),
        ({"share": "1"}, "share is '1'; a number is needed"),
        ({"share": -0.5}, "share is -0.5; a number of at least 0.0 is needed"),
        ({"file": 3}, "file is 3; a path is needed"),
        ({"file": " "}, "file is ' '; a path is needed"),
        ({"sizes": [4, -1]}, "sizes[1] is -1; a whole number of at least 0 is needed"),
        ({"sizes": [4, 1.5]}, "sizes[1] is 1.5; a whole number or a text is needed"),
        ({"sizes": []}, "sizes is list; a list of at least 1 is needed"),
        ({"sizes": [1] * 4}, "sizes is list; a list of at most 3 is needed"),
        ({"exact": [1]}, "exact is list; a list of at least 2 is needed"),
        ({"by_key": {"a": 2}}, "by_key[…]: a number above 2.0 is needed"),
        ({"by_key": {"ax": 3}}, "a name in by_key: a short name is needed"),
        ({"count": 0}, "count is 0; a whole number of at least 1 is needed"),
        ({"seconds": -1}, "seconds is -1; a number of at least 0.0 is needed"),
        ({"dtype": "int"}, "dtype is 'int'; a type such as float32 is needed"),
        ({"on": 1}, "on is 1; true or false is needed"),
        ({"digest": "A" * 64}, f"digest is '{'A' * 59}; 64 hexadecimal digits is needed"),
        ({"inner": {"name": "x", "inner": {}}}, "inner.inner lacks 'name'"),
        ({"inner": {"name": "x", "inner": 7}}, "inner.inner is 7; a mapping is needed"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(given: Any, said: str) -> None:
    if given and "name" not in given:
        given = {"name": "x", **given}
    with pytest.raises(Damaged) as caught:
        converted(given, Item)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the table is list"),
        ({}, "the table lacks 'name'"),
        ({"name": 3}, "the table.name is 3"),
        ({"name": "x", "by_key": {"ax": 3}}, "a name in the table.by_key: a short name"),
    ],
)
def test_a_document_is_called_what_it_is_to_the_user(given: Any, said: str) -> None:
    with pytest.raises(Damaged, match=f"^{said}"):
        converted(given, Item, "the table")


class Known(TypedDict):
    size: int


def test_what_is_right_is_taken() -> None:
    assert converted({"name": "x", "new": 3, "file": "a/b", "share": 0}, Item) == Item("x", 0.0, Path("a/b"))
    assert converted({"name": "x", "by_key": {"bc": 3}, "sizes": ["n", 0]}, Item).sizes == ("n", 0)
    known: Any = {"size": 3, "more": 4}
    assert checked(known, Known) is known
    with pytest.raises(Damaged, match=r"^the table lacks 'size'$"):
        checked({}, Known, "the table")
    assert parsed("1x2", ShapeRange.parse, "range").static
    with pytest.raises(Damaged, match=r"^range: 'no' can't be read"):
        parsed("no", ShapeRange.parse, "range")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1", "not JSON: Expecting"),
        (b"\xff", "not JSON: .*utf-8"),
        (f"{2**63}", "it is a whole number that doesn't fit in 64 bits"),
        (f'{{"a": [{{"b": {-(2**63) - 1}}}]}}', r"a\[0\]\.b is a whole number that doesn't fit in 64 bits"),
        ('{"a": NaN}', "a is the number nan"),
        ("[1, 1e999]", r"\[1\] is the number inf"),
        ("[" * 66 + "]" * 66, "nested deeper than 64 levels"),
        ("[" * 9999, "nested deeper than 64 levels"),
    ],
)
def test_json_beyond_the_limits(text: str | bytes, said: str) -> None:
    with pytest.raises(Damaged, match=f"^{said}"):
        parsed_json(text)


def test_json_within_the_limits(tmp_path: Path) -> None:
    assert parsed_json("[" * 65 + "]" * 65)
    assert parsed_json(f"[{2**63 - 1}, {-(2**63)}, true]") == [2**63 - 1, -(2**63), True]
    (tmp_path / "a.json").write_text('{"a": null}')
    assert read_json(tmp_path / "a.json") == {"a": None}


def test_files_beyond_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Damaged, match=r"^No such file or directory$"):
        read_json(tmp_path / "none.json")
    (tmp_path / "a").write_bytes(b"#" * (1 << 20))
    assert read_toml(tmp_path / "a") == {}
    (tmp_path / "a").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(Damaged, match=r"^over 1 MiB$"):
        read_toml(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"a = ]")
    with pytest.raises(Damaged, match=r"^not TOML: "):
        read_toml(tmp_path / "a")
    assert documents.JSON_LIMIT == 256 << 20
