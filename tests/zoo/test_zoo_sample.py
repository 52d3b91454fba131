"""A model of the zoo, another at each commit, from check to FP16 and INT8 engines; scripts/zoo runs all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commit import commit

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import zoo

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")


@pytest.mark.parametrize("entry", zoo.sample(list(zoo.ZOO), 1, commit()), ids=lambda entry: entry.name)
def test_a_model_is_built_with_known_precision_or_refused_by_name(entry: zoo.Entry, tmp_path: Path) -> None:
    row = zoo.in_a_process(entry, tmp_path, tmp_path / "packages")
    assert zoo.fine(row, "fp16") and zoo.fine(row, "int8"), json.dumps(row, indent=1)
    if row["int8"]["state"] == "built":
        assert sum(row["int8"]["coverage"].values()) <= 1.001
