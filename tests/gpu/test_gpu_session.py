"""Session on real TensorRT with a real model: shapes, graphs, foreign arrays, threads. test_gpu_small.py has the rest."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from lite0 import Builds, Inputs, rows

from trtopt.core.errors import DeviceError, UsageError
from trtopt.cuda.arrays import DeviceArray
from trtopt.cuda.device import Device, probe
from trtopt.runtime.session import Session


def test_every_shape_gives_the_same_by_graph_as_by_enqueue(gpu: Device, builds: Builds, inputs: Inputs) -> None:
    photos = inputs.photos["input"]
    with Session(builds["fp16"].engine, graphs=0) as plain, Session(builds["fp16"].engine, graphs=4) as session:
        assert session.notes == []  # contexts share the profile
        expected = {batch: plain.run({"input": photos[:batch]})["logits"] for batch in (1, 2, 5, 16)}
        for _ in range(5):
            for batch, logits in expected.items():
                np.testing.assert_array_equal(session.run({"input": photos[:batch]})["logits"], logits)
        assert session.stats().replays >= 8


def test_no_call_changes_the_threads_current_device(gpu: Device, builds: Builds, inputs: Inputs) -> None:
    image = {"input": inputs.photos["input"][:2]}
    others = [Device(info.ordinal) for info in probe().devices[1:2]]
    everywhere = [None] if not others else [None, "all"]
    wrong: list[object] = []

    def work(before: int | None) -> None:
        driver = gpu.driver
        assert driver is not None
        driver.set_current(before)
        for devices in everywhere:
            with Session(builds["fp16"].engine, devices=devices) as session, session.bind(image) as bound:
                expected = bound()["logits"].copy()
                wrong.extend((session.run(image)["logits"] == expected).all() or "a result" for _ in range(6))
                session.time(image, 5)
                session.pinned("input", (1, 3, 224, 224))
                wrong.append(driver.current() == before or f"in the session, devices={devices}")
            wrong.append(driver.current() == before or f"closed, devices={devices}")

    for before in (None, gpu.context, *(other.context for other in others)):
        thread = threading.Thread(target=work, args=(before,))
        thread.start()
        thread.join()
    assert len(wrong) == 8 * len(everywhere) * (2 + len(others))
    assert [what for what in wrong if not isinstance(what, (bool, np.bool_))] == []


def test_cupy_arrays_stay_on_the_gpu(gpu: Device, builds: Builds, inputs: Inputs) -> None:
    cupy = pytest.importorskip("cupy")
    image = inputs.photos["input"][:2]
    with Session(builds["fp16"].engine) as session:
        expected = session.run({"input": image})["logits"]
        given = cupy.asarray(image)
        for _ in range(20):
            result = session.run({"input": given})["logits"]
            assert isinstance(result, cupy.ndarray)
            np.testing.assert_array_equal(cupy.asnumpy(result), expected)
        target = cupy.empty(expected.shape, cupy.float32)
        stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(20):
            target.fill(0)
            cupy.cuda.Device().synchronize()
            session.run({"input": given}, out={"logits": target}, stream=stream)
            stream.synchronize()
            np.testing.assert_array_equal(cupy.asnumpy(target), expected)
            ours = session.run({"input": given}, stream=stream)["logits"]
            np.testing.assert_array_equal(cupy.asnumpy(cupy.from_dlpack(ours)), expected)


def test_results_feed_the_next_call_without_leaving_the_gpu(gpu: Device, builds: Builds, inputs: Inputs) -> None:
    cupy = pytest.importorskip("cupy")
    with Session(builds["fp16"].engine) as session:
        held = cupy.asarray(inputs.photos["input"][:1])
        given = DeviceArray(held.data.ptr, held.shape, np.dtype(np.float32), 0, held, copy_to_host=lambda *_: None)
        result = session.run({"input": given})["logits"]
        assert isinstance(result, DeviceArray)
        np.testing.assert_array_equal(result.numpy(), session.run({"input": inputs.photos["input"][:1]})["logits"])


def test_threads_mix_shapes_and_mistakes(gpu: Device, builds: Builds, inputs: Inputs) -> None:
    photos = inputs.photos["input"]
    wrong: list[BaseException] = []
    with Session(builds["fp16"].engine, contexts=4) as session:
        expected = {batch: session.run({"input": photos[:batch]})["logits"] for batch in range(1, 9)}

        def work(seed: int) -> None:
            try:
                for index in range(60):
                    batch = 1 + (seed + index) % 8
                    np.testing.assert_array_equal(session.run({"input": photos[:batch]})["logits"], expected[batch])
                    if index % 7 == 0:
                        with pytest.raises(UsageError):
                            session.run({"input": photos[:1].astype(np.float64)})
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert wrong == []
        rows.append(
            ("session, 8 threads", f"{session.memory().slots} slots", f"{session.memory().gpu >> 20} MiB on the GPU")
        )


def test_memory_comes_back_after_close(gpu: Device, builds: Builds, inputs: Inputs) -> None:
    image = inputs.photos["input"][:1]
    before = 0
    for number in range(5):
        if number == 2:  # by then the driver has what it keeps
            gc.collect()
            before = gpu("cudaMemGetInfo")[0]
        with Session(builds["fp16"].engine) as session:
            for _ in range(5):
                session.run({"input": image})
        with pytest.raises(DeviceError, match="closed"):
            session.run({"input": image})
    gc.collect()
    assert gpu("cudaMemGetInfo")[0] >= before - (2 << 20)
