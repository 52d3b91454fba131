"""Locks between processes and between threads, by a file that is there while the lock is held.

The system drops them however their process ends, so that a killed one leaves none behind.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from trtopt.core.errors import OutputError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.temporary import locked

POLL = 0.05  # seconds between tries: a wait of the system's couldn't be ended by Ctrl-C in every thread


class Lock:
    """A lock that is held until it is closed, or collected."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(
                OSError
            ):  # while it is held: who has it open finds that it is no longer the one there
                self._path.unlink()
            os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def alone(path: Path, reporter: Reporter = SILENT, waiting: str = "waiting", advice: str = "") -> Iterator[None]:
    """Hold the lock file `path`. While another process holds it, wait, in a phase named `waiting`.

    Raises:
        OutputError: the file can't be made, or its file system has no locks.
    """
    lock = alone_now(path, advice)
    if lock is None:
        with reporter.phase(waiting):
            while lock is None:
                time.sleep(POLL)
                lock = alone_now(path, advice)
    with lock:
        yield


def alone_now(path: Path, advice: str = "") -> Lock | None:
    """Take the lock of `alone` without waiting: the lock, or None where another holds it.

    Raises:
        OutputError: the file can't be made, or its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        return Lock(descriptor, path) if locked(descriptor, path) else None
    except OSError as error:
        raise OutputError(f"can't lock {path}: {error.strerror or error}", advice) from error
