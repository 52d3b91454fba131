from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeEngine
from numpy.typing import NDArray

from trtopt.errors import DeviceError, EngineError, UsageError
from trtopt.runtime.device import Device, DeviceInfo
from trtopt.runtime.executor import Executor
from trtopt.spec import ShapeRange, TensorInfo
from trtopt.trt.messages import Messages
from trtopt.trt.plans import LoadedEngine

Array = NDArray[Any]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    yield fake
    gc.collect()
    assert fake.live == 0, "something was not freed"


def _device(cuda: FakeCuda) -> Device:
    return Device(functions=cuda, info=DeviceInfo(0, "Fake GPU", 89, 1 << 30))


def _executor(engine: FakeEngine, cuda: FakeCuda) -> Executor:
    return Executor(LoadedEngine(module=None, engine=engine, runtime=None, messages=Messages()), _device(cuda))


def _engine(cuda: FakeCuda, **options: Any) -> FakeEngine:
    """y = x + row, s = the sum of each sample; two profiles: batch 1..8, and batch 16..64."""
    return FakeEngine(
        cuda,
        {
            "x": ("FLOAT", "float32", (-1, 3), "INPUT", "DEVICE"),
            "row": ("HALF", "float16", (3,), "INPUT", "DEVICE"),
            "y": ("FLOAT", "float32", (-1, 3), "OUTPUT", "DEVICE"),
            "s": ("FLOAT", "float32", (-1,), "OUTPUT", "DEVICE"),
        },
        [
            {"x": ((1, 3), (4, 3), (8, 3)), "row": ((3,),) * 3},
            {"x": ((16, 3), (32, 3), (64, 3)), "row": ((3,),) * 3},
        ],
        lambda shapes: {"y": shapes["x"], "s": shapes["x"][:1]},
        lambda arrays: {"y": arrays["x"] + arrays["row"], "s": arrays["x"].sum(1)},
        **options,
    )


def _inputs(batch: int, seed: int = 0) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(batch, 3)).astype(np.float32), "row": np.array([1, 2, 3], np.float16)}


def _check(executor: Executor, inputs: dict[str, Array]) -> None:
    results = executor.run(inputs)
    assert set(results) == {"y", "s"}
    np.testing.assert_array_equal(results["y"], inputs["x"] + inputs["row"])
    np.testing.assert_array_equal(results["s"], inputs["x"].sum(1))


def test_runs_shapes_in_any_order_across_profiles(cuda: FakeCuda) -> None:
    engine = _engine(cuda)
    with _executor(engine, cuda) as executor:
        for seed, batch in enumerate((4, 8, 1, 64, 16, 2, 2, 33)):
            _check(executor, _inputs(batch, seed))
        assert engine.contexts[0].profile == 1
    assert len(engine.contexts) == 1


def test_describes_the_engine(cuda: FakeCuda) -> None:
    with _executor(_engine(cuda), cuda) as executor:
        assert executor.inputs == (TensorInfo("x", "float32", (-1, 3)), TensorInfo("row", "float16", (3,)))
        assert [item.name for item in executor.outputs] == ["y", "s"]
        assert executor.profiles[1]["x"] == ShapeRange((16, 3), (32, 3), (64, 3))


def test_results_are_not_overwritten_by_the_next_run(cuda: FakeCuda) -> None:
    with _executor(_engine(cuda), cuda) as executor:
        first = executor.run(_inputs(2, 1))["y"]
        kept = first.copy()
        executor.run(_inputs(2, 2))
        np.testing.assert_array_equal(first, kept)


def test_arrays_that_are_not_contiguous_are_taken(cuda: FakeCuda) -> None:
    inputs = _inputs(6)
    inputs["x"] = np.asfortranarray(inputs["x"])[::-2]
    assert not inputs["x"].flags.c_contiguous
    with _executor(_engine(cuda), cuda) as executor:
        _check(executor, inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": np.zeros(1)}, r"unknown 'z'; the engine takes 'x', 'row'"),
        ({"row": None}, r"missing 'row'"),
        ({"x": np.zeros((2, 3))}, r"'x' is float64; the engine takes float32"),
        ({"x": np.zeros((2, 3, 1), np.float32)}, r"shape 2x3x1, rank 3; the engine takes rank 2, -1x3"),
        ({"x": np.zeros((9, 3), np.float32)}, r"x 9x3; row 3 are outside .*x 1x3 to 8x3; .* or x 16x3 to 64x3"),
        ({"x": np.zeros((2, 4), np.float32)}, r"x 2x4; row 3 are outside"),
        ({"x": np.zeros((0, 3), np.float32)}, r"x 0x3; row 3 are outside"),
    ],
)
def test_wrong_inputs_are_named_with_what_is_allowed(cuda: FakeCuda, change: dict[str, Any], message: str) -> None:
    wrong = {name: value for name, value in {**_inputs(2), **change}.items() if value is not None}
    with _executor(_engine(cuda), cuda) as executor:
        _check(executor, _inputs(2))
        with pytest.raises(UsageError, match=message):
            executor.run(wrong)
        _check(executor, _inputs(2))  # and it still works


