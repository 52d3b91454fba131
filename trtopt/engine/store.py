"""The engine store: engines by all that they depend on, so that the same one is built once and copied from then on.

    FOLDER/entries/DIGEST/    one engine: model.engine, its manifest, the graph if it was kept, and key.json
    FOLDER/locks/             who builds what now
    FOLDER/damaged/           entries that weren't what key.json says, out of the way
    FOLDER/known/             which entry a file on this machine led to, so that it needn't be read to know

DIGEST is that of the key: the parts that an engine depends on (`key.json` has them, with each file's digest). An entry is
written beside its place and renamed there, and never changed. Who reads one holds a shared lock on its folder; who removes one
takes that lock alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from trtopt.core.documents import Count, Damaged, Digest, checked, one_of, read_json, spelled
from trtopt.core.errors import OutputError, UsageError
from trtopt.core.files import (
    cache_folder,
    json_bytes,
    made_folder,
    opened_regular,
    sha256_file,
    sha256_json,
    sync,
    write_json,
)
from trtopt.core.locks import Lock, alone, alone_now, lock_folder
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.removed import AT_URL, WENT
from trtopt.core.temporary import SUFFIX, folder_in
from trtopt.core.values import parse_size

FORMAT = "trtopt-store-1"
PLAN, GRAPH, KEY = "model.engine", "model.onnx", "key.json"
VARIABLE, SIZE_VARIABLE = "TRTOPT_STORE", "TRTOPT_STORE_MAX_SIZE"
MAX_SIZE = 20 << 30  # bytes
SETTLED = 2.0  # seconds: a file that was written more recently may be written again without its times telling
_ANOTHER = "give another `store=`"
_NEAR = 500  # entries that `explained` looks at, the last used first


def named_store(store: str | os.PathLike[str] | None, default: str | None = None) -> str | None:
    """What `store=` stands for: None is $TRTOPT_STORE, or else `default`; "none" is no store."""
    location = os.fspath(store) if store is not None else os.environ.get(VARIABLE) or default
    if location == "":
        raise UsageError("`store=` is empty; write a folder, local or none")
    if location is not None and "://" in location:
        raise UsageError(f"{WENT[AT_URL]} (`store=` or ${VARIABLE} is {location})")
    return None if location in (None, "none") else location


class _File(TypedDict):
    sha256: Digest
    bytes: Count


class _Parts(TypedDict, total=False):
    spec: Mapping[str, Any]
    generation: Sequence[Any]
    targets: Sequence[Any]


class _Key(TypedDict):
    """`key.json` of an entry."""

    format: Annotated[str, one_of([FORMAT])]
    parts: _Parts
    files: dict[Annotated[str, spelled("a file's name", r"(?!\.\.?\Z)[^/\0]+")], _File]


class Entry:
    """An engine in the store, which nobody removes until this is closed, or collected.

    Attributes:
        parts: what it depends on.  files: name → sha256 and bytes.
    """

    def __init__(self, folder: Path, key: _Key, lock: Lock) -> None:
        self.folder, self.digest = folder, folder.name
        self.parts: Mapping[str, Any] = key["parts"]
        self.files: Mapping[str, Mapping[str, Any]] = key["files"]
        self._lock = lock

    @property
    def plan(self) -> Path:
        return self.folder / PLAN

    @property
    def nbytes(self) -> int:
        return sum(int(about["bytes"]) for about in self.files.values())

    def check(self, *names: str) -> None:
        """Raise Damaged unless these files, or else all, are what was recorded."""
        _check_files(self.folder, {name: self.files[name] for name in names or self.files})

    def copy(self, name: str, target: Path) -> None:
        """Write one of its files to `target`; Damaged if what was read isn't what was stored."""
        digest = hashlib.sha256()
        try:
            source = opened_regular(self.folder / name)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror or error}") from None
        with source, open(target, "wb") as file:
            while block := source.read(1 << 20):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != self.files[name]["sha256"]:
            raise Damaged(f"{name} isn't what was stored: sha256 {digest.hexdigest()[:16]}…")

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class StoredEngine:
    """An entry, as `list_store` tells of it.

    Attributes:
        digest: of its key; the folder's name.
        model: the file it was built from, where it was one.
        made_for: the GPU it was built on, or the compute capabilities.
        nbytes: of its files.
        used: seconds since 1970 when it was last fetched or built.
        in_use: a process reads it now.
        parts: the key.
    """

    digest: str
    model: str
    precision: str
    made_for: str
    generation: str
    nbytes: int
    used: float
    in_use: bool
    parts: Mapping[str, Any]


