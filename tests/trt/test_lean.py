"""The lean runtimes of 8.6, 10 and 11 against stand-ins, which plan runs where, and the library that plans carry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import pytest
from fake_cuda import FakeContext, FakeEngine
from standins import API, LEAN_VERSIONS, SCRATCH, Simulation

import trtopt
import trtopt.cuda.device
from trtopt.core.errors import EngineMismatch, NoBackend, UnsupportedRequest, UsageError
from trtopt.core.values import BuildSpec, ShapeRange
from trtopt.core.version import to_install
from trtopt.trt import loaders, plan_loader, select
from trtopt.trt.compatibility import PlanOrigin, reads, runs_on, unread
from trtopt.trt.loader import Loader
from trtopt.trt.plans import LoadedEngine

ROWS = ShapeRange((1, 3, 32, 32), (4, 3, 32, 32), (8, 3, 32, 32))
SPEC = BuildSpec(profiles=({"x": ROWS},), version_compatible=True)
PROBED = {  # names that are asked for to learn what is there, and were removed or added between versions
    "EngineInspector",
    "ICudaEngine.device_memory_size_v2",
    "ExecutionContextAllocationStrategy",
    "IExecutionContext.set_device_memory",
    "ICudaEngine.get_aliased_input_tensor",
}
Install = Callable[[str], tuple[Simulation, Any]]
Lean = Callable[[str], tuple[Simulation, Loader]]


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch, with_gpu: Callable[[int | None], None]) -> Lean:
    """Install the stand-in of a lean runtime, and no other TensorRT."""

    def install(version: str) -> tuple[Simulation, Loader]:
        sim = Simulation(version)
        for name in ("tensorrt", "tensorrt_rtx", "tensorrt_lean", "tensorrt_lean_bindings"):
            monkeypatch.setitem(sys.modules, name, None)
        # 8.6's wheel and the metapackage have one name, the bindings alone another.
        module = "tensorrt_lean" if sim.major == 8 else "tensorrt_lean_bindings"
        monkeypatch.setitem(sys.modules, module, sim.module)
        with_gpu(90)
        [found] = loaders()
        return sim, found

    return install


def plan_of(version: str, stand_in: Install, folder: Path, **options: Any) -> bytes:
    _, generation = stand_in(version.removeprefix("lean-"))
    model = nets.conv_net(folder / "m.onnx", opset=17)
    spec = BuildSpec(profiles=SPEC.profiles, **options)
    return bytes(generation.build(model, spec, quantized=False).plan)


# Loading


@pytest.mark.parametrize("version", LEAN_VERSIONS)
def test_no_name_is_touched_that_it_lacks(version: str, stand_in: Install, lean: Lean, tmp_path: Path) -> None:
    plan = plan_of(version, stand_in, tmp_path, version_compatible=True, exclude_lean_runtime=True)
    sim, found = lean(version)
    loaded = found.load(plan, "m.engine")
    context = loaded.context(4096, loaded.scratch_bytes)
    assert loaded.shares_profiles(context)
    loaded.output_allocator(lambda *_: 1, lambda *_: None).check()
    loaded.profiler(lambda *_: None)
    with pytest.raises(UnsupportedRequest, match="no inspector"):
        loaded.inspect()
    assert found.family == f"lean{sim.major}" and str(found) == f"TensorRT lean {sim.version}"
    assert json.loads(json.dumps(found.describe()))["can_build"] is False
    assert sim.missed <= PROBED


def test_a_plan_of_86_gets_its_scratch_memory_on_lean_10(stand_in: Install, lean: Lean, tmp_path: Path) -> None:
    """By the calls that the runtime knows which such a plan carries: seen on an H200, the later ones give 0 bytes."""
    plan = plan_of("8.6.0", stand_in, tmp_path, version_compatible=True)
    _, found = lean("lean-10.16.1")
    loaded = found.load(plan, "m.engine", host_code=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the older calls are deprecated
        before = list(warnings.filters)
        assert loaded.scratch_bytes == SCRATCH
        context = loaded.context(0x7F00_0000, SCRATCH)
        assert warnings.filters == before
    assert context.device_memory == 0x7F00_0000
    assert not loaded.aliases("x", "y")
    with pytest.raises(EngineMismatch, match=r"depends on the data.*made by TensorRT 8\.6\.0: run it on that"):
        loaded.output_allocator(lambda *_: 1, lambda *_: None)


def test_only_a_plans_own_version_says_what_it_is_asked() -> None:
    """A plan of 10.3 on 10.16: it knows the calls of 10.1, and those of 10.15 not."""

    class Engine:
        device_memory_size, device_memory_size_v2 = 1, 2

        def get_aliased_input_tensor(self, name: str) -> str:
            return "x"

    for made, size, aliases in (((), 2, True), ((10, 0, 1), 1, False), ((10, 3), 2, False), ((10, 16), 2, True)):
        loaded = LoadedEngine(None, Engine(), None, made=made)
        assert (loaded.scratch_bytes, loaded.aliases("x", "y")) == (size, aliases)


def test_sessions_make_no_other_call_that_came_after_86() -> None:
    """Session's tests run on this engine, so with 8.6's names alone; what came later is asked for in trt/plans.py."""
    known = json.loads((API / "8.6.0.json").read_text())["classes"]
    for fake, name in ((FakeEngine, "ICudaEngine"), (FakeContext, "IExecutionContext")):
        methods = {key for key, value in vars(fake).items() if callable(value) and not key.startswith("_")}
        assert methods and methods <= set(known[name])


def test_a_stub_that_is_called_is_explained(stand_in: Install, lean: Lean, tmp_path: Path) -> None:
    """As users saw it: NVIDIA/TensorRT#4790."""
    plan = plan_of("10.16.1", stand_in, tmp_path)
    sim, found = lean("lean-10.16.1")
    text = "IRuntime::deserializeCudaEngine: Error Code 1: Internal Error (Unexpected call to stub loadRunner for X.)"
    refused = lambda runtime, plan: runtime._logger.log(sim.module.ILogger.ERROR, text)  # noqa: E731
    type.__setattr__(sim.module.Runtime, "deserialize_cuda_engine", refused)
    with pytest.raises(EngineMismatch, match="lean runtime runs version-compatible plans only"):
        found.load(plan, "m.engine")


