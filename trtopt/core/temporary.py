"""Temporary folders: gone when their work is, and when their process was killed, removed by a later one.

Each is locked by the process that made it, and the system lets go of the lock however that process ends. So one that nobody
holds is what a killed run left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trtopt.core.errors import OutputError

if sys.platform != "win32":
    import fcntl

SUFFIX = ".trtopt-partial"
ADVICE = "set TMPDIR to a folder with room"
_held: set[Path] = set()  # the folders of this process
_scratch: set[Path] = set()  # of these, those in $TMPDIR
_searched: set[Path] = set()  # where this process has removed what others left


@contextlib.contextmanager
def folder_in(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, for its user alone; removed at the end with what is in it.

    Raises:
        OSError: it can't be made.
    """
    parent = parent.absolute()
    if parent not in _searched:
        _searched.add(parent)
        remove_leftovers(parent)
    folder, lock = _made(parent, prefix)
    _held.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _held.discard(folder)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in $TMPDIR, for files that nobody looks for later.

    Raises:
        OutputError: it can't be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(folder_in(Path(tempfile.gettempdir()), "trtopt-"))
        except OSError as error:
            raise OutputError(f"can't make a temporary folder: {error.strerror or error}", ADVICE) from error
        _scratch.add(folder)
        stack.callback(_scratch.discard, folder)
        yield folder


def is_scratch(path: Path) -> bool:
    """Whether a path lies in a folder of `scratch`."""
    return not _scratch.isdisjoint(path.parents)


def remove_held() -> None:
    """Remove all folders of this process, which is about to end at once."""
    for folder in list(_held):
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: str | os.PathLike[str]) -> None:
    """Remove what runs that were killed left in `parent`; what can't be removed stays."""
    if sys.platform == "win32":  # no locks on folders there
        return
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # held by another process, or gone meanwhile
                if entry.name.endswith(SUFFIX) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    lock = _lock(entry.path)
                    try:
                        shutil.rmtree(entry.path, ignore_errors=True)
                    finally:
                        os.close(lock)


def _made(parent: Path, prefix: str) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=SUFFIX, dir=parent))
        if sys.platform == "win32":
            return folder, None
        try:
            return folder, _lock(folder)
        except (BlockingIOError, FileNotFoundError):  # a run that removes leftovers was faster
            continue
        except OSError:  # a file system without locks: nobody else gets one either, so the folder is safe
            return folder, None


if sys.platform != "win32":

    def _lock(folder: str | os.PathLike[str]) -> int:
        """A descriptor that holds the folder's lock, if it is a folder.

        Raises:
            BlockingIOError: another process holds it.
            OSError: it is gone, or can't be locked.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
                raise FileNotFoundError(folder)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
