"""Small ONNX models with known content for the door's tests: real graphs, fixed seeds, nothing to download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import TensorProto, helper

FLOATS = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def _tensor(name: str, values: NDArray[np.floating], kind: int) -> TensorProto:
    return helper.make_tensor(name, kind, values.shape, values.astype(np.float32).ravel())


def conv_net(
    path: Path, *, base: str = "fp32", quantized: str = "", batch: int | str = "batch", opset: int = 19
) -> Path:
    """Conv(3→32) Relu Conv(32→32) Relu GlobalAveragePool Flatten Gemm(32→16), with Q/DQ if `quantized` ("int8", "fp8").

    Input x: (batch, 3, 32, 32); output y: (batch, 16); both float32, cast to `base` inside.
    """
    rng, kind = np.random.default_rng(7), FLOATS[base]
    nodes: list[onnx.NodeProto] = []
    initializers: list[TensorProto] = []
    code = {"int8": TensorProto.INT8, "fp8": TensorProto.FLOAT8E4M3FN}.get(quantized)
    top = {"int8": 127.0, "fp8": 448.0}.get(quantized, 1.0)

    def cast(source: str, to: int, name: str) -> str:
        nodes.append(helper.make_node("Cast", [source], [name], name=f"cast_{name}", to=to))
        return name

    def qdq(source: str, amax: NDArray[np.floating] | float, axis: int | None = None) -> str:
        if code is None:
            return source
        scale = np.asarray(amax, np.float32) / top
        initializers.append(_tensor(f"{source}_scale", scale, kind))
        initializers.append(helper.make_tensor(f"{source}_zero", code, scale.shape, np.zeros(scale.size)))
        extra = {} if axis is None else {"axis": axis}
        trio = [f"{source}_scale", f"{source}_zero"]
        nodes.append(helper.make_node("QuantizeLinear", [source, *trio], [f"{source}_q"], name=f"q_{source}", **extra))
        nodes.append(
            helper.make_node("DequantizeLinear", [f"{source}_q", *trio], [f"{source}_dq"], name=f"dq_{source}", **extra)
        )
        return f"{source}_dq"

    def weights(name: str, shape: tuple[int, ...]) -> str:
        values = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        initializers.append(_tensor(name, values, kind))
        return qdq(name, np.abs(values).reshape(shape[0], -1).max(1), axis=0)

    current = "x" if base == "fp32" else cast("x", kind, "x_cast")
    for number, channels in enumerate((3, 32), 1):
        parts = [qdq(current, 4.0), weights(f"w{number}", (32, channels, 3, 3))]
        window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
        nodes.append(helper.make_node("Conv", parts, [f"c{number}"], name=f"conv{number}", **window))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"], name=f"relu{number}"))
        current = f"r{number}"
    nodes.append(helper.make_node("GlobalAveragePool", [current], ["pooled"], name="pool"))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"], name="flatten"))
    nodes.append(helper.make_node("Gemm", [qdq("flat", 4.0), weights("w3", (16, 32))], ["logits"], name="fc", transB=1))
    nodes.append(helper.make_node("Cast", ["logits"], ["y"], name="to_float", to=TensorProto.FLOAT))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 32, 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 16])
    graph = helper.make_graph(nodes, "net", [x], [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def _parsed(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17, "example" : 1]> {text}'), path)
    return path


def bad_nodes(path: Path) -> Path:
    """Two nodes that no parser takes, in one model: Det (unsupported) and a custom operator (no plugin)."""
    nodes = "[fine] a = Relu(x) [custom_node] b = example.Frobnicate(a) [also_fine] c = Relu(b) [det_node] y = Det(c)"
    return _parsed(path, f"bad (float[2,4,4] x) => (float[2] y) {{ {nodes} }}")


def shape_input_net(path: Path) -> Path:
    """Reshape whose target is an input (a shape tensor): data (n, 16) float32, sizes (2,) int64 → y."""
    nodes = "[reshape] out = Reshape(data, sizes) [relu] y = Relu(out)"
    return _parsed(path, f"net (float[n,16] data, int64[2] sizes) => (float[p,q] y) {{ {nodes} }}")


def unbuildable_net(path: Path) -> Path:
    """NonMaxSuppression: TensorRT-RTX 1.7 parses it, then has no runner for it."""
    constants = "<int64[1] most = {10}, float[1] iou = {0.5}, float[1] score = {0.1}>"
    node = "[nms_node] y = NonMaxSuppression(boxes, scores, most, iou, score)"
    return _parsed(
        path, f"net (float[1,100,4] boxes, float[1,2,100] scores) => (int64[n,3] y) {constants} {{ {node} }}"
    )
