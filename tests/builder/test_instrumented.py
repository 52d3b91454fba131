"""Every option of a build either makes other layers, so that an engine built again for its tensors has it, or is named here."""

from __future__ import annotations

from dataclasses import fields

from trtopt.builder.instrumented import LAYERS
from trtopt.core.values import BuildSpec

OTHER = {  # the graph has it, it says how a plan is kept, or is given where the engine is built again
    "embed_preprocess", "overrides", "profiles", "targets", "backend", "calibrator", "timing_cache", "version_compatible",
    "exclude_lean_runtime", "strip", "refit", "allow_precision_fallback", "device",
}  # fmt: skip


def test_every_option_that_makes_other_layers_is_taken() -> None:
    assert {*LAYERS} | OTHER == {item.name for item in fields(BuildSpec)}
