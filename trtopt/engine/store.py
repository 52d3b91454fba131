"""The engine store: engines by all that they depend on, so that the same one is built once and copied from then on;
`list_store` and `prune_store`.

    FOLDER/entries/DIGEST/    one engine: model.engine, its manifest, the graph if it was kept, and key.json
    FOLDER/locks/             a lock for each engine that is being built
    FOLDER/known/             which entry a file on this machine led to, so that it needn't be read to know

DIGEST is that of the key: the parts that an engine depends on (`key.json` has them, with each file's digest). An entry is
written beside its place and renamed there, and never changed; it is removed by a rename, too. Readers
take no lock: each file is compared with its digest as it is read, and what isn't whole counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from trtopt.core.documents import Count, Damaged, Digest, Plain, converted, one_of, plain, read_json, spelled
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
from trtopt.core.locks import alone
from trtopt.core.options import taking
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.removed import AT_URL, WENT
from trtopt.core.temporary import SUFFIX, folder_in
from trtopt.core.values import parse_size
from trtopt.engine.request import PruneStoreRequest, StoreRequest

FORMAT = "trtopt-store-1"
PLAN, GRAPH, KEY = "model.engine", "model.onnx", "key.json"
VARIABLE, SIZE_VARIABLE = "TRTOPT_STORE", "TRTOPT_STORE_MAX_SIZE"
MAX_SIZE = 20 << 30  # bytes
SETTLED = 2.0  # seconds: a file that was written more recently may be written again without its times telling
_ANOTHER = "give another `store=`"


def named_store(store: str | os.PathLike[str] | None, default: str | None = None) -> str | None:
    """Return what `store=` stands for: None is $TRTOPT_STORE, or else `default`; "none" is no store."""
    location = os.fspath(store) if store is not None else os.environ.get(VARIABLE) or default
    if location == "":
        raise UsageError("`store=` is empty; write a folder, local or none")
    if location is not None and "://" in location:
        raise UsageError(f"{WENT[AT_URL]} (`store=` or ${VARIABLE} is {location})")
    return None if location in (None, "none") else location


class _File(TypedDict):
    sha256: Digest
    bytes: Count


class _Key(TypedDict):
    """`key.json` of an entry."""

    format: Annotated[str, one_of([FORMAT])]
    parts: dict[str, Any]
    files: dict[Annotated[str, spelled("a file's name", r"(?!\.\.?\Z)[^/\0]+")], _File]


@dataclass(frozen=True)
class Entry:
    """An engine in the store.

    Attributes:
        parts: what it depends on.
        files: name → sha256 and bytes.
    """

    folder: Path
    parts: Mapping[str, Any]
    files: Mapping[str, _File]

    @classmethod
    def read(cls, folder: Path) -> Entry:
        """Read what a folder holds; Damaged where it isn't the entry of that name."""
        key = converted(read_json(folder / KEY), _Key, KEY)
        if sha256_json(key["parts"]) != folder.name:
            raise Damaged(f"{KEY} is another engine's")
        files = key["files"]
        if PLAN not in files:
            raise Damaged(f"{KEY} doesn't name the files")
        return cls(folder, key["parts"], files)

    @property
    def digest(self) -> str:
        return self.folder.name

    @property
    def plan(self) -> Path:
        return self.folder / PLAN

    def check(self, *names: str) -> None:
        """Raise Damaged unless these files, or else all, are what was recorded."""
        for name in names or self.files:
            self.copy(name, None)

    def copy(self, name: str, target: Path | None) -> None:
        """Write one of its files to `target`, if any; Damaged if what was read isn't what was stored."""
        digest = hashlib.sha256()
        with contextlib.ExitStack() as files:
            try:
                source = files.enter_context(opened_regular(self.folder / name))
            except OSError as error:
                raise Damaged(f"{name}: {error.strerror or error}") from None
            file = None if target is None else files.enter_context(open(target, "wb"))
            while block := source.read(1 << 20):
                digest.update(block)
                if file is not None:
                    file.write(block)
        if (read := digest.hexdigest()) != (stored := self.files[name]["sha256"]):
            raise Damaged(f"{name} isn't what was stored: sha256 {read[:16]}…, not {stored[:16]}…")


