"""build(embed_preprocess=True) on the real TensorRT-RTX: engines of pixels, and everything that meets one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import values, written
from skimage import data
from world import Heard, World, crops, has

import trtopt
from trtopt.core.errors import DataError, UsageError
from trtopt.data import open_data
from trtopt.data.embedded import Embedded
from trtopt.data.preprocess import PRESETS, Preprocess
from trtopt.engine.manifest import embedded_by, load_manifest, manifest_path, read_manifest
from trtopt.graph.io import load_model
from trtopt.runtime.images import preparation

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")

IMAGES = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket()]
LIKE = {"int8": 20, "fp16": 50, "bf16": 30, "fp32": 90}  # dB of this net's outputs


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def net(path: Path, channels: int = 3, *, last: bool = False, sizes: tuple[Any, Any] = (32, 32)) -> Path:
    """x → Conv → Relu → Conv → GlobalAveragePool → Flatten → Gemm → y; `last`: x has its channels last."""
    shape = (*sizes, channels) if last else (channels, *sizes)
    first = "[layout] t = Transpose<perm=[0,3,1,2]>(x)" if last else ""
    text = f"""(float[n,{",".join(map(str, shape))}] x) => (float[n,10] y) {{
        {first} [conv1] a = Conv<pads=[1,1,1,1]>({"t" if last else "x"}, w1)
        [relu] b = Relu(a) [conv2] c = Conv<pads=[1,1,1,1]>(b, w2) [pool] d = GlobalAveragePool(c)
        [flatten] e = Flatten(d) [fc] y = Gemm<transB=1>(e, w3) }}"""
    weights = {"w1": values(16, channels, 3, 3, scale=0.3), "w2": values(16, 16, 3, 3, scale=0.1), "w3": values(10, 16)}
    onnx.save(written(text, **weights), path)
    return path


def built(path: Path, output: Path, **options: Any) -> Any:
    return trtopt.build(path, output, target="sm89", save_onnx=output.with_suffix(".onnx"), **options)


def both(path: Path, folder: Path, **options: Any) -> tuple[trtopt.Session, trtopt.Session]:
    """The engine of pixels, and that of floats, on the CPU."""
    names = {True: "pixels.engine", False: "floats.engine"}
    for embedded, name in names.items():
        own = options if embedded else {**options, "fp32_io": True}
        built(path, folder / name, embed_preprocess=embedded, **own)
    return tuple(trtopt.Session(folder / name, backend="onnxruntime") for name in names.values())  # type: ignore[return-value]


def scores(session: trtopt.Session, images: list[Any] = IMAGES) -> Any:
    samples = [preparation(session)(image) for image in images]
    return session.run_batches({"x": np.stack(samples)})["y"]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("fp32_io", [True, False])
def test_the_results_are_those_of_floats_in_every_precision(precision: str, fp32_io: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"preprocess": "imagenet", "fp32_io": fp32_io}
    if precision == "int8":
        options |= {"int8": True, "images": crops(24)}
    elif precision != "fp32":
        options[precision] = True
    path = net(tmp_path / "net.onnx")
    pixels, floats = both(path, tmp_path, **options)
    [taken] = pixels.inputs
    assert (taken.dtype, taken.shape) == ("uint8", (-1, 32, 32, 3))
    one, two = scores(pixels), scores(floats)
    noise = np.square(one.astype(np.float64) - two).sum() / np.square(two.astype(np.float64)).sum()
    assert -10 * np.log10(max(noise, 1e-30)) > LIKE[precision]
    assert np.array_equal(one.argmax(1), two.argmax(1))
    assert [best[0].index for best in pixels.run_images(IMAGES)] == list(two.argmax(1))
    found = trtopt.verify(
        path, tmp_path / "pixels.engine", batches=opened(path, "imagenet"), min_snr=10, min_agreement=0.5
    )
    assert found.ok
    assert "pixels.onnx, the graph" in found.ran


def opened(path: Path, preprocess: Any) -> Any:
    return open_data(load_model(path).inputs, images=IMAGES, preprocess=preprocess)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("channels", ["rgb", "bgr", "gray"])
def test_every_order_of_channels_and_layout(channels: str, last: bool, tmp_path: Path) -> None:
    count = 1 if channels == "gray" else 3
    preprocess = {
        "channels": channels, "layout": "nhwc" if last else "nchw", "scale": 1 / 255, "mean": [0.5, 0.4, 0.3][:count],
        "std": 0.2,
    }  # fmt: skip
    pixels, floats = both(net(tmp_path / "net.onnx", count, last=last), tmp_path, preprocess=preprocess)
    [taken] = pixels.inputs
    assert taken.shape == (-1, 32, 32, count)
    images = IMAGES
    if channels == "gray":  # of one that is gray already nothing is rounded
        images = [np.repeat(image[..., :1], 3, -1) for image in IMAGES]
    np.testing.assert_allclose(scores(pixels, images), scores(floats, images), rtol=1e-4, atol=1e-4)
    assert np.abs(scores(pixels) - scores(floats)).max() < 0.01


def test_open_sizes_and_several_profiles_are_given_as_the_models_own(tmp_path: Path) -> None:
    path = net(tmp_path / "net.onnx", sizes=("h", "w"))
    shapes = ["x:1x3x16x24,2x3x32x48,4x3x64x96", "x:8x3x32x32,8x3x32x32,8x3x32x32"]
    heard = Heard()
    pixels, floats = both(path, tmp_path, preprocess="imagenet", shapes=shapes, fp16=True, reporter=heard)
    assert [item["x"].opt for item in pixels.profiles] == [(2, 32, 48, 3), (8, 32, 32, 3)]
    assert [item["x"].max for item in floats.profiles] == [(4, 3, 64, 96), (8, 3, 32, 32)]
    assert "samples x height x width x 3" in " ".join(heard.notes)
    manifest = read_manifest(manifest_path(tmp_path / "pixels.engine"))
    assert manifest.spec["profiles"][0] == {"x": "1x3x16x24,2x3x32x48,4x3x64x96"}
    assert manifest.profiles[0] == {"x": "1x16x24x3,2x32x48x3,4x64x96x3"}
    assert preparation(pixels).size == (32, 48)
    np.testing.assert_allclose(scores(pixels), scores(floats), rtol=2e-2, atol=2e-2)
    with pytest.raises(UsageError, match=r"doesn't fit the model.*of the model's own inputs"):
        built(path, tmp_path / "no.engine", preprocess="imagenet", embed_preprocess=True, shapes="x:1x32x32x3")


def test_the_image_alone_of_several_inputs_is_embedded(tmp_path: Path) -> None:
    text = """(float[n,1,1,1] size, float[n,3,16,16] image) => (float[] y) {
        h = Conv(image, w) p = GlobalAveragePool(h) y = Mul(p, size) }"""
    onnx.save(written(text, w=values(4, 3, 3, 3)), tmp_path / "two.onnx")
    shapes = "size:1x1x1x1,2x1x1x1,4x1x1x1;image:1x3x16x16,2x3x16x16,4x3x16x16"
    pixels, floats = both(tmp_path / "two.onnx", tmp_path, preprocess="imagenet", shapes=shapes)
    assert {item.name: item.dtype for item in pixels.inputs} == {"size": "float32", "image": "uint8"}
    assert pixels.embedded is not None
    given = {"size": values(2, 1, 1, 1), "image": np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)}
    expected = floats.run(pixels.embedded.from_pixels(given))["y"]
    np.testing.assert_allclose(pixels.run(given)["y"], expected, atol=1e-4)
    found = trtopt.verify(
        tmp_path / "two.onnx", tmp_path / "pixels.engine", batches=[pixels.embedded.from_pixels(given)], min_snr=80
    )
    assert found.ok


def test_scales_points_and_the_rest_of_the_graph_stay(tmp_path: Path) -> None:
    path = net(tmp_path / "net.onnx")
    table = trtopt.calibrate(path, images=crops(24), preprocess="imagenet").table
    for embedded in (True, False):
        built(path, tmp_path / f"{embedded}.engine", int8=True, calib=table, embed_preprocess=embedded)
    one, two = (onnx.load(tmp_path / f"{embedded}.onnx").graph for embedded in (True, False))
    added = len(one.node) - len(two.node)
    assert [item.op_type for item in one.node[:added]] == ["Cast", "Transpose", "Mul", "Add"]
    changed = [
        (mine.name, list(mine.input))
        for mine, other in zip(one.node[added:], two.node, strict=True)
        if mine.SerializeToString() != other.SerializeToString()
    ]
    assert len(changed) == 1  # who reads the input
    assert changed[0][1] == ["x_prepared"]
    first, second = (load_manifest(tmp_path / f"{embedded}.engine") for embedded in (True, False))
    assert first is not None
    assert second is not None
    assert first.calibration == second.calibration
    assert (first.precision, first.coverage) == (second.precision, second.coverage)
    assert first.precision["int8"] == 2


def test_the_manifest_says_what_is_inside_and_what_is_left(tmp_path: Path, world: World) -> None:
    path = net(tmp_path / "net.onnx")
    result = built(path, tmp_path / "m.engine", fp16=True, preprocess="imagenet", embed_preprocess=True)
    manifest = read_manifest(manifest_path(result.engine))
    assert manifest.inputs == [{"name": "x", "dtype": "uint8", "shape": ["n", 32, 32, 3]}]
    assert manifest.preprocess is not None
    left = Preprocess.load(manifest.preprocess)
    assert (left.dtype, left.layout, left.scale, left.crop) == ("uint8", "nhwc", 1.0, 0.875)
    assert manifest.model_preprocess is not None
    inside = Preprocess.load(manifest.model_preprocess)
    assert (inside.dtype, inside.layout, inside.mean) == ("float32", "nchw", PRESETS["imagenet"].mean)
    assert embedded_by(manifest) == Embedded("x", inside)
    assert manifest.spec["embed_preprocess"] is True
    again = built(path, tmp_path / "m.engine", fp16=True, preprocess="imagenet", embed_preprocess=True)
    assert again.cached
    for change in ({"embed_preprocess": False}, {"preprocess": "yolo"}):
        options = {"fp16": True, "preprocess": "imagenet", "embed_preprocess": True, **change}
        assert not built(path, tmp_path / "m.engine", **options).cached
    assert "preprocessing embedded: x takes pixels (0 to 255)" in world.run("inspect", tmp_path / "m.engine").out


def test_floats_are_refused_and_what_is_left_may_be_changed(tmp_path: Path) -> None:
    path = net(tmp_path / "net.onnx")
    built(path, tmp_path / "m.engine", preprocess="imagenet", embed_preprocess=True)
    np.save(tmp_path / "floats.npy", values(1, 3, 32, 32))
    with trtopt.Session(tmp_path / "m.engine", backend="onnxruntime") as session:
        with pytest.raises(UsageError, match=r"takes uint8: give pixels from 0 to 255"):
            session.run({"x": values(1, 3, 32, 32)})
        assert session.preparing({"resize": "stretch"}).resize == "stretch"
        with pytest.raises(UsageError, match=r"another scale, mean or std"):
            session.preparing("yolo")
        with pytest.raises(DataError, match="aren't 8-bit pixels"):
            session.taken({"x": values(1, 3, 32, 32)})
    with pytest.raises(UsageError, match=r"takes uint8: give pixels from 0 to 255"):
        trtopt.run(tmp_path / "m.engine", input=tmp_path / "floats.npy", backend="onnxruntime")
    found = trtopt.run(tmp_path / "m.engine", images=IMAGES[:1], preprocess="imagenet", backend="onnxruntime")
    assert found.ranked
    with pytest.raises(DataError, match="aren't 8-bit pixels prepared as the engine does it itself"):
        trtopt.verify(path, tmp_path / "m.engine", batches=opened(path, "yolo"))


def test_layers_are_compared_too(tmp_path: Path) -> None:
    path = net(tmp_path / "net.onnx")
    built(path, tmp_path / "m.engine", fp16=True, preprocess="imagenet", embed_preprocess=True)
    batches = opened(path, "imagenet")
    for candidate in ("m.engine", "m.onnx"):
        found = trtopt.verify(path, tmp_path / candidate, batches=batches, per_layer=True)
        assert {"a", "c", "y"} <= {item.tensor for item in found.layers}
        assert min(item.own_snr_db for item in found.layers) > 50


def test_preprocessing_is_said_beside_arrays_and_is_the_tables_where_that_knows_it(tmp_path: Path) -> None:
    path = net(tmp_path / "net.onnx")
    fitted = PRESETS["imagenet"].fitted(load_model(path).inputs[0])
    arrays = {"x": np.stack([fitted(image) for image in crops(24)])}
    options: dict[str, Any] = {"int8": True, "embed_preprocess": True}
    with pytest.raises(UsageError, match=r"needs to know how pixels become.*`preprocess=`"):
        built(path, tmp_path / "m.engine", data=arrays, **options)
    built(path, tmp_path / "m.engine", data=arrays, preprocess="imagenet", **options)
    table = trtopt.calibrate(path, data=arrays).table
    built(path, tmp_path / "n.engine", calib=table, preprocess="imagenet", **options)
    assert load_model(tmp_path / "m.onnx").fingerprint == load_model(tmp_path / "n.onnx").fingerprint
    made = trtopt.calibrate(path, images=crops(24), preprocess="imagenet").table
    built(path, tmp_path / "o.engine", calib=made, **options)  # it knows
    for embedded in (True, False):
        given: dict[str, Any] = {"int8": True, "embed_preprocess": embedded, "calib": made, "compare": False}
        for other, said in (("yolo", "scale, mean or std and resize"), ({"preset": "imagenet", "crop": 0.5}, "crop")):
            with pytest.raises(UsageError, match=f"says another {said} than the calibration was made with"):
                built(path, tmp_path / "p.engine", preprocess=other, **given)
    same = {"preset": "imagenet", "size": [32, 32], "mean": [0.485, 0.456, 0.406]}
    for name, given in (("q", {"calib": made, "preprocess": same}), ("r", {"calib": table, "preprocess": "imagenet"})):
        built(path, tmp_path / f"{name}.engine", int8=True, compare=False, **given)
        manifest = read_manifest(tmp_path / f"{name}.engine.json")
        assert manifest.preprocess is not None and manifest.preprocess["crop"] == 0.875


def test_what_tune_chooses_is_built_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = net(tmp_path / "net.onnx")
    options: dict[str, Any] = {
        "min_snr": 5,
        "embed_preprocess": True,
        "target": "sm89",
        "save_onnx": tmp_path / "m.onnx",
    }
    result = trtopt.tune(path, tmp_path / "m.engine", images=crops(24), preprocess="imagenet", **options)
    assert load_model(tmp_path / "m.onnx").inputs[0].dtype == "uint8"
    assert result.precision["int8"] == 2
    monkeypatch.setattr("trtopt.autotune.tuning.calibrated_for", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(UsageError, match=r"needs to know how pixels become"):
        trtopt.tune(path, tmp_path / "m.engine", data={"x": values(24, 3, 32, 32)}, **options)


def test_what_can_not_be_embedded_is_told_before_any_work(tmp_path: Path, world: World) -> None:
    arguments = ["build", world.model, "--embed-preprocess", "-o", world.output / "m.engine", "--target", "sm89"]
    has(world.refused(*arguments), "needs to know how pixels become the model's input", "--preprocess", "--scale")
    (tmp_path / "p.toml").write_text('layout = "nhwc"\n')
    said = "--embed-preprocess", "finds no image input", "the input x has 32 channels in NHWC"
    has(world.refused(*arguments, "--preprocess", tmp_path / "p.toml"), *said)
