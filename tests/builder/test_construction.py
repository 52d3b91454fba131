"""build() on the real TensorRT-RTX, which needs no GPU: what is written, found, cached, and refused."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from graphs import conv_relu, typed, values, written
from onnx import numpy_helper
from world import Heard, unnumbered

import trtopt
from trtopt.builder import plan
from trtopt.builder.construction import BuildResult, build
from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import (
    BackendError,
    BuildFailed,
    CalibrationError,
    ModelError,
    OutputError,
    PrecisionLost,
    UnsupportedOperator,
    UsageError,
)
from trtopt.core.values import Precision, ShapeRange
from trtopt.engine.inspection import inspect
from trtopt.engine.manifest import load_manifest, manifest_path, read_manifest
from trtopt.graph.io import load_model
from trtopt.linting.checker import check
from trtopt.trt import select

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")

TARGET = "sm89"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """net.onnx (two convolutions and a Gemm, dynamic batch) and data.npz, smooth ramps of different slope."""
    folder, random = tmp_path_factory.mktemp("net"), np.random.default_rng(1)
    shapes = {"w1": (32, 3, 3, 3), "w2": (32, 32, 3, 3), "w3": (16, 32)}
    weights = {name: random.normal(size=size) * np.sqrt(2 / np.prod(size[1:])) for name, size in shapes.items()}
    net = parsed(
        """(float[batch,3,16,16] x) => (float[batch,16] y) {
        [conv1] c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w1) [relu1] r1 = Relu(c1)
        [conv2] c2 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(r1, w2) [relu2] r2 = Relu(c2)
        [pool] p = GlobalAveragePool(r2) [flatten] f = Flatten(p) [fc] y = Gemm<transB=1>(f, w3) }""",
        **{name: array.astype(np.float32) for name, array in weights.items()},
    )
    onnx.save(net, folder / "net.onnx")
    ramp = np.linspace(-1, 1, 3 * 256, dtype=np.float32).reshape(1, 3, 16, 16)
    np.savez(folder / "data.npz", x=np.concatenate([ramp * (1 + index / 10) for index in range(12)]))
    return folder


def _build(files: Path, output: Path, **options: Any) -> BuildResult:
    if options.get("int8") or options.get("fp8"):
        options.setdefault("data", files / "data.npz")
    return build(files / "net.onnx", output, target=options.pop("target", TARGET), **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"int8": 0, "fp16": 0, "fp32": 3, "total": 3}),
        ({"fp16": True}, {"int8": 0, "fp16": 3, "fp32": 0, "total": 3}),
        ({"bf16": True}, {"int8": 0, "fp16": 0, "fp32": 0, "bf16": 3, "total": 3}),
        ({"int8": True}, {"int8": 3, "fp16": 0, "fp32": 0, "total": 3}),
        ({"int8": True, "bf16": True}, {"int8": 3, "fp16": 0, "fp32": 0, "total": 3}),
        ({"fp8": True}, {"int8": 0, "fp16": 1, "fp32": 0, "fp8": 2, "total": 3}),  # conv1 has 3 channels
    ],
)
def test_the_engine_runs_what_was_asked(
    files: Path, tmp_path: Path, options: dict[str, bool], expected: dict[str, int]
) -> None:
    result = _build(files, tmp_path / "net.engine", **options)
    assert dict(result.precision) == expected
    plain = json.loads(json.dumps(result.to_json()))
    assert {"engine", "manifest", "precision", "seconds", "cached"} <= set(plain)
    assert plain["cached"] is False
    assert (tmp_path / "net.engine").stat().st_size > 1000


@pytest.mark.parametrize("options", [{}, {"min_snr": 45.0, "compare": False}])
def test_a_build_reads_and_folds_its_model_once(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    calls = []

    def counted(module: str, name: str) -> None:
        right = getattr(sys.modules[module], name)
        monkeypatch.setattr(f"{module}.{name}", lambda *given, **how: (calls.append(name), right(*given, **how))[1])

    counted("trtopt.graph.io", "_parse")
    counted("trtopt.graph.prepare", "fold")
    data = files / "data.npz"
    trtopt.build(files / "net.onnx", tmp_path / "m.engine", int8=True, data=data, target=TARGET, **options)
    assert sorted(calls) == ["_parse", "fold"]


def test_question_marks_are_no_dimension_names(tmp_path: Path) -> None:
    proto = parsed("(float[?,3,?,?] x) => (float[?,3,?,?] y) { y = Relu(x) }")
    for value, axis in ((value, axis) for value in (*proto.graph.input, *proto.graph.output) for axis in (2, 3)):
        value.type.tensor_type.shape.dim[axis].dim_param = "?"
    build(proto, tmp_path / "m.engine", shapes="x:1x3x48x192,8x3x48x192,32x3x48x192", target=TARGET)


def test_a_model_of_another_type_than_asked_for_says_what_it_runs(files: Path, tmp_path: Path) -> None:
    half = typed(load_model(files / "net.onnx").proto, Precision.FP16, io_fp32=False)
    heard = Heard()
    result = build(half, tmp_path / "net.engine", bf16=True, target=TARGET, reporter=heard)
    assert result.precision["fp16"] == 3
    said = "no convolution or matrix product runs in BF16: they run in FP16, because of the model's own types"
    assert any(said in text for text in heard.warnings)


def test_the_values_of_a_shape_input_are_asked_for_and_may_be_negative(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parsed("(float[4,6] x, int64[2] sizes) => (float[a,b] y) { [fold_up] y = Reshape(x, sizes) }"), path)
    report = check(path, target=TARGET)
    (found,) = [item for item in report.findings if item.code == "shape-input"]
    assert report.ok and found.node == "sizes" and "values" in found.message
    with pytest.raises(UsageError, match=r"the values of the input sizes decide shapes inside.*sizes:NxN"):
        build(path, tmp_path / "m.engine", target=TARGET)
    assert build(path, tmp_path / "m.engine", shapes="sizes:-1x3", target=TARGET).engine.is_file()


def test_the_manifest_says_everything(files: Path, tmp_path: Path) -> None:
    result = _build(files, tmp_path / "net.engine", int8=True)
    manifest = read_manifest(manifest_path(result.engine))
    assert (
        manifest.precision_summary
        == "2 of 2 convolutions INT8; 1 of 1 matrix products INT8"
        == result.precision_summary
    )
    assert manifest.generation["family"] == "rtx"
    assert manifest.targets == ["sm89"]
    assert manifest.inputs == [{"name": "x", "dtype": "float32", "shape": ["batch", 3, 16, 16]}]
    assert manifest.profiles == [{"x": "1x3x16x16,8x3x16x16,32x3x16x16"}]
    assert manifest.spec["precision"] == "int8"
    assert manifest.calibration is not None
    assert manifest.calibration["samples"] == 12
    assert {layer["precision"] for layer in manifest.layers if layer["kind"] != "other"} == {"int8"}
    report = inspect(result.engine)
    assert report.maker == "TensorRT-RTX 1.7.1.116"
    assert report.precision_summary == manifest.precision_summary


def test_an_engine_that_is_up_to_date_is_not_built_again(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "net.engine"
    first = _build(files, engine, int8=True)
    written, heard = engine.stat().st_mtime_ns, Heard()
    again = _build(files, engine, int8=True, reporter=heard)
    assert again.cached and engine.stat().st_mtime_ns == written
    assert (again.precision_summary, again.targets) == (first.precision_summary, first.targets)
    assert any("up to date" in note for note in heard.notes)
    assert not _build(files, engine, int8=True, force=True).cached
    assert not _build(files, engine, fp16=True).cached
    assert not _build(files, engine, fp16=True, target="sm120").cached
    assert not _build(files, engine, fp16=True, target="sm120", save_onnx=tmp_path / "graph.onnx").cached
    options = {"fp16": True, "target": "sm120", "save_onnx": tmp_path / "graph.onnx"}
    assert _build(files, engine, **options).cached
    monkeypatch.setattr(plan, "MAKER", "one that makes other graphs")  # which may mend a wrong engine
    assert not _build(files, engine, **options).cached
    _build(files, tmp_path / "other.engine", save_onnx=tmp_path / "graph.onnx")
    assert not _build(files, engine, **options).cached  # the graph was another build's
    (tmp_path / "graph.onnx").write_bytes(b"damaged")
    assert not _build(files, engine, **options).cached
    engine.write_bytes(engine.read_bytes() + b"x")
    assert not _build(files, engine, fp16=True, target="sm120").cached


def test_another_limit_of_streams_is_another_engine_and_stands_in_the_manifest(files: Path, tmp_path: Path) -> None:
    engine = tmp_path / "net.engine"
    keys = set()
    for count in (None, 0, 2):
        assert not _build(files, engine, max_aux_streams=count).cached
        assert _build(files, engine, max_aux_streams=count).cached
        manifest = load_manifest(engine)
        assert manifest is not None and manifest.spec["max_aux_streams"] == count
        keys.add(manifest.key)
    assert len(keys) == 3


def test_class_names_and_kinds_of_outputs_go_into_the_manifest_without_a_new_build(files: Path, tmp_path: Path) -> None:
    engine, text = tmp_path / "net.engine", tmp_path / "names.txt"
    text.write_text("".join(f"bird {number}\n" for number in range(16)), encoding="utf-8")
    _build(files, engine, fp16=True, classes=text)
    before, first = engine.stat().st_mtime_ns, read_manifest(manifest_path(engine))
    assert (first.classes, first.output_kinds) == ([f"bird {number}" for number in range(16)], {"y": "classes"})
    heard, other = Heard(), [f"fish {number}" for number in range(16)]
    again = _build(files, engine, fp16=True, classes=other, output_kind=["y=embedding"], reporter=heard)
    second = read_manifest(manifest_path(engine))
    assert asdict(second) == asdict(first) | {"classes": other, "output_kinds": {"y": "embedding"}}
    assert again.cached and engine.stat().st_mtime_ns == before
    assert any("16 class names now, and kinds of outputs: y=embedding" in note for note in heard.notes)
    quiet = Heard()
    assert _build(files, engine, fp16=True, output_kind={"y": "embedding"}, reporter=quiet).cached
    assert not any("kinds of outputs" in note for note in quiet.notes)  # nothing said of names: they stay
    assert load_manifest(engine) == second
    with pytest.raises(UsageError, match="there is no output 'z'; there is y"):
        _build(files, engine, output_kind=["z=classes"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\nb\n", r"gives 2 names; output 'y' has 16"),
        ("", "holds no class names"),
        ("a\n\nc\n", r"line 2 is ''.*one class off"),
        ('["a", 1]', r"entry 2 is 1"),
        ('{"0": "a"}', "JSON dict; a list of names"),
        ('["a"', "can't be read"),
    ],
)
def test_class_names_that_do_not_fit_are_refused(files: Path, tmp_path: Path, content: str, message: str) -> None:
    names = tmp_path / ("names.json" if content[:1] in ("[", "{") else "names.txt")
    names.write_text(content)
    with pytest.raises(UsageError, match=message):
        _build(files, tmp_path / "net.engine", classes=names)
    with pytest.raises(UsageError, match=r"none\.txt doesn't exist"):
        _build(files, tmp_path / "net.engine", classes=tmp_path / "none.txt")
    assert list(tmp_path.glob("net*")) == []


def test_a_model_that_holds_qdq_is_taken_as_it_is(files: Path, tmp_path: Path) -> None:
    graph, heard = tmp_path / "graph.onnx", Heard()
    _build(files, tmp_path / "net.engine", int8=True, save_onnx=graph)
    saved = onnx.load(graph)
    onnx.checker.check_model(saved, full_check=True)
    assert [item.op_type for item in saved.graph.node].count("QuantizeLinear") == 4  # x, r1, r2 (pooled), f
    assert build(graph, tmp_path / "again.engine", int8=True, target=TARGET).precision["int8"] == 3
    with pytest.raises(UsageError, match=r"already holds Q/DQ.*drop `data=`"):
        build(graph, tmp_path / "again.engine", int8=True, data=files / "data.npz", target=TARGET)
    result = build(graph, tmp_path / "half.engine", fp16=True, target=TARGET, reporter=heard)
    assert result.precision["int8"] == 3
    assert any("the model is quantized, which `int8=True` says" in text for text in heard.warnings)


def test_what_tensorrt_cant_keep_of_a_quantized_model_is_calibrated_anew(files: Path, tmp_path: Path) -> None:
    dynamic = parsed(
        """(float[batch,64] x) => (float[batch,64] y) {
        c, s, z = DynamicQuantizeLinear(x) [fc] i = MatMulInteger(c, w, z) f = Cast<to=1>(i) t = Mul(s, ws) y = Mul(f, t) }""",
        w=np.arange(-64, 64, dtype=np.int8).repeat(32).reshape(64, 64), ws=np.float32(0.01),
    )  # fmt: skip
    heard, data = Heard(), {"x": values(16, 64)}
    built = build(dynamic, tmp_path / "a.engine", int8=True, data=data, target=TARGET, reporter=heard)
    assert built.precision["int8"] == 1
    assert any("1 MatMulInteger written as floating operators" in text for text in heard.warnings)
    assert any("1 MatMulInteger" in text for text in built.warnings)
    skewed = parsed(
        """(float[batch,64] x) => (float[batch,64] y) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, ws, wz) [fc] y = MatMul(d, v) }""",
        w=np.arange(-64, 64, dtype=np.int8).repeat(32).reshape(64, 64), s=np.float32(0.02), z=np.uint8(60),
        ws=np.float32(0.01), wz=np.int8(0),
    )  # fmt: skip
    for options, said in (({}, "moved to symmetric scales"), ({"data": data}, "weights in floating point")):
        built = build(skewed, tmp_path / "b.engine", int8=True, target=TARGET, force=True, **options)
        assert built.precision["int8"] == 1
        assert said in " ".join(built.warnings)


def test_a_table_gives_the_same_engine_as_its_data(files: Path, tmp_path: Path) -> None:
    calibrate(files / "net.onnx", tmp_path / "net.calib.json", data=files / "data.npz", threads=1)
    by_table = _build(files, tmp_path / "a.engine", int8=True, calib=tmp_path / "net.calib.json", data=None)
    by_data = _build(files, tmp_path / "b.engine", int8=True)
    assert unnumbered(by_table.engine.read_bytes()) == unnumbered(by_data.engine.read_bytes())
    again = _build(
        files, tmp_path / "a.engine", int8=True, calib=tmp_path / "net.calib.json", data=None, method="minmax"
    )
    assert not again.cached
    assert again.table is not None
    assert {entry.method for entry in again.table.tensors.values()} == {"minmax"}


def test_the_scales_are_kept_on_request_without_a_limit_too(files: Path, tmp_path: Path) -> None:
    kept, heard = tmp_path / "kept.calib.json", Heard()
    given: dict[str, Any] = {"target": TARGET, "save_calib": kept, "reporter": heard}
    made = trtopt.build(files / "net.onnx", tmp_path / "a.engine", int8=True, data=files / "data.npz", **given)
    again = _build(files, tmp_path / "b.engine", int8=True, calib=kept, data=None)
    assert unnumbered(made.engine.read_bytes()) == unnumbered(again.engine.read_bytes())
    kept.unlink()
    trtopt.build(files / "net.onnx", tmp_path / "a.engine", int8=True, data=files / "data.npz", **given)  # up to date
    assert kept.exists()
    kept.unlink()
    with pytest.raises(UsageError, match="`save_calib=` has no effect without `int8=True`"):
        trtopt.build(files / "net.onnx", tmp_path / "half.engine", fp16=True, **given)
    _build(files, tmp_path / "q.engine", int8=True, save_onnx=tmp_path / "q.onnx")
    trtopt.build(tmp_path / "q.onnx", tmp_path / "again.engine", int8=True, **given)  # with the scales that it holds
    assert [text for text in heard.warnings if text.startswith("`save_calib=` kept nothing")]
    assert not kept.exists()


def test_a_table_of_another_model_is_refused_and_for_other_weights_used_with_a_warning(
    files: Path, tmp_path: Path
) -> None:
    table = calibrate(files / "net.onnx", data=files / "data.npz", threads=1).table
    other, tuned = onnx.load(files / "net.onnx"), onnx.load(files / "net.onnx")
    for item in other.graph.node:
        item.output[:] = [f"{name}_" if name != "y" else name for name in item.output]
        item.input[:] = [f"{name}_" if name not in ("x", "w1", "w2", "w3") else name for name in item.input]
    with pytest.raises(CalibrationError, match=r"no scale for 3 of 4 tensors.*trtopt calibrate"):
        build(other, tmp_path / "net.engine", int8=True, calib=table, target=TARGET)
    assert list(tmp_path.glob("net*")) == []
    weight = numpy_helper.to_array(tuned.graph.initializer[0]) * np.float32(1.01)
    tuned.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w1"))
    for net, warned in ((tuned, True), (files / "net.onnx", False)):
        build(net, tmp_path / "net.engine", int8=True, calib=table, target=TARGET, reporter=(heard := Heard()))
        assert any("another model, or for other weights" in text for text in heard.warnings) is warned
        assert warned or heard.warnings == []


def test_overrides_are_kept_and_said(files: Path, tmp_path: Path) -> None:
    result = _build(files, tmp_path / "net.engine", int8=True, precision_override=["conv2=fp16", "Gemm=fp16"])
    assert dict(result.precision) == {"int8": 1, "fp16": 2, "fp32": 0, "total": 3}
    assert {(item.node, str(item.precision)) for item in result.kept} >= {("conv2", "fp16"), ("fc", "fp16")}
    result = _build(files, tmp_path / "net.engine", fp16=True, precision_override=["*=fp32"])
    assert dict(result.precision) == {"int8": 0, "fp16": 0, "fp32": 3, "total": 3}


def test_an_override_that_the_builder_ignores_is_lost_precision(files: Path, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7 runs an FP32 convolution between FP16 layers in FP16, casts and all."""
    options = {"int8": True, "precision_override": ["conv2=fp32"]}
    with pytest.raises(PrecisionLost, match=r"conv2 \(fp32 → fp16\)"):
        _build(files, tmp_path / "net.engine", **options)
    heard = Heard()
    result = _build(files, tmp_path / "net.engine", **options, allow_precision_fallback=True, reporter=heard)
    assert result.precision["fp16"] == 1
    assert any("conv2 (fp32 → fp16)" in warning for warning in heard.warnings)


