"""What a service's engineer may get wrong with a session, or meet on a bad day, on a fake GPU."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_session import (
    FakeCuda,
    FakeEngine,
    FakeLoader,
    OnGpu,
    Open,
    adding_engine,
    busy,
    check_run,
    inputs_of,
    large_engine,
)

from trtopt.core.errors import Busy, DeviceError, EngineError, EngineMismatch, OutputError, UsageError
from trtopt.cuda.device import DeviceInfo
from trtopt.runtime.batcher import Batcher
from trtopt.runtime.gpu_engine import _check_gpu
from trtopt.runtime.session import Session
from trtopt.trt.compatibility import PlanOrigin

# Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [np.zeros((1, 3), np.float32), None, "x", [np.zeros(3)], 3])
def test_inputs_that_are_no_mapping(cuda: FakeCuda, open_session: Open, given: Any) -> None:
    with open_session(adding_engine(cuda)) as session:
        for call in (session.run, session.bind, session.time, session.run_batches):
            with pytest.raises(UsageError, match=r"inputs is \w+; names with arrays are needed"):
                call(given)
        with pytest.raises(UsageError, match="inputs is"):
            session.submit(given).result(10)
        for call in (session.run, session.bind):
            with pytest.raises(UsageError, match="out is ndarray; names with arrays"):
                call(inputs_of(1), out=np.zeros((1, 3), np.float32))
        check_run(session, inputs_of(2))


def test_results_only_go_where_they_can_be_seen(cuda: FakeCuda, open_session: Open) -> None:
    torch = pytest.importorskip("torch")
    inputs = inputs_of(2)
    both = np.zeros(8, np.float32)
    frozen = np.zeros(2, np.float32)
    frozen.flags.writeable = False

    class Converted:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.zeros(2, np.float32)

    class Jax(Converted):
        def __dlpack__(self, **options: Any) -> Any:
            return np.zeros(2, np.float32).__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    Jax.__module__ = "jaxlib._jax"
    with open_session(adding_engine(cuda)) as session:
        for out, message in (
            ({"s": Converted()}, r"out\['s'\] is Converted, which can't be written into"),
            ({"s": Jax()}, r"out\['s'\] is Jax, which can't be written into"),
            ({"s": [0.0, 0.0]}, "out 's' is float64; the engine gives float32: give an array of that type"),
            ({"s": np.zeros(2, ">f4")}, "out 's' is >f4; the engine gives float32"),
            ({"s": frozen}, r"out\['s'\] is read-only"),
            ({"s": torch.zeros(2, requires_grad=True)}, r"out\['s'\]: Tensor .* require gradient"),
            ({"y": both[:6].reshape(2, 3), "s": both[5:7]}, r"out\['y'\] and out\['s'\] lie in the same memory"),
            ({"s": None}, r"out\['s'\]: NoneType is no array"),
        ):
            for call in (session.run, session.bind):
                with pytest.raises(UsageError, match=message):
                    call(inputs, out=out)
        beside = np.zeros((2, 4), np.float32)  # columns of one block don't overlap
        session.run(inputs, out={"y": beside[:, :3], "s": beside[:, 3]})
        np.testing.assert_array_equal(beside[:, :3], inputs["x"] + inputs["row"])
        np.testing.assert_array_equal(beside[:, 3], inputs["x"].sum(1))


def test_read_only_arrays_in_gpu_memory_are_not_written(cuda: FakeCuda, open_session: Open) -> None:
    inputs = inputs_of(2)

    class Jax(OnGpu):
        pass

    Jax.__module__ = "jaxlib._jax"
    with open_session(adding_engine(cuda)) as session:
        device = session._gpus[0].device
        x, row = (OnGpu(device, inputs[name], read_only=True) for name in ("x", "row"))  # to be read, they will do
        before = np.full((2, 3), 7, np.float32)
        frozen, jax = OnGpu(device, before, read_only=True), Jax(device, before)
        for call in (session.run, session.bind):
            with pytest.raises(UsageError, match=r"out\['y'\] is read-only: give an array that may be written"):
                call({"x": x, "row": row}, out={"y": frozen})
            with pytest.raises(UsageError, match=r"out\['y'\] is Jax, which can't be written into"):
                call({"x": x, "row": row}, out={"y": jax})
        np.testing.assert_array_equal(frozen.now(), before)
        np.testing.assert_array_equal(jax.now(), before)
        target = OnGpu(device, before)
        session.run({"x": x, "row": row}, out={"y": target})
        np.testing.assert_array_equal(target.now(), inputs["x"] + inputs["row"])


def test_a_result_over_its_own_input(cuda: FakeCuda, open_session: Open) -> None:
    inputs = inputs_of(4)
    before = {name: array.copy() for name, array in inputs.items()}
    with open_session(adding_engine(cuda)) as session:
        # In host memory it is read before it is written.
        session.run(inputs, out={"y": inputs["x"]})
        np.testing.assert_array_equal(inputs["x"], before["x"] + before["row"])
        device = session._gpus[0].device
        x, row = OnGpu(device, before["x"]), OnGpu(device, before["row"])
        for call in (session.run, session.bind):
            for _ in range(3):
                with pytest.raises(UsageError, match=r"out\['y'\] and input 'x' lie in the same GPU memory"):
                    call({"x": x, "row": row}, out={"y": x})
        result = session.run({"x": x, "row": row})["y"]
        np.testing.assert_array_equal(result.numpy(), before["x"] + before["row"])


@pytest.mark.parametrize("lean", [False, True])
def test_types_and_layouts_that_arrays_do_not_have_are_refused(cuda: FakeCuda, open_session: Open, lean: bool) -> None:
    """Also by bindings that lack types of answers, as the lean runtime's."""
    engine = adding_engine(cuda)
    engine.lean = lean
    with open_session(engine) as session:
        check_run(session, inputs_of(2))
    engine.layout = "CHW32"
    with pytest.raises(EngineError, match=r"'x' is laid out as CHW32.*; arrays are LINEAR"):
        open_session(engine)
    engine.tensors["x"] = ("INT4", "int8", (-1, 3), "INPUT", "DEVICE")
    with pytest.raises(EngineError, match=r"'x' has type INT4; allowed .*FLOAT, HALF"):
        open_session(engine)


