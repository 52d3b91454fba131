"""What exporters write and ONNX Runtime or TensorRT refuses is read in a form that they take, and computes what was meant."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, values
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from trtopt.core.errors import InvalidModel
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner


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


def test_an_opset_below_7_is_refused() -> None:
    with pytest.raises(InvalidModel, match="is of opset 6; TensorRT reads 7 and newer: export it again at opset 13"):
        load_model(model([node("Relu", "x", "y")], opset=6))


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


@pytest.mark.parametrize("dead", [True, False])
def test_one_scale_of_0_for_all_is_mended_where_all_is_0(dead: bool) -> None:
    weight = np.full((4, 3, 3, 3), 0 if dead else 1, np.int8)
    nodes = [node("DequantizeLinear", "w s", "d"), node("Conv", "x d c", "y", "c")]
    loaded = load_model(model(nodes, weights={"w": weight, "s": np.float32(0), "c": values(4)}, opset=13))
    found = next(numpy_helper.to_array(item) for item in loaded.proto.graph.initializer if item.name == "s")
    assert loaded.mended is dead and found == dead and found.shape == ()


def test_a_plugin_in_the_name_of_onnx_has_a_domain_of_its_own() -> None:
    """onnx-graphsurgeon writes them so, and onnx's checker refuses the model."""
    nodes = [node("Relu", "x", "r"), node("EfficientNMS_TRT", "r r", "y", "nms", max_output_boxes=9)]
    loaded = load_model(model(nodes))
    assert loaded.mended and [item.domain for item in loaded.proto.graph.node] == ["", "trt.plugins"]
    assert not load_model(model(nodes[:1], outputs={"r": None})).mended
    with pytest.raises(InvalidModel, match="No Op registered for Gelu"):  # ONNX's own, of a newer opset
        load_model(model([node("Gelu", "x", "y")], opset=17))
