"""Custom operators on a GPU: references of TensorRT's own plugins against the plugins, and a plugin compiled of a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from custom import custom_net, detector
from graphs import values, written
from lite0 import rows, settings
from numpy.typing import NDArray
from onnx import ModelProto

import trtopt
from trtopt.core.errors import MissingDependency
from trtopt.ort.runner import OnnxRunner
from trtopt.runtime.session import Session

pytestmark = pytest.mark.usefixtures("no_operators")
Arrays = dict[str, NDArray[Any]]


def _both(net: ModelProto, folder: Path, inputs: Arrays, shapes: str, **options: Any) -> tuple[Arrays, Arrays]:
    """Return what the engine gives, and what the graph does with its references."""
    onnx.save(net, folder / "net.onnx")
    given = {"shapes": shapes or (), "compare": False, **settings(folder), **options}
    trtopt.build(folder / "net.onnx", folder / "net.engine", **given)
    with Session(folder / "net.engine") as session:
        found = session.run(inputs)
    return {name: np.asarray(array) for name, array in found.items()}, OnnxRunner(net, optimize=False)(inputs)


def test_efficient_nms_is_its_reference(generation: Any, tmp_path: Path) -> None:
    x = values(6, 3, 16, 16)
    found, wanted = _both(detector(), tmp_path, {"x": x}, "x:1x3x16x16,6x3x16x16,8x3x16x16", tf32=False)
    assert np.array_equal(found["count"], wanted["count"]) and wanted["count"].sum() > 6
    for image, count in enumerate(wanted["count"][:, 0]):  # what is behind the last one isn't said
        assert np.array_equal(found["classes"][image, :count], wanted["classes"][image, :count])
        for name in ("boxes", "scores"):
            assert np.allclose(found[name][image, :count], wanted[name][image, :count], atol=1e-4)
    rows.append(("EfficientNMS_TRT beside its reference", f"{wanted['count'].sum()} detections, the same", ""))


def test_deformable_attention_is_its_reference(generation: Any, tmp_path: Path) -> None:
    net = written(
        """(float[n,32,4,8] value, float[n,7,4,2,3,2] places, float[n,7,4,2,3] weights) => (float[n,7,4,8] y) {
        y = TRT.MultiscaleDeformableAttnPlugin_TRT (value, sizes, starts, places, weights) }""",
        sizes=np.array([[4, 5], [3, 4]], np.int32),
        starts=np.array([0, 20], np.int32),
    )
    net.opset_import.add(domain="TRT", version=1)
    random = np.random.default_rng(0)
    inputs = {
        "value": values(2, 32, 4, 8),
        "places": random.random((2, 7, 4, 2, 3, 2), np.float32) * 1.4 - 0.2,
        "weights": random.random((2, 7, 4, 2, 3), np.float32),
    }
    sizes = {name: "x".join(map(str, array.shape[1:])) for name, array in inputs.items()}
    shapes = ";".join(f"{name}:1x{size},2x{size},4x{size}" for name, size in sizes.items())
    found, wanted = _both(net, tmp_path, inputs, shapes)
    assert np.allclose(found["y"], wanted["y"], atol=1e-4)


def roi_heads() -> ModelProto:
    """Return a Mask R-CNN's head: features of a convolution, boxes as an input."""
    return written(
        """(float[1,3,32,32] x, float[5,4] rois) => (float[5,16,7,7] y) {
        f = Conv <pads = [1,1,1,1]> (x, w) r = Relu (f)
        a = RoiAlign <output_height = 7, output_width = 7, sampling_ratio = 2> (r, rois, which)
        y = Conv <pads = [1,1,1,1]> (a, v) }""",
        w=values(16, 3, 3, 3, scale=0.2),
        v=values(16, 16, 3, 3, seed=1, scale=0.1),
        which=np.zeros(5, np.int64),
    )


def test_a_detector_goes_all_the_way(generation: Any, tmp_path: Path) -> None:
    """check, calibrate, build in INT8, verify, certify, run, deploy."""
    model, data, engine = tmp_path / "net.onnx", tmp_path / "data.npz", tmp_path / "net.engine"
    onnx.save(detector(), model)
    np.savez(data, x=values(40, 3, 16, 16))
    assert trtopt.check(model, backend="tensorrt").ok
    table = trtopt.calibrate(model, tmp_path / "net.calib.json", data=data).table
    shapes = "x:1x3x16x16,6x3x16x16,8x3x16x16"
    trtopt.build(model, engine, int8=True, calib=table, shapes=shapes, compare=False, **settings(tmp_path))
    agreement = trtopt.verify(model, engine, data=data, batch=8)
    certificate = trtopt.certify(model, engine, data=data, min_snr=-100)  # INT8 moves detections
    assert certificate.ok, str(certificate)
    assert trtopt.run(engine, data=data, limit=8).outputs
    assert trtopt.deploy_triton(engine, repo=tmp_path / "repo", require="certified")
    rows.append(
        ("a detector in INT8, all the way", f"{len(certificate.relations)} trials hold", f"{agreement.snr_db:.1f} dB")
    )


def test_roi_align_is_onnxs(generation: Any, tmp_path: Path) -> None:
    net = roi_heads()
    corner = np.random.default_rng(2).random((5, 2), np.float32) * 12
    inputs = {"x": values(1, 3, 32, 32), "rois": np.concatenate([corner, corner + 14], 1)}
    found, wanted = _both(net, tmp_path, inputs, "", tf32=False)
    assert np.allclose(found["y"], wanted["y"], atol=1e-3)


@pytest.mark.parametrize(("options", "least"), [({}, 80.0), ({"fp16": True}, 40.0), ({"int8": True}, 20.0)])
def test_a_compiled_plugin_gives_what_the_function_does(
    generation: Any, tmp_path: Path, options: dict[str, Any], least: float
) -> None:
    operators = trtopt.init("operator", name="acme::Swishy", output=tmp_path / "swishy.py").recipe
    samples = values(40, 3, 16, 16)
    np.savez(tmp_path / "data.npz", x=samples)
    more: dict[str, Any] = {"data": tmp_path / "data.npz"} if "int8" in options else {"tf32": False}
    try:
        found, wanted = _both(
            custom_net(),
            tmp_path,
            {"x": samples[:8]},
            "x:1x3x16x16,8x3x16x16,8x3x16x16",
            operators=str(operators),
            allow_precision_fallback=True,  # 8.6 runs convolutions as small as these in FP32
            **options,
            **more,
        )
    except MissingDependency as error:
        pytest.skip(str(error))
    for name, array in wanted.items():
        noise = np.square(found[name] - array, dtype=np.float64).mean()
        assert 10 * np.log10(np.square(array, dtype=np.float64).mean() / noise) > least, name
    manifest = trtopt.load_manifest(tmp_path / "net.engine")
    assert manifest is not None and manifest.plugins[0]["creators"] == ["Swishy"]
    with pytest.raises(trtopt.EngineMismatch, match="Swishy of the plugin library"):
        manifest.check_plugins("net.engine", ())
