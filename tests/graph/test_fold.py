"""Folding: what must go is gone, what must stay stays, and the outputs are the same."""

from __future__ import annotations

import gc
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
from graphs import conv_relu, model, node, photos, rapidocr, rendered_text, values
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from trtopt.data.difference import difference
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import _evaluate, fold
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


@pytest.fixture(scope="module")
def raw_lite0(tmp_path_factory: pytest.TempPathFactory) -> ModelProto:
    """EfficientNet-Lite0 with real weights, exported with its 17 dynamic Pad chains and 49 BatchNormalizations."""
    import torch  # noqa: TID251

    from trtopt.frontend.modules import open_source, quiet

    module = open_source("efficientnet-lite0", None).module.eval()
    path = tmp_path_factory.mktemp("lite0") / "raw.onnx"
    axes = {"input": {0: "batch"}, "logits": {0: "batch"}}
    torch.set_num_threads(2)
    with quiet():
        torch.onnx.export(
            module,
            (torch.zeros(2, 3, 224, 224),),
            str(path),
            input_names=["input"],
            output_names=["logits"],
            dynamic_axes=axes,
            dynamo=False,
            opset_version=13,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    proto = load_model(path).proto
    found = [item.op_type for item in proto.graph.node]
    assert (found.count("Pad"), found.count("BatchNormalization"), found.count("Conv")) == (17, 49, 49)
    return proto


def test_lite0_loses_its_pad_chains_and_batchnorms(raw_lite0: ModelProto) -> None:
    result = folded(raw_lite0)
    counts = fold(raw_lite0)[1].after
    assert counts == {"Add": 9, "Clip": 33, "Conv": 49, "Gemm": 1, "GlobalAveragePool": 1, "Reshape": 1}
    same_outputs(raw_lite0, result, {"input": photos(224, 1)}, {"input": photos(224, 3)})
    stem = next(item for item in result.graph.node if item.op_type == "Conv")
    assert stem.name == "/_conv_stem/Conv"


def test_lite0_folds_alike_in_another_process_without_onnxruntime(raw_lite0: ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_model(raw_lite0, path)
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
    assert done.stderr == hashlib.sha256(bytes_of(fold(raw_lite0)[0])).hexdigest()


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


def convolution(*before: Any, weights: dict[str, NDArray[Any]], reads: str = "p", **attributes: Any) -> ModelProto:
    nodes = [*before, node("Conv", f"{reads} w", "y", "c", **attributes)]
    return model(nodes, weights={"w": values(4, 3, 3, 3), **weights}, outputs={"y": ["batch", 4, "h", "w_"]})


def pads(*amounts: int) -> dict[str, NDArray[np.int64]]:
    return {"pads": np.array(amounts, np.int64)}


def test_zero_padding_folds_with_the_convolutions_own() -> None:
    pad = node("Pad", "x pads", "p")
    proto = convolution(pad, weights=pads(0, 0, 1, 2, 0, 0, 3, 4), pads=[1, 1, 0, 0])
    result = folded(proto)
    assert operators(result) == {"Conv"}
    assert next(item.ints for item in result.graph.node[0].attribute if item.name == "pads") == [2, 3, 3, 4]
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})


