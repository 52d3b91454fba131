"""Folding: what must go is gone, what must stay stays, and the outputs are the same."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import conv_relu, model, node, rapidocr, rendered_text, values, written
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from trtopt.data.difference import difference
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import ROUNDS, _evaluate, fold
from trtopt.graph.proto import LARGE, all_nodes, tensor_size
from trtopt.ort.sessions import OnnxSession


def bytes_of(proto: ModelProto) -> bytes:
    return proto.SerializeToString(deterministic=True)


def operators(proto: ModelProto) -> set[str]:
    return {item.op_type for item in proto.graph.node}


def same_outputs(before: ModelProto, after: ModelProto, *inputs: dict[str, NDArray[Any]]) -> None:
    first, second = OnnxSession(before, threads=2), OnnxSession(after, threads=2)
    for batch in inputs:
        expected = first(batch)
        gap = difference(expected, second(batch))
        assert gap.scale > 1e-3, "the inputs don't exercise the model"
        assert gap.relative < 1e-4, gap


def folded(proto: ModelProto) -> ModelProto:
    """Fold, and check what holds for every model."""
    original = bytes_of(proto)
    result, report = fold(proto)
    assert bytes_of(proto) == original, "the argument was changed"
    assert bytes_of(fold(result)[0]) == bytes_of(result), "folding again changes the bytes"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtopt.graph.passes.fold.HEAVY", 0)  # without its large weights, as far as that goes
        patch.setattr("trtopt.graph.passes.fold.APART", LARGE)
        assert bytes_of(fold(proto)[0]) == bytes_of(result), "a heavy model folds otherwise"
        assert bytes_of(fold(result)[0]) == bytes_of(result), "folding a heavy model again changes the bytes"
    names = [item.name for item in result.graph.node]
    assert all(names) and len(set(names)) == len(names)
    for side in ("input", "output"):
        assert [bytes_of(value) for value in getattr(result.graph, side)] == [
            bytes_of(value) for value in getattr(proto.graph, side)
        ]
    load_model(result)
    assert sum(report.after.values()) == len(list(all_nodes(result.graph)))
    return result


@pytest.mark.parametrize("fused", [False, True])
def test_a_heavy_model_is_folded_without_its_weights_where_they_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """`folded` shows that the result is the same; here: which way is taken."""
    rounds: list[int] = []

    def evaluate(proto: ModelProto, most: int) -> ModelProto:
        rounds.append(proto.ByteSize())
        return _evaluate(proto, most)

    weight = values(64, 64, 3, 3)
    chain = [node("Conv", "x w", "a", pads=[1, 1, 1, 1]), node("Identity", "a", "b"), node("Relu", "b", "c")]
    chain.append(node("Mul", "a scale", "y") if fused else node("Neg", "c", "y"))
    proto = model(chain, inputs={"x": [1, 64, 8, 8]}, weights={"w": weight, "scale": values(64, 1, 1)})
    monkeypatch.setattr("trtopt.graph.passes.fold.HEAVY", 0)
    monkeypatch.setattr("trtopt.graph.passes.fold.APART", LARGE)
    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", evaluate)
    result, _ = fold(proto)
    assert operators(result) == ({"Conv"} if fused else {"Conv", "Relu", "Neg"})
    assert any(size > weight.nbytes for size in rounds) == fused
    rounds.clear()
    assert bytes_of(fold(result)[0]) == bytes_of(result)
    assert max(rounds) < weight.nbytes


def test_large_weights_of_one_shape_are_not_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("MatMul", "x first", "q"), node("MatMul", "x second", "k"), node("Sub", "q k", "y")]
    weights = {name: values(256, 256, seed=seed) for seed, name in enumerate(("first", "second", "unused"))}
    proto = model(nodes, inputs={"x": ["batch", 256]}, weights=weights)
    result = folded(proto)
    assert {item.name for item in result.graph.initializer} == {"first", "second"}
    same_outputs(proto, result, {"x": values(3, 256)})
    sizes, collected = list[int](), list[bool]()

    def evaluate(proto: ModelProto, most: int) -> ModelProto:
        sizes.append(proto.ByteSize())
        return _evaluate(proto, most)

    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", evaluate)
    monkeypatch.setattr("trtopt.graph.passes.fold.gc.collect", lambda: collected.append(True))
    fold(proto)
    assert max(sizes) > 256 * 256 * 4 and not collected, "a light model was taken for a heavy one"
    sizes.clear()
    monkeypatch.setattr("trtopt.graph.passes.fold.HEAVY", 0)
    monkeypatch.setattr("trtopt.graph.passes.fold.APART", LARGE)
    fold(result)
    assert max(sizes) < 256 * 256 * 4 and not collected
    fold(proto)
    assert max(sizes) > 256 * 256 * 4 and collected, "the graphs that the library left aren't collected"


def test_a_real_model_folds_alike_in_another_process_without_onnxruntime(tmp_path: Path) -> None:
    path = rapidocr("cls")
    program = (
        "import sys, hashlib; sys.modules['onnxruntime'] = None\n"
        "from trtopt.graph.io import load_model; from trtopt.graph.passes.fold import fold\n"
        f"result = fold(load_model({str(path)!r}).proto)[0].SerializeToString(deterministic=True)\n"
        "sys.stderr.write(hashlib.sha256(result).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "4711", "PATH": "/usr/bin", "OMP_NUM_THREADS": "2"},
    )
    assert done.stdout == ""
    assert done.stderr == hashlib.sha256(bytes_of(fold(load_model(path).proto)[0])).hexdigest()


@pytest.mark.parametrize(
    ("part", "sizes", "gone"),
    [
        ("det", [(64, 320, 1), (96, 160, 2)], {"BatchNormalization", "Constant", "Identity"}),
        ("rec", [(48, 320, 1), (48, 160, 2)], {"BatchNormalization", "Constant", "Cast"}),
        ("cls", [(48, 192, 1), (48, 192, 2)], {"BatchNormalization", "Constant", "Identity", "Shape", "Cast"}),
    ],
)
def test_ocr_models_with_dynamic_sizes(part: str, sizes: list[tuple[int, int, int]], gone: set[str]) -> None:
    proto = load_model(rapidocr(part)).proto
    assert gone & operators(proto)
    result = folded(proto)
    assert not gone & operators(result)
    same_outputs(proto, result, *({"x": rendered_text(*size)} for size in sizes))


IMAGE, MATRIX = "(float[n,3,8,8] x) => (float[] y)", "(float[n,4] x) => (float[] y)"
NORM = {**{name: values(4, seed=seed) for seed, name in enumerate("sbm")}, "v": np.abs(values(4, seed=4)) + 0.1}
CODES = {"q": np.arange(-8, 8, dtype=np.int8).reshape(4, 4), "scale": np.float32(0.05), "zero": np.int8(0)}
CHOICE = "s = ReduceSum <keepdims = 0> (x) c = Greater (s, nothing)"
SIDES = "then_branch = t () => (float[] a) {{ {} }}, else_branch = e () => (float[] b) {{ {} }}"
ONE, TWO = SIDES.format("a = Relu (x)", "b = Neg (x)"), SIDES.format("a = Identity (r)", "b = Neg (r)")
DECIDED = SIDES.format("[relu] o = Relu (x) [last] a = Neg (o)", "b = Neg (x)")
LOOP = """start = Add (x, ones) y = Loop <body = step (int64 turn, bool going, float[n,4] old) => (bool on, float[n,4] new) {
    less = Mul (old, half) more = Constant <value = float[4] {0, 1, 2, 3}> () new = Add (less, more) on = Identity (yes)
    }> (turns, yes, start)"""  # as TorchScript writes `for i in range(n)`
# onnx-ir's own pass gives both outputs of this body one name; ONNX Runtime then reads memory that nobody wrote.
SCAN = """last, y = Scan <num_scan_inputs = 1, body = b (float[2] sum_in, float[2] next) => (float[2] sum_out, float[2] out) {
    sum_out = Add (sum_in, next) out = Identity (sum_out) }> (start, x)"""
KEPT: dict[str, tuple[ModelProto, str]] = {  # what is left: operators, their nodes' names where these say something
    "a norm": (
        written(f"{IMAGE} {{ [own] h = Conv (x, w) y = BatchNormalization <epsilon = 0.01> (h, s, b, m, v) }}",
                w=values(4, 3, 3, 3), **NORM),
        "Conv own",
    ),
    "what does nothing": (
        written(f"{IMAGE} {{ a = Identity (x) b = Dropout (a) unused = Neg (x) [own] y = Relu (b) }}"),
        "Relu own",
    ),
    "gelu": (
        written(f"{IMAGE} {{ d = Div (x, root) e = Erf (d) f = Add (e, one) g = Mul (x, f) y = Mul (g, half) }}",
                root=np.float32(2**0.5), one=np.float32(1), half=np.float32(0.5)),
        "Div, Erf, Add, Mul, Mul",
    ),
    "an activation": (conv_relu(), "Conv c, Relu r"),
    "codes": (
        written(f"{MATRIX} {{ a = QuantizeLinear (x, scale, zero) b = DequantizeLinear (a, scale, zero) "
                "c = DequantizeLinear (q, scale) y = MatMul (b, c) }", **CODES),
        "QuantizeLinear, DequantizeLinear, DequantizeLinear, MatMul",
    ),
    "codes of more than a bias": (
        written(f"{MATRIX} {{ c = DequantizeLinear (q, scale) y = Add (x, c) }}",
                q=np.arange(4, dtype=np.int32).reshape(1, 4), scale=np.float32(0.5)),
        "DequantizeLinear, Add",
    ),
    "an output that is an input, or made of constants": (
        written("(float[n,3,8,8] x) => (float[] y, float[] z) { y = Identity (x) z = Add (x, c) }", c=np.ones(1, np.float32)),
        "Identity, Add",
    ),
    "an output that is summed with nothing": (
        written(f"{IMAGE} {{ [own] a = Relu (x) y = Add (a, c) }}", c=np.float32(0)),
        "Relu own",
    ),
    "an identity between outputs": (
        written("(float[n,3] x) => (float[] y, float[] z) { y = Relu (x) z = Identity (y) }"),
        "Relu, Identity",
    ),
    "two equal outputs": (written("(float[n,3] x) => (float[] y, float[] z) { y = Relu (x) z = Relu (x) }"), "Relu, Identity"),
    "a choice": (written(f"{IMAGE} {{ {CHOICE} y = If (c) <{ONE}> }}", nothing=np.float32(0)), "ReduceSum, Greater, If"),
    "a choice of an outer value": (
        written(f"{IMAGE} {{ r = Relu (x) {CHOICE} y = If (c) <{TWO}> }}", nothing=np.float32(0)),
        "Relu, ReduceSum, Greater, If",
    ),
    "a decided choice": (
        written(f"{IMAGE} {{ [choose] c = If (yes) <{DECIDED}> [own] y = Conv (c, w) }}", yes=True, w=values(4, 3, 1, 1)),
        "Relu relu, Neg choose_last, Conv own",
    ),
    "a loop": (
        written(f"(float[n,4] x, int64 turns) => (float[n,4] y) {{ {LOOP} }}", yes=True, half=np.float32(0.5),
                ones=np.ones(4, np.float32)),
        "Add, Loop",
    ),
    "a scan": (written(f"(float[2] start, float[3,2] x) => (float[2] last, float[3,2] y) {{ {SCAN} }}"), "Scan"),
    "a Gemm before opset 11": (  # onnxscript drops its C of zeros, which had to be given then
        written(f"{MATRIX} {{ [own] y = Gemm (x, w, c) }}", 9, w=values(4, 3), c=np.zeros(3, np.float32)), "Gemm own"),
    "a product with a bias": (
        written(f"{MATRIX} {{ [own] p = MatMul (x, w) y = Add (p, b) }}", w=values(4, 3), b=values(3)),
        "Gemm own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_is_left_computes_the_same_under_its_names(case: str) -> None:
    proto, left = KEPT[case]
    result = folded(proto)
    found = [
        f"{item.op_type} {item.name}".replace(f" {item.op_type}_{item.output[0]}", "") for item in result.graph.node
    ]
    assert ", ".join(found) == left
    floats = {value.name: value.type.tensor_type.shape.dim for value in proto.graph.input if value.name != "turns"}
    for sign, turns in ((1, 0), (-1, 3)):
        feed = {name: sign * values(*(dim.dim_value or 2 for dim in dims)) for name, dims in floats.items()}
        same_outputs(proto, result, feed | ({"turns": np.array(turns)} if case == "a loop" else {}))
    for body in (item.g for made in result.graph.node for item in made.attribute if item.name == "body"):
        assert len({value.name for value in body.output}) == len(body.output)


def test_unnamed_and_repeated_names_become_unique() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])]
    assert [item.name for item in folded(model(nodes)).graph.node] == ["Relu_a", "Neg_y"]


def test_metadata_of_the_model_stays_and_the_exporters_traces_go() -> None:
    proto = conv_relu()
    helper.set_model_props(proto, {"classes": "cat,dog"})
    proto.producer_name, proto.doc_string = "someone", "a model"
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/someone/model.py")
    proto.graph.node[1].doc_string = "/home/someone/model.py"
    proto.opset_import.append(helper.make_opsetid("nobody.uses", 1))
    result = folded(proto)
    assert [item.domain for item in result.opset_import] == [""]
    assert {item.key: item.value for item in result.metadata_props} == {"classes": "cat,dog"}
    assert (result.producer_name, result.doc_string) == ("someone", "a model")
    assert result.graph.name == proto.graph.name
    assert b"/home/someone" not in bytes_of(result)


def test_the_report_counts_what_went() -> None:
    _, report = fold(model([node("Identity", "x", "a"), node("Relu", "a", "y")]))
    assert report.removed == {"Identity": 1} and report.changed
    assert str(report) == "2 nodes → 1 (removed: 1 Identity)"
    told = fold(KEPT["a product with a bias"][0])[1].to_json()
    assert (told["removed"], told["added"]) == ({"MatMul": 1, "Add": 1}, {"Gemm": 1})
    nothing = fold(conv_relu())[1]
    assert not nothing.changed and str(nothing) == "2 nodes → 2 (nothing to fold)"


def test_equal_constants_become_one_and_those_that_were_inputs_fold() -> None:
    nodes = [node("Conv", "x w", "a"), node("Add", "b c", "d"), node("Conv", "a v", "e"), node("Add", "e d", "y")]
    same = values(3, 3, 1, 1)
    weights = {"w": same, "v": same.copy(), "b": np.float32(1).reshape(1), "c": np.float32(2).reshape(1)}
    proto = model(nodes, weights=weights)
    for name in ("b", "c"):
        proto.graph.input.append(helper.make_tensor_value_info(name, 1, [1]))
    result = fold(proto)[0]
    assert [item.op_type for item in result.graph.node] == ["Conv", "Conv"] and len(result.graph.initializer) == 2
    found, wanted = (OnnxSession(item, threads=1)({"x": values(2, 3, 8, 8)})["y"] for item in (result, proto))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_size_that_an_output_is_declared_with_is_not_believed() -> None:
    proto = model([node("Relu", "x", "y"), node("Shape", "y", "z")], inputs={"x": ["n", 4]}, outputs={"y": [1, 4]})
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.INT64, [2]))
    result = folded(proto)
    assert operators(result) == {"Relu", "Shape"}
    same_outputs(proto, result, {"x": values(3, 4)})


def test_the_size_that_an_output_is_declared_with_does_not_become_a_constant() -> None:
    """Where inference says nothing, what is declared would be taken for what is known."""
    proto = model([node("Reshape", "x s", "y"), node("Shape", "y", "z")], inputs={"x": ["n", 4]}, outputs={"y": [1, 4]})
    proto.graph.input.append(helper.make_tensor_value_info("s", TensorProto.INT64, [2]))
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.INT64, [2]))
    assert operators(folded(proto)) == {"Reshape", "Shape"}


def test_bodies_that_do_not_see_the_graph_around_them_are_left_alone() -> None:
    made, report = fold(
        model([helper.make_node("FlexAttention", ["x", "x", "x"], ["y"], "a", domain="ai.onnx.preview")])
    )
    assert "(FlexAttention) has bodies" in report.problem and operators(made) == {"FlexAttention"}


# What libraries get wrong


def body(nodes: list[Any], inputs: str, outputs: str) -> Any:
    """A graph for a node's attribute; every tensor is a float."""
    ends = [[helper.make_tensor_value_info(name, 1, None) for name in names.split()] for names in (inputs, outputs)]
    return helper.make_graph(nodes, "body", *ends)


