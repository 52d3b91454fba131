"""Bound: a session's call on arrays that stay where they are."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from trtopt.core.errors import DeviceError
from trtopt.cuda.device import after_capture


class Bound:
    """Inference on the same arrays again and again: `session.bind(…)` made it, and calling it runs it.

        with session.bind({"input": frame}) as step:
            while capture(frame):
                show(step()["logits"])

    Nothing is checked or looked up any more, so a call costs what replaying a CUDA graph costs. Until `close` it holds one of
    the session's contexts. Calls from several threads come one after the other.

    Attributes:
        outputs: output name → the array that every call writes.
        note: why calls replay no CUDA graph; empty if they do.
    """

    def __init__(
        self, call: Callable[[], None], outputs: Mapping[str, Any], note: str, kept: Any, release: Callable[[], None]
    ) -> None:
        self.outputs, self.note = outputs, note
        self._call, self._kept, self._lock = call, kept, threading.Lock()
        self._finalizer = weakref.finalize(self, after_capture, release)
        self._finalizer.atexit = False
        _bound.add(self)

    def __call__(self) -> Mapping[str, Any]:
        """Infer once, on what the input arrays hold now.

        Returns: `outputs`. They are ready, unless `bind` got a stream and every array is in GPU memory: then they will be,
        in the order of that stream.

        Raises:
            DeviceError: a CUDA call failed, this or its session is closed, or this process was forked from the one that bound.
            EngineError: TensorRT couldn't run it.
        """
        with self._lock:
            self._call()
        return self.outputs

    def close(self) -> None:
        """Give the context back. The arrays keep what they hold. A second call does nothing."""
        with self._lock:
            self._call, self._kept = _closed, None
        self._finalizer()

    def __enter__(self) -> Bound:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _closed() -> None:
    raise DeviceError("this bound call is closed, or its session is; bind the arrays again")


_bound: weakref.WeakSet[Bound] = weakref.WeakSet()


def _forked() -> None:
    raise DeviceError(
        "this call was bound before the process forked, and its session doesn't survive that: open one in the child, or start "
        "workers with multiprocessing's 'spawn'"
    )


def _refuse_in_child() -> None:
    """At the fork, so that calls needn't ask where they are."""
    for bound in tuple(_bound):
        bound._call, bound._lock = _forked, threading.Lock()  # a thread that isn't here may have had the lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)
