"""Take ordinary models through all commands as a new user would, and check each result without trtopt.

    .venv-test/bin/python scripts/ordinary_models.py out [NAME …] [--table out/table.md]

Every model is a module of PyTorch with drawn weights. The commands run as they are typed: export, check --fix, build --int8 and
--fp16 (TensorRT-RTX for sm89, no GPU needed), inspect, verify, tune, sensitivity, run, report, deploy triton. Beside them stand
figures of our own: PyTorch, and ONNX Runtime with its optimizations off, on the graph that each build kept, sample by sample. A
figure of trtopt's that differs from these, a result in the wrong place, or an internal error is printed, and the status is 1.
"""

# ruff: noqa: E501, TID251  (a line a model; PyTorch makes and judges them)
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional

COUNT = 40  # samples
Arrays = dict[str, np.ndarray]


# The models ----------------------------------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """Five inputs of one dimension: ids and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.genre = nn.Embedding(500, 32), nn.Embedding(900, 32), nn.Embedding(20, 16)
        self.left = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 24))
        self.right = nn.Sequential(nn.Linear(49, 64), nn.ReLU(), nn.Linear(64, 24))

    def forward(self, user: Tensor, item: Tensor, genre: Tensor, age: Tensor, price: Tensor) -> tuple[Tensor, Tensor]:
        a = functional.normalize(self.left(torch.cat([self.user(user), age[:, None]], 1)), dim=1)
        b = functional.normalize(self.right(torch.cat([self.item(item), self.genre(genre), price[:, None]], 1)), dim=1)
        return (a * b).sum(1), a


class Keyword(nn.Module):
    """Convolutions and a GRU over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 24, 3, (2, 1), 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3, (2, 1), 1), nn.ReLU()
        )
        self.gru, self.head = nn.GRU(32 * 10, 64, batch_first=True), nn.Linear(64, 12)

    def forward(self, mel: Tensor) -> Tensor:
        features = self.conv(mel).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.gru(features)[0][:, -1])


class UNet(nn.Module):
    """Segmentation with open sizes."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.BatchNorm2d(b),
                nn.ReLU(),
            )

        self.down, self.mid, self.up = block(3, 24), block(24, 48), block(48 + 24, 24)
        self.deconv, self.head = nn.ConvTranspose2d(48, 48, 2, 2), nn.Conv2d(24, 3, 1)

    def forward(self, scan: Tensor) -> Tensor:
        first = self.down(scan)
        return self.head(self.up(torch.cat([self.deconv(self.mid(functional.max_pool2d(first, 2))), first], 1)))


