"""calibrate(repair=True): less noise on samples that it never saw, and the same codes wherever the table goes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import decibels, model, node, photos, values
from onnx import numpy_helper, save
from world import World, has

import trtopt
from trtopt.calibration.noise import NoiseLedger
from trtopt.calibration.table import Table
from trtopt.core.errors import CalibrationError, UsageError
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import find_points
from trtopt.graph.view import to_ir
from trtopt.ort.runner import OnnxRunner


def _net() -> onnx.ModelProto:
    """A small network as they are: strided, depthwise, pointwise with a skip, pooled, a linear layer."""
    nodes = [
        node("Conv", "x w0 b0", "a", "stem", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", "a", "ra", "r0"),
        node("Conv", "ra w1 b1", "d", "depthwise", group=32, pads=[1, 1, 1, 1]),
        node("Relu", "d", "rd", "r1"),
        node("Conv", "rd w2", "p", "pointwise"),
        node("Add", "p ra", "s", "add"),
        node("Relu", "s", "rs", "r2"),
        node("GlobalAveragePool", "rs", "g", "pool"),
        node("Flatten", "g", "f", "flat"),
        node("Gemm", "f w3 b3", "y", "fc", transB=1),
    ]
    spread = np.exp(values(32, 1, 1, 1, seed=8))  # channels of different sizes, as after folding BatchNormalization
    weights = {
        "w0": values(32, 3, 3, 3, scale=0.3), "b0": values(32, seed=1, scale=0.1),
        "w1": values(32, 1, 3, 3, seed=2) * spread, "b1": values(32, seed=3, scale=0.1),
        "w2": values(32, 32, 1, 1, seed=4, scale=0.2), "w3": values(40, 32, seed=5), "b3": values(40, seed=6),
    }  # fmt: skip
    return model(nodes, weights=weights, inputs={"x": ("n", 3, 32, 32)}, outputs={"y": ("n", 40)})


@pytest.fixture(scope="module")
def crops() -> Any:
    whole = photos(256, 3)
    return np.concatenate([whole[:, :, r : r + 32, c : c + 32] for r in range(0, 224, 32) for c in range(0, 224, 64)])


@pytest.fixture(scope="module")
def found(crops: Any) -> Any:
    return trtopt.calibrate(_net(), data={"x": crops[::2]}, method="minmax", repair=True)


def _snr(table: Table, crops: Any) -> float:
    folded = fold(_net())[0]
    ledger = NoiseLedger(folded, find_points(to_ir(folded)), table.amax, 1)
    quantized = OnnxRunner(ledger.quantized(table.repairs), optimize=False)({"x": crops})["y"]
    return decibels(quantized, OnnxRunner(folded, optimize=False)({"x": crops})["y"])


def test_it_lowers_the_noise_on_samples_that_it_never_saw(crops: Any, found: Any) -> None:
    from dataclasses import replace

    unseen = crops[1::2]
    plain = replace(found.table, repairs={})
    assert {"stem", "depthwise", "pointwise"} & found.table.repairs.keys()
    assert found.repairs.after < found.repairs.before
    assert _snr(found.table, unseen) > _snr(plain, unseen) + 0.3
    has(str(found.repairs), "rounded otherwise", "held apart", "y ")


def test_it_is_the_same_again_whatever_the_threads(crops: Any, found: Any) -> None:
    again = trtopt.calibrate(_net(), data={"x": crops[::2][::-1].copy()}, method="minmax", repair=True, threads=1)
    assert again.table.repairs == found.table.repairs
    assert again.table.digest == found.table.digest


def test_a_table_keeps_it(found: Any, tmp_path: Any) -> None:
    found.table.save(tmp_path / "t.json")
    loaded = Table.load(tmp_path / "t.json")
    assert loaded.repairs == found.table.repairs and loaded.digest == found.table.digest
    assert loaded.with_method("entropy").repairs == found.table.repairs
    assert trtopt.calibrate(_net(), calib=loaded, method="mse").table.repairs == found.table.repairs


@pytest.mark.parametrize(
    "damage",
    [
        {"shape": [2, 2]}, {"shape": [-1]}, {"shape": "4"}, {"offsets": "!"}, {"offsets": "AAAA"}, {"bias": "AAAA"},
        {"bias": 3}, {"shape": [1 << 20, 1 << 20]},
    ],
)  # fmt: skip
def test_a_damaged_repair_is_named(found: Any, tmp_path: Any, damage: dict[str, Any]) -> None:
    content = found.table.to_json()
    name = next(iter(content["repairs"]))
    content["repairs"][name] |= damage
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(CalibrationError, match="repair"):
        Table.load(tmp_path / "t.json")


def test_scales_without_samples_cannot_be_repaired(found: Any) -> None:
    with pytest.raises(UsageError, match="needs samples"):
        trtopt.calibrate(_net(), calib=found.table, repair=True)


def test_build_gives_the_engine_those_codes(world: World, found: Any) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    save(_net(), world.folder / "net.onnx")
    found.table.save(world.folder / "net.calib.json")
    options = (
        "--calib",
        world.folder / "net.calib.json",
        "--target",
        "sm89",
        "--save-onnx",
        world.folder / "net.int8.onnx",
    )
    built = world.run("build", world.folder / "net.onnx", "--int8", *options, "-o", world.folder / "net.engine")
    assert built.status == 0, built
    graph = onnx.load(world.folder / "net.int8.onnx").graph
    folded = fold(_net())[0]
    expected = NoiseLedger(folded, find_points(to_ir(folded)), found.table.amax, 1).quantized(found.table.repairs)
    codes = []
    for one in (graph, expected.graph):
        weights = [item for item in one.initializer if item.data_type == onnx.TensorProto.INT8 and len(item.dims) > 1]
        codes.append(sorted(numpy_helper.to_array(item).tobytes() for item in weights))
    assert codes[0] == codes[1]
    again = world.run("build", world.folder / "net.onnx", "--int8", *options, "-o", world.folder / "net.engine")
    has(again.out, "up to date")


def test_the_command_says_what_it_gave(world: World, crops: Any) -> None:
    save(_net(), world.folder / "net.onnx")
    np.savez(world.folder / "crops.npz", x=crops)
    said = world.run(
        "calibrate",
        world.folder / "net.onnx",
        "--data",
        world.folder / "crops.npz",
        "--repair",
        "-o",
        world.folder / "t.json",
    )
    assert said.status == 0, said
    has(said.out, "weights rounded otherwise than to the nearest code: y ", "samples held apart")
    assert json.loads((world.folder / "t.json").read_text())["repairs"]
