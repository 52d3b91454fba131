"""Temporary folders: gone when their work is, and when their process was killed, removed by a later one.

Each is locked by the process that made it, and the system lets go of the lock however that process ends. So one that nobody
holds is what a killed run left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trtopt.core.errors import OutputError

_SCRATCH, SUFFIX = "trtopt-", ".trtopt-partial"
ADVICE = "set TMPDIR to a folder with room"
_held: set[Path] = set()  # the folders of this process
_searched: set[Path] = set()  # where this process has removed what others left


@contextlib.contextmanager
def folder_in(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, for its user alone; removed at the end with what is in it."""
    parent, lock = parent.absolute(), None
    if parent not in _searched:
        _searched.add(parent)
        remove_leftovers(parent)
    while lock is None:  # else a run that removes leftovers was faster
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=SUFFIX, dir=parent))
        try:
            lock = _lock(folder)
        except OSError:  # a file system without locks: nobody else gets one either, so the folder is safe
            lock = -1
    _held.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _held.discard(folder)
        if lock >= 0:
            os.close(lock)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in $TMPDIR, for files that nobody looks for later; OutputError where it can't be made."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(folder_in(Path(tempfile.gettempdir()), _SCRATCH))
        except OSError as error:
            raise OutputError(f"can't make a temporary folder: {error.strerror or error}", ADVICE) from error
        yield folder


def is_scratch(path: Path) -> bool:
    """Tell if a path lies in a folder of `scratch`."""
    return any(folder.name.startswith(_SCRATCH) and folder.name.endswith(SUFFIX) for folder in path.parents)


def remove_held() -> None:
    """Remove all folders of this process, which is about to end at once."""
    for folder in list(_held):
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: str | os.PathLike[str]) -> None:
    """Remove what runs that were killed left in `parent`; what can't be removed stays."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # gone meanwhile
                ours = entry.name.endswith(SUFFIX) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
                if ours and (lock := _lock(Path(entry.path))) is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None: it is gone, or another process holds it. OSError: it can't be
    locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    return descriptor if locked(descriptor, folder) else None


def locked(descriptor: int, path: Path) -> bool:
    """Lock what is open, if it is still what lies at `path` and nobody else has it; else close it. OSError: there are no
    locks."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        with contextlib.suppress(BlockingIOError, FileNotFoundError, NotADirectoryError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                stack.pop_all()
                return True
    return False
