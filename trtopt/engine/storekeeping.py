"""list_store(), verify_store(), prune_store(): what is in an engine store, whether it is whole, and less of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import Plain, plain
from trtopt.core.errors import UsageError
from trtopt.core.options import taking
from trtopt.core.values import parse_size
from trtopt.engine.request import PruneStoreRequest, StoreRequest
from trtopt.engine.store import Store, StoredEngine, named_store


@dataclass(frozen=True)
class StoreListing:
    """What is in a store's folder.

    Attributes:
        engines: the last used first.
        damaged: names of what was put aside.
        max_size: bytes that the folder may hold after a build.
    """

    folder: str
    engines: tuple[StoredEngine, ...]
    damaged: tuple[str, ...]
    max_size: int

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.engines)

    def to_json(self) -> dict[str, Any]:
        return {**plain(self), "nbytes": self.nbytes}


@dataclass(frozen=True)
class StoreVerification:
    """Engines (by their digests) that are what was stored, and those that aren't, with the reason; these were put aside."""

    folder: str
    whole: tuple[str, ...]
    damaged: dict[str, str]

    @property
    def ok(self) -> bool:
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        return {**plain(self), "ok": self.ok}


@dataclass(frozen=True)
class StorePruning(Plain):
    """What was removed, by names of folders; its bytes, and those that are left, of which `in_use` engines are being read."""

    folder: str
    removed: tuple[str, ...]
    nbytes: int
    left: int
    in_use: int


@taking(StoreRequest)
def list_store(request: StoreRequest) -> StoreListing:
    """List the engines in a store.

    Args:
        store: as `trtopt.build` takes it; None: $TRTOPT_STORE, or the one in the cache folder.

    Raises:
        UsageError: `store` names none, or a folder that isn't there.
        OutputError: its folder can't be made.
    """
    store = _opened(request)
    return StoreListing(
        folder=str(store.folder),
        engines=tuple(store.engines()),
        damaged=tuple(path.name for path in store.damaged()),
        max_size=store.max_size,
    )


@taking(StoreRequest)
def verify_store(request: StoreRequest) -> StoreVerification:
    """Read every engine in a store and compare it with what was stored. Those that differ are put aside.

    Args: as of `list_store`.

    Raises: as `list_store`.
    """
    store, whole, damaged = _opened(request), list[str](), dict[str, str]()
    folders = store.folders()
    with request.reporter.phase("reading the engines", len(folders)) as phase:
        for folder in folders:
            phase.advance()
            if problem := store.set_aside(folder.name, request.reporter):
                damaged[folder.name] = problem
            elif folder.is_dir():
                whole.append(folder.name)
    return StoreVerification(str(store.folder), tuple(whole), damaged)


@taking(PruneStoreRequest)
def prune_store(request: PruneStoreRequest) -> StorePruning:
    """Remove engines from a store: what was put aside, then what was used longest ago. What a process reads stays.

    Args:
        store: as of `list_store`.
        max_size: bytes that may stay, or such as "20GB"; None: what the store may hold after a build.

    Raises: as `list_store`.
    """
    store = _opened(request)
    most = store.max_size if request.max_size is None else parse_size(request.max_size, "`max_size=`")
    removed, nbytes, remaining = store.prune(most)
    in_use = sum(item.in_use for item in store.engines())
    return StorePruning(str(store.folder), tuple(removed), nbytes, remaining, in_use)


def _opened(request: StoreRequest) -> Store:
    where = named_store(request.store, "local")
    if where is None:
        raise UsageError("`store='none'` is no store: give local, or a folder")
    if where != "local" and not os.path.lexists(Path(where).expanduser()):
        raise UsageError(f"there is no store {where}: a build with this `store=` makes the folder")
    return Store(where)