@pytest.mark.parametrize(
    ("mode", "amounts", "value"),
    [
        ("reflect", (0, 0, 1, 1, 0, 0, 1, 1), 0.0),
        ("edge", (0, 0, 1, 1, 0, 0, 1, 1), 0.0),
        ("constant", (0, 0, 1, 1, 0, 0, 1, 1), 0.5),
        ("constant", (0, 0, -1, -1, 0, 0, 0, 0), 0.0),
    ],
)
def test_padding_that_a_convolution_cannot_do_stays(mode: str, amounts: tuple[int, ...], value: float) -> None:
    weights = {**pads(*amounts), "value": np.array(value, np.float32)}
    proto = convolution(node("Pad", "x pads value", "p", mode=mode), weights=weights)
    result = folded(proto)
    assert "Pad" in operators(result) or amounts[2] < 0  # a crop may become a Slice
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_batchnorm_folds_and_the_node_keeps_its_name(op: str) -> None:
    shape = (4, 3, 3, 3) if op == "Conv" else (3, 4, 3, 3)
    weights = {"w": values(*shape), "scale": values(4), "shift": values(4, seed=2), "mean": values(4, seed=3)}
    weights["var"] = np.abs(values(4, seed=4)) + 0.1
    norm = node("BatchNormalization", "h scale shift mean var", "y", "norm", epsilon=0.01)
    proto = model([node(op, "x w", "h", "my_conv"), norm], weights=weights)
    result = folded(proto)
    assert [(item.op_type, item.name) for item in result.graph.node] == [(op, "my_conv")]
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})


def test_a_shared_convolution_keeps_its_batchnorm_apart() -> None:
    weights = {"w": values(4, 3, 3, 3), "s": values(4), "b": values(4), "m": values(4)}
    weights["v"] = np.abs(values(4)) + 0.1
    nodes = [node("Conv", "x w", "h"), node("BatchNormalization", "h s b m v", "n"), node("Add", "h n", "y")]
    proto = model(nodes, weights=weights)
    same_outputs(proto, folded(proto), {"x": values(2, 3, 8, 8)})


def test_identity_dropout_and_dead_nodes_go() -> None:
    nodes = [
        node("Identity", "x", "a"),
        node("Dropout", "a", "b"),
        node("Neg", "x", "unused"),
        node("Relu", "b", "y", "kept"),
    ]
    result = folded(model(nodes))
    assert [(item.op_type, item.name) for item in result.graph.node] == [("Relu", "kept")]


def test_patterns_that_tensorrt_fuses_stay() -> None:
    gelu = [
        node("Div", "x root", "d"),
        node("Erf", "d", "e"),
        node("Add", "e one", "f"),
        node("Mul", "x f", "g"),
        node("Mul", "g half", "y"),
    ]
    weights = {"root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)}
    proto = model(gelu, weights={name: np.asarray(value) for name, value in weights.items()})
    result = folded(proto)
    assert "Erf" in operators(result) and all(item.domain in ("", "ai.onnx") for item in result.graph.node)
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})
    assert operators(folded(conv_relu())) == {"Conv", "Relu"}


def test_quantize_dequantize_pairs_stay() -> None:
    weights = {"s": np.array(0.05, np.float32), "z": np.array(0, np.int8), "w": values(4, 3, 3, 3)}
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "d"),
        node("QuantizeLinear", "w s z", "wq"),
        node("DequantizeLinear", "wq s z", "wd"),
        node("Conv", "d wd", "y"),
    ]
    proto = model(nodes, weights=weights)
    result = folded(proto)
    assert [item.op_type for item in result.graph.node].count("QuantizeLinear") == 2
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})


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


def test_unnamed_and_repeated_names_become_unique() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])]
    assert [item.name for item in folded(model(nodes)).graph.node] == ["Relu_a", "Neg_y"]


def test_an_output_that_is_an_input_or_constant_keeps_its_name() -> None:
    proto = model([node("Identity", "x", "y"), node("Add", "x c", "z")], weights={"c": np.float32(1).reshape(1)})
    proto.graph.output.append(helper.make_tensor_value_info("z", 1, ["batch", 3, 8, 8]))
    result = folded(proto)
    assert [value.name for value in result.graph.output] == ["y", "z"]
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})


def test_an_output_that_takes_over_what_is_summed_with_nothing_keeps_its_name() -> None:
    proto = model([node("Relu", "x", "a", "relu"), node("Add", "a zero", "y")], weights={"zero": np.float32(0)})
    result = folded(proto)
    assert [(item.name, list(item.output)) for item in result.graph.node] == [("relu", ["y"])]
    same_outputs(proto, result, {"x": values(2, 3, 8, 8)})


