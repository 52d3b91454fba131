"""What a generation is given, and what it is asked for."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from half_models import half
from onnx import TensorProto
from world import Heard

from trtopt import calibrate
from trtopt.builder.construction import build
from trtopt.builder.lowering import Lowered, in_fp32_types, judge, lower
from trtopt.calibration.table import Table
from trtopt.core.errors import CalibrationError, ModelError
from trtopt.core.values import SETTINGS, BuildSpec, LayerInfo, Override, Precision
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import Preprocess
from trtopt.graph.passes.fold import fold
from trtopt.trt.generation import BuiltPlan


@pytest.fixture(scope="module")
def block() -> onnx.ModelProto:
    """A residual block whose skip is a convolution."""
    text = """(float[n,32,8,8] x) => (float[] y) { [first] f = Conv(x, w0) a = Relu(f) [main] m = Conv(a, w1)
        [skip] s = Conv(x, w2) [add] sum = Add(m, s) r = Relu(sum) [next] y = Conv(r, w3) }"""
    return fold(written(text, **FOUR))[0]


@pytest.fixture(scope="module")
def table(block: onnx.ModelProto) -> Table:
    return calibrate(block, data={"x": values(64, 32, 8, 8)}).table


FOUR = {f"w{index}": values(32, 32, 1, 1, seed=index, scale=0.2) for index in range(4)}
INT8 = BuildSpec(precision=Precision.INT8)


def _lower(
    proto: onnx.ModelProto, table: Table | None, *, typed: bool, stored: bool | None = None, **spec: Any
) -> Lowered:
    given, least = {key: spec.pop(key) for key in ("embedded", "measured") if key in spec}, spec.pop("least_scale", 0)
    at_0 = {"Conv": "overflows"}
    can = SimpleNamespace(
        stored_codes=typed if stored is None else stored, max_opset=None if typed else 17, quantized_between={},
        floating=lambda _, level: at_0 if level == 0 else {}, mixes_channels="", least_scale=least,
    )  # fmt: skip
    generation: Any = SimpleNamespace(typed=lambda _: typed, capabilities=can)
    return lower(proto, BuildSpec(**{"precision": Precision.INT8, **spec}), generation, table, **given)


def lowered(block: onnx.ModelProto, table: Table, *, stored_codes: bool = True, **changes: Any) -> Lowered:
    return _lower(block, table, typed=False, stored=stored_codes, **changes)


def judged(layers: tuple[LayerInfo, ...], made: Lowered, work: dict[str, int], asked: Any = None, **rest: Any) -> Any:
    """`judge` an INT8 engine of these layers."""
    built = BuiltPlan(plan=b"", layers=layers, unread=rest.pop("unread", ""))
    return judge(built, made, rest.pop("spec", INT8), work, made.asked if asked is None else asked)


def test_what_lies_between_fp16_layers_is_preferred_in_fp16() -> None:
    """Left to itself 8.6 takes FP32 for them: efficientnet_b0's SiLU layers on an H200. The block's middle stays FP16."""
    text = """(float[n,32,8,8] x) => (float[] y) {
        [before] a = Conv(x, w0) [relu] b = Relu(a) [mean] c = GlobalAveragePool(b) [squeeze] d = Conv(c, w1)
        [sigmoid] e = Sigmoid(d) [silu] f = Mul(d, e) [excite] g = Conv(f, w2) [gate] h = HardSigmoid(g)
        [gated] i = Mul(h, b) [after] j = Conv(i, w3) [last] y = Sigmoid(j) }"""
    proto = fold(written(text, **FOUR))[0]
    found = calibrate(proto, data={"x": values(64, 32, 8, 8)}).table
    made = lowered(proto, found)
    assert set(made.asked) == {"before", "after"}
    assert made.preferred == dict.fromkeys(
        ["squeeze", "sigmoid", "silu", "excite", "gate", "gated", "mean"], Precision.FP16
    )
    assert "silu" not in lowered(proto, found, overrides=(Override("silu", Precision.FP32),)).preferred


def test_a_generation_without_stored_codes_gets_floats(block: onnx.ModelProto, table: Table) -> None:
    made = lowered(block, table, stored_codes=False)
    plain = lowered(block, table)
    for proto, wanted in ((made.proto, set()), (plain.proto, {TensorProto.INT8})):
        weights = {item.name: item.data_type for item in proto.graph.initializer}
        read = [item.input[0] for item in proto.graph.node if item.op_type == "DequantizeLinear"]
        assert {weights[name] for name in read if name in weights} == wanted
    assert made.asked == plain.asked


def _layers(**precisions: Precision) -> tuple[LayerInfo, ...]:
    return tuple(LayerInfo(name, "convolution", found, (name,)) for name, found in precisions.items())


@pytest.mark.parametrize("first", [Precision.INT8, Precision.FP16])
def test_what_a_region_hides_is_told_and_refuses_nothing(
    block: onnx.ModelProto, table: Table, first: Precision
) -> None:
    made, layers = lowered(block, table), _layers(first=first)
    region = LayerInfo("{ForeignNode[main...next]}", "other", Precision.FP16)
    report = judged((*layers, region), made, dict.fromkeys(made.asked, 10))
    assert "3 of 4 nodes run in isn't known" in report.hidden and region.name in report.hidden
    assert not report.unknown and not report.coverage
    assert report.lost.keys() == ({"first"} if first is Precision.FP16 else set())
    assert report.share == (0.75 if report.lost else 1)
    nameless = judged(layers, made, {})
    assert "1 of the 4 nodes" in nameless.unknown and not nameless.hidden


def test_a_region_may_hold_what_no_other_layer_runs_in_fp16(block: onnx.ModelProto) -> None:
    spec, layers = BuildSpec(precision=Precision.FP16), _layers(first=Precision.FP32)
    made = _lower(block, None, typed=False, precision=Precision.FP16)
    region = LayerInfo("{ForeignNode[main...next]}", "other", Precision.FP32)
    report = judged((*layers, region), made, {}, spec=spec)
    assert report.hidden and not report.problem
    assert "none of its 1" in judged(layers, made, {}, spec=spec).problem


# What else is decided, for typed generations and for 8.6 ------------------------------------------------------------------


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "8.6"])
def test_what_stays_in_fp32_is_kept_and_overrides_are_layer_precisions_of_8_6(
    typed: bool, block: onnx.ModelProto, table: Table
) -> None:
    overrides = (Override("add", Precision.FP32), Override("skip", Precision.FP16), Override("main", Precision.INT8))
    made = _lower(block, table, typed=typed, overrides=overrides, measured={"next": "seen"})
    kept = {item.node: item.reason for item in made.kept}
    assert "`precision_override=` asks for fp32" in kept["add"] and kept["next"] == "seen"
    assert [item.node for item in made.kept].count("next") == 1
    types = {"first": Precision.INT8, "main": Precision.INT8, "skip": Precision.FP16, "add": Precision.FP32}
    assert made.quantized and made.asked == types
    wanted = {} if typed else {"add": Precision.FP32, "next": Precision.FP32, "skip": Precision.FP16}
    assert made.layer_precision == wanted


def test_fp16_asks_for_the_heavy_nodes_that_run_in_it(block: onnx.ModelProto) -> None:
    typed = _lower(block, None, typed=True, precision=Precision.FP16, overrides=(Override("main", Precision.FP32),))
    assert typed.asked == {**dict.fromkeys(["first", "skip", "next"], Precision.FP16), "main": Precision.FP32}
    assert not typed.quantized and typed.preferred == {}
    loose = _lower(block, None, typed=False, precision=Precision.FP16)
    assert loose.asked == {} and loose.preferred == {}


@pytest.mark.parametrize("base", [Precision.FP16, Precision.FP32])
def test_embedded_preprocessing_stays_in_fp32_on_8_6(base: Precision, block: onnx.ModelProto) -> None:
    proto = fold(written("(float[n,3,8,8] x) => (float[] y) { [c] y = Conv(x, w) }", w=values(4, 3, 1, 1)))[0]
    embedded = Embedded("x", Preprocess(scale=1 / 255, mean=(0.5, 0.4, 0.3), dtype="float32"))
    before = proto.SerializeToString()
    made = _lower(proto, None, typed=False, precision=base, embedded=embedded)
    assert proto.SerializeToString() == before
    new = {item.name: item.op_type for item in made.proto.graph.node if item.name != "c"}
    assert {"Mul", "Add"} <= set(new.values())
    wanted = {name for name, op in new.items() if op in ("Mul", "Add")} if base is Precision.FP16 else set()
    assert made.layer_precision == dict.fromkeys(wanted, Precision.FP32)
    [reader] = [item for item in made.proto.graph.node if "x" in item.input]
    assert (reader.op_type, reader.attribute[0].i) == ("Cast", TensorProto.FLOAT)
    assert made.proto.opset_import[0].version <= 17


def test_a_table_is_taken_by_a_model_in_fp16_types(block: onnx.ModelProto) -> None:
    proto = half(block)
    found = calibrate(proto, data={"x": values(64, 32, 8, 8).astype(np.float16)}).table
    made = _lower(proto, found, typed=True)
    assert made.asked == dict.fromkeys(["first", "main", "skip", "next"], Precision.INT8) and made.quantized


def test_smoothing_is_int8s_alone(block: onnx.ModelProto, table: Table) -> None:
    smoothed = replace(table, smoothed={"a": np.full(32, 2, np.float32)})
    plain, same = (_lower(block, found, typed=True, precision=Precision.FP8) for found in (table, smoothed))
    assert plain.proto == same.proto
    with pytest.raises(CalibrationError, match="a/smoothed"):  # its own scale is another
        _lower(block, smoothed, typed=True)


def test_a_graph_that_came_out_invalid_is_refused(
    block: onnx.ModelProto, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtopt.builder.lowering.invalid", lambda proto: "a hole")
    with pytest.raises(ModelError, match="can't be written in int8: a hole"):
        _lower(block, table, typed=True)
    assert _lower(block, None, typed=True, precision=Precision.FP32).proto is block  # which no pass changed


# What runs, against what was asked for ------------------------------------------------------------------------------------


def test_a_lost_layer_is_named_and_its_work_counted(block: onnx.ModelProto, table: Table) -> None:
    made = lowered(block, table)
    layers = _layers(**{**dict.fromkeys(made.asked, Precision.INT8), "main": Precision.FP16})
    work = {"first": 10, "main": 50, "skip": 20, "next": 20}
    report = judged(layers, made, work)
    assert report.lost == {"main": Precision.FP16} and report.share == 0.5 and not report.unknown
    assert report.problem == "1 of 4 layers don't run in the precision asked for: main (int8 → fp16)"
    assert report.coverage == {Precision.INT8: 0.5, Precision.FP16: 0.5}
    unweighed = judged(layers, made, {})
    assert unweighed.share == 0.75 and unweighed.coverage == {}
    report = judged(_layers(**dict.fromkeys(made.asked, Precision.INT8)), made, work)
    assert (report.lost, report.problem, report.share, report.unknown) == ({}, "", 1.0, "")


@pytest.mark.parametrize("found", [Precision.FP16, Precision.INT8])
def test_native_calibration_that_quantized_nothing_is_said(found: Precision, block: onnx.ModelProto) -> None:
    made = _lower(block, None, typed=False)
    assert made.asked == {}
    layers = (*_layers(first=Precision.FP16, main=found), LayerInfo("o", "other", Precision.INT8))
    report = judged(layers, made, {})
    missed = "none of its 2 convolutions and matrix products runs in int8"
    assert (report.problem, report.share) == (("", 1.0) if found is Precision.INT8 else (missed, 0.0))


def test_layers_that_are_not_known_are_said(block: onnx.ModelProto, table: Table) -> None:
    made, work = lowered(block, table), {"first": 10, "main": 10, "skip": 10, "next": 30}
    none = judged((), made, work, unread="no inspector")
    assert none.unknown == "no inspector" and none.coverage == {}
    known = judged(_layers(first=Precision.INT8, next=Precision.INT8), made, work)
    assert known.unknown == "" and known.coverage == {}  # a third of the work isn't known: no shares
    half_known = judged(_layers(first=Precision.INT8, main=Precision.INT8), made, work)
    assert half_known.unknown.startswith("its layers name 2")


def _recurrent(size: int, outputs: int) -> onnx.ModelProto:
    """An LSTM and a product."""
    text = f"""(float[4,n,{size}] x) => (float[4,n,{outputs}] y) {{
        [lstm] s = LSTM<hidden_size={size}>(x, w, r) h = Squeeze(s, one) [last] y = MatMul(h, v) }}"""
    gates = (1, 4 * size, size)
    return fold(written(text, w=values(*gates), r=values(*gates), v=values(size, outputs), one=np.array([1])))[0]


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "8.6"])
@pytest.mark.parametrize("named", [True, False])
def test_recurrent_work_counts_in_the_type_that_it_runs_in(typed: bool, named: bool) -> None:
    """Engines run it in products without its name, and beside those in layers that may have it."""
    proto = _recurrent(16, 32)
    table = calibrate(proto, data={"x": values(4, 64, 16)}).table
    made = _lower(proto, table, typed=typed)
    cell = LayerInfo("cell", "other", Precision.FP16, ("lstm",) if named else ())
    layers = (cell, LayerInfo("mm", "matmul", Precision.FP16), LayerInfo("fc", "matmul", Precision.INT8, ("last",)))
    work = {"lstm": 990, "last": 10}
    report = judged(layers, made, work)
    known = {Precision.FP16: 0.99, Precision.INT8: 0.01}
    assert report.coverage == (known if typed or named else {})
    assert judged(layers, made, {"last": 10}, (), spec=BuildSpec()).coverage == {}


def test_an_engine_that_is_hardly_int8_says_so(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    proto = _recurrent(64, 16)
    heard = Heard()
    table = calibrate(proto, data={"x": values(4, 64, 64)}).table
    common: dict[str, Any] = {"shapes": ["x:4x8x64"], "target": "sm89", "backend": "rtx", "reporter": heard}
    made = build(proto, tmp_path / "m.engine", int8=True, calib=table, **common)
    assert set(made.coverage) == {"int8", "fp16"} and 0 < made.coverage["int8"] < 0.1
    (warned,) = [text for text in heard.warnings if "of the arithmetic" in text]
    assert warned.startswith(
        "INT8 does 3.0% of the arithmetic: lstm: LSTM is never quantized; build it with `fp16=True`"
    )


@pytest.mark.parametrize(("typed", "kind"), [(True, TensorProto.FLOAT16), (False, TensorProto.FLOAT)])
def test_scales_have_the_types_that_the_graph_has(typed: bool, kind: int, block: onnx.ModelProto, table: Table) -> None:
    made = _lower(block, table, typed=typed)
    types = {item.name: item.data_type for item in made.proto.graph.initializer}
    scales = {item.input[1] for item in made.proto.graph.node if item.op_type == "DequantizeLinear"}
    assert {types[name] for name in scales} == {kind}


def test_islands_are_those_of_a_model_that_is_typed_already(block: onnx.ModelProto) -> None:
    own = [Override("add", Precision.FP32)]
    whole, one = half(block, overrides=own), half(block, overrides=[*own, Override("Conv", Precision.FP32)])
    assert "add" in in_fp32_types(whole)[1]
    assert in_fp32_types(one)[1] == {}  # whose convolutions are FP32: what is FP32 in it is no exception


OTHER = {  # the graph has it, it says how a plan is kept, or is given where the engine is built again
    "embed_preprocess", "overrides", "profiles", "targets", "backend", "calibrator", "timing_cache", "version_compatible",
    "exclude_lean_runtime", "strip", "refit", "allow_precision_fallback", "device", "mark_output", "write_out",
}  # fmt: skip


def test_every_option_that_makes_other_layers_is_taken_when_an_engine_is_built_again_for_its_tensors() -> None:
    assert {name for name, item in SETTINGS.items() if item.layers} | OTHER == {item.name for item in fields(BuildSpec)}


def test_what_overflows_at_level_0_stays_out_of_int8_there(block: onnx.ModelProto, table: Table) -> None:
    at_0 = _lower(block, table, typed=True, optimization_level=0)
    assert {item.reason for item in at_0.kept if item.op == "Conv"} == {"overflows"} and not at_0.quantized
    assert _lower(block, table, typed=True, optimization_level=1).quantized


@pytest.mark.parametrize(("least", "kept"), [(0, set()), (2e-5, {"first"}), (1, {"first", "second"})])
def test_products_whose_scales_vanish_together_stay_out_of_int8(least: float, kept: set[str]) -> None:
    """TensorRT 10.6 gives zero for AlexNet's, of 1e-7."""
    net = written(
        "(float[n,64] x) => (float[n,64] y) { [first] h = MatMul (x, w) [second] y = MatMul (h, v) }",
        w=values(64, 64, scale=0.01), v=values(64, 64, seed=1),
    )  # fmt: skip
    table = calibrate(net, data={"x": values(32, 64)}).table
    made = _lower(net, table, typed=True, stored=False, least_scale=least)
    assert {item.node for item in made.kept if "scales multiply to" in item.reason} == kept
    assert set(made.asked) == {"first", "second"} - kept
