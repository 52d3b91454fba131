"""The pipeline on the quickstart's recipe: everything once, nothing twice, and again what changed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from world import World, has, samples

from trtopt import build, run
from trtopt.core.errors import CalibrationError, MissingDependency, UsageError
from trtopt.data.samples import write_crops
from trtopt.workflow import pipeline

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(tmp_path / "cache"))


def test_the_main_job_runs_once_and_agrees_with_fp32(tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "r.html"
    first = pipeline("efficientnet-lite0", out, target="sm89", report=page)
    assert "top-1 " in page.read_text(encoding="utf-8") and first.files["report"] == page
    assert first.skipped == ()
    assert first.build.precision_summary == "49 of 49 convolutions INT8; 1 of 1 matrix products INT8"
    assert first.agreement is not None
    assert first.agreement["samples"] == 20
    assert first.agreement["top1_agreement"] == 1.0
    assert first.agreement["snr_db"] >= 18.4
    assert all(path.is_file() for path in first.files.values())
    assert first.timing is not None or first.not_run
    said = str(first)
    assert f"FP32 model 18.5 MB, engine {(out / 'efficientnet-lite0.int8.engine').stat().st_size / 1e6:.1f} MB" in said
    assert "same class for 100% (limit 95%), 19." in said and "outside the limit" not in said
    following = shlex.split(said.splitlines()[-1])
    assert following[:3] == ["next:", "trtopt", "run"]
    assert run(following[3], images=[following[5]], backend="onnxruntime", top=1).ok
    lost = {**first.agreement, "top1_agreement": 0.9}
    lost["outputs"] = {"logits": {**lost["outputs"]["logits"], "agreement": 0.9}}
    assert "outside the limit: logits: same class for 90.0%" in str(replace(first, agreement=lost))
    again = pipeline("efficientnet-lite0", out, target="sm89")
    assert set(again.skipped) == {"export", "check", "build", "table", "verify"}
    assert again.agreement == first.agreement
    assert json.loads(json.dumps(again.to_json()))["build"]["cached"] is True
    assert "already up to date" in str(again)
    first.files["ONNX"].write_bytes(b"damaged")
    mended = pipeline("efficientnet-lite0", out, target="sm89")
    assert "check" not in mended.skipped
    assert "export" in mended.skipped
    half = pipeline("efficientnet-lite0", out, precision="fp16", target="sm89", certify=True)
    assert half.ok and half.build.certificate is not None and half.build.certificate["samples"] == 20
    assert "certify: all holds; " in str(half)
    assert half.build.precision["fp16"] == 50
    assert str(half).endswith(f"next: trtopt inspect {half.files['engine']}")
    assert half.agreement is not None
    assert half.agreement["snr_db"] > 40


def _recipe(folder: Path, world: World, more: str = "") -> Path:
    """Write one of one's own, beside own.npz."""
    np.savez(folder / "own.npz", x=samples(16))
    path = folder / "own.toml"
    path.write_text(f"""description = "a small network"
source = "{world.model.name}"
{more}
[inputs.x]
shape = ["n", 3, 32, 32]
range = "1x3x32x32,2x3x32x32,4x3x32x32"
""")
    return path


def test_a_recipe_of_ones_own_with_arrays_is_judged_by_its_limits(world: World) -> None:
    folder = world.model.parent
    good = _recipe(folder, world, 'data = "own.npz"\nmin_snr = 10\nmin_agreement = 0.5')
    found = pipeline(good, folder / "out", target="sm89")
    assert found.ok and found.agreement is not None and found.compared_on == "samples of those it was calibrated on"
    assert "agreement with the FP32 model on 16 samples of those" in str(found) and "(limit 10)" in str(found)
    assert f"--data {folder / 'own.npz'}" in str(found).splitlines()[-1]
    figures = {**found.agreement, "outputs": {"y": {"nonfinite": 1}}}
    assert not replace(found, limits=None, agreement=figures).ok and replace(found, limits=None).ok
    again = pipeline(good, folder / "out", target="sm89")
    assert {"check", "build", "verify"} <= set(again.skipped)
    strict = _recipe(folder, world, 'data = "own.npz"\nmin_snr = 90')
    said = world.run("pipeline", strict, "-o", folder / "out", "--target", "sm89")
    assert said.status == 1 and "outside the limit: " in said.out
    last = said.out.splitlines()[-1]
    assert last.startswith("next: trtopt tune ") and "--min-snr 90 " in last
    following = shlex.split(last.removeprefix("next: trtopt "), comments=True)  # as a shell reads it
    assert following[-2:] == ["--target", "sm89"]
    has(world.run(*following).err, "at least 90 is asked for")  # it can be typed as it is
    photos = _recipe(folder, world, 'min_snr = 90\npreprocess = { preset = "imagenet", size = [32, 32], mean = 0.5 }')
    write_crops("imagenet-crops", folder / "crops")
    last = str(pipeline(photos, folder / "out", target="sm89", images=folder / "crops")).splitlines()[-1]
    assert f"--images {folder / 'crops'} --preprocess imagenet --size 32x32 --mean 0.5 --min-snr 90" in last
    unjudged = _recipe(folder, world, 'data = "own.npz"')
    assert pipeline(unjudged, folder / "out", target="sm89").agreement is None