def test_initializers_that_were_inputs_take_the_ir_version_along() -> None:
    proto = conv_relu()
    proto.ir_version = 3
    for name in ("w", "b"):
        shape = next(list(item.dims) for item in proto.graph.initializer if item.name == name)
        proto.graph.input.append(helper.make_tensor_value_info(name, 1, shape))
    result, report = fold(proto)
    assert report.problem == "" and result.ir_version == 4
    assert [value.name for value in load_model(result).proto.graph.input] == ["x"]


def test_a_library_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **options: Any) -> None:
        raise KeyError("a tensor")

    monkeypatch.setattr("onnxscript.optimizer.fold_constants", fails)
    nodes = [
        node("Identity", "x", "a"),
        node("Conv", "a w", "h"),
        node("BatchNormalization", "h one zero zero one", "y"),
    ]
    weights = {"w": values(4, 3, 1, 1), "one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
    proto = model(nodes, weights=weights)
    result, report = fold(proto)
    assert "KeyError" in report.problem and "isn't folded as far" in report.warning
    assert report.to_json()["problem"] == report.problem
    assert operators(result) == operators(proto)
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})


def test_our_own_faults_are_not_taken_for_a_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: Any) -> None:
        raise KeyError("a tensor")

    monkeypatch.setattr("trtopt.graph.passes.fold.absorb", fails)
    with pytest.raises(KeyError, match="a tensor"):
        fold(conv_relu())


