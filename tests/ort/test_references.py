"""Graphs with custom operators in ONNX Runtime, against the same graph in standard ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from custom import OPERATORS, custom_net
from graphs import values, written
from onnx import ModelProto, helper

from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import CalibrationError, ModelError, UsageError
from trtopt.core.operators import load_reference, operator
from trtopt.core.values import Precision
from trtopt.evaluation.per_layer import verdict
from trtopt.evaluation.verify import verify
from trtopt.graph.io import load_model
from trtopt.graph.passes.typed import to_typed
from trtopt.graph.prepare import prepare
from trtopt.graph.proto import inferred_values, tensor_info
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.runner import OnnxRunner
from trtopt.ort.sessions import open_session

pytestmark = pytest.mark.usefixtures("no_operators")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(custom_net(), tmp_path / "custom.onnx")
    return tmp_path / "custom.onnx"


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=values(40, 3, 16, 16))
    return tmp_path / "data.npz"


def _standard(net: ModelProto) -> ModelProto:
    """The same with Swishy written out."""
    proto = ModelProto()
    proto.CopyFrom(net)
    nodes = []
    for node in net.graph.node:
        if node.domain != "acme":
            nodes.append(node)
            continue
        (out,), scale = node.output, next((item.f for item in node.attribute), 1.0)
        names = [f"{out}_{step}" for step in ("product", "sigmoid", "swish", "scale")]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(scale), names[3]))
        nodes += [
            helper.make_node("Mul", [*node.input], [names[0]]),
            helper.make_node("Sigmoid", [names[0]], [names[1]]),
            helper.make_node("Mul", [node.input[0], names[1]], [names[2]]),
            helper.make_node("Mul", [names[2], names[3]], [out]),
        ]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    del proto.opset_import[1:]
    return proto


@pytest.mark.parametrize("optimize", [False, True])
def test_it_computes_what_the_standard_graph_does(operators_file: Path, model: Path, optimize: bool) -> None:
    load_reference(operators_file)
    x = values(5, 3, 16, 16)
    found = OnnxRunner(model, optimize=optimize)({"x": x})
    wanted = OnnxRunner(_standard(onnx.load(model)), optimize=optimize)({"x": x})
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and np.allclose(found[name], array, atol=1e-5)


def test_a_session_gives_any_tensor_and_runs_no_more_than_it_needs(operators_file: Path, model: Path) -> None:
    load_reference(operators_file)
    x = values(2, 3, 16, 16)
    session = open_session(onnx.load(model), outputs=["d", "a"])
    assert [item.name for item in session.get_outputs()] == ["d", "a"]
    assert [(item.name, item.type, item.shape) for item in session.get_inputs()] == [
        ("x", "tensor(float)", ["n", 3, 16, 16])
    ]
    d, a = session.run(None, {"x": x})
    (again,) = open_session(onnx.load(model), outputs=["a"]).run(["a"], {"x": x})
    assert np.array_equal(a, again) and d.shape == (2, 16, 16, 16)

    calls = []

    @operator("acme::Swishy", shapes=lambda x, beta, **_: [x])
    def counted(x: np.ndarray, beta: np.ndarray, *, scale: float = 1.0) -> np.ndarray:  # type: ignore[type-arg]
        calls.append(scale)
        return x

    open_session(onnx.load(model), outputs=["c"]).run(None, {"x": x})
    assert calls == [2.0]


def test_shapes_and_types_go_through_custom_operators(operators_file: Path, model: Path) -> None:
    without = inferred_values(onnx.load(model))
    assert "b" not in without
    load_reference(operators_file)
    found = inferred_values(onnx.load(model))
    assert tensor_info(found["e"]).shape == ("n", 16, 16, 16) and tensor_info(found["c"]).dtype == "float32"
    folded = to_ir(prepare(load_model(model)).proto)
    typed = to_proto(to_typed(folded, Precision.FP16).model)
    types = {name: tensor_info(value).dtype for name, value in inferred_values(typed).items()}
    assert types["b"] == types["e"] == "float16" and types["y"] == "float32"


def test_a_function_of_the_model_is_written_out_unless_the_user_names_its_operator(
    operators_file: Path, tmp_path: Path
) -> None:
    """Its nodes stay for a plugin then, whose reference takes the place of the body."""
    net, x = custom_net(), values(2, 3, 16, 16)
    body = """<domain: "acme", opset_import: ["" : 17]> Swishy <scale: float = 1.0> (x, beta) => (y) {
        s = Constant <value_float: float = @scale> () a = Mul (x, beta) b = Sigmoid (a) c = Mul (x, b) y = Mul (c, s) }"""
    net.functions.append(onnx.parser.parse_function(body))
    onnx.save(net, tmp_path / "net.onnx")
    ops = [node.op_type for node in prepare(load_model(tmp_path / "net.onnx")).proto.graph.node]
    assert "Swishy" not in ops and ops.count("Sigmoid") == 3
    wanted = OnnxRunner(net, optimize=False)({"x": x})
    load_reference(operators_file)
    folded = prepare(load_model(tmp_path / "net.onnx")).proto
    assert [node.op_type for node in folded.graph.node].count("Swishy") == 3 and not folded.functions
    found = OnnxRunner(folded, optimize=False)({"x": x})
    assert all(np.allclose(found[name], array, atol=1e-5) for name, array in wanted.items())


def test_an_operator_of_fp32_alone_has_casts_around_it(model: Path) -> None:
    operator("acme::Swishy", shapes=lambda x, beta, **_: [x])(lambda x, beta, scale=1.0: x)
    result = to_typed(to_ir(prepare(load_model(model)).proto), Precision.FP16)
    kinds = {str(value.name): str(value.dtype) for node in result.model.graph for value in node.outputs}
    assert kinds["b"] == "FLOAT" and kinds["c"] == "FLOAT16"
    assert {item.reason for item in result.kept if item.op == "Swishy"} == {"the operator acme::Swishy takes fp32"}


def test_what_the_file_says_of_a_custom_operators_results_stays(model: Path) -> None:
    net = onnx.load(model)
    net.graph.value_info.append(helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, ["n", 16, 16, 16]))
    folded = prepare(load_model(net)).proto
    assert [value.name for value in folded.graph.value_info] == ["b"]
    assert tensor_info(inferred_values(folded)["c"]).shape == ("n", 16, 16, 16)


def test_calibration_is_that_of_the_standard_graph(
    operators_file: Path, model: Path, samples: Path, tmp_path: Path
) -> None:
    said = onnx.load(model)
    said.graph.value_info.append(helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, ["n", 16, 16, 16]))
    with pytest.raises(CalibrationError, match=r"nothing here computes the operator acme::Swishy.*operators="):
        calibrate(said, tmp_path / "t.calib.json", data=samples)
    found = calibrate(model, tmp_path / "t.calib.json", data=samples, operators=[str(operators_file)]).table
    standard = tmp_path / "standard.onnx"
    onnx.save(_standard(onnx.load(model)), standard)
    wanted = calibrate(standard, tmp_path / "s.calib.json", data=samples).table
    assert found.amax["x"] == wanted.amax["x"]
    assert found.amax["b"] == pytest.approx(wanted.amax["b"], rel=1e-3)


def test_a_changed_reference_is_not_taken_from_the_cache(
    operators_file: Path, model: Path, samples: Path, tmp_path: Path
) -> None:
    first = calibrate(model, tmp_path / "t.calib.json", data=samples, operators=str(operators_file)).table
    operators_file.write_text(OPERATORS.replace("scale * x", "5 * scale * x"))
    second = calibrate(model, tmp_path / "t.calib.json", data=samples, operators=str(operators_file)).table
    assert second.amax["b"] > 3 * first.amax["b"]


def test_verify_finds_a_wrong_reference_at_its_node(
    operators_file: Path, model: Path, samples: Path, tmp_path: Path
) -> None:
    """The standard graph stands for what is right: its tensors have the custom one's names."""
    wrong, right = tmp_path / "wrong.py", tmp_path / "right.onnx"
    wrong.write_text(OPERATORS.replace("-beta * x", "beta * x"))
    onnx.save(_standard(onnx.load(model)), right)
    fine = verify(right, model, data=samples, operators=str(operators_file), per_layer=True)
    assert fine.layers and min(item.snr_db for item in fine.layers) > 60
    found = verify(right, model, data=samples, operators=str(wrong), per_layer=True)
    assert "swish1 (Swishy) loses most by itself" in verdict(found.layers)


