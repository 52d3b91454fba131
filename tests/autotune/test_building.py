"""build with a comparison: real builds by TensorRT-RTX, run and timed on a GPU that is played."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from graphs import written
from world import Heard, World, has

import trtopt
from trtopt.autotune import building, candidates
from trtopt.autotune.selection import Comparison
from trtopt.builder import construction as engine
from trtopt.builder.request import BuildRequest
from trtopt.calibration.scales import Scales
from trtopt.calibration.table import Table
from trtopt.core.documents import converted
from trtopt.core.errors import (
    AccuracyLost,
    BuildFailed,
    DeviceError,
    EngineError,
    MissingDependency,
    OutputError,
    PrecisionLost,
    UsageError,
)
from trtopt.core.values import LayerInfo, TensorInfo
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.engine.manifest import embedded_by, load_manifest
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.timing import LayerTime, LayerTimes, Spread, Timing
from trtopt.trt import select

pytestmark = pytest.mark.usefixtures("rtx")


class Gpu:
    """What the GPU is made to do. `ms` and `noise` (of the results, relative) by precision; `longer` gives a factor on times,
    `refuse` an error for a build."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info = DeviceInfo(0, "Played GPU", 89, 1 << 30)
        self.ms = {"int8": 0.5, "fp16": 0.8, "fp32": 1.6}
        self.noise = {"int8": 0.1, "fp16": 1e-3, "fp32": 0.0}
        self.ran: list[str] = []
        self.opened: list[PlayedSession] = []
        self.built: list[str] = []
        self.model = world.model
        self.stop: BaseException | None = None
        self.longer: Callable[[PlayedSession, Any], float] = lambda session, inputs: 1.0
        self.refuse: Callable[[BuildRequest], BaseException | None] = lambda request: None
        self.asked: list[BuildRequest] = []
        self.layer_ms: dict[tuple[str, str], float] = {}  # (precision of the engine, node) → of the layer that has it
        construct = engine.construct

        def counted(request: BuildRequest) -> Any:
            self.asked.append(request)
            if (error := self.refuse(request)) is not None:
                raise error
            result = construct(request)
            if not result.cached:
                manifest = load_manifest(result.engine)
                assert manifest is not None
                self.built.append(str(manifest.spec["precision"]))
            return result

        monkeypatch.setattr(engine, "construct", counted)
        monkeypatch.setattr("trtopt.trt.loader.probe", lambda: Probe((self.info,), (13, 0)))
        monkeypatch.setattr(candidates, "Device", lambda ordinal: SimpleNamespace(info=self.info))
        monkeypatch.setattr(candidates, "Session", lambda path, **_: PlayedSession(self, path))


class PlayedSession:
    def __init__(self, gpu: Gpu, path: Path) -> None:
        manifest = load_manifest(path)
        assert manifest is not None
        manifest.check_plan(path)
        self.gpu, self.path, self.precision, self.open = gpu, path, str(manifest.spec["precision"]), True
        self.inputs = tuple(TensorInfo(**item) for item in manifest.inputs)
        self.outputs = tuple(TensorInfo(**item) for item in manifest.outputs)
        self.profiles = tuple(
            {name: shape for part in profile.items() for name, shape in [_range(*part)]}
            for profile in manifest.profiles
        )
        self.layers = converted(list(manifest.layers), tuple[LayerInfo, ...])
        self.runner = OnnxRunner(gpu.model, optimize=True, threads=1)
        self.embedded = embedded_by(manifest)
        gpu.opened.append(self)

    def __enter__(self) -> PlayedSession:
        return self

    def __exit__(self, *_: Any) -> None:
        self.open = False

    def time(self, inputs: Any, iterations: int, warmup: int) -> Timing:
        assert self.open
        if self.gpu.stop is not None:
            raise self.gpu.stop
        ms = self.gpu.ms[self.precision] * self.gpu.longer(self, inputs)
        return Timing(Spread(ms, ms, ms, ms), Spread(ms, ms, ms, ms), iterations, True)

    def profile(self, inputs: Any) -> LayerTimes:
        assert self.open
        if self.gpu.stop is not None:
            raise self.gpu.stop
        ms = self.gpu.layer_ms
        layers = [
            LayerTime(layer.name, time, time, time, layer.kind, layer.precision, layer.nodes)
            for layer in self.layers
            for each in [ms.get((self.precision, node), self.gpu.ms[self.precision]) for node in layer.nodes[:1]]
            for time in [each if layer.kind != "other" else 0.001]
        ]
        return LayerTimes({}, tuple(layers), Spread(1, 1, 1, 1), 1)

    def taken(self, inputs: Any) -> Any:
        return inputs if self.embedded is None else self.embedded.to_pixels(inputs)

    def run_batches(self, inputs: Any) -> dict[str, Any]:
        assert self.open
        if self.embedded is not None:
            assert all(array.dtype == np.uint8 for array in inputs.values())
            inputs = self.embedded.from_pixels(inputs)
        self.gpu.ran.append(self.precision)
        noise = self.gpu.noise[self.precision]
        return {
            name: array + noise * np.abs(array).max() * np.where(np.arange(array.shape[-1]) % 2, 1, -1)
            for name, array in self.runner(inputs).items()
        }