def test_batches_of_nothing_or_of_different_numbers(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        with pytest.raises(UsageError, match=r"inputs x 0x3; row 3 are outside the engine's shapes: x 1x3 to 8x3"):
            session.run_batches(inputs_of(0))
        inputs = inputs_of(70)  # a row for all samples beside them
        np.testing.assert_array_equal(session.run_batches(inputs)["y"], inputs["x"] + inputs["row"])
        with pytest.raises(UsageError, match=r"unknown 'z', missing 'x'"):
            session.run_batches({"z": np.zeros(1), "row": np.zeros(3, np.float16)})


def test_pinned_arrays_fit_their_input(cuda: FakeCuda, open_session: Open) -> None:
    session = open_session(adding_engine(cuda))
    for shape, message in (((3,), "takes shape -1x3, not 3"), ((2, 4), "takes"), ((-1, 3), "has a negative size")):
        with pytest.raises(UsageError, match=message):
            session.pinned("x", shape)
    with pytest.raises(UsageError, match="no input 'z'"):
        session.pinned("z", (1,))
    assert session.pinned("x", np.array([2, 3])).shape == (2, 3)
    session.close()
    with pytest.raises(DeviceError, match="closed"):
        session.pinned("x", (1, 3))
    with pytest.raises(DeviceError, match="closed"):
        session.submit(inputs_of(1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trtopt-session")]
    assert session.memory().gpu == 0


@pytest.mark.parametrize("timeout", [0, -0.001, -50])
def test_time_that_is_over_already(cuda: FakeCuda, open_session: Open, timeout: float) -> None:
    """A service gives what is left until its deadline: less than nothing is no reason to wait for ever."""
    with open_session(adding_engine(cuda), contexts=1, queue=1) as session:
        check_run(session, inputs_of(1))
        session.run(inputs_of(1), timeout=timeout)  # nobody is in the way
        with busy(session):
            with pytest.raises(Busy, match="call less often, or open the session with more `contexts=`"):
                session.run(inputs_of(1), timeout=timeout)
            waiting = session.submit(inputs_of(2))
            with pytest.raises(Busy, match="call less often, or open the session with a longer `queue=`"):
                session.submit(inputs_of(2), timeout=timeout)
        assert set(waiting.result(10)) == {"y", "s"}


# Types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("FLOAT", "float32"),
        ("HALF", "float16"),
        ("BF16", ml_dtypes.bfloat16),
        ("FP8", ml_dtypes.float8_e4m3fn),
        ("INT8", "int8"),
        ("UINT8", "uint8"),
        ("INT32", "int32"),
        ("INT64", "int64"),
        ("BOOL", "bool"),
    ],
)
def test_every_type_passes_through_bit_by_bit(cuda: FakeCuda, open_session: Open, kind: str, dtype: Any) -> None:
    content = np.arange(8 * 4, dtype=np.uint8) % 2 if kind == "BOOL" else np.arange(32, dtype=np.uint8) * 7
    values = np.resize(content, 4 * np.dtype(dtype).itemsize).view(dtype)
    engine = FakeEngine(
        cuda,
        {"x": (kind, dtype, (4,), "INPUT", "DEVICE"), "y": (kind, dtype, (4,), "OUTPUT", "DEVICE")},
        [{"x": ((4,),) * 3}],
        lambda shapes: {"y": (4,)},
        lambda arrays: {"y": arrays["x"][::-1]},
    )
    with open_session(engine) as session:
        assert session.inputs[0].dtype == session.outputs[0].dtype == np.dtype(dtype).name
        place = np.zeros(4, dtype)
        for out in (None, None, {"y": place}):
            found = session.run({"x": values}, out=out)["y"]
            assert found.dtype == np.dtype(dtype)
            assert found.tobytes() == values[::-1].tobytes()
        wrong = np.zeros(4, "float64")
        with pytest.raises(UsageError, match=rf"'x' is float64; the engine takes {np.dtype(dtype).name}"):
            session.run({"x": wrong})


# Memory ----------------------------------------------------------------------------------------------------------


def test_shapes_that_always_change_do_not_fill_the_gpu(cuda: FakeCuda, open_session: Open) -> None:
    """Results on the GPU are kept in blocks of their size; there must be an end to how many sizes are kept."""
    engine = adding_engine(cuda)
    engine.profiles = [{"x": ((1, 3), (4, 3), (4096, 3)), "row": ((3,),) * 3}]
    engine.num_optimization_profiles = 1
    with open_session(engine) as session:
        device = session._gpus[0].device
        row = OnGpu(device, np.ones(3, np.float16))
        most = 0
        for batch in range(1, 400):
            x = OnGpu(device, np.full((batch, 3), batch, np.float32))
            for _ in range(3):
                results = session.run({"x": x, "row": row})
                assert results["s"].numpy()[-1] == 3 * batch
            blocks = session._slots._free[0][0].blocks
            most = max(most, len(blocks._returned))
        assert most == 32
        kept = sum(map(len, blocks._returned.values()))
        assert kept <= 32 * 5


def test_a_limit_is_met_by_giving_up_blocks_that_nobody_holds(cuda: FakeCuda, open_session: Open) -> None:
    engine = large_engine(cuda)  # 160 kB a sample
    with open_session(engine, memory="3MiB", graphs=0) as session:
        device = session._gpus[0].device
        for _ in range(3):
            for batch in (1, 2, 3, 4):
                x = OnGpu(device, np.full((batch, 40_000), batch, np.float32))
                for _ in range(3):
                    result = session.run({"x": x})["y"]
                    assert result.numpy()[-1, -1] == 2 * batch
                assert session.memory().gpu <= 3 << 20
        held = []
        with pytest.raises(DeviceError, match="of at most 3145728"):
            while len(held) < 40:
                held.append(session.run({"x": x})["y"])
        assert all(array.numpy()[0, 0] == 8 for array in held)
        held.clear()
        assert session.run({"x": x})["y"].numpy()[0, 0] == 8


# Opening and closing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "here", "message"),
    [
        ("none", 89, r"built on NVIDIA H200 \(sm90, 139 GiB\); GPU 0 is Fake \(sm89"),
        ("same_compute_capability", 89, r"built on NVIDIA H200 \(sm90, 139 GiB\); GPU 0 is Fake \(sm89"),
        ("ampere_plus", 75, r"for sm80 and later .*; GPU 0 is Fake \(sm75"),
        ("ampere_plus", 89, None),
        ("same_compute_capability", 90, None),
        ("none", 90, None),
    ],
)
def test_compute_capabilities(level: str, here: int, message: str | None) -> None:
    manifest: Any = SimpleNamespace(
        generation={"gpu": "NVIDIA H200 (sm90, 139 GiB)", "family": "tensorrt10"},
        targets=(),
        compute_capabilities=(90,),
        spec={"hardware_compatibility": level},
    )
    info = DeviceInfo(0, "Fake", here, 1 << 30)
    if message is None:
        _check_gpu(manifest, info, Path("m.engine"))
    else:
        with pytest.raises(EngineMismatch, match=message):
            _check_gpu(manifest, info, Path("m.engine"))


