"""scripts/decoder.py: prefill and step as graphs that feed their caches back, token for token as PyTorch has them."""

# ruff: noqa: TID251  (this runs PyTorch modules)

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from documented import ROOT

import trtopt
from trtopt.graph.io import load_model

PROMPTS = 6


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, with a decoder of one layer."""
    spec = importlib.util.spec_from_file_location("decoder", ROOT / "scripts" / "decoder.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LAYERS, module.NEW, module.CACHES = 1, 8, module.CACHES[:2]
    return module


@pytest.fixture(scope="module")
def folder(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("decoder")
    script.make(made, prompts=PROMPTS, drawn=4)
    return made


@pytest.fixture
def ways(folder: Path) -> Any:
    with (
        trtopt.Session(folder / "prefill.onnx", backend="onnxruntime") as prefill,
        trtopt.Session(folder / "step.onnx", backend="onnxruntime") as step,
    ):
        yield prefill.run, step.run


def test_the_graphs_say_the_same_tokens_as_pytorch(script: ModuleType, folder: Path, ways: Any) -> None:
    kept = dict(np.load(folder / "prompts.npz"))
    assert kept["lengths"].tolist() == [1, 2, 3, 4, 5, 6] and kept["answers"].shape == (PROMPTS, script.NEW)
    total = PROMPTS * script.NEW
    for batch in (1, 4):
        row, _ = script.compared("graphs", ways, kept, batch)
        assert row[1:3] == [f"{PROMPTS} of {PROMPTS}", f"{total} of {total}"]


def test_keys_beside_the_values_of_other_places_are_seen_in_the_tokens(
    script: ModuleType, folder: Path, ways: Any
) -> None:
    prefill, step = ways

    def turned(given: Mapping[str, Any]) -> Any:
        return step({name: array[:, :, ::-1] if "key" in name else array for name, array in given.items()})

    row, _ = script.compared("turned", (prefill, turned), dict(np.load(folder / "prompts.npz")), 1)
    assert int(row[2].split()[0]) < PROMPTS * script.NEW and "margin" in row[4]


def test_the_past_and_one_more_are_sizes_that_belong_together(folder: Path) -> None:
    step = load_model(folder / "step.onnx")
    assert {item.shape[2] for item in step.inputs if len(item.shape) == 4} == {"past"}
    assert {item.shape[2] for item in step.outputs if len(item.shape) == 4} == {"past + 1"}


def test_the_decoder_is_transformers_llama(script: ModuleType) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=script.VOCABULARY,
        hidden_size=script.HIDDEN,
        num_hidden_layers=script.LAYERS,
        num_attention_heads=script.HEADS,
        num_key_value_heads=script.GROUPS,
        intermediate_size=script.INNER,
    )
    module, theirs = script.decoder(), transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(module.state_dict())
    tokens = torch.randint(script.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits[:, -1], module(tokens)["logits"], atol=1e-4)


def test_fp16_engines_are_built_for_every_length(script: ModuleType, folder: Path, capsys: Any) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    rows = list(script.run(folder, "sm89"))
    assert [row[1] for row in rows] == [f"{PROMPTS} of {PROMPTS}"] * 2
    assert trtopt.inspect(folder / "step.engine").manifest.ranges[0]["past_key_0"].max == (4, 2, script.PAST, 32)
