"""An engine built again for its tensors has the options of the engine that it explains."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from trtopt.builder.instrumented import _OWN, _spec
from trtopt.core.values import BuildSpec

OTHER = {
    "precision": "int8", "remainder": "bf16", "io_fp32": False, "workspace": 1 << 20,
    "optimization_level": 5, "hardware_compatibility": "ampere_plus", "sparsity": True, "tf32": False,
}  # fmt: skip


@pytest.mark.parametrize("name", [item.name for item in fields(BuildSpec) if item.name not in _OWN])
def test_every_option_that_makes_other_layers_is_taken(name: str) -> None:
    manifest: Any = SimpleNamespace(spec={**BuildSpec().describe(), name: OTHER[name]}, ranges=(), targets=[])
    assert getattr(_spec(manifest), name) == OTHER[name] != getattr(BuildSpec(), name)


def test_what_is_not_taken_is_named() -> None:
    assert _OWN | {*OTHER} == {item.name for item in fields(BuildSpec)}
