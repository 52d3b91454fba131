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


@contextlib.contextmanager
def alone(path: Path, reporter: Reporter = SILENT, waiting: str = "waiting", advice: str = "") -> Iterator[None]:
    """Hold the lock file `path`. While another process holds it, wait, in a phase named `waiting`. OutputError where the file
    can't be made, or its file system has no locks."""
    lock = alone_now(path, advice)
    if lock is None:
        with reporter.phase(waiting):
            while (lock := alone_now(path, advice)) is None:
                time.sleep(POLL)
    with lock:
        yield


def alone_now(path: Path, advice: str = "") -> contextlib.ExitStack | None:
    """Take the lock of `alone` without waiting: return what lets it go when it is closed, or None where another holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not locked(descriptor, path):
            return None
    except OSError as error:
        raise OutputError(f"can't lock {path}: {error.strerror or error}", advice) from error
    lock = contextlib.ExitStack()
    lock.callback(os.close, descriptor)
    # While it is held: who has it open finds that it is no longer the one there.
    lock.callback(path.unlink, missing_ok=True)
    return lock
