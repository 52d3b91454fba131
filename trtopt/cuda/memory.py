"""A session's memory on one GPU: counted, bounded, and lent out for results."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from trtopt.core.errors import DeviceError
from trtopt.cuda.device import Device, DeviceBuffer, HostBuffer

_ROTATING = 4  # blocks of one size before freed ones are used again
_SIZES = 32  # of blocks that are kept: shapes that always change would fill the GPU with blocks that nobody needs again


class Memory:
    """Allocates for one session on one GPU; `limit` bytes of device memory at the most (None: what there is)."""

    def __init__(self, device: Device, limit: int | None = None) -> None:
        self.device, self.limit = device, limit
        self._gpu: weakref.WeakSet[DeviceBuffer] = weakref.WeakSet()
        self._host: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        # Over whatever adds to the sets or walks through them. Reentrant: a signal handler or a finalizer may ask for the sums
        # in a thread that has it.
        self._lock = threading.RLock()

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
        with self._lock:
            return sum(buffer.nbytes for buffer in tuple(self._gpu) if not buffer.freed)

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            return sum(buffer.nbytes for buffer in tuple(self._host) if not buffer.freed)


class Block:
    """Device memory lent for one result. It goes back when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_home", "address", "buffer")

    def __init__(self, buffer: DeviceBuffer, home: deque[DeviceBuffer]) -> None:
        self.buffer, self.address, self._home = buffer, buffer.address, home

    def __del__(self) -> None:
        self._home.append(self.buffer)


class _Size:
    """The blocks of one size: those that can be lent, and those whose readers may still run."""

    __slots__ = ("ready", "returned", "used")

    def __init__(self) -> None:
        self.used = True  # since `Blocks` looked last for one that isn't needed any more
        self.ready: deque[DeviceBuffer] = deque()
        self.returned: deque[DeviceBuffer] = deque()


class Blocks:
    """Device memory for results, used again in turn so that CUDA graphs meet the same addresses.

    A result's last reference may go while kernels of its reader still run, on a stream unknown here. So returned blocks
    wait until `_ROTATING` of a size are out, and are used again after the whole device has come to rest.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._sizes: dict[int, _Size] = {}
        self._short: _Size | None = None

    def take(self, nbytes: int) -> Block:
        size = self._sizes.get(nbytes)
        if size is None:
            if len(self._sizes) >= _SIZES:
                self._free(self._sizes.pop(self._unused()))
            size = self._sizes[nbytes] = _Size()
        size.used = True
        if not size.ready and len(size.returned) >= _ROTATING:
            self._rest(size)
        buffer = size.ready.popleft() if size.ready else self._new(nbytes)
        if not size.ready:
            self._short = size
        return Block(buffer, size.returned)

    def _new(self, nbytes: int) -> DeviceBuffer:
        """Memory for one more; if there is none left, in place of what the other sizes keep."""
        try:
            return self._memory.gpu(nbytes)
        except DeviceError:
            if not any(size.ready or size.returned for size in self._sizes.values()):
                raise
            self._free(*self._sizes.values())
            return self._memory.gpu(nbytes)

    def _unused(self) -> int:
        """The size that wasn't used for longest, nearly: the clock algorithm, which costs `take` less than an order would."""
        for nbytes, size in tuple(self._sizes.items()):
            if not size.used:
                break
            size.used = False
            self._sizes[nbytes] = self._sizes.pop(nbytes)  # to the end
        return next(iter(self._sizes))

    def _free(self, *sizes: _Size) -> None:
        """Free the blocks of these sizes that aren't lent. Those that are free themselves, or come back."""
        self._memory.device.synchronize()  # their readers may still run
        for size in sizes:
            for blocks in (size.ready, size.returned):
                while blocks:
                    blocks.popleft().free()

    def wait(self) -> bool:
        """To be called where the stream would be waited for: wait for the whole device, if that lends blocks again.

        Returns: whether it did.
        """
        size, self._short = self._short, None
        if size is None or len(size.returned) < _ROTATING - 1:
            return False
        self._rest(size)
        return True

    def _rest(self, size: _Size) -> None:
        came = len(size.returned)  # what comes back from now on may have readers that start later
        self._memory.device.synchronize()
        for _ in range(came):
            size.ready.append(size.returned.popleft())
