from __future__ import annotations

import numpy as np
from graphs import model, node, values
from onnx import TensorProto, numpy_helper

from trtopt.graph.choices import choices


def test_what_is_taken_at_chosen_places_follows_a_choice() -> None:
    nodes = [
        node("MatMul", "x w", "scores", "product"),
        node("TopK", "scores k", "best places", "top", axis=1),
        node("GatherElements", "x places", "taken", "take", axis=1),
        node("Relu", "taken", "boxes"),
        node("ArgMax", "boxes", "largest", "arg", axis=1, keepdims=1),
        node("Cast", "largest", "late", to=TensorProto.FLOAT),
        node("ArgMax", "ids", "last", "of_integers", axis=1, keepdims=1),
        node("GatherElements", "x last", "pooled", "pool", axis=1),
        node("Shape", "places", "size"),
        node("Expand", "one size", "shaped"),
    ]
    outputs = ["scores", "best", "boxes", "late", "pooled", "shaped"]
    proto = model(
        nodes, inputs={"x": ["n", 8]}, weights={"w": values(8, 8), "one": values(1, 1)}, outputs=dict.fromkeys(outputs)
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array([3]), "k"))
    ids = proto.graph.input.add()
    ids.CopyFrom(proto.graph.input[0])
    ids.name, ids.type.tensor_type.elem_type = "ids", TensorProto.INT64
    assert choices(proto) == {"boxes": "TopK top", "late": "ArgMax arg"}
    del proto.graph.node[1:]
    assert choices(proto) == {}
