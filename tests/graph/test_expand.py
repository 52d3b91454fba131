"""Operators written out by ONNX's own definitions."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, values
from onnx import ModelProto, TensorProto, helper

from trtopt.core.errors import ModelError
from trtopt.core.values import Issue
from trtopt.data.difference import difference
from trtopt.graph.io import load_model
from trtopt.graph.passes.expand import expand, expandable, written_out
from trtopt.graph.proto import all_nodes
from trtopt.ort.sessions import OnnxSession


def gelu() -> ModelProto:
    return model(
        [node("MatMul", "x w", "h", "m"), node("Gelu", "h", "y", "g")],
        inputs={"x": ["n", 300]},
        weights={"w": values(300, 64)},
        opset=20,
    )


def test_only_functions_can_be_written_out() -> None:
    assert expandable(gelu(), {"Gelu", "MatMul", "Mish", "Frobnicate"}) == ("Gelu",)


def test_written_out_is_the_same_with_weights_and_names_kept() -> None:
    proto = gelu()
    made = expand(proto, ("Gelu",))
    operators = {item.op_type for item in made.graph.node}
    assert "Gelu" not in operators and "Erf" in operators
    names = [item.name for item in made.graph.node]
    assert all(names) and len(set(names)) == len(names) and "m" in names
    x = {"x": values(3, 300)}
    assert difference(OnnxSession(proto)(x), OnnxSession(load_model(made).proto)(x)).relative < 1e-5


def test_what_is_refused_and_no_function_gives_nothing() -> None:
    proto = model([node("Det", "x", "y", "d")], inputs={"x": ["n", 3, 3]}, outputs={"y": ["n"]})
    assert written_out(proto, [Issue("d", "Det", "no Det")]) is None
    made = written_out(gelu(), [Issue("g", "Gelu", "no Gelu")])
    assert made is not None and "Gelu" not in {item.op_type for item in made.graph.node}


def test_a_definition_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.graph.passes.expand.fault", lambda before, after: "other values")
    with pytest.raises(ModelError, match="Gelu can't be written out: other values"):
        expand(gelu(), ("Gelu",))
    assert written_out(gelu(), [Issue("g", "Gelu", "no Gelu")]) is None
    assert np.isfinite(values(1)).all()


def scattered(op: str, axis: int = 0, *, same: bool = True) -> ModelProto:
    """Messages (edges × 3, or 3 × edges) that are added to the nodes where they end."""
    data, messages = (["nodes", 3], ["edges", 3]) if axis == 0 else ([3, "nodes"], [3, "edges"])
    weights = {"last": np.array([1 - axis])}
    if op == "ScatterND":
        nodes = [node("Unsqueeze", "ends last", "places", "u")]
    elif same:
        nodes = [
            node("Unsqueeze", "ends last", "column", "u"), node("Shape", "messages", "form", "s"),
            node("Expand", "column form", "places", "e"),
        ]  # fmt: skip
    else:
        nodes = [node("Cast", "messages", "places", "c", to=TensorProto.INT64)]
    options = {} if op == "ScatterND" else {"axis": axis}
    last = node(op, "x places messages", "y", "scatter", reduction="add", **options)
    made = model(
        [*nodes, last],
        inputs={"x": data, "messages": messages, "ends": ["edges"]},
        outputs={"y": data},
        weights=weights,
        opset=18,
    )
    made.graph.input[2].type.tensor_type.elem_type = TensorProto.INT64
    return made


@pytest.mark.parametrize(("op", "axis"), [("ScatterND", 0), ("ScatterElements", 0), ("ScatterElements", 1)])
def test_a_refused_sum_by_scatter_becomes_a_product(op: str, axis: int) -> None:
    proto = load_model(scattered(op, axis)).proto
    made = written_out(proto, [Issue("scatter", op, "no reduction")])
    assert made is not None and op not in {item.op_type for item in made.graph.node}
    x, messages, ends = values(5, 3), values(7, 3, seed=1), np.array([0, 4, 4, 2, -1, 0, -5])
    feed = {"x": x.T if axis else x, "messages": messages.T if axis else messages, "ends": ends}
    wanted = x.copy()
    np.add.at(wanted, ends, messages)
    (found,) = OnnxSession(made)({name: np.ascontiguousarray(array) for name, array in feed.items()}).values()
    np.testing.assert_allclose(found, wanted.T if axis else wanted, rtol=1e-5, atol=1e-6)


def test_a_scatter_to_places_of_each_entry_stays() -> None:
    proto = load_model(scattered("ScatterElements", same=False)).proto
    assert written_out(proto, [Issue("scatter", "ScatterElements", "no reduction")]) is None


def attention(*, masked: bool, within: bool = False) -> ModelProto:
    """A step of a decoder that gives its cache on; `within` an If."""
    shapes: dict[str, list[int | str]] = {
        name: [1, 2, 4 if "p" in name else 1, 8] for name in ("q", "k", "v", "pk", "pv")
    }
    mask = "mask" if masked else ""
    step = helper.make_node("Attention", ["q", "k", "v", mask, "pk", "pv"], ["y", "nk", "nv"], "a")
    outputs = {"y": [1, 2, 1, 8], "nk": [1, 2, 5, 8], "nv": [1, 2, 5, 8]}
    inputs = {**shapes, **({"mask": [1, 5]} if masked else {})}
    if not within:
        return model([step], inputs=inputs, outputs=outputs, opset=23)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    other = [node("Identity", "q", "y"), *(node("Concat", f"p{n} {n}", f"n{n}", axis=2) for n in "kv")]
    bodies = {"then_branch": [step], "else_branch": other}
    graphs = {name: helper.make_graph(nodes, name, [], infos) for name, nodes in bodies.items()}
    ends = [node("ReduceMax", "q", "most", keepdims=0), node("Greater", "most zero", "on")]
    branch = helper.make_node("If", ["on"], ["Y", "NK", "NV"], "if", **graphs)
    results = {name.upper(): shape for name, shape in outputs.items()}
    return model([*ends, branch], inputs=inputs, outputs=results, opset=23, weights={"zero": np.zeros((), np.float32)})


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_gives_its_cache_on_is_written_out(masked: bool, within: bool) -> None:
    proto = attention(masked=masked, within=within)
    made = written_out(proto, [Issue("a", "Attention", "only supports Attention nodes with one output")])
    assert made is not None and "Attention" not in {item.op_type for item in all_nodes(made.graph)}
    feed = {
        item.name: values(*(dim.dim_value for dim in item.type.tensor_type.shape.dim)) for item in proto.graph.input
    }
    assert difference(OnnxSession(proto)(feed), OnnxSession(load_model(made).proto)(feed)).relative < 1e-5


def test_a_definition_is_taken_at_a_newer_opset_too() -> None:
    proto = gelu()
    proto.opset_import[0].version = 22
    assert "Gelu" not in {item.op_type for item in expand(proto, ("Gelu",)).graph.node}
