"""8.6, 10 and 11 against stand-ins: no unknown name is touched, every option is honoured or refused by name."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import pytest
from graphs import model as graph, node
from numpy.typing import NDArray
from standins import VERSIONS, Simulation

from trtopt.core.errors import (
    BackendError,
    BuildCancelled,
    BuildFailed,
    CalibrationError,
    DataError,
    DeviceError,
    EngineError,
    EngineMismatch,
    NoBackend,
    UnsupportedOperator,
    UnsupportedRequest,
    UsageError,
)
from trtopt.core.progress import Phase, Reporter
from trtopt.core.values import BuildSpec, Precision, ShapeRange
from trtopt.core.version import to_install
from trtopt.graph.passes.placement import GROUPED
from trtopt.trt import select, watch
from trtopt.trt.facts import GENERATIONS
from trtopt.trt.generation import BuiltPlan, Generation
from trtopt.trt.plans import plan_header

Install = Callable[[str], tuple[Simulation, Generation]]
ROWS = ShapeRange((1, 3, 32, 32), (4, 3, 32, 32), (8, 3, 32, 32))
PROFILES = ({"x": ROWS}, {"x": ShapeRange((8, 3, 32, 32), (8, 3, 32, 32), (16, 3, 32, 32))})

# The names that the door asks for to learn what a generation can do; everything else missing is a fault.
PROBED = {
    "8.6.0": {
        "IBuilderConfig.progress_monitor",
        "IPluginRegistry.all_creators",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY",
        "ICudaEngine.device_memory_size_v2",
        "BuilderFlag.STRIP_PLAN",
        "DataType.BF16",
        "DataType.INT4",
        "DataType.FP4",
        "DataType.INT64",
        "IAttention",
        "IBuilderConfig.set_compute_capability",
        "ParserError.node_name",
        "OnnxParser.supports_model_v2",
    },
    "10.16.1": {"IBuilderConfig.set_compute_capability"},
    "11.4.0": {
        "BuilderFlag.INT8",
        "ILayer.precision",
        "IBuilderConfig.int8_calibrator",
        "IBuilderConfig.set_compute_capability",
    },
}

# Each option of BuildSpec, set to something, and the generations that refuse it by the name given.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "precision": ({"precision": Precision.FP16}, {}),
    "remainder": ({"precision": Precision.INT8, "remainder": Precision.BF16}, {"8.6.0": "`remainder='bf16'`"}),
    "io_fp32": ({"precision": Precision.FP16, "io_fp32": False}, {}),
    "int4": (
        {"precision": Precision.FP16, "int4": True},
        {"8.6.0": "`int4=True`: TensorRT 8.6.0 has fp32, fp16, int8"},
    ),
    "overrides": ({}, {}),  # lowered by the graph, or by layer_precision below
    "profiles": ({"profiles": PROFILES}, {}),
    "targets": ({"targets": (89,)}, dict.fromkeys(VERSIONS, "`target=")),
    "backend": ({"backend": "tensorrt"}, {}),
    "calibrator": (
        {"precision": Precision.INT8, "calibrator": "native"},
        {"11.4.0": "`calibrator='native'`"},
    ),
    "workspace": ({"workspace": 1 << 30}, {}),
    "optimization_level": ({"optimization_level": 2}, {}),
    "max_aux_streams": ({"max_aux_streams": 0}, {}),
    "timing_cache": ({"timing_cache": "timing.cache"}, {}),
    "hardware_compatibility": (
        {"hardware_compatibility": "same_compute_capability"},
        {"8.6.0": "`hardware_compatibility='same_compute_capability'`"},
    ),
    "version_compatible": ({"version_compatible": True}, {}),
    "exclude_lean_runtime": ({"version_compatible": True, "exclude_lean_runtime": True}, {}),
    "strip": ({"strip": True}, {"8.6.0": "`strip=True`"}),
    "refit": ({"refit": True}, {}),
    "sparsity": ({"sparsity": "keep"}, {}),
    "tf32": ({"tf32": False}, {}),
    "embed_preprocess": ({"embed_preprocess": True}, {}),  # lowered by the graph
    "mark_output": ({"mark_output": ("y",)}, {}),  # lowered by the graph
    "write_out": ({"write_out": ("LayerNormalization",)}, {}),  # lowered by the graph
    "allow_precision_fallback": ({"allow_precision_fallback": True}, {}),
    "device": ({"device": 0}, {}),  # test_build_device.py
}


class Uploads:
    """Stands in for GPU memory: keeps what was copied."""

    def __init__(self) -> None:
        self.arrays: list[tuple[str, NDArray[Any]]] = []

    def __call__(self, device: int) -> Callable[[str, NDArray[Any]], int]:
        def upload(name: str, array: NDArray[Any]) -> int:
            self.arrays.append((name, array.copy()))
            return 4096 + len(self.arrays)

        return upload


@pytest.fixture(autouse=True)
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    uploads = Uploads()
    monkeypatch.setattr("trtopt.trt.weak.device_upload", uploads)
    return uploads


class Notes(Reporter):
    phases: list[Phase]

    def phase(self, name: str, total: int | None = None) -> Any:
        self.phases = [Phase(name, total)]
        return contextlib.nullcontext(self.phases[0])


def photos(count: int) -> list[dict[str, NDArray[np.float32]]]:
    ramp = np.linspace(-1, 1, 3 * 32 * 32, dtype=np.float32).reshape(3, 32, 32)
    return [{"x": np.stack([ramp * (i + j) for j in range(min(3, count - i))])} for i in range(0, count, 3)]


def build(generation: Generation, model: Path, spec: BuildSpec, **more: Any) -> BuiltPlan:
    more.setdefault("quantized", spec.precision.quantized and spec.calibrator != "native")
    return generation.build(model, spec, **more)


@pytest.fixture
def int8_net(tmp_path: Path) -> Path:
    return nets.conv_net(tmp_path / "int8.onnx", quantized="int8", opset=17)


def test_the_options_below_are_all_there_are() -> None:
    assert set(OPTIONS) == {item.name for item in fields(BuildSpec)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_honoured_or_refused_by_name(
    version: str, option: str, stand_in: Install, float_net: Path, int8_net: Path, tmp_path: Path
) -> None:
    sim, generation = stand_in(version)
    given, refused = OPTIONS[option]
    given = {"profiles": PROFILES[:1], **given}
    if "timing_cache" in given:
        given["timing_cache"] = tmp_path / given["timing_cache"]
    spec = BuildSpec(**given)
    model = int8_net if spec.precision is Precision.INT8 and spec.calibrator != "native" else float_net
    more: dict[str, Any] = {"calibration": photos(8), "calibration_batch": 4} if spec.calibrator == "native" else {}
    if version in refused:
        with pytest.raises(UnsupportedRequest) as caught:
            build(generation, model, spec, **more)
        assert refused[version] in str(caught.value)
        assert generation.version in str(caught.value)
        assert not sim.configs, "refused only after work had begun"
    else:
        built = build(generation, model, spec, **more)
        assert len(built.layers) == 3 and not built.unread
    assert sim.missed <= PROBED[version]


@pytest.mark.parametrize("version", VERSIONS)
def test_all_options_at_once_set_exactly_these(
    version: str, stand_in: Install, float_net: Path, tmp_path: Path
) -> None:
    sim, generation = stand_in(version)
    spec = BuildSpec(
        profiles=PROFILES,
        workspace=64 << 20,
        optimization_level=5,
        max_aux_streams=0,
        timing_cache=tmp_path / "t.cache",
        hardware_compatibility="ampere_plus",
        version_compatible=True,
        exclude_lean_runtime=True,
        strip=version != "8.6.0",
        refit=True,
        sparsity="keep",
        tf32=False,
    )
    build(generation, float_net, spec)
    config = sim.configs[-1]
    wanted = {"VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME", "REFIT", "SPARSE_WEIGHTS"}
    # 10 and 11 call one number by two names: STRIP_PLAN and WEIGHTLESS
    assert {name.replace("WEIGHTLESS", "STRIP_PLAN") for name in config._flags} == wanted | (
        {"STRIP_PLAN"} if version != "8.6.0" else set()
    )
    assert config._pools == {"WORKSPACE": 64 << 20} and config._cache is not None
    assert config._previews == ({"PROFILE_SHARING_0806": True} if version == "8.6.0" else {})
    assert config.builder_optimization_level == 5
    assert config.max_aux_streams == 0
    assert config.profiling_verbosity is sim.module.ProfilingVerbosity.DETAILED
    assert config.hardware_compatibility_level is sim.module.HardwareCompatibilityLevel.AMPERE_PLUS
    wanted_shapes = [{"x": (item["x"].min, item["x"].opt, item["x"].max)} for item in PROFILES]
    assert [profile._shapes for profile in config._profiles] == wanted_shapes
    assert sim.missed <= PROBED[version]


@pytest.mark.parametrize(
    ("version", "native", "flags"),
    [
        ("8.6.0", False, {"EXPLICIT_BATCH"}),
        ("8.6.0", True, {"EXPLICIT_BATCH"}),
        ("10.16.1", False, {"STRONGLY_TYPED"}),
        ("10.16.1", True, set()),
        ("11.4.0", False, set()),
    ],
)
def test_network_flags(version: str, native: bool, flags: set[str], stand_in: Install, float_net: Path) -> None:
    sim, generation = stand_in(version)
    spec = BuildSpec(profiles=PROFILES[:1])
    if native:
        spec = replace(spec, precision=Precision.INT8, calibrator="native")
    build(generation, float_net, spec, calibration=photos(4), calibration_batch=4)
    kinds = sim.module.NetworkDefinitionCreationFlag
    assert {kind.name for kind in kinds if sim.networks[-1]._flags >> int(kind) & 1} == flags
    assert generation.typed(spec) is ("STRONGLY_TYPED" in flags or version == "11.4.0")


def test_86_precision_is_flags_over_an_fp32_graph(stand_in: Install, int8_net: Path, float_net: Path) -> None:
    sim, generation = stand_in("8.6.0")
    spec = BuildSpec(precision=Precision.INT8, profiles=PROFILES[:1])
    built = build(generation, int8_net, spec)
    assert sim.configs[-1]._flags == {"TF32", "INT8", "FP16"}
    assert [(layer.kind, layer.precision, layer.nodes[0]) for layer in built.layers] == [
        ("convolution", Precision.INT8, "conv1"),
        ("convolution", Precision.INT8, "conv2"),
        ("matmul", Precision.INT8, "fc"),  # 8.6 calls it a convolution; the ONNX node says what it is
    ]
    build(generation, float_net, replace(spec, precision=Precision.FP16))
    assert sim.configs[-1]._flags == {"TF32", "FP16"}
    build(generation, int8_net, replace(spec, precision=Precision.FP16), quantized=True)  # by the Q/DQ of its own
    assert sim.configs[-1]._flags == {"TF32", "FP16", "INT8"}
    build(generation, float_net, replace(spec, precision=Precision.FP16, io_fp32=False))
    ends = (*sim.networks[-1]._tensors, *sim.networks[-1]._results)
    assert {tensor.dtype.name for tensor in ends} == {"HALF"}
    with pytest.raises(UsageError, match="no Q/DQ"):
        build(generation, float_net, spec, quantized=False)


@pytest.mark.parametrize("fallback", [False, True])
def test_86_pins_layers_by_node_name(fallback: bool, stand_in: Install, float_net: Path) -> None:
    sim, generation = stand_in("8.6.0")
    spec = BuildSpec(precision=Precision.FP16, profiles=PROFILES[:1], allow_precision_fallback=fallback)
    wanted = {"conv2": Precision.FP32, "nowhere": Precision.FP32}
    built = build(generation, float_net, spec, layer_precision=wanted)
    pinned = {layer.name: layer._set.get("precision") for layer in sim.networks[-1]._layers}
    assert pinned.pop("conv2") is sim.module.DataType.FLOAT
    assert set(pinned.values()) == {None}
    flag = "PREFER_PRECISION_CONSTRAINTS" if fallback else "OBEY_PRECISION_CONSTRAINTS"
    assert {name for name in sim.configs[-1]._flags if "CONSTRAINTS" in name} == {flag}
    assert any("nowhere" in warning for warning in built.warnings)


# Native calibration


@pytest.mark.parametrize("version", ["8.6.0", "10.16.1"])
def test_native_calibration_regroups_and_reports(
    version: str, uploads: Uploads, stand_in: Install, float_net: Path
) -> None:
    sim, generation = stand_in(version)
    spec = BuildSpec(precision=Precision.INT8, calibrator="native", profiles=PROFILES[:1])
    built = build(generation, float_net, spec, calibration=photos(11), calibration_batch=4)
    assert [array.shape for _, array in uploads.arrays] == [(4, 3, 32, 32)] * 2
    expected = np.concatenate([batch["x"] for batch in photos(11)])[:8]
    np.testing.assert_array_equal(np.concatenate([array for _, array in uploads.arrays]), expected)
    assert any("last 3 samples" in warning for warning in built.warnings)
    header = {"8.6.0": b"TRT-8600-", "10.16.1": b"TRT-101601-"}[version]
    assert built.native_cache is not None and built.native_cache.startswith(header)
    assert sim.configs[-1]._calibration._shapes == {"x": ((4, 3, 32, 32),) * 3}
    assert sim.missed <= PROBED[version]

    for number in (b"8600", b"101601"):  # of another version, as trtopt writes it, too
        cache = b"TRT-" + number + built.native_cache[len(header) - 1 :]
        cached = build(generation, float_net, spec, calibration_cache=cache)  # reads no data
        assert len(uploads.arrays) == 2 and cached.native_cache == built.native_cache


def test_native_calibration_faults(stand_in: Install, float_net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, generation = stand_in("8.6.0")
    spec = BuildSpec(precision=Precision.INT8, calibrator="native", profiles=PROFILES[:1])

    def broken() -> Any:
        yield photos(3)[0]
        yield photos(3)[0]
        raise DataError("photo 7 is corrupt")

    with pytest.raises(DataError, match="photo 7"):  # raised inside TensorRT's callback, not lost there
        build(generation, float_net, spec, calibration=broken(), calibration_batch=3)
    with pytest.raises(DataError, match="0 samples, fewer"):
        build(generation, float_net, spec, calibration=[])
    with pytest.raises(DataError, match="3 samples, fewer than one batch of 8"):
        build(generation, float_net, spec, calibration=photos(3), calibration_batch=8)
    monkeypatch.setattr("standins._calibrate", lambda *_: None)  # the calibrator is never asked
    with pytest.raises(CalibrationError):
        build(generation, float_net, spec, calibration=photos(3), calibration_batch=3)


# The parser


@pytest.mark.parametrize("version", VERSIONS)
def test_every_unsupported_node_at_once(version: str, stand_in: Install, tmp_path: Path, float_net: Path) -> None:
    sim, generation = stand_in(version)
    model = nets.bad_nodes(tmp_path / "bad.onnx")
    assert [(issue.node, issue.op) for issue in generation.unsupported(model)] == [
        ("custom_node", "Frobnicate"),
        ("det_node", "Det"),
    ]
    assert generation.unsupported(float_net) == ()
    onnx.save(graph([node("NonZero", "x", "y")]), tmp_path / "found.onnx")
    assert generation.unsupported(tmp_path / "found.onnx") == ()
    with pytest.raises(UnsupportedOperator) as caught:
        build(generation, model, BuildSpec())
    assert "custom_node (Frobnicate)" in str(caught.value) and "det_node (Det)" in str(caught.value)
    assert sim.missed <= PROBED[version]


# No GPU


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_gpu_nothing_native_is_touched(
    version: str, stand_in: Install, with_gpu: Callable[[int | None], None], float_net: Path
) -> None:
    sim, generation = stand_in(version)
    plan = build(generation, float_net, BuildSpec(profiles=PROFILES[:1])).plan
    with_gpu(None)
    sim.has_gpu, before = False, len(sim.networks)
    with pytest.raises(UnsupportedRequest, match="`backend='rtx'`"):
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1]))
    with pytest.raises(DeviceError, match="needs a GPU"):
        generation.unsupported(float_net)
    with pytest.raises(DeviceError, match="needs a GPU"):  # 8.6's Runtime() would end the process
        generation.load(plan)
    assert len(sim.networks) == before
    assert generation.describe()["can_build"] is False


def test_a_builder_that_does_not_start_says_what_tensorrt_said(stand_in: Install, float_net: Path) -> None:
    sim, generation = stand_in("11.4.0")
    sim.start_error = "Unable to load library: libnvinfer_builder_resource_sm90.so.11.2.1"
    with pytest.raises(
        BackendError, match=r"can't start: its library libnvinfer_builder_resource_sm90.so.11.2.1"
    ) as told:
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1]))
    assert "needs a GPU" not in str(told.value) and "nullptr" not in str(told.value)
    sim, generation = stand_in("8.6.0")
    sim.has_gpu = False  # the driver shows a GPU, TensorRT can't use it
    with pytest.raises(DeviceError, match="CUDA initialization failure"):
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1]))


@pytest.mark.parametrize(("capability", "precision"), [(75, Precision.BF16), (86, Precision.FP8)])
def test_the_gpu_itself_can_refuse_a_precision(
    capability: int, precision: Precision, stand_in: Install, with_gpu: Callable[[int | None], None], float_net: Path
) -> None:
    _, generation = stand_in("11.4.0")
    with_gpu(capability)
    with pytest.raises(UnsupportedRequest, match=f"this GPU is sm{capability}"):
        build(generation, float_net, BuildSpec(precision=precision, profiles=PROFILES[:1]))


def test_86_lists_everything_it_refuses_at_once(stand_in: Install, float_net: Path) -> None:
    _, generation = stand_in("8.6.0")
    spec = BuildSpec(precision=Precision.FP8, remainder=Precision.BF16, targets=(89,), strip=True)
    with pytest.raises(UnsupportedRequest) as caught:
        generation.refuse(spec)
    for named in ("`fp8=True`", "`remainder='bf16'`", "`target=", "`strip=True`", "TensorRT 8.6.0"):
        assert named in str(caught.value)


# Messages, failures, progress, cancelling


def test_a_builder_is_kept_for_the_next_build_unless_one_failed(stand_in: Install, float_net: Path) -> None:
    sim, generation = stand_in("10.16.1")
    spec, kind, made = BuildSpec(profiles=PROFILES[:1]), generation.module.Builder, list[Any]()

    def counted(*arguments: Any) -> Any:
        made.append(kind(*arguments))
        return made[-1]

    sim.module.Builder = counted
    generation.unsupported(float_net)
    build(generation, float_net, spec)
    build(generation, float_net, spec)
    assert len(made) == 1
    sim.fail = "Error Code 10: Internal Error (Could not find any implementation for node conv1.)"
    with pytest.raises(UnsupportedOperator):
        build(generation, float_net, spec)
    sim.fail = None
    build(generation, float_net, spec)
    assert len(made) == 2


def test_messages_are_counted_and_translated(stand_in: Install, float_net: Path, capfd: Any) -> None:
    sim, generation = stand_in("8.6.0")
    texts = [
        "TensorRT encountered issues when converting weights between types and that could affect accuracy.",
        *[f"Weights [name=conv{i}] had the following issues when converted to FP16:" for i in range(40)],
        "onnx2trt_utils.cpp:375: Your ONNX model has been generated with INT64 weights, while TensorRT does not",
        "something new",
    ]
    sim.warnings = [("WARNING", text) for text in texts]
    notes = Notes()
    built = build(generation, float_net, BuildSpec(profiles=PROFILES[:1]), reporter=notes)
    assert built.warnings == (
        "weights too small for FP16 (subnormal or zero there) (40 times)",
        "INT64 weights were cast to INT32",
        "something new",
    )
    assert notes.phases[0].text == "timing conv1 + relu1"  # the only sign of life that 8.6 gives
    sim.fail = "Error Code 10: Internal Error (Could not find any implementation for node conv1 + relu1.)"
    with pytest.raises(UnsupportedOperator, match=r"conv1 \+ relu1"):
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1]))
    sim.fail = "a fault nobody has seen before"
    with pytest.raises(BuildFailed, match="nobody has seen"):
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1]))
    assert capfd.readouterr() == ("", "")  # nothing is ever printed raw


@pytest.mark.parametrize("version", ["10.16.1", "11.4.0"])
def test_ctrl_c_stops_a_monitored_build(version: str, stand_in: Install, float_net: Path, tmp_path: Path) -> None:
    sim, generation = stand_in(version)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)  # let the main thread see it before the next step

    sim.block = interrupt
    cache = tmp_path / "t.cache"
    with pytest.raises(BuildCancelled, match="nothing was written"):
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1], timing_cache=cache))
    assert not cache.exists()
    sim.block = None
    assert build(generation, float_net, BuildSpec(profiles=PROFILES[:1])).layers  # and the next build works


def test_86_ctrl_c_leaves_the_build_behind(stand_in: Install, float_net: Path) -> None:
    sim, generation = stand_in("8.6.0")
    go_on = threading.Event()

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        assert go_on.wait(30)

    sim.block = interrupt
    with pytest.raises(BuildCancelled, match="until this process ends"):
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1]))
    with pytest.raises(BackendError, match="start a new process"):  # two builds would time each other
        build(generation, float_net, BuildSpec(profiles=PROFILES[:1]))
    sim.block = None
    go_on.set()
    assert watch._abandoned and not wait(watch._abandoned, 30).not_done
    assert build(generation, float_net, BuildSpec(profiles=PROFILES[:1])).layers


# Timing cache


@pytest.mark.parametrize("version", VERSIONS)
def test_timing_cache_is_read_merged_and_replaced(
    version: str, stand_in: Install, float_net: Path, tmp_path: Path
) -> None:
    sim, generation = stand_in(version)
    cache = tmp_path / "timing.cache"
    spec = BuildSpec(profiles=PROFILES[:1], timing_cache=cache)
    assert not build(generation, float_net, spec).warnings
    own = cache.read_bytes()
    assert own == f"timings of {sim.version}\n".encode()

    sim.block = lambda: cache.write_bytes(own + b"another build's\n")  # two builds at once
    build(generation, float_net, spec)
    assert cache.read_bytes() == own + b"another build's\n"

    sim.block = None
    cache.write_bytes(b"timings of 7.0\n")
    built = build(generation, float_net, spec)
    assert any("another TensorRT" in warning for warning in built.warnings)
    assert cache.read_bytes() == own
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".onnx", ".cache")] == []


# Plans


def test_plans_of_others_are_refused_with_both_versions(stand_in: Install, float_net: Path) -> None:
    _, older = stand_in("8.6.0")
    plan = bytes(build(older, float_net, BuildSpec(profiles=PROFILES[:1])).plan)
    assert str(plan_header(plan)) == "TensorRT 8.6.0.0"
    loaded = older.load(plan)
    assert json.loads(loaded.inspect(), strict=False)["Layers"]
    _, newer = stand_in("10.16.1")
    with pytest.raises(EngineMismatch, match=r"TensorRT 8\.6\.0\.0.*10\.16\.1\.11"):
        newer.load(plan, "old.engine")
    with pytest.raises(EngineMismatch, match=r"old\.engine was made by TensorRT-RTX 1\.7\.1\.116.*`backend='rtx'`"):
        newer.load(b"vtrt" + bytes(20) + bytes([1, 7, 1, 116]) + bytes(64), "old.engine")
    with pytest.raises(EngineError, match="isn't a TensorRT plan"):
        newer.load(b"not a plan" * 20)
    with pytest.raises(EngineError, match="0 bytes"):
        newer.load(b"")


@pytest.mark.parametrize("version", VERSIONS)
def test_code_for_the_host_is_run_out_of_trusted_plans_only(version: str, stand_in: Install, float_net: Path) -> None:
    _, generation = stand_in(version)
    spec = BuildSpec(profiles=PROFILES[:1], version_compatible=True)
    plan = bytes(build(generation, float_net, spec).plan)
    with pytest.raises(UsageError, match=r"m\.engine is version-compatible: .*machine code.*`trust_host_code=True`"):
        generation.load(plan, "m.engine")
    assert json.loads(generation.load(plan, "m.engine", host_code=True).inspect(), strict=False)["Layers"]
    excluded = bytes(build(generation, float_net, replace(spec, exclude_lean_runtime=True)).plan)
    assert len(excluded) < len(plan)
    assert generation.load(excluded, "m.engine").engine is not None
    kernel = b"\x7fELF".ljust(18, b"\0") + (190).to_bytes(2, "little")  # EM_CUDA: every plan holds such
    with pytest.raises(EngineError):
        generation.load(excluded + kernel, "m.engine")


# Which one


def test_select(stand_in: Install, with_gpu: Callable[[int | None], None], monkeypatch: Any) -> None:
    stand_in("11.4.0")
    assert select("auto").family == "tensorrt11"
    unknown = Simulation("11.4.0")
    unknown.module.__version__ = "7.2.3"
    monkeypatch.setitem(sys.modules, "tensorrt", unknown.module)
    with pytest.raises(NoBackend, match=r"7\.2\.3 isn't supported"):
        select("tensorrt")
    with_gpu(None)
    assert select("auto").family == "rtx"
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(NoBackend, match=r"pip install 'tensorrt-rtx"):
        select("auto")
    with pytest.raises(NoBackend, match=r"pip install 'tensorrt-rtx"):
        select("rtx")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(NoBackend) as caught:
        select("auto")
    assert all(to_install(extra) in str(caught.value) for extra in ("rtx", "trt8", "trt10", "trt11"))
    with pytest.raises(NoBackend, match=r"pip install 'tensorrt==8"):
        select("tensorrt")
    with pytest.raises(UsageError, match="auto, tensorrt, rtx"):
        select("cuda")


ABANDONED = """
import signal, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from standins import Simulation
import trtopt, trtopt.trt.loader
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.core.values import BuildSpec

