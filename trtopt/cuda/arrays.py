"""Arrays of other libraries: where their bytes are, without importing any of them. The only place that knows DLPack.

`__cuda_array_interface__` (version 3) and DLPack are documented at numba.readthedocs.io and dmlc.github.io/dlpack.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.core.values import x
from trtopt.cuda.tensors import Shape
from trtopt.data.convert import numpy_dtype

if TYPE_CHECKING:
    from trtopt.cuda.device import Event

_CPU, _CUDA, _PINNED = 1, 2, 3  # DLDeviceType
LEGACY, UNKNOWN = 1, -1  # streams as DLPack names them: the default one, and none
_NAMES = {  # DLPack's code and bits of a type → its name
    **{(code, bits): f"{kind}{bits}" for code, kind in enumerate(("int", "uint", "float")) for bits in (8, 16, 32, 64)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
}
del _NAMES[2, 8]


@dataclass(slots=True)
class View:
    """Contiguous GPU memory of an array, which `stream` still makes (1: the legacy default one); `owner` keeps it (None:
    whoever holds the array does)."""

    address: int
    shape: Shape
    dtype: np.dtype[Any]
    ordinal: int
    stream: int | None
    owner: Any = None
    read_only: bool = False


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_NAME = b"dltensor"
_STAYS = contextlib.nullcontext()


def view(obj: Any, stream: int) -> NDArray[Any] | View:
    """Find out where the bytes are of a NumPy array, or of anything with DLPack, `__cuda_array_interface__`, or that NumPy can
    make an array of. Nothing is copied. `stream` is the handle of the CUDA stream that will read or write it."""
    if isinstance(obj, np.ndarray):
        if isinstance(obj, np.ma.MaskedArray):
            raise UsageError(f"{type(obj).__name__} is masked: fill it first (.filled(…))")
        return obj
    if isinstance(obj, DeviceArray):
        return obj.view(stream)
    if _root(obj.__class__) == "cupy" and (cupy_view := _from_cupy(obj)) is not None:
        return cupy_view
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj, stream or 1)
    if (interface := getattr(obj, "__cuda_array_interface__", None)) is not None:
        return _from_interface(obj, interface)
    try:
        array = np.asarray(obj)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{type(obj).__name__} can't be made an array: {error}") from error
    if array.dtype.hasobject:
        raise UsageError(f"{type(obj).__name__} is no array: give a NumPy array, a tensor, or numbers")
    return array


def views(objs: Iterable[Any], stream: int, names: Sequence[str], *, write: bool = False) -> list[NDArray[Any] | View]:
    """Return the `view` of each input, or with `write` of each array for results; an error names it."""
    found: list[NDArray[Any] | View] = []
    try:
        found.extend(view(obj, stream) for obj in objs)  # those before a wrong one stay in it
    except UsageError as error:
        name = names[len(found)]
        raise UsageError(f"{f'out[{name!r}]' if write else f'input {name!r}'}: {error}") from None
    return found


def host_views(objs: Iterable[Any], names: Sequence[str], instead: str) -> list[NDArray[Any]]:
    """Return the arrays of inputs in host memory; UsageError, which ends with `instead`, for one in GPU memory."""
    found = views(objs, 0, names)
    for name, array in zip(names, found):
        if isinstance(array, View):
            raise UsageError(f"input {name!r} lies in GPU memory; {instead}")
    return found  # type: ignore[return-value]


def _start(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _read_start(array: NDArray[Any]) -> int:
    # NumPy's C ABI: behind what every object begins with, an array's first field is that address.
    return ctypes.c_size_t.from_address(id(array) + object.__basicsize__).value


_some = np.empty(3)[1:]
_is_read = sys.implementation.name == "cpython" and _read_start(_some) == _start(_some)
start = _read_start if _is_read else _start
"""The address of an array's first element. Each call asks for it; reading it is much faster than asking NumPy."""


def writable(obj: Any) -> bool:
    """Return True if what is written into the view of an array gets into the array itself."""
    if isinstance(obj, np.ndarray):
        return True
    shares_memory = hasattr(obj, "__dlpack__") or hasattr(obj, "__cuda_array_interface__")
    return shares_memory and _root(obj.__class__) not in ("jax", "jaxlib")  # jax's arrays never change


def gpu_of(obj: Any) -> int | None:
    """The GPU that an array is on; None for one in host memory."""
    if hasattr(obj, "__dlpack_device__"):
        kind, ordinal = obj.__dlpack_device__()
        return int(ordinal) if int(kind) == _CUDA else None
    return 0 if hasattr(obj, "__cuda_array_interface__") else None  # which says nothing of GPUs


def stream_handle(stream: Any) -> int:
    """A stream's handle, from an integer, a torch or CuPy stream, or anything with `__cuda_stream__`."""
    if isinstance(stream, int):
        return stream or 1  # 0 is the legacy default stream too
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle or 1
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1]) or 1
    raise UsageError(f"stream is {type(stream).__name__}; a CUDA stream's handle or a torch or CuPy stream is needed")