def test_control_flow_keeps_its_body() -> None:
    def body(op: str) -> Any:
        result = helper.make_tensor_value_info(f"{op}_out", 1, None)
        return helper.make_graph([helper.make_node(op, ["x"], [f"{op}_out"])], op, [], [result])

    nodes = [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Greater", "s zero", "c"),
        helper.make_node("If", ["c"], ["y"], "choose", then_branch=body("Relu"), else_branch=body("Neg")),
    ]
    proto = model(nodes, weights={"zero": np.array(0, np.float32)})
    result = folded(proto)
    same_outputs(proto, result, {"x": values(1, 3, 8, 8)}, {"x": -values(1, 3, 8, 8)})


def test_a_loop_that_goes_on_by_a_constant_is_folded() -> None:
    """As TorchScript writes `for i in range(n)`: the condition that the body gives is a constant from outside."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x, int64 turns) => (float[n,4] y)
        <bool yes = {1}, float half = {0.5}, float[4] one = {1, 1, 1, 1}> {
        start = Add(x, one)
        y = Loop (turns, yes, start) <body = step (int64 turn, bool going, float[n,4] old) => (bool on, float[n,4] new) {
            less = Mul(old, half)
            more = Constant <value = float[4] {0, 1, 2, 3}> ()
            new = Add(less, more)
            on = Identity(yes)
        }>
    }"""
    proto = onnx.parser.parse_model(text)
    result, report = fold(proto)
    assert not report.problem
    for turns in (0, 1, 3):
        same_outputs(proto, result, {"x": values(2, 4), "turns": np.array(turns)})
    assert fold(result)[0].SerializeToString() == result.SerializeToString()


BIASED = {"w": np.ones((4, 3), np.float32), "b": np.arange(3, dtype=np.float32)}


def test_the_report_counts_what_went() -> None:
    _, report = fold(model([node("Identity", "x", "a"), node("Relu", "a", "y")]))
    assert report.removed == {"Identity": 1} and report.changed
    assert str(report) == "2 nodes → 1 (removed: 1 Identity)"
    bias = model([node("MatMul", "x w", "p"), node("Add", "p b", "y")], inputs={"x": ["n", 4]}, weights=BIASED)
    told = fold(bias)[1].to_json()
    assert (told["removed"], told["added"]) == ({"MatMul": 1, "Add": 1}, {"Gemm": 1})
    assert not fold(conv_relu())[1].changed


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_left_as_it_was(frozen: bool) -> None:
    try:
        if frozen:
            gc.freeze()
        before = gc.get_freeze_count()
        fold(conv_relu())
        # Frozen objects may go while it runs, but none may be added to a caller's, and none left frozen for one who froze none.
        assert before / 2 < gc.get_freeze_count() <= before if frozen else gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()


def test_the_collector_passes_over_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = list[int]()

    def looked(proto: ModelProto, most: int) -> ModelProto:
        frozen.append(gc.get_freeze_count())
        return _evaluate(proto, most)

    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", looked)
    fold(conv_relu())
    assert frozen and min(frozen) > 1000


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
    assert "FlexAttention's bodies" in report.problem and operators(made) == {"FlexAttention"}


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    fold(load_model(rapidocr("rec")).proto)
    assert capfd.readouterr() == ("", "")


# What libraries get wrong


def body(nodes: list[Any], inputs: str, outputs: str) -> Any:
    """A graph for a node's attribute; every tensor is a float."""
    ends = [[helper.make_tensor_value_info(name, 1, None) for name in names.split()] for names in (inputs, outputs)]
    return helper.make_graph(nodes, "body", *ends)


def test_an_identity_between_outputs_stays() -> None:
    proto = model([node("Relu", "x", "y"), node("Identity", "y", "z")], outputs={"y": None, "z": None})
    result = folded(proto)
    same_outputs(proto, result, {"x": values(1, 3, 8, 8)})
    assert [item.name for item in result.graph.output] == ["y", "z"]


