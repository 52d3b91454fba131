"""The ONNX project's backend tests, as they are and with all inputs but the first made constants: checked, folded and typed
without a fault. One file, so that one process makes the models of both. A third of them a day; TRTOPT_SEED chooses it, and
`scripts/onnx_tests` goes through all."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
from onnx_stages import PARTS, wrong

TODAY = int(os.environ.get("TRTOPT_SEED") or datetime.date.today().toordinal()) % 3


@pytest.mark.parametrize("part", range(TODAY, PARTS, 3))
@pytest.mark.parametrize("variant", ["plain", "const"])
def test_cheap_stages(variant: str, part: int, tmp_path: Path) -> None:
    assert wrong(variant, part, tmp_path) == []
