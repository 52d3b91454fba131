"""Arrays of other libraries, without a GPU: host memory stands for GPU memory, and nobody reads it as such."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch  # noqa: TID251
from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.cuda import arrays
from trtopt.cuda.arrays import UNKNOWN, DeviceArray, View, like, like_host, start, view

torch.set_num_threads(1)
Array = NDArray[Any]
TYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "bool", "uint8", "int8", "int32", "int64"]


class _Owner:
    pass


class _Gpu:
    """`__cuda_array_interface__` as given."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3, **changes
        }  # fmt: skip


class _Capsules:
    """DLPack of a chosen device, made from host memory."""

    def __init__(self, array: Array, device: tuple[int, int], *, strided: Array | None = None) -> None:
        self.array, self.device, self.strided, self.streams = array, device, strided, list[Any]()
        self.capsule: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        if self.capsule is not None:
            return self.capsule
        return (self.array if self.strided is None else self.strided).__dlpack__()


def _host(array: Array) -> Array:
    assert isinstance(array, np.ndarray)
    return array


def _ours(values: Array, owner: Any = None, **options: Any) -> DeviceArray:
    def copy(target: Array, address: int) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    return DeviceArray(values.ctypes.data, values.shape, values.dtype, 3, owner, copy_to_host=copy, **options)


def _tensor(capsule: Any) -> Any:
    return arrays._Tensor.from_address(arrays._pointer(capsule, b"dltensor"))


@pytest.mark.parametrize("name", TYPES)
def test_torch_host_tensors_share_their_memory_both_ways(name: str) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, name))
    array = _host(view(tensor, 5))
    assert array.dtype.name == name
    assert array.shape == (2, 3)
    assert array.ctypes.data == tensor.data_ptr()
    assert array.astype(np.float32).tolist() == [[0, 1, 1], [1, 0, 1]]
    back = like_host(tensor, array)
    assert back.dtype == tensor.dtype
    assert back.data_ptr() == tensor.data_ptr()
    assert back.float().tolist() == [[0, 1, 1], [1, 0, 1]]


def test_strides_are_kept_both_ways() -> None:
    tensor = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    for scattered in (tensor.t(), tensor[1:, ::2], tensor[2:, 3], torch.zeros(1).expand(4), torch.zeros(0, 3)):
        np.testing.assert_array_equal(_host(view(scattered, 5)), scattered.numpy())
    assert _host(view(torch.tensor(3.5), 5)).item() == 3.5
    values = np.arange(12.0).reshape(3, 4)
    for given in (values.T, values[:, ::-1], values[1:, ::2], values[:0], np.full((), 2.0)):
        np.testing.assert_array_equal(like_host(tensor, given).numpy(), given)
    brain = values.astype(ml_dtypes.bfloat16).T
    np.testing.assert_array_equal(like_host(tensor, brain).float().numpy(), values.T)
    backwards = _Capsules(values, (1, 0), strided=values[::-1, ::-1])
    np.testing.assert_array_equal(_host(view(backwards, 5)), values[::-1, ::-1])


def test_memory_outlives_the_tensor_it_came_from() -> None:
    tensor = torch.arange(1000)
    array = _host(view(tensor, 5))
    del tensor
    gc.collect()
    torch.full((1000,), -1)  # would reuse freed memory
    part = array[10:]
    del array
    gc.collect()
    torch.full((1000,), -1)
    assert part.sum() == 499455


def test_read_only_results_are_copied_for_torch() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = like_host(torch.zeros(1), array)
    tensor[0] = 9
    assert array[0] == 0


def test_pinned_and_host_dlpack_is_read_in_place() -> None:
    values = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for kind in (1, 3):
        given = _Capsules(values, (kind, 0))
        array = _host(view(given, 5))
        assert array.ctypes.data == values.ctypes.data
        assert given.streams == [None]


def test_cuda_dlpack_is_ordered_by_its_producer() -> None:
    values = np.ones((2, 3), np.int64)
    for stream, asked in ((77, 77), (0, 1)):
        given = _Capsules(values, (2, 1))
        found = view(given, stream)
        assert isinstance(found, View)
        assert (found.address, found.shape, found.dtype) == (values.ctypes.data, (2, 3), np.int64)
        assert (found.ordinal, found.stream, given.streams) == (1, None, [asked])


