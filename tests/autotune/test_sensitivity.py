"""The noise ledger: each source's noise is what the real Q/DQ graph of that source alone makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import decibels, model, node, photos, points_of, quantized, values, written
from onnx import ModelProto, TensorProto, helper, numpy_helper, save
from world import Heard, World, has

import trtopt
from trtopt.autotune.sensitivity import Sensitivity
from trtopt.calibration.noise import snr_db
from trtopt.core.errors import CalibrationError, DataError, ModelError, UsageError
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.placement import Points
from trtopt.ort.runner import OnnxRunner


def _net(batch: int | str = "n", seed: int = 0) -> ModelProto:
    """Three convolutions with a skip, a pool and a linear layer; the second convolution has a channel far over the others."""
    uneven = values(32, 32, 3, 3, seed=1, scale=0.05)
    uneven[:, 5] *= 60  # one input channel: its weights set every output channel's scale
    text = f"""(float[{batch},3,32,32] x) => (float[{batch},10] y) {{
        [c0] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0) [r0] ra = Relu (a) [c1] b = Conv <pads = [1, 1, 1, 1]> (ra, w1)
        [add] s = Add (b, ra) [r1] rs = Relu (s) [c2] c = Conv <strides = [2, 2]> (rs, w2) [r2] rc = Relu (c)
        [pool] p = GlobalAveragePool (rc) [flat] f = Flatten (p) [fc] y = Gemm <transB = 1> (f, w3, b3)
    }}"""
    weights = {
        "w0": values(32, 3, 3, 3, seed=seed, scale=0.3), "b0": values(32, seed=6, scale=0.1), "w1": uneven,
        "w2": values(32, 32, 3, 3, seed=2, scale=0.1), "w3": values(10, 32, seed=3), "b3": values(10, seed=4),
    }  # fmt: skip
    return written(text, **weights)


@pytest.fixture(scope="module")
def crops() -> np.ndarray[Any, Any]:
    whole = photos(96, 3)
    return np.concatenate(
        [whole[:, :, row : row + 32, column : column + 32] for row in (0, 32, 64) for column in (0, 48)]
    )


@pytest.fixture(scope="module")
def found(crops: Any) -> Sensitivity:
    return trtopt.sensitivity(_net(), data={"x": crops}, method="minmax", samples=8)


def _alone(points: Points, source: Any) -> Points:
    reads = {name: slots for name, slots in points.reads.items() if (source.kind, source.name) == ("activation", name)}
    weights = tuple(item for item in points.weights if source.kind == "weight" and item.node == source.nodes[0])
    return replace(points, reads=reads, weights=weights)


def _really(points: Points, crops: Any, folded: ModelProto, amax: dict[str, float]) -> float:
    reference = OnnxRunner(folded, optimize=False, threads=1)({"x": crops})["y"]
    return decibels(
        OnnxRunner(quantized(folded, points, amax), optimize=False, threads=1)({"x": crops})["y"], reference
    )


def test_each_source_makes_the_noise_that_its_own_graph_makes(crops: Any, found: Sensitivity) -> None:
    chosen = np.concatenate([batch["x"] for batch in _chosen(crops, 8)])
    folded = fold(_net())[0]
    table = trtopt.calibrate(_net(), data={"x": crops}, method="minmax").table
    amax = {name: entry.amax for name, entry in table.tensors.items()}
    points = points_of(folded)
    assert len(found.sources) == len(points.activations) + len(points.weights) == 7
    for source in found.sources:
        expected = _really(_alone(points, source), chosen, folded, amax)
        assert snr_db(source.noise["y"]) == pytest.approx(expected, abs=0.05), source.what
    assert snr_db(found.measured["y"]) == pytest.approx(_really(points, chosen, folded, amax), abs=0.05)


def _chosen(crops: Any, count: int) -> list[Any]:
    from trtopt.data import open_data

    return list(open_data(load_model(_net()).inputs, data={"x": crops}, limit=count))


def test_the_uneven_weight_comes_first_and_the_sum_foretells_the_whole(found: Sensitivity) -> None:
    assert found.sources[0].what == "weights of c1"
    assert found.share(found.sources[0]) > 0.5 and found.weights > 2 / 3
    has(found.summary, "weights make", "weights of c1 make", "calibration isn't to blame")
    assert found.summary.endswith("another method won't help much; `repair=True` of calibrate, or tune, may")
    assert sum(map(found.share, found.sources)) == pytest.approx(1)
    assert snr_db(found.predicted["y"]) == pytest.approx(snr_db(found.measured["y"]), abs=2)
    assert found.sources[0].nbytes == 4 * 32 * 32 * 9
    assert [source.noise["y"] for source in found.sources] == sorted(
        (s.noise["y"] for s in found.sources), reverse=True
    )


def test_neither_threads_nor_batches_change_it(crops: Any, found: Sensitivity, tmp_path: Path) -> None:
    again = trtopt.sensitivity(_net(), data={"x": crops[::-1].copy()}, method="minmax", samples=8, threads=3)
    assert {s.what: s.noise["y"] for s in again.sources} == pytest.approx(
        {s.what: s.noise["y"] for s in found.sources}, rel=1e-12
    )
    fixed = trtopt.sensitivity(_net(3), data={"x": crops}, method="minmax", samples=8)  # the last batch is filled up
    assert fixed.samples == 8
    assert {s.what: s.noise["y"] for s in fixed.sources} == pytest.approx(
        {s.what: s.noise["y"] for s in found.sources}, rel=1e-3
    )


def test_what_a_build_keeps_in_fp32_by_its_values_makes_no_noise() -> None:
    """As a power spectrum's mel filters, whose sums pass 65,504: the build leaves them out of INT8."""
    text = "[mel] a = MatMul (x, w0) [floor] c = Clip (a, low) [log] l = Log (c) [head] y = MatMul (l, w1)"
    weights = {"w0": np.abs(values(64, 32)), "w1": values(32, 16), "low": np.float32(1)}
    proto = written(f"(float[n,64] x) => (float[n,16] y) {{ {text} }}", **weights)
    power, heard = np.exp(3 * values(40, 64, seed=1)), Heard()
    result = trtopt.sensitivity(proto, data={"x": power.astype(np.float32)}, reporter=heard)
    assert {node for source in result.sources for node in source.nodes} == {"head"}
    assert any("left out, as a build keeps them in FP32: mel (gives" in text for text in heard.notes)