def _range(name: str, text: str) -> tuple[str, Any]:
    return next(iter(trtopt.core.shapes.parse_profile(f"{name}:{text}").items()))  # type: ignore[attr-defined]


@pytest.fixture
def gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(world, monkeypatch)


Build = Callable[..., Any]


@pytest.fixture
def build(world: World) -> Build:
    def run(**options: Any) -> Any:
        own = {"min_agreement": 0.0, "output_kind": ["y=classes"]} if options.get("best") else {"int8": True}
        return trtopt.build(
            world.model, world.output / "m.engine", **{"data": world.arrays, "target": "sm89", **own, **options}
        )

    return run


def _manifest(result: Any) -> Any:
    manifest = load_manifest(result.engine)
    assert manifest is not None
    manifest.check_plan(result.engine)
    return manifest


# What was asked for ----------------------------------------------------------------------------------------------------


def test_int8_is_measured_against_fp16_and_kept(gpu: Gpu, build: Build, world: World) -> None:
    heard = Heard()
    result = build(reporter=heard)
    assert gpu.built == ["int8", "fp16"]
    assert not result.not_measured
    assert result.comparison["speedup"] == pytest.approx(1.6)
    assert result.comparison["kept"] == "int8"
    assert result.comparison["inputs"] == "real samples"
    assert result.comparison["candidates"][0]["times"][0]["shapes"] == {"x": "8x3x32x32"}
    assert _manifest(result).comparison == json.loads(json.dumps(result.comparison))
    assert _manifest(result).spec["precision"] == "int8"
    assert not [text for text in heard.warnings if "FP16" in text]
    assert set(world.contents()) == {"m.engine", "m.engine.json"}  # the other engine is gone
    assert not [session for session in gpu.opened if session.open]


def test_int8_with_wrong_results_is_said_loudly_and_kept(gpu: Gpu, build: Build) -> None:
    gpu.noise["int8"], heard = 2.0, Heard()
    result = build(reporter=heard)
    has(result.comparison["reference"], "the FP16 engine")
    has("\n".join(heard.warnings), "have little to do with the model's (against the FP16 engine: y", "--per-layer")
    again = Heard()
    assert build(reporter=again).cached and again.warnings == heard.warnings
    gpu.noise["int8"], fine = 0.1, Heard()
    build(reporter=fine, force=True)
    assert not [text for text in fine.warnings if "little to do" in text]


def test_int8_slower_than_fp16_is_said_loudly_and_kept(gpu: Gpu, build: Build) -> None:
    gpu.ms["int8"], heard, again = 0.96, Heard(), Heard()
    result = build(reporter=heard)
    assert _manifest(result).spec["precision"] == "int8"
    (said,) = [text for text in heard.warnings if "FP16" in text]
    assert said.startswith("INT8 takes 1.20 times as long as FP16 on Played GPU")
    has(
        result.comparison["why"],
        "INT8 as asked for: 1.20 times the time of FP16 (0.96 and 0.8 ms at x 8x3x32x32); against FP16:",
    )
    assert said.endswith("use `best=True` or `fp16=True`")
    assert build(reporter=again).cached and said in again.warnings
    gpu.ms["int8"] = 0.8
    build(force=True, reporter=again)
    assert any("INT8 is no faster than FP16" in text for text in again.warnings)


