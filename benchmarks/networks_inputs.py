"""What benchmarks/networks.py measures, as files: convolution networks and a transformer, with random weights.

    python benchmarks/networks_inputs.py FOLDER [NAME...] [--modelopt PYTHON]

writes samples.npz (32 crops of photos) and for each network NAME.onnx, NAME.calib.json (its table, of every
tensor) and, with the Python of an environment that has ModelOpt, NAME.modelopt.onnx. BatchNormalization's
statistics are those of 64 crops: with the ones of an untrained network values shrink from layer to layer. What is there isn't
made again.
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from numpy.typing import NDArray

import trtopt
from trtopt.core.values import TensorInfo
from trtopt.data import open_data
from trtopt.data.samples import write_crops
from trtopt.recipes.loader import load_recipe

INPUT = TensorInfo("input", "float32", ("batch", 3, 224, 224))
SAMPLES = 32


def _convnext(channels: tuple[int, ...], depths: tuple[int, ...]) -> Any:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    following = (*channels[1:], None)
    return ConvNeXt([CNBlockConfig(*stage) for stage in zip(channels, following, depths, strict=True)], layer_scale=0.1)


class _Cell(torch.nn.Sequential):  # type: ignore[type-arg]
    """Convolution, BatchNormalization, SiLU."""

    def __init__(self, inside: int, outside: int, kernel: int = 1, stride: int = 1) -> None:
        convolution = torch.nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)
        super().__init__(convolution, torch.nn.BatchNorm2d(outside), torch.nn.SiLU())


class _Stage(torch.nn.Module):
    """YOLOv8's C2f: half of the channels through blocks one after another, and all of their results joined."""

    def __init__(self, inside: int, outside: int, blocks: int, skips: bool) -> None:
        super().__init__()
        half = outside // 2
        self.first, self.last = _Cell(inside, outside), _Cell((2 + blocks) * half, outside)
        pairs = [torch.nn.Sequential(_Cell(half, half, 3), _Cell(half, half, 3)) for _ in range(blocks)]
        self.blocks, self.skips = torch.nn.ModuleList(pairs), skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            made = block(parts[-1])
            parts.append(parts[-1] + made if self.skips else made)
        return self.last(torch.cat(parts, 1))


class _Pyramid(torch.nn.Module):
    """YOLOv8's SPPF: one maximum after another, joined."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = _Cell(channels, channels // 2), _Cell(channels * 2, channels)
        self.pool = torch.nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(torch.nn.Module):
    """Backbone, neck and raw heads as YOLOv8-n's (Jocher et al., 2023); what decodes boxes isn't here."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(
            _Cell(3, 16, 3, 2),
            _Cell(16, 32, 3, 2),
            _Stage(32, 32, 1, True),
            _Cell(32, 64, 3, 2),
            _Stage(64, 64, 2, True),
        )
        self.middle = torch.nn.Sequential(_Cell(64, 128, 3, 2), _Stage(128, 128, 2, True))
        self.deep = torch.nn.Sequential(_Cell(128, 256, 3, 2), _Stage(256, 256, 1, True), _Pyramid(256))
        self.up = torch.nn.Upsample(scale_factor=2)
        self.neck = torch.nn.ModuleList(
            [_Stage(*sizes, 1, False) for sizes in ((384, 128), (192, 64), (192, 128), (384, 256))]
        )
        self.down = torch.nn.ModuleList([_Cell(64, 64, 3, 2), _Cell(128, 128, 3, 2)])
        self.boxes, self.classes = (
            torch.nn.ModuleList(
                torch.nn.Sequential(_Cell(channels, width, 3), _Cell(width, width, 3), torch.nn.Conv2d(width, last, 1))
                for channels in (64, 128, 256)
            )
            for width, last in ((64, 64), (80, 80))
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        small = self.stem(x)
        middle = self.middle(small)
        deep = self.deep(middle)
        joined = self.neck[0](torch.cat([self.up(deep), middle], 1))
        first = self.neck[1](torch.cat([self.up(joined), small], 1))
        second = self.neck[2](torch.cat([self.down[0](first), joined], 1))
        third = self.neck[3](torch.cat([self.down[1](second), deep], 1))
        levels = zip(self.boxes, self.classes, (first, second, third), strict=True)
        return tuple(torch.cat([boxes(level), classes(level)], 1) for boxes, classes, level in levels)


# Smaller ones of a family where the family's smallest takes a builder many minutes.
SMALL: dict[str, Callable[[], Any]] = {
    "convnext_small4": lambda: _convnext((48, 96, 192, 384), (1, 1, 2, 1)),
    "densenet_small": lambda: torchvision.models.DenseNet(32, (4, 6, 8, 6), 64),
    "yolo_n": Yolo,
    "vit_small": lambda: torchvision.models.VisionTransformer(224, 16, 6, 6, 384, 1536),
}
TORCHVISION = (
    "efficientnet_b0",
    "googlenet",
    "mnasnet1_0",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
)


def network(name: str, crops: NDArray[Any]) -> Any:
    torch.manual_seed(0)
    extra = {"init_weights": True, "aux_logits": False} if name == "googlenet" else {}
    module = SMALL[name]() if name in SMALL else torchvision.models.get_model(name, weights=None, **extra)
    if isinstance(module, torchvision.models.VisionTransformer):
        torch.nn.init.normal_(module.heads.head.weight, std=0.02)  # they are zeros, and all results with them
    module.eval()
    norms = [layer for layer in module.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    for layer in norms:
        layer.train()
        layer.momentum = 1.0  # the last batch's own: there is one
    if norms:
        with torch.no_grad():
            module(torch.from_numpy(crops))
    return module.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=sorted([*SMALL, *TORCHVISION]))
    parser.add_argument("--modelopt", metavar="PYTHON")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    files: Sequence[Path] = sorted((given.folder / "crops").glob("*.png"))
    if not files:
        recipe = load_recipe("efficientnet-lite0")
        assert recipe.calibration is not None
        files = write_crops(recipe.calibration, given.folder / "crops")
    crops = np.concatenate([each["input"] for each in open_data([INPUT], images=files, preprocess="imagenet")])
    samples = given.folder / "samples.npz"
    np.savez(samples, input=crops[:SAMPLES])
    for name in given.names:
        model, table = (given.folder / f"{name}.{kind}" for kind in ("onnx", "calib.json"))
        if not model.is_file():
            trtopt.export(network(name, crops), model, inputs={"input": INPUT}, sample=samples)
        if not table.is_file():
            trtopt.calibrate(model, table, data=samples, all_tensors=True)
        other = given.folder / f"{name}.modelopt.onnx"
        if given.modelopt and not other.is_file():
            command = Path(__file__).parent / "modelopt_quantize.py"
            with tempfile.TemporaryDirectory() as scratch:  # for what it leaves beside the model
                copied, made = shutil.copy(model, scratch), Path(scratch, "quantized.onnx")
                done = subprocess.run(
                    [given.modelopt, command, copied, samples, "max", made], capture_output=True, text=True
                )
                if done.returncode == 0:
                    shutil.move(made, other)
                else:
                    print(f"{name}: ModelOpt failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        print(name, flush=True)


if __name__ == "__main__":
    main()
