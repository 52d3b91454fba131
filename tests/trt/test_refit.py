"""Other weights in an engine: what is given to each generation's stand-in, and what is refused before that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from standins import VERSIONS

import trtopt
from trtopt.builder.refit import structure
from trtopt.core.errors import EngineMismatch, UnsupportedRequest, UsageError
from trtopt.cuda.device import DeviceInfo, Probe
from trtopt.engine.manifest import load_manifest

Made = Callable[..., Path]
TYPED = [version for version in VERSIONS if version != "8.6.0"]


def _changed(path: Path, new: Path, change: Callable[[onnx.ModelProto], Any]) -> Path:
    model = onnx.load(path)
    change(model)
    onnx.save(model, new)
    return new


def _doubled(model: onnx.ModelProto, name: str = "w1") -> None:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), name))


@pytest.fixture
def net(float_net: Path) -> Path:
    return float_net.rename(float_net.with_name("net.onnx"))


@pytest.fixture
def tuned(net: Path) -> Path:
    return _changed(net, net.with_name("tuned.onnx"), _doubled)


def _build(model: Path, name: str, **options: Any) -> Path:
    return trtopt.build(
        model, model.with_name(name), backend="tensorrt", fp16=True, allow_precision_fallback=True, **options
    ).engine


def _held(engine: Path) -> dict[str, str]:
    return dict(json.loads(engine.read_bytes()[64:], strict=False)["Weights"])


@pytest.mark.parametrize("version", VERSIONS)
def test_an_engine_gets_the_weights_that_a_build_of_the_model_has(
    stand_in: Any, net: Path, tuned: Path, version: str
) -> None:
    sim, _ = stand_in(version)
    old, fresh = (_build(model, f"{model.stem}.engine", refit=True) for model in (net, tuned))
    result = trtopt.refit(old, tuned, net.with_name("new.engine"))
    assert _held(result.engine) == _held(fresh) != _held(old) and result.weights == len(_held(fresh)) > 0
    manifest, before = load_manifest(result.engine), load_manifest(old)
    assert manifest is not None and before is not None
    manifest.check_plan(result.engine)
    assert Path(manifest.source["path"]).name == "tuned.onnx" and manifest.layers == before.layers
    assert manifest.spec["refit"] and manifest.structure == before.structure
    again = trtopt.refit(result.engine, net, net.with_name("again.engine"))
    assert _held(again.engine) == _held(old)
    assert not sim.missed & {"ICudaEngine.create_serialization_config", "SerializationFlag"}


def test_an_engine_that_takes_pixels_is_refitted_with_its_own_shapes(stand_in: Any, net: Path, tuned: Path) -> None:
    stand_in("10.16.1")
    pixels = {"size": [32, 32], "mean": [0.5, 0.5, 0.5], "std": [1.0, 1.0, 1.0]}
    options = {"embed_preprocess": True, "preprocess": pixels, "shapes": "x:1x3x32x32,2x3x32x32,4x3x32x32"}
    old, fresh = (_build(model, f"{model.stem}.engine", refit=True, **options) for model in (net, tuned))
    assert _held(trtopt.refit(old, tuned, net.with_name("new.engine")).engine) == _held(fresh) != _held(old)


@pytest.mark.parametrize("version", TYPED)
def test_a_stripped_plan_takes_the_weights_that_it_was_built_from_and_no_others(
    stand_in: Any, net: Path, tuned: Path, version: str
) -> None:
    stand_in(version)
    stripped, full = _build(net, "stripped.engine", strip=True), net.with_name("full.engine")
    with pytest.raises(UnsupportedRequest, match=r"built with `strip=True` alone.*`refit=True` too"):
        trtopt.refit(stripped, tuned, full)
    assert not full.exists()
    trtopt.refit(stripped, net, full)
    manifest = load_manifest(full)
    assert manifest is not None and not manifest.spec["strip"] and manifest.structure is None
    with pytest.raises(UnsupportedRequest, match="`refit=True`"):
        trtopt.refit(full, net, net.with_name("again.engine"))
    stripped = _build(net, "both.engine", strip=True, refit=True)  # this one takes any
    result = trtopt.refit(stripped, tuned, net.with_name("tuned.engine"))
    assert _held(result.engine) == _held(_build(tuned, "built.engine", refit=True))


def _renamed(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.name == "conv2").name = "other"


def _narrow(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == "w3":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:8], "w3"))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 8


@pytest.mark.parametrize(
    ("change", "said"), [(_renamed, r"only the engine's has node conv2 \(Conv\)"), (_narrow, "w3")]
)
def test_another_graph_is_refused_by_its_first_difference(
    stand_in: Any, net: Path, change: Callable[[onnx.ModelProto], None], said: str
) -> None:
    stand_in("8.6.0")
    engine = _build(net, "net.engine", refit=True)
    other = _changed(net, net.with_name("other.onnx"), change)
    with pytest.raises(EngineMismatch, match=said):
        trtopt.refit(engine, other, net.with_name("new.engine"))
    assert not net.with_name("new.engine").exists()


def test_the_structure_holds_values_that_are_no_weights_and_no_scales() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[1, 4] x) => (float[1, 4] y)
        <float[4] w = {1, 2, 3, 4}, float top = {6}, float s = {0.1}, int8 z = {0}>
        { a = Mul (x, w)  q = QuantizeLinear (a, s, z)  b = DequantizeLinear (q, s, z)  y = Clip (b, , top) }"""
    )
    lines = {line.partition(":")[0]: line for line in structure(model)}
    assert "=" not in lines["weight w"] + lines["weight s"] and "=" in lines["constant top"]
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for tensor in other.graph.initializer:
        if tensor.name in ("w", "s"):
            tensor.CopyFrom(numpy_helper.from_array(np.float32(3) * numpy_helper.to_array(tensor), tensor.name))
    assert structure(other) == structure(model)
    other.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.float32(5), "top"))
    assert structure(other) != structure(model)


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_that_one_of_the_two_lacks_are_listed(
    stand_in: Any, net: Path, tuned: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(version)
    engine = _build(net, "net.engine", refit=True)
    from trtopt.trt import parsing

    known = parsing.network_weights

    def fewer(module: Any, network: Any) -> Any:
        return ((key, value) for key, value in known(module, network) if key[0] != "conv2")

    def more(module: Any, network: Any) -> Any:
        yield from known(module, network)
        yield ("scales", module.WeightsRole.CONSTANT), np.ones(32, np.float32)

    for found, said in ((fewer, r"conv2 \(kernel\)"), (more, r"scales \(constant\)")):
        monkeypatch.setattr(parsing, "network_weights", found)
        with pytest.raises(UnsupportedRequest, match=said):
            trtopt.refit(engine, tuned, net.with_name("new.engine"))
    trtopt.refit(engine, net, net.with_name("same.engine"))  # what the plan keeps for itself is right already


def test_what_cannot_be_refitted_is_refused_with_what_to_type(stand_in: Any, net: Path, with_gpu: Any) -> None:
    stand_in("8.6.0")
    plain, new = _build(net, "plain.engine"), net.with_name("new.engine")
    with pytest.raises(UnsupportedRequest, match="`refit=True`"):
        trtopt.refit(plain, net, new)
    engine = _build(net, "net.engine", refit=True)
    with pytest.raises(UsageError, match="engine"):  # what is read is never written
        trtopt.refit(engine, net, engine)
    with_gpu(None)
    with pytest.raises(trtopt.DeviceError, match=r"refitting .* needs an NVIDIA GPU"):
        trtopt.refit(engine, net, new)
    (net.with_name("plain.engine.json")).unlink()
    with pytest.raises(UsageError, match="has no manifest"):
        trtopt.refit(plain, net, new)


@pytest.mark.parametrize("version", VERSIONS)
def test_scales_come_from_the_table_that_is_given(stand_in: Any, net: Path, version: str) -> None:
    stand_in(version)
    samples = {"x": np.random.default_rng(3).normal(size=(8, 3, 32, 32)).astype(np.float32)}
    table = net.with_name("t.calib.json")
    trtopt.calibrate(net, output=table, data=[samples])
    options: dict[str, Any] = {"int8": True, "calib": table, "refit": True, "compare": False, "backend": "tensorrt"}
    engine = trtopt.build(net, net.with_name("net.engine"), **options).engine
    with pytest.raises(UsageError, match=r"INT8.*`calib='T.calib.json'`"):
        trtopt.refit(engine, net, net.with_name("new.engine"))
    result = trtopt.refit(engine, net, net.with_name("new.engine"), calib=table)
    manifest, before = load_manifest(result.engine), load_manifest(engine)
    assert manifest is not None and before is not None and manifest.calibration == before.calibration


def test_a_session_puts_weights_in_and_opens_no_stripped_plan_without(
    stand_in: Any, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("10.16.1")
    stripped, plain = _build(net, "stripped.engine", strip=True), _build(net, "plain.engine")
    opened: list[bytes] = []

    class Opened(Exception):
        pass

    def on_gpu(device: Any, generation: Any, plan: bytes, *_: Any) -> None:
        opened.append(plan)
        raise Opened

    gpu = DeviceInfo(0, "Stand-in GPU", 90, 16 << 30)
    monkeypatch.setattr("trtopt.runtime.gpu_engine.probe", lambda: Probe((gpu,), (13, 0)))
    monkeypatch.setattr("trtopt.runtime.gpu_engine.Device", lambda ordinal: SimpleNamespace(info=gpu))
    monkeypatch.setattr("trtopt.runtime.gpu_engine.GpuEngine", on_gpu)
    with pytest.raises(UsageError, match=r"give the model as `weights=`.*trtopt refit"):
        trtopt.Session(stripped)
    with pytest.raises(UnsupportedRequest, match="`refit=True`"):
        trtopt.Session(plain, weights=net)
    with pytest.raises(UsageError, match=r"`calib=`.*`weights=`"):
        trtopt.Session(plain, calib=net)
    with pytest.raises(Opened):
        trtopt.Session(stripped, weights=net)
    full = trtopt.refit(stripped, net, net.with_name("full.engine")).engine
    assert opened == [full.read_bytes()] != [stripped.read_bytes()]