@pytest.mark.parametrize("trouble", ["none", "no folder", "full"])
def test_a_service_runs_without_a_place_for_kernels(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: str
) -> None:
    from trtopt.trt.plans import LoadedEngine

    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))
    if trouble == "no folder":
        (tmp_path / "cache").write_text("a file")
    engine, given = adding_engine(cuda), []

    def load(plan: bytes, name: str, *, host_code: bool, runtime_cache: bytes | None, capture: bool) -> Any:
        given.append((runtime_cache, capture))
        return LoadedEngine(SimpleNamespace(), engine, None)

    monkeypatch.setattr(LoadedEngine, "runtime_cache", lambda _: b"kernels")
    rtx = SimpleNamespace(family="rtx", product="TensorRT-RTX", version="1.7.1", load=load)
    open_session(engine).close()  # for its patches
    monkeypatch.setattr("trtopt.runtime.gpu_engine.plan_loader", lambda *_: rtx)
    forgotten = Session(tmp_path / "net.engine", trust=True)
    check_run(forgotten, inputs_of(2))
    del forgotten
    gc.collect()
    assert cuda.live == 0
    assert list(tmp_path.rglob("*.cache")) == [], "a finalizer wrote a file"
    for graphs in (0, 4):
        session = Session(tmp_path / "net.engine", graphs=graphs, trust=True)
        check_run(session, inputs_of(2))
        with monkeypatch.context() as patch:
            if trouble == "full":

                def full(path: Path, content: bytes) -> None:
                    raise OutputError(f"can't write {path}: no space left on device")

                patch.setattr("trtopt.runtime.gpu_engine.write_bytes", full)
            session.close()
        assert (trouble == "none") == (not session.notes), session.notes
        assert all("kernels are compiled again" in note for note in session.notes)
    assert given == [(None, True), (None, False), (b"kernels" if trouble == "none" else None, True)]


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (PlanOrigin("TensorRT", "8.6.0", True, True), True),  # and runs on this later version
        (PlanOrigin("TensorRT", "8.6.1", True), False),
        (PlanOrigin("TensorRT", "8.6.1"), False),
    ],
)
def test_code_that_a_plan_carries_runs_only_by_request(
    cuda: FakeCuda, open_session: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: PlanOrigin, refused: bool
) -> None:
    from trtopt.trt.plans import LoadedEngine

    engine, allowed, plans = adding_engine(cuda), [], list[bytes]()
    open_session(engine).close()  # for its patches

    def load(plan: bytes, name: str, *, host_code: bool, **_: Any) -> Any:
        allowed.append(host_code)
        plans.append(plan)
        return LoadedEngine(SimpleNamespace(), engine, None)

    manifest = SimpleNamespace(
        generation={"family": "tensorrt8", "product": "TensorRT", "version": made.version},
        spec={},
        origin=made,
        targets=(),
        preprocess=None,
        embedded=None,
        classes=None,
        check_plan=lambda *_: None,
        plugins=(),
        check_plugins=lambda *_: (),
        compute_capabilities=(),
        inputs=(),
        outputs=(),
    )
    monkeypatch.setattr("trtopt.runtime.gpu_engine.plan_loader", lambda *_: FakeLoader(load, "8.6.1"))
    monkeypatch.setattr("trtopt.runtime.open_engine.load_manifest", lambda path: manifest)
    path = tmp_path / "net.engine"
    if refused:
        with pytest.raises(UsageError, match=r"net\.engine .*machine code.*`trust_host_code=True`"):
            Session(path)
        assert allowed == []
    else:
        Session(path).close()
    with Session(path, trust_host_code=True) as session:
        check_run(session, inputs_of(2))
    assert allowed == ([True] if refused else [False, True])
    monkeypatch.setattr(
        "trtopt.builder.refit.refitted_plan",
        lambda plan, known, request: (memoryview(plan + request.model.encode()), known, 1),
    )
    with Session(path, trust_host_code=True, weights="m.onnx") as session:
        check_run(session, inputs_of(2))
        assert session.memory().plan == len(plans[-1])
    assert plans[-2:] == [b"plan", b"planm.onnx"]