def test_a_table_gives_the_scales(crops: Any, found: Sensitivity) -> None:
    table = trtopt.calibrate(_net(), data={"x": crops}, method="minmax").table
    given = trtopt.sensitivity(_net(), data={"x": crops}, calib=table, samples=8)
    assert given == found
    heard = Heard()
    trtopt.sensitivity(_net(seed=9), data={"x": crops}, calib=table, samples=2, reporter=heard)
    assert ["made for another model" in text for text in heard.warnings] == [True]
    shapes: dict[str, Any] = {"inputs": {"z": ("n", 32)}, "outputs": {"y": ("n", 32)}}
    other = model([node("Gemm", "z w", "y", "g")], weights={"w": values(32, 32)}, **shapes)
    with pytest.raises(CalibrationError, match="no scale for"):
        trtopt.sensitivity(other, data={"z": values(8, 32)}, calib=table)


@pytest.mark.parametrize(
    ("factor", "scale", "said"),
    [
        (1.0, "right", ""),
        (0.1, "clips", "the scale of rs clips: other samples or another method may help"),
        (10.0, "too wide", "the scale of rs is too wide: other samples or another method"),
    ],
)
def test_a_wrong_scale_is_told_from_too_few_bits(crops: Any, factor: float, scale: str, said: str) -> None:
    table = trtopt.calibrate(_net(), data={"x": crops}, method="mse").table
    tensors = {**table.tensors, "rs": replace(table.tensors["rs"], amax=factor * table.tensors["rs"].amax)}
    wrong = trtopt.sensitivity(
        _net(),
        data={"x": crops},
        calib=replace(table, tensors=tensors),
        samples=8,
        precision_override=["c0=fp32", "c1=fp32", "fc=fp32"],
    )
    assert {item["name"]: item["scale"] for item in wrong.to_json()["sources"]}["rs"] == scale
    assert {source.scale for source in wrong.sources if source.kind == "weight"} == {""}
    if said:
        has(wrong.summary, said)


def test_values_that_no_scale_fits_want_more_bits() -> None:
    random = np.random.default_rng(0)
    uneven = random.standard_normal((16, 64)).astype(np.float32) * np.geomspace(1e-3, 1, 64, dtype=np.float32)
    weights = {"w": values(64, 32) / np.geomspace(1e-3, 1, 64, dtype=np.float32)[:, None]}
    net = model([node("MatMul", "z w", "y", "m")], weights=weights, inputs={"z": ("n", 64)}, outputs={"y": ("n", 32)})
    found = trtopt.sensitivity(net, data={"z": uneven}, method="minmax")
    assert found.weights < 1 / 2 and {source.scale for source in found.sources} == {"right", ""}
    has(found.summary, "neither half nor twice the scale does better: `repair=True` of calibrate, or tune, may help")


def test_outputs_without_a_measure_are_left_out(crops: Any) -> None:
    proto = _net()
    proto.graph.node.append(node("ArgMax", "y", "best", "best", axis=1))
    proto.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, ["n", 1]))
    proto.graph.initializer.append(numpy_helper.from_array(values(4), "anchors"))
    proto.graph.output.append(helper.make_tensor_value_info("anchors", TensorProto.FLOAT, [4]))
    found = trtopt.sensitivity(proto, data={"x": crops}, samples=4)
    assert found.output == "y" and found.left_out.keys() == {"best", "anchors"}
    assert found.left_out["anchors"] == "it is a constant of the model"
    assert found.measured.keys() == found.predicted.keys() == {"y"}
    del proto.graph.output[::2]
    with pytest.raises(ModelError, match="no output is floating"):
        trtopt.sensitivity(proto, data={"x": crops}, samples=4)


