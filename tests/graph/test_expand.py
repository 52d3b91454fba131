"""Operators written out by ONNX's own definitions."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, values, written
from onnx import ModelProto

from trtopt.core.errors import ModelError
from trtopt.core.values import Issue
from trtopt.data.difference import difference
from trtopt.graph.io import load_model
from trtopt.graph.passes.expand import expand, expandable, written_out
from trtopt.graph.proto import all_nodes
from trtopt.ort.sessions import OnnxSession


def gelu() -> ModelProto:
    return written("(float[n,300] x) => (float[] y) { [m] h = MatMul (x, w) [g] y = Gelu (h) }", 20, w=values(300, 64))


def test_only_functions_can_be_written_out() -> None:
    assert expandable(gelu(), {"Gelu", "MatMul", "Mish", "Frobnicate"}) == ("Gelu",)


@pytest.mark.parametrize("opset", [20, 22])  # Gelu's own, and a newer one
def test_written_out_is_the_same_with_weights_and_names_kept(opset: int) -> None:
    proto = gelu()
    proto.opset_import[0].version = opset
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
    places, option = "places = Unsqueeze (ends, last)", ""
    if op == "ScatterElements":
        expanded = "column = Unsqueeze (ends, last) form = Shape (messages) places = Expand (column, form)"
        places, option = expanded if same else "places = Cast <to = 7> (messages)", f", axis = {axis}"
    data, form = ("nodes,3", "edges,3") if axis == 0 else ("3,nodes", "3,edges")
    return written(
        f"(float[{data}] x, float[{form}] messages, int64[edges] ends) => (float[{data}] y) {{ {places} "
        f'[scatter] y = {op} <reduction = "add"{option}> (x, places, messages) }}',
        18, last=[1 - axis],
    )  # fmt: skip


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
    new, old, all_ = (f"float[1,2,{size},8]" for size in (1, 4, 5))
    inputs = ", ".join([f"{new} q, {new} k, {new} v, {old} pk, {old} pv", *["float[1,5] mask"] * masked])
    step, results = f"y, nk, nv = Attention (q, k, v, {'mask' * masked}, pk, pv)", f"({new} y, {all_} nk, {all_} nv)"
    if within:
        other = "y = Identity (q) nk = Concat <axis = 2> (pk, k) nv = Concat <axis = 2> (pv, v)"
        step = (
            "most = ReduceMax <keepdims = 0> (q) on = Greater (most, zero) Y, NK, NV = If (on) <"
            f"then_branch = t () => {results} {{ {step} }}, else_branch = e () => {results} {{ {other} }}>"
        )
        results = f"({new} Y, {all_} NK, {all_} NV)"
    return written(f"({inputs}) => {results} {{ {step} }}", 23, zero=np.float32(0))


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
