"""Inputs that are decided: values become constants, sizes and their names the graph's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from graphs import model, node, values, written
from onnx import ModelProto, TensorProto, helper, numpy_helper
from world import World, has

import trtopt
from trtopt.core.errors import CalibrationError, UsageError
from trtopt.graph.fixed_inputs import fix_inputs, how_to_decide
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold
from trtopt.ort.sessions import OnnxSession


def rated() -> ModelProto:
    """A convolution of its own for each rate, and one that is squeezed where there is one step."""
    return written(
        "(float[n,16,t] x, int64 sr) => (float[n,16,m] y) { is16 = Equal (sr, rate) [choice] y = If (is16) <"
        "then_branch = then () => (float[] a) { [conv_w16] c = Conv (x, w16) a = Relu (c) }, "
        "else_branch = other () => (float[] b) { [conv_w8] d = Conv (x, w8) b = Relu (d) }> }",
        w8=values(16, 16, 3), w16=values(16, 16, 3, seed=1), rate=16000,
    )  # fmt: skip


def operators(proto: ModelProto) -> list[str]:
    return [item.op_type for item in proto.graph.node]


@pytest.mark.parametrize(("rate", "weight"), [(16000, "w16"), (8000, "w8")])
def test_a_value_decides_control_flow(rate: int, weight: str) -> None:
    proto = rated()
    made = fix_inputs(proto, [f"sr={rate}"])
    assert len(proto.graph.input) == 2 and list(network_inputs(made)) == ["x"]
    folded, _ = fold(load_model(made).proto)
    assert operators(folded) == ["Conv", "Relu"] and folded.graph.node[0].name == f"conv_{weight}"
    x = values(2, 16, 9)
    expected = OnnxSession(proto)({"x": x, "sr": np.asarray(rate)})["y"]
    np.testing.assert_allclose(OnnxSession(folded)({"x": x})["y"], expected, rtol=1e-5)


def test_sizes_and_names_are_set_wherever_the_same_name_stands() -> None:
    made = fix_inputs(rated(), ["x:batchx16x9"])
    assert network_inputs(made)["x"].shape == ("batch", 16, 9)
    assert made.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert network_inputs(fix_inputs(rated(), ["x:?,16,9"]))["x"].shape == ("n", 16, 9)
    sequence_first = fix_inputs(rated(), ["x:time,16,batch"])
    assert network_inputs(sequence_first)["x"].batch_axis == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "text", "expected"),
    [
        ((3,), TensorProto.INT64, "1, 2,3", [1, 2, 3]),
        ((2, 2), TensorProto.FLOAT, "0.5", [[0.5, 0.5], [0.5, 0.5]]),
        ((1,), TensorProto.BOOL, "true", [True]),
        ((), TensorProto.INT64, str(2**62 + 1), 2**62 + 1),
        ((1,), TensorProto.FLOAT16, "-1e-3", [np.float16(-1e-3)]),
    ],
)
def test_values_of_any_type(shape: Any, dtype: int, text: str, expected: Any) -> None:
    proto = model([node("Identity", "x", "y")], inputs={"x": shape}, outputs={"y": shape}, dtype=dtype)
    (found,) = fix_inputs(proto, [f"x={text}"]).graph.initializer
    array = np.asarray(helper.tensor_dtype_to_np_dtype(dtype).type(expected) if shape == () else expected)
    assert found.data_type == dtype
    np.testing.assert_array_equal(numpy_helper.to_array(found), array)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rate=3", r"sets no input.*NAME=VALUE or NAME:1x576.*x \(n, 16, t\), sr scalar"),
        ("sr=", "sets no input"),
        ("sr=1.5", "int64 can't hold that"),
        ("sr=fast", "can't be read; numbers"),
        ("sr=1,2", r"has 2 numbers; the input is scalar"),
        ("x=0", r"set its sizes, too, as by `set='x:1,16,1'`"),
        ("x:2x16", r"has 2 sizes; the input is \(n, 16, t\)"),
        ("x:2x8x9", "size 1 is 16 in the model.*export the model with the other size"),
        ("x:2x16x-1", "can't be read; write sizes and names"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        fix_inputs(rated(), [text])


def test_what_decides_control_flow_is_named_and_check_writes_it(world: World, tmp_path: Path) -> None:
    save_model(rated(), tmp_path / "m.onnx")
    (found,) = [item for item in trtopt.check(rated()).findings if item.code == "control-flow"]
    assert "trtopt check MODEL `set=['sr=VALUE']` `fix='OUT.onnx'`" in found.hint
    said = world.run("check", tmp_path / "m.onnx", "--json")
    (found,) = [item for item in trtopt.check(tmp_path / "m.onnx").findings if item.code == "control-flow"]
    here = f"trtopt check {tmp_path / 'm.onnx'} "
    assert f"{here}`set=['sr=VALUE']` `fix='OUT.onnx'`" in found.hint and "set=" not in said.out
    assert f"{here}--set sr=VALUE --fix OUT.onnx" in said.out
    with pytest.raises(CalibrationError, match=r"inside control flow isn't quantized: .*`set=\['sr=VALUE'\]`"):
        trtopt.calibrate(tmp_path / "m.onnx", data={"x": values(40, 16, 9), "sr": 16000}, output=tmp_path / "t.json")
    written = tmp_path / "m16.onnx"
    said = world.run("check", tmp_path / "m.onnx", "--set", "sr=16000", "--set", "x:batchx16x9", "--fix", written)
    has(said.out, "outputs unchanged")
    assert said.status == 0 and operators(load_model(written).proto) == ["Conv", "Relu"]
    assert trtopt.calibrate(written, data={"x": values(40, 16, 9)}, output=tmp_path / "t.json").table.samples == 40


def test_data_that_decides_control_flow_is_no_setting() -> None:
    """A condition that samples give: no value of an input would decide it."""
    text = """<ir_version: 9, opset_import: ["" : 17]> g (float[n,4] x, bool flag) => (float[n,4] y) {
        sum = ReduceSum <keepdims = 0> (x)
        many = Cast <to = 9> (sum)
        y = If (CONDITION) <
            then_branch = a () => (float[n,4] p) { p = Relu(x) }, else_branch = b () => (float[n,4] q) { q = Neg(x) }
        >
    }"""
    assert "set=['flag=VALUE']" in how_to_decide(onnx.parser.parse_model(text.replace("CONDITION", "flag")))
    assert how_to_decide(onnx.parser.parse_model(text.replace("CONDITION", "many"))) == ""
    image = text.replace("n,4", "1,3,8,8")  # sizes are known, and the values are an image's
    assert how_to_decide(onnx.parser.parse_model(image.replace("CONDITION", "many"))) == ""
    alone = text.replace("n,4", "1,4").replace(", bool flag", "")  # no input would be left
    assert how_to_decide(onnx.parser.parse_model(alone.replace("CONDITION", "many"))) == ""


def test_sizes_are_named_where_they_decide() -> None:
    proto = written(
        "(float[n,t] x) => (float[] y) { s = Shape (x) d = Gather (s, one) is1 = Equal (d, one) y = If (is1) <"
        "then_branch = t () => (float[] a) { a = Relu (x) }, else_branch = e () => (float[] b) { b = Neg (x) }> }",
        one=1,
    )
    (found,) = [item for item in trtopt.check(proto).findings if item.code == "control-flow"]
    assert "`set=['x:SIZES']`" in found.hint
    assert operators(fold(fix_inputs(proto, ["x:4x1"]))[0]) == ["Relu"]