class Store:
    """Engines in a folder.

    Args:
        where: a folder, or "local" (in the cache folder).

    Attributes:
        max_size: bytes that the folder may hold, beyond which what was used longest ago goes:
            $TRTOPT_STORE_MAX_SIZE, or 20 GiB.

    Raises:
        OutputError: the folder can't be made.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        if where == "local":
            self.folder = cache_folder("store")
        else:
            self.folder = made_folder(Path(where).expanduser(), "the store", _ANOTHER).absolute()
        limit = os.environ.get(SIZE_VARIABLE)
        self.max_size = parse_size(limit, f"${SIZE_VARIABLE}") if limit else MAX_SIZE

    def __str__(self) -> str:
        return "the store" if self.where == "local" else f"the store {self.where}"

    # Fetching

    def find(self, parts: Mapping[str, Any]) -> Entry | None:
        """The entry with this key in the folder. Its plan isn't read: by `check`, `copy` or a session's own check."""
        return self.opened(digest_of(parts))

    def opened(self, digest: str) -> Entry | None:
        """The entry of this name; None where there is none, or where what is there can't be one."""
        folder = self.folder / "entries" / digest
        lock = lock_folder(folder, shared=True)
        if lock is None:
            return None
        try:
            entry = Entry(folder, _key_in(folder), lock)
        except Damaged:
            lock.close()
            return None
        with contextlib.suppress(OSError):  # such as in a folder of others'
            os.utime(folder)  # what prune goes by
        return entry

    @contextlib.contextmanager
    def building(self, digest: str, reporter: Reporter = SILENT) -> Iterator[None]:
        """Be the only one who makes this entry: waits, in a phase, for another who does.

        Raises:
            OutputError: nothing can be locked in the folder, such as where it may only be read.
        """
        locks = made_folder(self.folder / "locks", "the store's locks", _ANOTHER)
        waiting = "waiting for the same engine, which is being built"
        with alone(locks / f"{digest}.lock", reporter, waiting, _ANOTHER):
            yield

    def add(self, parts: Mapping[str, Any], files: Mapping[str, Path | bytes], reporter: Reporter = SILENT) -> Entry:
        """Store an engine, in place of one with this key; within `building`. Then prune.

        Args:
            files: name in the entry → file to copy, or content.

        Raises:
            OutputError: it can't be written.
        """
        digest = digest_of(parts)
        with self._making(digest) as folder:
            recorded = {}
            for name, content in files.items():
                if isinstance(content, bytes):
                    (folder / name).write_bytes(content)
                else:
                    shutil.copyfile(content, folder / name)
                recorded[name] = {"sha256": sha256_file(folder / name), "bytes": (folder / name).stat().st_size}
            key = {"format": FORMAT, "parts": dict(parts), "files": recorded}
            (folder / KEY).write_bytes(json_bytes(key))
            entry = self._installed(folder, digest)
        try:
            if removed := self.prune(self.max_size)[0]:
                reporter.note(f"{len(removed)} engines that were used longest ago left the store {self.folder}")
        except OSError as error:
            reporter.warn(f"the store {self.folder} couldn't be pruned: {error.strerror or error}")
        return entry

    def explained(self, parts: Mapping[str, Any]) -> str:
        """Say why there is no entry with this key: in which parts the nearest one of the same model differs, and how."""
        mine, nearest, name = _flat(parts), list[str](), ""
        for folder in sorted(self.folders(), key=_last_used, reverse=True)[:_NEAR]:
            with contextlib.suppress(Damaged):
                other = _flat(_key_in(folder)["parts"])
                differing = [
                    f"{part} ({_shown(other.get(part))} there, {_shown(mine.get(part))} now)"
                    for part in sorted(mine.keys() | other.keys())
                    if mine.get(part) != other.get(part)
                ]
                if differing and mine["model"] == other.get("model") and (not name or len(differing) < len(nearest)):
                    nearest, name = differing, folder.name
        if not name:
            return f"{self} has no engine of this model"
        more = f" and {len(nearest) - 5} more" if len(nearest) > 5 else ""
        return f"not in {self}: its nearest engine ({name[:12]}) differs in {', '.join(nearest[:5])}{more}"

    # Looking after it

    def engines(self) -> list[StoredEngine]:
        """All entries that can be read, the last used first."""
        stored = []
        for folder in sorted(self.folders(), key=_last_used, reverse=True):
            with contextlib.suppress(Damaged, OSError):
                key = _key_in(folder)
                stored.append(_told(folder, key))
        return stored

    def damaged(self) -> list[Path]:
        """What was put out of the way."""
        return _subfolders(self.folder / "damaged")

    def set_aside(self, digest: str, reporter: Reporter = SILENT) -> str:
        """Put an entry that isn't what was stored out of the way; what is wrong with it, or "" where nothing is.

        Raises:
            OutputError: something is, and the folder may only be read.
        """
        folder = self.folder / "entries" / digest
        lock = lock_folder(folder, shared=True)
        if lock is None:
            return ""
        with lock:
            fault = _fault(folder)
        if not fault:
            return ""
        try:
            with self.building(digest, reporter):
                lock = lock_folder(folder, shared=True)
                if lock is None:
                    return ""
                with lock:
                    return self._clear(folder)
        except OutputError as error:
            problem = f"the store's engine {digest[:12]} is damaged ({fault}) and can't be put aside: {error.problem}"
            raise OutputError(problem, error.advice) from error

    def prune(self, max_size: int) -> tuple[list[str], int, int]:
        """Remove what was set aside, then what was used longest ago, until the rest is within `max_size` bytes.

        What a process reads stays.

        Returns:
            names of what was removed, its bytes, the bytes that are left.
        """
        folders = [*self.damaged(), *sorted(self.folders(), key=_last_used)]
        sizes = {folder: _size(folder) for folder in folders}
        remaining, nbytes, removed = sum(sizes.values()), 0, list[str]()
        for folder in folders:
            if remaining <= max_size:
                break
            if not self._removed(folder):
                if not folder.exists():  # another has pruned it
                    remaining -= sizes[folder]
                continue
            removed.append(folder.name)
            nbytes += sizes[folder]
            remaining -= sizes[folder]
        if removed:
            self._forget()
        return removed, nbytes, remaining

    def _removed(self, folder: Path) -> bool:
        """Remove an entry that nobody reads and nobody replaces now."""
        locks = made_folder(self.folder / "locks", "the store's locks", _ANOTHER)
        making = alone_now(locks / f"{folder.name}.lock")
        if making is None:
            return False
        with making:
            reading = lock_folder(folder, shared=False)
            if reading is None:
                return False
            with reading, folder_in(self.folder, ".pruned.") as trash:
                folder.rename(trash / folder.name)  # a reader finds it whole, or not at all
                return True

    # Which entry a request led to

    def known(self, question: Mapping[str, Any]) -> Entry | None:
        """The entry that this request led to before, if none of the files that it was made of has changed since."""
        try:
            memo = read_json(self._known(question))
            if any(_stamp(path) != tuple(stamp) for path, stamp in memo["files"].items()):
                return None
            return self.opened(str(memo["entry"]))
        except (Damaged, OSError, AttributeError, KeyError, TypeError, ValueError):
            return None

    def remember(self, question: Mapping[str, Any], stamps: Mapping[str, tuple[int, ...]], entry: Entry) -> None:
        """Keep which entry a request led to, with the `stamps` of its files before they were read."""
        with contextlib.suppress(OutputError):  # is a help, not a must
            made_folder(self.folder / "known")
            write_json(self._known(question), {"entry": entry.digest, "files": {**stamps}})

    def _known(self, question: Mapping[str, Any]) -> Path:
        return self.folder / "known" / f"{sha256_json(question)}.json"

    def _forget(self) -> None:
        """Drop what leads to entries that are gone."""
        with contextlib.suppress(OSError):
            for path in (self.folder / "known").iterdir():
                with contextlib.suppress(Damaged, OSError, KeyError, TypeError):
                    if not (self.folder / "entries" / str(read_json(path)["entry"])).is_dir():
                        path.unlink()

    # Folders

    def folders(self) -> list[Path]:
        """Of all entries."""
        return _subfolders(self.folder / "entries")

    def _clear(self, folder: Path, whole: Path | None = None) -> str:
        """Move an entry to `damaged/`, and say what is wrong with it; if nothing is, to `whole`."""
        fault = _fault(folder)
        if fault:
            aside = made_folder(self.folder / "damaged", "the store", _ANOTHER)
            folder.rename(aside / f"{folder.name}.{time.time_ns()}")
        elif whole is not None:
            folder.rename(whole)
        return fault

    @contextlib.contextmanager
    def _making(self, digest: str) -> Iterator[Path]:
        """A folder to make an entry in."""
        entries = made_folder(self.folder / "entries", "the store", _ANOTHER)
        try:
            with folder_in(entries, f".{digest[:12]}.") as beside:
                folder = beside / digest
                folder.mkdir()
                yield folder
        except OSError as error:
            raise OutputError(f"can't write in the store {self.folder}: {error.strerror or error}") from error

    def _installed(self, folder: Path, digest: str) -> Entry:
        """Have a folder of `_making` take its place, where an older one is put with what is to be removed."""
        for path in folder.iterdir():
            path.chmod(0o444)  # an entry never changes
            sync(path)
        key, place = _key_in(folder), self.folder / "entries" / digest
        lock = lock_folder(folder, shared=True)  # from before anybody sees it
        assert lock is not None
        try:
            if place.is_symlink():  # no entry of ours
                place.unlink()
            elif place.is_dir():
                self._clear(place, folder.parent / "replaced")
            folder.rename(place)
        except BaseException:
            lock.close()
            raise
        return Entry(place, key, lock)