def test_folding_that_gives_no_valid_model_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(proto: ModelProto, most: int = 0) -> ModelProto:
        del proto.graph.node[1:]
        return proto

    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", wrong)
    proto = conv_relu()
    result, report = fold(proto)
    assert "'y' is computed by no node" in report.problem
    assert operators(result) == operators(proto)


@pytest.mark.parametrize("circles", [False, True])
def test_folding_that_goes_on_changing_ends(circles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = itertools.count()

    def other(proto: ModelProto, most: int = 0) -> ModelProto:
        proto.graph.node[0].attribute.append(
            helper.make_attribute("turn", next(counted) % 2 if circles else next(counted))
        )
        del proto.graph.node[0].attribute[:-1]
        return proto

    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", other)
    proto = conv_relu()
    result, report = fold(proto)
    assert "folding doesn't settle" in report.problem
    assert operators(result) == operators(proto)
    assert next(counted) < 2 * ROUNDS


def test_what_would_be_large_is_left_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.graph.budget.RESULT", 1 << 20)

    def filled(*shape: int) -> ModelProto:
        nodes = [
            node("ConstantOfShape", "shape", "c"),
            node("ReduceMax", "c", "m", keepdims=0),
            node("Add", "x m", "y"),
        ]
        return model(nodes, inputs={"x": [4]}, weights={"shape": np.array(shape)})

    assert operators(folded(filled(512, 512))) <= {"Add", "Identity"}
    large = folded(filled(512, 513))
    assert "ConstantOfShape" in operators(large)
    assert max(map(tensor_size, large.graph.initializer)) < 100
    nodes = [node("Transpose", "w", "t"), node("MatMul", "x t", "a"), node("MatMul", "a w", "y")]
    turned = folded(model(nodes, inputs={"x": [1, 600]}, weights={"w": values(600, 600)}))
    assert operators(turned) == {"MatMul"}  # no larger than what it is made from


def test_all_that_folds_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.graph.passes.fold.TOTAL", 1 << 20)
    nodes = [node("ConstantOfShape", "shape", f"y{index}", value=_scalar(index)) for index in range(8)]
    proto = model([*nodes, node("Relu", "x", "y")], inputs={"x": [4]}, weights={"shape": np.array([1 << 16])})
    proto.graph.output.extend(
        helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, [1 << 16]) for index in range(8)
    )
    result, _ = fold(proto)
    assert 0 < sum(map(tensor_size, result.graph.initializer)) <= 1 << 20
    assert "ConstantOfShape" in operators(result)