def test_a_plan_without_a_manifest_is_loaded_only_if_trusted(cuda: FakeCuda, open_session: Open) -> None:
    engine = adding_engine(cuda)
    with pytest.raises(UsageError, match=r"net\.engine has no manifest \(net\.engine\.json\).*`trust=True`"):
        open_session(engine, trust=False)
    for trusted in ({"trust": True}, {"trust": False, "trust_host_code": True}):
        check_run(open_session(engine, **trusted), inputs_of(2))


def test_calls_are_refused_after_a_fork(cuda: FakeCuda, open_session: Open) -> None:
    """Really forked: nothing may reach the GPU from there, and a lock that a lost thread had must not hang it."""
    with open_session(adding_engine(cuda)) as session, session.bind(inputs_of(2)) as step:
        step()
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()

        def child() -> None:
            before, said = len(cuda.calls), []
            for call in (step, lambda: session.run(inputs_of(2)), lambda: session.submit(inputs_of(2))):
                with pytest.raises(DeviceError) as refused:
                    call()
                said.append(str(refused.value))
            session.close()
            there.send((said, cuda.calls[before:]))

        with step._lock:  # as another thread in a call would have it
            process = context.Process(target=child)
            process.start()
        assert here.poll(30), "the child hangs"
        said, calls = here.recv()
        process.join(30)
        assert len(said) == 3
        assert all("before the process forked" in text and "'spawn'" in text for text in said)
        assert calls == []
        step()


