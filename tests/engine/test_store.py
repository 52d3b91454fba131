"""The engine store by itself: whole entries or none, one builder a key, what leaves it and what stays."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from world import Heard

import trtopt
from trtopt.core.documents import Damaged
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.locks import alone
from trtopt.engine.store import PLAN, Store, digest_of, named_store, stamps

PARTS = {
    "model": "a" * 64,
    "spec": {"precision": "fp16", "workspace": None},
    "generation": ["rtx", "1.7.1"],
    "gpu": None,
    "targets": [80],
    "preprocess": {"scale": 1, "mean": [0.4]},
}
MANIFEST = f"{PLAN}.json"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRTOPT_STORE", raising=False)
    monkeypatch.delenv("TRTOPT_STORE_MAX_SIZE", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def _parts(**changed: Any) -> dict[str, Any]:
    return {**PARTS, **changed}


def _files(plan: bytes = b"plan") -> dict[str, Path | bytes]:
    manifest = {"source": {"path": "nets/m.onnx"}, "targets": ["sm89"], "generation": {"gpu": None}}
    return {PLAN: plan, MANIFEST: json.dumps(manifest).encode()}


def _add(store: Store, plan: bytes = b"plan", heard: Heard | None = None, **changed: Any) -> str:
    with store.building(digest_of(_parts(**changed))):
        entry = store.add(_parts(**changed), _files(plan), heard or Heard())
    entry.close()
    return entry.digest


def _spoil(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def test_what_was_stored_is_found_whole(store: Store, tmp_path: Path) -> None:
    assert store.find(PARTS) is None
    _add(store)
    entry = store.find(PARTS)
    assert entry is not None
    with entry:
        entry.check()
        entry.copy(PLAN, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"plan"
    assert store.find(_parts(gpu="another")) is None


@pytest.mark.parametrize("name", [PLAN, MANIFEST])
def test_a_changed_file_is_never_read_as_the_engine(store: Store, tmp_path: Path, name: str) -> None:
    digest = _add(store)
    _spoil(store.folder / "entries" / digest / name, b"other")
    entry = store.find(PARTS)
    assert entry is not None
    with entry, pytest.raises(Damaged, match=name):
        entry.check()
    with entry, pytest.raises(Damaged, match=name):
        entry.copy(name, tmp_path / "copy")
    assert name in store.set_aside(digest)
    assert store.find(PARTS) is None
    assert [path.name.partition(".")[0] for path in store.damaged()] == [digest]
    assert _add(store) == digest
    assert store.set_aside(digest) == ""  # whole: it stays
    assert store.find(PARTS) is not None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": "trtopt-store-1"}', b'{"format": "trtopt-store-2"}'])
def test_an_entry_without_a_key_counts_as_none_and_is_put_aside(store: Store, content: bytes) -> None:
    digest = _add(store)
    _spoil(store.folder / "entries" / digest / "key.json", content)
    assert store.find(PARTS) is None
    assert store.engines() == []
    _add(store)
    assert store.find(PARTS) is not None
    assert len(store.damaged()) == 1


def test_an_entry_under_another_name_is_not_it(store: Store) -> None:
    digest = _add(store)
    other = digest_of(_parts(gpu="H200"))
    (store.folder / "entries" / digest).rename(store.folder / "entries" / other)
    assert store.find(_parts(gpu="H200")) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"generation": ["rtx", "1.8.0"]}, r'engine \(\w{12}\) differs in generation \(.*1.7.1".* there, .*1.8.0".* now\)$'),
        ({"gpu": "H200 (sm90)"}, r"gpu \(null there, H200 \(sm90\) now\)$"),
        ({"spec": {"precision": "int8", "workspace": None}}, r"differs in precision \(fp16 there, int8 now\)$"),
        ({"spec": {"precision": "fp16", "workspace": 1}}, r"workspace \(null there, 1 now\)$"),
        ({"model": "b" * 64}, "has no engine of this model"),
        ({"targets": [89, 120], "gpu": "x"}, r"gpu \(null there, x now\), targets \(.80. there, .89, 120. now\)$"),
        ({"preprocess": {"scale": 1, "mean": list(range(99))}}, r"preprocess \(\{.* there, \{.*… now\)$"),
    ],
)  # fmt: skip
def test_a_miss_says_what_differs(store: Store, changed: dict[str, Any], said: str) -> None:
    import re

    assert "has no engine of this model" in store.explained(PARTS)
    _add(store)
    assert re.search(said, store.explained(_parts(**changed)))


def test_the_nearest_is_one_of_the_same_model_with_fewest_differences(store: Store) -> None:
    _add(store, model="b" * 64)
    _add(store, gpu="H200", generation=["tensorrt8", "8.6.0"])
    near = _add(store, gpu="A100")
    said = store.explained(PARTS)
    assert near[:12] in said
    assert "A100" in said


def test_prune_takes_what_was_used_longest_ago_and_leaves_what_is_read(store: Store) -> None:
    names = [_add(store, bytes(1000), gpu=gpu) for gpu in "abc"]
    for age, name in enumerate(names):
        os.utime(store.folder / "entries" / name, (1000 + age, 1000 + age))
    assert [item.digest for item in store.engines()] == names[::-1]
    held = store.opened(names[1])  # used now
    assert held is not None
    removed, nbytes, left = store.prune(2 * (left := store.prune(1 << 30)[2]) // 3)
    assert removed == [names[0]]
    assert nbytes > 1000
    removed, _, left = store.prune(0)
    assert removed == [names[2]]
    assert left > 1000
    assert [item.in_use for item in store.engines()] == [True]
    held.close()
    assert store.prune(0)[0] == [names[1]]
    assert store.engines() == []


def test_prune_leaves_what_is_being_replaced(store: Store) -> None:
    digest = _add(store)
    with store.building(digest):  # as a forced build does, for whose engine the old one makes room
        assert store.prune(0)[0] == []
    assert store.prune(0)[0] == [digest]
    assert list((store.folder / "locks").iterdir()) == []


def test_what_was_put_aside_leaves_first(store: Store) -> None:
    bad, good = _add(store, bytes(1000), gpu="a"), _add(store, bytes(1000), gpu="b")
    _spoil(store.folder / "entries" / bad / PLAN, b"x")
    store.set_aside(bad)
    total = store.prune(1 << 30)[2]
    assert [name.partition(".")[0] for name in store.prune(total - 1)[0]] == [bad]
    assert [item.digest for item in store.engines()] == [good]


def test_a_build_keeps_the_store_within_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_STORE_MAX_SIZE", "5000")
    store, heard = Store("local"), Heard()
    assert store.folder == tmp_path / "cache" / "store"
    for gpu in "abcdef":
        _add(store, bytes(1000), heard, gpu=gpu)
        time.sleep(0.01)
    assert sum(item.nbytes for item in store.engines()) <= 5000
    assert store.find(_parts(gpu="f")) is not None  # the one that was just built
    assert any("used longest ago left the store" in note for note in heard.notes)
    monkeypatch.setenv("TRTOPT_STORE_MAX_SIZE", "much")
    with pytest.raises(UsageError, match="TRTOPT_STORE_MAX_SIZE"):
        Store("local")


def test_who_waits_is_told_for_whom(store: Store) -> None:
    heard, inside, details = Heard(), threading.Event(), []

    class Watched(Heard):
        def phase(self, name: str, total: int | None = None) -> Any:
            found = super().phase(name, total)
            details.append(name)
            return found

    def hold() -> None:
        with store.building("d" * 64):
            inside.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    started = time.monotonic()
    with store.building("d" * 64, Watched()):
        assert time.monotonic() - started > 0.1
    thread.join()
    assert details == ["waiting for the same engine, which is being built"]
    assert list((store.folder / "locks").iterdir()) == []
    with store.building("d" * 64, heard):
        pass
    assert details == ["waiting for the same engine, which is being built"]  # nobody to wait for


def _hold_for_ever(path: Path, inside: Any) -> None:
    with alone(path):
        inside.set()
        time.sleep(600)


def test_a_killed_builder_lets_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    inside = context.Event()
    process = context.Process(target=_hold_for_ever, args=(tmp_path / "x.lock", inside))
    process.start()
    assert inside.wait(60)
    process.kill()
    with alone(tmp_path / "x.lock"):
        pass
    process.join()


def test_locks_exclude_one_another(tmp_path: Path) -> None:
    count, most = [0], [0]

    def work() -> None:
        for _ in range(20):
            with alone(tmp_path / "x.lock"):
                count[0] += 1
                most[0] = max(most[0], count[0])
                count[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert list(tmp_path.glob("*.lock")) == []


def test_a_file_that_was_just_written_is_not_known_by_its_times(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"1")
    assert stamps([path]) is None
    os.utime(path, (1000, 1000))
    before = stamps([path])
    assert before is not None
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


def test_a_store_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="the store"):
        Store(str(tmp_path / "file"))


# Looked after -----------------------------------------------------------------------------------------------------------


def test_verify_puts_aside_what_differs(store: Store) -> None:
    good, bad = _add(store), _add(store, gpu="x")
    _spoil(store.folder / "entries" / bad / PLAN, b"plam")
    found = trtopt.verify_store(store=str(store.folder))
    assert found.whole == (good,)
    assert list(found.damaged) == [bad]
    assert not found.ok
    assert found.to_json()["ok"] is False
    assert trtopt.verify_store(store=str(store.folder)).ok
    listed = trtopt.list_store(store=str(store.folder))
    assert [item.digest for item in listed.engines] == [good]
    assert len(listed.damaged) == 1
    assert listed.engines[0].model == "nets/m.onnx"


def test_prune_by_command(store: Store) -> None:
    _add(store)
    assert trtopt.prune_store(store=str(store.folder)).removed == ()
    assert len(trtopt.prune_store(store=str(store.folder), max_size="0").removed) == 1
    with pytest.raises(UsageError, match="max_size"):
        trtopt.prune_store(store=str(store.folder), max_size="a lot")
    with pytest.raises(UsageError, match="no store"):
        trtopt.list_store(store="none")
    for look in (trtopt.list_store, trtopt.verify_store, trtopt.prune_store):
        with pytest.raises(
            UsageError, match=r"there is no store .*absent: a build with this `store=` makes the folder"
        ):
            look(store=store.folder / "absent")
    assert not (store.folder / "absent").exists()
