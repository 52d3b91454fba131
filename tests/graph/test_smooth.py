"""Scales of channels moved into weights: the same function, with a tensor that one scale fits."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, nodes as graph_nodes, values
from onnx import ModelProto

from trtopt.core.errors import CalibrationError
from trtopt.graph.passes.placement import find_points
from trtopt.graph.passes.smooth import factors_for, smooth, smoothable, smoothed_name
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.runner import OnnxRunner


def _net() -> ModelProto:
    """A block as in a transformer: two products read one tensor, which a skip reads too; a Gemm; and one of activations."""
    nodes = graph_nodes(
        "[scale] h = Mul (x, g) [m0] a = MatMul (h, w0) [m1] b = MatMul (h, w1) [sum] s = Add (a, b) "
        "[relu] r = Relu (s) [m2] c = MatMul (r, w2) [skip] t = Add (c, h) "
        "[fc] y = Gemm <transB = 1> (t, w3, b3)"
    )
    large = np.where(np.arange(32) == 7, 50, 1).astype(np.float32)
    weights = {
        "g": large, "w0": values(32, 48), "w1": values(32, 48, seed=1), "w2": values(48, 32, seed=2),
        "w3": values(16, 32, seed=3), "b3": values(16, seed=4),
    }  # fmt: skip
    return model(nodes, weights=weights, inputs={"x": ("n", 32)}, outputs={"y": ("n", 16)})


def test_it_finds_what_only_products_with_matrices_read_quantized() -> None:
    found = smoothable(to_ir(_net()), find_points(to_ir(_net())))
    assert {name: sorted(readers.matrices) for name, readers in found.items()} == {
        "h": ["m0", "m1"],
        "r": ["m2"],
        "t": ["fc"],
    }
    assert found["t"].matrices["fc"].shape == (32, 16)  # transposed


def test_the_outputs_stay_and_the_outlier_goes() -> None:
    net, x = _net(), {"x": values(20, 32, seed=9)}
    ir_model = to_ir(net)
    found = smoothable(ir_model, find_points(ir_model))
    factors = {
        "h": factors_for(np.where(np.arange(32) == 7, 150, 3).astype(np.float32), found["h"], 0.8),
        "t": factors_for(np.linspace(1, 9, 32, dtype=np.float32), found["t"], 0.5),
    }
    assert factors["h"][7] == factors["h"].max() > 10 * np.median(factors["h"])
    assert np.exp(np.log(factors["h"].astype(np.float64)).mean()) == pytest.approx(1, rel=1e-4)
    result = smooth(ir_model, factors)
    assert sorted(result.changes) == ["fc", "m0", "m1"]
    changed = to_proto(ir_model)
    before, after = OnnxRunner(net, optimize=False)(x)["y"], OnnxRunner(changed, optimize=False)(x)["y"]
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-3 * np.abs(before).max())
    skip = next(item for item in changed.graph.node if item.name == "skip")
    assert "h" in skip.input  # it reads what it read
    points = find_points(to_ir(changed))
    assert {smoothed_name("h"), smoothed_name("t"), "r"} == set(points.reads)
    changed.graph.output.extend([type(changed.graph.output[0])(name=name) for name in ("h", smoothed_name("h"))])
    seen = OnnxRunner(changed, optimize=False)(x)
    spread = [np.ptp(np.log(np.abs(seen[name]).max(0))) for name in ("h", smoothed_name("h"))]
    assert spread[1] < 0.6 * spread[0]


@pytest.mark.parametrize("factors", [{"nothing": np.ones(32)}, {"h": np.ones(31)}, {"y": np.ones(16)}])
def test_factors_of_another_model_are_refused(factors: dict[str, np.ndarray]) -> None:
    with pytest.raises(CalibrationError, match="made for another model"):
        smooth(to_ir(_net()), {name: item.astype(np.float32) for name, item in factors.items()})


def _convolutions() -> ModelProto:
    """Relu, PRelu and nothing between convolutions, grouped ones too; ReLU6 and a skip, where nothing can be moved."""
    nodes = graph_nodes(
        "[c0] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0) [relu] ra = Relu (a) "
        "[depthwise] b = Conv <group = 32, pads = [1, 1, 1, 1]> (ra, w1, b1) [prelu] rb = PRelu (b, slope) "
        "[grouped] c = Conv <group = 4> (rb, w2) [c3] d = Conv (c, w3, b1) [relu6] e = Clip (d, low, high) "
        "[c4] f = Conv (e, w4, b1) [last] g = Relu (f) [c5] h = Conv (g, w5) [skip] y = Add (h, g)"
    )
    weights = {
        "w0": values(32, 3, 3, 3) * np.exp(values(32, 1, 1, 1, seed=9)), "b0": values(32, seed=1),
        "w1": values(32, 1, 3, 3, seed=2), "b1": values(32, seed=3), "slope": np.abs(values(32, 1, 1, seed=4)),
        "w2": values(32, 8, 1, 1, seed=5), "w3": values(32, 32, 1, 1, seed=6), "w4": values(32, 32, 1, 1, seed=7),
        "w5": values(32, 32, 1, 1, seed=8), "low": np.float32(0), "high": np.float32(6),
    }  # fmt: skip
    return model(nodes, weights=weights, inputs={"x": ("n", 3, 9, 9)}, outputs={"y": ("n", 32, 9, 9)})


def test_between_convolutions_the_factors_go_into_the_first_ones_weights() -> None:
    net, x = _convolutions(), {"x": values(4, 3, 9, 9, seed=9)}
    ir_model = to_ir(net)
    found = smoothable(ir_model, find_points(ir_model))
    assert {name: (item.axis, item.adds, *item.matrices) for name, item in found.items()} == {
        "ra": (1, False, "depthwise"), "rb": (1, False, "grouped"), "c": (1, False, "c3"),
    }  # fmt: skip
    assert found["ra"].matrices["depthwise"].shape == (32, 9)
    assert found["rb"].matrices["grouped"].shape == (32, 8)
    shown = to_proto(to_ir(net))
    shown.graph.output.extend([type(shown.graph.output[0])(name=name) for name in found])
    seen = OnnxRunner(shown, optimize=False)(x)
    largest = {name: np.abs(seen[name]).max((0, 2, 3)) for name in found}
    factors = {name: factors_for(largest[name], item, 0.9) for name, item in found.items()}
    result = smooth(ir_model, factors)
    assert set(result.changes) == {"c0", "depthwise", "grouped", "c3"}
    changed = to_proto(ir_model)
    assert [item.op_type for item in changed.graph.node] == [
        item.op_type for item in net.graph.node
    ]  # no node is added
    assert set(find_points(ir_model).reads) >= {smoothed_name(name) for name in found}
    np.testing.assert_allclose(
        OnnxRunner(changed, optimize=False)(x)["y"], seen["y"], rtol=1e-4, atol=1e-4 * np.abs(seen["y"]).max()
    )
    changed.graph.output.extend([type(changed.graph.output[0])(name=smoothed_name("ra"))])
    after = np.abs(OnnxRunner(changed, optimize=False)(x)[smoothed_name("ra")]).max((0, 2, 3))
    assert np.ptp(np.log(after[largest["ra"] > 0])) < 0.5 * np.ptp(np.log(largest["ra"][largest["ra"] > 0]))


def test_tensors_that_keep_their_name_keep_their_values() -> None:
    """`verify --per-layer` holds those of one name against each other."""
    net, x = _convolutions(), {"x": values(4, 3, 9, 9, seed=9)}
    ir_model = to_ir(net)
    smooth(ir_model, {name: np.exp(values(32, seed=11)).astype(np.float32) for name in ("ra", "rb", "c")})
    changed = to_proto(ir_model)
    made = [{name for item in proto.graph.node for name in item.output} for proto in (net, changed)]
    assert made[0] - made[1] == {"a", "ra", "b", "rb", "c"}
    shared = sorted(made[0] & made[1] - {"y"})
    for proto in (net, changed):
        proto.graph.output.extend([type(proto.graph.output[0])(name=name) for name in shared])
    before, after = (OnnxRunner(proto, optimize=False)(x) for proto in (net, changed))
    for name in shared:
        np.testing.assert_allclose(after[name], before[name], rtol=1e-3, atol=1e-4 * np.abs(before[name]).max())


@pytest.mark.parametrize("name", ["e", "g"])
def test_nothing_is_moved_through_relu6_or_past_another_reader(name: str) -> None:
    with pytest.raises(CalibrationError, match="made for another model"):
        smooth(to_ir(_convolutions()), {name: np.full(32, 2, np.float32)})