class Heads(nn.Module):
    """A detector's raw heads: batch × anchors rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(32, 48, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(48, 64, 3, 2, 1),
            nn.SiLU(),
        )
        self.boxes, self.scores = nn.Conv2d(64, 4, 1), nn.Conv2d(64, 16, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(image)
        return self.boxes(features).flatten(2).permute(0, 2, 1), self.scores(features).flatten(2).permute(
            0, 2, 1
        ).sigmoid()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.n1(x), mask)
        return x + self.mlp(self.n2(x))


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position = nn.Conv2d(3, 64, 8, 8), nn.Parameter(torch.randn(1, 65, 64) * 0.1)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 64)), nn.Linear(64, 20)
        self.blocks = nn.ModuleList(Block(64, 4) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Decoder(nn.Module):
    """One step of a decoder with its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.head = (
            nn.Embedding(300, 64),
            nn.Linear(64, 192),
            nn.Linear(64, 64),
            nn.Linear(64, 300),
        )

    def forward(self, tokens: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        key, value = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        x = x + self.out(functional.scaled_dot_product_attention(q, key, value).transpose(1, 2).flatten(2))
        return self.head(x), key, value


class Pyramid(nn.Module):
    """Segmentation into three classes, at a quarter of the size and scaled up."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(24, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU())
        self.la, self.lb, self.head = nn.Conv2d(24, 32, 1), nn.Conv2d(48, 32, 1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.a(image)
        b = self.b(a)
        merged = self.la(a) + functional.interpolate(self.lb(b), scale_factor=2.0, mode="nearest")
        return functional.interpolate(self.head(merged), scale_factor=2.0, mode="bilinear", align_corners=False)


class Encoder(nn.Module):
    """Token classification, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(400, 64), nn.Embedding(64, 64)
        self.blocks, self.head = nn.ModuleList(Block(64, 4) for _ in range(2)), nn.Linear(64, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position.weight[: input_ids.shape[1]]
        mask = attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Forecast(nn.Module):
    """An LSTM with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.mean, self.spread = nn.LSTM(6, 48, 2, batch_first=True), nn.Linear(48, 8), nn.Linear(48, 8)

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        last = self.lstm(history)[0][:, -1]
        return self.mean(last), functional.softplus(self.spread(last))


class Graph(nn.Module):
    """Node classification: nodes × features and edges."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(32, 48), nn.Linear(96, 48), nn.Linear(48, 6)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.a(torch.cat([nodes, self._around(nodes, edges)], 1)).relu()
        return self.head(self.b(torch.cat([x, self._around(x, edges)], 1)).relu())

    @staticmethod
    def _around(x: Tensor, edges: Tensor) -> Tensor:
        index = edges[1][:, None].expand(-1, x.shape[1])
        return torch.zeros_like(x).scatter_add(0, index, x[edges[0]])


class Reader(nn.Module):
    """Text recognition that gives time × batch × letters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 48, 3, 2, 1), nn.ReLU())
        self.lstm, self.head = nn.LSTM(48 * 8, 48, bidirectional=True), nn.Linear(96, 30)

    def forward(self, image: Tensor) -> Tensor:
        steps = self.conv(image).permute(3, 0, 1, 2).flatten(2)
        return self.head(self.lstm(steps)[0])


class Larger(nn.Module):
    """Super-resolution: pixel shuffle and a bicubic skip."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2),
            nn.PReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.PReLU(),
            nn.Conv2d(32, 12, 3, padding=1),
        )

    def forward(self, image: Tensor) -> Tensor:
        large = functional.interpolate(image, scale_factor=2.0, mode="bicubic", align_corners=False)
        return large + functional.pixel_shuffle(self.body(image), 2)


class Denoise(nn.Module):
    """A diffusion step: a time, a context, cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.time = (
            nn.Conv2d(4, 32, 3, padding=1),
            nn.Conv2d(32, 4, 3, padding=1),
            nn.Linear(16, 32),
        )
        self.norm, self.q, self.k, self.v = nn.GroupNorm(4, 32), nn.Linear(32, 32), nn.Linear(24, 32), nn.Linear(24, 32)

    def forward(self, noise: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        angle = timestep[:, None].float() * torch.exp(-torch.arange(8, device=timestep.device) / 2.0)
        x = self.first(noise) + self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        rows = functional.silu(self.norm(x)).flatten(2).transpose(1, 2)
        weights = (self.q(rows) @ self.k(context).transpose(1, 2) / 32**0.5).softmax(-1)
        return self.last(x + (weights @ self.v(context)).transpose(1, 2).unflatten(2, x.shape[2:]))


class Video(nn.Module):
    """Three-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(3, 24, 3, (1, 2, 2), 1), nn.BatchNorm3d(24), nn.ReLU(), nn.Conv3d(24, 32, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Linear(32, 10)

    def forward(self, clip: Tensor) -> Tensor:
        return self.head(self.body(clip).mean((2, 3, 4)))


class Speech(nn.Module):
    """A streaming step: the audio's end comes back as the next context, and a state with the batch on axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell, self.head = nn.Conv1d(1, 32, 16, 8), nn.LSTM(32, 48, batch_first=True), nn.Linear(48, 1)

    def forward(self, chunk: Tensor, context: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sound = torch.cat([context, chunk], 1)
        steps = self.conv(sound[:, None]).relu().transpose(1, 2)
        out, (h, c) = self.cell(steps, (h, c))
        return self.head(out[:, -1]).sigmoid(), sound[:, -32:], h, c


class Warp(nn.Module):
    """Two images: the flow from one to the other, and the first one warped."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Sequential(nn.Conv2d(6, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 2, 3, padding=1))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        flow = self.flow(torch.cat([first, second], 1)).tanh() * 0.2
        height, width = first.shape[2], first.shape[3]
        rows, columns = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
        grid = torch.stack([columns[None, :].expand(height, width), rows[:, None].expand(height, width)], -1)
        return functional.grid_sample(first, grid[None] + flow.permute(0, 2, 3, 1), align_corners=True), flow


class Padded(nn.Module):
    """nn.TransformerEncoder with a mask of padding, True where there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, 7)

    def forward(self, features: Tensor, padding: Tensor) -> Tensor:
        kept = (~padding).float()[:, :, None]
        x = self.encoder(features, src_key_padding_mask=padding)
        return self.head((x * kept).sum(1) / kept.sum(1))


class Retrieve(nn.Module):
    """The ten nearest of 2,000 items."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.items = (
            nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32)),
            nn.Parameter(torch.randn(32, 2000)),
        )

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return (self.query(features) @ self.items).topk(10)


