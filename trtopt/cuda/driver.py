"""The NVIDIA driver's functions through ctypes: no package is needed, and an error is a code that they give."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def driver_library() -> ctypes.CDLL | None:
    """Load the driver; None where none is installed."""
    for name in ("libcuda.so.1", "libcuda.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def address_of(function: Any) -> int:
    """Return the address of a function of a library that ctypes loaded."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Here(threading.local):
    def __init__(self) -> None:
        self.context = ctypes.c_void_p()
        self.reference = ctypes.byref(self.context)


_here = _Here()


@dataclass(frozen=True)
class Driver:
    """Functions that are called on addresses, keeping Python's GIL; the code that they give is for the caller to look at.

    Launches and waits on streams that were made on a device need no current one. Where one fails, the runtime's call of the
    same purpose says what is wrong, or works.
    """

    query: Callable[[int], int]  # stream
    get_current: Callable[[Any], int]  # where to write the thread's current context: 0, if it has none
    set_current: Callable[[int | None], int]  # context
    # Addresses of functions, for calls in a stretch.
    launching: int  # graph, stream
    synchronizing: int  # stream
    querying: int  # stream
    getting: int  # where to write the thread's current context

    @classmethod
    def load(cls) -> Driver | None:
        """Load the functions; None where no driver is installed, or one that lacks some of them."""
        found = driver_library()
        if found is None:
            return None
        library = ctypes.PyDLL(found._name)
        try:
            query, get, put = library.cuStreamQuery, library.cuCtxGetCurrent, library.cuCtxSetCurrent
            addresses = map(address_of, (library.cuGraphLaunch, library.cuStreamSynchronize, query, get))
        except AttributeError:
            return None
        query.argtypes = put.argtypes = (ctypes.c_void_p,)
        return cls(query, get, put, *addresses)

    def current(self) -> int | None:
        """The thread's current context; None also in a forked process, whose driver gives an error."""
        return None if self.get_current(_here.reference) else _here.context.value


def primary_context(ordinal: int) -> int | None:
    """The GPU's context that libraries share; None if there can be none. (`cudaSetDevice` would also change what the CUDA
    runtime takes where a thread has no current context, for good.)"""
    library, context = driver_library(), ctypes.c_void_p()
    if library is None or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal):
        return None
    return context.value