class Store:
    """Engines in a folder, or "local" (in the cache folder); OutputError where it can't be made.

    Attributes:
        max_size: bytes that it may hold, beyond which what was used longest ago goes: $TRTOPT_STORE_MAX_SIZE, or 20 GiB.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        if where == "local":
            self.folder = cache_folder("store")
        else:
            self.folder = made_folder(Path(where).expanduser(), "the store", _ANOTHER).absolute()
        self._entries = self.folder / "entries"
        limit = os.environ.get(SIZE_VARIABLE)
        self.max_size = parse_size(limit, f"${SIZE_VARIABLE}") if limit else MAX_SIZE

    def __str__(self) -> str:
        return "the store" if self.where == "local" else f"the store {self.where}"

    def find(self, digest: str) -> Entry | None:
        """Return the entry of this name; None where there is none, or where what is there can't be one.

        Its files aren't read: `check`, `copy` and a session's own check do that.
        """
        folder = self._entries / digest
        try:
            entry = Entry.read(folder)
        except Damaged:
            return None
        with contextlib.suppress(OSError):  # such as in a folder of others'
            os.utime(folder)  # what prune goes by
        return entry

    @contextlib.contextmanager
    def building(self, digest: str, reporter: Reporter = SILENT) -> Iterator[None]:
        """Be the only one who makes this entry: waits, in a phase, for another who does. OutputError where nothing can be
        locked, such as in a folder that may only be read."""
        locks = made_folder(self.folder / "locks", "the store's locks", _ANOTHER)
        waiting = "waiting for the same engine, which is being built"
        with alone(locks / f"{digest}.lock", reporter, waiting, _ANOTHER):
            yield

    def add(self, parts: Mapping[str, Any], files: Iterable[Path], reporter: Reporter = SILENT) -> Entry:
        """Store copies of an engine's files, in place of one with this key; within `building`. Then prune. OutputError where it
        can't be written."""
        digest, recorded = sha256_json(parts), dict[str, _File]()
        made_folder(self._entries, "the store", _ANOTHER)
        try:
            with folder_in(self._entries, f".{digest[:12]}.") as beside:
                folder = beside / digest
                folder.mkdir()
                for file in files:
                    copy = Path(shutil.copyfile(file, folder / file.name))
                    recorded[file.name] = {"sha256": sha256_file(copy), "bytes": copy.stat().st_size}
                (folder / KEY).write_bytes(json_bytes({"format": FORMAT, "parts": dict(parts), "files": recorded}))
                for path in folder.iterdir():
                    path.chmod(0o444)  # an entry never changes
                    sync(path)
                self.remove(digest)
                folder.rename(self._entries / digest)
        except OSError as error:
            raise OutputError(f"can't write in the store {self.folder}: {error.strerror or error}") from error
        if removed := self.prune(self.max_size, keep=digest)[0]:
            reporter.note(f"{len(removed)} engines that were used longest ago left the store {self.folder}")
        return Entry(self._entries / digest, parts, recorded)

    def remove(self, digest: str) -> bool:
        """Remove an entry at once, for readers too; False where there is none. OutputError where it may only be read."""
        try:
            with folder_in(self.folder, ".removed.") as trash:
                (self._entries / digest).rename(trash / digest)
        except FileNotFoundError:  # another has removed it
            return False
        except OSError as error:
            raise OutputError(f"can't remove from the store {self.folder}: {error.strerror or error}") from error
        return True

    def fault(self, digest: str) -> str:
        """Say what is wrong with an entry, which is read for that; "" where nothing is, or where it is gone."""
        folder = self._entries / digest
        try:
            Entry.read(folder).check()
        except Damaged as error:
            return str(error) if os.path.lexists(folder) else ""
        return ""

    def folders(self) -> list[Path]:
        """Return the folders of all entries, the last used first."""
        try:
            paths = [path for path in self._entries.iterdir() if not path.name.endswith(SUFFIX)]
        except OSError:
            return []
        return sorted(paths, key=last_used, reverse=True)

    def prune(self, max_size: int, keep: str = "") -> tuple[tuple[str, ...], int, int]:
        """Remove what was used longest ago but the entry `keep`, until the rest is within `max_size` bytes; OutputError where
        it may only be read. Return names of what was removed, its bytes, the bytes that are left."""
        folders = self.folders()
        sizes = {folder: folder_size(folder) for folder in folders}
        remaining, nbytes, removed = sum(sizes.values()), 0, list[str]()
        for folder in reversed(folders):
            if remaining <= max_size:
                break
            if folder.name == keep:
                continue
            if self.remove(folder.name):
                removed.append(folder.name)
                nbytes += sizes[folder]
            remaining -= sizes[folder]
        return tuple(removed), nbytes, remaining

    # Which entry a request led to

    def known(self, question: Mapping[str, Any]) -> Entry | None:
        """Return the entry that this request led to before, if none of the files that it was made of has changed since."""
        try:
            memo = read_json(self._known(question))
            if any(_stamp(path) != tuple(stamp) for path, stamp in memo["files"].items()):
                return None
            return self.find(str(memo["entry"]))
        except (Damaged, OSError, AttributeError, KeyError, TypeError, ValueError):
            return None

    def remember(self, question: Mapping[str, Any], stamps: Mapping[str, tuple[int, ...]], entry: Entry) -> None:
        """Keep which entry a request led to, with the `stamps` of its files before they were read."""
        with contextlib.suppress(OutputError):  # is a help, not a must
            made_folder(self.folder / "known")
            write_json(self._known(question), {"entry": entry.digest, "files": {**stamps}})

    def _known(self, question: Mapping[str, Any]) -> Path:
        return self.folder / "known" / f"{sha256_json(question)}.json"


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


