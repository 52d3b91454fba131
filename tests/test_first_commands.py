"""Commands of a new user for a model with several inputs, and for one that leaves its image size open."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import model, nodes, values
from onnx import numpy_helper
from onnx.parser import parse_model
from world import World, has

from trtopt.engine.manifest import load_manifest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
FOR = ("--target", "sm89")


@pytest.fixture
def text(world: World) -> Path:
    """Tokens and their mask, both (batch_size, sequence_length), to embeddings."""
    table, w = (numpy_helper.from_array(values(*shape), name) for name, shape in (("table", (50, 32)), ("w", (32, 32))))
    made = parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        text (int64[batch_size, sequence_length] ids, int64[batch_size, sequence_length] mask)
            => (float[batch_size, sequence_length, 32] y) <int64[1] last = {2}> {
            e = Gather (table, ids)
            m = Cast <to = 1> (mask)
            m3 = Unsqueeze (m, last)
            em = Mul (e, m3)
            y = MatMul (em, w)
        }"""
    )
    made.graph.initializer.extend([table, w])
    onnx.save(made, world.folder / "text.onnx")
    return world.folder / "text.onnx"


@pytest.fixture
def detector(world: World) -> Path:
    """An image of any size, its dimensions named as Paddle does, to a map of scores; two branches meet in a Concat."""
    size = ["p2o.DynamicDimension.0", 3, "p2o.DynamicDimension.1", "p2o.DynamicDimension.2"]
    shapes = {"w1": (16, 3, 3, 3), "w2": (16, 16, 1, 1), "w3": (16, 16, 1, 1), "w4": (16, 32, 1, 1)}
    parts = nodes(
        "[conv1] a = Conv <pads = [1, 1, 1, 1]> (x, w1) [relu1] b = Relu (a) [conv2] c = Conv (b, w2) [conv3] d = Conv (b, w3) "
        "[cat] e = Concat <axis = 1> (c, d) [conv4] y = Conv (e, w4)"
    )
    weights = {name: values(*shape, seed=seed, scale=0.2) for seed, (name, shape) in enumerate(shapes.items())}
    onnx.save(model(parts, inputs={"x": size}, weights=weights), world.folder / "det.onnx")
    return world.folder / "det.onnx"


def test_several_inputs_are_one_profile_however_they_are_typed(world: World, text: Path) -> None:
    checked = world.run("check", text)
    (line,) = re.findall(r"^build needs the range of what is left open: --shapes '(.*)'$", checked.out, re.M)
    has(checked.out, "adapt these guesses (min,opt,max): batch_size 1,1,8; sequence_length 8,128,512")
    refused = world.refused("build", text, "--fp16", *FOR, "-o", world.output / "t.engine")
    has(refused, "no --shapes gives their range: ids (batch_size, sequence_length), mask (", f"--shapes '{line}'")
    assert "doesn't fit" not in refused
    lacking = world.refused("build", text, "--shapes", "ids:1x8,4x8,8x16", *FOR, "-o", world.output / "t.engine")
    has(lacking, "mask (batch_size, sequence_length) is missing", "--shapes 'ids:1x8,4x8,8x16;mask:1x8,4x8,8x16'")
    ids, mask = line.split(";")
    for typed in (["--shapes", line], ["--shapes", ids, "--shapes", mask], ["--shapes", f"{ids},{mask}"]):
        done = world.run("build", text, "--fp16", *typed, *FOR, "-o", world.output / "t.engine")
        assert done.status == 0, done
        manifest = load_manifest(world.output / "t.engine")
        assert manifest is not None
        assert manifest.profiles == [{"ids": ids.removeprefix("ids:"), "mask": mask.removeprefix("mask:")}]
    assert "up to date" in done.out  # the three are the same request