def digest_of(parts: Mapping[str, Any]) -> str:
    return sha256_json(parts)


def _flat(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts by name; each option of the specification is one."""
    return {**{name: value for name, value in parts.items() if name != "spec"}, **(parts.get("spec") or {})}


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 30 else f"{text[:27]}…"


def stamps(paths: Sequence[str | os.PathLike[str]]) -> dict[str, tuple[int, ...]] | None:
    """Path → what tells a file's content from a later one without reading it; None where one is absent or just written."""
    try:
        times = {os.path.realpath(path): _stamp(path) for path in paths}
    except (OSError, ValueError):
        return None
    fresh = (time.time() - SETTLED) * 1e9
    return None if any(stamp[1] > fresh for stamp in times.values()) else times


def _stamp(path: str | os.PathLike[str]) -> tuple[int, ...]:
    info = Path(path).stat()
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev


def _key_in(folder: Path) -> _Key:
    """`key.json` of an entry.

    Raises:
        Damaged: it isn't that of an entry of this name.
    """
    key = checked(read_json(folder / KEY), _Key, KEY)
    if digest_of(key["parts"]) != folder.name.partition(".")[0]:
        raise Damaged(f"{KEY} is another engine's")
    if PLAN not in key["files"]:
        raise Damaged(f"{KEY} doesn't name the files")
    return key


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, about in files.items():
        try:
            digest = sha256_file(folder / name)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror or error}") from None
        if digest != about["sha256"]:
            raise Damaged(f"{name} isn't what was stored: sha256 {digest[:16]}…, not {str(about['sha256'])[:16]}…")


def _fault(folder: Path) -> str:
    """What is wrong with an entry; "" where nothing is."""
    try:
        _check_files(folder, _key_in(folder)["files"])
    except Damaged as error:
        return str(error)
    return ""


def _told(folder: Path, key: _Key) -> StoredEngine:
    try:
        manifest = read_json(folder / f"{PLAN}.json")
        model = str((manifest.get("source") or {}).get("path") or "")
        made_for = ", ".join(manifest.get("targets") or ()) or str(manifest["generation"].get("gpu"))
    except (Damaged, AttributeError, KeyError, TypeError) as error:
        raise Damaged(str(error)) from None
    parts = key["parts"]
    lock = lock_folder(folder, shared=False)
    if lock is not None:
        lock.close()
    return StoredEngine(
        digest=folder.name,
        model=model,
        precision=str(parts.get("spec", {}).get("precision", "?")),
        made_for=made_for,
        generation=" ".join(map(str, parts.get("generation", ()))),
        nbytes=_size(folder),
        used=_last_used(folder),
        in_use=lock is None,
        parts=parts,
    )


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.endswith(SUFFIX) and path.is_dir()]
    except OSError:
        return []


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0  # gone meanwhile


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total
