"""verify --per-layer of an engine on a GPU: the tensors are its own, and a fault is found at its layer. FP8 beside INT8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lite0 import Builds, Inputs, rows
from onnx import numpy_helper

import trtopt
from trtopt.cuda.device import Device

FEW = 8
OFF = 20.0  # dB of a layer's own error below which it is wrong; the graph's worst in ONNX Runtime has 28


@pytest.fixture(scope="module")
def kept(gpu: Device, builds: Builds, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The INT8 engine with its graph."""
    pytest.importorskip("onnxruntime", reason="ONNX Runtime runs the reference: pip install 'trtopt[ort]'")
    folder = tmp_path_factory.mktemp("layers")
    options: dict[str, Any] = {"int8": True, "calib": inputs.table, "compare": False, **builds.common}
    return trtopt.build(inputs.model, folder / "lite0.engine", save_onnx=folder / "lite0.onnx", **options).engine


def _verified(engine: Path, inputs: Inputs) -> Any:
    batches = [{"input": inputs.photos["input"][:FEW]}]
    return trtopt.verify(inputs.model, engine, batches, per_layer=True)


def test_tensors_are_the_engines_own(kept: Path, gpu: Device, inputs: Inputs) -> None:
    found = _verified(kept, inputs)
    graph = trtopt.verify(
        inputs.model, kept.with_suffix(".onnx"), [{"input": inputs.photos["input"][:FEW]}], per_layer=True
    )
    assert "another build of" in found.ran and str(gpu.info) in found.ran
    told = {item.tensor: item for item in graph.layers}
    worst = min(found.layers, key=lambda item: item.own_snr_db)
    apart = max(abs(item.snr_db - told[item.tensor].snr_db) for item in found.layers if np.isfinite(item.snr_db))
    rows.append(
        (
            "verify --per-layer",
            f"{len(found.layers)} tensors, worst {worst.own_snr_db:.1f} dB",
            f"{worst.what}; at most {apart:.1f} dB from the graph's",
        )
    )
    assert len(found.layers) > 50
    assert not any(item.nonfinite for item in found.layers)
    assert worst.own_snr_db > OFF
    logits = next(item for item in found.layers if item.tensor == "logits")
    assert logits.snr_db == pytest.approx(told["logits"].snr_db, abs=1.5)


def test_a_fault_of_one_layer_is_found_there(kept: Path, inputs: Inputs) -> None:
    """In the graph, from which the engine is built once more: channels of one convolution in another order."""
    graph = onnx.load(kept.with_suffix(".onnx"))
    convs = [node for node in graph.graph.node if node.op_type == "Conv"]
    makers = {name: node for node in graph.graph.node for name in node.output}
    node = convs[len(convs) // 2]
    name = node.input[2]
    while name in makers:
        name = makers[name].input[0]
    bias = next(item for item in graph.graph.initializer if item.name == name)
    moved = np.roll(numpy_helper.to_array(bias), 1)
    bias.CopyFrom(numpy_helper.from_array(moved.astype(numpy_helper.to_array(bias).dtype), bias.name))
    healthy = kept.with_suffix(".onnx").read_bytes()
    try:
        onnx.save(graph, kept.with_suffix(".onnx"))
        found = _verified(kept, inputs)
    finally:
        kept.with_suffix(".onnx").write_bytes(healthy)
    worst = min(found.layers, key=lambda item: item.own_snr_db)
    rows.append(("a wrong bias", worst.what, f"{worst.own_snr_db:.1f} dB of its own"))
    assert worst.node == node.name
