"""The folded form of a model: made once, and gone with it."""

from __future__ import annotations

import gc
import weakref

import pytest
from graphs import conv_relu

from trtopt.graph import prepare as preparing
from trtopt.graph.io import load_model
from trtopt.graph.prepare import give_up_folding, prepare


def test_a_model_is_folded_once_and_its_folded_form_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = preparing.fold
    monkeypatch.setattr(preparing, "fold", lambda *given, **how: calls.append(given) or right(*given, **how))
    loaded = load_model(conv_relu())
    assert prepare(loaded) is prepare(loaded)
    assert len(calls) == 1
    kept = weakref.ref(prepare(loaded))
    del loaded, calls[:]
    gc.collect()
    assert kept() is None


def test_a_model_that_is_not_to_be_folded_stays_so() -> None:
    loaded = load_model(conv_relu())
    assert not prepare(loaded).report.problem
    assert give_up_folding(loaded, "it computes something else") is prepare(loaded)
    assert prepare(loaded).report.problem == "it computes something else"
    assert [node.op_type for node in prepare(loaded).proto.graph.node] == [
        node.op_type for node in loaded.proto.graph.node
    ]