@pytest.mark.parametrize(
    ("changes", "stream"),
    [
        ({}, None),
        ({"stream": None}, None),
        ({"stream": 7}, 7),
        ({"stream": 0}, 1),
        ({"version": 2}, 1),
        ({"data": (4096, True)}, None),
        ({"strides": (12, 4)}, None),
        ({"shape": (1, 3), "strides": (999, 4)}, None),
        ({"shape": (0, 3), "strides": (1, 1)}, None),
    ],
)
def test_the_cuda_array_interface_says_what_to_wait_for_and_what_may_be_written(
    changes: dict[str, Any], stream: int | None
) -> None:
    shape, (address, read_only) = changes.get("shape", (2, 3)), changes.get("data", (4096, False))
    wanted = View(address, shape, np.dtype(np.float32), 0, stream, None, read_only)
    assert view(_Gpu(**changes), 5) == wanted


def test_dlpack_goes_before_an_interface_without_streams() -> None:
    given: Any = _Capsules(np.ones(2, np.float32), (2, 0))
    given.__cuda_array_interface__ = _Gpu(version=2).__cuda_array_interface__
    found = view(given, 9)
    assert isinstance(found, View)
    assert (found.stream, given.streams) == (None, [9])


def test_what_numpy_makes_an_array_of_is_taken() -> None:
    assert _host(view([[1, 2], [3, 4]], 5)).shape == (2, 2)
    assert _host(view(2.5, 5)).item() == 2.5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (_Gpu(strides=(4, 8)), "_Gpu in GPU memory isn't contiguous"),
        (_Gpu(mask=_Gpu()), "masked"),
        (_Capsules(np.ones((2, 3)), (2, 0), strided=np.ones((3, 2)).T), r"contiguous.*\.contiguous\(\)"),
        (_Capsules(np.ones(2), (10, 0)), "_Capsules lies in memory of DLPack's device type 10"),
        (
            torch.zeros(2, requires_grad=True),
            r"Tensor can't be read in place: .* require gradient, use tensor\.detach\(\)",
        ),
        (torch.tensor([1 + 2j]).conj().imag, r"view of negated values.*\.resolve_neg\(\)"),  # DLPack gives 2.0 for -2.0
        (torch._efficientzerotensor(2), "Tensor of shape 2 has no memory with values in it"),
        (torch.zeros(2, dtype=torch.complex64), "Tensor has DLPack's type 5 of 64 bits"),
        (torch.zeros(2, 2).to_sparse(), "Tensor can't be read in place"),
        (torch.zeros(2, device="meta"), "Tensor can't be read in place"),
        (object(), "object is no array"),
        (None, "NoneType is no array"),
        ([[1], [1, 2]], "list can't be made an array"),
    ],
)
def test_what_cannot_be_taken_is_named(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        view(given, 5)


@pytest.mark.parametrize("name", TYPES)
def test_a_result_goes_through_dlpack_and_back(name: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(np.dtype(getattr(ml_dtypes, name, name)))
    owner = _Owner()
    gone = weakref.ref(owner)
    result = _ours(values, owner)
    del owner
    capsule = result.__dlpack__(stream=-1)
    tensor = _tensor(capsule)
    assert (tensor.device.kind, tensor.device.ordinal) == (2, 3) == result.__dlpack_device__()
    assert tensor.dtype.lanes == 1

    foreign: Any = _Capsules(values, (2, 3))
    foreign.capsule = capsule
    found = view(foreign, 5)
    assert isinstance(found, View)
    assert (found.address, found.shape, found.dtype) == (values.ctypes.data, values.shape, values.dtype)
    assert result.streams == {UNKNOWN}
    del result, capsule
    gc.collect()
    assert gone() is not None
    del found, foreign
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("taken", [True, False])
def test_a_capsule_that_is_taken_over_or_dropped_frees_the_owner_when_done(taken: bool) -> None:
    owner = _Owner()
    gone, result = weakref.ref(owner), _ours(np.arange(3.0), owner)
    del owner
    if taken:
        capsule = result.__dlpack__(stream=-1)
        _tensor(capsule).device = arrays._Device(1, 0)  # host memory after all, so that torch may take it
        tensor = torch.from_dlpack(capsule)
        del capsule, result
        gc.collect()
        assert gone() is not None
        assert tensor.tolist() == [0, 1, 2]
        del tensor
    else:
        with pytest.raises(TypeError, match="PyCapsule"):  # dropped while an exception is under way, which stays
            int(result.__dlpack__(stream=-1))
        del result
    gc.collect()
    assert gone() is None


def test_a_tensor_may_outlive_the_interpreter() -> None:
    code = (
        "import numpy as np, torch\nfrom trtopt.cuda.arrays import like_host\n"
        "torch.kept = like_host(torch.zeros(1), np.ones(3))\nprint(torch.kept.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr


class _Point:
    """An event that notes which streams wait for it; -1: the host."""

    def __init__(self, waited: list[int]) -> None:
        self.waited = waited

    def before(self, stream: int) -> None:
        self.waited.append(stream)

    def synchronize(self) -> None:
        self.waited.append(-1)


@pytest.mark.parametrize(
    ("asked", "waits"), [(None, [1]), (0, [1]), (1, [1]), (9, [9]), (7, []), (-1, [])]
)  # fmt: skip
def test_consumers_wait_for_an_unfinished_result(asked: int | None, waits: list[int]) -> None:
    waited: list[int] = []
    result = _ours(np.ones(2), stream=7, ready=_Point(waited))
    result.__dlpack__(stream=asked)
    assert waited == waits
    assert result.__cuda_array_interface__["stream"] == 7


def test_our_own_results_are_ordered_without_a_protocol() -> None:
    waited: list[int] = []
    result = _ours(np.ones(2), stream=7, ready=_Point(waited))
    for stream in (7, 9):
        found = view(result, stream)
        assert isinstance(found, View)
        assert (found.stream, found.owner) == (None, result)
    assert waited == [9]
    assert result.streams == {7}  # the readers of ours say when they have read it
    unordered = view(_ours(np.ones(2), stream=7), 9)
    assert isinstance(unordered, View)
    assert unordered.stream == 7


def test_the_interface_of_results() -> None:
    values = np.ones((2, 3), np.float16)
    result = _ours(values)
    found = view(_Gpu(**result.__cuda_array_interface__), 5)
    assert isinstance(found, View)
    assert (found.address, found.dtype, found.stream) == (values.ctypes.data, np.float16, None)
    assert _ours(values, stream=0).__cuda_array_interface__["stream"] == 1
    for absent in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        assert not hasattr(_ours(values.astype(absent)), "__cuda_array_interface__")
    with pytest.raises(BufferError):
        result.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        result.__dlpack__(dl_device=(1, 0))


def test_a_result_looks_like_an_array_and_copies_to_the_host() -> None:
    values = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    result = _ours(values)
    assert (result.nbytes, repr(result)) == (24, "DeviceArray(2x3 float32 on GPU 3)")
    np.testing.assert_array_equal(result.numpy(), values)


def test_results_come_as_the_example_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    result, taken = _ours(np.ones(2)), list[Any]()
    for example in (np.ones(1), result, [1.0], 2.5, _Gpu()):
        assert like(example, result) is result
    monkeypatch.setattr(torch, "from_dlpack", taken.append)
    like(torch.zeros(1), result)
    like(torch.nn.Parameter(torch.zeros(1)), result)  # a subclass
    assert taken == [result, result]

    array = np.ones(2)
    for example in (np.ones(1), [1.0], 2.5):
        assert like_host(example, array) is array
    cupy_array: Any = type("ndarray", (), {"__module__": "cupy"})()
    monkeypatch.setitem(sys.modules, "cupy", torch)  # has from_dlpack, which must not be called with host memory
    assert like_host(cupy_array, array) is array


class _CupyMemory:
    """As cupy.cuda.UnownedMemory, and its MemoryPointer."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class _CupyArray:
    __module__ = "cupy"

    def __init__(self, shape: Any, dtype: Any, data: Any) -> None:
        self.shape, self.dtype, self.data, self._c_contiguous = shape, np.dtype(dtype), data, True

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strides = None if self._c_contiguous else (4, 8)
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "version": 3, "strides": strides,
            "stream": sys.modules["cupy"].cuda.get_current_stream().ptr or 1,
        }  # fmt: skip


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy's current one, of a CuPy that has what is used of it."""
    current = SimpleNamespace(ptr=0)
    cuda = SimpleNamespace(
        get_current_stream=lambda device=-1: current,
        UnownedMemory=_CupyMemory,
        MemoryPointer=lambda memory, offset: memory,
    )
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=cuda, ndarray=_CupyArray, from_dlpack=lambda result: "dlpack")
    )
    return current


def test_a_cupy_arrays_attributes_say_what_its_interface_does(stream: Any) -> None:
    """Also where another array has come to lie at the same address, and where CuPy works on another stream meanwhile."""
    for ptr, shape, dtype in ((4096, (2, 3), "f4"), (4096, (3, 2), "f4"), (4096, (2, 3), "i4"), (8192, (2, 3), "f4")):
        for handle in (0, 77):
            stream.ptr = handle
            for device in (0, 1):
                given = _CupyArray(shape, dtype, _CupyMemory(ptr, 24, None, device))
                plain: Any = _Gpu(**given.__cuda_array_interface__)
                plain.data = given.data
                assert view(given, 5) == view(plain, 5)
    given._c_contiguous = False
    with pytest.raises(UsageError, match="contiguous"):
        view(given, 5)


def test_a_result_becomes_a_cupy_array_on_the_same_memory(stream: Any) -> None:
    example = _CupyArray((1,), "f4", _CupyMemory(1, 4, None, 0))
    for handle in (0, 77):
        stream.ptr = handle
        result = _ours(np.ones((2, 3), np.float32))
        array = like(example, result)
        assert (array.shape, array.dtype, array.data.ptr) == ((2, 3), np.float32, result.address)
        assert (array.data.size, array.data.device_id) == (24, result.ordinal)
        assert array.data.owner is result
        assert result.streams == {handle or 1}  # where it may be read when it is let go of
    brain = _ours(np.ones(2).astype(ml_dtypes.bfloat16))
    assert like(example, brain) == "dlpack"  # it says itself whether it has such a type


def test_torch_exports_from_the_gpu_that_holds_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class Switched:
        def __init__(self, ordinal: int) -> None:
            self.ordinal = ordinal

        def __enter__(self) -> None:
            current.append(self.ordinal)

        def __exit__(self, *_: Any) -> None:
            current.pop()

    class Tensor(_Capsules):
        def __dlpack__(self, *, stream: Any = None) -> Any:
            if self.device[1] != current[-1]:  # as torch does
                raise BufferError("Can't export tensors on a different CUDA device index")
            return super().__dlpack__(stream=stream)

    Tensor.__module__ = "torch"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Switched)
    for ordinal in (0, 1):
        found = view(Tensor(np.ones(2), (2, ordinal)), 5)
        assert isinstance(found, View)
        assert found.ordinal == ordinal
    assert current == [0]


class Kind(np.ndarray[Any, Any]):
    """A class of one's own."""


@pytest.mark.parametrize(
    "array",
    [
        np.ones((3, 4), np.float32),
        np.arange(12)[5:],
        np.arange(12)[::-2],
        np.ones((4, 5, 6)).transpose(2, 0, 1)[1:],
        np.float16(3) * np.ones(()),
        np.ones((0, 3)),
        np.ones(5).view(Kind)[2:],
        np.frombuffer(b"read only", np.uint8),
        torch.arange(9).numpy()[3:],
        np.ones(3, ml_dtypes.bfloat16),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype} {array.shape}",
)
def test_where_an_array_starts(array: NDArray[Any]) -> None:
    array = np.asanyarray(array)
    assert start(array) == array.__array_interface__["data"][0] == array.ctypes.data