def test_an_up_to_date_engine_is_not_measured_again(gpu: Gpu, build: Build) -> None:
    first = build()
    again = build()
    assert again.cached
    assert again.comparison == first.comparison
    assert gpu.built == ["int8", "fp16"]
    gpu.info = DeviceInfo(0, "Another GPU", 89, 1 << 30)
    moved = build()
    assert moved.cached
    assert "Another GPU" in moved.comparison["gpu"]
    assert gpu.built == ["int8", "fp16", "fp16"]


def test_fp16_is_built_with_the_same_options_but_those_of_int8(gpu: Gpu, build: Build) -> None:
    overrides = ["conv1=fp32", "Relu=fp16", "conv2=int8"]
    shapes = "x:1x3x32x32,4x3x32x32,4x3x32x32"
    build(shapes=shapes, workspace="1GiB", optimization_level=1, precision_override=overrides, limit=20)
    _, other = gpu.asked
    assert other.shapes == (shapes,)
    assert (other.workspace, other.optimization_level, other.fp16) == ("1GiB", 1, True)
    assert other.precision_override == ["conv1=fp32", "Relu=fp16"]
    assert (other.int8, other.data, other.limit) == (False, None, None)
    gpu.ms["bf16"], gpu.noise["bf16"] = 0.9, 0.0
    assert build(bf16=True).comparison["speedup"] == pytest.approx(1.8)  # compared with BF16 then
    assert gpu.built[-2:] == ["int8", "bf16"]


OBSTACLES: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    (
        lambda gpu, patch: patch.setattr(
            "trtopt.trt.loader.probe", lambda: Probe(reason="no NVIDIA driver is installed")
        ),
        DeviceError,
        ("no GPU here", "no NVIDIA driver"),
    ),
    (
        lambda gpu, patch: setattr(gpu, "info", DeviceInfo(0, "H-GPU", 90, 1 << 30)),
        DeviceError,
        ("the engine is for sm89", "H-GPU (sm90", "`target='sm90'`"),
    ),
    (
        lambda gpu, patch: patch.setattr(
            candidates, "Device", Mock(side_effect=MissingDependency("install trtopt[gpu]"))
        ),
        MissingDependency,
        ("trtopt[gpu]",),
    ),
]


@pytest.mark.parametrize(("break_it", "kind", "words"), OBSTACLES)
def test_what_can_not_be_measured_is_built_and_best_fails_before_the_build(
    gpu: Gpu, build: Build, world: World, monkeypatch: pytest.MonkeyPatch, break_it: Any, kind: Any, words: Any
) -> None:
    break_it(gpu, monkeypatch)
    with pytest.raises(kind) as caught:
        build(best=True)
    instead = "`int8=True` or `fp16=True` instead of `best=True`"
    has(str(caught.value), "`best=True` measures engines on a GPU", *words, instead)
    assert gpu.built == [] and world.contents() == {}
    result = build()
    has(result.not_measured, *words)
    assert result.comparison is _manifest(result).comparison is None and gpu.built == ["int8"]
    assert result.to_json()["not_measured"] == result.not_measured


def test_models_with_qdq_and_stripped_engines_are_not_compared(gpu: Gpu, build: Build, world: World) -> None:
    build(compare=False, save_onnx=world.output / "qdq.onnx")
    result = trtopt.build(world.output / "qdq.onnx", world.output / "again.engine", int8=True, target="sm89")
    has(result.not_measured, "already holds Q/DQ", "give the float model")
    with pytest.raises(UsageError, match=r"already holds Q/DQ.*`int8=True` or `fp16=True`"):
        trtopt.build(world.output / "qdq.onnx", world.output / "b.engine", best=True, data=world.arrays, target="sm89")
    with pytest.raises(UsageError, match=r"`strip=True`"):
        build(best=True, strip=True)
    assert gpu.built == ["int8", "int8"]


