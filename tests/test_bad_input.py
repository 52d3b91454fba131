"""Bad models, options and data on the command line: one clear error, a non-zero exit status, and nothing left behind."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from PIL import Image
from world import PHOTO, RTX, World, has, net, samples

from trtopt.core.errors import InvalidModel
from trtopt.graph.io import load_model

# --- the world itself: without the mistake, every command used below works ---


@pytest.mark.usefixtures("rtx")
def test_without_the_mistakes_everything_works(world: World) -> None:
    table, engine = world.output / "t.calib.json", world.output / "m.engine"
    assert world.run("check", world.model, "--backend", "rtx").status == 0
    assert world.run("calibrate", world.model, "--data", world.arrays, "-o", table).status == 0
    done = world.run("build", world.model, "--int8", "--calib", table, *RTX, "-o", engine, "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["precision"] == {"int8": 2, "fp16": 0, "fp32": 0, "total": 2}
    assert world.run("inspect", engine).status == 0
    assert set(world.contents()) == {"t.calib.json", "m.engine", "m.engine.json"}


# --- models ---


def changed(change: str) -> Callable[[], ModelProto]:
    """The network after a line of Python on `model`."""

    def made() -> ModelProto:
        exec(change, {"model": (model := net()), "graph": model.graph})
        return model

    return made


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PHOTO).save(buffer, "PNG")
    return buffer.getvalue()


BAD_MODELS: dict[str, tuple[Callable[[], bytes | ModelProto | None], tuple[str, ...]]] = {
    "missing": (lambda: None, ("bad.onnx", "doesn't exist")),
    "empty": (lambda: b"", ("bad.onnx", "is empty (0 bytes)", "export or copy it again")),
    "truncated": (lambda: net().SerializeToString()[:5000], ("bad.onnx (5000 bytes)", "truncated", "copy")),
    "random": (lambda: np.random.default_rng(3).bytes(4096), ("bad.onnx (4096 bytes)", "isn't an ONNX model")),
    "text": (lambda: b"<html>404 not found</html>", ("isn't an ONNX model", "web page")),
    "zip": (lambda: b"PK\x03\x04" + bytes(100), ("PyTorch checkpoint", "trtopt export")),
    "photo": (_png, ("isn't an ONNX model",)),
    "cyclic": (changed("graph.node[0].input[0] = 'd'"), ("cyclic", "conv1", "relu2", "→")),
    "dangling": (
        changed("graph.node[2].input[0] = 'nowhere'"),
        ("conv2", "'nowhere'", "no node, input or initializer"),
    ),
    "opset 99": (changed("model.opset_import[0].version = 99"), ("opset 99", "allowed: 1 to", "pip install -U onnx")),
    "IR 99": (changed("model.ir_version = 99"), ("IR version 99", "allowed: 3 to")),
    "no outputs": (changed("del graph.output[:]"), ("has no outputs",)),
    "short weight": (
        changed("w = graph.initializer[1]; w.raw_data = w.raw_data[:-4]"),
        ("'w2'", "9216 bytes, 9212 are there"),
    ),
    "one input too many": (
        changed("graph.node[3].input.append('a')"),
        ("isn't valid ONNX", "relu2", "2 not in range"),
    ),
}


def bad_model(world: World, name: str) -> Path:
    path, content = world.folder / "bad.onnx", BAD_MODELS[name][0]()
    if isinstance(content, ModelProto):
        path.write_bytes(content.SerializeToString())
    elif content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", BAD_MODELS)
def test_models_that_are_none_are_refused_by_every_command_and_told_by_check(world: World, name: str) -> None:
    path, words = bad_model(world, name), BAD_MODELS[name][1]
    if name == "cyclic":  # onnx's own loader would never see the difference
        assert onnx.load(path).graph.node[0].input[0] == "d"
    messages = {
        world.refused("calibrate", path, "--data", world.arrays, "-o", world.output / "t.calib.json"),
        world.refused("build", path, "--fp16", "-o", world.output / "m.engine"),
        world.refused("build", path, "--int8", "--data", world.arrays, "-o", world.output / "m.engine"),
        world.refused("verify", path, world.model, "--data", world.arrays),
        world.refused("verify", world.model, path, "--data", world.arrays),
    }
    if name == "missing":
        messages.add(world.refused("check", path))
    assert len(messages) == 1  # the same mistake is told in the same words
    has(messages.pop(), *words)
    if name == "missing":
        return
    found = world.run("check", path, "--fix", world.output / "clean.onnx", "--json")
    assert found.status == 1
    report = json.loads(found.out)
    assert report["ok"] is False
    assert report["fixed"] is None
    (finding,) = report["findings"]
    assert (finding["level"], finding["code"]) == ("error", "invalid-model")
    has(finding["message"], *words)
    assert world.contents() == {}


def test_no_cut_of_a_model_is_taken_for_one(tmp_path: Path) -> None:
    """A protobuf message cut between two fields is one as well."""
    whole, path = net().SerializeToString(), tmp_path / "cut.onnx"
    for size in [*range(600), *range(600, len(whole), 97), *range(len(whole) - 40, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidModel):
            load_model(path)


@pytest.mark.parametrize("damage", ["missing", "cut", "outside"])
def test_external_data_that_is_not_there(world: World, damage: str) -> None:
    path, weights = world.folder / "external.onnx", world.folder / "weights.bin"
    onnx.save(net(), path, save_as_external_data=True, location=weights.name, size_threshold=0)
    assert load_model(path).opset == 17
    if damage == "missing":
        weights.unlink()
        words = ("weights.bin is missing", "'w1'", "copy it beside the model")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:2000])
        words = ("weights.bin has 2000 bytes", "'w2'", "truncated, copy it again")
    else:
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../weights.bin"
        path.write_bytes(model.SerializeToString())
        words = ("'w1'", "bad external data reference", "../weights.bin")
    has(world.refused("build", path, "--fp16", "-o", world.output / "m.engine"), *words)
    has(world.refused("calibrate", path, "--data", world.arrays, "-o", world.output / "t.json"), *words)
    found = world.run("check", path, "--json")
    assert found.status == 1
    has(json.loads(found.out)["findings"][0]["message"], *words)


@pytest.mark.usefixtures("rtx")
def test_nodes_that_the_parser_refuses_are_named_and_the_model_as_the_user_knows_it(world: World) -> None:
    model = net()
    model.graph.node[2].input[1] = "w1"  # made for 3 channels, there are 16: onnx's own inference sees nothing wrong
    onnx.save(model, world.model)
    for precision in (["--fp16"], ["--int8", "--data", world.arrays]):
        message = world.refused("build", world.model, *precision, *RTX, "-o", world.output / "m.engine")
        has(message, f"can't take 1 part of {world.model}", "conv2 (Conv)", "Kernel weight dimension")
        assert "/model.onnx" not in message.replace(str(world.model), "")
    assert world.run("check", world.model, "--backend", "rtx").status == 1


# --- shapes and other options ---

OPTIONS: list[tuple[list[str], tuple[str, ...]]] = [
    (["--shapes", "image:1x3x32x32"], ("no input 'image'", "x (n, 3, 32, 32)", "Write --shapes x:1x3x32x32,")),
    (["--shapes", "x:1x3x32"], ("x has rank 4 (n, 3, 32, 32)", "have rank 3")),
    (["--shapes", "x:1x3x64x64"], ("fixed size of 32 in dimension 2, given 64", "fixed size of 32 in dimension 3")),
    (["--shapes", "x:1x3x32x32,8x3x32x32,4x3x32x32"], ("dimension 0 has 1, 8, 4", "min ≤ opt ≤ max")),
    (["--shapes", "x:1x3x32x32,8x3x32x32"], ("--shapes x: '1x3x32x32,8x3x32x32' can't be read", "MIN,OPT,MAX")),
    (["--shapes", "x:-1x3x32x32"], ("x can't have negative sizes", "Write --shapes x:1x3x32x32,")),
    (["--target", "ada"], ("'ada' isn't a compute capability", "sm89")),
    (["--workspace", "lots"], ("'lots', which isn't a size", "2GiB")),
    (["--optimization-level", "9"], ("--optimization-level is 9", "0 to 5")),
    (["--optimization-level", "high"], ("--optimization-level", "integer")),
    (["--backend", "cuda"], ("--backend is 'cuda'", "auto, tensorrt, rtx")),
    (["--precision-override", "conv1"], ("'conv1' can't be read", "PATTERN=fp32")),
    (["--bf16"], ("--fp16 and --bf16", "choose one")),
    (["--images", "photos", "--data", "d.npz"], ("--images and --data are both given", "one of them")),
    (["--calib", "t.json"], ("--calib calibrates, but the build is fp16", "add --int8")),
    (["--int8"], ("--int8 needs scales", "--images DIR", "random data is never used")),
    (["--int8", "--fp8"], ("--int8 and --fp8",)),
    (["--bogus"], ("--bogus", "trtopt build -h")),
]


@pytest.mark.parametrize(
    ("options", "words"), OPTIONS, ids=lambda item: " ".join(item) if isinstance(item, list) else ""
)
@pytest.mark.usefixtures("rtx")
def test_options_that_do_not_fit(world: World, options: list[str], words: tuple[str, ...]) -> None:
    arguments = ["build", world.model, "--fp16", "-o", world.output / "m.engine"]
    if not {"--backend", "--target"} & set(options):
        arguments += RTX
    has(world.refused(*arguments, *options), *words)


# --- images and arrays ---


def calibration(world: World, *arguments: object) -> str:
    """The message of `calibrate`, which `build --int8` must give as well."""
    message = world.refused("calibrate", world.model, *arguments, "-o", world.output / "t.calib.json")
    assert world.refused("build", world.model, "--int8", *arguments, *RTX, "-o", world.output / "m.engine") == message
    return message


@pytest.mark.usefixtures("rtx")
def test_folders_without_usable_images(world: World) -> None:
    prepared = ("--preprocess", "imagenet")
    folder = world.folder / "empty"
    folder.mkdir()
    has(calibration(world, "--images", world.folder / "gone", *prepared), "--images", "gone doesn't exist")
    has(calibration(world, "--images", folder, *prepared), "there is no image in", str(folder), ".jpg")
    (folder / "notes.txt").write_text("no image by its name")
    has(calibration(world, "--images", folder, *prepared), "there is no image in")
    (folder / "text.jpg").write_text("not an image\n" * 50)
    photo = (world.photos / "0.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(photo[: len(photo) // 2])
    (folder / "empty.png").write_bytes(b"")
    message = calibration(world, "--images", folder, *prepared)
    has(message, "none of the 3 images can be used", "text.jpg: ", "cut.jpg: ", "empty.png: the file is empty")
    has(calibration(world, "--images", world.model, *prepared), "isn't a folder")
    has(calibration(world, "--images", world.photos), "needs --preprocess", "imagenet", "TOML")
    has(calibration(world, "--images", world.photos, "--preprocess", "imagenett"), "'imagenett'", "efficientnet-lite")
    has(calibration(world, "--images", world.photos, *prepared, "--limit", "0"), "--limit is 0", "at least 1")


def test_bad_files_among_good_ones_are_skipped_and_counted(world: World) -> None:
    photo = (world.photos / "0.jpg").read_bytes()
    middle = len(photo) // 2
    bad = {
        "cut.jpg": photo[:middle],
        "text.jpg": b"not an image\n" * 50,
        "empty.jpg": b"",
        "header.jpg": b"\xff\xd8\xff\xe0" + bytes(200) + b"\xff\xd9",
    }
    for name, content in bad.items():
        (world.photos / name).write_bytes(content)
    found = world.run(
        "calibrate", world.model, "--images", world.photos, "--preprocess", "imagenet",
        "-o", world.output / "t.calib.json", "--json",
    )  # fmt: skip
    assert found.status == 0, found.err
    result = json.loads(found.out)
    assert result["samples"] == 4
    assert {item["name"] for item in result["skipped"]} == set(bad)
    assert all(item["reason"] for item in result["skipped"])
    has(found.err, "4 files can't be used and were left out", "only 4 samples")
    assert set(world.contents()) == {"t.calib.json"}
    table = json.loads((world.output / "t.calib.json").read_text())
    assert {item["name"] for item in table["skipped"]} == set(bad)


ARRAYS: dict[str, tuple[Callable[[], dict[str, NDArray[Any]]], tuple[str, ...]]] = {
    "other name": (lambda: {"image": samples(4)}, ("lacks x", "it has image", "inputs are x")),
    "other rank": (lambda: {"x": samples(4)[0, 0]}, ("x has shape 32x32", "takes nx3x32x32")),
    "one sample alone": (lambda: {"x": samples(4)[0]}, ("only 1 sample", "x is nx3x32x32")),
    "other layout": (
        lambda: {"x": samples(4).transpose(0, 2, 3, 1)},
        ("x has shape 4x32x32x3", "dimension 1 must be 3"),
    ),
    "other dtype": (lambda: {"x": (samples(4) * 255).astype(np.uint8)}, ("dtype uint8", "takes float32", "astype")),
    "none": (lambda: {"x": samples(4)[:0]}, ("no samples", "first axis")),
    "one": (lambda: {"x": samples(1)}, ("1 sample", "at least 2", "some hundred")),
    "constant": (lambda: {"x": np.full((40, 3, 32, 32), 0.5, np.float32)}, ("'x'", "0.5 everywhere")),
    "zero": (lambda: {"x": np.zeros((40, 3, 32, 32), np.float32)}, ("'x'", "everywhere")),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.usefixtures("rtx")
def test_arrays_that_do_not_fit(world: World, name: str) -> None:
    make, words = ARRAYS[name]
    path = world.folder / "bad.npz"
    np.savez(path, **make())
    has(calibration(world, "--data", path), *words)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.usefixtures("rtx")
def test_what_is_not_finite_is_named_with_its_sample(world: World, value: float) -> None:
    broken = samples(40)
    broken[17, 1, 3, 5] = value
    path = world.folder / "broken.npz"
    np.savez(path, x=broken)
    has(calibration(world, "--data", path), "broken.npz: x holds NaN or infinite values", "sample 17")


@pytest.mark.usefixtures("rtx")
def test_data_files_that_cannot_be_read(world: World) -> None:
    path = world.folder / "bad.npz"
    has(calibration(world, "--data", path), "bad.npz", "doesn't exist")
    whole = world.arrays.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"x,y\n1,2\n" * 30):
        path.write_bytes(content)
        has(calibration(world, "--data", path), "bad.npz can't be read as .npz", "written completely?")
    np.savez(path, x=np.array([{"a": 1}], dtype=object))
    has(calibration(world, "--data", path), "holds Python objects", "np.stack")
    has(calibration(world, "--data", world.model), "neither .npz nor .npy")
    has(calibration(world, "--data", world.arrays, "--preprocess", "imagenet"), "--preprocess is for --images")


def test_a_model_that_overflows_names_the_tensor(world: World) -> None:
    model = net()
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight *= 3e38 * (1 / np.abs(weight).max(initial=1))
    assert np.isfinite(weight).all()  # its products aren't
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w1"))
    onnx.save(model, world.model)
    message = world.refused("calibrate", world.model, "--data", world.arrays, "-o", world.output / "t.calib.json")
    has(message, "'b'", "infinite")


@pytest.mark.usefixtures("rtx")
def test_tables_that_are_none(world: World) -> None:
    path = world.folder / "bad.calib.json"
    has(build_int8(world, path), "the calibration table", "doesn't exist")
    for content in (b"", b"not JSON", b'{"a": 1}', b"[1, 2]"):
        path.write_bytes(content)
        has(build_int8(world, path), "bad.calib.json", "trtopt calibrate")


def build_int8(world: World, table: Path, model: Path | None = None) -> str:
    return world.refused(
        "build", model or world.model, "--int8", "--calib", table, *RTX,
        "-o", world.output / "m.engine",
    )  # fmt: skip


@pytest.mark.usefixtures("rtx")
def test_a_table_of_another_model(world: World) -> None:
    table, other = world.folder / "t.calib.json", world.folder / "other.onnx"
    assert world.run("calibrate", world.model, "--data", world.arrays, "-o", table).status == 0
    model = net()
    for node in model.graph.node:
        node.input[:] = [f"{name}_2" if name in "abcde" else name for name in node.input]
        node.output[:] = [f"{name}_2" if name in "abcde" else name for name in node.output]
    onnx.save(model, other)
    has(build_int8(world, table, other), "b_2", "trtopt calibrate")
    cut = world.folder / "cut.calib.json"
    cut.write_bytes(table.read_bytes()[:-100])
    has(build_int8(world, cut), "cut.calib.json", "trtopt calibrate")
