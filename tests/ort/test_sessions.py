"""Differences between outputs: what counts as far, and where rounding alone is forgiven."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import conv_relu, values, written
from onnx.parser import parse_model

from trtopt.core.errors import ModelError
from trtopt.core.values import TensorInfo
from trtopt.data.difference import difference
from trtopt.graph.synthetic import synthetic_inputs
from trtopt.ort.runner import OnnxRunner
from trtopt.ort.sessions import OnnxSession, open_session

ONE = {"y": values(4, 5)}
HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


@pytest.mark.parametrize("wrong", [{}, {"z": ONE["y"]}, {"y": ONE["y"][:3]}, {"y": ONE["y"] * np.nan}])
def test_missing_outputs_other_shapes_and_nan_are_infinitely_far(wrong: dict[str, np.ndarray]) -> None:
    assert difference(ONE, wrong).relative == float("inf")


def test_the_worst_output_is_named() -> None:
    reference = {"a": np.ones(3), "b": np.full(3, 100.0)}
    gap = difference(reference, {"a": np.full(3, 1.5), "b": np.full(3, 101.0)})
    assert (gap.output, gap.absolute, gap.relative) == ("a", 1.0, 0.5)


def test_rounding_is_forgiven_only_in_the_tail_of_a_bounded_output() -> None:
    tail, other = {"y": np.full(3, 6e-8)}, {"y": np.full(3, 1.2e-7)}
    assert not difference(tail, other).within(1e-3)
    assert difference(tail, other).within(1e-3, bounded=frozenset({"y"}))


def test_all_zero_references_say_so() -> None:
    zero = {"y": np.zeros(3)}
    assert difference(zero, zero).scale == 0
    assert difference(zero, ONE | {"y": np.ones(3)}).relative == float("inf")


def test_synthetic_inputs_have_the_asked_sizes_and_are_seeded() -> None:
    infos = (TensorInfo("x", "float32", ("batch", 3, -1)), TensorInfo("ids", "int64", ("batch", "n")))
    made = synthetic_inputs(infos, {"batch": 4, "n": 7, "x:2": 9})
    assert made["x"].shape == (4, 3, 9) and made["ids"].shape == (4, 7) and made["ids"].dtype == np.int64
    assert set(np.unique(made["ids"])) == {0, 1}
    again = synthetic_inputs(infos, {"batch": 4, "n": 7, "x:2": 9})
    assert all(np.array_equal(made[name], again[name]) for name in made)


def test_no_row_of_made_up_masks_is_masked_as_a_whole() -> None:
    infos = (
        TensorInfo("mask", "bool", (64, 2)),
        TensorInfo("ids", "int64", (64, 3)),
        TensorInfo("flag", "bool", (4, 1)),
    )
    made = synthetic_inputs(infos, {})
    for name in ("mask", "ids"):
        assert (made[name].min(-1) == 0).all() and (made[name].max(-1) == 1).all(), name
    assert made["mask"].dtype == bool and len(set(made["mask"][:, 0])) == 2
    assert (made["ids"][:, 0] == 1).all(), "all that the first place of a causal model sees"


def test_a_failing_session_is_a_model_error() -> None:
    session = OnnxSession(conv_relu(), threads=1)
    assert session({"x": values(1, 3, 8, 8)})["y"].shape == (1, 4, 8, 8)
    with pytest.raises(ModelError, match="can't run"):
        session({"x": values(1, 2, 8, 8)})


def test_a_name_that_is_no_utf8_is_told(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"mod\xe8le.onnx")
    onnx.save(conv_relu(), path)
    with pytest.raises(ModelError, match=r"names are UTF-8, which .*le.onnx' isn't: rename it"):
        OnnxRunner(path, optimize=True)


def test_an_input_of_one_row_fixes_the_batch_of_the_others() -> None:
    proto = written("(float[n,4] x, float[1] scale) => (float[n,4] y) { y = Mul (x, scale) }")
    feed = {"x": np.ones((3, 4), np.float32), "scale": np.arange(3, dtype=np.float32)}
    assert OnnxRunner(proto, optimize=True)(feed)["y"][:, 0].tolist() == [0, 1, 2]


def test_nodes_of_one_name_say_what_to_type() -> None:
    with pytest.raises(ModelError, match="check MODEL --fix"):
        OnnxSession(parse_model(f"{HEAD} g (float[n] x) => (float[n] y) {{ [same] h = Relu (x) [same] y = Relu (h) }}"))


@pytest.mark.parametrize("opset", [17, onnx.defs.onnx_opset_version()])
def test_what_is_newer_than_onnx_runtime_knows_runs_all_the_same(tmp_path: Path, opset: int) -> None:
    """`onnx.helper.make_model` writes onnx's newest IR version and opset unless told otherwise."""
    proto = conv_relu()
    feed = {"x": values(2, 3, 8, 8)}
    expected = OnnxSession(proto)(feed)["y"]
    proto.ir_version, proto.opset_import[0].version = onnx.IR_VERSION, opset
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    proto = onnx.load(tmp_path / "m.onnx")
    for given in (proto, tmp_path / "m.onnx"):
        np.testing.assert_array_equal(OnnxSession(given)(feed)["y"], expected)
    assert proto.ir_version == onnx.load(tmp_path / "m.onnx").ir_version == onnx.IR_VERSION
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.bin"}


