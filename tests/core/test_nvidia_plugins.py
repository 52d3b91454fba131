"""References of TensorRT's own plugins, against PyTorch's and torchvision's operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch  # noqa: TID251
import torch.nn.functional as F  # noqa: N812, TID251
from custom import detector
from graphs import values
from onnx import ModelProto, helper
from torchvision.ops import batched_nms, nms

import trtopt
from trtopt.core.nvidia_plugins import OPERATORS, deformable_attention, efficient_nms, group_normalization
from trtopt.core.operators import NVIDIAS, known
from trtopt.graph.proto import inferred_values, tensor_info
from trtopt.ort.runner import OnnxRunner

pytestmark = pytest.mark.usefixtures("no_operators")
LEVELS = ((6, 5), (3, 4), (1, 2))


def test_each_is_found_in_any_domain() -> None:
    assert OPERATORS.keys() == set(NVIDIAS)
    assert all(known(domain, name) is OPERATORS[name] for name in NVIDIAS for domain in ("TRT", "trt.plugins"))


def _boxes(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    random = np.random.default_rng(seed)
    corner, size = random.random((2, count, 2), np.float32), random.random((2, count, 2), np.float32) * 0.4 + 0.01
    return np.concatenate([corner, corner + size], -1), random.random((2, count, 3), np.float32)


@pytest.mark.parametrize("agnostic", [False, True])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("most", [200, 7])
def test_detections_are_those_of_torchvision(agnostic: bool, coded: bool, most: int) -> None:
    boxes, scores = _boxes(60)
    given, raw = boxes, scores
    if coded:  # centre and size, logits
        given = np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)
        raw = np.log(scores / (1 - scores)).astype(np.float32)
    options = {"score_threshold": 0.3, "iou_threshold": 0.4, "max_output_boxes": most, "background_class": 1}
    count, corners, best, kinds = efficient_nms(
        given, raw, **options, class_agnostic=int(agnostic), score_activation=int(coded), box_coding=int(coded)
    )
    for image in range(2):
        place, kind = np.nonzero((scores[image] >= 0.3) & (np.arange(3) != 1))
        chosen = torch.tensor(boxes[image][place]), torch.tensor(scores[image][place, kind])
        keep = (nms(*chosen, 0.4) if agnostic else batched_nms(*chosen, torch.tensor(kind), 0.4)).numpy()[:most]
        assert count[image] == len(keep) > 0
        assert np.allclose(best[image, : len(keep)], scores[image][place[keep], kind[keep]], atol=1e-6)
        assert np.array_equal(kinds[image, : len(keep)], kind[keep])
        assert np.allclose(corners[image, : len(keep)], boxes[image][place[keep]], atol=1e-6)
        assert not best[image, len(keep) :].any() and not corners[image, len(keep) :].any()


def test_corners_come_back_as_they_were_given() -> None:
    """As seen on 10.6.0: only where boxes overlap are their corners put in order."""
    boxes, scores = _boxes(60)
    limits: dict[str, Any] = {"score_threshold": 0.3, "iou_threshold": 0.4, "max_output_boxes": 20}
    limits |= {"background_class": -1, "score_activation": 0, "box_coding": 0}
    count, corners, *_ = efficient_nms(boxes, scores, **limits)
    same, mirrored, *_ = efficient_nms(boxes[..., [2, 3, 0, 1]], scores, **limits)
    assert np.array_equal(same, count) and np.array_equal(mirrored, corners[..., [2, 3, 0, 1]])


def test_deformable_attention_is_that_of_the_paper() -> None:
    random = np.random.default_rng(1)
    starts = np.cumsum([0, *(height * width for height, width in LEVELS)])
    value = random.standard_normal((2, starts[-1], 4, 8), np.float32)
    places = random.random((2, 7, 4, 3, 2, 2), np.float32) * 1.4 - 0.2  # some lie outside
    weights = random.random((2, 7, 4, 3, 2), np.float32)
    parts = []
    for level, (height, width) in enumerate(LEVELS):
        part = torch.tensor(value[:, starts[level] : starts[level + 1]]).flatten(2).transpose(1, 2)
        grid = 2 * torch.tensor(places[:, :, :, level]).transpose(1, 2).flatten(0, 1) - 1
        parts.append(F.grid_sample(part.reshape(8, 8, height, width), grid, align_corners=False))
    shares = torch.tensor(weights).transpose(1, 2).reshape(8, 1, 7, 6)
    wanted = (torch.stack(parts, -2).flatten(-2) * shares).sum(-1).view(2, 4, 8, 7).permute(0, 3, 1, 2)
    found = deformable_attention(value, np.array(LEVELS), starts[:-1], places, weights)
    assert np.allclose(found, wanted.numpy(), atol=1e-5)


def test_group_normalization_is_pytorchs() -> None:
    x, scale, bias = values(2, 8, 5, 3), values(1, 8, 1, 1, seed=1), values(1, 8, 1, 1, seed=2)
    wanted = F.group_norm(torch.tensor(x), 4, torch.tensor(scale.reshape(-1)), torch.tensor(bias.reshape(-1)))
    assert np.allclose(group_normalization(x, scale, bias, num_groups=4), wanted.numpy(), atol=1e-5)


def test_a_detector_that_ends_in_a_plugin_is_calibrated_and_run(tmp_path: Path) -> None:
    net = detector()
    shapes = {name: tensor_info(value) for name, value in inferred_values(net).items()}
    assert shapes["boxes"].shape == ("n", 10, 4) and shapes["count"].dtype == "int32"
    x = values(40, 3, 16, 16)
    results = OnnxRunner(net, optimize=True)({"x": x})
    assert results["count"].dtype == np.int32 and 0 < results["count"].mean() <= 10
    onnx.save(net, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=x)
    table = trtopt.calibrate(tmp_path / "net.onnx", tmp_path / "t.calib.json", data=tmp_path / "data.npz").table
    assert "x" in table.amax
    other = ModelProto()
    other.CopyFrom(net)
    (node,) = [item for item in other.graph.node if item.name == "nms"]
    node.attribute.append(helper.make_attribute("made_up", 1))
    report = trtopt.check(other)
    assert any("made_up" in item.message or "no plugin" in item.message for item in report.findings)