def test_precision_that_the_builder_loses_silently_is_an_error_or_kept_out_in_a_second_build(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX for compute capability 7.5 and 8.9 at once, which loses INT8 and isn't asked first."""
    monkeypatch.setattr(select("rtx"), "_refusals", lambda *_: [])
    options: dict[str, Any] = {"int8": True, "target": "sm75,sm89", "reporter": (heard := Heard())}
    said = (
        r"2 of 3 layers don't run in the precision asked for: conv1 \(int8 → fp.*; \d+% of the arithmetic.*Nothing was"
    )
    with pytest.raises(PrecisionLost, match=said):  # most of the arithmetic is lost
        _build(files, tmp_path / "net.engine", **options)
    assert list(tmp_path.glob("net*")) == []
    monkeypatch.setattr("trtopt.builder.execute.LEAST_SHARE", 0)
    result = _build(files, tmp_path / "net.engine", **options)
    assert any("building again with these in FP16" in note and "conv1" in note for note in heard.notes)
    reasons = {item.node: item.reason for item in result.kept}
    assert "runs it in fp16 when quantized" in reasons["conv1"]
    assert result.precision["total"] == 3
    assert sum(result.coverage.values()) == pytest.approx(1)


def test_a_layer_that_has_no_quantized_kernel_is_left_out_in_a_second_build(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorRT 8.6 has none for the convolution that cuts an image into patches."""
    generation, heard = select("rtx"), Heard()
    works, left_out = type(generation).build, list[str]()

    def refusing(self: Any, model: Path, *arguments: Any, **options: Any) -> Any:
        quantized = [node.input[0] for node in onnx.load(model).graph.node if node.name in ("conv1", "conv2")]
        if "x_dequantized" in quantized or len(left_out) > 1:
            left_out.append("x")
            text = "TensorRT parses w_quantized_float + w_quantized/QuantizeLinear + conv1 but has no implementation for it"
            raise UnsupportedOperator(text)
        return works(self, model, *arguments, **options)

    monkeypatch.setattr(type(generation), "build", refusing)
    result = _build(files, tmp_path / "net.engine", int8=True, reporter=heard)
    assert any("conv1: " in note and "no implementation of it in INT8; building again" in note for note in heard.notes)
    reasons = {item.node: item.reason for item in result.kept}
    assert reasons["conv1"].endswith("has no implementation of it in INT8") and result.precision["int8"] == 2
    left_out += ["again", "and again"]
    with pytest.raises(UnsupportedOperator, match="conv1"):  # left out, and refused all the same
        _build(files, tmp_path / "other.engine", int8=True)


@pytest.mark.parametrize(
    ("error", "said", "left_out"),
    [
        (UnsupportedOperator, "TensorRT parses {ForeignNode[a...b]} but has no implementation for its types", {"fc"}),
        (
            BuildFailed,
            "Error Code 2: Internal Error (Assertion type() == expectedDataType<T>() failed.)",
            {"conv2", "conv3"},
        ),
    ],
)
def test_layers_that_tensorrt_may_fail_at_are_left_out_in_a_second_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], said: str, left_out: set[str]
) -> None:
    """8.6 names a region of a whole transformer; 10.6 nothing, where a convolution reads SiLU, GELU or a Clip from -1 on."""
    shapes = {"w1": (32, 16, 3, 3), "w2": (32, 32, 3, 3), "w3": (32, 32, 3, 3), "w4": (32, 32, 3, 3), "v": (32, 64)}
    net = written(
        """(float[n,16,8,8] x) => (float[n,64] y) {
        [conv1] a = Conv <pads = [1, 1, 1, 1]> (x, w1) [s] s = Sigmoid (a) [silu] b = Mul (a, s)
        [conv2] c = Conv <pads = [1, 1, 1, 1]> (b, w2) [clip] d = Clip (c, low, high)
        [conv3] e = Conv <pads = [1, 1, 1, 1]> (d, w3) [relu6] f = Clip (e, zero, high)
        [conv4] g = Conv <pads = [1, 1, 1, 1]> (f, w4) [pool] p = GlobalAveragePool (g) [flat] h = Flatten (p)
        [fc] y = MatMul (h, v) }""",
        **{name: values(*shape, scale=0.1) for name, shape in shapes.items()},
        low=np.float32(-1),
        zero=np.float32(0),
        high=np.float32(6),
    )
    onnx.save(net, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=values(32, 16, 8, 8))
    works, calls = type(select("rtx")).build, list[str]()

    def refusing(self: Any, model: Path, *arguments: Any, **options: Any) -> Any:
        calls.append("")
        if len(calls) == 1:
            raise error(said)
        return works(self, model, *arguments, **options)

    monkeypatch.setattr(type(select("rtx")), "build", refusing)
    shapes_of = "x:1x16x8x8,4x16x8x8,8x16x8x8"
    result = trtopt.build(
        tmp_path / "net.onnx",
        tmp_path / "net.engine",
        int8=True,
        data=tmp_path / "data.npz",
        shapes=shapes_of,
        target=TARGET,
        compare=False,
    )
    reasons = {item.node: item.reason for item in result.kept if "has no implementation of it in INT8" in item.reason}
    assert set(reasons) == left_out and result.precision["int8"] == 5 - len(left_out)


def test_codes_by_an_inputs_range_that_something_else_reads_are_refused(tmp_path: Path) -> None:
    net = parsed("(float[n,32] x) => (float[n,32] y) { [d] c, s, z = DynamicQuantizeLinear(x) y = Cast<to=1>(c) }")
    said = r"quantized already.*d \(DynamicQuantizeLinear\).*give the float model.*`int8=True`"
    with pytest.raises(UnsupportedOperator, match=said):
        build(net, tmp_path / "q.engine", fp16=True, target=TARGET)
    assert not (tmp_path / "q.engine").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"int8": True, "fp8": True}, "`int8=True` and `fp8=True`"),
        ({"fp16": True, "bf16": True}, "`fp16=True` and `bf16=True`"),
        ({"data": "data.npz"}, "`data=` calibrates, but the build is fp32"),
        ({"int8": True, "data": None}, "no data was given.*`images=DIR`, `data='F.npz'` or `calib="),
        ({"int8": True, "calib": "table.json"}, "`data=` and `calib=` are given"),
        ({"calibrator": "native"}, "`calibrator='native'` calibrates INT8"),
        ({"int8": True, "calibrator": "native", "embed_preprocess": True}, "on the engine's own inputs.*drop one"),
        ({"fp16": True, "precision_override": ["conv1=int8"]}, "needs `int8=True`"),
        ({"bf16": True, "precision_override": ["conv1=int9"]}, "int9.*can't be read"),
        (
            {"bf16": True, "precision_override": ["conv1=fp16"]},
            "needs `fp16=True`: beside bf16 this build has bf16 and fp32",
        ),
        ({"precision_override": ["conv1=fp32"]}, "`precision_override=` has no effect without `fp16=True`"),
        ({"fp16": True, "method": "mse"}, "`method=` has no effect without `int8=True`"),
        ({"fp16": True, "precision_override": ["Conv=bf16"]}, "needs `bf16=True`: beside fp16"),
        ({"fp16": True, "precision_override": ["cnov1=fp32"]}, "cnov1=fp32.*matches no node"),
        ({"workspace": "much"}, "'much', which isn't a size"),
        ({"shapes": "x:8x3x16x16,4x3x16x16,32x3x16x16"}, "min ≤ opt ≤ max"),
        ({"target": "ada"}, "isn't a compute capability"),
    ],
)
def test_requests_that_can_not_be_right_are_refused_before_any_work(
    files: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        _build(files, tmp_path / "net.engine", **options)
    assert list(tmp_path.glob("net*")) == []


def test_a_build_that_ends_early_leaves_what_was_there_before(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def broken(place: str, error: BaseException, expected: Any) -> None:
        before = left()
        with monkeypatch.context() as patch, expected:
            patch.setattr(f"trtopt.builder.construction.{place}", Mock(side_effect=error))
            _build(files, tmp_path / "net.engine", fp16=True, save_onnx=tmp_path / "graph.onnx")
        assert left() == before

    full = OSError(errno.ENOSPC, "No space left on device")
    said = pytest.raises(OutputError, match=r"No space left on device; nothing was left behind")
    broken("json_bytes", full, said)
    _build(files, tmp_path / "net.engine")
    broken("save_model", KeyboardInterrupt(), pytest.raises(KeyboardInterrupt))


def test_the_manifest_says_where_samples_lie_that_do_not_lie_first(tmp_path: Path) -> None:
    net = conv_relu(inputs={"x": [16, 3, "batch", 16]}, outputs={"y": [16, 4, "batch", 16]})
    build(net, tmp_path / "n.engine", fp16=True, shapes="x:16x3x1x16,16x3x4x16,16x3x8x16", target=TARGET)
    manifest = read_manifest(manifest_path(tmp_path / "n.engine"))
    assert [item["batch_axis"] for item in (*manifest.inputs, *manifest.outputs)] == [2, 2]


def test_a_batch_of_one_that_a_trace_left_is_refused_with_what_to_type(tmp_path: Path) -> None:
    text = """(float[batch,3,8,8] x) => (float[batch,5] y) {
        p = GlobalAveragePool(x) [flat] f = Reshape(p, s) y = Gemm(f, v, b) }"""
    traced = parsed(text, s=np.array([1, -1]), v=values(3, 5), b=values(5))
    options: dict[str, Any] = {"fp16": True, "target": TARGET}
    with pytest.raises(ModelError, match=r"several samples: flat \(Reshape\).*`fix='OUT.onnx'`.*x:1x3x8x8"):
        build(traced, tmp_path / "several.engine", **options)
    assert list(tmp_path.iterdir()) == []
    onnx.save(traced, tmp_path / "traced.onnx")
    with pytest.raises(ModelError, match=r"trtopt check \S*/traced.onnx `fix="):
        build(tmp_path / "traced.onnx", tmp_path / "several.engine", **options)
    assert build(traced, tmp_path / "one.engine", shapes="x:1x3x8x8", **options).engine.exists()
    check(traced, fix=tmp_path / "fixed.onnx")
    assert build(tmp_path / "fixed.onnx", tmp_path / "fixed.engine", **options).engine.exists()


def test_verify_refuses_samples_that_the_engine_will_not_take(tmp_path: Path) -> None:
    """It runs the kept graph, which takes any length."""
    net, engine = parsed("(float[n,2,length] x) => (float[n,2,length] y) { y = Add(x, x) }"), tmp_path / "m.engine"
    build(net, engine, fp16=True, target=TARGET, shapes="x:1x2x8,1x2x128,8x2x512", save_onnx=tmp_path / "k.onnx")
    arrays = {"x": np.zeros((6, 2, 900), np.float32)}
    with pytest.raises(UsageError, match="samples of x 2x900 are outside the engine's shapes, x 1x2x8 to 8x2x512"):
        trtopt.verify(net, engine, data=arrays)


def parsed(text: str, opset: str = '"" : 17', **weights: np.ndarray[Any, Any]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opset}]> g {text}")
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return proto


CONVOLUTION = "c = Conv<pads=[1,1,1,1]>(x, w) r = Relu(c)"
HEADS = (
    f"{CONVOLUTION} p = Reshape(r, s) boxes, b = Split<axis=2>(p, t) u = Transpose<perm=[0,2,1]>(b) scores = Sigmoid(u)"
)
SIZED = """c = Conv<pads=[1,1,1,1]>(x, w) k = Cast<to=7>(size) f = Concat<axis=0>(n, k)
    y = Resize<mode="linear">(c, , , f)"""
WAVE = f"=> (float[1,12,16,16] y) {{{CONVOLUTION} y = com.acme.Wave(r)}}"
TREE = """y = ai.onnx.ml.TreeEnsembleRegressor<nodes_modes=["LEAF"], nodes_values=[0.0], nodes_featureids=[0],
    nodes_nodeids=[0], nodes_treeids=[0], n_targets=1, nodes_truenodeids=[0], nodes_falsenodeids=[0], target_ids=[0],
    target_nodeids=[0], target_treeids=[0], target_weights=[1.0]>(f)"""
MASKED = "a = Neg(x) m = Greater(x, a) i = NonZero(m) t = Transpose(i) y = GatherND(x, t)"
LENGTHS = {"s": np.array([0, -1, 12]), "t": np.array([4, 8]), "n": np.array([10]), "w": values(12, 3, 3, 3)}


@pytest.mark.parametrize(
    ("text", "opset", "weights", "ends", "said"),
    [
        (f"=> (int64[n, 3] y) {{{HEADS} y = NonMaxSuppression(boxes, scores, n)}}", "", LENGTHS, "boxes,scores", "NMS"),
        (
            f"=> (int32[1, 1] y) {{{HEADS} y = TRT.EfficientNMS_TRT(boxes, scores)}}",
            ', "TRT": 1', LENGTHS, "boxes,scores", "has EfficientNMS_TRT as a plugin",
        ),
        (WAVE, ', "com.acme": 1', LENGTHS, "r", "name the library that has it"),
        (f"=> (float[1,12,16,16] y) {{{CONVOLUTION} y = Dropout(r, a, b)}}", "",
         {**LENGTHS, "a": np.array(0.5, np.float32), "b": np.array(True)}, "", "export the model after .eval()"),
        ("=> (float[1,5000] y, int64[1,5000] i) {c = Conv(x, w) f = Flatten(c) y, i = TopK(f, k)}", "",
         {"w": values(40, 3, 3, 3), "k": np.array([5000])}, "f", "at most 3840"),
        (f"=> (float[1,1] y) {{ f = Flatten(x) {TREE} }}", ', "ai.onnx.ml" : 3', {}, "f", "run that part outside the engine"),
        (f"=> (float[k] y) {{ {MASKED} }}", "", {}, "", "a boolean mask as an index"),
        (f"=> (float[1,12,?,?] y) {{{SIZED}}}", "", {**LENGTHS, "n": np.array([1, 12])}, "", "--set size=480,640 --fix"),
    ],
    ids=["nms", "plugin", "custom", "dropout", "topk", "tree", "mask", "sizes by floats"],
)  # fmt: skip
def test_refusals_come_before_samples_are_read_and_say_what_to_type(
    tmp_path: Path, text: str, opset: str, weights: dict[str, Any], ends: str, said: str
) -> None:
    sizes = ", float[2] size" if "size" in text else ""
    path = tmp_path / "m.onnx"
    onnx.save(parsed(f"(float[1,3,16,16] x{sizes}) {text}", f'"" : 17{opset}', **weights), path)

    def never() -> Any:
        raise AssertionError("samples are read")
        yield

    for work, limits in ((build, {}), (trtopt.tune, {"min_snr": 20})):
        with pytest.raises(UnsupportedOperator) as refused:
            work(path, tmp_path / "m.engine", int8=True, data=never(), target=TARGET, **limits)
        lines = refused.value.for_cli({name: f"--{name}" for name in ("set", "fix", "outputs")})
        assert said in " ".join(lines)
        assert (f"trtopt check {path} --outputs {ends} --fix {tmp_path / 'm.cut.onnx'}" in lines[-1]) == bool(ends)
    if ends:
        fixed = trtopt.check(path, outputs=ends.split(","), fix=tmp_path / "m.cut.onnx").fixed
        assert fixed and build(fixed, tmp_path / "m.engine", target=TARGET).engine.is_file()


ATTENTION = """q = MatMul(x, w) k = MatMul(x, w) ks = Concat<axis=1>(past, k) kt = Transpose<perm=[0,2,1]>(ks) a = MatMul(q, kt)
    m = Unsqueeze(mask, one) s = Add(a, m) p = Softmax<axis=-1>(s) y = MatMul(p, ks)"""
SOUND = """u = Unsqueeze(x, one) a = Conv<strides=[5]>(u, f) b = Conv<strides=[4]>(a, g) c = Conv<strides=[4]>(b, g)
    y = Conv<strides=[4]>(c, g)"""
IMAGE = """a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w) b = Conv<pads=[1,1,1,1], strides=[2,2]>(a, v)
    u = Resize<mode="nearest">(b, , by) y = Concat<axis=1>(u, a)"""
TEXT = '(float["batch", "seq", 16] x, float["batch", "past", 16] past, float["batch", "{}"] mask) => (float["batch", ?, 16] y)'
W16 = {"w": values(16, 16), "one": np.array([1])}


@pytest.mark.parametrize(
    ("head", "body", "weights"),
    [
        (TEXT.format("past + seq"), ATTENTION, W16),
        ('(float["batch", 3, "h", "w"] x) => (float["batch", 8, ?, ?] y)', IMAGE,
         {"w": values(4, 3, 3, 3), "v": values(4, 4, 3, 3), "by": np.array([1, 1, 2, 2], np.float32)}),
        ('(float["batch", "samples"] x) => (float["batch", 8, ?] y)', SOUND,
         {"one": np.array([1]), "f": values(8, 1, 10), "g": values(8, 8, 8)}),
    ],
    ids=["cache", "detection", "audio"],
)  # fmt: skip
def test_the_shapes_that_check_proposes_build(tmp_path: Path, head: str, body: str, weights: dict[str, Any]) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parsed(f"{head} {{{body}}}", **weights), path)
    option = check(path).shapes.option
    shapes = option.removeprefix("`shapes='").removesuffix("'`")
    assert shapes != option and build(path, tmp_path / "m.engine", target=TARGET, shapes=shapes).engine.is_file()


def test_sizes_by_their_names_are_the_shapes_of_all_inputs(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    head, body = TEXT.format("past + seq").replace("] past,", "] cache,"), ATTENTION.replace("(past,", "(cache,")
    onnx.save(parsed(f"{head} {{{body}}}", **W16), path)
    sizes = ["batch:1,2,4", "past:1,8,16;seq:4"]
    assert check(path, shapes=sizes).ok
    [profile] = load_manifest(build(path, tmp_path / "m.engine", target=TARGET, shapes=sizes).engine).ranges
    assert profile["mask"] == ShapeRange((1, 5), (2, 12), (4, 20)) and profile["cache"].max == (4, 16, 16)


def test_shapes_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parsed(f"{TEXT.format('total')} {{{ATTENTION}}}", **W16), path)
    with pytest.raises(BackendError, match=r"contradict each other.*`trtopt check` proposes"):
        build(path, tmp_path / "m.engine", target=TARGET, shapes="x:1x8x16;past:1x8x16;mask:1x8")