def test_what_stays_too_new_is_refused() -> None:
    """A model-local function has an opset of its own, which the model's doesn't change."""
    graph = "g (float[1,2] x) => (float[1,2] y) { y = local.F (x) }"
    function = '<domain: "local", opset_import: ["" : 99]> F (a) => (b) { b = Relu (a) }'
    with pytest.raises(ModelError, match="till opset"):
        OnnxSession(parse_model(f'<ir_version: 8, opset_import: ["" : 17, "local" : 1]> {graph} {function}'))


def test_a_graph_without_nodes_runs_whatever_its_opset() -> None:
    head = f'<ir_version: {onnx.IR_VERSION}, opset_import: ["" : {onnx.defs.onnx_opset_version()}]>'
    run = OnnxSession(parse_model(f"{head} g (float[1,2] x) => (float[1,2] x) {{ }}"))
    np.testing.assert_array_equal(run({"x": values(1, 2)})["x"], values(1, 2))


@pytest.mark.parametrize("channels", [16, 24, 5])
@pytest.mark.parametrize("read", ["", "a convolution", "a body"])
def test_unordered_outputs_hold_the_same_values(channels: int, read: str, tmp_path: Path) -> None:
    """24 and 5 channels don't fill blocks of 16; of tensors that something else reads the order matters to that."""
    text = "c = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (c) p = MaxPool <kernel_shape = [2, 2]> (r) "
    outputs = ["p", "r"]
    if read == "a convolution":
        text += "d = Conv (r, v) s = Softmax <axis = 1> (r)"
        outputs += ["d", "s"]
    elif read == "a body":
        body = "b () => (float[n,k,4,4] q) { q = Softmax <axis = 1> (p) }"
        text += f"s = If <then_branch = {body}, else_branch = {body}> (yes)"
        outputs.append("s")
    weights = {"w": values(channels, 3, 3, 3), "v": values(6, channels, 1, 1, seed=1), "yes": np.array(True)}
    proto = written(f"(float[batch,3,8,8] x) => (float[batch,{channels},4,4] p) {{ {text} }}", **weights)
    feed = {"x": values(1, 3, 8, 8, seed=2)}
    ordered = open_session(proto, outputs=outputs, threads=1).run(None, feed)
    found = open_session(proto, outputs=outputs, threads=1, unordered=True).run(None, feed)
    for name, one, other in zip(outputs, ordered, found):
        assert one.size == other.size and np.array_equal(np.sort(one, None), np.sort(other, None)), name
        if channels % 16 or name == "s":
            assert np.array_equal(one, other), name


def test_sums_of_codes_are_exact_on_every_cpu() -> None:
    """Without VNNI products of uint8 and int8 saturate at 16 bits; a CPU that has it shows nothing."""
    codes, weights = np.full((2, 64), 255, np.uint8), np.full((64, 3), -128, np.int8)
    net = written("(uint8[2,64] x) => (int32[2,3] y) { y = MatMulInteger (x, w) }", w=weights)
    found = OnnxRunner(net, optimize=False)({"x": codes})["y"]
    assert (found == 64 * 255 * -128).all()