@pytest.mark.parametrize(
    ("results", "message"), [(lambda x: (x, x), "gives 2 results; Pair p has 1"), (lambda x: (), "gives 0 results")]
)
def test_a_reference_gives_as_many_results_as_the_node_has(results: object, message: str) -> None:
    operator("acme::Pair", shapes=lambda x: [x])(results)  # type: ignore[arg-type]
    net = written("(float[n,3] x) => (float[n,3] y) { r = Relu(x) [p] s = acme.Pair(r) y = Relu(s) }")
    net.opset_import.add(domain="acme", version=1)
    with pytest.raises(UsageError, match=message):
        OnnxRunner(net, optimize=True)({"x": values(2, 3)})


def test_results_of_another_type_are_said_by_the_operator() -> None:
    @operator("acme::Best", outputs=("int64",))
    def best(x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return x.argmax(1)

    net = written("(float[n,3] x) => (int64[n] y) { b = acme.Best(x) y = Abs(b) }")
    net.opset_import.add(domain="acme", version=1)
    x = values(4, 3)
    assert np.array_equal(OnnxRunner(net, optimize=True)({"x": x})["y"], x.argmax(1))


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (0.25, False)])
def test_fractions_do_not_become_whole_numbers(factor: float, right: bool) -> None:
    operator("acme::Level", shapes=lambda x: [x], outputs=("int32",))(lambda x: factor * np.floor(x))
    net = written("(float[n,3] x) => (int32[n,3] y) { b = acme.Level(x) y = Abs(b) }")
    net.opset_import.add(domain="acme", version=1)
    run, x = OnnxRunner(net, optimize=True), values(4, 3, scale=9)
    if right:
        assert np.array_equal(run({"x": x})["y"], np.abs(np.floor(x)))
        return
    with pytest.raises(UsageError, match="fractions; the graph has int32 there"):
        run({"x": x})


