"""Weights left in their file: the same model, and a word where the file isn't what it was."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import model, node, values
from onnx import ModelProto

from trtopt.calibration.calibrator import calibrate
from trtopt.core.errors import InvalidModel
from trtopt.graph.io import load_model, save_model
from trtopt.graph.lazy_weights import is_lazy
from trtopt.graph.passes.fold import fold
from trtopt.graph.proto import LARGE, fingerprint, in_memory, to_array

ROWS = 512  # of the MatMul's weight: 1 MB


def network() -> ModelProto:
    """Two matrix products, their weights 1 and 0.5 MB, and a small one between."""
    weights = {"w": values(ROWS, 512), "b": values(512, seed=1), "w2": values(512, 256, seed=2)}
    nodes = [node("MatMul", "x w", "m"), node("Add", "m b", "a"), node("MatMul", "a w2", "y")]
    return model(nodes, inputs={"x": ["batch", ROWS]}, outputs={"y": ["batch", 256]}, weights=weights)


def lazy_names(proto: ModelProto) -> list[str]:
    return [tensor.name for tensor in proto.graph.initializer if is_lazy(tensor)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "net.onnx"
    save_model(network(), target, inline_limit=0)
    assert (tmp_path / "net.onnx.data").stat().st_size > 1 << 20
    return target


def test_a_lazy_model_is_the_same_model(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    eager, lazy = load_model(path.name), load_model(path.name, lazy=True)
    monkeypatch.chdir("/")
    assert lazy_names(lazy.proto) == ["w", "w2"] and lazy_names(eager.proto) == []
    assert lazy.proto.ByteSize() < LARGE
    assert (lazy.inputs, lazy.outputs, lazy.opset) == (eager.inputs, eager.outputs, eager.opset)
    assert lazy.fingerprint == eager.fingerprint == fingerprint(in_memory(lazy.proto))
    assert in_memory(lazy.proto) == eager.proto
    for one, other in zip(lazy.proto.graph.initializer, eager.proto.graph.initializer):
        np.testing.assert_array_equal(to_array(one), to_array(other))
    for limit in (0, 1 << 30):
        save_model(lazy.proto, tmp_path / "again.onnx", inline_limit=limit)
        assert load_model(tmp_path / "again.onnx").proto == eager.proto


def test_it_may_be_written_over_its_own_file(path: Path) -> None:
    before = load_model(path).proto
    save_model(load_model(path, lazy=True).proto, path)
    assert load_model(path).proto == before


def test_folding_gives_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, report = fold(load_model(path).proto)
    whole, same = fold(load_model(path, lazy=True).proto)  # too light to be worth leaving weights out
    assert whole == eager and same == report
    monkeypatch.setattr("trtopt.graph.passes.fold.HEAVY", 0)
    light, again = fold(load_model(path, lazy=True).proto)
    assert lazy_names(light) == ["w", "w2"]
    assert in_memory(light) == eager and again == report


def test_calibrating_gives_the_same(path: Path) -> None:
    data = np.random.default_rng(1).normal(size=(8, ROWS)).astype(np.float32)
    by_path = calibrate(path, data=data, cache=False, threads=1)
    by_model = calibrate(onnx.load(path), data=data, cache=False, threads=1)
    assert by_path.table.amax == by_model.table.amax
    assert by_path.table.model["fingerprint"] == by_model.table.model["fingerprint"]


@pytest.mark.parametrize("change", ["shorter", "touched", "gone"])
def test_a_file_that_changed_is_never_read(path: Path, change: str) -> None:
    lazy = load_model(path, lazy=True)
    file = path.with_name("net.onnx.data")
    if change == "shorter":
        os.truncate(file, file.stat().st_size - 10)
    elif change == "touched":
        os.utime(file, (1, 1))
    else:
        file.unlink()
    with pytest.raises(InvalidModel, match=rf"{file.name} was changed or moved while the model in it was being used"):
        fingerprint(lazy.proto)
    with pytest.raises(InvalidModel, match=rf"{file.name} was changed or moved"):
        save_model(lazy.proto, path.with_name("other.onnx"), inline_limit=0)