# As a service meets it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", ["2s", "2", float("nan"), [1]])
def test_a_timeout_that_is_no_number_is_refused_before_anything_waits(
    cuda: FakeCuda, open_session: Open, timeout: Any
) -> None:
    inputs = {"x": np.zeros((1, 40_000), np.float32)}
    with open_session(large_engine(cuda)) as session, Batcher(session) as batcher:
        for call in (session.run, session.bind, session.submit, batcher.run, batcher.submit):
            with pytest.raises(UsageError, match=r"timeout is .*; a number of seconds is needed"):
                call(inputs, timeout=timeout)
        session.run(inputs, timeout=np.float32(2))


def test_the_input_that_is_wrong_is_named(cuda: FakeCuda, open_session: Open) -> None:
    torch = pytest.importorskip("torch")
    inputs = inputs_of(1)
    with open_session(adding_engine(cuda)) as session:
        for call in (session.run, session.bind, session.run_batches):
            with pytest.raises(UsageError, match="input 'row': NoneType is no array"):
                call({**inputs, "row": None})
    with open_session(large_engine(cuda)) as session, Batcher(session) as batcher:
        for call in (session.run, batcher.run):
            with pytest.raises(UsageError, match=r"input 'x': Tensor .* require gradient"):
                call({"x": torch.zeros(1, 40_000, requires_grad=True)})


def test_a_session_says_what_it_takes_and_that_it_stays_in_its_process(cuda: FakeCuda, open_session: Open) -> None:
    with open_session(adding_engine(cuda)) as session:
        said = repr(session)
        assert session.engine.name in said
        assert session.backend in said
        assert "x float32" in said
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match="can't be pickled or copied: open one in the process that runs it"):
                copied(session)
    assert "(closed)" in repr(session)
    assert "Session object" in repr(Session.__new__(Session))  # as a debugger meets one whose engine couldn't be opened


def test_batches_of_lists_are_run_and_those_on_a_gpu_refused(cuda: FakeCuda, open_session: Open) -> None:
    rows = np.arange(5 * 40_000, dtype=np.float32).reshape(5, -1)
    with open_session(large_engine(cuda)) as session:
        np.testing.assert_array_equal(session.run_batches({"x": list(rows)})["y"], rows * 2)
        with pytest.raises(UsageError, match="input 'x' lies in GPU memory; batches are cut in host memory: call run"):
            session.run_batches({"x": OnGpu(session._gpus[0].device, rows)})