def _scalar(value: float) -> TensorProto:
    return helper.make_tensor("value", TensorProto.FLOAT, [1], [value])


def test_operators_that_are_evaluated_element_by_element_are_for_small_constants() -> None:
    def resized(size: int) -> ModelProto:
        resize = node("Resize", "w", "c", mode="linear")
        resize.input[:] = ["w", "", "", "sizes"]
        nodes = [resize, node("ReduceMax", "c", "m", keepdims=0), node("Add", "x m", "y")]
        weights = {"w": values(1, 1, 4, 4), "sizes": np.array([1, 1, size, size])}
        return model(nodes, inputs={"x": [4]}, weights=weights)

    assert operators(folded(resized(8))) == {"Add"}
    assert "Resize" in operators(folded(resized(2000)))


def test_what_another_domain_calls_the_same_is_not_taken_for_it() -> None:
    weights = {"b": np.arange(4, dtype=np.int32), "s": np.float32(0.5).reshape(())}
    other = helper.make_node("DequantizeLinear", ["b", "s"], ["bias"], "other", domain="com.example")
    proto = model([other, node("Conv", "x w bias", "y", "conv")], weights={"w": values(4, 3, 1, 1), **weights})
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    assert operators(fold(proto)[0]) == {"DequantizeLinear", "Conv"}


