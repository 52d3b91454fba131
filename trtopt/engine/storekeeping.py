"""list_store(), prune_store(): the content of an engine store, and less of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import Damaged, Plain, plain, read_json
from trtopt.core.errors import UsageError
from trtopt.core.options import taking
from trtopt.core.values import parse_size
from trtopt.engine.request import PruneStoreRequest, StoreRequest
from trtopt.engine.store import PLAN, Entry, Store, folder_size, last_used, named_store


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
