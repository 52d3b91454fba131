"""A small residual network in both forms: TensorRT computes the same, with every convolution in INT8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from graphs import decibels, model, node, points_of, values
from lite0 import rows, settings
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from trtopt.builder.construction import build
from trtopt.cuda.device import Device
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.quantize import insert_qdq
from trtopt.graph.passes.rearrange import rearrange
from trtopt.graph.view import to_ir, to_proto
from trtopt.runtime.session import Session

SHAPE = (8, 3, 64, 64)
# name, input, result, in, out, kernel, stride
CONVOLUTIONS = (
    ("stem", "x", "c0", 3, 64, 7, 2),
    ("one_a", "p", "c1", 64, 32, 1, 1),
    ("one_b", "r1", "c2", 32, 32, 3, 1),
    ("one_c", "r2", "m1", 32, 128, 1, 1),
    ("one_skip", "p", "s1", 64, 128, 1, 1),
    ("two_a", "r3", "c4", 128, 64, 1, 1),
    ("two_b", "r4", "c5", 64, 64, 3, 2),
    ("two_c", "r5", "m2", 64, 256, 1, 1),
    ("two_skip", "r3", "s2", 128, 256, 1, 2),
    ("last", "r6", "y", 256, 32, 1, 1),
)
ORDER = (
    "stem act0 pool one_a act1 one_b act2 one_c one_skip add1 act3 two_a act4 two_b act5 two_c two_skip add2 act6 last"
)


def network() -> onnx.ModelProto:
    """Two blocks as ResNet-50's: a skip of its own without and with a stride."""
    nodes: dict[str, onnx.NodeProto] = {}
    weights = {}
    for seed, (name, source, result, inside, outside, kernel, stride) in enumerate(CONVOLUTIONS):
        scale = (2 / (inside * kernel**2)) ** 0.5
        weights[f"w_{name}"] = values(outside, inside, kernel, kernel, seed=seed, scale=scale)
        weights[f"b_{name}"] = values(outside, seed=seed, scale=0.1)
        window = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "kernel_shape": [kernel] * 2}
        nodes[name] = node("Conv", f"{source} w_{name} b_{name}", result, name, **window)
    for index, source in enumerate(("c0", "c1", "c2", "a1", "c4", "c5", "a2")):
        nodes[f"act{index}"] = node("Relu", source, f"r{index}", f"act{index}")
    nodes["pool"] = node("MaxPool", "r0", "p", "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for index in (1, 2):
        nodes[f"add{index}"] = node("Add", f"m{index} s{index}", f"a{index}", f"add{index}")
    chosen = [nodes[name] for name in ORDER.split()]
    return fold(model(chosen, inputs={"x": ["n", *SHAPE[1:]]}, outputs={"y": ["n", 32, 8, 8]}, weights=weights))[0]


def evaluated(
    proto: onnx.ModelProto, x: NDArray[np.float32], names: list[str] | None = None
) -> dict[str, NDArray[Any]]:
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    made.opset_import[0].version, made.ir_version = 19, 9  # whose Q/DQ this evaluator knows; they mean the same
    wanted = names or ["y"]
    del made.graph.output[:]
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    return dict(zip(wanted, ReferenceEvaluator(made).run(None, {"x": x})))


def forms(x: NDArray[np.float32]) -> Mapping[str, onnx.ModelProto]:
    float_form = network()
    points = points_of(float_form)
    seen = evaluated(float_form, x, [name for name in points.activations if name != "x"]) | {"x": x}
    model = to_ir(float_form)
    insert_qdq(model, points, {name: float(np.abs(seen[name]).max()) for name in points.activations})
    plain = to_proto(model)
    changes = rearrange(model).changes
    made = to_proto(model)
    assert {node: other for node, other in changes.items() if node != other} == {
        "one_skip": "one_c",
        "two_skip": "two_c",
    }
    return {"float": float_form, "as it was": plain, "rearranged": made}


def test_tensorrt_computes_both_forms_in_int8(generation: Any, gpu: Device, tmp_path: Path) -> None:
    x = values(*SHAPE, seed=1)
    models = forms(x)
    wanted = evaluated(models["float"], x)["y"]
    shapes = ["x:" + ",".join("x".join(map(str, (size, *SHAPE[1:]))) for size in (1, 8, 8))]
    for form in ("as it was", "rearranged"):
        onnx.save(models[form], tmp_path / "model.onnx")
        made = build(
            tmp_path / "model.onnx",
            tmp_path / "model.engine",
            int8=True,
            shapes=shapes,
            force=True,
            **settings(),
        )
        with Session(made.engine) as session:
            found = session.run({"x": x})["y"]
        same, accuracy = decibels(found, evaluated(models[form], x)["y"]), decibels(found, wanted)
        rows.append(
            (
                f"residual blocks, {form}",
                f"{made.precision_summary}",
                f"{same:.1f} dB to ONNX, {accuracy:.1f} dB to FP32",
            )
        )
        assert "INT8" in made.precision_summary
        assert same > 30
        assert accuracy > 25