def pixels(*nodes: Any, **changes: Any) -> ModelProto:
    proto = model(nodes, inputs={"x": ["n", 8, 8, 3]}, dtype=TensorProto.UINT8, **changes)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return proto


@pytest.mark.parametrize("measured", [False, True])
def test_pixels_are_cast_before_they_are_moved(measured: bool) -> None:
    """TensorRT takes a uint8 input only where it is cast at once, and read by nothing else. Torch asks for its size."""
    weights = {"order": np.array([2, 1, 0]), "w": values(4, 3, 3, 3)}
    moving = [node("Gather", "x order", "g", axis=3), node("Transpose", "g", "t", perm=[0, 3, 1, 2])]
    sizes = [node("Shape", "x", "size"), node("Gather", "size zero", "rows"), node("Cast", "rows", "e", "count", to=1)]
    ends = [*sizes, node("Conv", "f w", "c"), node("Add", "c e", "y")] if measured else [node("Conv", "f w", "y")]
    weights |= {"zero": np.array(0)} if measured else {}
    proto = pixels(*moving, node("Cast", "t", "f", "cast", to=1), *ends, weights=weights)
    folded, report = fold(proto)
    assert not report.problem
    kinds = {item.name: item.op_type for item in folded.graph.node}
    assert kinds.pop("cast") == folded.graph.node[0].op_type == "Cast"
    assert [item.name for item in folded.graph.node if "x" in item.input] == ["cast"]
    assert list(kinds.values()).count("Cast") == measured
    image = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    same_outputs(proto, folded, {"x": image})


