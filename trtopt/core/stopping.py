"""Ctrl-C, SIGTERM and SIGHUP on the command line: a command ends cleaned up, with the status 128 + the signal's number.

Only the command line uses this, whose process is its own. A signal raises KeyboardInterrupt, whatever it is, so that
everything ends as with Ctrl-C. Python gives one that comes within a callback to `sys.unraisablehook`, which sends the signal
again. One within an import may be lost, and native code may run long: if the process is still there after `PATIENCE`, a
thread removes its temporary folders and ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

PATIENCE = 8.0  # seconds; `docker stop` kills after ten
_listening: list[int] = []
_received: int | None = None


def listen() -> None:
    """From here on the signals end the command. One that is ignored, as under nohup, stays so."""
    usual = (signal.SIG_DFL, signal.default_int_handler)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in numbers if signal.getsignal(number) in usual]
    if threading.current_thread() is not threading.main_thread() or not handled:
        return
    _listening[:] = handled
    for number in handled:
        signal.signal(number, _interrupt)
    sys.unraisablehook = _again
    arrivals, arriving = os.pipe()
    os.set_blocking(arriving, False)
    signal.set_wakeup_fd(arriving, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(arrivals,), name="trtopt-stopping", daemon=True).start()


@contextlib.contextmanager
def handed_to(take: Callable[[int], object]) -> Iterator[None]:
    """Within, `take` gets the signals' numbers and nothing is interrupted: a server ends in its time, with its own status."""
    usual = {number: signal.signal(number, lambda number, frame: take(number)) for number in _listening}
    arriving = signal.set_wakeup_fd(-1) if usual else -1
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if usual:
            signal.set_wakeup_fd(arriving, warn_on_full_buffer=False)


def end() -> None:
    """The command is over: a signal interrupts nothing any more. Remove what a second one kept from being removed."""
    for number in _listening:
        signal.signal(number, _note)
    if _received is not None:
        from trtopt.core.temporary import remove_held

        remove_held()


def status() -> int | None:
    """The exit status that is due; None: no signal came."""
    return None if _received is None else 128 + _received


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    _received = _received or number


def _interrupt(number: int, frame: FrameType | None) -> None:
    _note(number, frame)
    raise KeyboardInterrupt


def _again(lost: sys.UnraisableHookArgs) -> None:
    if isinstance(lost.exc_value, KeyboardInterrupt) and _received is not None:
        main = threading.main_thread().ident  # which may sleep: to another thread's signal it wouldn't wake
        threading.Timer(0.02, signal.pthread_kill, [main, _received]).start()  # now, this hook would lose it, too
    else:
        sys.__unraisablehook__(lost)


def _watch(arrivals: int) -> None:
    while (number := os.read(arrivals, 1)[0]) not in _listening:
        pass
    time.sleep(PATIENCE)
    from trtopt.core.temporary import remove_held

    remove_held()
    with contextlib.suppress(Exception):
        print("stopped", file=sys.stderr, flush=True)
    os._exit(128 + number)