def test_an_fp16_engine_that_misses_limits_is_built_again_with_samples(world: World) -> None:
    """With weights as random ones, whose features fade from layer to layer."""
    folder = world.model.parent
    faded = onnx.load(world.model)
    for item in faded.graph.initializer:
        if item.data_type == onnx.TensorProto.FLOAT:
            item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item) * np.float32(1e-5), item.name))
    onnx.save(faded, world.model)
    half = pipeline(
        _recipe(folder, world, 'data = "own.npz"\nmin_snr = 15'), folder / "out", precision="fp16", target="sm89"
    )
    words = shlex.split(str(half).splitlines()[-1], comments=True)[1:]
    assert words[:2] == ["trtopt", "build"] and "--fp16" in words and "--data" in words
    assert world.run(*words[1:]).status == 0


def test_samples_may_be_given_and_precision_may_be_the_recipes(world: World) -> None:
    folder = world.model.parent
    bare = _recipe(folder, world)
    with pytest.raises(UsageError, match=r"names nothing to calibrate on.*`data=F.npz`.*`precision='fp16'`"):
        pipeline(bare, folder / "out", target="sm89")
    assert pipeline(bare, folder / "out", target="sm89", data=folder / "own.npz").build.precision["int8"] == 2
    with pytest.raises(UsageError, match="one of the two"):
        pipeline(bare, folder / "out", images=folder, data=folder / "own.npz")
    half = _recipe(folder, world, 'precision = "fp16"')
    assert pipeline(half, folder / "out", target="sm89").build.precision["fp16"] == 2
    with pytest.raises(UsageError, match=r"own\.toml.*: precision is 'int4'"):
        pipeline(_recipe(folder, world, 'precision = "int4"'), folder / "out")


def test_a_precision_is_advised_as_pipeline_takes_it(world: World) -> None:
    folder = world.model.parent
    text = '<ir_version: 8, opset_import: ["": 17]> relu (float[n, 3, 32, 32] x) => (float[n, 3, 32, 32] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), world.model)
    recipe = _recipe(folder, world, 'data = "own.npz"')
    with pytest.raises(CalibrationError, match=r"nothing to quantize.*build it with `precision='fp16'`"):
        pipeline(recipe, folder / "out", target="sm89")
    has(world.run("pipeline", recipe, "-o", folder / "out", "--target", "sm89").err, "build it with --precision fp16")


def test_photos_that_are_not_installed_are_missed_before_the_first_stage(world: World) -> None:
    folder = world.model.parent
    recipe = _recipe(folder, world, 'data = "own.npz"\nlabelled = "package:no_such_photos/*.png"')
    with pytest.raises(MissingDependency, match="needs the package no_such_photos"):
        pipeline(recipe, folder / "late", target="sm89")
    assert not (folder / "late").exists()


def test_unknown_recipes_and_precisions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`precision=` is 'int4'"):
        pipeline("efficientnet-lite0", tmp_path / "out", precision="int4")
    with pytest.raises(UsageError, match="efficientnet-lite0"):
        pipeline("no-such-model", tmp_path / "out")
    with pytest.raises(UsageError, match="`method=` is how scales are chosen, and efficientnet-lite0 is built in FP16"):
        pipeline("efficientnet-lite0", tmp_path / "out", precision="fp16", method="mse")
    assert not (tmp_path / "out").exists()


def test_a_model_with_scales_of_its_own_needs_no_samples(world: World) -> None:
    """From init's own proposal on."""
    folder = world.model.parent
    kept = folder / "net.int8.onnx"
    build(world.model, folder / "n.engine", int8=True, data={"x": samples(16)}, target="sm89", save_onnx=kept)
    said = world.run("init", kept, "-o", folder / "own.toml")
    assert said.status == 0 and "scales of its own" in said.out
    (following,) = [line for line in said.out.splitlines() if "trtopt pipeline" in line]
    assert "--data" not in following
    found = pipeline(folder / "own.toml", folder / "out", target="sm89")
    assert found.build.precision["int8"] > 0 and found.agreement is None
    np.savez(folder / "own.npz", x=samples(16))
    compared = pipeline(folder / "own.toml", folder / "out", target="sm89", data=folder / "own.npz")
    assert compared.agreement is not None
    said = str(compared)
    assert "agreement with the quantized model on 16 samples:" in said and "size: quantized model" in said
    assert compared.to_json()["reference"] == "quantized model"


def test_a_file_that_no_pipeline_wrote_is_not_replaced(world: World) -> None:
    recipe, mine = _recipe(world.folder, world), world.folder / "own.onnx"
    mine.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"has own\.onnx, which no pipeline wrote there"):
        pipeline(recipe, world.folder, target="sm89", data=world.folder / "own.npz")
    assert mine.read_bytes() == b"mine" and not (world.folder / "pipeline.json").exists()
