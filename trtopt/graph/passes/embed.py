"""Preprocessing inside the graph: it takes uint8 pixels and makes the model's own input of them.

It comes last: scales, points and Q/DQ are those of the model, and the tensor that was its input holds the same values.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.core.errors import InvalidModel, UsageError
from trtopt.data.embedded import Embedded
from trtopt.graph.passes.result import PassResult
from trtopt.graph.view import Editor

OPSET = 7  # the first one in which Add and Mul broadcast
_KEY = "trtopt.embedded"


def embed(model: ir.Model, embedded: Embedded) -> PassResult:
    """Put Cast, Gather (BGR), Transpose (NCHW), Mul and Add in front of the image input, as far as they do something.

    TensorRT takes uint8 for inputs alone, and nothing but a Cast to FP32 or FP16 may read one (all generations). The arithmetic
    is in FP32 whatever the model's types are: in FP16 its constants would be rounded too.

    Returns:
        The new nodes are the changes.
    """
    editor, graph, name, count = Editor(model), model.graph, embedded.input, embedded.preprocess.count
    prepared = next(value for value in graph.inputs if value.name == name)
    sizes = list(prepared.shape or [None] * 4)
    shape = ir.Shape([*(sizes[embedded.order.index(axis)] for axis in range(3)), count])
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.UINT8), shape=shape)
    graph.inputs[graph.inputs.index(prepared)] = value
    prepared.name = editor.fresh(f"{name}_prepared")

    each = [count if axis == 3 else 1 for axis in embedded.order]  # the shape of one number for each channel
    factor, offset = (item.reshape(each) for item in (embedded.preprocess.factor, embedded.preprocess.offset))
    steps: list[tuple[str, list[ir.Value], dict[str, Any]]] = [("Cast", [], {"to": ir.DataType.FLOAT})]
    if embedded.preprocess.channels == "bgr":
        steps.append(("Gather", [editor.constant(f"{name}_bgr", [2, 1, 0], np.int64)], {"axis": 3}))
    if embedded.order != (0, 1, 2, 3):
        steps.append(("Transpose", [], {"perm": embedded.order}))
    # Not the other way round: TensorRT 8.6 fails on an assertion where an Add and a Mul for each channel are quantized behind.
    if (factor != 1).any():
        steps.append(("Mul", [editor.constant(f"{name}_factor", factor, np.float32)], {}))
    if (offset != 0).any():
        steps.append(("Add", [editor.constant(f"{name}_offset", offset * factor, np.float32)], {}))
    if prepared.dtype is not ir.DataType.FLOAT:
        steps.append(("Cast", [], {"to": prepared.dtype}))

    nodes, outputs = [], [*(f"{name}_{op.lower()}" for op, _, _ in steps[:-1]), prepared]
    for (op, constants, attributes), output in zip(steps, outputs):
        nodes.append(editor.node(op, [value, *constants], output, ir.DataType.FLOAT, **attributes))
        value = nodes[-1].outputs[0]
    graph.insert_before(graph[0], nodes)
    model.metadata_props[_KEY] = json.dumps(embedded.describe(), sort_keys=True)
    return PassResult(model, [str(node.name) for node in nodes])


def arithmetic(proto: onnx.ModelProto) -> list[str]:
    """Return the nodes by which `embed` made a graph scale pixels, in FP32 whatever the rest is; else none."""
    embedded = embedded_in(proto)
    constants = () if embedded is None else (f"{embedded.input}_factor", f"{embedded.input}_offset")
    nodes = (node for node in proto.graph.node if node.op_type in ("Add", "Mul"))
    return [node.name for node in nodes if any(name in constants for name in node.input)]


def embedded_in(proto: onnx.ModelProto) -> Embedded | None:
    """Return what `embed` put into a graph.

    Raises:
        InvalidModel: the graph says it in a way that can't be read.
    """
    described = next((item.value for item in proto.metadata_props if item.key == _KEY), None)
    if described is None:
        return None
    try:
        embedded = Embedded.load(json.loads(described))
    except (ValueError, LookupError, TypeError, UsageError) as error:
        raise InvalidModel(f"the model's metadata {_KEY} can't be read: {error}") from error
    if embedded.input not in (item.name for item in proto.graph.input):
        raise InvalidModel(f"the model's metadata {_KEY} names the input {embedded.input!r}, which it hasn't")
    return embedded
