"""Caches for TensorRT 8.6: a scale for every floating tensor of the graph that it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from graphs import values, written

from trtopt.calibration.calibrator import CalibrateResult, calibrate
from trtopt.calibration.prepared import floating
from trtopt.calibration.text_cache import read_cache
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.graph.view import to_ir
from trtopt.recipes.loader import package_file

LETTERBOX = {"preset": "imagenet", "resize": "letterbox", "size": [320, 320]}


@pytest.fixture(scope="module")
def lite0(exported: Callable[[str], Path], crops: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrateResult:
    folder = tmp_path_factory.mktemp("lite0")
    return calibrate(
        exported("efficientnet-lite0"),
        folder / "t.json",
        images=crops,
        preprocess="efficientnet-lite",
        limit=4,
        threads=2,
        cache=False,
        export_cache=folder / "out.cache",
    )


def test_every_floating_tensor_has_an_entry(lite0: CalibrateResult, exported: Callable[[str], Path]) -> None:
    folded, _ = fold(load_model(exported("efficientnet-lite0")).proto)
    assert lite0.exported is not None
    cache = read_cache(lite0.exported.path)
    assert cache.header == "TRT-8600-EntropyCalibration2"
    assert set(floating(to_ir(folded))) <= set(cache.amax)
    assert {value for node in folded.graph.node for value in node.output} | {"input"} == set(floating(to_ir(folded)))
    assert lite0.exported.lacking == ()
    assert lite0.exported.tensors == len(floating(to_ir(folded)))
    for name, amax in lite0.table.amax.items():
        assert cache.amax[name] == pytest.approx(amax, rel=1e-6)


def test_an_exported_cache_comes_back_whole(lite0: CalibrateResult, exported: Callable[[str], Path]) -> None:
    assert lite0.exported is not None
    again = calibrate(exported("efficientnet-lite0"), import_cache=lite0.exported.path)
    assert again.table.amax == pytest.approx(lite0.table.amax, rel=1e-6)


def test_names_that_folding_removed_are_written_too_and_what_is_unknown_is_said(tmp_path: Path, crops: Path) -> None:
    model = package_file("package:rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx")
    given = load_model(model).proto
    folded, _ = fold(given)
    result = calibrate(
        model, images=crops, preprocess=LETTERBOX, limit=2, threads=2, cache=False, export_cache=tmp_path / "c"
    )
    assert result.exported is not None
    lacking = set(result.exported.lacking)
    assert set(floating(to_ir(folded))) - set(read_cache(tmp_path / "c").amax) == lacking
    assert len(lacking) <= 2  # the text mask of photos without text
    few = calibrate(model, import_cache=tmp_path / "c", export_cache=tmp_path / "d").exported
    assert few is not None and lacking <= set(few.lacking)


def test_what_is_not_finite_is_left_to_floating_point(tmp_path: Path) -> None:
    text = """(float[n,16,8,8] x) => (float[n,16,8,8] y) {
        [first] h = Conv (x, w) [relu] r = Relu (h) [log] l = Log (r) [exp] e = Exp (l) [last] y = Conv (e, w)
    }"""
    model, data = written(text, w=values(16, 16, 1, 1)), {"x": values(40, 16, 8, 8)}
    exported = calibrate(model, data=data, cache=False, export_cache=tmp_path / "c").exported
    assert exported is not None and exported.lacking == ("l",)  # -inf where the Relu gives 0
    assert set(read_cache(tmp_path / "c").amax) == {"x", "h", "r", "e", "y"}
