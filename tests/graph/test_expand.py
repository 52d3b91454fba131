"""Operators written out by ONNX's own definitions."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import model, node, values
from onnx import ModelProto

from trtopt.core.errors import ModelError
from trtopt.core.values import Issue
from trtopt.graph.io import load_model
from trtopt.graph.passes.expand import expand, expandable, written_out
from trtopt.ort.difference import difference
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