def test_without_comparison_only_what_was_asked_for_is_built(gpu: Gpu, build: Build) -> None:
    result = build(compare=False)
    assert gpu.built == ["int8"]
    assert result.not_measured == "`compare=False` was given"
    assert build().comparison["speedup"] == pytest.approx(1.6)  # asked for now: INT8 isn't built again
    assert gpu.built == ["int8", "fp16"]
    result = build(int8=False, fp16=True, data=None)
    assert (result.comparison, result.not_measured, gpu.built[2:]) == (None, "", ["fp16"])


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), EngineError("it can't run")])
def test_a_comparison_that_ends_early_leaves_the_engine_whole(
    gpu: Gpu, build: Build, world: World, stop: BaseException
) -> None:
    gpu.stop, heard = stop, Heard()
    if isinstance(stop, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            build(reporter=heard)
        said = "m.engine is written; interrupted before it was measured against FP16"
    else:
        said = build(reporter=heard).not_measured
        assert said == str(stop)
    has("\n".join(heard.warnings), said)
    assert set(world.contents()) == {"m.engine", "m.engine.json"}
    manifest = load_manifest(world.output / "m.engine")
    assert manifest is not None and manifest.comparison is None
    manifest.check_plan(world.output / "m.engine")
    gpu.stop = None
    assert build().comparison["speedup"] == pytest.approx(1.6) and gpu.built == ["int8", "fp16", "fp16"]


def test_a_profile_in_which_int8_is_slower_keeps_the_best_from_it(gpu: Gpu, build: Build) -> None:
    gpu.longer = lambda session, inputs: 2.0 if session.precision == "int8" and len(inputs["x"]) == 1 else 1.0
    options = {"shapes": ["x:1x3x32x32", "x:8x3x32x32"]}
    steady = build(**options, best=True).comparison
    assert steady["kept"] == "fp16"
    has(steady["why"], "of INT8", "takes longer than FP16 at x 1x3x32x32 (1.25", "`int8=True`")
    asked = build(**options).comparison  # is told with both profiles' times
    assert asked["kept"] == "int8"
    has(asked["why"], "1 and 0.8 ms, 0.5 and 0.8 ms")


# The best ----------------------------------------------------------------------------------------------------------------


def test_best_keeps_the_faster_one_with_all_that_belongs_to_it(gpu: Gpu, build: Build, world: World) -> None:
    heard = Heard()
    result = build(best=True, reporter=heard)
    manifest = _manifest(result)
    assert gpu.built == ["int8", "fp16"] and result.engine == world.output / "m.engine"
    assert manifest.spec["precision"] == result.comparison["kept"] == "int8" and result.precision["int8"] == 2
    has(result.comparison["why"], "INT8 kept: 1.60 times as fast as FP16", "of 40 samples")
    has(result.comparison["reference"], "ONNX Runtime", "on the CPU")
    assert result.comparison["why"] in heard.notes
    assert json.loads(json.dumps(result.to_json()))["comparison"] == manifest.comparison
    assert set(world.contents()) == {"m.engine", "m.engine.json"}
    assert not [session for session in gpu.opened if session.open]
    gpu.ms["int8"], graph = 0.9, world.output / "graph.onnx"
    names = [f"bird {number}" for number in range(16)]
    result = build(best=True, int8=True, save_onnx=graph, classes=names, force=True)
    manifest = _manifest(result)
    assert manifest.spec["precision"] == "fp16" and manifest.graph_file == "graph.onnx"
    assert load_model(graph).fingerprint == manifest.graph and manifest.classes[3] == "bird 3"
    assert result.onnx == graph and result.table is None
    assert set(world.contents()) == {"m.engine", "m.engine.json", "graph.onnx"}


def test_best_judges_outputs_by_their_kind(gpu: Gpu, build: Build) -> None:
    """The net ends in a pooled layer: an embedding. INT8's is 10 dB off, which as classes it may be."""
    guessed = build(best=True, min_agreement=0.95, output_kind=())
    assert _manifest(guessed).output_kinds == {"y": "embedding"}
    assert _manifest(guessed).spec["precision"] == "fp16"
    has(
        guessed.comparison["why"],
        "y: 10.",
        "dB, at least 20",
        "cosine 0.",
        "at least 0.99",
        "y (embedding): cosine 0.9999 in the mean",
    )
    assert build(best=True, min_agreement=0.95, output_kind={"y": "embedding"}).cached
    said = build(best=True)
    assert not said.cached
    assert _manifest(said).output_kinds == {"y": "classes"}
    assert _manifest(said).spec["precision"] == "int8"
    assert said.comparison["candidates"][0]["accuracy"]["outputs"]["y"]["kind"] == "classes"
    assert build(best=True).cached
    named = build(best=True, output_kind=(), classes=[f"bird {number}" for number in range(16)])
    assert named.cached  # names for its 16 scores say that they are classes
    assert _manifest(named).output_kinds == {"y": "classes"}


def test_best_falls_back_to_fp32(gpu: Gpu, build: Build, world: World) -> None:
    gpu.noise["fp16"] = 0.2
    result = build(best=True, min_snr=40)
    assert gpu.built == ["int8", "fp16", "fp32"]
    assert _manifest(result).spec["precision"] == "fp32"
    has(result.comparison["why"], "FP32 kept", "INT8 is outside", "FP16 is outside")
    assert build(best=True, min_snr=40).cached


def test_best_without_any_candidate_inside_leaves_what_was_there(gpu: Gpu, build: Build, world: World) -> None:
    build(compare=False, fp16=True)
    before = world.contents()
    gpu.noise["fp32"] = 0.3
    with pytest.raises(AccuracyLost, match=r"INT8: y: .*FP16: y: .*FP32: y: .*lower `min_agreement=` or `min_snr=`"):
        build(best=True, min_snr=70)
    assert world.contents() == before


def test_best_is_up_to_date_until_what_it_depends_on_changes(gpu: Gpu, build: Build) -> None:
    first = build(best=True)
    again = build(best=True)
    assert again.cached and again.comparison == first.comparison
    assert build().cached  # the engine that INT8 asks for
    assert gpu.built == ["int8", "fp16"]
    strict = build(best=True, min_snr=30)  # another winner
    assert not strict.cached
    assert _manifest(strict).spec["precision"] == "fp16"
    has(strict.comparison["why"], "FP16 kept: INT8 is outside the accuracy limit", "at least 30")
    assert gpu.built == ["int8", "fp16"] * 2
    assert build(best=True, min_snr=30).cached
    assert not build(best=True, min_snr=30, limit=20).cached  # other samples
    assert not build(best=True, min_snr=30, limit=20, force=True).cached
    strict.engine.write_bytes(strict.engine.read_bytes() + b"x")
    assert not build(best=True, min_snr=30, limit=20).cached
    gpu.info = DeviceInfo(0, "Another GPU", 89, 1 << 30)
    assert not build(best=True, min_snr=30, limit=20).cached


def test_a_table_needs_other_samples_to_be_judged_on(gpu: Gpu, build: Build, world: World) -> None:
    path = world.folder / "t.calib.json"
    trtopt.calibrate(world.model, path, images=world.photos, preprocess="imagenet", threads=1)
    with pytest.raises(UsageError, match=r"`best=True` judges accuracy on real samples: add .*beside `calib=`"):
        build(best=True, calib=path, data=None)
    heard = Heard()
    result = build(best=True, calib=path, data=None, images=world.photos, reporter=heard)
    assert any("only 4 samples judge the accuracy, so one decides over 25%" in text for text in heard.warnings)
    assert result.comparison["candidates"][0]["accuracy"]["samples"] == 4
    assert _manifest(result).preprocess["mean"]  # as the table says that they are prepared
    assert build(best=True, calib=path, data=None, images=world.photos).cached


@pytest.mark.parametrize("best", [False, True])
def test_engines_of_pixels_are_timed_and_judged_on_the_models_own_samples(
    gpu: Gpu, build: Build, world: World, best: bool
) -> None:
    gpu.noise["int8"] = 0.01
    options = {"data": None, "images": world.photos, "preprocess": "imagenet", "best": best, "embed_preprocess": True}
    result = build(**options)
    manifest = _manifest(result)
    assert manifest.inputs[0]["dtype"] == "uint8"
    assert manifest.comparison["kept"] == "int8"
    assert manifest.comparison["inputs"] == "real samples"
    assert manifest.comparison["candidates"][1]["times"][0]["shapes"] == {"x": "8x32x32x3"}
    assert [session.embedded is not None for session in gpu.opened] == [True, True]
    assert build(**options).cached
    table = trtopt.calibrate(world.model, images=world.photos, preprocess="imagenet").table
    again = build(**{**options, "preprocess": None, "images": world.photos if best else None, "calib": table})
    assert again.comparison is not None, again.not_measured
    assert _manifest(again).embedded == manifest.embedded


@pytest.mark.parametrize("lost", ["int8", "fp16"])
def test_a_candidate_that_can_not_be_built_is_out(gpu: Gpu, build: Build, world: World, lost: str) -> None:
    gpu.refuse = lambda request: BuildFailed("no kernel")
    with pytest.raises(BuildFailed, match=r"INT8 engine: no kernel; no FP16 .*; no FP32"):
        build(best=True)
    assert world.contents() == {}
    gpu.refuse = lambda request: BuildFailed("no kernel") if getattr(request, lost) else None
    result = build(best=True)
    kept = "fp16" if lost == "int8" else "int8"
    assert _manifest(result).spec["precision"] == kept
    has(result.comparison["why"], f"{kept.upper()} kept", f"no {lost.upper()} engine: no kernel")
    assert result.comparison["speedup"] is None


def test_without_onnxruntime_there_is_no_reference(gpu: Gpu, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=MissingDependency("it needs onnxruntime"))
    monkeypatch.setattr(building, "ort_version", missing)
    with pytest.raises(MissingDependency, match="it needs onnxruntime"):
        build(best=True)
    missing.assert_called_once_with("judging engines")
    assert not gpu.built


@pytest.mark.parametrize("broken", ["save_model", "json_bytes", KeyboardInterrupt(), EngineError("it can't run")])
def test_best_that_ends_early_leaves_what_was_there(
    gpu: Gpu, build: Build, world: World, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    (world.output / "m.engine").write_bytes(b"what was there")
    if isinstance(broken, str):
        writing = engine.writing_engine

        def breaking(request: BuildRequest, *written: Any) -> Any:
            if request.output == world.output / "m.engine":  # not yet while candidates are written
                monkeypatch.setattr(engine, broken, Mock(side_effect=OSError(28, "No space left on device")))
            return writing(request, *written)

        monkeypatch.setattr(engine, "writing_engine", breaking)
    else:
        gpu.stop = broken
    with pytest.raises(OutputError if isinstance(broken, str) else type(broken)):
        build(best=True, save_onnx=world.output / "graph.onnx")
    assert world.contents() == {"m.engine": b"what was there"}


# Within a limit ----------------------------------------------------------------------------------------------------------


def test_a_tuned_engine_is_kept_where_it_is_faster_and_within_the_limit_itself(
    gpu: Gpu, build: Build, world: World
) -> None:
    limit: dict[str, Any] = {"min_snr": 20, "output_kind": ["y=other"]}
    gpu.noise["int8"] = 0.01
    result = build(**limit)
    assert gpu.built == ["int8", "fp16"] and result.tuning is not None
    assert result.comparison["kept"] == "int8" and _manifest(result).spec["precision"] == "int8"
    has(result.comparison["why"], "INT8 kept: 1.60 times as fast as FP16")
    assert build(**limit).cached
    gpu.noise["int8"] = 0.5  # the engine loses more than its graph
    result = build(**limit, force=True)
    assert result.comparison["kept"] == "fp16"
    has(result.comparison["why"], "INT8 is outside the accuracy limit")
    gpu.noise["int8"], gpu.ms["int8"] = 0.01, 0.9
    given: dict[str, Any] = {"data": world.arrays, "target": "sm89", **limit}
    assert trtopt.tune(world.model, world.output / "m.engine", **given).comparison["kept"] == "fp16"  # it isn't faster
    asked = build(**limit, compare=False)
    assert _manifest(asked).spec["precision"] == "int8" and asked.tuning is not None


def test_times_that_can_not_be_had_are_estimated(gpu: Gpu, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedSession, "profile", Mock(side_effect=EngineError("no profiler here")))
    heard = Heard()
    result = build(min_snr=20, output_kind=["y=other"], reporter=heard)
    has("\n".join(heard.warnings), "the share of the arithmetic counts instead: no profiler here")
    assert result.tuning.cost == "the share of the arithmetic"


def test_what_is_slower_in_int8_stays_out_though_it_loses_little(gpu: Gpu, build: Build) -> None:
    gpu.noise["int8"] = 0.01
    gpu.layer_ms["int8", "conv2"] = 5.0
    heard = Heard()
    result = build(min_snr=20, output_kind=["y=other"], reporter=heard)
    assert gpu.built == ["int8", "fp16", "int8"]
    has(result.tuning.left_out["conv2"], "takes", "of FP16's time in INT8")
    assert "Played GPU" in result.tuning.cost
    assert {item.node for item in result.kept} == {"conv2"}
    again = build(min_snr=20, output_kind=["y=other"])
    assert again.cached and again.tuning.left_out == result.tuning.left_out


@pytest.mark.parametrize("built", [True, False])
def test_int8_everywhere_is_kept_where_what_was_chosen_for_speed_is_slower_or_not_built(
    gpu: Gpu, build: Build, built: bool
) -> None:
    gpu.noise["int8"], gpu.layer_ms["int8", "conv2"], heard = 0.01, 5.0, Heard()
    if built:
        gpu.longer = lambda session, _: (
            1 + any(item.precision == "fp16" and "conv2" in item.nodes for item in session.layers)
        )
    else:
        lost = PrecisionLost("conv2 has no kernel")
        gpu.refuse = lambda request: lost if getattr(request.calib, "left_out", None) else None
    result = build(min_snr=20, output_kind=["y=other"], reporter=heard)
    assert not result.tuning.left_out and not result.kept and result.comparison["kept"] == "int8"
    said = "the choice with conv2 out of INT8 isn't tried, as it can't be built: conv2 has no kernel"
    assert (said in heard.warnings) != built
    assert build(min_snr=20, output_kind=["y=other"]).cached


@pytest.fixture
def gated(gpu: Gpu, world: World, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Squeeze-and-excite behind a grouped convolution and its SiLU, and a convolution that reads the product."""
    text = """(float[batch,3,32,32] x) => (float[batch,16] y) {
        [first] f = Conv<pads=[1,1,1,1]>(x, wf) [grouped] g = Conv<group=16, pads=[1,1,1,1]>(f, wg)
        [sigmoid] sg = Sigmoid(g) [silu] s = Mul(g, sg) [mean] m = GlobalAveragePool(s)
        [squeeze] q = Conv(m, ws) [relu] r = Relu(q) [excite] e = Conv(r, we) [hard] k = HardSigmoid(e)
        [product] t = Mul(s, k) [project] p = Conv(t, wp) [pool] a = GlobalAveragePool(p) [rows] y = Flatten(a)
    }"""
    sizes = {"wg": (16, 1, 3, 3), "ws": (8, 16, 1, 1), "we": (16, 8, 1, 1), "wp": (16, 16, 1, 1), "wf": (16, 3, 3, 3)}
    rng = np.random.default_rng(2)
    weights = {name: rng.standard_normal(size, np.float32) / 4 for name, size in sizes.items()}
    onnx.save(written(text, **weights), world.model)
    generation = select("rtx")
    monkeypatch.setattr(generation, "capabilities", replace(generation.capabilities, gates_in_int8=True))
    gpu.noise["int8"] = 0.01
    return gpu


@pytest.mark.parametrize("factor", [0.9, 1.0])
def test_squeeze_and_excite_is_in_int8_where_the_engine_is_faster_so(
    gated: Gpu, build: Build, world: World, factor: float
) -> None:
    gated.longer = lambda session, _: (
        factor
        if session.precision == "int8"
        and any("squeeze" in item.nodes and item.precision == "int8" for item in session.layers)
        else 1.0
    )
    options = {"min_snr": 10, "output_kind": ["y=other"], "save_calib": world.output / "t.calib.json"}
    result = build(**options)
    faster = factor < 1
    assert result.tuning.table.gates == (("product",) if faster else ())
    assert ("squeeze" in {item.node for item in result.kept}) != faster
    assert ("squeeze-and-excite in INT8" in str(result.tuning)) == faster
    assert build(**options).cached
    again = trtopt.build(
        world.model, world.output / "again.engine", int8=True, calib=options["save_calib"], target="sm89", compare=False
    )
    assert again.precision == result.precision


@pytest.mark.parametrize("factor", [0.9, 1.0])
def test_scales_stand_beside_the_graph_where_the_engine_is_faster_so(
    gpu: Gpu, build: Build, world: World, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    generation, beside = select("rtx"), set[Path]()
    monkeypatch.setattr(generation, "capabilities", replace(generation.capabilities, native_calibrator=True))
    monkeypatch.setattr(Scales, "beside_graph", lambda *_: None)  # TensorRT-RTX has no calibrator to read them
    gpu.refuse = lambda request: beside.add(Path(request.output)) if getattr(request.calib, "beside", False) else None
    gpu.longer = lambda session, _: factor if session.path in beside else 1.0
    options = {"min_snr": 10, "output_kind": ["y=other"], "save_calib": world.output / "t.calib.json"}
    result = build(**options)
    assert beside
    assert result.tuning.table.beside == (factor < 1) == ("scales beside the graph" in str(result.tuning))
    assert Table.load(options["save_calib"]).beside == (factor < 1)
    assert build(**options).cached
    beside.clear()
    gpu.ms["bf16"], gpu.noise["bf16"] = 0.9, 0.0
    build(**options, bf16=True)  # TensorRT's calibrator knows FP16 alone
    assert not beside


def test_a_table_without_scales_of_squeeze_and_excite_says_how_to_get_them(
    gated: Gpu, build: Build, world: World
) -> None:
    heard = Heard()
    whole = trtopt.calibrate(world.model, data=world.arrays).table
    table = replace(whole, tensors={name: item for name, item in whole.tensors.items() if name not in {*"smrk"}})
    assert len(table.tensors) == len(whole.tensors) - 4  # as calibrations before made them
    build(min_snr=10, output_kind=["y=other"], calib=table, reporter=heard)
    has("\n".join(heard.notes), "squeeze-and-excite isn't tried in INT8", "`all_tensors=True`")
    assert gated.built == ["int8", "fp16"]
    build(min_snr=10, output_kind=["y=other"], calib=whole)
    assert gated.built == ["int8", "fp16", "int8", "fp16", "int8"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"best": True, "compare": False}, "drop `compare=False`"),
        (
            {"best": True, "data": None},
            "`best=True` judges accuracy on real samples: add `images=DIR` or `data='F.npz'`",
        ),
        ({"best": True, "min_snr": float("inf")}, "`min_snr=` is inf"),
        ({"best": True, "output_kind": ["z=classes"]}, "there is no output 'z'; there is y"),
        ({"int8": True, "output_kind": {"y": "clases"}}, "'clases' isn't a kind.*did you mean y=classes"),
        ({"int8": False, "fp16": True, "min_agreement": 0.9}, "layers are chosen for INT8: add `int8=True`.*verify"),
        ({"int8": False, "fp16": True, "min_snr": 20.0, "data": None}, "`min_snr=` is judged on real samples"),
        ({"int8": False, "fp8": True, "min_agreement": 0.9}, "layers are chosen for INT8"),
        ({"best": True, "metric": max, "min": 1}, "`metric=` is judged by a search"),
        ({"best": True, "int8": True, "fp8": True}, "`int8=True` and `fp8=True` are both given"),
        ({"best": True, "fp16": True, "bf16": True}, "`fp16=True` and `bf16=True`"),
    ],
)
def test_requests_that_can_not_be_right(gpu: Gpu, build: Build, world: World, options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build(**options)
    assert gpu.built == []
    assert world.contents() == {}


# The command line -------------------------------------------------------------------------------------------------------


def test_the_command_says_which_and_why(gpu: Gpu, world: World) -> None:
    request = ("build", world.model, "--data", world.arrays, "--target", "sm89", "-o", world.output / "m.engine")
    classes = ("--best", "--min-agreement", "0", "--output-kind", "y=classes")
    found = world.run(*request, *classes)
    assert found.status == 0, found.err
    has(found.out, "INT8 kept: 1.60 times as fast as FP16 (0.5 and 0.8 ms at x 8x3x32x32)")
    found = world.run("inspect", world.output / "m.engine")
    has(found.out, "INT8 kept", "on Played GPU", "output y: float32 nx16, classes")
    found = world.run(*request, *classes, "--min-snr", "30", "--json")
    assert found.status == 0, found.err
    comparison = json.loads(found.out)["comparison"]
    assert comparison["kept"] == "fp16"
    assert converted(comparison, Comparison)
    found = world.run(*request, "--int8", "--no-compare")
    has(found.out, "not measured against FP16: --no-compare was given")
