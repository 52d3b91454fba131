"""The ONNX project's backend tests, as they are and with all inputs but the first made constants: checked, folded and typed
without a fault. One file, so that one process makes the models of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx_stages import PARTS, wrong


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("variant", ["plain", "const"])
def test_cheap_stages(variant: str, part: int, tmp_path: Path) -> None:
    assert wrong(variant, part, tmp_path) == []
