"""A session opened while the model is being folded: used where folding changed nothing, and the same table either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import model, node, values
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from trtopt.calibration import ahead, calibrator, observe
from trtopt.calibration.ahead import OpenedAhead
from trtopt.calibration.calibrator import calibrate
from trtopt.calibration.prepared import prepare
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold, same_but_order, unfolded

ROWS = 512  # of the first weight: 1 MB, which stays in its file


def network(*, settled: bool = True) -> ModelProto:
    """Two branches, whose nodes aren't in the order that the libraries give them; not `settled`: with an Identity."""
    weights = {
        "w": values(ROWS, 512),
        "v": values(ROWS, 64, seed=1),
        "u": values(512, 64, seed=2),
        "t": values(64, 64, seed=3),
    }
    nodes = [node("MatMul", "x w", "m"), node("MatMul", "x v", "n"), node("Relu", "m", "r"), node("Sigmoid", "n", "s")]
    nodes += [node("Identity", "r", "i")] * (not settled)
    nodes += [node("MatMul", "r u" if settled else "i u", "k"), node("MatMul", "s t", "l"), node("Add", "k l", "y")]
    return model(nodes, inputs={"x": ["batch", ROWS]}, outputs={"y": ["batch", 64]}, weights=weights)


@pytest.fixture
def data() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(8, ROWS)).astype(np.float32)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The outputs of each session that was opened for calibration."""
    found, real = list[list[str]](), observe.open_session

    def noted(proto: ModelProto, outputs: Any, **options: Any) -> Any:
        found.append(list(outputs))
        return real(proto, outputs, **options)

    monkeypatch.setattr(observe, "open_session", noted)
    monkeypatch.setattr(calibrator, "cores", lambda: 2)
    return found


@pytest.mark.parametrize("settled", [True, False])
def test_it_is_used_where_folding_changes_nothing(
    settled: bool, data: NDArray[np.float32], opened: list[list[str]], tmp_path: Path
) -> None:
    save_model(network(settled=settled), tmp_path / "net.onnx")
    by_path = calibrate(tmp_path / "net.onnx", data=data, cache=False, threads=2)
    assert len(opened) == (1 if settled else 2)
    by_model = calibrate(onnx.load(tmp_path / "net.onnx"), data=data, cache=False, threads=2)  # nothing ahead
    tables = [{**item.table.to_json(), "model": None, "seconds": None} for item in (by_path, by_model)]
    assert tables[0] == tables[1]
    assert by_path.table.model["fingerprint"] == by_model.table.model["fingerprint"]


def test_the_order_of_nodes_and_outputs_may_be_another(data: NDArray[np.float32], tmp_path: Path) -> None:
    save_model(network(), tmp_path / "net.onnx")
    loaded = load_model(tmp_path / "net.onnx", lazy=True)
    prepared = prepare(loaded)
    other = ModelProto()
    other.CopyFrom(prepared.proto)
    nodes = sorted(other.graph.node, key=lambda item: "x" not in item.input)
    del other.graph.node[:]
    other.graph.node.extend([nodes[1], nodes[0], *nodes[2:]])
    first = OpenedAhead(loaded)
    engine = first._engine
    assert engine is not None
    outputs = engine.outputs[::-1]
    assert outputs != engine.outputs
    assert first.engine_for(other, outputs) is engine
    assert first.engine_for(other, outputs) is not engine  # given away
    tensors = ("x", *outputs)
    ours = observe.observe(other, tensors, [{"x": data}], engine=OpenedAhead(loaded).engine_for)
    plain = observe.observe(other, tensors, [{"x": data}])
    for name in tensors:
        assert ours.histograms[name].counts.tobytes() == plain.histograms[name].counts.tobytes()


def test_weights_are_compared_wherever_they_are(tmp_path: Path) -> None:
    save_model(network(), tmp_path / "net.onnx")
    lazy, eager = (load_model(tmp_path / "net.onnx", lazy=item).proto for item in (True, False))
    assert any(tensor.data_location == TensorProto.EXTERNAL for tensor in lazy.graph.initializer)
    assert same_but_order(unfolded(lazy), fold(lazy)[0]) and same_but_order(lazy, eager) and same_but_order(lazy, lazy)
    big = next(tensor for tensor in eager.graph.initializer if tensor.name == "w")
    big.raw_data = big.raw_data[:-1] + bytes([big.raw_data[-1] ^ 1])
    assert not same_but_order(lazy, eager)


def test_what_fails_ahead_is_said_where_it_is_needed(
    data: NDArray[np.float32], opened: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(proto: ModelProto, outputs: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(ahead, "Engine", failing)
    save_model(network(), tmp_path / "net.onnx")
    assert calibrate(tmp_path / "net.onnx", data=data, cache=False).samples == 8
    assert len(opened) == 1


def test_large_models_and_those_in_memory_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(network(), tmp_path / "net.onnx")
    loaded = load_model(tmp_path / "net.onnx", lazy=True)
    assert ahead.worth_opening(loaded) and not ahead.worth_opening(load_model(network()))
    monkeypatch.setattr(ahead, "LARGEST", 1 << 20)
    assert not ahead.worth_opening(loaded)