def last_used(folder: Path) -> float:
    """Seconds since 1970; 0 where it is gone meanwhile."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def folder_size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


# Its content, as people see it ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredEngine:
    """An entry, as `list_store` tells of it.

    Attributes:
        digest: of its key; the folder's name.
        model: the file it was built from, where it was one.
        made_for: the GPU it was built on, or the compute capabilities.
        nbytes: of its files.
        used: seconds since 1970 when it was last fetched or built.
        parts: the key.
    """

    digest: str
    model: str
    precision: str
    made_for: str
    generation: str
    nbytes: int
    used: float
    parts: Mapping[str, Any]


@dataclass(frozen=True)
class StoreListing:
    """Engines in a store's folder, the last used first; `max_size`: bytes that it may hold after a build."""

    folder: str
    engines: tuple[StoredEngine, ...]
    max_size: int

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.engines)

    def to_json(self) -> dict[str, Any]:
        return {**plain(self), "nbytes": self.nbytes}


@dataclass(frozen=True)
class StorePruning(Plain):
    """The names of what was removed, its bytes, and those that are left."""

    folder: str
    removed: tuple[str, ...]
    nbytes: int
    left: int


@taking(StoreRequest)
def list_store(request: StoreRequest) -> StoreListing:
    """List the engines in a store: as `trtopt.build` takes it, $TRTOPT_STORE, or the one in the cache folder.

    Raises:
        UsageError: `store` names none, or a folder that isn't there.
        OutputError: its folder can't be made.
    """
    store, engines = _opened(request), list[StoredEngine]()
    for folder in store.folders():
        with contextlib.suppress(Damaged, AttributeError, KeyError, TypeError):  # not whole, or gone meanwhile
            engines.append(_described(Entry.read(folder)))
    return StoreListing(str(store.folder), tuple(engines), store.max_size)


@taking(PruneStoreRequest)
def prune_store(request: PruneStoreRequest) -> StorePruning:
    """Remove engines from a store, what was used longest ago, until `max_size` is left. Raises as `list_store`."""
    store = _opened(request)
    most = store.max_size if request.max_size is None else parse_size(request.max_size, "`max_size=`")
    return StorePruning(str(store.folder), *store.prune(most))


def _opened(request: StoreRequest) -> Store:
    where = named_store(request.store, "local")
    if where is None:
        raise UsageError("`store='none'` is no store: give local, or a folder")
    if where != "local" and not os.path.lexists(Path(where).expanduser()):
        raise UsageError(f"there is no store {where}: a build with this `store=` makes the folder")
    return Store(where)


def _described(entry: Entry) -> StoredEngine:
    manifest = read_json(entry.folder / f"{PLAN}.json")
    return StoredEngine(
        digest=entry.digest,
        model=str((manifest.get("source") or {}).get("path") or ""),
        precision=str(entry.parts.get("spec", {}).get("precision", "?")),
        made_for=", ".join(manifest.get("targets") or ()) or str(manifest["generation"].get("gpu")),
        generation=" ".join(map(str, entry.parts.get("generation", ()))),
        nbytes=folder_size(entry.folder),
        used=last_used(entry.folder),
        parts=entry.parts,
    )
