"""Session on a fake GPU that fails on misuse (tests/fake_cuda.py); real ones are in tests/gpu."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_session import (
    FakeCuda,
    FakeEngine,
    OnGpu,
    Open,
    adding_engine,
    busy,
    check_run,
    inputs_of,
    large_engine,
)
from manifests import made

from trtopt.core.errors import Busy, DeviceError, EngineError, EngineMismatch, UsageError
from trtopt.core.values import ShapeRange, TensorInfo
from trtopt.cuda.arrays import DeviceArray, stream_handle
from trtopt.cuda.device import Probe, Stream
from trtopt.runtime.launcher import BoundContext
from trtopt.runtime.open_engine import SessionStats
from trtopt.runtime.session import Session


def test_describes_the_engine_and_runs_shapes_in_any_order_across_profiles(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        assert session.inputs == (TensorInfo("x", "float32", (-1, 3)), TensorInfo("row", "float16", (3,)))
        assert [item.name for item in session.outputs] == ["y", "s"]
        assert session.profiles[1]["x"] == ShapeRange((16, 3), (32, 3), (64, 3))
        for seed, batch in enumerate((4, 8, 1, 64, 16, 2, 2, 33, 2, 8, 8, 4, 64)):
            check_run(session, inputs_of(batch, seed))


_WITHOUT_ONNX = """
import sys
import trtopt.runtime.session
assert "onnx" not in sys.modules, "by the import"
from pathlib import Path
import pytest
from fake_session import FakeCuda, adding_engine, check_run, inputs_of, opening
cuda, patch = FakeCuda(), pytest.MonkeyPatch()
opener = opening(cuda, Path(sys.argv[1]), patch)
start = next(opener)
with start(adding_engine(cuda)) as session:
    check_run(session, inputs_of(2))
    trtopt.runtime.images.scores_classes(session, "y", inputs_of(2)["x"])
