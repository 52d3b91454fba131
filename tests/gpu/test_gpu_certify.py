"""Engines that are right, held against themselves and their model on a GPU: none is blamed, and the manifest says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lite0 import Builds, Inputs, rows, settings

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


def test_what_fp16_loses_is_healed(generation: Any, tmp_path: Path) -> None:
    import onnx
    from graphs import values, written

    net = written(
        """(float[n, 3, 16, 16] x) => (float[n, 10] y) {
        [conv] a = Conv <pads = [1, 1, 1, 1]> (x, w) [large] c = Mul (a, k) [square] d = Mul (c, c)
        [mean] e = GlobalAveragePool (d) [root] f = Sqrt (e) [flat] g = Flatten (f) [fc] y = MatMul (g, u) }""",
        w=values(16, 3, 3, 3, scale=0.3),
        k=np.array(400, np.float32),
        u=values(16, 10, scale=1e-3),
    )
    onnx.save(net, tmp_path / "net.onnx")
    shapes = "x:1x3x16x16,4x3x16x16,8x3x16x16"
    options: dict[str, Any] = {"fp16": True, "shapes": shapes, "compare": False, **settings(tmp_path)}
    options["allow_precision_fallback"] = True  # 8.6 runs convolutions as small as these in FP32
    result = trtopt.build(tmp_path / "net.onnx", tmp_path / "net.engine", heal=True, **options)
    assert result.ok and result.healing is not None
    first, best = result.healing[0], min((item for item in result.healing if item.right), key=lambda item: item.gpu_ms)
    rows.append(("heal: a network that FP16 loses", f"{len(result.healing)} builds", str(best)))
    if not first.right:  # TensorRT may have chosen FP32 for it
        assert best.gpu_ms is not None and first.gpu_ms is not None
    with Session(tmp_path / "net.engine", require="certified") as session:
        assert np.isfinite(session.run({"x": values(8, 3, 16, 16)})["y"]).all()