class Camera(nn.Module):
    """uint8 pixels, samples × height × width × 3."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 48, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(48, 11)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.body(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).flatten(1))


class Window(nn.Module):
    """Factors on axes that aren't the channels', of the channels' length: a window over the width, a weight for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.ConvTranspose2d(32, 32, 3, padding=1)
        self.c, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 5)
        self.register_buffer("width", torch.hann_window(32))
        self.register_buffer("rows", torch.rand(32, 1) + 0.5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.b((self.a(image) * self.width).relu()) * self.rows
        return self.head((self.c(x.mean(2)) * self.width).relu().mean(2))


def image(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Smooth pictures, not noise: calibration refuses noise."""
    small = torch.from_numpy(rng.standard_normal((shape[0], shape[1], 6, 6)).astype(np.float32))
    return functional.interpolate(small, size=shape[2:], mode="bicubic", align_corners=False).numpy()


def sound(rng: np.random.Generator, count: int, *shape: int) -> np.ndarray:
    size = int(np.prod(shape))
    steps = np.linspace(0, 6, size, dtype=np.float32)
    waves = [np.sin(steps * rng.uniform(1, 9) + rng.uniform(0, 6)) * rng.uniform(0.2, 1) for _ in range(count)]
    return (np.stack(waves).astype(np.float32) + 0.05 * rng.standard_normal((count, size)).astype(np.float32)).reshape(
        count, *shape
    )


def lengths(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.arange(size)[None] < rng.integers(size // 3, size + 1, (COUNT, 1))


def graphs(rng: np.random.Generator) -> list[Arrays]:
    found = []
    for _ in range(COUNT):
        nodes = int(rng.integers(12, 40))
        edges = rng.integers(0, nodes, (2, 3 * nodes)).astype(np.int64)
        found.append({"nodes": rng.standard_normal((nodes, 16)).astype(np.float32), "edges": edges})
    return found


Case = tuple[Callable[[], nn.Module], str, Callable[[np.random.Generator], Any], tuple[str, ...]]
B = COUNT
MODELS: dict[str, Case] = {  # the module, --inputs, its samples, further options of export
    "recommender": (Recommender, "user:batch:int64;item:batch:int64;genre:batch:int64;age:batch;price:batch", lambda r: {"user": r.integers(0, 500, B), "item": r.integers(0, 900, B), "genre": r.integers(0, 20, B), "age": r.random(B, np.float32), "price": r.random(B, np.float32)}, ()),
    "keyword": (Keyword, "mel:batchx1x40x32", lambda r: {"mel": sound(r, B, 1, 40, 32)}, ()),
    "unet": (UNet, "scan:batchx3xheightxwidth", lambda r: {"scan": image(r, B, 3, 64, 64)}, ("--output-names", "classes")),
    "heads": (Heads, "image:batchx3x64x64", lambda r: {"image": image(r, B, 3, 64, 64)}, ("--output-names", "boxes,scores")),
    "patches": (Patches, "image:batchx3x64x64", lambda r: {"image": image(r, B, 3, 64, 64)}, ()),
    "decoder": (Decoder, "tokens:batchx1:int64;past_key:batchx4xpastx16;past_value:batchx4xpastx16", lambda r: {"tokens": r.integers(0, 300, (B, 1)), "past_key": sound(r, B, 4, 12, 16), "past_value": sound(r, B, 4, 12, 16)}, ()),
    "pyramid": (Pyramid, "image:batchx3x64x64", lambda r: {"image": image(r, B, 3, 64, 64)}, ("--output-names", "logits")),
    "encoder": (Encoder, "input_ids:batchxsequence:int64;attention_mask:batchxsequence:int64", lambda r: (lambda kept: {"input_ids": np.where(kept, r.integers(1, 400, kept.shape), 0), "attention_mask": kept.astype(np.int64)})(lengths(r, 32)), ()),
    "forecast": (Forecast, "history:batchx48x6", lambda r: {"history": sound(r, B, 48, 6)}, ()),
    "graph": (Graph, "nodes:nodesx16;edges:2xedges:int64", graphs, ()),
    "reader": (Reader, "image:batchx1x32x96", lambda r: {"image": image(r, B, 1, 32, 96)}, ("--output-names", "logits")),
    "larger": (Larger, "image:batchx3x32x32", lambda r: {"image": image(r, B, 3, 32, 32)}, ()),
    "denoise": (Denoise, "noise:batchx4x16x16;timestep:batch:int64;context:batchx8x24", lambda r: {"noise": image(r, B, 4, 16, 16), "timestep": r.integers(0, 1000, B), "context": sound(r, B, 8, 24)}, ()),
    "video": (Video, "clip:batchx3x8x32x32", lambda r: {"clip": np.stack([image(r, B, 3, 32, 32)] * 8, 2) * r.random((B, 1, 8, 1, 1), np.float32)}, ()),
    "speech": (Speech, "chunk:batchx512;context:batchx32;h:1xbatchx48;c:1xbatchx48", lambda r: {"chunk": sound(r, B, 512), "context": sound(r, B, 32), "h": sound(r, B, 48)[None] * 0.3, "c": sound(r, B, 48)[None] * 0.3}, ()),
    "warp": (Warp, "first:batchx3x32x32;second:batchx3x32x32", lambda r: {"first": image(r, B, 3, 32, 32), "second": image(r, B, 3, 32, 32)}, ()),
    "padded": (Padded, "features:batchx24x48;padding:batchx24:bool", lambda r: {"features": sound(r, B, 24, 48), "padding": ~lengths(r, 24)}, ()),
    "retrieve": (Retrieve, "features:batchx24", lambda r: {"features": r.standard_normal((B, 24), np.float32)}, ("--output-names", "scores,ids")),
    "camera": (Camera, "pixels:batchx64x64x3:uint8", lambda r: {"pixels": (image(r, B, 3, 64, 64).transpose(0, 2, 3, 1) * 60 + 128).clip(0, 255).astype(np.uint8)}, ()),
    "window": (Window, "image:batchx3x32x32", lambda r: {"image": image(r, B, 3, 32, 32)}, ()),
}  # fmt: skip
BATCH_AXIS = {"speech": {"h": 1, "c": 1}}
OUTPUT_AXIS = {"speech": (0, 0, 1, 1), "reader": (1,)}


def make(name: str) -> nn.Module:
    """The module with its drawn weights; `trtopt export ordinary_models.py:NAME` calls the functions below."""
    torch.manual_seed(zlib.crc32(name.encode()))
    module = MODELS[name][0]().eval()
    for layer in module.modules():  # as after training: statistics that aren't 0 and 1
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(layer.running_mean, 0, 0.3)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
            nn.init.uniform_(layer.weight, 0.7, 1.3)
    return module


for _name in MODELS:
    globals()[_name] = (lambda name: lambda: make(name))(_name)


# What was measured ---------------------------------------------------------------------------------------------------------


class Trial:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.times: dict[str, float] = {}
        self.faults: list[str] = []
        self.figures: dict[str, str] = {}

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"FAULT {self.name}: {text}", flush=True)

    def type(self, label: str, *arguments: str) -> dict[str, Any]:
        """Run a command; its JSON."""
        started = time.monotonic()
        command = [sys.executable, "-m", "trtopt", *arguments]
        environment = {**os.environ, "COLUMNS": "80"}
        run = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=environment)
        if run.returncode and (
            told := re.search(r"--shapes '([^']+)'", " ".join(run.stderr.split()))
        ):  # as a user copies it
            command += ["--shapes", told[1]]
            run = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=environment)
        self.times[label] = round(time.monotonic() - started, 1)
        Path(self.folder, f"{label}.log").write_text(" ".join(arguments) + "\n" + run.stderr + "\n" + run.stdout)
        if run.returncode:
            self.fault(f"{label} ends with {run.returncode}: {run.stderr.strip()[-600:]}")
        for word in ("Traceback", "internal error", "nan dB"):
            if word in run.stderr + run.stdout:
                self.fault(f"{label} says {word!r}: {run.stderr[-400:]}")
        try:
            return json.loads(run.stdout) if run.stdout.strip() else {}
        except ValueError:
            if "--json" in arguments:
                self.fault(f"{label}: stdout is no JSON object: {run.stdout[:200]}")
            return {}


def samples_of(name: str) -> list[Arrays]:
    """Each sample with a batch of 1, or as it is where an array is one sample as a whole."""
    data = MODELS[name][2](np.random.default_rng(zlib.crc32(name.encode())))
    if isinstance(data, list):
        return data
    axes = BATCH_AXIS.get(name, {})
    return [{key: np.take(array, [k], axes.get(key, 0)) for key, array in data.items()} for k in range(COUNT)]


def onnx_results(path: Path, samples: list[Arrays]) -> list[list[np.ndarray]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    return [session.run(None, {key: value for key, value in sample.items() if key in names}) for sample in samples]


def torch_results(module: nn.Module, samples: list[Arrays]) -> list[list[np.ndarray]]:
    found = []
    with torch.inference_mode():
        for sample in samples:
            result = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in sample.values()))
            found.append([item.numpy() for item in (result if isinstance(result, tuple) else (result,))])
    return found


def decibels(old: list[list[np.ndarray]], new: list[list[np.ndarray]]) -> list[float]:
    """dB of each floating output over all samples; inf of integers that agree."""
    found = []
    for place in range(len(old[0])):
        a = np.concatenate([item[place].ravel() for item in old]).astype(np.float64)
        b = np.concatenate([item[place].ravel() for item in new]).astype(np.float64)
        error = float(((a - b) ** 2).sum())
        found.append(float("inf") if not error else 10 * float(np.log10((a**2).sum() / error)))
    return found


def go(name: str, folder: Path, gpu: bool = False) -> Trial:
    trial, here = Trial(name, folder), Path(__file__).resolve()
    _, inputs, data, more = MODELS[name]
    samples, module = samples_of(name), make(name)
    content = data(np.random.default_rng(zlib.crc32(name.encode())))
    if isinstance(content, list):
        Path(trial.folder, "data").mkdir(exist_ok=True)
        for number, sample in enumerate(content):
            np.savez(trial.folder / "data" / f"{number:03}.npz", **sample)
        given = "data"
    else:
        np.savez(trial.folder / "data.npz", **content)
        given = "data.npz"
    typed = [part for item in inputs.split(";") for part in ("--inputs", item)]
    trial.type("export", "export", f"{here}:{name}", *typed, *more, "-o", "m.onnx")
    model = trial.folder / "m.onnx"
    if not model.exists():
        return trial
    expected = torch_results(module, samples)
    floats = [place for place, array in enumerate(expected[0]) if array.dtype.kind == "f"]
    if (worst := min(decibels(expected, onnx_results(model, samples))[place] for place in floats)) < 100:
        trial.fault(f"the export is {worst:.1f} dB from PyTorch")
    trial.type("check", "check", "m.onnx", "--data", given, "--fix", "f.onnx", "--json")
    if (fixed := trial.folder / "f.onnx").exists():
        if (worst := min(decibels(expected, onnx_results(fixed, samples))[place] for place in floats)) < 90:
            trial.fault(f"the fixed model is {worst:.1f} dB from PyTorch")
    else:
        fixed = model
    target = ("--backend", "tensorrt", "--optimization-level", "1") if gpu else ("--backend", "rtx", "--target", "sm89")
    runs = () if gpu else ("--backend", "onnxruntime")
    for precision in ("fp16", "int8"):
        trial.type(
            precision,
            "build",
            fixed.name,
            f"--{precision}",
            "--data",
            given,
            *target,
            *["--no-compare"] * (gpu and precision == "int8"),
            "--save-onnx",
            f"{precision}.onnx",
            "-o",
            f"{precision}.engine",
            "--json",
        )
        kept = trial.folder / f"{precision}.onnx"
        if not kept.exists():
            continue
        results = expected if gpu else onnx_results(kept, samples)
        own = decibels(expected, results)
        trial.type("inspect", "inspect", f"{precision}.engine", "--json")
        told = trial.type("verify", "verify", "m.onnx", f"{precision}.engine", "--data", given, "--json")
        for place, (output, figures) in enumerate(told.get("outputs", {}).items()):
            said = figures.get("snr_db")
            if (
                not gpu
                and expected[0][place].dtype.kind == "f"
                and isinstance(said, (int, float))
                and min(said, own[place])
                < 55  # above, ONNX Runtime drops pairs of casts, and FP16 its rounding with them
                and abs(said - own[place]) > 0.6
                and figures.get("unpadded") is None
            ):
                trial.fault(f"verify of {precision} says {said:.1f} dB of {output}, own {own[place]:.1f}")
            agreement = figures.get("top1_agreement", figures.get("agreement"))
            if isinstance(agreement, (int, float)):
                trial.figures[f"{precision} {output}"] = f"{agreement:.1%}"
        trial.figures[precision] = "/".join(f"{own[place]:.1f}" for place in floats)
        one = "data/000.npz" if given == "data" else given  # samples of unlike shapes don't fit one array
        trial.type("run", "run", f"{precision}.engine", "--data", one, *runs, "-o", f"{precision}-out")
        axes = OUTPUT_AXIS.get(name, (0,) * len(expected[0]))
        for place, file in enumerate(told.get("outputs", {})):
            place_of = trial.folder / f"{precision}-out" / f"{file}.npy"
            if not place_of.exists():
                trial.fault(f"run of {precision} wrote no {file}.npy")
                continue
            got = np.load(place_of)
            right = np.concatenate([item[place] for item in results[: 1 if one != given else None]], axes[place])
            if got.shape != right.shape:
                trial.fault(f"run of {precision}: {file} is {got.shape}, right is {right.shape}")
            elif gpu and got.dtype.kind == "f":  # what the engine itself gave, beside what verify says of it
                own[place], said = decibels([[right]], [[got]])[0], list(told["outputs"].values())[place].get("snr_db")
                padded = list(told["outputs"].values())[place].get("unpadded")
                if isinstance(said, (int, float)) and abs(said - own[place]) > 0.6 and one == given and not padded:
                    trial.fault(f"verify of {precision} says {said:.1f} dB of {file}, own {own[place]:.1f}")
            elif got.dtype.kind == "f" and decibels([[right]], [[got]])[0] < 45:
                trial.fault(f"run of {precision}: {file} is {decibels([[right]], [[got]])[0]:.1f} dB from single runs")
        trial.figures[precision] = "/".join(f"{own[place]:.1f}" for place in floats)
    least = max(20.0, min((float(v) for v in trial.figures.get("int8", "20").split("/")), default=20.0) + 3)
    trial.type(
        "tune",
        "tune",
        fixed.name,
        "--data",
        given,
        "--min-snr",
        f"{min(least, 45):.0f}",
        *target,
        "--save-onnx",
        "t.onnx",
        "-o",
        "t.engine",
        "--json",
    )
    if (tuned := trial.folder / "t.onnx").exists():
        own = min(decibels(expected, onnx_results(tuned, samples))[place] for place in floats)
        trial.figures["tuned"] = f"{own:.1f} (asked {min(least, 45):.0f})"
        if own < min(least, 45) - 0.6:
            trial.fault(f"tune delivered {own:.1f} dB, asked were {min(least, 45):.0f}")
    trial.type("sensitivity", "sensitivity", fixed.name, "--data", given, "--json")
    if gpu:
        trial.type("bench", "bench", "int8.engine", "--json")
        return trial
    trial.type("report", "report", "int8.engine", "-o", "int8.html")
    trial.type(
        "triton",
        "deploy",
        "triton",
        "int8.engine",
        "--backend",
        "python",
        "--runtime",
        "onnxruntime",
        "--repo",
        "repo",
        "--overwrite",
    )
    return trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--table", type=Path)
    parser.add_argument("--gpu", action="store_true", help="build for this machine's GPU, and run the engines on it")
    given = parser.parse_args()
    folder, trials = given.folder.resolve(), []
    for name in given.names or MODELS:
        trials.append(trial := go(name, folder, given.gpu))
        print(name, trial.times, trial.figures, f"{len(trial.faults)} faults", flush=True)
    if given.table:
        labels = list(dict.fromkeys(label for trial in trials for label in trial.times))
        lines = [
            "| model | FP16 dB | INT8 dB | tuned dB | " + " | ".join(labels) + " | faults |",
            "|---|" + "---|" * (len(labels) + 4),
        ]
        for trial in trials:
            seconds = [f"{trial.times[label]:.0f}" if label in trial.times else "–" for label in labels]
            shown = [trial.figures.get(key, "–") for key in ("fp16", "int8", "tuned")]
            lines.append("| " + " | ".join([trial.name, *shown, *seconds, str(len(trial.faults))]) + " |")
        given.table.write_text("\n".join(lines) + "\n")
    count = sum(len(trial.faults) for trial in trials)
    print(f"{len(trials)} models, {count} faults")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
