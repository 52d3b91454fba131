"""What benchmarks/custom.py measures: networks with a custom operator, and the same in standard ones, with PyTorch's results.

    python benchmarks/custom_inputs.py FOLDER

writes for each of `swish` (`trtopt init operator`'s Swish, its slopes drawn), `deform` (three layers of multi-scale
deformable attention on two levels) and `normgelu` (LayerNormalization and GELU in one) NAME.onnx, NAME.standard.onnx,
NAME.npz (64 inputs) and NAME.expected.npz. And two networks for TensorRT's own plugins, with their data: `detect` (a YOLO with
EfficientNMS_TRT) and `heads` (a Mask R-CNN's heads on RoiAlign, boxes as an input).
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import torchvision
from networks_inputs import Yolo
from numpy.typing import NDArray
from torch import nn

import trtopt
from trtopt.core import nvidia_plugins

INPUT = ("batch", 3, 128, 128)


@torch.library.custom_op("acme::deform", mutates_args=())
def deform(value: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return _deform(value, places, weights, sizes)


@deform.register_fake
def _(value: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return value.new_empty(places.shape[0], places.shape[1], value.shape[2] * value.shape[3])


def _deform(value: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """As the paper's authors write it without a kernel: one grid_sample a level."""
    queries, heads, levels, points = weights.shape[1:]
    areas = [sizes[2 * level] * sizes[2 * level + 1] for level in range(levels)]
    parts = []
    for level, part in enumerate(value.split(areas, 1)):
        grid = part.flatten(2).transpose(1, 2).reshape(-1, value.shape[3], sizes[2 * level], sizes[2 * level + 1])
        place = 2 * places[:, :, :, level].transpose(1, 2).reshape(-1, queries, points, 2) - 1
        parts.append(F.grid_sample(grid, place, align_corners=False))
    shares = weights.transpose(1, 2).reshape(-1, 1, queries, levels * points)
    gathered = (torch.stack(parts, -2).flatten(-2) * shares).sum(-1)
    return gathered.reshape(-1, heads * value.shape[3], queries).transpose(1, 2)


@torch.library.custom_op("acme::swish", mutates_args=())
def swish(x: torch.Tensor, slope: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * x * torch.sigmoid(slope * x)


@swish.register_fake
def _(x: torch.Tensor, slope: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.empty_like(x)


class Swish(nn.Module):
    def __init__(self, channels: int, custom: bool) -> None:
        super().__init__()
        self.slope, self.custom = nn.Parameter(0.5 + torch.rand(1, channels, 1, 1)), custom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swish(x, self.slope, 1.2) if self.custom else 1.2 * x * torch.sigmoid(self.slope * x)


def swishes(custom: bool) -> nn.Module:
    """Convolutions with the activation behind each."""
    wide = (3, 32, 64, 64, 128, 128)
    layers = [
        layer
        for place, (inside, outside) in enumerate(itertools.pairwise(wide))
        for layer in (nn.Conv2d(inside, outside, 3, 2 - place % 2, 1), Swish(outside, custom))
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))


@torch.library.custom_op("acme::normgelu", mutates_args=())
def normgelu(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, scale.shape, scale, bias, eps))


@normgelu.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return torch.empty_like(x)


class Mixer(nn.Module):
    """Layers of a feed-forward network on 256 patches, each with LayerNormalization and GELU between its products."""

    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.custom, self.stem = custom, nn.Conv2d(3, 256, 8, 8)
        self.wide, self.narrow = (
            nn.ModuleList(nn.Linear(*sizes) for _ in range(4)) for sizes in ((256, 512), (512, 256))
        )
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(512) for _ in range(4)), nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        for wide, norm, narrow in zip(self.wide, self.norms, self.narrow):
            values = wide(tokens)
            values = normgelu(values, norm.weight, norm.bias) if self.custom else F.gelu(norm(values))
            tokens = tokens + narrow(values)
        return self.head(tokens.mean(1))


