"""Engines that are right, held against themselves and their model on a GPU: none is blamed, and the manifest says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lite0 import Builds, Inputs, rows

import trtopt
from trtopt.runtime.session import Session


@pytest.mark.parametrize("way", ["fp32", "fp16", "int8 Q/DQ"])
def test_a_right_engine_is_certified(builds: Builds, inputs: Inputs, way: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "photos.npz", input=inputs.photos["input"][:16])
    engine = builds[way].engine
    found = trtopt.certify(inputs.model, engine, data=tmp_path / "photos.npz", min_snr=10 if "int8" in way else None)
    assert found.ok, str(found)
    assert {"another context, without CUDA graphs", "beside another call"} <= {item.name for item in found.relations}
    lowest = min((item for item in found.relations if item.batch > 1), key=lambda item: item.worst_db)
    said = (
        "to the bit" if lowest.worst_db == np.inf else f"{lowest.worst_db:.1f} dB ({lowest.name}, batch {lowest.batch})"
    )
    rows.append((f"certify, {way}: {len(found.relations)} trials", f"{found.seconds:.1f} s", f"relations: {said}"))
    with Session(engine, require="certified") as session:
        assert session.manifest is not None and session.manifest.certificate is not None


def test_an_engine_of_another_model_is_not_right(builds: Builds, inputs: Inputs, tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    other = onnx.load(inputs.model)
    weight: Any = next(item for item in other.graph.initializer if len(item.dims) == 4)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.3), weight.name))
    onnx.save(other, tmp_path / "other.onnx")
    np.savez(tmp_path / "photos.npz", input=inputs.photos["input"][:8])
    found = trtopt.certify(tmp_path / "other.onnx", builds["fp16"].engine, data=tmp_path / "photos.npz")
    assert not found.ok and {item.name for item in found.failed} == {"the model as given"}
