"""A session's memory on one GPU: counted, bounded, and lent out for results."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from trtopt.errors import DeviceError
from trtopt.runtime.device import Device, DeviceBuffer, HostBuffer

_ROTATING = 4  # blocks of one size before freed ones are used again


class Memory:
    """Allocates for one session on one GPU; `limit` bytes of device memory at the most (None: what there is)."""

    def __init__(self, device: Device, limit: int | None = None) -> None:
        self.device, self.limit = device, limit
        self._gpu: weakref.WeakSet[DeviceBuffer] = weakref.WeakSet()
        self._host: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._lock = threading.Lock()

    def gpu(self, nbytes: int) -> DeviceBuffer:
        """Device memory.

        Raises:
            DeviceError: the limit is reached, or the GPU has no more.
        """
        with self._lock:
            if self.limit is not None and self.gpu_bytes + nbytes > self.limit:
                raise DeviceError(
                    f"{nbytes} more bytes of GPU memory are needed; this session has {self.gpu_bytes} of at most "
                    f"{self.limit}: open it with a higher memory limit or fewer contexts, or use smaller batches"
                )
            buffer = self.device.buffer(nbytes)
            self._gpu.add(buffer)
            return buffer

    def pinned(self, nbytes: int) -> HostBuffer:
        """Page-locked host memory."""
        with self._lock:
            buffer = self.device.pinned(nbytes)
            self._host.add(buffer)
            return buffer

    @property
    def gpu_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in tuple(self._gpu) if not buffer.freed)

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in tuple(self._host) if not buffer.freed)


class Block:
    """Device memory lent for one result. It goes back when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_home", "buffer")

    def __init__(self, buffer: DeviceBuffer, home: deque[DeviceBuffer]) -> None:
        self.buffer, self._home = buffer, home

    def __del__(self) -> None:
        self._home.append(self.buffer)


class Blocks:
    """Device memory for results, used again in turn so that CUDA graphs meet the same addresses.

    A result's last reference may go while kernels of its reader still run, on a stream unknown here. So returned blocks
    wait until `_ROTATING` of a size are out, and are used again after the whole device has come to rest.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._returned: dict[int, deque[DeviceBuffer]] = {}
        self._ready: dict[int, deque[DeviceBuffer]] = {}
        self._made: dict[int, int] = {}

    def take(self, nbytes: int) -> Block:
        returned = self._returned.setdefault(nbytes, deque())
        ready = self._ready.setdefault(nbytes, deque())
        if not ready and len(returned) >= _ROTATING:
            self._memory.device.synchronize()
            while returned:
                ready.append(returned.popleft())
        return Block(ready.popleft() if ready else self._memory.gpu(nbytes), returned)
