"""Engines of graphs with Q/DQ beside their graphs: what stands behind a DequantizeLinear, and between quantized layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from lite0 import rows, settings
from numpy.typing import NDArray
from onnx import ModelProto

import trtopt
from trtopt.core.errors import UnsupportedRequest
from trtopt.data.difference import in_db, powers
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.session import Session

pytest.importorskip("onnxruntime", reason="ONNX Runtime runs the graph: pip install 'trtopt[ort]'")
SHAPES = "x:1x16x8x8,4x16x8x8,8x16x8x8"
NUMBERS = {name: np.float32(number) for name, number in {"s": 0.03, "m1": -1, "p1": 1, "zero": 0, "six": 6}.items()}


def _db(net: ModelProto, x: NDArray[Any], folder: Path, **options: Any) -> float:
    """Build a network, and return the dB of its engine's y to the graph that the engine was built of."""
    onnx.save(net, folder / "net.onnx")
    given = {"shapes": SHAPES, "compare": False, "allow_precision_fallback": True, **settings(folder), **options}
    trtopt.build(folder / "net.onnx", folder / "net.engine", save_onnx=folder / "kept.onnx", **given)
    with Session(folder / "net.engine") as session:
        found = np.asarray(session.run({"x": x})["y"])
    return float(in_db(*powers(OnnxRunner(folder / "kept.onnx", optimize=False)({"x": x})["y"], found)))


@pytest.mark.parametrize(
    "text",
    [
        "Neg (d)",
        "Abs (d)",
        "Clip (d, m1, p1)",
        "Clip (d, zero, p1)",
        "Clip (d, m1)",
        "Relu (d)",
        "LeakyRelu (d)",
        "Elu (d)",
        "Sigmoid (d)",
    ],
)
def test_behind_codes_an_operator_gives_what_its_graph_does(generation: Any, tmp_path: Path, text: str) -> None:
    """8.6 takes a Clip's least for 0 there, 10.6 gives other values for Neg and Abs; a bound may be rounded to a code."""
    net = written(
        f"""(float[n,16,8,8] x) => (float[n,16,8,8] y) {{
        c = QuantizeLinear (x, s, z) d = DequantizeLinear (c, s, z) y = {text} }}""",
        z=np.int8(0),
        **NUMBERS,
    )
    found = _db(net, values(4, 16, 8, 8, scale=1.5), tmp_path, tf32=False)
    rows.append((f"behind Q/DQ: {text}", f"{found:.1f} dB to the graph", ""))
    assert found > 38


@pytest.mark.parametrize(
    "text",
    [
        "c = Relu (a)",
        "c = Elu (a)",
        "g = Sigmoid (a) c = Mul (a, g)",
        "c = Abs (a)",
        "c = Neg (a)",
        "c = Clip (a, m1, p1)",
        "c = Clip (a, zero, six)",
    ],
)
def test_two_quantized_convolutions_around_an_activation_build(generation: Any, tmp_path: Path, text: str) -> None:
    """10.6 fails to build many of these, without a name, where the second one reads codes."""
    net = written(
        f"""(float[n,16,8,8] x) => (float[n,32,8,8] y) {{ a = Conv <pads = [1, 1, 1, 1]> (x, w, b) {text}
        e = Conv <pads = [1, 1, 1, 1]> (c, v, b) y = Relu (e) }}""",
        w=values(32, 16, 3, 3, scale=0.1),
        v=values(32, 32, 3, 3, seed=1, scale=0.1),
        b=values(32, seed=2, scale=0.1),
        **NUMBERS,
    )
    np.savez(tmp_path / "data.npz", x=values(32, 16, 8, 8, scale=1.5))
    found = _db(net, values(4, 16, 8, 8, seed=3, scale=1.5), tmp_path, int8=True, data=tmp_path / "data.npz")
    rows.append((f"INT8, between convolutions: {text}", f"{found:.1f} dB to the graph", ""))
    assert found > 35