def test_values_of_a_shape_tensor_decide_the_output_shape(cuda: FakeCuda) -> None:
    engine = FakeEngine(
        cuda,
        {
            "x": ("FLOAT", "float32", (1,), "INPUT", "DEVICE"),
            "shape": ("INT32", "int32", (2,), "INPUT", "HOST"),
            "y": ("FLOAT", "float32", (-1, -1), "OUTPUT", "DEVICE"),
        },
        [{"x": ((1,),) * 3, "shape": ((2,),) * 3}],
        lambda known: {"y": tuple(int(size) for size in known["shape"])},
        lambda arrays: {"y": arrays["x"]},
    )
    with _executor(engine, cuda) as executor:
        for shape in ((2, 3), (4, 5), (1, 1)):
            result = executor.run({"x": np.array([7], np.float32), "shape": np.array(shape, np.int32)})["y"]
            np.testing.assert_array_equal(result, np.full(shape, 7, np.float32))


def test_bfloat16_and_bool_pass_through(cuda: FakeCuda) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    engine = FakeEngine(
        cuda,
        {
            "x": ("BF16", "bfloat16", (2,), "INPUT", "DEVICE"),
            "y": ("BOOL", "bool", (2,), "OUTPUT", "DEVICE"),
        },
        [{"x": ((2,),) * 3}],
        lambda shapes: {"y": (2,)},
        lambda arrays: {"y": arrays["x"] > 1},
    )
    with _executor(engine, cuda) as executor:
        result = executor.run({"x": np.array([0.5, 2.5], ml_dtypes.bfloat16)})["y"]
        assert result.dtype == np.bool_
        assert result.tolist() == [False, True]


def test_data_dependent_output_shapes_are_refused(cuda: FakeCuda) -> None:
    engine = _engine(cuda)
    engine.outputs = lambda shapes: {"y": (-1, 3), "s": (1,)}
    with _executor(engine, cuda) as executor, pytest.raises(EngineError, match="'y' depends on the data"):
        executor.run(_inputs(2))


def test_types_that_numpy_can_not_hold_are_refused(cuda: FakeCuda) -> None:
    engine = _engine(cuda)
    engine.tensors["x"] = ("INT4", "int8", (-1, 3), "INPUT", "DEVICE")
    with pytest.raises(EngineError, match=r"'x' has type INT4; allowed .*FLOAT, HALF"):
        _executor(engine, cuda)


def test_no_context_is_an_error(cuda: FakeCuda) -> None:
    engine = _engine(cuda)
    engine.create_execution_context = lambda: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(EngineError, match="no execution context"):
        _executor(engine, cuda)


def test_a_refused_launch_is_an_error_and_the_next_call_works(cuda: FakeCuda) -> None:
    engine = _engine(cuda)
    with _executor(engine, cuda) as executor:
        context = engine.contexts[0]
        context.execute_async_v3 = lambda stream: False  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="couldn't enqueue"):
            executor.run(_inputs(2))
        del context.execute_async_v3
        _check(executor, _inputs(2))


def test_times_graph_replays(cuda: FakeCuda) -> None:
    engine = _engine(cuda, milliseconds=0.5)
    with _executor(engine, cuda) as executor:
        timing = executor.time(_inputs(4), iterations=150, warmup=3)
        assert timing.cuda_graph
        assert timing.note == ""
        assert timing.iterations == 150
        assert timing.gpu.median == timing.gpu.p90 == timing.gpu.minimum == pytest.approx(0.5)
        assert 0 < timing.host.minimum <= timing.host.median <= timing.host.p99
        assert engine.contexts[0].enqueued == 2  # the first call, and the one captured
        assert json.loads(json.dumps(timing.describe()))["gpu"]["p99"] == pytest.approx(0.5)
        _check(executor, _inputs(8))


@pytest.mark.parametrize("declared", [True, False])
def test_times_plain_enqueues_where_a_graph_can_not_be_captured(cuda: FakeCuda, declared: bool) -> None:
    engine = _engine(cuda, capturable=False)
    with _executor(engine, cuda) as executor:
        if declared:
            engine.contexts[0].is_stream_capturable = lambda stream: False  # type: ignore[attr-defined]
        timing = executor.time(_inputs(4), iterations=5, warmup=1)
        assert not timing.cuda_graph
        assert "plain enqueues" in timing.note
        assert timing.gpu.median == pytest.approx(0.25)
        assert "cudaStreamBeginCapture" in cuda.calls or declared
        _check(executor, _inputs(4))


def test_time_refuses_no_iterations(cuda: FakeCuda) -> None:
    with _executor(_engine(cuda), cuda) as executor, pytest.raises(UsageError, match="iterations is 0"):
        executor.time(_inputs(1), iterations=0)


def test_closing_frees_everything_and_later_calls_say_so(cuda: FakeCuda) -> None:
    executor = _executor(_engine(cuda), cuda)
    _check(executor, _inputs(3))
    executor.close()
    executor.close()
    assert cuda.live == 0
    with pytest.raises(DeviceError, match="executor is closed"):
        executor.run(_inputs(3))


def test_threads_take_turns_and_every_result_is_right(cuda: FakeCuda) -> None:
    wrong: list[BaseException] = []
    with _executor(_engine(cuda), cuda) as executor:

        def work(seed: int) -> None:
            try:
                for batch in (1, 8, 16, 3):
                    _check(executor, _inputs(batch, seed))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
