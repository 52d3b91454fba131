"""What old exporters wrote is read in a form that ONNX, ONNX Runtime and TensorRT take, and computes what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, save
from onnx.reference import ReferenceEvaluator

from trtopt.core.errors import InvalidModel
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.proto import opset_version
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
        assert not loaded.mended and len(loaded.proto.graph.node) == 1


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


CHANNELS = values(3, seed=3)
X = values(2, 3, 4, 5)


def old(
    *nodes: NodeProto, opset: int, inputs: dict[str, list[int | str]] | None = None, **weights: NDArray[Any]
) -> ModelProto:
    """x (batch, 3, 4, 5) → y as exporters wrote it before opset 7, with weights that are inputs, too."""
    proto = model(nodes, weights=weights, opset=opset, inputs=inputs or {"x": ["batch", 3, 4, 5]})
    proto.ir_version = 3
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return proto


@pytest.mark.parametrize(
    ("proto", "expected"),
    [
        (old(node("PRelu", "x b", "y"), opset=6, b=CHANNELS), np.where(X < 0, X * CHANNELS[:, None, None], X)),
        (old(node("Reshape", "x", "y", shape=[0, -1]), opset=1), X.reshape(2, -1)),
        (old(node("Concat", "x x", "y"), opset=1), np.concatenate([X, X], 1)),
        (
            old(node("Upsample", "x", "y", height_scale=2.0, width_scale=3.0, mode="nearest"), opset=1),
            X.repeat(2, 2).repeat(3, 3),
        ),
        (
            old(
                node("BatchNormalization", "x g b m v", "y", is_test=1, consumed_inputs=[0, 0, 0, 1, 1], epsilon=0.0),
                opset=1,
                g=CHANNELS,
                b=CHANNELS,
                m=CHANNELS,
                v=np.full(3, 4, np.float32),
            ),
            (X - CHANNELS[:, None, None]) / 2 * CHANNELS[:, None, None] + CHANNELS[:, None, None],
        ),
        (
            old(
                node("Dropout", "x", "d", is_test=1),
                node("Clip", "d", "y", min=0.0, max=1.0, consumed_inputs=[0]),
                opset=1,
            ),
            X.clip(0, 1),
        ),
    ],
    ids=[
        "prelu",
        "reshape",
        "concat",
        "upsample",
        "norm",
        "dropout",
    ],
)
def test_what_is_older_than_opset_7_computes_the_same_in_it(
    proto: ModelProto, expected: NDArray[Any], tmp_path: Path
) -> None:
    save(proto, tmp_path / "m.onnx")
    loaded = load_model(tmp_path / "m.onnx")
    assert loaded.mended and loaded.opset < 7 == opset_version(loaded.proto)
    folded, report = fold(loaded.proto)
    assert not report.problem
    for runner in (OnnxRunner(tmp_path / "m.onnx", optimize=False), OnnxRunner(folded, optimize=False)):
        np.testing.assert_allclose(runner({"x": X})["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (node("Add", "x b", "y", "sum", broadcast=1, axis=1), "Add sum broadcasts along axis 1"),
        (node("Sub", "x b", "y", "less", broadcast=1, axis=-3), "Sub less broadcasts along axis -3"),
        (node("Cast", "x", "y", to="INT32"), "No Adapter From Version [$]5 for Cast"),
    ],
)
def test_what_has_no_form_in_opset_7_is_refused(broken: NodeProto, told: str) -> None:
    with pytest.raises(
        InvalidModel, match=rf"opset 5; TensorRT reads 7 and newer.*{told}.*: export it again at opset 13"
    ):
        load_model(old(broken, opset=5, b=CHANNELS))


def test_padding_without_dilation_stays() -> None:
    proto = model([node("Conv", "x w", "y", auto_pad="SAME_UPPER")], weights={"w": values(4, 3, 3, 3)})
    x = values(1, 3, 8, 8)
    loaded = load_model(proto)
    assert not loaded.mended
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(OnnxRunner(loaded.proto, optimize=False)({"x": x})["y"], expected, atol=1e-5)


@pytest.mark.parametrize("stored", [True, False], ids=["codes", "weights"])
@pytest.mark.parametrize("dead", [True, False])
def test_a_scale_of_0_is_mended_where_all_that_it_scales_is_0(stored: bool, dead: bool) -> None:
    weight = values(4, 3, 3, 3)
    weight[1] = 0 if dead else 1
    scale = np.abs(weight).max((1, 2, 3)) / 127
    scale[1] = 0
    codes = np.rint(weight / np.where(scale, scale, 1).reshape(-1, 1, 1, 1)).astype(np.int8)
    nodes = [] if stored else [node("QuantizeLinear", "v s z", "w", axis=0)]
    nodes += [node("DequantizeLinear", "w s z", "d", axis=0), node("Conv", "x d", "y", "c")]
    weights = {
        "w" if stored else "v": codes if stored else weight,
        "s": scale.astype(np.float32),
        "z": np.zeros(4, np.int8),
    }
    loaded = load_model(model(nodes, weights=weights, opset=19))
    found = next(numpy_helper.to_array(item) for item in loaded.proto.graph.initializer if item.name == "s")
    assert (
        loaded.mended is dead and found[1] == dead and np.array_equal(np.delete(found, 1), np.delete(weights["s"], 1))
    )
    if dead:
        x = values(1, 3, 8, 8, seed=1)
        (y,) = ReferenceEvaluator(loaded.proto).run(None, {"x": x})
        assert not y[:, 1].any() and y[:, 0].any()
