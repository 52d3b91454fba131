"""Arrays of other libraries: where their bytes are, without importing any of them. The only place that knows DLPack.

`__cuda_array_interface__` (version 3) and DLPack are documented at numba.readthedocs.io and dmlc.github.io/dlpack.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.errors import UsageError
from trtopt.runtime.tensors import Shape, numpy_dtype, x

_CPU, _CUDA, _PINNED = 1, 2, 3  # DLDeviceType
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_NAMED = {(4, 16): "bfloat16", (10, 8): "float8_e4m3fn"}
_KINDS = {0: "int", 1: "uint", 2: "float"}


@dataclass(frozen=True)
class View:
    """GPU memory of somebody else, contiguous. `stream`: the one that still makes it (1: the legacy default one)."""

    address: int
    shape: Shape
    dtype: np.dtype[Any]
    ordinal: int
    stream: int | None
    owner: Any


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


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_api = ctypes.pythonapi
_new_capsule, _is_valid, _pointer = _api.PyCapsule_New, _api.PyCapsule_IsValid, _api.PyCapsule_GetPointer
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
# In a destructor the capsule has no reference left to count: it goes by its address.
_raw = ctypes.PyDLL(None)
_raw_is_valid, _raw_pointer = _raw.PyCapsule_IsValid, _raw.PyCapsule_GetPointer
_raw_is_valid.restype, _raw_is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_raw_pointer.restype, _raw_pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
_NAME = b"dltensor"
_exported: dict[int, tuple[Any, ...]] = {}  # address of a DLManagedTensor → what it needs alive


def _drop(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def _let_go(capsule: int) -> None:
    if _raw_is_valid(capsule, _NAME):  # nobody took it over: it would be called used_dltensor
        _exported.pop(_raw_pointer(capsule, _NAME), None)


_delete, _unclaimed = _Deleter(_drop), _Destructor(_let_go)


def view(obj: Any, stream: int) -> NDArray[Any] | View:
    """Where an array's bytes are; nothing is copied.

    Args:
        obj: a NumPy array, or anything with DLPack, `__cuda_array_interface__`, or that NumPy makes an array of.
        stream: handle of the CUDA stream that will read or write it.

    Raises:
        UsageError: it is on another kind of device, not contiguous in GPU memory, or of an unknown type.
    """
    if isinstance(obj, np.ndarray):
        return obj
    if isinstance(obj, DeviceArray):
        return obj.view(stream)
    interface = getattr(obj, "__cuda_array_interface__", None) if not hasattr(obj, "__dlpack__") else None
    if interface is None and not _is_torch(obj):
        interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is not None and (interface["version"] >= 3 or not hasattr(obj, "__dlpack__")):
        return _from_interface(obj, interface)
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj, stream)
    return np.asarray(obj)


def _is_torch(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] == "torch"  # its interface of version 2 says nothing of streams


def _from_interface(obj: Any, interface: dict[str, Any]) -> View:
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is not None and not _contiguous(shape, [size // dtype.itemsize for size in strides]):
        raise _scattered(obj)
    device = getattr(obj, "device", None)
    ordinal = getattr(device, "id", getattr(device, "index", None))
    pending = interface.get("stream") if interface["version"] >= 3 else 1
    return View(int(interface["data"][0]), shape, dtype, int(ordinal or 0), pending, obj)


def _from_dlpack(obj: Any, stream: int) -> NDArray[Any] | View:
    kind, ordinal = (int(part) for part in obj.__dlpack_device__())
    if kind not in (_CPU, _CUDA, _PINNED):
        raise UsageError(
            f"{type(obj).__name__} lies on a device of DLPack's kind {kind}; host or CUDA memory is needed"
        )
    try:
        capsule = obj.__dlpack__(stream=stream) if kind == _CUDA else obj.__dlpack__()
    except (BufferError, RuntimeError, TypeError) as error:
        raise UsageError(f"{type(obj).__name__} can't be read in place ({error}); detach it, or convert it") from error
    if not _is_valid(capsule, _NAME):
        raise UsageError(f"{type(obj).__name__} gives a DLPack capsule of an unknown kind")
    tensor = _Managed.from_address(_pointer(capsule, _NAME)).tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = _dtype(tensor.dtype, obj)
    strides = tensor.strides[: tensor.ndim] if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    if kind == _CUDA:
        if strides is not None and not _contiguous(shape, strides):
            raise _scattered(obj)
        return View(address, shape, dtype, ordinal, None, (obj, capsule))
    return _host_array(address, shape, strides, dtype, capsule)


def _host_array(address: int, shape: Shape, strides: Any, dtype: np.dtype[Any], owner: Any) -> NDArray[Any]:
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    steps = list(strides) if strides is not None else [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, steps))
    held = (ctypes.c_uint8 * (reach * dtype.itemsize)).from_address(address)
    held.owner = owner  # type: ignore[attr-defined]  # an attribute that keeps the memory alive with the array
    flat = np.frombuffer(memoryview(held), np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * dtype.itemsize for step in steps])


def _dtype(kind: _Type, obj: Any) -> np.dtype[Any]:
    named = _NAMED.get((kind.code, kind.bits))
    if kind.lanes == 1:
        if named:
            return numpy_dtype(named)
        if kind.code == 6:
            return np.dtype(np.bool_)
        if kind.code in _KINDS and kind.bits in (8, 16, 32, 64):
            return np.dtype(f"{_KINDS[kind.code]}{kind.bits}")
    raise UsageError(
        f"{type(obj).__name__} has DLPack's type {kind.code} of {kind.bits} bits x {kind.lanes}; it can't be taken"
    )


def _contiguous(shape: Shape, strides: Any) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(list(strides))):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _scattered(obj: Any) -> UsageError:
    return UsageError(
        f"{type(obj).__name__} in GPU memory isn't contiguous: make it so first (.contiguous(), ascontiguousarray)"
    )


class DeviceArray:
    """A result in GPU memory, for any library with DLPack or `__cuda_array_interface__`; `numpy()` copies it to the host.

    Attributes:
        shape, dtype, nbytes: as of a NumPy array.
        ordinal, address: the GPU and where on it.
    """

    def __init__(
        self,
        address: int,
        shape: Shape,
        dtype: np.dtype[Any],
        ordinal: int,
        owner: Any,
        *,
        stream: int | None = None,
        ready: Callable[[int], None] | None = None,
        copy_to_host: Callable[[NDArray[Any], int], None] | None = None,
    ) -> None:
        self.address, self.shape, self.dtype, self.ordinal = address, shape, dtype, ordinal
        self._owner, self._stream, self._ready, self._copy = owner, stream, ready, copy_to_host

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, stream: int) -> View:
        """For the stream that reads it next."""
        return View(self.address, self.shape, self.dtype, self.ordinal, self._stream, self)

    def numpy(self) -> NDArray[Any]:
        """A copy in host memory; waits until the result is there."""
        if self._copy is None:
            raise UsageError("this array can't be copied to the host")
        target = np.empty(self.shape, self.dtype)
        self._copy(target, self.address)
        return target

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind not in "iufb":  # an AttributeError, so that hasattr() says no
            raise AttributeError(f"{self.dtype} has no place in the CUDA array interface; use DLPack")
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
        consumer = stream or 1
        if self._stream is not None and self._ready is not None and stream != -1 and consumer != self._stream:
            self._ready(consumer)
        return export(self.address, self.shape, self.dtype, (_CUDA, self.ordinal), self)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray({x(self.shape)} {self.dtype} on GPU {self.ordinal})"


def export(address: int, shape: Shape, dtype: np.dtype[Any], device: tuple[int, int], owner: Any) -> Any:
    """A DLPack capsule; `owner` lives until its consumer lets go."""
    managed = _Managed()
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    bits = dtype.itemsize * 8
    code = next((code for (code, width), name in _NAMED.items() if name == dtype.name), None)
    tensor = managed.tensor
    tensor.data, tensor.byte_offset = address, 0
    tensor.device = _Device(*device)
    tensor.ndim = len(shape)
    tensor.dtype = _Type(_CODES[dtype.kind] if code is None else code, bits, 1)
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    where = ctypes.addressof(managed)
    _exported[where] = managed, sizes, owner
    return _new_capsule(where, _NAME, _unclaimed)


class _Exported:
    """Host memory for a library's from_dlpack."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        array = self.array
        return export(array.ctypes.data, array.shape, array.dtype, (_CPU, 0), array)


def like(example: Any, result: DeviceArray) -> Any:
    """The result as `example`'s library has arrays; a DeviceArray where that has no `from_dlpack`."""
    take = _taker(example)
    return result if take is None else take(result)


def like_host(example: Any, array: NDArray[Any]) -> Any:
    """The array as `example`'s library has arrays, on the same memory; NumPy's where that has no `from_dlpack`."""
    take = _taker(example)
    return array if take is None else take(_Exported(array))


def _taker(example: Any) -> Callable[[Any], Any] | None:
    root = type(example).__module__.partition(".")[0]
    if root in ("builtins", "numpy", "trtopt"):
        return None
    if root in ("jax", "jaxlib"):
        taken: Callable[[Any], Any] = importlib.import_module("jax.dlpack").from_dlpack
        return taken
    return getattr(sys.modules.get(root), "from_dlpack", None)
