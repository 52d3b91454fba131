"""A session's memory on one GPU: counted, bounded, and lent out for results."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque

from trtopt.core.errors import DeviceError
from trtopt.cuda.arrays import LEGACY
from trtopt.cuda.device import Device, DeviceBuffer, Event, HostBuffer

_KEPT = 4  # blocks of one size that wait for streams of others, before the device is waited for
_NONE, _DEFAULT = frozenset[int](), frozenset((LEGACY,))
_SIZES = 32  # of blocks that are kept: shapes that always change would fill the GPU with blocks that nobody needs again


class Memory:
    """Allocates for one session on one GPU; `limit` bytes of device memory at the most (None: what there is)."""

    def __init__(self, device: Device, limit: int | None = None) -> None:
        self.device, self.limit = device, limit
        self._held: weakref.WeakSet[DeviceBuffer | HostBuffer] = weakref.WeakSet()
        # Over whatever adds to the set or walks through it. Reentrant: a signal handler or a finalizer may ask for the sums in
        # a thread that has it.
        self._lock = threading.RLock()

    def gpu(self, nbytes: int) -> DeviceBuffer:
        """Device memory; DeviceError where the limit is reached, or the GPU has no more."""
        with self._lock:
            if self.limit is not None and self.gpu_bytes + nbytes > self.limit:
                raise DeviceError(
                    f"{nbytes} more bytes of GPU memory are needed; this session has {self.gpu_bytes} of at most "
                    f"{self.limit}: open it with a higher memory limit or fewer contexts, or use smaller batches"
                )
            self._held.add(buffer := DeviceBuffer(self.device, nbytes))
            return buffer

    def pinned(self, nbytes: int) -> HostBuffer:
        """Page-locked host memory."""
        with self._lock:
            self._held.add(buffer := HostBuffer(self.device, nbytes))
            return buffer

    @property
    def gpu_bytes(self) -> int:
        return self._bytes(DeviceBuffer)

    @property
    def pinned_bytes(self) -> int:
        return self._bytes(HostBuffer)

    def _bytes(self, kind: type[DeviceBuffer | HostBuffer]) -> int:
        with self._lock:
            return sum(item.nbytes for item in tuple(self._held) if isinstance(item, kind) and not item.freed)


class Block:
    """Device memory lent for one result. It goes back when nothing refers to it any more, perhaps while it is written or read
    on `streams`: handles, `arrays.LEGACY` and `UNKNOWN` among them."""

    __slots__ = ("__weakref__", "_home", "address", "buffer", "streams")

    def __init__(self, buffer: DeviceBuffer, home: deque[tuple[DeviceBuffer, set[int]]], streams: set[int]) -> None:
        self.buffer, self.address, self._home, self.streams = buffer, buffer.address, home, streams

    def __del__(self) -> None:
        self._home.append((self.buffer, self.streams))


class Blocks:
    """Device memory for results, used again in the order of streams.

    A result's last reference may go while kernels of its reader still run. So a block that came back is lent to a call on a
    stream if nothing but that stream and the legacy default one, which the call is made to follow by `event`, had to do with
    it. Where other streams had (DLPack tells them), a few more blocks are made, and then the whole device is waited for.
    """

    def __init__(self, memory: Memory, event: Event) -> None:
        self._memory, self._event = memory, event
        # By their size in bytes, the size that was used last at the end.
        self._returned: OrderedDict[int, deque[tuple[DeviceBuffer, set[int]]]] = OrderedDict()

    def take(self, nbytes: int, stream: int, followed: bool = False) -> Block:
        """A block for a result that is written in the order of a stream, which (`followed`) is about to follow the default one
        anyway: of those that fit, the one that came back last."""
        home = self._returned.get(nbytes)
        if home:  # the common case, short
            buffer, streams = entry = home.pop()
            if streams <= (_DEFAULT if followed else _NONE):
                self._returned.move_to_end(nbytes)
                return Block(buffer, home, streams)
            home.append(entry)
        if home is None:
            if len(self._returned) >= _SIZES:
                self._free(self._returned.popitem(last=False)[1])
            home = self._returned[nbytes] = deque()
        else:
            self._returned.move_to_end(nbytes)
        waited = False
        while True:
            for index in range(len(home) - 1, -1, -1):  # others append meanwhile
                buffer, streams = home[index]
                if streams <= {stream, LEGACY}:
                    del home[index]
                    if LEGACY not in streams:
                        return Block(buffer, home, set())
                    device = self._memory.device
                    if not (followed or device.idle(LEGACY)):
                        device("cudaEventRecord", self._event.raw, LEGACY)
                        device("cudaStreamWaitEvent", stream, self._event.raw, 0)
                    return Block(buffer, home, {LEGACY} if followed else set())
            if waited or len(home) < _KEPT:
                return Block(self._new(nbytes), home, set())
            returned_blocks = tuple(home)  # what comes back from now on may have readers that start later
            self._memory.device.synchronize()
            for _, streams in returned_blocks:
                streams.clear()
            waited = True

    def _new(self, nbytes: int) -> DeviceBuffer:
        """Memory for one more; if there is none left, in place of what is kept."""
        try:
            return self._memory.gpu(nbytes)
        except DeviceError:
            if not any(self._returned.values()):
                raise
            self._free(*self._returned.values())
            return self._memory.gpu(nbytes)

    def _free(self, *homes: deque[tuple[DeviceBuffer, set[int]]]) -> None:
        """Free what came back. (Of what is still lent, each frees itself when nothing refers to it and its home.)"""
        self._memory.device.synchronize()  # their readers may still run
        for home in homes:
            while home:
                home.popleft()[0].free()