@pytest.mark.parametrize("also", ["", "read", "given"])
def test_pixels_are_cast_after_they_were_moved(also: str) -> None:
    """As behind a network that gives images: TensorRT makes uint8 of outputs alone."""
    nodes = [node("Cast", "x", "c", "cast", to=2), node("Transpose", "c", "t", perm=[0, 2, 3, 1])]
    nodes += [node("Reshape", "t shape", "y"), *[node("Cast", "t", "z", to=1)] * (also == "read")]
    outputs: dict[str, Any] = {"y": ("n", 192), "c" if also == "given" else "z": ("n", 3, 8, 8)}
    outputs |= {"z": ("n", 8, 8, 3)} if also == "read" else {}
    if not also:
        del outputs["z"]
    proto = model(nodes, outputs=outputs, weights={"shape": np.array([0, -1])})
    for value in proto.graph.output:
        value.type.tensor_type.elem_type = TensorProto.FLOAT if value.name == "z" else TensorProto.UINT8
    folded, report = fold(proto)
    assert not report.problem
    first, *others = [item.op_type for item in folded.graph.node]
    assert first == ("Cast" if also == "given" else "Transpose") and (also or others == ["Reshape", "Cast"])
    assert "cast" in [item.name for item in folded.graph.node]
    same_outputs(proto, folded, {"x": np.random.default_rng(0).integers(0, 256, (2, 3, 8, 8)).astype(np.float32)})


