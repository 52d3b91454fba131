"""The GPU: finding one, memory, streams, events and graphs. The only importer of cuda-python.

`probe` asks the driver through ctypes, so it needs no package and can't crash; call it before native code that would (TensorRT
8.6's Runtime() segfaults without a GPU). CUDA's current device belongs to the thread, and to whoever else uses CUDA there: what
needs it sets it and puts back what was there (`Device.current`); streams and graphs carry their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtopt.core.errors import DeviceError, require
from trtopt.core.library_output import Shared, variable
from trtopt.cuda.driver import Driver, driver_library, primary_context

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}
_UNLOADING = 4  # cudaErrorCudartUnloading: the process is ending and CUDA has already released everything
# Read by cuInit. Loading every kernel image at once makes a TensorRT 8.6 build many times slower.
_lazy_loading, _started = Shared(lambda: variable("CUDA_MODULE_LOADING", "LAZY")), threading.Event()
_CUDA_RUNTIME = "cuda.bindings.runtime"
_STAYS = contextlib.nullcontext()


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU. `compute_capability` is two digits as in sm89; `memory` is its total in bytes."""

    ordinal: int
    name: str
    compute_capability: int
    memory: int

    def __str__(self) -> str:
        return f"{self.name} (sm{self.compute_capability}, {self.memory / 2**30:.0f} GiB)"


@dataclass(frozen=True)
class Probe:
    """The driver's answer: True where a GPU can be used, else `reason` says why not; and the newest CUDA version that the
    driver runs, such as (13, 0)."""

    devices: tuple[DeviceInfo, ...] = ()
    driver: tuple[int, int] | None = None
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.devices)


def probe() -> Probe:
    """Look for GPUs without creating a CUDA context. Never raises."""
    library = driver_library()
    if library is None:
        return Probe(reason="no NVIDIA driver is installed (libcuda can't be loaded)")
    try:
        return _ask(library)
    except (AttributeError, DeviceError) as error:  # AttributeError: a libcuda without a function asked for
        return Probe(reason=str(error))


def require_gpu(purpose: str, ordinal: int = 0) -> DeviceInfo:
    """The GPU number `ordinal`, for `purpose` ("running an engine"); DeviceError where there is none, with the reason."""
    gpus = probe()
    if not gpus:
        raise DeviceError(f"{purpose} needs an NVIDIA GPU: {gpus.reason}")
    if not 0 <= ordinal < len(gpus.devices):
        raise DeviceError(f"{purpose}: GPU {ordinal} was asked for; this machine has 0 to {len(gpus.devices) - 1}")
    return gpus.devices[ordinal]


@contextlib.contextmanager
def current_gpu(ordinal: int) -> Iterator[None]:
    """Make a GPU this thread's current one in the block, without any package. (GPU 0 is what a thread has by itself.)"""
    if not ordinal:
        yield
        return
    driver, context = Driver.load(), primary_context(ordinal)
    before = None if driver is None else driver.current()
    if driver is None or context is None or driver.set_current(context):
        raise DeviceError(f"the NVIDIA driver can't use GPU {ordinal}")
    try:
        yield
    finally:
        driver.set_current(before)