patch.undo()
assert "onnx" not in sys.modules, "by a session"
"""


def test_no_onnx_is_loaded_to_run_an_engine(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ONNX, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_kept_shapes_are_bounded_and_one_in_use_is_not_put_out(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), graphs=2) as session:
        for seed in range(100):
            check_run(session, inputs_of(1 + seed % 5, seed))
        stats = session.stats()
        assert stats.contexts == 2 + 1  # and one for the shapes that aren't kept
        assert stats.graphs == 2
        assert stats.evictions <= 100 // 32  # thrashing would capture again and again


@pytest.mark.parametrize(("graphs", "captures"), [(0, 0), (16, 1)])
def test_where_nothing_is_captured_every_call_is_enqueued(
    cuda: FakeCuda, open_session: Open, graphs: int, captures: int
) -> None:
    with open_session(adding_engine(cuda, capturable=False), graphs=graphs) as session:
        for seed in range(6):
            check_run(session, inputs_of(4, seed))
        assert (session.stats().graphs, session.stats().replays) == (0, 0)
    assert cuda.calls.count("cudaStreamBeginCapture") == captures


def test_contexts_that_can_not_share_a_profile_are_one(cuda: FakeCuda, open_session: Open) -> None:
    engine = adding_engine(cuda, shares=False)
    with open_session(engine, contexts=4) as session:
        assert "PROFILE_SHARING" in session.notes[0]
        for seed, batch in enumerate((4, 4, 4, 2, 2, 2, 4, 4, 16, 4)):
            check_run(session, inputs_of(batch, seed))
        assert session.memory().slots == 1
        assert session.stats().replays > 0
        assert session.stats().contexts == 1


def test_stats_count_what_calls_did_and_what_is_kept_for_them(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), contexts=1, graphs=1) as session:
        assert session.stats() == SessionStats(contexts=1, graphs=0, replays=0, waits=0, evictions=0)
        for seed in range(4):
            check_run(session, inputs_of(4, seed))
        assert session.stats() == SessionStats(contexts=1, graphs=1, replays=3, waits=0, evictions=0)
        assert cuda.calls.count("cudaStreamBeginCapture") == 1
        for seed in range(20):  # until the other shape is long unused
            check_run(session, inputs_of(2, seed))
        stats = session.stats()
        assert (stats.graphs, stats.evictions) == (1, 1)
        assert stats.replays > 3
        with busy(session), pytest.raises(Busy):
            session.run(inputs_of(2), timeout=0.01)
        assert session.stats().waits == 1
        with pytest.raises(AttributeError):
            session.stats().waits = 0  # type: ignore[misc]
    assert session.stats().contexts == 0


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
        ({"x": np.ma.masked_greater(inputs_of(2)["x"], 0)}, r"masked: fill it first"),
    ],
)
def test_wrong_inputs_are_named_with_what_is_allowed(
    cuda: FakeCuda, open_session: Open, change: dict[str, Any], message: str
) -> None:
    wrong = {name: value for name, value in {**inputs_of(2), **change}.items() if value is not None}
    with open_session(adding_engine(cuda)) as session:
        check_run(session, inputs_of(2))
        with pytest.raises(UsageError, match=message):
            session.run(wrong)
        check_run(session, inputs_of(2))  # and it still works


def test_results_go_into_arrays_of_the_caller(cuda: FakeCuda, open_session: Open) -> None:
    target = np.zeros((2, 3), np.float32)
    with open_session(adding_engine(cuda)) as session:
        for seed in range(4):
            inputs = inputs_of(2, seed)
            results = session.run(inputs, out={"y": target})
            assert results["y"] is target
            np.testing.assert_array_equal(target, inputs["x"] + inputs["row"])
        with pytest.raises(UsageError, match=r"out has 'z'; the engine gives 'y', 's'"):
            session.run(inputs_of(2), out={"z": target})
        with pytest.raises(UsageError, match=r"'y'\] has shape 2x3; this call gives 4x3"):
            session.run(inputs_of(4), out={"y": target})
        check_run(session, inputs_of(2))


def test_pinned_arrays_that_come_again_get_graphs_of_their_own(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(large_engine(cuda), contexts=1, graphs=1) as session:
        arrays = [session.pinned("x", (2, 40_000)) for _ in range(9)]
        for round_ in range(3):
            for seed, array in enumerate(arrays):
                array[:] = np.random.default_rng(10 * round_ + seed).normal(size=array.shape)
                np.testing.assert_array_equal(session.run({"x": array})["y"], array * 2)
        stats = session.stats()
        assert stats.replays == 27 - 1
        assert stats.graphs == 4  # of copied arrays, and of three of the nine addresses: more aren't kept
        assert stats.evictions == 0
        for _ in range(70):
            session.run({"x": array})
        stats = session.stats()
        assert (stats.graphs, stats.evictions) == (4, 1)  # in the place of one that didn't come for long


def test_arrays_in_gpu_memory_are_used_where_they_lie(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        device = session._gpus[0].device
        inputs = inputs_of(4)
        x, row = OnGpu(device, inputs["x"]), OnGpu(device, inputs["row"])
        copies = cuda.calls.count("cudaMemcpyAsync")
        kept = []
        for _ in range(40):
            result = session.run({"x": x, "row": row})["y"]
            assert isinstance(result, DeviceArray)
            np.testing.assert_array_equal(result.numpy(), inputs["x"] + inputs["row"])
            kept = [*kept[-2:], result]
        assert cuda.calls.count("cudaMemcpyAsync") == copies
        assert "cudaDeviceSynchronize" not in cuda.calls
        assert session.stats().replays >= 30
        target = OnGpu(device, np.zeros((4, 3), np.float32))
        assert session.run({"x": x, "row": row}, out={"y": target})["y"] is target
        np.testing.assert_array_equal(target.now(), inputs["x"] + inputs["row"])


@pytest.mark.parametrize("on_gpu", [False, True])
def test_results_that_are_held_are_never_overwritten(cuda: FakeCuda, open_session: Open, on_gpu: bool) -> None:
    with open_session(adding_engine(cuda)) as session:
        device, held = session._gpus[0].device, []
        for seed in range(12):
            values = inputs_of(4, seed)
            given: dict[str, Any] = {name: OnGpu(device, array) for name, array in values.items()} if on_gpu else values
            held.append((values["x"] + values["row"], session.run(given)["y"]))
        for wanted, result in held:
            np.testing.assert_array_equal(result.numpy() if on_gpu else result, wanted)
        held.clear()
        del given, result


@pytest.mark.parametrize("reader", [None, "of the caller's"])
def test_a_result_that_is_let_go_of_is_read_before_its_memory_is_used_again(
    cuda: FakeCuda, open_session: Open, reader: str | None
) -> None:
    """By the legacy default stream, and by one that its consumer names."""
    cuda.streams[1] = []
    with open_session(adding_engine(cuda)) as session:
        device = session._gpus[0].device
        row = OnGpu(device, inputs_of(4)["row"])
        with Stream(device) as other:
            stream = 1 if reader is None else other.handle
            wanted, seen = [], []
            for seed in range(24):
                inputs = inputs_of(4, seed)
                x = OnGpu(device, inputs["x"])
                result = session.run({"x": x, "row": row})["y"]
                result.__dlpack__(stream=None if reader is None else stream)
                size = result.nbytes
                cuda.push(stream, lambda at=result.address, size=size: seen.append(ctypes.string_at(at, size)))
                wanted.append((inputs["x"] + row.values).tobytes())
            other.synchronize()
            device.synchronize()
        assert seen == wanted
        waits = cuda.calls.count("cudaDeviceSynchronize")
        assert waits == 1 if reader is None else 2 < waits <= 8
        assert session.memory().gpu < 20_000
    del cuda.streams[1]


def test_on_the_callers_stream_nothing_is_waited_for(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        device = session._gpus[0].device
        inputs = inputs_of(4)
        x, row = OnGpu(device, inputs["x"]), OnGpu(device, inputs["row"])
        with Stream(device) as mine:
            for _ in range(4):
                waits = cuda.calls.count("cudaStreamSynchronize")
                result = session.run({"x": x, "row": row}, stream=mine.handle)["y"]
                assert cuda.calls.count("cudaStreamSynchronize") == waits
                assert cuda.streams[mine.handle], "it ran before anybody waited"
                mine.synchronize()
                np.testing.assert_array_equal(result.numpy(), inputs["x"] + inputs["row"])
            session.run({"x": x, "row": row}, stream=mine.handle)
            check_run(session, inputs_of(4, 3))  # another stream right behind it


def test_a_result_array_of_ours_that_is_written_again_is_waited_for_again(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        device = session._gpus[0].device
        first, second = inputs_of(4), inputs_of(4, 1)
        row = OnGpu(device, first["row"])
        with Stream(device) as one, Stream(device) as other:
            x = OnGpu(device, first["x"])
            result = session.run({"x": x, "row": row}, stream=one.handle)["y"]
            one.synchronize()
            x = OnGpu(device, second["x"])
            again = session.run({"x": x, "row": row}, out={"y": result}, stream=other.handle)["y"]
            assert again is result
            assert cuda.streams[other.handle], "it ran before anybody waited"
            np.testing.assert_array_equal(result.numpy(), second["x"] + second["row"])


def test_a_bound_call_reads_and_writes_the_same_arrays(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), contexts=2) as session:
        device = session._gpus[0].device
        first, second = inputs_of(4), inputs_of(4, 1)
        x, row = OnGpu(device, first["x"]), OnGpu(device, first["row"])
        with session.bind({"x": x, "row": row}) as bound:
            launches = cuda.calls.count("cudaGraphLaunch")
            for inputs in (first, second, first):
                ctypes.memmove(x.buffer.handle, inputs["x"].ctypes.data, inputs["x"].nbytes)
                ctypes.memmove(row.buffer.handle, inputs["row"].ctypes.data, inputs["row"].nbytes)
                results = bound()
                assert results is bound.outputs
                np.testing.assert_array_equal(results["y"].numpy(), inputs["x"] + inputs["row"])
            assert cuda.calls.count("cudaGraphLaunch") == launches + 3
            check_run(session, second)  # other calls take another context
            kept = bound.outputs["y"]
        with pytest.raises(DeviceError, match="closed"):
            bound()
        check_run(session, second)
        check_run(session, second)
        np.testing.assert_array_equal(kept.numpy(), first["x"] + first["row"])
        assert session.memory().slots == 2


def test_a_bound_call_on_the_host_copies_at_each_call(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(large_engine(cuda)) as session:
        pinned, plain = session.pinned("x", (2, 40_000)), np.zeros((2, 40_000), np.float32)
        target = np.zeros((2, 40_000), np.float32)
        ways = [session.bind({"x": pinned}), session.bind({"x": plain}), session.bind({"x": plain}, out={"y": target})]
        assert ways[2].outputs["y"] is target
        for round_ in range(3):
            for array in (pinned, plain):
                array[:] = np.random.default_rng(round_).normal(size=array.shape)
            for bound in ways:
                np.testing.assert_array_equal(bound()["y"], plain * 2)


def test_a_bound_call_runs_on_the_callers_stream(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        device = session._gpus[0].device
        inputs, other = inputs_of(4), inputs_of(4, 1)
        x, row = OnGpu(device, inputs["x"]), OnGpu(device, inputs["row"])
        with Stream(device) as mine:
            bound = session.bind({"x": x, "row": row}, stream=mine.handle)
            values = other["x"]
            cuda.push(mine.handle, lambda to=x.buffer.handle: ctypes.memmove(to, values.ctypes.data, values.nbytes))
            result = bound()["y"]
            assert cuda.streams[mine.handle], "it ran before anybody waited"
            mine.synchronize()
            np.testing.assert_array_equal(result.numpy(), other["x"] + inputs["row"])
            bound()
            bound.close()
            check_run(session, inputs)  # on the same context, when what was bound is over
            assert not cuda.streams[mine.handle]


def test_closing_the_session_ends_what_was_bound(cuda: FakeCuda, open_session: Open) -> None:
    session = open_session(adding_engine(cuda), contexts=1)
    bound = session.bind(inputs_of(2))
    bound()
    with pytest.raises(Busy):
        session.run(inputs_of(2), timeout=0.01)
    session.close()
    with pytest.raises(DeviceError, match="closed"):
        bound()


def test_a_bound_call_that_nobody_holds_gives_its_context_back(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), contexts=1) as session:
        for _ in range(3):
            session.bind(inputs_of(2))()
            gc.collect()
            check_run(session, inputs_of(2))
        with pytest.raises(UsageError, match="float64"):
            session.bind({"x": np.zeros((2, 3)), "row": inputs_of(2)["row"]})
        check_run(session, inputs_of(2))


def test_values_of_a_shape_tensor_decide_the_output_shape(cuda: FakeCuda, open_session: Open) -> None:
    engine = FakeEngine(
        cuda,
        {
            "x": ("FLOAT", "float32", (1,), "INPUT", "DEVICE"),
            "shape": ("INT32", "int32", (2,), "INPUT", "HOST"),
            "y": ("FLOAT", "float32", (-1, -1), "OUTPUT", "DEVICE"),
        },
        [{"x": ((1,),) * 3, "shape": ((2,),) * 3}],
        lambda known: {"y": tuple(int(size) for size in known["shape"])},
        lambda arrays: {"y": np.broadcast_to(arrays["x"], tuple(arrays["shape"]))},
    )
    with open_session(engine) as session:
        for shape in ((2, 3), (4, 5), (1, 1), (2, 3), (2, 3), (4, 5), (2, 3)):
            result = session.run({"x": np.array([7], np.float32), "shape": np.array(shape, np.int32)})["y"]
            np.testing.assert_array_equal(result, np.full(shape, 7, np.float32))


def test_output_shapes_that_depend_on_the_data(cuda: FakeCuda, open_session: Open) -> None:
    engine = FakeEngine(
        cuda,
        {
            "x": ("FLOAT", "float32", (-1,), "INPUT", "DEVICE"),
            "where": ("INT32", "int32", (-1,), "OUTPUT", "DEVICE"),
        },
        [{"x": ((1,), (8,), (4096,))}],
        lambda shapes: {"where": (-1,)},
        lambda arrays: {"where": np.flatnonzero(arrays["x"] > 0).astype(np.int32)},
    )
    with open_session(engine) as session:
        for seed, size in enumerate((8, 8, 100, 4096, 1, 8, 8, 8)):
            values = np.random.default_rng(seed).normal(size=size).astype(np.float32)
            np.testing.assert_array_equal(session.run({"x": values})["where"], np.flatnonzero(values > 0))
        with pytest.raises(UsageError, match="depends on the data"):
            session.bind({"x": values})
        expected = np.flatnonzero(values > 0)
        given = np.zeros(len(expected), np.int32)
        assert session.run({"x": values}, out={"where": given})["where"] is given
        np.testing.assert_array_equal(given, expected)
        for size in (len(expected) + 1, max(0, len(expected) - 1)):
            with pytest.raises(UsageError, match=rf"out\['where'\] has shape {size}; this call gives {len(expected)}"):
                session.run({"x": values}, out={"where": np.zeros(size, np.int32)})
        with pytest.raises(UsageError, match="comes in host memory"):
            session.run({"x": values}, out={"where": OnGpu(session._gpus[0].device, given)})
        np.testing.assert_array_equal(session.run({"x": values})["where"], expected)
    assert "cudaStreamBeginCapture" not in cuda.calls


def test_a_refused_launch_is_an_error_and_the_next_call_works(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        context = session._slots._free[0][0].contexts._fallback.context
        context.execute_async_v3 = lambda stream: False
        with pytest.raises(EngineError, match="couldn't enqueue") as caught:
            session.run(inputs_of(2))
        del context.execute_async_v3
        check_run(session, inputs_of(2))
    # Page-locked memory is freed by now: who shows the traceback's values, as pytest does, must not be led into it.
    values = [value for entry in caught.traceback for value in entry.frame.f_locals.values()]
    [bound_context] = [value for value in values if isinstance(value, BoundContext)][-1:]
    assert "array(" not in repr(bound_context)


def test_memory_is_bounded_and_reported(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda), memory="64KiB") as session:
        check_run(session, inputs_of(4))
        report = session.memory()
        assert 4096 < report.gpu <= 64 << 10
        assert report.limit == 64 << 10
        assert json.loads(json.dumps(report.describe()))["slots"] == 1
    with pytest.raises(DeviceError, match=r"more bytes of GPU memory are needed; this session has .* of at most 100"):
        open_session(adding_engine(cuda), memory=100)


def test_many_calls_leak_nothing(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        device = session._gpus[0].device
        inputs = inputs_of(4)
        x, row = OnGpu(device, inputs["x"]), OnGpu(device, inputs["row"])
        for _ in range(30):
            session.run({"x": x, "row": row})
            session.run(inputs)
        settled = cuda.live, cuda.left
        for _ in range(300):
            session.run({"x": x, "row": row})
            session.run(inputs)
        assert (cuda.live, cuda.left) == settled


@pytest.mark.parametrize("capturable", [True, False])
def test_times_graph_replays_or_else_plain_enqueues(cuda: FakeCuda, open_session: Open, capturable: bool) -> None:
    with open_session(adding_engine(cuda, milliseconds=0.5, capturable=capturable)) as session:
        timing = session.time(inputs_of(4), iterations=150, warmup=3)
        assert (timing.cuda_graph, timing.iterations) == (capturable, 150)
        assert ("plain enqueues" in timing.note) != capturable
        assert timing.gpu.median == timing.gpu.p90 == timing.gpu.minimum == pytest.approx(0.5)
        assert 0 < timing.host.minimum <= timing.host.median <= timing.host.p99
        assert json.loads(json.dumps(timing.describe()))["gpu"]["p99"] == pytest.approx(0.5)
        check_run(session, inputs_of(8))
        with pytest.raises(UsageError, match="iterations is 0"):
            session.time(inputs_of(1), iterations=0)


# Opening ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_way_to_develop_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.engine").write_bytes(b"plan")
    monkeypatch.setattr("trtopt.runtime.gpu_engine.probe", lambda: Probe(reason="no NVIDIA driver is installed"))
    with pytest.raises(DeviceError, match=r"no NVIDIA driver.*backend='onnxruntime'"):
        Session(tmp_path / "net.engine")


def test_a_plan_for_something_else_is_refused_with_both_named(
    cuda: FakeCuda, open_session: Open, tmp_path: Path
) -> None:
    generation = {"family": "tensorrt8", "product": "TensorRT", "version": "8.6.1", "gpu": None}
    made(tmp_path / "net.engine", b"ftrt" + bytes(20) + bytes([8, 6, 1, 0]), generation=generation, targets=[])
    with pytest.raises(EngineMismatch, match=r"built by TensorRT 8\.6\.1, here is TensorRT 8\.6\.0: build it again"):
        open_session(adding_engine(cuda))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": 0}, "`contexts=` is 0; at least 1 is needed"),
        ({"contexts": "8"}, "`contexts=` is '8'; a whole number is needed"),
        ({"queue": 0}, "`queue=` is 0"),
        ({"graphs": -1}, "`graphs=` is -1"),
        ({"backend": "cuda"}, "backend cuda|'cuda'"),
        ({"devices": []}, "'all' or different GPU numbers"),
        ({"devices": [0, 0]}, "'all' or different GPU numbers"),
        ({"devices": [0, "1"]}, "`devices=` is list; a text or a list, each a whole number, is needed"),
        ({"memory": "much"}, "memory is .much., which isn.t a size"),
        ({"memory": -5}, "memory is -5, which isn.t a size"),
        ({"memory": 0}, "memory is 0; at least 1 byte"),
    ],
)
def test_wrong_options_are_refused(cuda: FakeCuda, open_session: Open, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_session(adding_engine(cuda), **options)


def test_streams_of_other_libraries_are_understood() -> None:
    assert stream_handle(7) == 7
    assert stream_handle(0) == 1  # the legacy default stream
    assert stream_handle(SimpleNamespace(cuda_stream=9)) == 9
    assert stream_handle(SimpleNamespace(ptr=11)) == 11
    assert stream_handle(SimpleNamespace(__cuda_stream__=lambda: (0, 13))) == 13
    with pytest.raises(UsageError, match="stream is str"):
        stream_handle("mine")
