"""check(): every hazard is found by name, clean models are quiet, --fix changes nothing but the graph."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import conv_relu, model, node, rapidocr, typing, values, written
from half_models import half, overflowing
from onnx import ModelProto, TensorProto, helper, numpy_helper

import trtopt.trt
from trtopt.core.errors import NoBackend, OutputError, UsageError
from trtopt.core.values import Issue, Precision, ShapeRange
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold
from trtopt.linting.checker import check
from trtopt.linting.rules import Finding, find, fp16_hazards


class FakeGeneration:
    """A TensorRT whose parser refuses what the test says."""

    def __init__(self, *issues: Issue, max_opset: int | None = None) -> None:
        self.issues, self.capabilities = issues, type("Capabilities", (), {"max_opset": max_opset})()
        self.asked: list[Path] = []

    def __str__(self) -> str:
        return "TensorRT 8.6.0"

    def unsupported(self, path: Path) -> tuple[Issue, ...]:
        self.asked.append(Path(path))
        assert load_model(path).outputs
        return self.issues

    def limits(self, graph: ModelProto) -> tuple[Issue, ...]:
        return ()

    def compile_operators(self, *_: object) -> None: ...

    def shape_inputs(self, path: Path) -> tuple[tuple[str, int], ...]:
        return ()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(generation: Any) -> Any:
        monkeypatch.setattr(trtopt.trt, "select", lambda name="auto": generation)
        return generation

    return install


@pytest.fixture(autouse=True)
def default_backend(backend: Any) -> None:
    backend(FakeGeneration())


def codes(proto: ModelProto) -> dict[str, Finding]:
    load_model(proto)
    return {finding.code: finding for finding in find(fold(proto)[0])}


def test_a_clean_model_has_no_warnings() -> None:
    report = check(conv_relu(inputs={"x": [1, 3, 8, 8]}))
    assert report.ok and not [item for item in report.findings if item.level != "info"], str(report)
    assert report.parser == "TensorRT 8.6.0" and report.opset == 17


def test_an_invalid_model_is_a_finding_and_a_missing_file_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    report = check(tmp_path / "empty.onnx")
    assert not report.ok and report.findings[0].code == "invalid-model" and "0 bytes" in report.findings[0].message
    with pytest.raises(UsageError, match="doesn't exist"):
        check(tmp_path / "none.onnx")


def test_every_refused_operator_is_an_error_with_node_and_reason(backend: Any) -> None:
    fake = backend(FakeGeneration(Issue("d", "Det", "no Det"), Issue("n", "NonZero", "no NonZero")))
    report = check(conv_relu())
    refused = [item for item in report.findings if item.code == "unsupported-operator"]
    assert [(item.node, item.op) for item in refused] == [("d", "Det"), ("n", "NonZero")]
    assert "no Det" in refused[0].message and "TensorRT 8.6.0" in refused[0].message
    assert not report.ok and len(fake.asked) == 1


def test_nodes_that_are_refused_for_the_same_reason_are_one_finding(backend: Any) -> None:
    named = [Issue(f"q{number}", "QuantizeLinear", f"its zero point 'z{number}' isn't constant") for number in range(9)]
    backend(
        FakeGeneration(*named, Issue("c", "Cast", "its zero point 'z' isn't constant"), Issue("r", "Relu", "no Relu"))
    )
    report = check(conv_relu())
    refused = [item for item in report.findings if item.code == "unsupported-operator"]
    assert [item.node for item in refused] == ["q0", "c", "r"]
    assert refused[0].message.endswith("its zero point 'z0' isn't constant (9 such nodes: q0, q1, q2, q3, q4, q5, …)")
    assert "such nodes" not in refused[1].message


def test_without_a_backend_it_says_that_no_parser_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str = "auto") -> Any:
        raise NoBackend("pip install tensorrt-rtx")

    monkeypatch.setattr(trtopt.trt, "select", none)
    report = check(conv_relu())
    found = next(item for item in report.findings if item.code == "parser-not-asked")
    assert found.level == "warning" and "tensorrt-rtx" in found.message and report.parser is None and report.ok
    with pytest.raises(NoBackend):
        check(conv_relu(), backend="rtx")


def test_shapes_are_checked_against_the_inputs() -> None:
    good = check(conv_relu(), shapes=["x:1x3x8x8,2x3x8x8,4x3x8x8"])
    assert good.ok
    assert check(conv_relu(), shapes=[{"x": ShapeRange((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))}]).ok
    for wrong in ("x:1x3x9x8", "other:1x3x8x8", "x:1x3x8"):
        report = check(conv_relu(), shapes=[wrong])
        assert next(item.code for item in report.findings if item.level == "error") == "shapes", wrong


NAN, INF = float("nan"), float("inf")
PICTURE, TABLE = (
    "(float[n,3,8,8] x) => (float[] y)",
    "(int64[n,3] ids) => (float[] y) { [look] y = Gather (masks, ids) }",
)
MASKED = f"{PICTURE} {{ h = Where (hides, m, x) y = Softmax (h) }}"
CODED = f"{PICTURE} {{ [q] h = QuantizeLinear (x, s, z) y = DequantizeLinear (h, s, z) }}"
HAZARDS: list[tuple[ModelProto, str, str]] = [  # each with what is said of it, and what isn't
    (written("(double[n,3] x) => (double[n,3] y) { y = Identity (x) }"), "warning: x: the input is float64", "error"),
    (written("(uint16[n,3] x) => (uint16[n,3] y) { y = Identity (x) }"), "error: x: the input is of type uint16", "warning"),
    (written("(string[n,3] x) => (string[n,3] y) { y = Identity (x) }"), "error: x: the input is of type string", "warning"),
    (written("(complex64[n,3] x) => (complex64[n,3] y) { y = Identity (x) }"), "error: x: the input is of type complex", "8"),
    (written("(uint8[n,8,8,3] x) => (float[] y) { t = Transpose <perm = [0,3,1,2]> (x) y = Cast <to = 1> (t) }"), "", "int8"),
    (written("(float[n,3,8,8] x) => (uint8[] y) { t = Cast <to = 2> (x) y = Transpose (t) }"), "", "uint8"),
    (written(f"{PICTURE} {{ y = Clip (x, lo, hi) }}", lo=np.float32(0), hi=np.float32(3.4e38)), "", "FP16"),
    (written(MASKED, m=np.float32(-INF), hides=[True, False] * 4), "", "mask"),
    (
        written(MASKED, m=np.float32([-INF] * 8), hides=[True, False] * 4),
        "", "a mask of",
    ),
    (written(f"{PICTURE} {{ [c] y = Conv (x, w) }}", w=np.full((4, 3, 1, 1), NAN, np.float32)),
     "error: c (Conv): w holds NaN or infinity; the weights are damaged, or beyond FP16's 65,504", "mask"),
    (written(TABLE, masks=np.float32([[0, 0], [-INF, 1]])), "warning: look (Gather): masks holds -inf", "NaN or infinity"),
    (written(TABLE, masks=np.float32([[0, 0], [-INF, NAN]])), "warning: look (Gather): masks holds NaN or infinity", "-inf"),
    (written(TABLE, masks=np.float32([[0, 0], [-INF, INF]])), "warning: look (Gather): masks holds NaN or infinity", "-inf"),
    (
        written("(float[4] x) => (int64[] a, int64[] b) { [nz] a = NonZero (x) n = Neg (x) [e1] b = NonZero (n) }"),
        "warning: nz (NonZero): the shape of its result depends on values, not on shapes (2 such nodes: nz, e1)", "error",
    ),
    (written(CODED, s=np.float32(0.1), z=np.int8(0)), "", ":"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(HAZARDS)))
def test_hazards_are_said_where_they_are(index: int) -> None:
    proto, said, unsaid = HAZARDS[index]
    findings = [str(finding) for finding in find(fold(load_model(proto).proto)[0])]
    assert any(text.startswith(said) for text in findings) or not said, findings
    assert not any(unsaid in text for text in findings), findings


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (
            written(f"{PICTURE} {{ [d] q, s, z = DynamicQuantizeLinear (x) y = Cast <to = 1> (q) }}"),
            "error: it is quantized already, in what TensorRT hasn't (d (DynamicQuantizeLinear): what reads it",
        ),
        (written(CODED, s=np.float32(0.1), z=np.int8(3)),
         "warning: quantized already: 1 activations with zero points moved to symmetric scales"),
        (written(CODED, s=np.float32(1), z=np.uint8(128)),
         "info: quantized already: 1 tensors in other codes"),
    ],
)  # fmt: skip
def test_what_was_taken_in_of_a_quantized_model_is_said(proto: ModelProto, said: str) -> None:
    assert any(str(finding).startswith(said) for finding in check(proto).findings), check(proto).findings


def test_an_operator_of_another_domain_needs_a_plugin() -> None:
    custom = model([helper.make_node("Magic", ["x"], ["y"], "m", domain="acme")], outputs={"y": ["batch", 3, 8, 8]})
    custom.opset_import.append(helper.make_opsetid("acme", 1))
    assert codes(custom)["custom-operator"].node == "m"


def open_slice() -> ModelProto:
    weights = {"s": np.array([1], np.int64), "e": np.array([2**63 - 1], np.int64), "a": np.array([2], np.int64)}
    return model([node("Slice", "x s e a", "h"), node("Relu", "h", "y")], weights=weights)


_MASKED = {
    "added": [node("Add", "x m", "y1", "masked"), node("Softmax", "y1", "y")],
    "chosen": [node("Where", "hides m x", "h", "masked"), node("Softmax", "h", "y")],
    "chosen, turned, added": [
        node("Where", "hides zero m", "h"),
        node("Unsqueeze", "h axis", "i"),
        node("Add", "x i", "j", "masked"),
        node("Softmax", "j", "k"),
        node("Mul", "k k", "y"),
    ],
    "added twice": [node("Add", "x m", "h", "masked"), node("Add", "h m", "i"), node("Softmax", "i", "y")],
    "two added": [
        node("Where", "hides m x", "h", "masked"),
        node("Add", "h n", "i"),
        node("Softmax", "i", "y"),
    ],
    "multiplied": [node("Mul", "x m", "h", "masked"), node("Softmax", "h", "y")],
    "summed": [node("Add", "x m", "h", "masked"), node("ReduceSum", "h", "y")],
    "handed out": [node("Add", "x m", "y", "masked")],
    "also multiplied": [
        node("Add", "x m", "h", "masked"),
        node("Softmax", "h", "i"),
        node("Mul", "i m", "y"),
    ],
}


@pytest.mark.parametrize("case", _MASKED)
def test_a_mask_harms_where_two_are_added_or_anything_but_a_softmax_is_made_of_it(case: str) -> None:
    weights = {
        "m": np.float32([-3.4e38, 0] * 4),
        "n": np.float32([0, -1e9] * 4),
        "zero": np.float32(0).reshape(()),
        "hides": np.array([True, False] * 4),
        "axis": np.array([0]),
    }
    used = {name for item in _MASKED[case] for name in item.input}
    proto = model(_MASKED[case], weights={name: item for name, item in weights.items() if name in used})
    harmless = case in ("added", "chosen", "chosen, turned, added")
    assert ("fp16-mask-constant" not in codes(proto)) is harmless
    assert (fp16_hazards(proto, typed=False) == ()) is harmless
    assert fp16_hazards(proto, typed=True) == (), "it is -16384 there"
    less = model(_MASKED["multiplied"], weights={"m": np.float32([-1e6, 0] * 4)})  # which a build keeps in FP32
    assert "fp16-mask-constant" not in codes(less) and typing(less, Precision.FP16).kept


@pytest.mark.parametrize(("scale", "told"), [(1e-9, True), (1e-3, False), (0.0, False)])
def test_weights_that_fp16_loses_are_told(scale: float, told: bool) -> None:
    net = written("(float[n, 8] x) => (float[n, 8] y) { [fc] y = MatMul (x, w) }", w=values(8, 8) * np.float32(scale))
    assert ("fp16-faint-weights" in codes(net)) is told
    assert [item.node for item in fp16_hazards(net, typed=True)] == ["fc"] * told


@pytest.mark.parametrize(("most", "kept"), [(3.0, set()), (12.0, {"e"})])
def test_an_exponential_is_only_kept_in_fp32_where_it_can_pass_fp16(most: float, kept: set[str]) -> None:
    weights = {name: np.float32(end).reshape(()) for name, end in (("low", -3), ("high", most))}
    clipped = model([node("Clip", "x low high", "h"), node("Exp", "h", "y", "e")], weights=weights)
    assert {item.node for item in typing(clipped, Precision.FP16).kept} == kept


def test_opset_against_the_generation(backend: Any) -> None:
    backend(FakeGeneration(max_opset=17))
    found = {item.code: item for item in check(conv_relu(opset=18)).findings}
    assert found["opset-too-new"].level == "warning" and "opset 18" in found["opset-too-new"].message
    backend(FakeGeneration())
    assert "opset-too-new" not in {item.code for item in check(conv_relu(opset=18)).findings}


@pytest.mark.parametrize("given", [{"preprocess": "imagenet"}, {"limit": 5}])
def test_what_is_for_samples_is_refused_without_them(given: Any) -> None:
    with pytest.raises(UsageError, match=f"`{next(iter(given))}=` has no effect without `images=DIR` or"):
        check(conv_relu(), **given)


def test_fix_does_not_call_outputs_unchanged_whose_scales_it_moved(tmp_path: Path) -> None:
    net = written(
        """(float[n, 8] x) => (float[n, 8] y) { c = QuantizeLinear (x, s, z) d = DequantizeLinear (c, s, z)
        y = MatMul (d, w) }""",
        s=np.float32(0.02), z=np.uint8(90), w=values(8, 8),
    )  # fmt: skip
    report = check(net, fix=tmp_path / "clean.onnx")
    assert report.fixed and "outputs as far from the model's as its new scales are" in str(report)


def test_fix_writes_a_model_with_the_same_outputs(tmp_path: Path) -> None:
    out = tmp_path / "clean.onnx"
    report = check(rapidocr("cls"), fix=out)
    assert report.ok and report.fixed == out and report.verified is True, str(report)
    assert len(load_model(out).proto.graph.node) == 179
    assert "outputs unchanged" in str(report)
    again = check(out)
    assert again.folding is not None and not again.folding.changed


def test_fix_lowers_the_opset(tmp_path: Path, backend: Any) -> None:
    backend(FakeGeneration(max_opset=17))
    proto = open_slice()
    proto.opset_import[0].version = 18
    report = check(proto, fix=tmp_path / "clean.onnx")
    clean = load_model(tmp_path / "clean.onnx")
    assert report.verified and clean.opset == 17


def test_fix_without_onnxruntime_says_that_it_was_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    report = check(conv_relu(), fix=tmp_path / "clean.onnx")
    assert report.verified is False and (tmp_path / "clean.onnx").exists()
    found = next(item for item in report.findings if item.code == "fix-not-verified")
    assert "pip install 'onnxruntime" in found.message and "not verified" in str(report)


def test_what_onnxruntime_cannot_load_is_told_whole(tmp_path: Path) -> None:
    proto = conv_relu()
    proto.graph.node.append(helper.make_node("Own", ["y"], ["z"], domain="far.away"))
    proto.graph.output[0].name = "z"
    proto.opset_import.append(helper.make_opsetid("far.away", 1))
    found = next(item for item in check(proto, fix=tmp_path / "clean.onnx").findings if item.code == "fix-not-verified")
    assert "is not a registered function" in found.message and found.message[-5:] != "funct"


def test_fix_that_would_change_outputs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(proto: ModelProto, **_: Any) -> Any:
        result, report = fold(proto)
        array = numpy_helper.to_array(result.graph.initializer[1]) * 1.5
        result.graph.initializer[1].CopyFrom(numpy_helper.from_array(array, result.graph.initializer[1].name))
        return result, report

    monkeypatch.setattr("trtopt.graph.prepare.fold", broken)
    report = check(conv_relu(), fix=tmp_path / "clean.onnx")
    assert not report.ok and report.findings[0].code == "fix-changed-outputs"
    assert list(tmp_path.iterdir()) == [] and report.fixed is None


def flat(*target: int) -> ModelProto:
    nodes = [
        node("GlobalAveragePool", "x", "p"),
        node("Reshape", "p s", "f", "flat"),
        node("Gemm", "f v b", "y", "fc"),
    ]
    weights = {"s": np.array(target, np.int64), "v": values(3, 5), "b": values(5)}
    return model(nodes, weights=weights, outputs={"y": ["batch", 5]})


def test_a_batch_of_one_that_a_trace_left_is_found_and_fix_opens_it(tmp_path: Path) -> None:
    report = check(flat(1, 3))
    (finding,) = [item for item in report.findings if item.code == "batch-of-one"]
    assert finding.level == "error" and finding.node == "flat" and "1x3" in finding.message and "`fix=" in finding.hint
    assert "x:1x3x8x8" in finding.hint
    assert check(flat(1, 3), shapes="x:1x3x8x8").ok and not check(flat(1, 3), shapes="x:1x3x8x8,2x3x8x8,2x3x8x8").ok
    fixed = check(flat(1, 3), fix=tmp_path / "fixed.onnx")
    assert fixed.ok and fixed.verified
    assert check(tmp_path / "fixed.onnx").ok and "batch-of-one" not in {
        item.code for item in check(flat(0, -1)).findings
    }


def test_a_batch_of_one_stays_where_opening_it_mixes_samples(tmp_path: Path) -> None:
    """A Softmax along what is the batch."""
    proto = flat(1, 3)
    proto.graph.node[2].output[0] = "g"
    proto.graph.node.extend([node("Softmax", "g", "y", "mixing", axis=0)])
    report = check(proto, fix=tmp_path / "fixed.onnx")
    assert not report.ok and {"batch-of-one", "batch-kept"} <= {item.code for item in report.findings}
    assert not check(tmp_path / "fixed.onnx").ok


def test_an_unwritable_fix_fails_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        check(tmp_path / "none.onnx", fix=tmp_path / "missing" / "clean.onnx")


def test_the_report_is_json_with_errors_first() -> None:
    damaged = values(4, 3, 3, 3)
    damaged[0] = np.inf
    report = check(conv_relu(weights={"w": damaged}))
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["ok"] is False and plain["findings"][0]["level"] == "error"
    assert set(plain["findings"][0]) == {"level", "code", "node", "op", "message", "hint"}


def test_the_real_parser_names_every_bad_node(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the rtx extra")
    monkeypatch.undo()
    nodes = [node("Det", "x", "a", "first_bad"), node("Relu", "a", "b"), node("Det", "x", "c", "second_bad")]
    proto = model([*nodes, node("Add", "b c", "y")])
    report = check(proto, backend="rtx", target="sm89")
    refused = [item for item in report.findings if item.code == "unsupported-operator"]
    assert {item.op for item in refused} == {"Det"} and len(refused) >= 1, str(report)


@pytest.mark.parametrize(
    ("operator", "domain", "hint"),
    [
        ("TreeEnsembleRegressor", "ai.onnx.ml", "ONNX Runtime"),
        ("Scaler", "ai.onnx.ml", "scalers, linear models"),
        ("ImageScaler", "", "ONNX has dropped it"),
        ("FusedConv", "com.microsoft", "model from before"),
        ("ReorderInput", "com.microsoft.nchwc", "model from before"),
        ("Magic", "acme", "name the library that has it"),
    ],
)
def test_whose_a_refused_operator_is_decides_the_hint_and_it_is_said_once(
    backend: Any, operator: str, domain: str, hint: str
) -> None:
    backend(FakeGeneration(Issue("m", operator, f"no {operator}")))
    proto = model([helper.make_node(operator, ["x"], ["y"], "m", domain=domain)], outputs={"y": ["batch", 3, 8, 8]})
    if domain:
        proto.opset_import.append(helper.make_opsetid(domain, 1))
    (finding,) = [item for item in check(proto).findings if item.node == "m"]
    assert finding.code == "unsupported-operator" and hint in finding.hint


def test_an_input_of_a_type_that_tensorrt_lacks_is_said_once_with_one_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the rtx extra")
    monkeypatch.undo()
    proto = model([node("Identity", "x", "y")])
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.STRING
    (finding,) = [item for item in check(proto, backend="rtx").findings if item.level == "error" and item.node == "x"]
    assert "convert it outside the network" in finding.message and not finding.hint


def test_sm75_among_the_targets_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs the rtx extra")
    monkeypatch.undo()
    report = check(conv_relu(), backend="rtx", target="sm75,sm89")
    assert any(item.code == "target" and "sm75" in item.message for item in report.findings), str(report)


def test_samples_show_what_overflows() -> None:
    proto, data = overflowing()
    report = check(proto, data=data)
    assert report.ok
    found = {item.node: item for item in report.findings if item.code == "fp16-overflow"}
    assert {node: item.level for node, item in found.items()} == dict.fromkeys(("up", "relu", "down"), "warning")
    assert found["up"].message == "gives 576,664 > 65,504, FP16's largest number, in 'h'"
    assert "keeps it in FP32" in found["up"].hint
    quiet = check(proto, data={"x": data["x"] * np.float32(1e-3)})
    assert not [item for item in quiet.findings if item.code == "fp16-overflow"]


def test_samples_show_what_is_infinite_in_an_fp16_model() -> None:
    proto, data = overflowing()
    report = check(half(proto), data=data)
    (finding,) = [item for item in report.findings if item.level == "error"]
    assert (finding.code, finding.node, finding.op) == ("not-finite", "up", "MatMul")
    assert "> 65,504, FP16's largest number, and so" in finding.message
    assert "export the model in FP32" in finding.hint
    assert check(half(proto), data={"x": data["x"] * np.float32(1e-3)}).ok


def test_samples_show_what_is_not_a_number() -> None:
    proto = model([node("Log", "x", "l", "log"), node("Relu", "l", "y", "relu")])
    (finding,) = [item for item in check(proto, data={"x": -np.ones((2, 3, 8, 8))}).findings if item.level == "error"]
    assert (finding.node, finding.message) == ("log", "gives 384 values that aren't finite")
    with pytest.raises(UsageError, match="choose one"):
        check(proto, data={"x": np.ones((2, 3, 8, 8))}, images="photos")


def test_a_map_at_the_end_is_told_without_a_librarys_error(tmp_path: Path) -> None:
    """As sklearn's converters end classifiers: ZipMap gives a sequence of maps."""
    table = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    graph = helper.make_graph(
        [helper.make_node("ZipMap", ["x"], ["z"], "zip", domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_value_info("z", helper.make_sequence_type_proto(table))],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    save_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    [found] = [item for item in check(tmp_path / "m.onnx").findings if item.code == "folding-incomplete"]
    assert "values that aren't tensors or sequences of them: z; leave these out" in found.message
    assert "Error" not in found.message and "report" not in str(found.hint)
