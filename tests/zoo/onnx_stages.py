"""The cheap stages of every ONNX backend test (scripts/onnx_tests.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from trtopt.trt import loaders

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import onnx_tests

PARTS = 32
# Operators written out by their definition fold alike with constants as without: `scripts/onnx_tests` tries those, too.
WHICH = {"plain": "", "const": r"^(?!.*expanded)"}


def wrong(variant: str, part: int, folder: Path) -> list[str]:
    """What check, folding and FP16 typing do wrong with each of a part's models."""
    backend = "rtx" if any(generation.family == "rtx" for generation in loaders()) else "auto"
    found, count = [], 0
    for case in onnx_tests.cases(variant, part, PARTS, WHICH[variant]):
        count += 1
        cleaned = folder / f"{count}.onnx"
        said, _ = onnx_tests.checked(case, cleaned, backend)
        known = onnx_tests.runner(case)
        fold, made = onnx_tests.folded(case, known, cleaned if cleaned.is_file() else None)
        typing = onnx_tests.typed(case, made, known) if made is not None else ""
        found += [f"{case.name}: {text}" for text in (said, fold, typing) if text]
    assert count > 20, "the tests of the onnx package aren't all there"
    return found