def test_bodies_of_control_flow_call_no_reference() -> None:
    operator("acme::Twice", shapes=lambda x: [x])(lambda x: 2 * x)
    net = written(
        """(float[n,3] x, bool c) => (float[n,3] y) { y = If (c) <
        then_branch = t () => (float[n,3] a) { a = acme.Twice (x) }, else_branch = e () => (float[n,3] b) { b = Relu (x) }> }"""
    )
    net.opset_import.add(domain="acme", version=1)
    with pytest.raises(ModelError, match="references aren't called in the bodies of If, Loop and Scan"):
        OnnxRunner(net, optimize=True)


def test_references_get_texts_and_arrays_of_their_own() -> None:
    operator("acme::Mode")(lambda x, *, many: 2 * x if "abs" in many else x)
    operator("acme::Spoil")(lambda x: x.__imul__(2))
    net = written('(float[4] x) => (float[4] y) { y = acme.Mode <many = ["abs", "b"]> (x) }')
    net.opset_import.append(helper.make_opsetid("acme", 1))
    x = values(4)
    assert np.array_equal(OnnxRunner(net, optimize=False)({"x": x})["y"], 2 * x)
    net = written("(float[4] x) => (float[4] y) { h = Neg (x) s = acme.Spoil (h) y = Add (h, s) }")
    net.opset_import.append(helper.make_opsetid("acme", 1))
    assert np.array_equal(OnnxRunner(net, optimize=False)({"x": x})["y"], -3 * x), "what it wrote into was its own"


def test_a_function_with_a_custom_operator_may_be_called_in_a_row(tmp_path: Path) -> None:
    """ONNX infers nothing across it, and calls the second one invalid."""
    operator("acme::Sw", shapes=lambda x: [x])(lambda x: 3 * x)
    body = [helper.make_node("Conv", ["a", "w"], ["c"]), helper.make_node("Sw", ["c"], ["s"], domain="acme")]
    body.append(helper.make_node("Add", ["s", "a"], ["z"]))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Block", ["a", "w"], ["z"], body, imports)
    net = written(
        "(float[1,2,4,4] x) => (float[1,2,4,4] y) { b = own.Block (x, w) y = own.Block (b, w) }", w=values(2, 2, 1, 1)
    )
    net.functions.append(function)
    del net.opset_import[:]
    net.opset_import.extend(imports)
    onnx.save(net, tmp_path / "net.onnx")
    loaded = load_model(tmp_path / "net.onnx")
    assert [node.op_type for node in loaded.proto.graph.node] == [
        "Conv",
        "Sw",
        "Add",
    ] * 2 and not loaded.proto.functions
