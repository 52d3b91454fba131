"""calibrate(repair=True): less noise on samples that it never saw, and the same codes wherever the table goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import decibels, model, node, nodes, photos, values
from onnx import numpy_helper, save
from world import Heard, World, has

import trtopt
from trtopt.calibration.table import Table
from trtopt.core.errors import UsageError
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import find_points
from trtopt.graph.passes.quantize import insert_qdq
from trtopt.graph.passes.repair import repair_weights
from trtopt.graph.passes.smooth import smooth
from trtopt.graph.view import to_ir, to_proto
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
    quantized = OnnxRunner(_quantized(_net(), table), optimize=False)({"x": crops})["y"]
    return decibels(quantized, OnnxRunner(_net(), optimize=False)({"x": crops})["y"])


def test_it_lowers_the_noise_on_samples_that_it_never_saw(crops: Any, found: Any) -> None:
    from dataclasses import replace

    unseen = crops[1::2]
    plain = replace(found.table, repairs={}, smoothed={})
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


def test_scales_without_samples_cannot_be_repaired(found: Any) -> None:
    with pytest.raises(UsageError, match="needs samples"):
        trtopt.calibrate(_net(), calib=found.table, repair=True)


def test_build_gives_the_engine_those_codes(world: World, found: Any) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    save(_net(), world.folder / "net.onnx")
    found.table.save(world.folder / "net.calib.json")
    files = {"--calib": "net.calib.json", "--save-onnx": "net.int8.onnx"}
    options = ("--target", "sm89", *(part for flag, name in files.items() for part in (flag, world.folder / name)))
    built = world.run("build", world.folder / "net.onnx", "--int8", *options, "-o", world.folder / "net.engine")
    assert built.status == 0, built
    graph = onnx.load(world.folder / "net.int8.onnx").graph
    expected = _quantized(_net(), found.table)
    codes = []
    for one in (graph, expected.graph):
        weights = [item for item in one.initializer if item.data_type == onnx.TensorProto.INT8 and len(item.dims) > 1]
        codes.append(sorted(numpy_helper.to_array(item).tobytes() for item in weights))
    assert codes[0] == codes[1]
    again = world.run("build", world.folder / "net.onnx", "--int8", *options, "-o", world.folder / "net.engine")
    has(again.out, "up to date")


# Activations ---------------------------------------------------------------------------------------------------------


def _block() -> onnx.ModelProto:
    """Matrix products as in a transformer; some channels of what they read are far over the others."""
    large = np.where(np.arange(32) % 11 == 3, 40, 1).astype(np.float32)
    steps = nodes(
        "[in] a = MatMul (x, w0) [scale] h = Mul (a, g) [up] b = MatMul (h, w1) [relu] r = Relu (b)"
        "[down] c = MatMul (r, w2) [skip] y = Add (c, a)"
    )
    weights = {
        "w0": values(24, 32, scale=0.2), "g": large, "w1": values(32, 64, seed=1, scale=0.2) / large[:, None],
        "w2": values(64, 32, seed=2, scale=0.1),
    }  # fmt: skip
    return model(steps, weights=weights, inputs={"x": ("n", 16, 24)}, outputs={"y": ("n", 16, 32)})


def _quantized(net: onnx.ModelProto, table: Table) -> onnx.ModelProto:
    graph = to_ir(fold(net)[0])
    smooth(graph, table.smoothed)
    _, points = repair_weights(graph, find_points(graph), table.repairs)
    return to_proto(insert_qdq(graph, points, table.amax).model)


@pytest.fixture(scope="module")
def smoothed() -> Any:
    return trtopt.calibrate(_block(), data={"x": values(48, 16, 24, seed=7)}, repair=True)


def test_channels_that_no_scale_fits_are_moved_into_the_weights(smoothed: Any) -> None:
    net, unseen = _block(), {"x": values(40, 16, 24, seed=8)}
    plain = trtopt.calibrate(net, data={"x": values(48, 16, 24, seed=7)}).table
    assert "h" in smoothed.table.smoothed
    assert smoothed.table.smoothed["h"][3] > 5 * smoothed.table.smoothed["h"][0]
    reference = OnnxRunner(net, optimize=False)(unseen)["y"]
    found = [
        decibels(OnnxRunner(_quantized(net, table), optimize=False)(unseen)["y"], reference)
        for table in (plain, smoothed.table)
    ]
    assert found[1] > found[0] + 3


def test_a_table_keeps_smoothed_channels(smoothed: Any, tmp_path: Any) -> None:
    smoothed.table.save(tmp_path / "t.json")
    loaded = Table.load(tmp_path / "t.json")
    assert loaded.digest == smoothed.table.digest and loaded.smoothed.keys() == smoothed.table.smoothed.keys()
    assert all(np.array_equal(loaded.smoothed[name], item) for name, item in smoothed.table.smoothed.items())
    again = trtopt.calibrate(_block(), calib=loaded, method="minmax").table
    assert again.smoothed.keys() == loaded.smoothed.keys()
    assert _quantized(_block(), again).graph.node  # it has all scales still
    found = trtopt.sensitivity(_block(), data={"x": values(16, 16, 24, seed=8)}, calib=loaded)
    assert "h/smoothed" in {source.name for source in found.sources}


def _uneven() -> onnx.ModelProto:
    """Convolutions with Relu between, whose channels differ a lot in size; what follows makes up for that."""
    sizes = np.exp(1.2 * values(32, seed=9)).reshape(32, 1, 1, 1)
    nodes = [
        node("Conv", "x w0 b0", "a", "c0", pads=[1, 1, 1, 1]),
        node("Relu", "a", "ra", "r0"),
        node("Conv", "ra w1", "b", "c1"),
        node("Relu", "b", "rb", "r1"),
        node("GlobalAveragePool", "rb", "y", "pool"),
    ]
    weights = {
        "w0": values(32, 3, 3, 3, scale=0.3) * sizes, "b0": values(32, seed=1, scale=0.1) * sizes.reshape(-1),
        "w1": values(32, 32, 1, 1, seed=2, scale=0.3) / sizes.reshape(1, -1, 1, 1),
    }  # fmt: skip
    return model(nodes, weights=weights, inputs={"x": ("n", 3, 32, 32)}, outputs={"y": ("n", 32, 1, 1)})


def test_channels_between_convolutions_are_made_alike(crops: Any, tmp_path: Any) -> None:
    net, unseen = _uneven(), {"x": crops[1::2]}
    plain = trtopt.calibrate(net, data={"x": crops[::2]}).table
    found = trtopt.calibrate(net, data={"x": crops[::2]}, repair=True).table
    found.save(tmp_path / "t.json")
    loaded = Table.load(tmp_path / "t.json")
    assert set(loaded.smoothed) == {"ra"} and loaded.digest == found.digest
    graph = _quantized(net, loaded)
    assert "Mul" not in {item.op_type for item in graph.graph.node}
    assert graph.SerializeToString() == _quantized(net, found).SerializeToString()
    reference = OnnxRunner(net, optimize=False)(unseen)["y"]
    before, after = (
        decibels(OnnxRunner(_quantized(net, table), optimize=False)(unseen)["y"], reference) for table in (plain, found)
    )
    assert after > before + 3
    again = trtopt.calibrate(net, data={"x": crops[::2][::-1].copy()}, repair=True, threads=1, batch=5).table
    assert again.digest == found.digest


def test_few_samples_are_told_where_they_are_measured(crops: Any) -> None:
    net, told = _net(), Heard()
    table = trtopt.calibrate(net, data={"x": crops[:6]}, reporter=told).table
    trtopt.calibrate(net, data={"x": crops[:6]}, calib=table, repair=True, reporter=told)
    assert len([text for text in told.warnings if "calibrated on only 6 samples" in text]) == 1