sim = Simulation("8.6.0")
sys.modules["tensorrt"] = sim.module
trtopt.trt.loader.probe = lambda: Probe((DeviceInfo(0, "Stand-in GPU", 90, 1 << 30),), (13, 0))
sim.block = lambda: (signal.raise_signal(signal.SIGINT), threading.Event().wait(600))
try:
    trtopt.trt.select("tensorrt").build(Path(sys.argv[2]), BuildSpec(), quantized=False)
except trtopt.BuildCancelled as error:
    print(error)
"""


def test_a_process_with_an_abandoned_build_still_ends(tmp_path: Path) -> None:
    model = nets.conv_net(tmp_path / "m.onnx", opset=17, batch=1)
    command = [sys.executable, "-c", ABANDONED, str(Path(__file__).parent), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "")
    assert "until this process ends" in done.stdout


def test_plugins_are_registered_before_a_plan_names_them(
    stand_in: Install, float_net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with a ScatterElements of TensorRT 10.6 loads in the process that built it, and in no other, without them."""
    sim, generation = stand_in("10.16.1")
    plan, done = build(generation, float_net, BuildSpec(profiles=PROFILES[:1])).plan, list[str]()
    runtime = sim.module.Runtime
    monkeypatch.setattr(sim.module, "init_libnvinfer_plugins", lambda *_: done.append("plugins"))
    monkeypatch.setattr(sim.module, "Runtime", lambda *given: done.append("runtime") or runtime(*given))
    generation.load(plan)
    assert done == ["plugins", "runtime"]


def test_what_stays_in_floats_is_named_as_placement_names_it(stand_in: Install) -> None:
    for version in ("10.16.1", "11.4.0"):
        capabilities = stand_in(version)[1].capabilities
        assert set(capabilities.floating(Precision.FP8, 3)) == {"ConvTranspose", GROUPED}
        at_0 = {"MatMul", "Gemm"} if version == "10.16.1" else set()
        assert set(capabilities.floating(Precision.INT8, 0)) - set(capabilities.floating(Precision.INT8, 1)) == at_0
        assert "(seen on 10.6)" in capabilities.quantized_between["ConvTranspose"]  # 11 wasn't tried
    assert set(GENERATIONS["rtx"].known["float_only"]["fp8"]) == {"ConvTranspose", GROUPED}
