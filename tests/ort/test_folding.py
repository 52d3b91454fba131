"""A fold that changes what a model computes: caught where it happens, and by every gate where it isn't."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import model, nodes as graph_nodes, values
from onnx import ModelProto, numpy_helper
from world import RTX, Heard, World

import trtopt
import trtopt.autotune.building
import trtopt.autotune.sensitivity
import trtopt.linting.checker  # all that fold, before one of them could take what is planted for good
from trtopt.graph.io import load_model
from trtopt.graph.passes import fold as folding
from trtopt.ort.folding import _COMPARED, proven


def heavy() -> ModelProto:
    """20 MB: far more than folding's own net compares."""
    nodes = graph_nodes(
        "[conv1] a = Conv <pads = [1, 1, 1, 1]> (x, w1) [relu1] b = Relu (a) "
        "[conv2] c = Conv <strides = [2, 2]> (b, w2) [norm] d = BatchNormalization (c, s, o, m, v) "
        "[relu2] e = Relu (d) [flatten] f = Flatten (e) [fc] y = Gemm (f, w3)"
    )
    weights = {"w1": values(3, 3, 3, 3, scale=0.2), "w2": values(16, 3, 2, 2, seed=1, scale=0.1)}
    weights |= {"s": values(16, seed=2) + 2, "o": np.zeros(16, "f"), "m": np.zeros(16, "f"), "v": np.ones(16, "f")}
    weights["w3"] = values(4096, 1200, seed=5, scale=0.01)
    proto = model(nodes, weights=weights, inputs={"x": ["n", 3, 32, 32]}, outputs={"y": ["n", 1200]})
    assert proto.ByteSize() > 19_000_000
    return proto


def spoiled(proto: ModelProto) -> ModelProto:
    """Two channels of the first convolution twice as large as they were in the model."""
    conv = next(item for item in proto.graph.node if item.op_type == "Conv")
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == conv.input[1])
    array = numpy_helper.to_array(weight).copy()
    array[:2] = 2 * values(3, 3, 3, 3, scale=0.2)[:2]
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    return proto


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heavy")
    onnx.save(heavy(), folder / "m.onnx")
    ramp = np.linspace(-1, 1, 3 * 1024, dtype=np.float32).reshape(1, 3, 32, 32)
    x = np.concatenate([ramp * (1 + k / 10) for k in range(40)]) + values(40, 3, 32, 32, scale=0.3)
    np.savez(folder / "d.npz", x=x)
    return folder


def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil what every stage folds, or takes unfolded, behind folding's own look at it."""

    def wrong(right: Any) -> Any:
        def spoiling(*given: Any, **options: Any) -> Any:
            result, report = right(*given, **options)
            return spoiled(result), report

        return spoiling

    for right in (folding.fold, folding.unfolded):
        for module in list(sys.modules.values()):
            if module is not folding and getattr(module, right.__name__, None) is right:
                monkeypatch.setattr(module, right.__name__, wrong(right))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "build {m} --int8 --data {d} --min-snr 20 -o {o}.engine",
            "the folded graph gives other values than the model",
        ),
        (
            "build {m} --fp16 --data {d} --min-snr 30 -o {o}.engine",
            "the folded graph gives other values than the model",
        ),
        ("tune {m} --data {d} --min-snr 20 -o {o}.engine", "the folded graph gives other values than the model"),
        ("verify {m} {o}.engine --data {d} --min-snr 20", "at least 20 is asked for"),
        ("sensitivity {m} --data {d}", "the folded graph gives other values than the model"),
        ("check {m} --fix {o}.clean.onnx", "computes something else"),
    ],
)
def test_a_wrong_fold_turns_every_gate_red(
    files: Path, world: World, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    planted(monkeypatch)
    names = {"m": files / "m.onnx", "d": files / "d.npz", "o": world.folder / "o"}
    if line.startswith("verify"):
        trtopt.build(names["m"], f"{names['o']}.engine", save_onnx=f"{names['o']}.onnx", backend="rtx", target="sm89")
    target = () if line.startswith(("sensitivity", "verify", "check")) else RTX
    outcome = world.run(*line.format(**names).split(), *target)
    assert outcome.status == 1, outcome
    assert said in outcome.out + outcome.err
    made = {path.name for path in world.folder.glob("o.*")}
    built = {"o.engine", "o.engine.json", "o.engine.results.json", "o.onnx"}
    assert made == (built if line.startswith("verify") else set())


@pytest.mark.parametrize("sampled", [False, True])
def test_a_librarys_wrong_step_is_left_out_and_told(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    right = folding._evaluate
    monkeypatch.setattr(folding, "_evaluate", lambda proto, most: spoiled(right(proto, most)))
    heard, graph = Heard(), tmp_path / "g.onnx"
    how: dict[str, Any] = {"fp16": True, "data": files / "d.npz"} if sampled else {}
    trtopt.build(
        files / "m.onnx", tmp_path / "m.engine", save_onnx=graph, backend="rtx", target="sm89", reporter=heard, **how
    )
    (warning,) = [text for text in heard.warnings if "isn't folded" in text]
    assert "largest difference" in warning
    assert trtopt.verify(files / "m.onnx", graph, data=files / "d.npz", min_snr=50).ok


def test_what_folding_left_as_it_was_is_not_run_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[Any]()
    monkeypatch.setattr("trtopt.ort.folding.compare", lambda *given, **options: compared.append(given) or "")
    _COMPARED.clear()
    first = proven(load_model(heavy()))
    assert len(compared) == 1  # its BatchNormalization went
    assert proven(load_model(first.proto)).report.before == first.report.after and len(compared) == 1


def test_what_cannot_be_compared_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    _COMPARED.clear()
    heard, loaded = Heard(), load_model(heavy())
    for _ in range(2):
        report = proven(loaded, reporter=heard).report
        assert report.removed["BatchNormalization"] == 1 and not report.problem
    (note,) = heard.notes
    assert "wasn't held against the model" in note and "pip install 'onnxruntime" in note