@pytest.mark.parametrize("kind", ["arithmetic", "two types", "an output"])
def test_pixels_that_are_also_something_else_stay_as_they_are(kind: str) -> None:
    move, cast = node("Transpose", "x", "t", perm=[0, 3, 1, 2]), node("Cast", "t", "f", to=1)
    if kind == "arithmetic":
        proto = pixels(
            move,
            cast,
            node("Max", "t x2", "m"),
            node("Cast", "m", "h", to=1),
            node("Add", "f h", "y"),
            weights={"x2": np.uint8(9).reshape(())},
        )
    elif kind == "an output":
        proto = pixels(move, cast, node("Neg", "f", "y"))
        proto.graph.output.append(helper.make_tensor_value_info("t", TensorProto.UINT8, ["n", 3, 8, 8]))
    else:
        other = [node("Cast", "t", "d", to=TensorProto.INT32), node("Cast", "d", "h", to=1)]
        proto = pixels(move, cast, *other, node("Add", "f h", "y"))
    folded, _ = fold(proto)
    assert folded.graph.node[0].op_type == "Transpose"


def test_a_model_of_other_domains_alone_has_nothing_to_fold() -> None:
    """As converters of decision trees write it: without ONNX's own operators, of which it asks for no version."""
    trees = helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml", norm="L1")
    net = model([trees], inputs={"x": ("n", 4)}, outputs={"y": ("n", 4)})
    del net.opset_import[:]
    net.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    result, report = fold(net)
    assert not report.problem and not report.changed
    assert [node.op_type for node in result.graph.node] == ["Normalizer"]


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ("[wrap] o = Optional (x) y = OptionalGetElement (o)", "wrap (Optional) works on optional values"),
        (
            "[n] y = BatchNormalization <training_mode = 1> (x, s, s, s, s)",
            "n (BatchNormalization) has training_mode=1",
        ),
        ("[c] f = CastLike <saturate = 0> (x, like) y = Cast <to = 1> (f)", "c (CastLike) doesn't saturate"),
    ],
)
def test_what_the_library_fails_on_or_changes_is_named_and_not_folded(nodes: str, problem: str) -> None:
    proto = written(
        f"(float[n,3,8,8] x) => (float[] y) {{ {nodes} }}", 19, s=values(3), like=np.zeros(1, ml_dtypes.float8_e4m3fn)
    )
    result, report = fold(proto)
    assert report.problem.startswith(problem)
    assert operators(result) == operators(proto)


@pytest.mark.parametrize(
    ("item", "opset"),
    [
        (node("Unsqueeze", "w", "h", axes=[-4, 3]), 11),
        (node("Softmax", "w", "h", axis=0), 11),
        (node("MaxPool", "w", "h", kernel_shape=[2], pads=[0, 1]), 17),
        (node("ConvTranspose", "w k", "h", group=3), 17),
        (node("BatchNormalization", "w s b b s", "h"), 11),
    ],
)
def test_constants_are_left_where_the_evaluator_is_wrong(item: Any, opset: int) -> None:
    weights = {
        "w": values(2, 3, 4),
        "k": values(3, 1, 2, seed=1),
        "s": np.full(3, 2, np.float32),
        "b": values(3, seed=2),
    }
    proto = model([item, node("Mul", "h x", "y")], inputs={"x": [1]}, weights=weights, opset=opset)
    made, report = fold(proto)
    assert not report.problem
    same_outputs(proto, made, {"x": np.ones(1, np.float32)})


