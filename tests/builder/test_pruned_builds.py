"""Builds with weights made 2:4, on the real TensorRT-RTX: what the graph holds, what is told, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from world import Heard, has

import trtopt
from trtopt import AccuracyLost, UnsupportedRequest, UsageError
from trtopt.autotune.candidates import asked_of_builder
from trtopt.builder.request import BuildRequest
from trtopt.core.values import Precision
from trtopt.graph.io import load_model

pytestmark = pytest.mark.usefixtures("rtx")
NET = """(float[n,8,10,10] x) => (float[n,6] y) { [a] h = Conv<pads=[1,1,1,1]>(x, w) [r] i = Relu(h)
    [b] j = Conv(i, v) [g] p = GlobalAveragePool(j) [f] q = Flatten(p) [m] y = MatMul(q, u) }"""
MIX = np.random.default_rng(7).standard_normal((8, 3))


@pytest.fixture
def net() -> ModelProto:
    return written(NET, w=values(32, 8, 3, 3), v=values(32, 32, 1, 1, seed=1), u=values(32, 6, seed=2))


def _data(count: int = 32, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    inner = np.random.default_rng(seed).standard_normal((count, 3, 10, 10))
    return {"x": np.asarray(np.einsum("oc,nchw->nohw", MIX, inner), np.float32)}


def _build(net: ModelProto, folder: Path, **options: Any) -> tuple[Any, Heard]:
    heard = Heard()
    common: dict[str, Any] = {"backend": "rtx", "target": "sm89", "sparsity": "prune", "reporter": heard}
    common |= {"save_onnx": folder / "g.onnx", "shapes": "x:1x8x10x10,8x8x10x10,8x8x10x10"}
    return trtopt.build(net, folder / "m.engine", **{**common, **options}), heard


def _share(path: Path) -> list[float]:
    """The share of zeros in each weight of a graph."""
    found = [numpy_helper.to_array(item) for item in onnx.load(path).graph.initializer]
    return [float((np.asarray(item, np.float32) == 0).mean()) for item in found if item.size >= 192]


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_build_with_samples_says_what_pruning_loses(net: ModelProto, tmp_path: Path, precision: str) -> None:
    result, heard = _build(net, tmp_path, **{precision: True}, data=_data())
    assert result.precision_summary.startswith("2:4: 3 of 3 weights pruned, ")
    assert "which kernels are sparse isn't known" in result.precision_summary
    shares = _share(tmp_path / "g.onnx")
    assert len(shares) == 3 and all(item >= 0.5 if precision == "int8" else item == 0.5 for item in shares)
    assert not any("not of these weights" in text or "other weights" in text for text in heard.warnings)
    told = float(result.precision_summary.split(", ")[1].split(" dB")[0])
    judged = trtopt.verify(net, tmp_path / "g.onnx", data=_data(64, 1)).outputs[0].snr_db
    assert abs(told - judged) < 4, (told, judged)
    manifest = json.loads((tmp_path / "m.engine.json").read_text())
    assert manifest["spec"]["sparsity"] == "prune" and "2:4" in manifest["precision_summary"]
    assert manifest["source"]["sha256"] == load_model(net).fingerprint
    again, _ = _build(net, tmp_path, **{precision: True}, data=_data())
    assert again.cached
    other, _ = _build(net, tmp_path, **{precision: True}, data=_data(seed=3))
    assert not other.cached


def test_without_samples_nobody_knows_what_it_loses(net: ModelProto, tmp_path: Path) -> None:
    result, heard = _build(net, tmp_path, fp16=True)
    assert result.precision_summary.startswith("2:4: 3 of 3 weights pruned; ")
    has("\n".join(heard.warnings), "by magnitude", "isn't known", "`images=`")
    assert _share(tmp_path / "g.onnx") == [0.5] * 3


@pytest.mark.parametrize("sparsity", ["off", "keep"])
def test_weights_stay_as_they_are_unless_they_are_to_be_pruned(net: ModelProto, tmp_path: Path, sparsity: str) -> None:
    result, _ = _build(net, tmp_path, fp16=True, sparsity=sparsity)
    assert _share(tmp_path / "g.onnx") == [0.0] * 3
    assert ("kernels" in result.precision_summary) == (sparsity == "keep")


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_limit_that_pruning_misses_writes_nothing(net: ModelProto, tmp_path: Path, precision: str) -> None:
    with pytest.raises(AccuracyLost, match=r"3 of 3 weights pruned, .* dB at the outputs .*`min_snr=` asks for 80"):
        _build(net, tmp_path, **{precision: True}, data=_data(), min_snr=80.0)
    assert not (tmp_path / "m.engine").exists() and not (tmp_path / "g.onnx").exists()
    result, _ = _build(net, tmp_path, **{precision: True}, data=_data(), min_snr=0.5)
    assert result.tuning is None and (tmp_path / "m.engine").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["`fp16=True`", "`int8=True`", "FP32"]),
        ({"bf16": True}, ["`fp16=True`", "BF16"]),
        ({"fp8": True, "data": {}}, ["FP8"]),
        ({"int4": True}, ["INT4"]),
        ({"best": True, "data": {}}, ["`best=True`", "`save_onnx=`"]),
        ({"int8": True, "data": {}, "min_agreement": 0.9}, ["`min_agreement=`"]),
        ({"fp16": True, "certify": True}, ["`certify=True`"]),
        ({"fp16": True, "heal": True}, ["`heal=True`"]),
        ({"fp16": True, "min_snr": 20.0}, ["`min_snr=`", "`images=DIR`"]),
        ({"fp16": True, "sparsity": "some"}, ["`sparsity=`", "off, keep, prune"]),
        ({"fp16": True, "sparsity": True}, ["`sparsity=`"]),
    ],
)
def test_what_does_not_go_with_pruning_is_refused(
    net: ModelProto, tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    if "data" in options:
        options = {**options, "data": _data()}
    with pytest.raises(UsageError) as error:
        _build(net, tmp_path, **options)
    has(str(error.value), *words)
    assert not (tmp_path / "m.engine").exists()


def test_gpus_without_sparse_kernels_are_refused(net: ModelProto, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedRequest, match=r"`target='sm75'`: `sparsity='prune'` needs sm80 or later"):
        trtopt.build(net, tmp_path / "m.engine", fp16=True, sparsity="prune", backend="rtx", target="sm75,sm89")


def test_tune_and_a_model_without_such_weights_are_refused(net: ModelProto, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`sparsity='prune'` is `build`'s"):
        trtopt.tune(net, tmp_path / "m.engine", data=_data(), min_snr=20.0, sparsity="prune")
    odd = written("(float[n,6] x) => (float[n,6] y) { [m] y = MatMul(x, w) }", w=values(6, 6))
    with pytest.raises(UsageError, match=r"no weight to prune: m: it has 6 input channels, no multiple of 4"):
        trtopt.build(odd, tmp_path / "m.engine", fp16=True, sparsity="prune", backend="rtx", target="sm89")


def test_a_table_whose_scales_are_of_other_weights_is_refused(net: ModelProto, tmp_path: Path) -> None:
    table = trtopt.calibrate(net, data=_data()).table
    with pytest.raises(UsageError, match=r"`sparsity='prune'` and `calib=` are both given.*give the samples"):
        _build(net, tmp_path, int8=True, calib=table)


def test_the_engine_that_int8_is_compared_with_is_dense(net: ModelProto, tmp_path: Path) -> None:
    request = BuildRequest(net, tmp_path / "m.engine", int8=True, sparsity="prune", data=_data())
    assert asked_of_builder(request, Precision.FP16, None, within=False).sparsity == "off"
    kept = asked_of_builder(replace(request, sparsity="keep"), Precision.FP16, None, within=False)
    assert kept.sparsity == "keep" and asked_of_builder(request, Precision.INT8, None, within=False) is request