def _ask(library: ctypes.CDLL) -> Probe:
    def call(function: str, *arguments: Any) -> None:
        code = getattr(library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            library.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode(errors="replace") if text.value else "no further text"
            raise DeviceError(f"the NVIDIA driver answers {function} with error {code} ({reason})")

    def integer(function: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        call(function, ctypes.byref(value), *arguments)
        return value.value

    with _STAYS if _started.is_set() else _lazy_loading:
        call("cuInit", 0)
    _started.set()
    version = integer("cuDriverGetVersion")
    devices: list[DeviceInfo] = []
    for ordinal in range(integer("cuDeviceGetCount")):
        device = ctypes.c_int(integer("cuDeviceGet", ordinal))
        name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        major, minor = (integer("cuDeviceGetAttribute", attribute, device) for attribute in (_MAJOR, _MINOR))
        devices.append(DeviceInfo(ordinal, name.value.decode(errors="replace"), 10 * major + minor, memory.value))
    driver = (version // 1000, version % 1000 // 10)
    return Probe(tuple(devices), driver, "" if devices else "the NVIDIA driver finds no GPU (CUDA_VISIBLE_DEVICES?)")


class _Current:
    """A block in which a device is the thread's current one; see `Device.current`."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: Device, before: int | None) -> None:
        self._device, self._before = device, before

    def __enter__(self) -> None:
        device = self._device
        if device.driver is None or device.driver.set_current(device.context):
            device.use()  # without the driver's functions; or it says what is wrong

    def __exit__(self, *_: object) -> None:
        if (driver := self._device.driver) is not None:
            driver.set_current(self._before)


class Device:
    """One GPU of this process, by its number as CUDA counts (CUDA_VISIBLE_DEVICES applies). Calling it calls a function of the
    CUDA runtime there, whose return code is checked.

    In tests `functions` stands in for cuda.bindings.runtime, without a `driver`; then `info` must be given too. `context` is
    what `Driver.current` gives where this device is current.

    Raises: DeviceError (no such GPU, or CUDA can't use it), MissingDependency (cuda-bindings isn't installed).
    """

    def __init__(self, ordinal: int = 0, *, functions: Any = None, info: DeviceInfo | None = None) -> None:
        self.info, self._process = info or require_gpu("running an engine", ordinal), os.getpid()
        self.functions = functions or require(_CUDA_RUNTIME, "gpu", "running an engine")
        kinds = self.functions.cudaMemcpyKind
        self.to_gpu, self.to_host = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        # Held during captures: to synchronize the whole device then would be an error, and break the capture.
        self.capturing = threading.Lock()
        self.driver = Driver.load() if functions is None else None
        self.context = None if self.driver is None else primary_context(self.info.ordinal)
        if self.context is None:
            self.driver = None
            self.use()

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Call it with the device as the current one; give its value (None, one value, or a tuple), or raise DeviceError."""
        with self.current():
            code, *values = getattr(self.functions, function)(*arguments)
        if code:
            self._check(function, code)
        return values[0] if len(values) == 1 else tuple(values) or None

    def current(self) -> AbstractContextManager[None]:
        """Make the device this thread's current one in the block; then what it was. (Without `driver` it stays.)"""
        before = None if self.driver is None else self.driver.current()
        return _STAYS if before is not None and before == self.context else _Current(self, before)

    def use(self) -> None:
        """Make the device this thread's current one; DeviceError where it can't be used, as in a process that was forked."""
        if os.getpid() != self._process:
            raise DeviceError("CUDA can't be used in a forked process; start workers with multiprocessing's 'spawn'")
        (code,) = self.functions.cudaSetDevice(self.info.ordinal)
        if code:
            self._check("cudaSetDevice", code)

    def _check(self, function: str, code: Any) -> None:
        """Raise DeviceError for the error code of a function."""
        if int(code) == _UNLOADING:
            return
        answers = self.functions.cudaGetErrorName(code)[1], self.functions.cudaGetErrorString(code)[1]
        name, text = (item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in answers)
        hint = {
            "cudaErrorInsufficientDriver": "; install cuda-bindings of the CUDA version that the driver supports",
            "cudaErrorMemoryAllocation": "; free GPU memory, or use a smaller batch",
        }.get(name, "")
        raise DeviceError(f"{function} failed: {name} ({text}){hint}")

    def synchronize(self) -> None:
        """Wait until all work given to this GPU is done."""
        with self.capturing:
            self("cudaDeviceSynchronize")

    def idle(self, stream: int) -> bool:
        """Return True if all work given to a stream, of whatever library, is done. The default one is the current device's."""
        # Another answer than 0 is an error or "not ready": take it as busy.
        return not (self.functions.cudaStreamQuery(stream)[0] if self.driver is None else self.driver.query(stream))

    def fetch(self, target: NDArray[Any], address: int) -> None:
        """Fill an array in host memory with what is at an address on the GPU."""
        self("cudaMemcpy", target.ctypes.data, address, target.nbytes, self.to_host)


_Self = TypeVar("_Self", bound="Resource")


class Resource:
    """Something CUDA gave us: freed once, by `free`, by `with`, or when nothing refers to it any more."""

    def __init__(self, device: Device, raw: Any, free: str) -> None:
        self._device, self._raw = device, raw
        self._finalizer = weakref.finalize(self, _release, device, free, raw, os.getpid())

    @property
    def raw(self) -> Any:
        """The handle as cuda-python's functions take it; DeviceError once it was freed."""
        raw = self._raw
        if raw is None:
            raise DeviceError(f"this {type(self).__name__} was freed; it can't be used any more")
        return raw

    @property
    def handle(self) -> int:
        """The handle as an integer, as TensorRT takes it."""
        return int(self.raw)

    @property
    def freed(self) -> bool:
        return self._raw is None

    def free(self) -> None:
        """Give it back. A second call does nothing."""
        self._raw = None
        self._finalizer()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


def _release(device: Device, function: str, raw: Any, process: int) -> None:
    if os.getpid() == process:  # a forked child holds copies of handles that mean nothing there
        after_capture(lambda: device(function, raw))


_capture = threading.local()  # `later`: what is to be done when its capture has ended; None: none is under way


def after_capture(action: Callable[[], object]) -> None:
    """Do it now; or, where this thread is capturing a CUDA graph, when that has ended: for what the garbage collector may call
    anywhere, since CUDA refuses to free in a thread that captures, and the capture is broken."""
    if (later := getattr(_capture, "later", None)) is None:
        action()
    else:
        later.callback(action)


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    with contextlib.ExitStack() as later:
        _capture.later = later
        try:
            yield
        finally:
            _capture.later = None


class DeviceBuffer(Resource):
    """`nbytes` of GPU memory."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        super().__init__(device, device("cudaMalloc", max(1, nbytes)), "cudaFree")
        self.address = self.handle  # for who keeps this alive


class HostBuffer(Resource):
    """`nbytes` of page-locked host memory, which the GPU copies from and to asynchronously."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        address = device("cudaHostAlloc", max(1, nbytes), device.functions.cudaHostAllocPortable)
        super().__init__(device, address, "cudaFreeHost")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.handle, False), "version": 3}

    def array(self, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """A view of the first bytes. It keeps the buffer alive, but not after `free`: don't touch the view then."""
        nbytes = np.dtype(dtype).itemsize * math.prod(shape)
        if nbytes > self.nbytes:
            raise DeviceError(f"{np.dtype(dtype)} of shape {shape} takes {nbytes} bytes; the buffer has {self.nbytes}")
        return np.asarray(self)[:nbytes].view(dtype).reshape(shape)


class Event(Resource):
    """A point in a stream's work; with `timing`, milliseconds between two of them can be asked."""

    def __init__(self, device: Device, timing: bool = True) -> None:
        flags = device.functions.cudaEventDefault if timing else device.functions.cudaEventDisableTiming
        super().__init__(device, device("cudaEventCreateWithFlags", flags), "cudaEventDestroy")

    def synchronize(self) -> None:
        """Wait until the work before it is done."""
        self._device("cudaEventSynchronize", self.raw)

    def before(self, stream: int) -> None:
        """Let any stream wait for the work before it."""
        self._device("cudaStreamWaitEvent", stream, self.raw, 0)

    def milliseconds_since(self, start: Event) -> float:
        """GPU time from `start` to this; both must have been reached."""
        return float(self._device("cudaEventElapsedTime", start.raw, self.raw))


class Graph(Resource):
    """Captured work that one call launches."""

    def __init__(self, device: Device, executable: Any) -> None:
        super().__init__(device, executable, "cudaGraphExecDestroy")

    def launch(self, stream: int) -> None:
        self._device("cudaGraphLaunch", self.raw, stream)


class Stream(Resource):
    """Work in order. It doesn't synchronize with the legacy default stream."""

    def __init__(self, device: Device) -> None:
        handle = device("cudaStreamCreateWithFlags", device.functions.cudaStreamNonBlocking)
        super().__init__(device, handle, "cudaStreamDestroy")

    def synchronize(self) -> None:
        """Wait until its work is done; DeviceError where work before this failed."""
        self._device("cudaStreamSynchronize", self.raw)

    def to_device(self, target: DeviceBuffer, source: HostBuffer, nbytes: int) -> None:
        """Copy the first `nbytes`; returns at once, so leave `source` alone until the stream gets there."""
        if nbytes > min(target.nbytes, source.nbytes):
            raise DeviceError(f"copying {nbytes} bytes from a buffer of {source.nbytes} to one of {target.nbytes}")
        self._device("cudaMemcpyAsync", target.handle, source.handle, nbytes, self._device.to_gpu, self.raw)

    def record(self, event: Event) -> None:
        self._device("cudaEventRecord", event.raw, self.raw)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Record what `enqueue` gives to this stream, without running it; buffers and shapes that it uses are fixed in the
        graph. Other threads may allocate and free meanwhile; what this one lets go of is freed afterwards. DeviceError where
        something in it can't be captured; the stream is usable again."""
        functions = self._device.functions
        mode = functions.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        with _capturing():
            self._device("cudaStreamBeginCapture", self.raw, mode)
            try:
                enqueue()
            except BaseException:
                code, graph = functions.cudaStreamEndCapture(self.raw)
                if not code and graph is not None:
                    functions.cudaGraphDestroy(graph)
                functions.cudaGetLastError()  # a broken capture leaves its error behind; the next call must not report it
                raise
            try:
                graph = self._device("cudaStreamEndCapture", self.raw)
            except DeviceError:
                functions.cudaGetLastError()
                raise
        try:
            executable = Graph(self._device, self._device("cudaGraphInstantiate", graph, 0))
        finally:
            self._device("cudaGraphDestroy", graph)
        self._device("cudaGraphUpload", executable.raw, self.raw)
        return executable
