"""Files are whole or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import (
    CALLS,
    cache_folder,
    check_ending,
    check_writable,
    existing_file,
    made_folder,
    sha256_file,
    sha256_json,
    whole,
    write_json,
    writing_together,
)
from trtopt.core.temporary import scratch


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.bin"
    with writing_together(target) as (partial,):
        partial.write_bytes(b"half")
        assert not target.exists()
    assert target.read_bytes() == b"half"
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "out.bin"
    target.write_bytes(b"before")
    with pytest.raises(error), writing_together(target) as (partial,):
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


def test_what_is_no_file_is_neither_replaced_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "link").symlink_to(tmp_path / "a pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    kinds = {"a pipe": tmp_path / "a pipe", "it is a pipe": tmp_path / "link", "levels of symbolic": tmp_path / "loop"}
    for kind, path in {**kinds, "a folder": tmp_path, "a device": Path(os.devnull)}.items():
        before = os.lstat(path)
        for attempt in (check_writable, lambda place: write_json(place, {})):
            with pytest.raises(OutputError, match=kind):
                attempt(path)
        assert os.lstat(path).st_mode == before.st_mode
        with pytest.raises(UsageError, match=f"the table .*{kind.removeprefix('it is ')}"):
            existing_file(path, "the table")
    with pytest.raises(OutputError, match="can't make the folder"):
        made_folder(tmp_path / "a pipe")
    assert not list(tmp_path.glob(".*"))


def test_links_are_followed_and_modes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "out.json"
    for link in ("first", "second"):
        (tmp_path / link).symlink_to(Path("real") / "out.json")
    for link, value in (("first", 1), ("second", 2)):  # made, then replaced
        write_json(tmp_path / link, value)
        assert (tmp_path / link).is_symlink()
        assert json.loads(target.read_text()) == value
        target.chmod(0o600)
    write_json(target, 3)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "out.json")
    (tmp_path / "two words").symlink_to(tmp_path / "not yet" / "x")
    for name, folder in (("dangling", f"{tmp_path}/gone"), ("two words", f"'{tmp_path}/not yet'")):
        with pytest.raises(OutputError, match=f"doesn't exist, create it with mkdir -p {folder}"):
            check_writable(tmp_path / name)
    check_writable(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_content_is_on_the_disk_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("sync") or sync(descriptor))
    monkeypatch.setattr(Path, "replace", lambda path, target: done.append("rename") or replace(path, target))
    with writing_together(tmp_path / "a", tmp_path / "b") as partials:
        for partial in partials:
            partial.write_bytes(b"x")
    assert done == ["sync", "sync", "rename", "rename"]


def test_files_are_read_whole_or_refused(tmp_path: Path) -> None:
    path, large = tmp_path / "a", tmp_path / "large"
    path.write_bytes(b"abcd" * (1 << 19))  # two blocks
    assert whole(path, 2 << 20) == whole(path, None) == whole(existing_file(path, "it")) == path.read_bytes()
    assert sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sha256_json({"a": 1, "b": path}) == sha256_json({"b": path, "a": 1}) != sha256_json({"a": 1})
    large.touch()
    os.truncate(large, (256 << 20) + 1)
    os.mkfifo(tmp_path / "pipe")
    for name, said, number in (
        ("large", "over 256 MiB", errno.EFBIG),
        ("pipe", "it is a pipe", errno.EINVAL),
        (".", "it is a folder", errno.EISDIR),
    ):
        with pytest.raises(OSError, match=said) as caught:
            whole(tmp_path / name)
        assert (str(caught.value), caught.value.errno) == (f"{tmp_path / name} can't be read: {said}", number)


def test_calls_in_progress_are_asked_and_the_file_that_failed_is_named(tmp_path: Path) -> None:
    asked, place = list[Path](), made_folder(made_folder(tmp_path / "made"))
    (place / "link").symlink_to(tmp_path / "elsewhere")
    token = CALLS.set((SimpleNamespace(refuse=asked.append, given=lambda path: False),))
    try:
        write_json(place / "link", {})
    finally:
        CALLS.reset(token)
    assert asked[0] == place / "link" and not (place / "link").is_symlink()  # no name of the user's: it made way
    with (
        pytest.raises(OutputError, match=r"can't write .*/second: full; nothing was left"),
        writing_together(tmp_path / "first", tmp_path / "second") as (_, partial),
    ):
        raise OSError(errno.ENOSPC, "full", str(partial))


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = pytest.raises(OutputError, match=r"No space left .*, set TMPDIR to a folder with room")
    with scratch() as folder, said, writing_together(folder / "m.onnx"):
        raise full
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OutputError, match=r"temporary folder: .*, set TMPDIR"), scratch():
        pass


def test_a_name_of_another_kind_is_answered_by_one_of_this_kind() -> None:
    check_ending("net.engine", (".onnx",), "an engine", "an ONNX model", ".engine")
    with pytest.raises(UsageError, match=r"out/net\.ONNX is the name of an ONNX model, .*give out/net\.engine"):
        check_ending("out/net.ONNX", (".onnx",), "an engine", "an ONNX model", ".engine")


def test_a_missing_file_is_told_with_what_is_nearly_called_so(tmp_path: Path) -> None:
    for name in ("vit.onnx", "vits.onnx"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=r"the model .*vit\.onxx doesn't exist; did you mean .*/vit\.onnx\?$"):
        existing_file(tmp_path / "vit.onxx", "the model")
    with pytest.raises(UsageError, match=r"resnet\.onnx doesn't exist; look$"):
        existing_file(tmp_path / "resnet.onnx", "the model", "look")
