"""Small ONNX graphs, what is measured on them, and real models, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.parser import parse_graph, parse_model

from trtopt.core.values import Precision
from trtopt.data.difference import difference
from trtopt.graph.passes.fold import fold
from trtopt.graph.passes.opset import to_ir_at
from trtopt.graph.passes.placement import Points, find_points
from trtopt.graph.passes.quantize import FORMATS, insert_qdq, is_quantized
from trtopt.graph.passes.result import PassResult
from trtopt.graph.passes.typed import to_typed, typed_opset
from trtopt.graph.proto import name_nodes
from trtopt.graph.view import to_ir, to_proto
from trtopt.ort.sessions import OnnxSession
from trtopt.recipes.loader import package_file

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[NodeProto],
    *,
    inputs: dict[str, Sequence[int | str]] | None = None,
    outputs: dict[str, Sequence[int | str]] | None = None,
    weights: dict[str, NDArray[Any]] | None = None,
    opset: int = 17,
    dtype: int = FLOAT,
) -> ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "test",
        [
            helper.make_tensor_value_info(name, dtype, shape)
            for name, shape in (inputs or {"x": ["batch", 3, 8, 8]}).items()
        ],
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in (outputs or {"y": None}).items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def node(op: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name or f"{op}_{outputs.split()[0]}", **attributes)


def nodes(text: str) -> list[NodeProto]:
    """Nodes in ONNX's own text; `[name]` in front of one names it, else it is named as `node` does."""
    made = list(parse_graph(f"g () => () {{ {text} }}").node)
    for item in made:
        item.name = item.name or f"{item.op_type}_{item.output[0]}"
    return made


def written(text: str, opset: int = 17, **weights: Any) -> ModelProto:
    """A model in ONNX's own text, from its inputs on: "(float[n,3] x) => (float[] y) { y = Relu (x) }"; nodes as in `nodes`."""
    proto = parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> test {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(item), name) for name, item in weights.items())
    name_nodes(proto)
    return proto


def values(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def conv_relu(**changes: Any) -> ModelProto:
    """x → Conv c → Relu r → y."""
    weights = {"w": values(4, 3, 3, 3), "b": values(4, seed=1), **changes.pop("weights", {})}
    return model(
        [node("Conv", "x w b", "h", "c", pads=[1, 1, 1, 1]), node("Relu", "h", "y", "r")], weights=weights, **changes
    )


def points_of(proto: ModelProto, *rest: Any, **options: Any) -> Points:
    """`find_points` for a message."""
    return find_points(to_ir(proto), *rest, **options)


def quantized(
    proto: ModelProto, points: Points, amax: Mapping[str, float], base: Precision = Precision.FP32
) -> ModelProto:
    """`insert_qdq` for a message."""
    return to_proto(insert_qdq(to_ir_at(proto, FORMATS[points.precision].opset), points, amax, base=base).model)


def typed(proto: ModelProto, base: Precision, **options: Any) -> ModelProto:
    """`to_typed` for a message."""
    return to_proto(typing(proto, base, **options).model)


def typing(proto: ModelProto, base: Precision, **options: Any) -> PassResult:
    """`to_typed` of a message."""
    return to_typed(to_ir_at(proto, typed_opset(base, is_quantized(proto))), base, **options)


def decibels(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Signal to noise, in dB."""
    return float(10 * np.log10((wanted**2).sum() / ((found - wanted) ** 2).sum()))


def left(proto: ModelProto, open_size: int = 2) -> list[str]:
    """Its operators after folding, once the results are seen to be the same."""
    made, report = fold(proto)
    feed = {
        value.name: values(*(dim.dim_value or open_size for dim in value.type.tensor_type.shape.dim), seed=7)
        for value in proto.graph.input
    }
    expected, found = OnnxSession(proto)(feed), OnnxSession(made)(feed)
    assert not report.problem and {k: v.shape for k, v in expected.items()} == {k: v.shape for k, v in found.items()}
    assert difference(expected, found).relative < 1e-5
    return [item.op_type for item in made.graph.node]


def rapidocr(part: str) -> Path:
    names = {
        "det": "ch_PP-OCRv4_det_infer.onnx",
        "rec": "ch_PP-OCRv4_rec_infer.onnx",
        "cls": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    }
    return package_file(f"package:rapidocr_onnxruntime/models/{names[part]}")


def rendered_text(height: int, width: int, batch: int) -> NDArray[np.float32]:
    """Black words on white, as the OCR models see them, batch×3×height×width in −1…1."""
    import cv2

    images = np.full((batch, height, width, 3), 255, np.uint8)
    for index, image in enumerate(images):
        for row in range(0, height - 20, 48):
            cv2.putText(image, f"trtopt {index} {row}", (6, row + 34), cv2.FONT_HERSHEY_SIMPLEX, 1.0, (0, 0, 0), 2)
    return ((images / 255 - 0.5) / 0.5).astype(np.float32).transpose(0, 3, 1, 2)


def photos(size: int, count: int) -> NDArray[np.float32]:
    """Crops of real photos, count×3×size×size, about zero mean."""
    import cv2

    files = [package_file(f"package:skimage/data/{name}") for name in ("astronaut.png", "chelsea.png", "coffee.png")]
    images = [cv2.cvtColor(cv2.imread(str(file)), cv2.COLOR_BGR2RGB)[:300, :300] for file in files[:count]]
    assert len(images) == count
    resized = np.stack([cv2.resize(image, (size, size)) for image in images])
    return ((resized.astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2)
