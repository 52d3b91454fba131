"""Files are whole or absent."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from trtopt.errors import OutputError, UsageError
from trtopt.files import cache_folder, check_writable, existing_file, sha256_file, sha256_json, write_json, writing


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.bin"
    with writing(target) as partial:
        partial.write_bytes(b"half")
        assert not target.exists()
    assert target.read_bytes() == b"half"
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "out.bin"
    target.write_bytes(b"before")
    with pytest.raises(error), writing(target) as partial:
        partial.write_bytes(b"after")
        raise error
    assert target.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]


def test_files_get_the_users_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "out.json", {"a": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.json").stat().st_mode) == 0o640
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}


def test_places_that_can_not_be_written_are_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x", "mkdir -p"),
        (tmp_path / "file" / "x", "can't write"),
    ):
        with pytest.raises(OutputError, match=said):
            check_writable(place)
    check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_file(tmp_path / "abc").startswith("ba7816bf8f01cfea")
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 2, "b": 1})


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "own"))
    assert cache_folder("a", "b") == tmp_path / "own" / "a" / "b"
    monkeypatch.delenv("TRTOPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "trtopt"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="set TRTOPT_CACHE"):
        cache_folder("a")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the table .*absent doesn't exist"):
        existing_file(tmp_path / "absent", "the table")
    with pytest.raises(UsageError, match="is a folder"):
        existing_file(tmp_path, "the table")