def test_two_equal_outputs_stay_two() -> None:
    proto = model([node("Relu", "x", "y"), node("Relu", "x", "z")], outputs={"y": None, "z": None})
    same_outputs(proto, folded(proto), {"x": values(1, 3, 8, 8)})


def test_a_scan_keeps_the_names_of_what_it_carries() -> None:
    """onnx-ir's own pass gives both outputs of this body one name; ONNX Runtime then reads memory that nobody wrote."""
    scan = body(
        [node("Add", "sum_in next", "sum_out"), node("Identity", "sum_out", "out")], "sum_in next", "sum_out out"
    )
    nodes = [helper.make_node("Scan", ["start", "x"], ["last", "y"], "scan", body=scan, num_scan_inputs=1)]
    proto = model(nodes, inputs={"start": [2], "x": [3, 2]}, outputs={"last": [2], "y": [3, 2]})
    result = folded(proto)
    inner = next(item.g for item in result.graph.node[0].attribute if item.name == "body")
    assert len({value.name for value in inner.output}) == 2
    same_outputs(proto, result, {"start": values(2), "x": values(3, 2)})


def test_a_branch_may_give_an_outer_value() -> None:
    nodes = [
        node("Relu", "x", "r"),
        node("ReduceSum", "x", "s", keepdims=0),
        node("Greater", "s zero", "c"),
        helper.make_node(
            "If",
            ["c"],
            ["y"],
            "choose",
            then_branch=body([node("Identity", "r", "a")], "", "a"),
            else_branch=body([node("Neg", "r", "b")], "", "b"),
        ),
    ]
    proto = model(nodes, weights={"zero": np.array(0, np.float32)})
    same_outputs(proto, folded(proto), {"x": values(1, 3, 8, 8)}, {"x": -values(1, 3, 8, 8)})


def test_what_a_decided_branch_does_keeps_its_name() -> None:
    branches = {
        name: body([node(op, "x", f"{op}_o", op.lower()), node("Neg", f"{op}_o", op, f"last_{op}")], "", op)
        for name, op in (("then_branch", "Relu"), ("else_branch", "Abs"))
    }
    nodes = [helper.make_node("If", ["yes"], ["c"], "choose", **branches), node("Conv", "c w", "y", "conv")]
    result = fold(model(nodes, weights={"yes": np.array(True), "w": values(4, 3, 1, 1)}))[0]
    assert [item.name for item in result.graph.node] == ["relu", "choose_last_Relu", "conv"]


def test_initializers_that_were_inputs_take_the_ir_version_along() -> None:
    proto = conv_relu()
    proto.ir_version = 3
    for name in ("w", "b"):
        shape = next(list(item.dims) for item in proto.graph.initializer if item.name == name)
        proto.graph.input.append(helper.make_tensor_value_info(name, 1, shape))
    result, report = fold(proto)
    assert report.problem == "" and result.ir_version == 4
    assert [value.name for value in load_model(result).proto.graph.input] == ["x"]


