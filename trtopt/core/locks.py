"""Locks between processes and between threads, by a file that is there while the lock is held.

The system drops them however their process ends, so that a killed one leaves none behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from trtopt.core.documents import Damaged, read_json
from trtopt.core.errors import OutputError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.temporary import locked

POLL = 0.05  # seconds between tries: a wait of the system's couldn't be ended by Ctrl-C in every thread


class Lock:
    """A lock that is held until it is closed, or collected."""

    def __init__(self, descriptor: int, remove: Path | None = None) -> None:
        self._descriptor: int | None = descriptor
        self._remove = remove

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if self._remove is not None:  # while it is held: who has it open finds that it is no longer the one there
                with contextlib.suppress(OSError):
                    self._remove.unlink()
            os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def alone(path: Path, reporter: Reporter = SILENT, waiting: str = "waiting", advice: str = "") -> Iterator[None]:
    """Hold the lock file `path`. While another holds it, wait, in a phase named `waiting` that says for whom.

    Raises:
        OutputError: the file can't be made, or its file system has no locks.
    """
    try:
        lock = _taken(path)
        if lock is None:
            with reporter.phase(waiting) as phase:
                while lock is None:
                    phase.detail(_holder(path))
                    time.sleep(POLL)
                    lock = _taken(path)
    except OSError as error:
        raise OutputError(f"can't lock {path}: {error.strerror or error}", advice) from error
    with lock:
        yield


def alone_now(path: Path) -> Lock | None:
    """Take the lock of `alone` without waiting: the lock, or None where another holds it.

    Raises:
        OutputError: the file can't be made, or its file system has no locks.
    """
    try:
        return _taken(path)
    except OSError as error:
        raise OutputError(f"can't lock {path}: {error.strerror or error}") from error


def _taken(path: Path) -> Lock | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    if not locked(descriptor, path):
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
    return Lock(descriptor, path)


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
        return f"process {int(holder['process'])} on {holder['host']} has it"
    except (OSError, Damaged, KeyError, TypeError, ValueError):
        return "another process has it"  # and hasn't written yet, or just let go
