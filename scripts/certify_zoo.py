"""Networks of torchvision and transformers with random weights, for benchmarks/certify.py.

    python scripts/certify_zoo.py FOLDER [NAME...] [--part I/N]

writes NAME.onnx and NAME.npz (8 inputs), batches open; resnet50@224 has images of that side. Statistics of
BatchNormalization are those of made-up images, so that values neither die out nor explode, as those of trained networks don't.
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trtopt

SAMPLES = 8
VISION = {  # name → side of its images
    **dict.fromkeys(
        ("resnet18", "resnet34", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "vgg11", "vgg16_bn"), 64
    ),
    **dict.fromkeys(("alexnet", "squeezenet1_0", "squeezenet1_1", "densenet121", "densenet169", "googlenet"), 96),
    **dict.fromkeys(("inception_v3", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "mobilenet_v2"), 96),
    **dict.fromkeys(("mobilenet_v3_small", "mobilenet_v3_large", "mnasnet0_5", "mnasnet1_0", "efficientnet_b0"), 96),
    **dict.fromkeys(("efficientnet_b1", "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf", "regnet_y_800mf"), 96),
    **dict.fromkeys(("convnext_tiny", "swin_t", "swin_v2_t"), 96),
    **dict.fromkeys(("vit_b_32", "maxvit_t"), 224),
    **dict.fromkeys(("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50"), 96),
}
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
TEXT = {
    "bert": ("BertModel", "BertConfig", {}),
    "electra": ("ElectraModel", "ElectraConfig", {"embedding_size": 64}),
    "roberta": ("RobertaModel", "RobertaConfig", {}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2, "use_cache": False}),
}
PICTURE = {
    "vit": ("ViTModel", "ViTConfig", {"image_size": 64, **SMALL}),
    "deit": ("DeiTModel", "DeiTConfig", {"image_size": 64, **SMALL}),
    "clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", {"image_size": 64, "patch_size": 16, **SMALL}),
    "mobilevit": ("MobileViTModel", "MobileViTConfig", {"image_size": 64}),
}


class First(nn.Module):
    """A module that gives the first of its outputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        found = self.inner(*inputs)
        return found if isinstance(found, torch.Tensor) else next(iter(found.values()))


class Image(First):
    def forward(self, image: Any) -> Any:
        return super().forward(image)


class Words(First):
    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return super().forward(input_ids, attention_mask)


def settled(module: nn.Module, side: int) -> nn.Module:
    """Return a network whose normalizations have the statistics of made-up images."""
    module.train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the mean of all
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.Linear) and not part.weight.any():  # torchvision's heads of vision transformers
            nn.init.normal_(part.weight, std=0.02)
    with torch.no_grad():
        for seed in range(2):
            module(torch.randn(8, 3, side, side, generator=torch.Generator().manual_seed(seed)))
    return module.eval()


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    random, (name, _, wished) = np.random.default_rng(0), name.partition("@")
    if name in VISION:
        import torchvision

        side = int(wished or VISION[name])
        options = {"weights_backbone": None} if name.startswith(("deeplab", "lraspp", "fcn")) else {}
        if name in ("googlenet", "inception_v3"):
            options = {"aux_logits": False, "init_weights": True}
        module = settled(torchvision.models.get_model(name, weights=None, **options), side)
        return Image(module), {"image": random.standard_normal((SAMPLES, 3, side, side), np.float32)}
    import transformers

    kind, config, options = {**TEXT, **PICTURE}[name]
    if name in TEXT:
        options = {"vocab_size": 1000, **SMALL, **options}
    settings = getattr(transformers, config)(**options)
    settings._attn_implementation = "eager"
    module = getattr(transformers, kind)(settings).eval()
    if name in PICTURE:
        return Image(settled(module, 64)), {"image": random.standard_normal((SAMPLES, 3, 64, 64), np.float32)}
    mask = (np.arange(32) < random.integers(8, 33, (SAMPLES, 1))).astype(np.int64)
    return Words(module), {"input_ids": random.integers(1, 1000, (SAMPLES, 32)), "attention_mask": mask}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="0/1")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, given.part.split("/"))
    for name in (given.names or [*VISION, *TEXT, *PICTURE])[part::parts]:
        torch.manual_seed(0)
        try:
            module, data = made(name)
            inputs = [
                f"{key}:{'x'.join(map(str, ('batch', *array.shape[1:])))}{':int64' * (array.dtype.kind == 'i')}"
                for key, array in data.items()
            ]
            sample = {key: array[:2] for key, array in data.items()}
            trtopt.export(module, given.folder / f"{name}.onnx", inputs=inputs, sample=sample, verify=False)
        except Exception as error:  # a package that is older or isn't there
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        np.savez(given.folder / f"{name}.npz", **data)
        print(name, flush=True)


if __name__ == "__main__":
    main()
