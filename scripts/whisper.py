"""A pair of whisper-tiny's sizes with random weights: the encoder, and the decoder's step with the caches of both attentions.

    python scripts/whisper.py FOLDER    # with PyTorch and transformers

writes whisper_encoder and whisper_step, each .onnx and 8 samples, .npz. The vocabulary is smaller, so that files can be sent.
"""

# ruff: noqa: TID251  (this makes PyTorch modules)

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, WhisperConfig, WhisperForConditionalGeneration

import trtopt

CACHES = [f"{kind}_{layer}" for layer in range(4) for kind in ("key", "value")]


class Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, mel: Any) -> Any:
        return self.encoder(mel).last_hidden_state


class Step(nn.Module):
    """One token, caches of those before it and of the encoder's states → logits, and the first caches with the token's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.head = model.model.decoder, model.proj_out

    def forward(self, tokens: Any, *caches: Any) -> dict[str, Any]:
        past, cross = (list(zip(part[::2], part[1::2])) for part in (caches[: len(CACHES)], caches[len(CACHES) :]))
        both = EncoderDecoderCache(DynamicCache(past), DynamicCache(cross))
        states = caches[-1][:, 0]  # only that there are some is looked at: their keys and values are in the caches
        x = self.model(tokens, encoder_hidden_states=states, past_key_values=both, use_cache=True).last_hidden_state
        made = [item for layer in both.self_attention_cache.layers for item in (layer.keys, layer.values)]
        return {"logits": self.head(x[:, -1]), **dict(zip(CACHES, made))}


def make(folder: Path, samples: int = 8, past: int = 24) -> None:
    """Write whisper_encoder and whisper_step, each .onnx and .npz, of whisper-tiny's sizes but for the vocabulary's."""
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=4096, init_std=0.05, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1
        )
    ).eval()
    encoder, step = Encoder(model), Step(model)
    mel, tokens = torch.randn(samples, 80, 3000), torch.randint(3, 4096, (samples, past + 1))
    with torch.no_grad():
        caches = model.model.decoder(
            tokens[:, :past], encoder_hidden_states=encoder(mel), use_cache=True
        ).past_key_values
    parts = caches.self_attention_cache, caches.cross_attention_cache
    # Rounded, so that the file compresses to what can be sent around.
    held = [(item * 16).round() / 16 for part in parts for layer in part.layers for item in (layer.keys, layer.values)]
    names = [f"past_{name}" for name in CACHES] + [f"cross_{name}" for name in CACHES]
    shapes = [f"past_{name}:batchx6xpastx64" for name in CACHES] + [f"cross_{name}:batchx6x1500x64" for name in CACHES]
    data = {"whisper_encoder": {"mel": mel}, "whisper_step": {"tokens": tokens[:, past:], **dict(zip(names, held))}}
    for name, arrays in data.items():
        np.savez_compressed(folder / f"{name}.npz", **{key: value.numpy() for key, value in arrays.items()})
    trtopt.export(encoder, folder / "whisper_encoder.onnx", inputs=["mel:batchx80x3000"], output_names=["states"])
    trtopt.export(step, folder / "whisper_step.onnx", inputs=["tokens:batchx1:int64", *shapes])


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    make(Path(sys.argv[1]))