# Which one


def test_it_builds_nothing(lean: Lean, tmp_path: Path) -> None:
    lean("lean-10.16.1")
    model = nets.conv_net(tmp_path / "m.onnx", opset=17)
    for work in (
        lambda: trtopt.build(model, tmp_path / "m.engine", backend="lean"),
        lambda: trtopt.check(model, backend="lean"),
        lambda: trtopt.Session.for_model(model, backend="lean", store=str(tmp_path / "store")),
        lambda: select("lean"),
        lambda: BuildSpec(backend="lean"),
    ):
        with pytest.raises(UsageError, match="`backend='lean'`: the lean runtime runs engines and has no builder"):
            work()
    with pytest.raises(NoBackend, match=r"TensorRT lean 10\.16\.1\.11 is, which runs engines and builds none"):
        select("auto")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]


def test_the_full_one_comes_first_and_the_lean_one_where_only_it_runs_the_plan(
    stand_in: Install, lean: Lean, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean("lean-8.6.0")
    _, full = stand_in("11.4.0")
    monkeypatch.setitem(sys.modules, "tensorrt_lean_bindings", Simulation("lean-10.16.1").module)
    everywhere, of_86 = PlanOrigin("TensorRT", "11.4.0.106", True, True), PlanOrigin("TensorRT", "8.6.0.12", True, True)
    assert plan_loader("auto", everywhere) is full
    assert plan_loader("auto", None) is full
    assert str(plan_loader("auto", of_86)) == "TensorRT lean 8.6.0"
    assert str(plan_loader("auto", PlanOrigin("TensorRT", "8.6.1.6", True, True))) == "TensorRT lean 10.16.1.11"
    assert str(plan_loader("lean", everywhere)) == "TensorRT lean 8.6.0"  # none does: the first says why
    assert plan_loader("tensorrt", of_86) is full
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(NoBackend, match="tensorrt isn't installed"):
        plan_loader("tensorrt", of_86)
    for name in ("tensorrt_lean", "tensorrt_lean_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NoBackend) as caught:
        plan_loader("lean", of_86)
    assert to_install("lean") in str(caught.value)
    with pytest.raises(UsageError, match="auto, tensorrt, lean, rtx"):
        plan_loader("dispatch", of_86)


def test_inspect_and_version_say_what_runs_where(stand_in: Install, lean: Lean, tmp_path: Path) -> None:
    path = tmp_path / "m.engine"
    path.write_bytes(plan_of("8.6.0", stand_in, tmp_path, version_compatible=True))
    lean("lean-10.16.1")
    report = trtopt.inspect(path)
    assert report.runs_on.startswith("TensorRT 8.6.0.0, later 8.x and 10.x (not 11), full or lean")
    [told] = trtopt.version().generations
    assert told["product"] == "TensorRT lean" and told["can_build"] is False
    assert told["reads"] == "version-compatible plans of 10.16.1.11; those of 8.6 to 10.16 that carry the lean runtime"


# The table


@pytest.mark.parametrize(
    ("made", "here", "lean", "why"),
    [
        (PlanOrigin("TensorRT", "8.6.0.12"), "8.6.0", False, ""),
        (PlanOrigin("TensorRT", "8.6.0.12"), "8.6.0", True, "version-compatible plans only"),
        (PlanOrigin("TensorRT", "8.6.0.12"), "8.6.1", False, "build it again here, or with `version_compatible=True`"),
        (PlanOrigin("TensorRT", "8.6.1.6"), "8.6.1.post1", False, ""),
        (PlanOrigin("TensorRT", "8.6.0", True), "8.6.0", True, ""),
        (PlanOrigin("TensorRT", "8.6.0", True), "10.16.1.11", True, "exclude_lean_runtime"),
        (PlanOrigin("TensorRT", "8.6.0", True, True), "8.6.1", False, ""),
        (PlanOrigin("TensorRT", "8.6.0", True, True), "10.16.1.11", True, ""),
        (PlanOrigin("TensorRT", "8.6.0", True, True), "11.4.0.106", True, "(not 11)"),
        (PlanOrigin("TensorRT", "8.6.1", True, True), "8.6.0", False, "not on earlier ones"),
        (PlanOrigin("TensorRT", "10.3.0.26", True, True), "10.16.1.11", False, ""),
        (PlanOrigin("TensorRT", "10.16.1.11", True, True), "11.4.0.106", True, ""),
        (PlanOrigin("TensorRT", "10.16.1.11", True, True), "10.9.0", True, "not on earlier ones"),
        (PlanOrigin("TensorRT", "11.4.0.106", True, True), "11.5.0", False, ""),
        (PlanOrigin("TensorRT", "11.4.0.106", True, True), "10.16.1.11", False, "not on earlier ones"),
        (PlanOrigin("TensorRT-RTX", "1.7.1.116"), "1.7.1", False, ""),
        (PlanOrigin("TensorRT-RTX", "1.7.1.116"), "1.8.0", False, "build it again"),
    ],
)
def test_which_plan_runs_where(made: PlanOrigin, here: str, lean: bool, why: str) -> None:
    told = unread(made, here, lean=lean)
    assert (not told) is (not why) and why in told


def test_the_table_in_words() -> None:
    assert runs_on(PlanOrigin("TensorRT", "10.3.0.26")) == "TensorRT 10.3.0.26"
    assert runs_on(PlanOrigin("TensorRT", "10.3.0.26", True)) == "TensorRT 10.3.0.26, full or lean"
    assert "later 10.x and 11.x, full" in runs_on(PlanOrigin("TensorRT", "10.3.0.26", True, True))
    assert "later 11.x, full" in runs_on(PlanOrigin("TensorRT", "11.4.0", True, True))
    assert reads("TensorRT", "8.6.0", lean=True) == "version-compatible plans of 8.6.0"
    assert reads("TensorRT", "11.4.0.106").startswith(
        "plans of 11.4.0.106; version-compatible ones of 10.0 to 11.4 that"
    )


# The library that version-compatible plans carry


@pytest.mark.parametrize("version", ["8.6.0", "10.16.1", "11.4.0"])
def test_a_missing_library_is_said_before_the_build(
    version: str, stand_in: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sim, generation = stand_in(version)
    monkeypatch.undo()
    monkeypatch.setattr("trtopt.trt.lean_library._in_wheels", lambda major: iter(()))
    monkeypatch.setattr(type(generation), "gpu", lambda self: trtopt.cuda.device.Probe((GPU,), (13, 0)))
    with pytest.raises(UnsupportedRequest) as caught:
        generation.build(nets.conv_net(tmp_path / "m.onnx", opset=17), SPEC, quantized=False)
    package = "tensorrt_lean==8.6.0" if sim.major == 8 else f"tensorrt-lean-cu12-libs=={sim.version}"
    for words in (f"libnvinfer_lean.so.{'8.6.0' if sim.major == 8 else sim.major} of it", f"pip install {package}"):
        assert words in str(caught.value)
    assert "`exclude_lean_runtime=True`" in str(caught.value)
    assert not sim.networks and not sim.configs


GPU = trtopt.cuda.device.DeviceInfo(0, "Stand-in GPU", 90, 16 << 30)

PRESENT = """
import ctypes, sys
from pathlib import Path
from trtopt.trt import lean_library
print(repr(lean_library.problem(sys.argv[1], Path("nowhere"))))
print(ctypes.CDLL(sys.argv[2]).getInferLibVersion())  # as TensorRT asks for it
"""


def library(path: Path, number: int) -> Path:
    """A library in a package's folder that says itself to be that version."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler, for a library that stands in for the lean runtime")
    path.parent.mkdir(parents=True)
    path.with_name("__init__.py").write_text("raise ImportError('nobody asked to import this')")
    source = path.with_suffix(".c")
    source.write_text(f"int getInferLibVersion(void) {{ return {number}; }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)], check=True)
    return path


def asked(site: Path, *values: str, **environment: str) -> list[str]:
    paths = os.pathsep.join([str(site), str(Path(trtopt.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    command = [sys.executable, "-c", PRESENT, *values]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.splitlines()


def test_a_wheels_library_is_found_under_the_name_that_tensorrt_asks_for(tmp_path: Path) -> None:
    path = library(tmp_path / "tensorrt_lean_libs/libnvinfer_lean.so.10", 101601)
    assert asked(tmp_path, "10.16.1.11", path.name) == ["''", "101601"]
    assert "isn't here" in asked(tmp_path, "10.16.2.3", path.name)[0]
    other = library(tmp_path / "lib" / path.name, 100900)  # the loader gives TensorRT the first of this name
    assert "isn't here" in asked(tmp_path, "10.16.1.11", path.name, LD_LIBRARY_PATH=str(other.parent))[0]


def test_the_wheel_of_86_needs_a_link_which_is_said(tmp_path: Path) -> None:
    path = library(tmp_path / "tensorrt_lean/libnvinfer_lean.so.8", 8600)
    link = path.with_name("libnvinfer_lean.so.8.6.0")
    assert f"`ln -s {path.name} {link.name}`" in asked(tmp_path, "8.6.0", link.name)[0]
    link.symlink_to(path.name)
    assert asked(tmp_path, "8.6.0", link.name, LD_LIBRARY_PATH=str(path.parent)) == ["''", "8600"]
