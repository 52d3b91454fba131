"""Everything that a session does with GPU memory, on networks of a few elementwise kernels: quick, exact, and what
compute-sanitizer can look at (its memcheck ends processes that run some of TensorRT 8.6's convolution kernels).

`scripts/gpu_check --memcheck` runs them under it, with the engines that were kept: to build them there takes minutes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from full_runtime import LEAN
from lite0 import settings
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from trtopt.builder.construction import build
from trtopt.core.errors import EngineMismatch, UsageError
from trtopt.cuda.arrays import DeviceArray
from trtopt.cuda.device import Device
from trtopt.runtime.session import Session

WIDTH = 40_000  # a sample's 160 KB come back by a copy; the one number of `least` is written to the host by the GPU
MOST = 8


@pytest.fixture(scope="module")
def folder(generation: Any, gpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("TRTOPT_GPU_ENGINES")
    return Path(kept) if kept else tmp_path_factory.mktemp("small")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Path:
    """y = relu(2x - 1), least = the smallest of each sample of y; batches of 1 to 8."""
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["double"]),
        helper.make_node("Sub", ["double", "one"], ["less"]),
        helper.make_node("Relu", ["less"], ["y"]),
        helper.make_node("ReduceMin", ["y"], ["least"], axes=[1], keepdims=0),
    ]
    constants = [
        numpy_helper.from_array(np.float32(value).reshape(1, 1), name) for name, value in (("two", 2), ("one", 1))
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in "xy")
    graph = helper.make_graph(
        nodes, "small", [x], [y, helper.make_tensor_value_info("least", TensorProto.FLOAT, ["n"])], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "small.onnx")
    shapes = [f"x:1x{WIDTH},2x{WIDTH},{MOST}x{WIDTH}"]
    return build(folder / "small.onnx", folder / "small.engine", shapes=shapes, **settings(folder)).engine


@pytest.fixture
def session(engine: Path) -> Iterator[Session]:
    with Session(engine, contexts=4, graphs=3) as opened:
        yield opened


def _x(batch: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(1, 1, (batch, WIDTH)).astype(np.float32)


def _check(found: Any, x: NDArray[np.float32]) -> None:
    y = np.maximum(2 * x - 1, 0)
    np.testing.assert_allclose(found["y"], y, rtol=1e-6, atol=1e-6)  # a fused multiply-add rounds once
    np.testing.assert_allclose(found["least"], found["y"].min(axis=1))


def test_shapes_come_and_go(session: Session) -> None:
    """More shapes than have graphs; each first alone, then again and again."""
    for round_ in range(4):
        for batch in (1, 8, 2, 5, 1, 3, 8):
            x = _x(batch, round_)
            _check(session.run({"x": x}), x)


def test_arrays_of_every_kind(session: Session) -> None:
    cupy = pytest.importorskip("cupy")
    pinned, target = session.pinned("x", (2, WIDTH)), np.empty((2, WIDTH), np.float32)
    given, result = cupy.empty((2, WIDTH), cupy.float32), cupy.empty((2, WIDTH), cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    for seed in range(12):
        x = _x(2, seed)
        pinned[...] = x
        given.set(x)
        _check(session.run({"x": pinned}), x)
        _check(session.run({"x": np.asfortranarray(x)}, out={"y": target}), x)
        for options in ({}, {"out": {"y": result}}, {"stream": stream}, {"stream": stream, "out": {"y": result}}):
            found = session.run({"x": given}, **options)
            stream.synchronize()
            _check({name: cupy.asnumpy(array) for name, array in found.items()}, x)
        where = given.data.ptr, given.shape, np.dtype(np.float32), 0
        ours = session.run({"x": DeviceArray(*where, given, copy_to_host=lambda *_: None)})["y"]
        assert isinstance(ours, DeviceArray)
        np.testing.assert_array_equal(ours.numpy(), cupy.asnumpy(result))


def test_bound_calls(session: Session) -> None:
    cupy = pytest.importorskip("cupy")
    pinned, plain, given = (
        session.pinned("x", (3, WIDTH)),
        np.empty((3, WIDTH), np.float32),
        cupy.empty((3, WIDTH), cupy.float32),
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    with (
        session.bind({"x": pinned}) as first,
        session.bind({"x": plain}) as second,
        session.bind({"x": given}) as third,
    ):
        assert (first.note, second.note, third.note) == ("", "", "")
        for seed in range(6):
            x = _x(3, seed)
            pinned[...] = plain[...] = x
            given.set(x)
            _check(first(), x)
            _check(second(), x)
            _check({name: cupy.asnumpy(array) for name, array in third().items()}, x)
            _check(session.run({"x": x}), x)
    with stream, session.bind({"x": given}, stream=stream) as bound:
        for seed in range(6):
            given.set(_x(3, seed), stream=stream)
            found = bound()
            stream.synchronize()
            _check({name: cupy.asnumpy(array) for name, array in found.items()}, _x(3, seed))


def test_threads(session: Session) -> None:
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for index in range(MOST):  # under memcheck a call that captures a graph takes half a second
                x = _x(1 + (seed + index) % MOST, seed)
                _check(session.run({"x": x}), x)
                if index % 4 == 0:
                    with pytest.raises(UsageError):
                        session.run({"x": x.astype(np.float16)})
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert failed == []


def test_an_output_that_depends_on_the_data(folder: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("NonZero", ["r"], ["where"])],
        "nonzero",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("where", TensorProto.INT64, [1, "k"])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "nonzero.onnx"
    )
    build(folder / "nonzero.onnx", folder / "nonzero.engine", shapes=["x:1,64,4096"], **settings(folder))
    with Session(folder / "nonzero.engine") as session:
        if LEAN == "10":
            with pytest.raises(EngineMismatch, match="depends on the data"):
                session.run({"x": np.ones(64, np.float32)})
            return
        for seed, size in enumerate((64, 64, 4096, 1, 1, 64, 64, 1000, 4096, 4096, 1)):
            values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
            np.testing.assert_array_equal(session.run({"x": values})["where"][0], np.flatnonzero(values > 0))
