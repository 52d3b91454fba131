"""The ONNX project's backend tests, with all inputs but the first made constants: checked, folded and typed without a fault."""

from __future__ import annotations

from pathlib import Path

from onnx_stages import parts, wrong


@parts()
def test_cheap_stages(part: int, tmp_path: Path) -> None:
    assert wrong("const", part, tmp_path) == []