@functools.lru_cache(256)
def _root(kind: type[Any]) -> str:
    """The library that a type or its ancestor comes from, if it is one that arrays are given back to."""
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    for root in roots:
        if root in ("torch", "cupy", "jax", "jaxlib"):
            return root
    return roots[0]


def _from_cupy(array: Any) -> View | None:
    """Read off a CuPy array's attributes what its interface says, which is faster. None: no plain one in C order."""
    cupy = sys.modules["cupy"]
    if type(array) is not cupy.ndarray or not getattr(array, "_c_contiguous", False):
        return None
    memory, stream = array.data, cupy.cuda.get_current_stream().ptr or LEGACY
    return View(memory.ptr, array.shape, array.dtype, memory.device_id, stream)


def _from_interface(obj: Any, interface: dict[str, Any]) -> View:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    if interface.get("mask") is not None:
        raise UsageError(f"{type(obj).__name__} in GPU memory is masked: fill it first")
    strides = interface.get("strides")
    if strides is not None and not _contiguous(shape, strides, dtype.itemsize):
        raise _scattered(obj)
    stream: int | None = interface.get("stream") if interface["version"] >= 3 else 1
    if stream == 0:  # forbidden there; the legacy stream is the safe reading
        stream = 1
    address, read_only = interface["data"]
    ordinal = int(getattr(getattr(obj, "data", None), "device_id", 0))  # CuPy's
    return View(address or 0, shape, dtype, ordinal, stream, None, bool(read_only))


def _from_dlpack(obj: Any, stream: int) -> NDArray[Any] | View:
    name = type(obj).__name__
    if hasattr(obj, "is_neg") and obj.is_neg():  # torch's DLPack gives such values with the other sign
        raise UsageError(f"{name} is a view of negated values, which arrays don't know: give it with .resolve_neg()")
    try:
        kind, ordinal = (int(part) for part in obj.__dlpack_device__())
        if kind not in (_CPU, _CUDA, _PINNED):
            raise UsageError(f"{name} lies in memory of DLPack's device type {kind}; host or CUDA memory is needed")
        if kind == _CUDA:
            torch: Any = sys.modules.get("torch") if _root(obj.__class__) == "torch" else None
            elsewhere = torch is not None and torch.cuda.current_device() != ordinal
            with torch.cuda.device(ordinal) if elsewhere else _STAYS:  # torch exports only from the current GPU
                capsule = obj.__dlpack__(stream=stream)
        else:
            capsule = obj.__dlpack__()
        tensor = _Tensor.from_address(_pointer(capsule, _NAME))  # it lives as long as the capsule
    except (BufferError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"{name} can't be read in place: {error}") from error
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    if (code, bits) not in _NAMES or lanes != 1:
        raise UsageError(f"{name} has DLPack's type {code} of {bits} bits x {lanes}; it can't be taken")
    dtype = numpy_dtype(_NAMES[code, bits])
    strides = tensor.strides[: tensor.ndim] if tensor.strides and tensor.ndim else None
    address = (tensor.data or 0) + tensor.byte_offset
    if not address and math.prod(shape):  # torch's fake tensors, and its zeros without memory
        raise UsageError(f"{name} of shape {x(shape)} has no memory with values in it: give one that was computed")
    if kind == _CUDA:
        if strides is not None and not _contiguous(shape, strides, 1):
            raise _scattered(obj)
        return View(address, shape, dtype, ordinal, None, (obj, capsule))
    if 0 in shape:  # its address may be none, which older NumPy doesn't take
        return np.empty(shape, dtype)
    steps = None if strides is None else tuple(step * dtype.itemsize for step in strides)
    return _array_at(address, shape, steps, _plain(dtype), capsule).view(dtype)


def _array_at(address: int, shape: Shape, strides: Shape | None, dtype: np.dtype[Any], owner: Any) -> NDArray[Any]:
    """Return an array of the memory at an address, which keeps `owner`."""
    interface = {"data": (address, False), "shape": shape, "strides": strides, "typestr": dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=owner))


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A type of NumPy's own of the same size, for bfloat16 and its like."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def _contiguous(shape: Shape, strides: Any, stride: int) -> bool:
    """Return True if steps are those of C order, `stride` being the innermost one."""
    steps = itertools.accumulate(reversed(shape), operator.mul, initial=stride)
    given = zip(reversed(shape), reversed(list(strides)), steps)
    return 0 in shape or all(size == 1 or step == wanted for size, step, wanted in given)


def _scattered(obj: Any) -> UsageError:
    return UsageError(
        f"{type(obj).__name__} in GPU memory isn't contiguous: make it so first (.contiguous(), ascontiguousarray)"
    )


