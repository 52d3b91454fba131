from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx.parser
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from skimage import data

from trtopt.calibration.expected import KEY, SPREAD, check_preprocessing, first_layers, statistics
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


def square(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The middle, 224 pixels wide, channels first."""
    ratio = 224 / min(image.shape[:2])
    size = tuple(max(224, round(side * ratio)) for side in image.shape[1::-1])
    image = cv2.resize(image, size, interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR)
    top, left = (image.shape[0] - 224) // 2, (image.shape[1] - 224) // 2
    return np.ascontiguousarray(image[top : top + 224, left : left + 224].transpose(2, 0, 1), np.float32)


def photos() -> list[NDArray[np.float32]]:
    """The middle squares of eight photos, 0 to 255, channels first."""
    names = ("astronaut", "chelsea", "coffee", "rocket")
    pattern = package_file("package:foolbox/data/imagenet_0[0-3]*")
    files = sorted(pattern.parent.glob(pattern.name))
    images = [getattr(data, name)() for name in names] + [cv2.imread(str(path))[..., ::-1] for path in files]
    return [square(image) for image in images]


def fed(name: str, prepare: Pixels) -> list[dict[str, NDArray[Any]]]:
    return [{name: prepare(photo)[None].astype(np.float32)} for photo in photos()]


def with_norm(trained: bool = True, batch: str = "n") -> ModelProto:
    """A network with a BatchNormalization whose statistics are those of photos prepared by RIGHT."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> net (float[{batch}, 3, h, w] x) => (float[{batch}, 8, i, j] y) {{
            [conv] a = Conv <strides = [2, 2]> (x, weight)
            [norm] b = BatchNormalization (a, scale, bias, mean, var)
            [relu] y = Relu (b)
        }}"""
    )
    weight = np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32) / 4
    values = {"weight": weight, "scale": np.ones(8), "bias": np.zeros(8), "mean": np.zeros(8), "var": np.ones(8)}
    if trained:
        seen = np.concatenate([_convolved(feed["x"], weight) for feed in fed("x", RIGHT)])
        values |= {"mean": seen.mean((0, 2, 3)), "var": seen.var((0, 2, 3))}
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    return model


def _convolved(image: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), (3, 3), (2, 3))[:, :, ::2, ::2]
    return np.einsum("ncijkl,ockl->noij", windows, weight, optimize=True)


def test_the_right_preprocessing_passes_and_swapped_colours_cannot_be_told() -> None:
    model = with_norm()
    found = check_preprocessing(model, fed("x", RIGHT))
    assert found["checked"]
    assert "BatchNormalization norm" in found["by"]
    assert found["shift"] < 0.01
    assert found["spread"] == pytest.approx(1, abs=0.01)
    assert "warning" not in found
    assert "warning" not in check_preprocessing(model, fed("x", lambda x: RIGHT(x[::-1])))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_preprocessing_is_told(name: str) -> None:
    found = check_preprocessing(with_norm(), fed("x", WRONG[name]))
    assert "`preprocess=`" in found["warning"]
    assert ("0..255" in found["warning"]) == (name in ("0..255", "mean only"))


def test_inverted_photos_are_told_by_their_mean() -> None:
    found = check_preprocessing(with_norm(), fed("x", lambda x: RIGHT(255 - x)))
    assert abs(np.log(found["spread"])) < SPREAD
    assert "standard deviations from where they lay" in found["warning"]


def test_an_untrained_normalization_says_nothing() -> None:
    assert statistics(with_norm(trained=False)) is None


def test_folded_models_tell_raw_pixels_alone() -> None:
    folded, _ = fold(with_norm())
    assert [node.op_type for node in folded.graph.node] == ["Conv", "Relu"]
    assert statistics(folded) is None
    assert "0..255" in check_preprocessing(folded, fed("x", WRONG["0..255"]))["warning"]
    for name in ("0..1", "imagenet"):
        assert "warning" not in check_preprocessing(folded, fed("x", WRONG[name]))
    assert "warning" not in check_preprocessing(folded, fed("x", RIGHT))


@pytest.fixture(scope="module")
def lite0(exported: Callable[[str], Path]) -> ModelProto:
    return onnx.load(exported("efficientnet-lite0"))


def test_an_export_keeps_what_its_folded_normalization_knew(lite0: ModelProto) -> None:
    assert not any(node.op_type == "BatchNormalization" for node in lite0.graph.node)
    assert KEY in {item.key for item in lite0.metadata_props}
    for model in (lite0, fold(lite0)[0]):
        found = check_preprocessing(model, fed("input", RIGHT))
        assert found["by"] == "BatchNorm2d, recorded by trtopt export"
        assert "warning" not in found


@pytest.mark.parametrize("make", [with_norm, lambda: with_norm(trained=False), lambda: fold(with_norm())[0]])
def test_the_first_layers_are_all_it_takes(make: Callable[[], ModelProto]) -> None:
    model = make()
    first = first_layers(model)
    assert "Relu" not in {node.op_type for node in first.graph.node}
    for name in ("0..255", "0..1"):
        assert check_preprocessing(first, fed("x", WRONG[name])) == check_preprocessing(model, fed("x", WRONG[name]))


def test_wrong_preprocessing_is_told_by_a_large_models_first_layers(lite0: ModelProto) -> None:
    first = first_layers(lite0)
    assert first.ByteSize() < lite0.ByteSize() / 100
    for prepare in WRONG.values():
        assert "`preprocess=`" in check_preprocessing(first, fed("input", prepare))["warning"]


def test_a_damaged_record_is_no_record(lite0: ModelProto) -> None:
    for text in ("{", "[]", '{"tensor": "nowhere", "mean": [0], "std": [1], "source": "x"}'):
        model = ModelProto()
        model.CopyFrom(lite0)
        next(item for item in model.metadata_props if item.key == KEY).value = text
        assert statistics(model) is None


def test_what_cannot_be_looked_at_is_said() -> None:
    assert check_preprocessing(with_norm(), []) == {"checked": False, "reason": "no input looks like an image"}
    model = with_norm()
    del model.graph.node[:2]
    model.graph.node[0].input[0] = "x"
    for part in (model, first_layers(model)):
        assert "no BatchNormalization" in check_preprocessing(part, fed("x", RIGHT))["reason"]


def test_a_fixed_batch_is_filled() -> None:
    assert check_preprocessing(with_norm(batch="3"), fed("x", RIGHT))["spread"] == pytest.approx(1, abs=0.01)