def test_the_opt_size_is_that_of_the_images_and_options_say_how_they_are_prepared(world: World, detector: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    engine, kept = world.output / "d.engine", world.output / "d.onnx"
    shapes = ("--shapes", "x:1x3x32x32,1x3x64x48,4x3x96x96")
    images = ("--images", world.photos, "--scale", "1/255", "--mean", "0.5,0.4,0.3", "--std", "0.25")
    refused = world.refused("calibrate", detector, *images, "-o", world.output / "t.json")
    has(refused, "the input x (?, 3, ?, ?) leaves its size open: give --size HEIGHTxWIDTH such as 640x640")
    asked = ("build", detector, "--int8", *images, "--channels", "bgr", *shapes, "-o", engine, "--save-onnx", kept)
    done = world.run(*asked)
    assert done.status == 0, done
    has(
        done.err,
        "images are prepared in 64x48, the opt size of --shapes",
        "for sm80, sm86, sm89, sm120 (--target chooses)",
    )
    has(done.out, "ORT_DISABLE_ALL")
    manifest = load_manifest(engine)
    assert manifest is not None and manifest.preprocess is not None
    wanted = {"size": [64, 48], "scale": 1 / 255, "mean": [0.5, 0.4, 0.3], "std": [0.25], "channels": "bgr"}
    assert {name: manifest.preprocess[name] for name in wanted} == wanted
    own = world.run("run", engine, "--images", world.photos, "--size", "32", "--backend", "onnxruntime", "--json")
    assert json.loads(own.out)["outputs"][0]["shape"] == [4, 16, 32, 32]
    plain = world.run("run", engine, "--images", world.photos, "--backend", "onnxruntime", "--json")
    assert json.loads(plain.out)["outputs"][0]["shape"] == [4, 16, 64, 48]
    session_options = ort.SessionOptions()
    session_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # as the build says
    (found,) = ort.InferenceSession(str(kept), session_options).run(None, {"x": np.zeros((1, 3, 64, 48), np.float32)})
    assert found.shape == (1, 16, 64, 48)
    compared = world.run("verify", detector, kept, *images, "--channels", "bgr", "--size", "64x48", "--json")
    assert json.loads(compared.out)["samples"] == 4


def test_nodes_are_listed_by_the_names_of_overrides(world: World, detector: Path) -> None:
    found = json.loads(world.run("check", detector, "--nodes", "--json").out)["nodes"]
    listing = {item["name"]: item for item in found}
    assert list(listing) == ["conv1", "relu1", "conv2", "conv3", "cat", "conv4"]
    told = {"name": "conv4", "op": "Conv", "shape": "(?, 16, ?, ?)", "precision": "int8", "reason": ""}
    assert listing["conv4"] == told
    assert listing["cat"]["reason"] == "reads it quantized"
    assert listing["relu1"]["precision"] == "fp16"
    has(world.run("check", detector, "--nodes").out, "conv3", "(?, 16, ?, ?)")
    assert json.loads(world.run("check", detector, "--json").out)["nodes"] == []
    images = ("calibrate", detector, "--images", world.photos, "--size", "64", "-o", world.output / "t.json")
    for command in (images, ("build", detector, "--fp16", "--shapes", "x:1x3x8x8", "-o", world.output / "e")):
        said = world.refused(*command, "--precision-override", "cnov3=fp32")
        has(said, "matches no node; near: conv3, ", "trtopt check MODEL --nodes lists")


def test_the_size_of_the_images_is_the_engines_where_no_shapes_are_given(world: World, detector: Path) -> None:
    images = ("--images", world.photos, "--scale", "1/255", "--size", "64x48")
    done = world.run("build", detector, "--int8", *images, *FOR, "-o", world.output / "d.engine")
    assert done.status == 0, done
    has(done.err, "no --shapes given: one profile for batch 1 to 32", "--shapes x:1x3x64x48,8x3x64x48,32x3x64x48")
    outside = ("--shapes", "x:1x3x96x96,1x3x128x128,2x3x256x256")
    refused = world.refused("build", detector, "--int8", *images, *outside, *FOR, "-o", world.output / "e.engine")
    has(refused, "images are prepared in 64x48, which --shapes x:1x3x96x96,1x3x128x128,2x3x256x256 leaves out")


def test_options_of_trtexec_are_answered_by_a_command_that_translates_them(world: World) -> None:
    for typed in (["--onnx=m.onnx", "--saveEngine=m.engine"], ["m.onnx", "--memPoolSize=workspace:64"]):
        said = world.refused("build", *typed)
        command = re.search(r"it is trtexec's; trtopt (doctor --migrate '.*?') says", said)
        assert command, said
        assert "trtopt build" in world.run(*shlex.split(command[1])).out
