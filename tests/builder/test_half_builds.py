"""Builds in FP16 and BF16 with samples at hand, and of models that are FP16 already, on the real TensorRT-RTX."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from half_models import Arrays, cancelling, half, overflowing, underflowing
from onnx import ModelProto, TensorProto
from world import RTX, Heard, World, has

import trtopt
from trtopt import AccuracyLost, calibrate
from trtopt.builder.lowering import Lowered, lower
from trtopt.calibration.table import Table
from trtopt.core.values import BuildSpec, Precision
from trtopt.graph.passes.fold import fold

pytestmark = pytest.mark.usefixtures("rtx")
Planted = Callable[[], tuple[ModelProto, Arrays]]
FP32 = Precision.FP32


class Maker:
    """Builds one model in one folder, and compares the graph that TensorRT got with the model."""

    def __init__(self, folder: Path, planted: tuple[ModelProto, Arrays]) -> None:
        self.folder, (self.proto, self.data) = folder, planted
        self.heard = Heard()
        self.model = folder / "m.onnx"
        onnx.save(self.proto, self.model)

    def build(self, **options: Any) -> Any:
        self.heard = Heard()
        common: dict[str, Any] = {"target": "sm89", "backend": "rtx", "save_onnx": self.folder / "g.onnx"}
        return trtopt.build(self.model, self.folder / "m.engine", **{**common, **options}, reporter=self.heard)

    def verified(self) -> trtopt.Agreement:
        return trtopt.verify(self.model, self.folder / "g.onnx", [self.data], min_snr=20.0)


def _kept(result: Any) -> dict[str, str]:
    return {item.node: item.reason for item in result.kept if item.precision is FP32}


@pytest.mark.parametrize(
    ("planted", "precision", "nodes"),
    [
        (overflowing, "fp16", {"up", "relu", "down"}),
        (underflowing, "fp16", {"up", "relu", "grow"}),
        (cancelling, "bf16", {"shift", "relu", "back"}),
    ],
)
def test_samples_make_a_build_safe_that_was_not(
    tmp_path: Path, planted: Planted, precision: str, nodes: set[str]
) -> None:
    maker = Maker(tmp_path, planted())
    plain = maker.build(**{precision: True})
    assert not nodes & _kept(plain).keys() and plain.safety is None
    assert not maker.verified().ok
    safe = maker.build(**{precision: True}, data=maker.data)
    assert not safe.cached
    assert _kept(safe).keys() == nodes
    assert maker.verified().ok
    manifest = json.loads((tmp_path / "m.engine.json").read_text())
    assert manifest["safety"]["in_fp32"] == _kept(safe) == {item["node"]: item["reason"] for item in manifest["kept"]}
    assert json.loads(json.dumps(safe.to_json()))["safety"]["samples"] == 40
    assert any("3 nodes kept in FP32 by what they hold" in text for text in maker.heard.notes)
    again = maker.build(**{precision: True}, data=maker.data)
    assert again.cached and again.safety == safe.safety
    other = {"x": maker.data["x"][:20]}
    assert not maker.build(**{precision: True}, data=other).cached


def test_samples_that_show_nothing_change_nothing(world: World) -> None:
    options: dict[str, Any] = {"fp16": True, "target": "sm89", "backend": "rtx"}
    files = [world.output / "a.onnx", world.output / "b.onnx"]
    for file, data in zip(files, (None, world.arrays)):
        result = trtopt.build(world.model, file.with_suffix(".engine"), save_onnx=file, data=data, **options)
    assert result.kept == () and result.safety is not None
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_command_says_what_stays_and_why(world: World) -> None:
    proto, data = overflowing()
    onnx.save(proto, world.model)
    np.savez(world.arrays, **data)  # type: ignore[arg-type]
    command = ("build", world.model, "--fp16", "--data", world.arrays, "-o", world.output / "m.engine", *RTX)
    told = world.run(*command)
    assert told.status == 0
    has(told.out, "FP32: up: gives 576,664 > 65,504, FP16's largest number", "FP32: down: reads 576,664")
    has(told.out, "3 nodes kept in higher precision (up, …): by what the samples show")
    has(told.err, "FP16 on 40 samples: 3 nodes kept in FP32 by what they hold")
    has(world.run(*command).out, "up to date", "FP32: up: gives 576,664")
    limit = world.refused(*command[:3], "--min-snr", "30", "-o", world.output / "n.engine", *RTX)
    has(limit, "--min-snr is judged on real samples", "--images DIR")


def _deep_images() -> tuple[ModelProto, Arrays]:
    """Two matrix products behind the factor that makes 16 bits shares of one."""
    text = """(float[n,32] x) => (float[n,16] y) {
        [scaled] u = Mul(x, s) [up] h = MatMul(u, a) [relu] r = Relu(h) [down] y = MatMul(r, b) }"""
    proto = written(text, s=np.float32(1 / 65535), a=values(32, 64, seed=1), b=values(64, 16, seed=2))
    x = np.random.default_rng(0).uniform(0, 65535, (40, 32)).astype(np.float32)
    x[3, 5] = 65530
    return proto, {"x": x}


def test_an_input_beyond_fp16_is_named(tmp_path: Path) -> None:
    maker = Maker(tmp_path, _deep_images())
    result = maker.build(fp16=True, data=maker.data)
    assert _kept(result) == {"scaled": "reads 65,530 > 65,504, FP16's largest number, in the input 'x'"}
    assert maker.verified().ok and not maker.heard.warnings
    maker.build(fp16=True, fp32_io=False, data=maker.data)
    assert not maker.verified().ok


def test_a_limit_of_ones_own(tmp_path: Path) -> None:
    maker = Maker(tmp_path, cancelling())
    assert _kept(maker.build(fp16=True, data=maker.data)).keys() == {"shift", "relu", "back"}  # 23.8 dB
    loose = maker.build(fp16=True, data=maker.data, min_snr=20.0)
    assert not loose.cached and _kept(loose) == {}
    out_of_reach = r"less than the 90 asked for.*Nothing was written; FP32 .*: drop `fp16=True`, or ask for less"
    with pytest.raises(AccuracyLost, match=out_of_reach):  # as inputs and outputs are FP16
        maker.build(fp16=True, data=maker.data, min_snr=90.0, fp32_io=False)


# INT8 ----------------------------------------------------------------------------------------------------------------


def _lowered(proto: ModelProto, table: Table, *, typed: bool) -> Lowered:
    can = SimpleNamespace(
        stored_codes=typed,
        max_opset=None if typed else 17,
        floating=lambda *_: {},
        quantized_between={},
        mixes_channels="",
        least_scale=0,
    )
    generation: Any = SimpleNamespace(typed=lambda _: typed, capabilities=can)
    return lower(fold(proto)[0], BuildSpec(precision=Precision.INT8), generation, table)


def test_tables_carry_ranges_to_every_generation(tmp_path: Path) -> None:
    proto, data = overflowing()
    calibrate(proto, data=data, output=tmp_path / "t.json")
    table = Table.load(tmp_path / "t.json")
    assert set(table.ranges) == {"h", "r"}
    made = [_lowered(proto, table, typed=typed) for typed in (True, False)]
    for item in made:
        assert {kept.node: kept.precision for kept in item.kept} == dict.fromkeys(("up", "relu", "down"), FP32)
        assert dict(item.asked) == {"head": Precision.INT8}
    assert made[1].layer_precision == dict.fromkeys(("up", "relu", "down"), FP32)


def test_int8_keeps_its_floating_part_finite(tmp_path: Path) -> None:
    maker = Maker(tmp_path, overflowing())
    result = maker.build(int8=True, data=maker.data)
    assert _kept(result).keys() == {"up", "relu", "down"}
    assert maker.verified().ok


# Models that are FP16 already ----------------------------------------------------------------------------------------


def _network() -> tuple[ModelProto, Arrays]:
    """Convolutions in FP16 around a softmax that its author keeps in FP32."""
    text = """(float16[n,16,8,8] x) => (float16[n,16,8,8] y) {
        [first] c = Conv<pads=[1,1,1,1]>(x, w) [relu] r = Relu(c) [widen] wide = Cast<to=1>(r)
        [softmax] s = Softmax<axis=1>(wide) [narrow] t = Cast<to=10>(s) [second] y = Conv(t, v) }"""
    half_weights = (values(16, 16, size, size, seed=size, scale=0.1).astype(np.float16) for size in (3, 1))
    smooth = np.cumsum(values(40, 16, 8, 8, seed=2), axis=-1).astype(np.float16)
    return onnx.shape_inference.infer_shapes(written(text, **dict(zip("wv", half_weights)))), {"x": smooth}


def test_fp16_is_no_change_of_an_fp16_model_and_that_is_said(tmp_path: Path) -> None:
    maker = Maker(tmp_path, _network())
    result = maker.build(fp16=True)
    assert any("the model is FP16 already, and its types stay as they are" in text for text in maker.heard.notes)
    assert result.precision["fp16"] == 2
    assert list(_kept(result)) == ["widen", "softmax"]
    given, got = (onnx.load(path).graph for path in (maker.model, tmp_path / "g.onnx"))
    assert [item.op_type for item in got.node] == [item.op_type for item in given.node]
    assert [item.type.tensor_type.elem_type for item in (*got.input, *got.output)] == [TensorProto.FLOAT16] * 2


@pytest.mark.parametrize("typed", [True, False], ids=["in the graph", "by flags"])
def test_int8_of_an_fp16_model_respects_its_islands(typed: bool) -> None:
    proto, data = _network()
    made = _lowered(proto, calibrate(proto, data=data).table, typed=typed)
    assert set(made.asked) == {"first", "second"}
    assert [item.node for item in made.kept] == ["softmax"]
    onnx.checker.check_model(made.proto, full_check=True)
    ends = (*made.proto.graph.input, *made.proto.graph.output)
    assert [item.type.tensor_type.elem_type for item in ends] == [TensorProto.FLOAT16] * 2
    agreement = trtopt.verify(proto, made.proto, [data], min_snr=20.0)
    assert agreement.ok, str(agreement)


@pytest.mark.parametrize("planted", [_network, lambda: (half(overflowing()[0]), overflowing()[1])])
def test_int8_of_an_fp16_model_builds(tmp_path: Path, planted: Planted) -> None:
    maker = Maker(tmp_path, planted())
    result = maker.build(int8=True, data=maker.data)
    assert result.precision["int8"] >= 1
    with_repairs = calibrate(maker.proto, data=maker.data, repair=True).table
    assert maker.build(int8=True, calib=with_repairs).precision["int8"] >= 1
    if planted is _network:  # tune takes it, too
        assert maker.build(int8=True, data=maker.data, min_snr=10.0).precision["int8"] >= 1
