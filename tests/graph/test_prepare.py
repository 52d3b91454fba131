"""The folded form of a model: made once, and gone with it."""

from __future__ import annotations

import gc
import weakref

import pytest
from graphs import conv_relu

from trtopt.graph import prepare as preparing
from trtopt.graph.io import load_model
from trtopt.graph.prepare import prepare


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