def test_a_gemm_with_int4_weights_builds(generation: Any, tmp_path: Path) -> None:
    """10.6 ends the process at one that isn't written as MatMul and Add."""
    net = written(
        "(float[n,16,8,8] x) => (float[n,96] y) { f = Flatten (x) y = Gemm <transB = 1> (f, w, b) }",
        w=values(96, 1024, scale=0.03),
        b=values(96, seed=1),
    )
    try:
        found = _db(net, values(4, 16, 8, 8), tmp_path, int4=True)
    except UnsupportedRequest as error:
        pytest.skip(str(error))
    rows.append(("a Gemm with INT4 weights", f"{found:.1f} dB to the graph", ""))
    assert found > 40


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("text", ["h = Identity (x)", "h = Relu (x)"])
def test_scales_along_an_axis_of_activations_are_right_in_fp16(
    generation: Any, tmp_path: Path, axis: int, text: str
) -> None:
    """10.6 gives NaN or zeros for Q/DQ by them."""
    size = (4, 16, 8, 8)[axis]
    net = written(
        f"""(float[4,16,8,8] x) => (float[4,16,8,8] y) {{ {text} c = QuantizeLinear <axis = {axis}> (h, s, z)
        d = DequantizeLinear <axis = {axis}> (c, s, z) y = Add (d, d) }}""",
        s=np.linspace(0.02, 0.09, size, dtype=np.float32),
        z=np.zeros(size, np.int8),
    )
    found = _db(net, values(4, 16, 8, 8, scale=2.0), tmp_path, fp16=True, shapes=())
    rows.append((f"FP16, scales along axis {axis}: {text}", f"{found:.1f} dB to the graph", ""))
    assert found > 38


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(
    "text", ["g = LeakyRelu (a)", "g = Sigmoid (a)", "g = HardSwish (a)", "h = Sigmoid (a) g = Mul (a, h)"]
)
@pytest.mark.parametrize(
    "reader",
    ["y = GlobalAveragePool (g)", "y = Add (u, g)", "y = Conv <pads = [1, 1, 1, 1]> (u, o)"],
)
def test_what_follows_a_quantized_convolution_keeps_its_channels(
    generation: Any, tmp_path: Path, text: str, reader: str, level: int
) -> None:
    """10.6 mixes up more than 32 channels where the convolution writes what an activation gives in FP16."""
    net = written(
        f"""(float[n,16,8,8] x) => (float[n,64,q,r] y) {{
        c = QuantizeLinear (x, s, z) d = DequantizeLinear (c, s, z) v = DequantizeLinear (w, s, z)
        a = Conv <pads = [1, 1, 1, 1]> (d, v) {text}
        t = QuantizeLinear (g, s, z) u = DequantizeLinear (t, s, z) o = DequantizeLinear (p, s, z) {reader} }}""",
        w=np.random.default_rng(0).integers(-20, 21, (64, 16, 3, 3)).astype(np.int8),
        p=np.random.default_rng(1).integers(-20, 21, (64, 64, 3, 3)).astype(np.int8),
        z=np.int8(0),
        **NUMBERS,
    )
    found = _db(net, values(4, 16, 8, 8, seed=3, scale=1.5), tmp_path, int8=True, optimization_level=level)
    rows.append((f"INT8 convolution, {text}, {reader}, level {level}", f"{found:.1f} dB to the graph", ""))
    assert found > 35


@pytest.mark.parametrize("size", [1.0, 0.005])
def test_products_of_small_numbers_are_more_than_their_bias(generation: Any, tmp_path: Path, size: float) -> None:
    """10.6 takes the product of two scales for zero where it is 1e-7: AlexNet's results were its last bias."""
    net = written(
        """(float[n,16,8,8] x) => (float[n,64] y) {
        f = Flatten (x) [first] a = Gemm (f, w, b) r = Relu (a) [second] y = Gemm (r, v, c) }""",
        w=values(1024, 512, scale=0.01),
        v=values(512, 64, seed=1, scale=0.01),
        b=values(512, seed=2, scale=size / 10),
        c=values(64, seed=3, scale=size / 10),
    )
    np.savez(tmp_path / "data.npz", x=values(32, 16, 8, 8, scale=size))
    found = _db(net, values(4, 16, 8, 8, seed=3, scale=size), tmp_path, int8=True, data=tmp_path / "data.npz")
    rows.append((f"INT8 products of numbers about {size}", f"{found:.1f} dB to the graph", ""))
    assert found > 30