def test_an_output_whose_shape_follows_its_values_has_no_measure() -> None:
    text = """(float[n,16] x) => (float[n,16] y, float[k] picked) {
        [first] h = MatMul (x, w1) [relu] r = Relu (h) [second] y = MatMul (r, w2)
        [line] l = Reshape (y, whole) [over] o = Greater (l, zero) [pick] picked = Compress (l, o)
    }"""
    more = {"whole": np.array([-1]), "zero": np.array(0, np.float32)}
    proto, data = written(text, w1=values(16, 32), w2=values(32, 16, seed=1), **more), {"x": values(40, 16, seed=2)}
    found = trtopt.sensitivity(proto, data=data)
    assert found.measured.keys() == found.predicted.keys() == {"y"}
    assert found.left_out == {"picked": "its shape depends on the values"}
    del proto.graph.output[0]
    for measured in (trtopt.sensitivity, lambda model, data: trtopt.calibrate(model, data=data, repair=True)):
        with pytest.raises(ModelError, match="no measure at any output: picked: its shape depends on the values"):
            measured(proto, data=data)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"samples": 0}, UsageError, "samples"),
        ({"top": -3}, UsageError, "`top=` is -3"),
        ({"threads": 0}, UsageError, "threads"),
        ({"data": None}, UsageError, "no data"),
        ({"data": {"x": np.zeros((4, 3, 8), np.float32)}}, (UsageError, DataError), "x"),
        ({"precision_override": ["nowhere=fp32"]}, UsageError, "matches no node"),
    ],
)
def test_what_cannot_be_is_refused(crops: Any, arguments: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        trtopt.sensitivity(_net(), **{"data": {"x": crops}, **arguments})


def test_the_command_prints_a_table_and_one_object(world: World, crops: Any) -> None:
    net = _net()
    net.graph.node.append(node("Relu", "x", "same"))
    net.graph.output.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, ["n", *crops.shape[1:]]))
    save(net, world.folder / "net.onnx")
    np.savez(world.folder / "crops.npz", x=crops)
    arguments = ("sensitivity", world.folder / "net.onnx", "--data", world.folder / "crops.npz", "--samples", 4)
    said = world.run(*arguments, "--top", 3)
    assert said.status == 0, said
    has(said.out, "weights of c1", "of the noise", "--top 0 prints all", "Weights make", "y: the whole in INT8")
    has(said.out, "4 samples", "same: INT8 changes nothing in it")
    has(said.err, "measuring noise")
    content = json.loads(world.run(*arguments, "--json").out)
    assert content["sources"][0]["nodes"] == ["c1"] and content["sources"][0]["kind"] == "weight"
    assert content["predicted_snr_db"]["y"] == pytest.approx(content["measured_snr_db"]["y"], abs=3)
    refused = world.run("sensitivity", world.folder / "net.onnx")
    assert refused.status == 2
    has(refused.err, "--images", "--data")


@pytest.mark.parametrize("group", [1, 4])
def test_a_transposed_convolution_is_ranked_by_its_own_axis(group: int, crops: Any, tmp_path: Path) -> None:
    """Its weights are inputs × outputs of a group: a scale for each output where there is one group, else one for all."""
    weights = {
        "w0": values(16, 3, 3, 3, scale=0.3),
        "up": values(16, 32 // group, 2, 2, seed=1)
        * np.logspace(-2, 0, 32 // group)[None, :, None, None].astype(np.float32),
        "w1": values(4, 32, 1, 1, seed=2),
    }
    text = f"""(float[n,3,32,32] x) => (float[n,4,64,64] y) {{
        [c0] a = Conv <pads = [1, 1, 1, 1]> (x, w0) [r0] ra = Relu (a)
        [up0] b = ConvTranspose <strides = [2, 2], group = {group}> (ra, up) [c1] y = Conv (b, w1)
    }}"""
    net = written(text, **weights)
    found = trtopt.sensitivity(net, data=crops, samples=len(crops))
    [source] = [item for item in found.sources if item.name == "up"]
    largest = np.abs(weights["up"]).max((0, 2, 3), keepdims=True) if group == 1 else np.abs(weights["up"]).max()
    scale = largest / 127
    rounded = {**weights, "up": (np.round(weights["up"] / scale) * scale).astype(np.float32)}
    coarse = written(text, **rounded)
    expected, given = (OnnxRunner(proto, optimize=False)({"x": crops})["y"] for proto in (net, coarse))
    assert snr_db(source.noise["y"]) == pytest.approx(decibels(given, expected), abs=0.05)