@pytest.mark.parametrize("opset", [9, 11])
def test_operator_forms_newer_than_the_opset_raise_it(opset: int) -> None:
    """onnxscript drops a Gemm's C of zeros, which had to be given before opset 11."""
    proto = model(
        [node("Gemm", "x w c", "y", "g")],
        inputs={"x": [2, 4]},
        outputs={"y": [2, 3]},
        weights={"w": values(4, 3), "c": np.zeros(3, np.float32)},
        opset=opset,
    )
    result, report = fold(proto)
    x = values(2, 4)
    found = OnnxSession(load_model(result).proto)({"x": x})["y"]
    assert report.problem == ""
    np.testing.assert_allclose(found, x @ values(4, 3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("computed", [False, True])
def test_a_cast_that_does_not_saturate_stays_so(computed: bool) -> None:
    like = [node("Cast", "x", "like", to=TensorProto.FLOAT8E4M3FN)] if computed else []
    proto = model(
        [*like, node("CastLike", "x like", "f", "c", saturate=0), node("Cast", "f", "y", to=1)],
        weights={} if computed else {"like": np.zeros(1, ml_dtypes.float8_e4m3fn)},
        opset=19,
    )
    result, report = fold(proto)
    saturating = [item for item in result.graph.node if item.op_type in ("Cast", "CastLike")]
    assert report.problem == "" and saturating
    first = helper.get_node_attr_value(saturating[0], "saturate")
    assert first == 0


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


def test_folding_that_changes_the_model_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(proto: ModelProto, most: int = 0) -> ModelProto:
        for item in proto.graph.node:
            if item.op_type == "Relu":
                item.op_type = "Neg"
        return proto

    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", wrong)
    proto = conv_relu(inputs={"x": [1, 3, 8, 8]})
    result, report = fold(proto)
    assert "has other values" in report.problem
    assert "Relu" in operators(result)


def test_what_the_caller_compares_decides_too() -> None:
    proto = model(
        [node("Conv", "x w", "h"), node("Add", "h b", "y")], weights={"w": values(4, 3, 1, 1), "b": values(4, 1, 1)}
    )
    seen = list[tuple[bool, set[str]]]()

    def compare(before: ModelProto, after: ModelProto) -> str:
        seen.append((before is proto, operators(after)))
        return "" if "Add" in operators(after) else "it is another"

    made, report = fold(proto, compare=compare)
    assert operators(made) == operators(proto) and report.problem == "it is another"
    assert seen == [(True, {"Conv"})]
    assert not fold(proto, compare=lambda before, after: "")[1].problem


def test_folding_that_is_not_valid_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(proto: ModelProto, most: int = 0) -> ModelProto:
        del proto.graph.node[1:]
        return proto

    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", cut)
    monkeypatch.setattr("trtopt.graph.passes.fold._evaluate", cut)
    proto = conv_relu()
    result, report = fold(proto)
    assert "'y' is computed by no node" in report.problem
    assert len(result.graph.node) == len(proto.graph.node)


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
    assert next(counted) < 20


@pytest.mark.parametrize("equation", ["cB,Ba", "Bi,iA->BA", "aZ,Zb", "IJ->JI"])
def test_capital_letters_of_einsum_become_small_in_their_order(equation: str) -> None:
    """Without "->" the result's axes follow the letters' order, capitals first."""
    inputs = {"x": [3, 4], "w": [4, 5]} if "," in equation else {"x": [3, 4]}
    proto = model([node("Einsum", " ".join(inputs), "y", equation=equation)], inputs=inputs)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    made, _ = fold(proto)
    assert not any(letter.isupper() for letter in made.graph.node[0].attribute[0].s.decode())
    feed = {name: values(*shape) for name, shape in inputs.items()}
    expected = np.einsum(equation, *feed.values())
    np.testing.assert_allclose(OnnxSession(made)(feed)["y"], expected, rtol=1e-5)


def test_weights_of_any_size_fold() -> None:
    nodes = [node("Neg", "w", "v"), node("Conv", "x v", "y")]
    result = folded(model(nodes, weights={"w": values(512, 3, 8, 8)}))
    assert operators(result) == {"Conv"}


def test_one_move_is_cast_before_it() -> None:
    moving = [node("Transpose", "x", "t", perm=[0, 3, 1, 2]), node("Cast", "t", "y", "cast", to=1)]
    assert [item.op_type for item in fold(pixels(*moving))[0].graph.node] == ["Cast", "Transpose"]


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


@pytest.mark.parametrize("channels", [True, False])
def test_int32_biases_become_floating(channels: bool) -> None:
    """As ONNX Runtime's quantizer writes them."""
    scale = np.abs(values(4, seed=2)) if channels else np.float32(0.01).reshape(())
    weights = {
        "w": values(4, 3, 3, 3),
        "b": np.array([1, -20, 300, 0], np.int32),
        "s": scale,
        "z": np.int32(0).reshape(()),
    }
    if channels:
        weights["z"] = np.zeros(4, np.int32)
    dequantize = node("DequantizeLinear", "b s z", "bias", "bias", axis=0)
    proto = model([dequantize, node("Conv", "x w bias", "y", "conv")], weights=weights)
    folded, _ = fold(proto)
    assert operators(folded) == {"Conv"}
    same_outputs(proto, folded, {"x": values(2, 3, 8, 8)})


def test_what_another_domain_calls_the_same_is_not_taken_for_it() -> None:
    weights = {"b": np.arange(4, dtype=np.int32), "s": np.float32(0.5).reshape(())}
    other = helper.make_node("DequantizeLinear", ["b", "s"], ["bias"], "other", domain="com.example")
    proto = model([other, node("Conv", "x w bias", "y", "conv")], weights={"w": values(4, 3, 1, 1), **weights})
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    assert operators(fold(proto)[0]) == {"DequantizeLinear", "Conv"}


def test_codes_of_weights_stay_codes() -> None:
    weights = {"w": np.ones((4, 3, 3, 3), np.int8), "s": np.float32(0.1).reshape(())}
    proto = model([node("DequantizeLinear", "w s", "v", "dq"), node("Conv", "x v", "y", "conv")], weights=weights)
    assert operators(fold(proto)[0]) == {"Conv", "DequantizeLinear"}


def pixels(*nodes: Any, **changes: Any) -> ModelProto:
    proto = model(nodes, inputs={"x": ["n", 8, 8, 3]}, dtype=TensorProto.UINT8, **changes)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    return proto


@pytest.mark.parametrize("measured", [False, True])
def test_pixels_are_cast_before_they_are_moved(measured: bool) -> None:
    """TensorRT takes a uint8 input only where it is cast at once. Torch asks for their size beside that."""
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
    operators_ = [item.op_type for item in folded.graph.node]
    assert operators_ == ["Transpose", "Reshape", "Cast"] if not also else operators_[0] == "Cast"
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


def test_optional_values_are_named_instead_of_asked_of_a_library_that_fails_on_them() -> None:
    net = model(
        [node("Relu", "x", "r"), node("Optional", "r", "o", "wrap"), node("OptionalGetElement", "o", "y")], opset=18
    )
    result, report = fold(net)
    assert report.problem == "wrap (Optional) works on optional values, which TensorRT hasn't"
    assert operators(result) == {"Relu", "Optional", "OptionalGetElement"}


def test_normalization_by_its_own_batch_is_refused_by_name() -> None:
    weights = {name: values(3, seed=at) for at, name in enumerate("sbmv")}
    proto = model([node("BatchNormalization", "x s b m v", "y", "n", training_mode=1)], weights=weights, opset=17)
    result, report = fold(proto)
    assert "n (BatchNormalization) has training_mode=1" in report.problem
    assert operators(result) == {"BatchNormalization"}


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


def test_codes_of_more_than_a_bias_stay_codes() -> None:
    weights = {"q": np.arange(4, dtype=np.int32).reshape(2, 2), "s": np.float32(0.5)}
    proto = model(
        [node("DequantizeLinear", "q s", "h"), node("Add", "h x", "y")], inputs={"x": [2, 2]}, weights=weights
    )  # type: ignore[arg-type]
    assert operators(fold(proto)[0]) == {"DequantizeLinear", "Add"}


def test_a_product_that_takes_its_bias_in_keeps_its_own_name() -> None:
    proto = model(
        [node("MatMul", "x w", "p", "product"), node("Add", "p b", "y", "bias")],
        inputs={"x": ["n", 4]},
        weights=BIASED,
        outputs={"y": ["n", 3]},
    )
    result, report = fold(proto)
    assert [(item.op_type, item.name) for item in result.graph.node] == [("Gemm", "product")] and not report.problem
