from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from skimage import data
from test_quality import read, resized

from trtopt.calibration.expected import KEY, SPREAD, examine, first_layers, statistics
from trtopt.graph.passes.fold import fold
from trtopt.recipes.loader import package_file

Pixels = Callable[[NDArray[np.float32]], NDArray[np.float32]]
MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]
RIGHT: Pixels = lambda x: (x - 127) / 128  # noqa: E731
WRONG: dict[str, Pixels] = {
    "0..255": lambda x: x,
    "mean only": lambda x: x - 255 * MEAN,
    "0..1": lambda x: x / 255,
    "imagenet": lambda x: (x / 255 - MEAN) / STD,
    "twice": lambda x: RIGHT(RIGHT(x)),
}


def photos() -> list[NDArray[np.float32]]:
    """The middle squares of eight photos, 0 to 255, channels first."""
    names = ("astronaut", "chelsea", "coffee", "rocket")
    pattern = package_file("package:foolbox/data/imagenet_0[0-3]*")
    files = sorted(pattern.parent.glob(pattern.name))
    return [resized(getattr(data, name)(), 224) for name in names] + [resized(read(path), 224) for path in files]


def fed(name: str, prepare: Pixels) -> list[dict[str, NDArray[Any]]]:
    return [{name: prepare(photo)[None].astype(np.float32)} for photo in photos()]


def with_norm(trained: bool = True, raw: bool = False) -> ModelProto:
    """x (n, 3, h, w) → Conv → BatchNormalization → Relu, statistics as photos prepared by RIGHT give them."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((8, 3, 3, 3)).astype(np.float32) / 4
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "conv", strides=[2, 2]),
        helper.make_node("BatchNormalization", ["a", "scale", "bias", "mean", "var"], ["b"], "norm"),
        helper.make_node("Relu", ["b"], ["y"], "relu"),
    ]
    values = {"w": weight, "scale": np.ones(8), "bias": np.zeros(8), "mean": np.zeros(8), "var": np.ones(8)}
    shape = ["n", 3, "h", "w"]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if trained:
        import onnxruntime

        part = onnx.ModelProto()
        part.CopyFrom(model)
        del part.graph.output[:]
        part.graph.output.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, None))
        session = onnxruntime.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])
        found = np.concatenate([session.run(None, feed)[0] for feed in fed("x", RIGHT)])
        for name, value in (("mean", found.mean((0, 2, 3))), ("var", found.var((0, 2, 3)))):
            tensor = next(item for item in model.graph.initializer if item.name == name)
            tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))
    return model


def test_the_right_preprocessing_passes_and_swapped_colours_cannot_be_told() -> None:
    model = with_norm()
    found = examine(model, fed("x", RIGHT))
    assert found["checked"]
    assert "BatchNormalization norm" in found["by"]
    assert found["shift"] < 0.01
    assert found["spread"] == pytest.approx(1, abs=0.01)
    assert "warning" not in found
    assert "warning" not in examine(model, fed("x", lambda x: RIGHT(x[::-1])))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_preprocessing_is_told(name: str) -> None:
    found = examine(with_norm(), fed("x", WRONG[name]))
    assert "`preprocess=`" in found["warning"]
    assert ("0..255" in found["warning"]) == (name in ("0..255", "mean only"))


def test_inverted_photos_are_told_by_their_mean() -> None:
    found = examine(with_norm(), fed("x", lambda x: RIGHT(255 - x)))
    assert abs(np.log(found["spread"])) < SPREAD
    assert "standard deviations from where they lay" in found["warning"]


def test_an_untrained_normalization_says_nothing() -> None:
    assert statistics(with_norm(trained=False)) is None


def test_folded_models_tell_raw_pixels_alone() -> None:
    folded, _ = fold(with_norm())
    assert [node.op_type for node in folded.graph.node] == ["Conv", "Relu"]
    assert statistics(folded) is None
    assert "0..255" in examine(folded, fed("x", WRONG["0..255"]))["warning"]
    for name in ("0..1", "imagenet"):
        assert "warning" not in examine(folded, fed("x", WRONG[name]))
    assert "warning" not in examine(folded, fed("x", RIGHT))


@pytest.fixture(scope="module")
def lite0(exported: Callable[[str], Path]) -> ModelProto:
    return onnx.load(exported("efficientnet-lite0"))


def test_an_export_keeps_what_its_folded_normalization_knew(lite0: ModelProto) -> None:
    assert not any(node.op_type == "BatchNormalization" for node in lite0.graph.node)
    assert KEY in {item.key for item in lite0.metadata_props}
    for model in (lite0, fold(lite0)[0]):
        found = examine(model, fed("input", RIGHT))
        assert found["by"] == "BatchNorm2d, recorded by trtopt export"
        assert "warning" not in found


@pytest.mark.parametrize("name", WRONG)
def test_wrong_preprocessing_of_real_weights_is_told(lite0: ModelProto, name: str) -> None:
    assert "`preprocess=`" in examine(lite0, fed("input", WRONG[name]))["warning"]


@pytest.mark.parametrize("make", [with_norm, lambda: with_norm(trained=False), lambda: fold(with_norm())[0]])
def test_the_first_layers_are_all_it_takes(make: Callable[[], ModelProto]) -> None:
    model = make()
    first = first_layers(model)
    assert "Relu" not in {node.op_type for node in first.graph.node}
    for name in ("0..255", "0..1"):
        assert examine(first, fed("x", WRONG[name])) == examine(model, fed("x", WRONG[name]))


def test_a_large_models_first_layers_are_small(lite0: ModelProto) -> None:
    first = first_layers(lite0)
    assert first.ByteSize() < lite0.ByteSize() / 100
    for name in WRONG:
        assert examine(first, fed("input", WRONG[name])) == examine(lite0, fed("input", WRONG[name]))


def test_a_damaged_record_is_no_record(lite0: ModelProto) -> None:
    for text in ("{", "[]", '{"tensor": "nowhere", "mean": [0], "std": [1], "source": "x"}'):
        model = ModelProto()
        model.CopyFrom(lite0)
        next(item for item in model.metadata_props if item.key == KEY).value = text
        assert statistics(model) is None


def test_what_cannot_be_looked_at_is_said() -> None:
    assert examine(with_norm(), []) == {"checked": False, "reason": "no input looks like an image"}
    model = with_norm()
    del model.graph.node[:2]
    model.graph.node[0].input[0] = "x"
    for part in (model, first_layers(model)):
        assert "no BatchNormalization" in examine(part, fed("x", RIGHT))["reason"]


def test_a_fixed_batch_is_filled() -> None:
    model = with_norm()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    assert examine(model, fed("x", RIGHT))["spread"] == pytest.approx(1, abs=0.01)