def test_functions_are_folded_in_place() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[2] x) => (float[2] y) {
        y = own.shifted(x)
    }
    <domain: "own", opset_import: ["": 17]> shifted (a) => (b) {
        one = Constant <value = float {1}> ()
        two = Add(one, one)
        [inner] c = Neg(a)
        b = Mul(c, two)
    }"""
    proto = onnx.parser.parse_model(text)
    made, report = fold(proto)
    assert not report.problem and operators(made) == {"Neg", "Mul"}
    assert made.graph.node[0].name == "inner"
    same_outputs(proto, made, {"x": values(2)})


def left_with_same_results(proto: ModelProto, **feed: NDArray[Any]) -> set[str]:
    """The operators that are left, after both graphs gave the same in ONNX Runtime."""
    loaded = load_model(proto).proto
    result, report = fold(loaded)
    assert not report.problem
    wanted, found = OnnxSession(loaded)(feed), OnnxSession(result)(feed)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)
    return {item.op_type for item in result.graph.node}


@pytest.mark.parametrize(("op", "other"), [("LessOrEqual", "Greater"), ("GreaterOrEqual", "Less")])
def test_integers_are_compared_without_or_equal(op: str, other: str) -> None:
    """TensorRT-RTX's builder ends the process at some decoders' steps with it."""
    kept = [node(op, "a b", "c"), node("Cast", "c", "y", to=TensorProto.FLOAT)]
    places, floats = np.arange(12, dtype=np.int64).reshape(3, 4), values(3, 4)
    floats[0, 0] = np.nan
    proto = model(kept, inputs={"a": ["n", 4], "b": ["n", 1]})
    assert op in left_with_same_results(proto, a=floats, b=floats[:, :1]), "NaN is neither greater nor less"
    for value in proto.graph.input:
        value.type.tensor_type.elem_type = TensorProto.INT64
    left = left_with_same_results(proto, a=places, b=np.array([[2], [4], [99]]))
    assert left == {other, "Not", "Cast"}


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize(
    "lengths", [np.int64(2), np.int64(3), np.array([1, 3], np.int64)], ids=["even", "uneven", "all"]
)
def test_a_list_of_parts_is_split(opset: int, lengths: NDArray[np.int64]) -> None:
    nodes = [
        node("SplitToSequence", "x n", "s", axis=1),
        node("SequenceAt", "s zero", "a"),
        node("SequenceAt", "s last", "b"),
        node("Concat", "b a", "y", axis=1),
    ]
    weights = {"n": np.asarray(lengths), "zero": np.array(0), "last": np.array(-1)}
    proto = model(nodes, weights=weights, inputs={"x": ["batch", 4, 5]}, opset=opset)
    assert left_with_same_results(proto, x=values(2, 4, 5)) == {"Split", "Concat"}


@pytest.mark.parametrize("equation", ["cB,Ba", "Bi,iA->BA", "aZ,Zb", "IJ->JI"])
def test_capital_letters_of_einsum_become_small_in_their_order(equation: str) -> None:
    """Without "->" the result's axes follow the letters' order, capitals first."""
    inputs = {"x": [3, 4], "w": [4, 5]} if "," in equation else {"x": [3, 4]}
    proto = model([node("Einsum", " ".join(inputs), "y", equation=equation)], inputs=inputs)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    made, _ = fold(proto)
    assert made.graph.node[0].attribute[0].s.decode().islower()
    feed = {name: values(*shape) for name, shape in inputs.items()}
    np.testing.assert_allclose(OnnxSession(made)(feed)["y"], np.einsum(equation, *feed.values()), rtol=1e-5)