class Attention(nn.Module):
    """A layer of Deformable DETR's encoder: every position looks at `points` places of each level around its own."""

    def __init__(self, custom: bool, channels: int = 128, heads: int = 8, points: int = 4) -> None:
        super().__init__()
        self.custom, self.heads, self.points = custom, heads, points
        self.offsets, self.weights = (nn.Linear(channels, heads * 2 * points * size) for size in (2, 1))
        self.value, self.result, self.norm = (
            nn.Linear(channels, channels),
            nn.Linear(channels, channels),
            nn.LayerNorm(channels),
        )

    def forward(self, tokens: torch.Tensor, own: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        count = tokens.shape[1]
        offsets = self.offsets(tokens).view(-1, count, self.heads, 2, self.points, 2)
        weights = self.weights(tokens).view(-1, count, self.heads, 2 * self.points).softmax(-1)
        value = self.value(tokens).view(-1, count, self.heads, tokens.shape[2] // self.heads)
        places = own + offsets * 0.05
        weights = weights.view(-1, count, self.heads, 2, self.points)
        gathered = (deform if self.custom else _deform)(value, places, weights, sizes)
        return self.norm(tokens + self.result(gathered))


class Deform(nn.Module):
    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.ReLU(), nn.Conv2d(64, 128, 3, 1, 1), nn.ReLU())
        self.down = nn.Conv2d(128, 128, 3, 2, 1)
        self.layers = nn.ModuleList(Attention(custom) for _ in range(3))
        self.head = nn.Linear(128, 100)
        self.sizes = [32, 32, 16, 16]
        own = [
            torch.stack(
                torch.meshgrid(*((torch.arange(size) + 0.5) / size for size in (side, side)), indexing="xy"), -1
            )
            for side in (32, 16)
        ]
        self.register_buffer("own", torch.cat([item.reshape(-1, 2) for item in own])[None, :, None, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.stem(x)
        tokens = torch.cat([item.flatten(2).transpose(1, 2) for item in (fine, self.down(fine))], 1)
        for layer in self.layers:
            tokens = layer(tokens, self.own, self.sizes)
        return self.head(tokens.mean(1))


@torch.library.custom_op("TRT::EfficientNMS_TRT", mutates_args=())
def efficient_nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    score_threshold: float,
    iou_threshold: float,
    max_output_boxes: int,
    background_class: int,
    score_activation: int,
    box_coding: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = nvidia_plugins.efficient_nms(
        boxes.numpy(),
        scores.numpy(),
        score_threshold=score_threshold,
        iou_threshold=iou_threshold,
        max_output_boxes=max_output_boxes,
        background_class=background_class,
        score_activation=score_activation,
        box_coding=box_coding,
    )
    a, b, c, d = map(torch.from_numpy, found)
    return a, b, c, d


@efficient_nms.register_fake
def _(
    boxes: torch.Tensor, scores: torch.Tensor, score: float, overlap: float, max_output_boxes: int, *_: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    whole, batch, most = {"dtype": torch.int32}, boxes.shape[0], max_output_boxes
    count, classes = boxes.new_empty(batch, 1, **whole), boxes.new_empty(batch, most, **whole)
    return count, boxes.new_empty(batch, most, 4), boxes.new_empty(batch, most), classes


class Detector(nn.Module):
    """benchmarks/networks_inputs.py's YOLO, its boxes decoded from distributions of distances, then chosen."""

    def __init__(self, side: int = 128) -> None:
        super().__init__()
        self.raw = Yolo()
        strides = (8, 16, 32)
        places = [torch.arange(side // stride) + 0.5 for stride in strides]
        grids = [torch.stack(torch.meshgrid(place, place, indexing="xy")).flatten(1) for place in places]
        self.register_buffer("points", torch.cat(grids, 1)[None])
        sizes = [torch.full((1, 1, len(place) ** 2), stride) for place, stride in zip(places, strides)]
        self.register_buffer("strides", torch.cat(sizes, 2))
        self.register_buffer("bins", torch.arange(16.0).view(1, 1, 16, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = torch.cat([level.flatten(2) for level in self.raw(x)], 2)
        apart = (found[:, :64].unflatten(1, (4, 16)).softmax(2) * self.bins).sum(2)
        corners = torch.cat([self.points - apart[:, :2], self.points + apart[:, 2:]], 1) * self.strides
        return efficient_nms(corners.transpose(1, 2), found[:, 64:].sigmoid().transpose(1, 2), 0.5, 0.5, 50, -1, 0, 0)


class Heads(nn.Module):
    """Features of a ResNet-18, eight boxes an image, classes and masks of each."""

    def __init__(self) -> None:
        super().__init__()
        whole = torchvision.models.resnet18()
        self.features = nn.Sequential(
            whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1, whole.layer2, whole.layer3
        )
        self.lateral = nn.Conv2d(256, 128, 1)
        self.classes = nn.Sequential(nn.Flatten(), nn.Linear(128 * 49, 256), nn.ReLU(), nn.Linear(256, 81))
        self.masks = nn.Sequential(
            nn.Conv2d(128, 128, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(128, 64, 2, 2), nn.ReLU(), nn.Conv2d(64, 8, 1)
        )

    def forward(self, x: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, count = boxes.shape[:2]
        image = torch.arange(batch, dtype=boxes.dtype)[:, None].expand(batch, count).reshape(-1, 1)
        rois = torch.cat([image, boxes.reshape(-1, 4)], 1)
        parts = torchvision.ops.roi_align(self.lateral(self.features(x)), rois, (7, 7), 1 / 16, 2, True)
        return self.classes(parts).view(batch, count, 81), self.masks(parts).view(batch, count, 8, 14, 14)


def detectors(folder: Path, x: NDArray[np.float32]) -> None:
    corner = 88 * np.random.default_rng(1).random((len(x), 8, 2), np.float32)
    data: dict[str, dict[str, Any]] = {
        "detect": {"x": x},
        "heads": {"x": x, "boxes": np.concatenate([corner, corner + 40], 2)},
    }
    for name, maker in (("detect", Detector), ("heads", Heads)):
        torch.manual_seed(0)
        module = maker()
        with torch.no_grad():  # statistics of BatchNormalization as a trained network's: of its inputs
            (module.raw if name == "detect" else module.features)(torch.from_numpy(x[:32]))
        shapes = {key: ("batch", *array.shape[1:]) for key, array in data[name].items()}
        # Among scores of random weights, which are next to equal, last bits choose.
        trtopt.export(module.eval(), folder / f"{name}.onnx", inputs=shapes, verify=name != "detect")
        np.savez(folder / f"{name}.npz", **data[name])
        print(name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Any] = {"swish": swishes, "deform": Deform, "normgelu": Mixer}
    samples = np.random.default_rng(0).standard_normal((64, *INPUT[1:]), np.float32)
    for name, maker in makers.items():
        for custom in (True, False):
            torch.manual_seed(0)
            module = maker(custom).eval()
            trtopt.export(module, folder / f"{name}{'' if custom else '.standard'}.onnx", inputs={"x": INPUT})
        np.savez(folder / f"{name}.npz", x=samples)
        with torch.no_grad():
            np.savez(folder / f"{name}.expected.npz", output=module(torch.from_numpy(samples)).numpy())
        print(name, flush=True)
    detectors(folder, samples)
    subprocess.run([sys.executable, Path(__file__).parent / "custom" / "normgelu.py", folder], check=True)


if __name__ == "__main__":
    main()
