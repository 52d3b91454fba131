"""Small networks with what engines were reported to compute wrong in 2026, with random weights, for benchmarks/certify.py.

    python benchmarks/certify_inputs.py FOLDER [NAME...]

writes NAME.onnx and NAME.npz (32 inputs), batches open. T: NVIDIA/TensorRT.
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

import trtopt

SAMPLES = 32


class Part(nn.Module):
    """A model of transformers that gives some of its outputs."""

    def __init__(self, inner: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.inner, self.outputs = inner, outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.inner(x)
        return tuple(getattr(found, name) for name in self.outputs)


def segformer() -> nn.Module:
    """T#4853: wrong for batches above 1, in FP32, too."""
    sizes = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "decoder_hidden_size": 64}
    config = transformers.SegformerConfig(num_labels=5, num_attention_heads=[1, 2, 4, 8], **sizes)
    return Part(transformers.SegformerForSemanticSegmentation(config), "logits")


def detr() -> nn.Module:
    """T#4813: equal rows of a batch with different results, in FP32."""
    backbone = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 20}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        **sizes,
        **heads,
    )
    return Part(transformers.DetrForObjectDetection(config), "logits", "pred_boxes")


def dino() -> nn.Module:
    """T#4742, T#4723: far from the model, one version right and the next one not."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64, "patch_size": 8}
    return Part(transformers.Dinov2Model(transformers.Dinov2Config(**sizes)), "last_hidden_state", "pooler_output")


class Views(nn.Module):
    """T#4854: convolution, activation and residual that reads a strided view of a Concat."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1)
        self.first = nn.ModuleList(nn.Conv2d(16, 16, 3, 1, 1) for _ in range(3))
        self.second = nn.ModuleList(nn.Conv2d(16, 16, 3, 1, 1) for _ in range(3))
        self.last = nn.Conv2d(80, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(F.silu(self.stem(x)).chunk(2, 1))
        for first, second in zip(self.first, self.second):
            joined = torch.cat(parts, 1)
            view = joined[:, joined.shape[1] - 16 :]
            parts.append(view + F.silu(second(F.silu(first(view)))))
        return self.last(torch.cat(parts, 1))


class Warps(nn.Module):
    """rerun-io/examples-monorepo#88: many GridSamples one behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.flow, self.mix = nn.Conv2d(3, 2, 3, 1, 1), nn.Conv2d(3, 3, 1)
        side = torch.linspace(-1, 1, 32)
        self.register_buffer("grid", torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)[None])

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for step in range(16):
            flow = 0.1 * torch.tanh(self.flow(total)).permute(0, 2, 3, 1)
            total = total + F.grid_sample(x, self.grid + flow, align_corners=bool(step % 2)) / 16
        return self.mix(total)


class Masked(nn.Module):
    """T#4732: an attention layer, with an additive mask made of lengths; T#4822: lengths computed as whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(8, 64), nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.embed(x)
        hidden = torch.arange(x.shape[1]) >= length
        mask = torch.where(hidden, -1e4, 0.0)[:, None].repeat_interleave(4, 0).expand(-1, x.shape[1], -1)
        tokens, _ = self.attend(tokens, tokens, tokens, attn_mask=mask, need_weights=False)
        kept = tokens.masked_fill(hidden[..., None], 0).sum(1) / length
        return self.head(kept), torch.div(length + 1, 2, rounding_mode="floor")


class Partial(nn.Module):
    """T#4820: YOLOv10's attention on half of the channels, with depthwise convolutions around it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.SiLU())
        self.qkv, self.position = nn.Conv2d(32, 64, 1), nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.last, self.wide = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 7, 1, 3, groups=64)

    def forward(self, x: Tensor) -> Tensor:
        kept, used = self.stem(x).chunk(2, 1)
        batch, _, height, width = used.shape
        query, key, value = self.qkv(used).view(batch, 2, 32, height * width).split([8, 8, 16], 2)
        shares = (query.transpose(-2, -1) @ key * 8**-0.5).softmax(-1)
        attended = (value @ shares.transpose(-2, -1)).view(batch, 32, height, width)
        attended = attended + self.position(value.reshape(batch, 32, height, width))
        return self.wide(self.last(torch.cat([kept, used + attended], 1)))


class Windows(nn.Module):
    """SAM3-TENSORRT-PYTHON#9: the last rows of a batch of 12; attention in windows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 4, 4), nn.LayerNorm(64)
        self.qkv, self.last, self.bias = nn.Linear(64, 192), nn.Linear(64, 64), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).permute(0, 2, 3, 1)
        batch, side = tokens.shape[0], tokens.shape[1] // 4
        parts = tokens.view(batch, side, 4, side, 4, 64).transpose(2, 3).reshape(-1, 16, 64)
        query, key, value = self.qkv(self.norm(parts)).view(-1, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = ((query @ key.transpose(-2, -1)) * 0.25 + self.bias).softmax(-1) @ value
        parts = parts + self.last(mixed.transpose(1, 2).reshape(-1, 16, 64))
        return parts.view(batch, side, side, 4, 4, 64).transpose(2, 3).reshape(batch, 4 * side, 4 * side, 64)


class Splat(nn.Module):
    """FB-BEV#67: features gathered and added into the cells of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.last = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 8, 3, 1, 1)
        self.register_buffer("cells", torch.randint(0, 256, (1, 256), generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu(self.features(x)).flatten(2)
        cells = self.cells[:, None].expand(found.shape[0], 16, -1)
        bird = torch.zeros_like(found).scatter_add(2, cells, found)
        return self.last(bird.view(-1, 16, 16, 16))


IMAGE = {"x": (3, 64, 64)}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = {
    "segformer": (segformer, IMAGE),
    "detr": (detr, IMAGE),
    "dino": (dino, IMAGE),
    "views": (Views, IMAGE),
    "warps": (Warps, {"x": (3, 32, 32)}),
    "masked": (Masked, {"x": (24, 8), "length": (1,)}),
    "partial": (Partial, IMAGE),
    "windows": (Windows, IMAGE),
    "splat": (Splat, {"x": (3, 32, 32)}),
}


def made_up(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: random.standard_normal((SAMPLES, *shape), np.float32) for name, shape in shapes.items()
    }
    if "length" in shapes:
        arrays["length"] = random.integers(4, 25, (SAMPLES, 1))
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        maker, shapes = NETWORKS[name]
        torch.manual_seed(0)
        module, data = maker().eval(), made_up(shapes)
        inputs = [
            f"{key}:{'x'.join(map(str, ('batch', *shape)))}{':int64' * (key == 'length')}"
            for key, shape in shapes.items()
        ]
        sample = {key: array[:2] for key, array in data.items()}
        trtopt.export(module, given.folder / f"{name}.onnx", inputs=inputs, sample=sample)
        np.savez(given.folder / f"{name}.npz", **data)
        said = inspect.getdoc(maker if inspect.isfunction(maker) else type(module)) or ""
        print(f"{name}: {said}", flush=True)


if __name__ == "__main__":
    main()
