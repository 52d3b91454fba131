"""An encoder of two blocks, of which TensorRT 8.6 says nothing: it hides them in a region."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import decibels, model, node, points_of, values
from lite0 import rows, settings
from numpy.typing import NDArray
from onnx import NodeProto
from onnx.reference import ReferenceEvaluator

from trtopt.builder.construction import build
from trtopt.calibration.table import Table
from trtopt.calibration.thresholds import TableEntry
from trtopt.core.values import Precision
from trtopt.cuda.device import Device
from trtopt.graph.passes.fold import fold
from trtopt.runtime.session import Session

TOKENS, WIDTH, HEADS, BLOCKS = 64, 256, 4, 2


def encoder() -> onnx.ModelProto:
    """Patches of 8 × 8, then blocks of attention and a perceptron, each behind a LayerNormalization."""
    nodes: list[NodeProto] = [
        node("Conv", "x patch patch_b", "c", "patches", kernel_shape=[8, 8], strides=[8, 8]),
        node("Reshape", "c flat", "f", "flatten"),
        node("Transpose", "f", "t0", "tokens", perm=[0, 2, 1]),
    ]
    weights = {
        "patch": values(WIDTH, 3, 8, 8, scale=0.07),
        "patch_b": values(WIDTH, scale=0.1),
        "flat": np.array([0, WIDTH, TOKENS], np.int64),
        "split": np.array([0, TOKENS, HEADS, WIDTH // HEADS], np.int64),
        "merged": np.array([0, TOKENS, WIDTH], np.int64),
        "share": np.float32((WIDTH / HEADS) ** -0.5),
        "half": np.float32(0.5),
        "one": np.float32(1),
        "root": np.float32(2**-0.5),
        "scale": np.ones(WIDTH, np.float32),
        "shift": np.zeros(WIDTH, np.float32),
    }

    def linear(name: str, source: str, result: str, inside: int, outside: int) -> None:
        weights[f"w_{name}"] = values(inside, outside, seed=len(nodes), scale=inside**-0.5)
        weights[f"b_{name}"] = values(outside, seed=len(nodes), scale=0.1)
        nodes.append(node("MatMul", f"{source} w_{name}", f"{result}_m", name))
        nodes.append(node("Add", f"{result}_m b_{name}", result))

    for block in range(BLOCKS):
        b, last = f"_{block}", f"t{block}"
        nodes.append(node("LayerNormalization", f"{last} scale shift", f"n{b}", axis=-1, epsilon=1e-6))
        for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            linear(f"{part}{b}", f"n{b}", f"{part}l{b}", WIDTH, WIDTH)
            nodes.append(node("Reshape", f"{part}l{b} split", f"{part}r{b}"))
            nodes.append(node("Transpose", f"{part}r{b}", f"{part}t{b}", perm=perm))
        nodes += [
            node("MatMul", f"qt{b} kt{b}", f"qk{b}"),
            node("Mul", f"qk{b} share", f"s{b}"),
            node("Softmax", f"s{b}", f"a{b}", axis=-1),
            node("MatMul", f"a{b} vt{b}", f"av{b}"),
            node("Transpose", f"av{b}", f"at{b}", perm=[0, 2, 1, 3]),
            node("Reshape", f"at{b} merged", f"ar{b}"),
        ]
        linear(f"out{b}", f"ar{b}", f"o{b}", WIDTH, WIDTH)
        nodes.append(node("Add", f"{last} o{b}", f"h{b}"))
        nodes.append(node("LayerNormalization", f"h{b} scale shift", f"m{b}", axis=-1, epsilon=1e-6))
        linear(f"up{b}", f"m{b}", f"u{b}", WIDTH, 4 * WIDTH)
        nodes += [
            node("Mul", f"u{b} root", f"e1{b}"),
            node("Erf", f"e1{b}", f"e2{b}"),
            node("Add", f"e2{b} one", f"e3{b}"),
            node("Mul", f"u{b} e3{b}", f"e4{b}"),
            node("Mul", f"e4{b} half", f"g{b}"),
        ]
        linear(f"down{b}", f"g{b}", f"d{b}", 4 * WIDTH, WIDTH)
        nodes.append(node("Add", f"h{b} d{b}", f"t{block + 1}"))
    nodes.append(node("ReduceMean", f"t{BLOCKS}", "mean", axes=[1], keepdims=0))
    linear("head", "mean", "y", WIDTH, 100)
    side = 8 * int(TOKENS**0.5)
    return model(nodes, inputs={"x": ["n", 3, side, side]}, outputs={"y": ["n", 100]}, weights=weights)


def measured(proto: onnx.ModelProto, x: NDArray[np.float32]) -> Table:
    """The largest magnitudes on `x`, by ONNX's evaluator: no ONNX Runtime on this machine."""
    folded = fold(proto)[0]
    names = list(points_of(folded).activations)
    made = onnx.ModelProto()
    made.CopyFrom(folded)
    known = {item.name for item in made.graph.output}
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known | {"x"})
    wanted = [name for name in names if name != "x"]
    seen = {"x": x, **dict(zip(wanted, ReferenceEvaluator(made).run(wanted, {"x": x})))}
    entries = {name: TableEntry(float(np.abs(seen[name]).max()), "imported") for name in names}
    return Table(entries, (), {"name": "encoder", "fingerprint": ""}, {}, "imported", 0)


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_what_an_encoder_runs_is_known_or_said_not_to_be(
    generation: Any, gpu: Device, tmp_path: Path, precision: str
) -> None:
    x = values(4, 3, 64, 64, seed=1)
    proto = encoder()
    onnx.save(proto, tmp_path / "encoder.onnx")
    made = build(
        tmp_path / "encoder.onnx",
        tmp_path / "encoder.engine",
        int8=precision == "int8",
        fp16=precision == "fp16",
        calib=measured(proto, x) if precision == "int8" else None,
        shapes=["x:1x3x64x64", "x:4x3x64x64"],
        **{**settings(), "optimization_level": 1},
    )
    with Session(made.engine) as session:
        found = session.run({"x": x})["y"]
    accuracy = decibels(found, ReferenceEvaluator(proto).run(["y"], {"x": x})[0])
    rows.append((f"encoder, {precision}", str(made.precision_summary), f"{accuracy:.1f} dB to FP32"))
    if made.coverage:
        assert made.coverage[Precision(precision)] > 0.8
    else:
        assert "isn't known" in made.precision_summary
    assert accuracy > (20 if precision == "int8" else 45)
