"""What old exporters wrote is read in a form that ONNX, ONNX Runtime and TensorRT take, and computes what was meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import model, node, values
from onnx import TensorProto, helper, numpy_helper, save
from onnx.reference import ReferenceEvaluator

from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner


def test_integers_in_constants_before_opset_9_become_initializers() -> None:
    held = numpy_helper.from_array(np.array([0, -1], np.int64))
    nodes = [helper.make_node("Constant", [], ["s"], "k", value=held), node("Reshape", "x s", "y")]
    proto = model(nodes, opset=7, outputs={"y": ["batch", 192]})
    proto.ir_version = 3
    loaded = load_model(proto)
    assert loaded.mended and [item.op_type for item in loaded.proto.graph.node] == ["Reshape"]
    assert [item.name for item in loaded.inputs] == ["x"]
    (tensor,) = loaded.proto.graph.initializer
    assert numpy_helper.to_array(tensor).tolist() == [0, -1]
    for kept in (model(nodes, opset=9), model([node("Relu", "x", "y")])):
        assert not load_model(kept).mended


def test_integers_in_the_constants_of_a_body_become_its_own() -> None:
    held = numpy_helper.from_array(np.array([0, -1], np.int64))
    nodes = [helper.make_node("Constant", [], ["s"], "k", value=held), node("Reshape", "x s", "r")]
    other = [node("Flatten", "x", "f")]
    bodies = {
        name: helper.make_graph(part, name, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)])
        for name, part, out in (("then_branch", nodes, "r"), ("else_branch", other, "f"))
    }
    proto = model([helper.make_node("If", ["c"], ["y"], "if", **bodies)], opset=8, inputs={"x": [2, 3, 8, 8]})
    proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    body = next(item.g for item in load_model(proto).proto.graph.node[0].attribute if item.name == "then_branch")
    assert [item.op_type for item in body.node] == ["Reshape"] and body.initializer[0].name == "s"


@pytest.mark.parametrize("opset", [7, 8, 9, 17])
def test_slopes_of_one_axis_are_of_channels(opset: int, tmp_path: Path) -> None:
    proto = model([node("PRelu", "x s", "y")], weights={"s": values(3)}, opset=opset)
    proto.graph.input.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, [3]))
    save(proto, tmp_path / "m.onnx")
    x, slopes = values(2, 3, 8, 8), values(3)
    result = OnnxRunner(tmp_path / "m.onnx", optimize=False)({"x": x})["y"]  # the file as it is fails at this
    np.testing.assert_allclose(result, np.where(x < 0, x * slopes[:, None, None], x))


def test_slopes_that_may_lie_along_the_last_axis_stay() -> None:
    for shape, count in (([2, 8, 4, 8], 8), ([2, 3, 4, 8], 8), ([2, 8], 8), ([2, 3, 4, 8], 1)):
        proto = model([node("PRelu", "x s", "y")], weights={"s": values(count)}, inputs={"x": shape})
        loaded = load_model(proto)
        assert not loaded.mended and list(loaded.proto.graph.initializer[0].dims) == [count]


@pytest.mark.parametrize("how", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation"), [(9, 3, 1, 2), (9, 4, 1, 3), (10, 3, 2, 2), (5, 2, 3, 4)]
)
def test_dilated_convolutions_have_their_padding_in_numbers(
    how: str, size: int, kernel: int, stride: int, dilation: int
) -> None:
    attributes = {"auto_pad": how, "strides": [stride], "dilations": [dilation]}
    proto = model(
        [node("Conv", "x w", "y", **attributes)], weights={"w": values(4, 3, kernel)}, inputs={"x": [2, 3, size]}
    )
    loaded = load_model(proto)
    assert loaded.mended and not any(item.name == "auto_pad" for item in loaded.proto.graph.node[0].attribute)
    x = values(2, 3, size)
    count = -(-size // stride)
    total = max(0, (count - 1) * stride + (kernel - 1) * dilation + 1 - size)
    before = total // 2 if how == "SAME_UPPER" else total - total // 2
    padded = np.pad(x, ((0, 0), (0, 0), (before, total - before)))
    starts = [place * stride for place in range(count)]
    windows = np.stack([padded[:, :, start : start + (kernel - 1) * dilation + 1 : dilation] for start in starts], 2)
    expected = np.einsum("nctk,ock->not", windows, values(4, 3, kernel))
    np.testing.assert_allclose(OnnxRunner(loaded.proto, optimize=False)({"x": x})["y"], expected, atol=1e-4)


def test_open_sizes_are_padded_where_the_stride_is_one() -> None:
    for stride, mended in ((1, True), (2, False)):
        attributes = {"auto_pad": "SAME_UPPER", "strides": [stride], "dilations": [2]}
        proto = model(
            [node("Conv", "x w", "y", **attributes)], weights={"w": values(4, 3, 3)}, inputs={"x": [1, 3, "t"]}
        )
        assert load_model(proto).mended is mended


def test_a_file_of_an_opset_that_onnxruntime_has_no_operators_of_runs(tmp_path: Path) -> None:
    proto = model([node("PRelu", "x s", "y")], weights={"s": values(3)}, opset=6)
    save(proto, tmp_path / "m.onnx")
    x = values(2, 3, 8, 8)
    result = OnnxRunner(tmp_path / "m.onnx", optimize=False)({"x": x})["y"]
    np.testing.assert_allclose(result, np.where(x < 0, x * values(3)[:, None, None], x))


def test_padding_without_dilation_stays() -> None:
    proto = model([node("Conv", "x w", "y", auto_pad="SAME_UPPER")], weights={"w": values(4, 3, 3, 3)})
    x = values(1, 3, 8, 8)
    loaded = load_model(proto)
    assert not loaded.mended
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(OnnxRunner(loaded.proto, optimize=False)({"x": x})["y"], expected, atol=1e-5)