class DeviceArray:
    """A result in GPU memory, for any library with DLPack or `__cuda_array_interface__`; `numpy()` copies it to the host.

    It has shape, dtype and nbytes as a NumPy array, `ordinal` and `address`; on `streams` it may be read or written when
    nothing refers to it any more (`trtopt.cuda.memory.Block`).
    """

    __slots__ = "__weakref__", "_copy", "_owner", "_ready", "_stream", "address", "dtype", "ordinal", "shape", "streams"

    def __init__(
        self,
        address: int,
        shape: Shape,
        dtype: np.dtype[Any],
        ordinal: int,
        owner: Any,
        *,
        copy_to_host: Callable[[NDArray[Any], int], None],
        stream: int | None = None,
        ready: Event | None = None,
        streams: set[int] | None = None,
    ) -> None:
        self.address, self.shape, self.dtype, self.ordinal = address, shape, dtype, ordinal
        self._owner, self._copy = owner, copy_to_host
        self.streams = set() if streams is None else streams
        self.written(stream, ready)

    def written(self, stream: int | None, ready: Event | None) -> None:
        """New content comes in the order of `stream`, there when `ready` is; None: it is there."""
        self._stream, self._ready = LEGACY if stream == 0 else stream, ready
        if self._stream is not None:
            self.streams.add(self._stream)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, stream: int) -> View:
        """Return a view for the stream that uses it next, which is made to wait if the result isn't finished."""
        return View(self.address, self.shape, self.dtype, self.ordinal, self._await(stream or 1), self)

    def _await(self, consumer: int) -> int | None:
        """Make a stream wait; the stream that it must still wait for if that can't be done here."""
        if self._stream is None or consumer == self._stream:
            return None
        if self._ready is None:
            return self._stream
        self._ready.before(consumer)  # the event, not the stream: that may have gone, or have more to do by now
        return None

    def given(self, stream: int | None) -> None:
        """Somebody gets it who uses it on that stream, which is made to wait (DLPack's numbers; -1: on none)."""
        if stream != UNKNOWN:
            self._await(stream or LEGACY)
        self.streams.add(stream or LEGACY)

    def numpy(self) -> NDArray[Any]:
        """A copy in host memory; waits until the result is there."""
        target = np.empty(self.shape, self.dtype)
        if self._ready is not None:
            self._ready.synchronize()
        self._copy(target, self.address)
        return target

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.isbuiltin != 1:  # an AttributeError, so that hasattr() says no
            raise AttributeError(f"{self.dtype} has no place in the CUDA array interface; use DLPack")
        self.streams.add(UNKNOWN)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": self._stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.ordinal

    def __dlpack__(
        self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != (_CUDA, self.ordinal)):
            raise BufferError("only the memory itself is given, on its own GPU, without a copy")
        self.given(stream)
        memory = _array_at(self.address, self.shape, None, _plain(self.dtype), self)
        return _capsule(memory, self.dtype, (_CUDA, self.ordinal))

    def __repr__(self) -> str:
        return f"DeviceArray({x(self.shape)} {self.dtype} on GPU {self.ordinal})"


def _capsule(array: NDArray[Any], dtype: np.dtype[Any], device: tuple[int, int]) -> Any:
    """Return a DLPack capsule of contiguous memory, which lives until its consumer lets go."""
    # NumPy's capsule, corrected: its deleters are in C. One of ours in Python breaks when the capsule is dropped while an
    # exception is under way, and crashes when a tensor outlives the interpreter.
    code = next((code for (code, _), name in _NAMES.items() if name == dtype.name), None)
    if code is None:
        raise BufferError(f"{dtype} has no place in DLPack")
    capsule = array.__dlpack__()
    tensor = _Tensor.from_address(_pointer(capsule, _NAME))
    tensor.device, tensor.dtype.code = _Device(*device), code
    return capsule


class _Exported:
    """Host memory for a library's from_dlpack."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(self.array.view(_plain(self.array.dtype)), self.array.dtype, (_CPU, 0))


def like(example: Any, result: DeviceArray) -> Any:
    """The result as `example`'s library has arrays; a DeviceArray where that has no `from_dlpack`."""
    take = _taker(example)
    return result if take is None else take(result)


def _cupy_array(result: DeviceArray) -> Any:
    """Make an array as CuPy's `from_dlpack` does, which is much slower."""
    cupy = sys.modules["cupy"]
    if result.dtype.isbuiltin != 1:
        return cupy.from_dlpack(result)
    result.given(cupy.cuda.get_current_stream(result.ordinal).ptr)
    memory = cupy.cuda.UnownedMemory(result.address, result.nbytes, result, result.ordinal)
    return cupy.ndarray(result.shape, result.dtype, cupy.cuda.MemoryPointer(memory, 0))


def like_host(example: Any, array: NDArray[Any]) -> Any:
    """The array as `example`'s library has arrays, on the same memory; NumPy's where it has none on the host."""
    take = None if _root(example.__class__) == "cupy" else _taker(example)  # CuPy has no arrays in host memory
    if take is None:
        return array
    # What torch can't share: memory that mustn't be written, and negative steps.
    shareable = array.flags.writeable and all(step >= 0 for step in array.strides)
    return take(_Exported(array if shareable else array.copy()))


def _taker(example: Any) -> Callable[[Any], Any] | None:
    root = _root(example.__class__)
    if root in ("builtins", "numpy", "trtopt"):
        return None
    if root == "cupy":
        return _cupy_array
    if root in ("jax", "jaxlib"):
        take: Callable[[Any], Any] = importlib.import_module("jax.dlpack").from_dlpack
        return take
    return getattr(sys.modules.get(root), "from_dlpack", None)
