"""The engine store by itself: whole entries or none, one builder a key, what leaves it and what stays."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from world import Heard

import trtopt
from trtopt.core.documents import Damaged
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import sha256_json
from trtopt.core.temporary import scratch
from trtopt.engine.store import PLAN, Store, named_store, stamps

MANIFEST = f"{PLAN}.json"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRTOPT_STORE", raising=False)
    monkeypatch.delenv("TRTOPT_STORE_MAX_SIZE", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def _parts(gpu: str | None) -> dict[str, Any]:
    return {"model": "a" * 64, "spec": {"precision": "fp16"}, "generation": ["rtx", "1.7.1"], "gpu": gpu}


def _add(store: Store, plan: bytes = b"plan", heard: Heard | None = None, gpu: str | None = None) -> str:
    manifest = {"source": {"path": "nets/m.onnx"}, "targets": ["sm89"], "generation": {"gpu": None}}
    with scratch() as folder, store.building(sha256_json(_parts(gpu))):
        (folder / PLAN).write_bytes(plan)
        (folder / MANIFEST).write_text(json.dumps(manifest))
        return store.add(_parts(gpu), folder.iterdir(), heard or Heard()).digest


def _spoil(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def test_what_was_stored_is_found_whole(store: Store, tmp_path: Path) -> None:
    assert store.find(sha256_json(_parts(None))) is None
    entry = store.find(_add(store))
    assert entry is not None
    entry.check()
    entry.copy(PLAN, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"plan"
    assert store.find(sha256_json(_parts("another"))) is None


@pytest.mark.parametrize("name", [PLAN, MANIFEST])
def test_a_changed_file_is_never_read_as_the_engine(store: Store, tmp_path: Path, name: str) -> None:
    digest = _add(store)
    _spoil(store.folder / "entries" / digest / name, b"other")
    entry = store.find(digest)
    assert entry is not None
    with pytest.raises(Damaged, match=name):
        entry.check()
    with pytest.raises(Damaged, match=name):
        entry.copy(name, tmp_path / "copy")
    assert name in store.fault(digest)
    assert _add(store) == digest  # replaced
    assert store.fault(digest) == ""


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": "trtopt-store-1"}', b'{"format": "trtopt-store-2"}'])
def test_an_entry_without_a_key_counts_as_none_and_is_replaced(store: Store, content: bytes) -> None:
    digest = _add(store)
    _spoil(store.folder / "entries" / digest / "key.json", content)
    assert store.find(digest) is None
    assert trtopt.list_store(store=store.folder).engines == ()
    _add(store)
    assert store.find(digest) is not None
    other = sha256_json(_parts("H200"))
    (store.folder / "entries" / digest).rename(store.folder / "entries" / other)
    assert store.find(other) is None  # under another name it isn't that


def test_prune_takes_what_was_used_longest_ago(store: Store) -> None:
    names = [_add(store, bytes(1000), gpu=gpu) for gpu in "abc"]
    for age, name in enumerate(names):
        os.utime(store.folder / "entries" / name, (1000 + age, 1000 + age))
    assert [path.name for path in store.folders()] == names[::-1]
    assert store.find(names[0]) is not None  # used now
    removed, nbytes, left = store.prune(2 * store.prune(1 << 30)[2] // 3)
    assert removed == (names[1],)
    assert nbytes > 1000
    assert left > 2000
    assert store.prune(0)[0] == (names[2], names[0])
    assert store.folders() == []


def test_a_build_keeps_the_store_within_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_STORE_MAX_SIZE", "5000")
    store, heard = Store("local"), Heard()
    assert store.folder == tmp_path / "cache" / "store"
    for gpu in "abcdef":
        digest = _add(store, bytes(1000), heard, gpu=gpu)
        assert store.find(digest) is not None  # the one that was just built
    assert trtopt.list_store().nbytes <= 5000
    assert any("used longest ago left the store" in note for note in heard.notes)
    monkeypatch.setenv("TRTOPT_STORE_MAX_SIZE", "much")
    with pytest.raises(UsageError, match="TRTOPT_STORE_MAX_SIZE"):
        Store("local")


def test_a_file_that_was_just_written_is_not_known_by_its_times(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"1")
    assert stamps([path]) is None
    os.utime(path, (1000, 1000))
    before = stamps([path])
    assert before is not None
    time.sleep(0.01)
    path.write_bytes(b"2")
    os.utime(path, (1000, 1000))  # as cp -p does
    assert stamps([path]) != before
    assert stamps([tmp_path / "absent"]) is None


def test_names_of_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_store(None) is None
    assert named_store(None, "local") == "local"
    monkeypatch.setenv("TRTOPT_STORE", "engines")
    assert named_store(None, "local") == "engines"
    assert named_store("none") is None
    assert named_store(Path("folder")) == "folder"
    with pytest.raises(UsageError, match="store"):
        named_store("")
    with pytest.raises(OutputError, match="the store"):
        Store(__file__)


def test_what_can_be_read_is_listed(store: Store) -> None:
    good, bad = _add(store), _add(store, gpu="x")
    _spoil(store.folder / "entries" / bad / MANIFEST, b"{")
    [listed] = trtopt.list_store(store=str(store.folder)).engines
    assert (listed.digest, listed.model, listed.precision) == (good, "nets/m.onnx", "fp16")


def test_prune_by_command(store: Store) -> None:
    _add(store)
    assert trtopt.prune_store(store=str(store.folder)).removed == ()
    assert len(trtopt.prune_store(store=str(store.folder), max_size="0").removed) == 1
    with pytest.raises(UsageError, match="max_size"):
        trtopt.prune_store(store=str(store.folder), max_size="a lot")
    with pytest.raises(UsageError, match="no store"):
        trtopt.list_store(store="none")
    for look in (trtopt.list_store, trtopt.prune_store):
        with pytest.raises(UsageError, match=r"there is no store .*absent: a build with this `store=` makes"):
            look(store=store.folder / "absent")
    assert not (store.folder / "absent").exists()
