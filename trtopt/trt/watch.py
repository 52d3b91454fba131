"""A build that can be watched and stopped: it runs in a thread of its own while the main thread listens for Ctrl-C."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from trtopt.core import stopping
from trtopt.core.errors import BackendError, BuildCancelled
from trtopt.core.progress import Phase

_Result = TypeVar("_Result")
_abandoned: list[Future[Any]] = []


def run(work: Callable[[], _Result], cancel: threading.Event, stoppable: bool) -> _Result:
    """Run `work` in a thread and give its result, or raise its error; Ctrl-C raises BuildCancelled.

    On Ctrl-C `cancel` is set. A generation with a progress monitor (`stoppable`) then ends its build within a step, and
    this waits for it; a second Ctrl-C stops waiting. A build of 8.6, which has no monitor, can't be stopped inside the
    process: it is left behind, its result thrown away, and ends with the process, which begins no other.
    """
    _abandoned[:] = [future for future in _abandoned if not future.done()]
    if _abandoned:
        raise BackendError("a cancelled build still runs in this process (it can't be stopped): start a new process")
    future: Future[_Result] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        # A daemon: at exit Python would otherwise wait for a build that nobody wants.
        threading.Thread(target=target, name="trtopt-build", daemon=True).start()
        _wait(future)
    except KeyboardInterrupt:
        cancel.set()
        if stoppable:
            with contextlib.suppress(KeyboardInterrupt):
                _wait(future)
        said = "the build was cancelled; nothing was written"
        if not future.done():
            atexit.register(_leave)
            _abandoned.append(future)
            said += "; TensorRT's work goes on in the background until this process ends"
        raise BuildCancelled(said) from None
    return future.result()


def _wait(future: Future[Any]) -> None:
    """Wait without Thread.join: interrupted by Ctrl-C, it marks a running thread as ended (CPython before 3.13)."""
    while wait([future], 0.1).not_done:  # without a time-out, waiting can't be interrupted by Ctrl-C on every system
        pass


def _leave() -> None:
    """End at once while an abandoned build runs: unloading CUDA under its feet would crash or hang instead."""
    if not all(future.done() for future in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stopping.status() or BuildCancelled.exit_code)


def make_monitor(trt: Any, phase: Phase, cancel: threading.Event) -> Any:
    """An IProgressMonitor that names the current phase and step in `phase`, and stops the build once `cancel` is set.

    The steps are TensorRT's own and say little about the time left, so no percentage is made of them.
    """
    phases: dict[str, tuple[int, int]] = {}  # phase → steps done, steps in all; the innermost is last

    def show(name: str, step: tuple[int, int] | None) -> None:
        if step is None:
            phases.pop(name, None)
        else:
            phases[name] = step
        name, (step_number, total) = next(reversed(phases.items()), ("", (0, 0)))
        phase.detail(f"{name} {step_number}/{total}" if total > 1 else name)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            show(name, (0, steps))

        def step_complete(self, name: str, step: int) -> bool:
            if name in phases:
                show(name, (step + 1, phases[name][1]))
            return not cancel.is_set()

        def phase_finish(self, name: str) -> None:
            show(name, None)

    return Monitor()
