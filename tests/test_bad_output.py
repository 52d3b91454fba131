"""Outputs that can't be written, packages that aren't installed, files that are no engine: errors of the same kind."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from world import RTX, World, has, net, samples

from trtopt.core.errors import EngineError, EngineMismatch
from trtopt.core.files import sha256_file
from trtopt.core.version import to_install

# --- outputs ---


def commands(world: World, output: Path) -> list[list[object]]:
    """Every command that writes, writing to `output`."""
    return [
        ["calibrate", world.model, "--data", world.arrays, "-o", output],
        ["build", world.model, "--fp16", *RTX, "-o", output],
        ["build", world.model, "--fp16", *RTX, "-o", world.output / "m.engine", "--save-onnx", output],
        ["check", world.model, "--backend", "rtx", "--fix", output],
    ]


@pytest.mark.usefixtures("rtx")
def test_outputs_that_cannot_be_written(world: World) -> None:
    folder, file = world.output / "folder", world.output / "file"
    folder.mkdir()
    file.write_text("mine")
    for command in commands(world, folder):
        has(world.refused(*command), f"can't write {folder}", "it is a folder, give a file name")
    for command in commands(world, world.output / "new"):
        has(world.refused(*command[:-1], f"{command[-1]}/"), "new/: that is the name of a folder, give a file name")
    for command in commands(world, world.output / "gone" / "m.out"):
        has(world.refused(*command), "can't write", "gone doesn't exist, create it with mkdir -p")
    for command in commands(world, file / "m.out"):
        has(world.refused(*command), "can't write", f"{file}")
    for command in commands(world, world.output / ("long" * 100)):
        has(world.refused(*command), "name too long")
    manifest = world.output / "b.engine.json"
    manifest.mkdir()
    has(world.refused("build", world.model, "--fp16", "-o", world.output / "b.engine"), f"can't write {manifest}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.usefixtures("rtx")
def test_a_folder_without_permission(world: World) -> None:
    world.output.chmod(0o555)
    try:
        for command in commands(world, world.output / "m.out"):
            has(world.refused(*command), "can't write", "Permission denied")
    finally:
        world.output.chmod(0o755)


@pytest.mark.parametrize("which", ["m.engine.json", "m.engine", "m.onnx", "clean.onnx", "t.calib.json"])
@pytest.mark.usefixtures("rtx")
def test_a_full_disk_leaves_nothing(world: World, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the file is written, then the disk is full."""
    write, failed = Path.write_bytes, []

    def full(path: Path, content: bytes | memoryview) -> int:
        if path.parent.parent != world.output or path.parent.name.rsplit(".", 2)[0] != f".{which}":
            return write(path, content)
        write(path, memoryview(content)[: len(content) // 2])
        failed.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    command: list[object] = {
        "t.calib.json": ["calibrate", world.model, "--data", world.arrays, "-o", world.output / which],
        "clean.onnx": ["check", world.model, "--backend", "rtx", "--fix", world.output / which],
    }.get(which) or [
        "build", world.model, "--fp16", *RTX,
        "-o", world.output / "m.engine", "--save-onnx", world.output / "m.onnx",
    ]  # fmt: skip
    has(world.refused(*command), f"can't write {world.output / which}", "No space left on device", "nothing was left")
    assert failed
    # What was there before stays as it was: here, of an earlier build.
    monkeypatch.setattr(Path, "write_bytes", write)
    assert world.run(*command).status == 0
    assert world.contents()
    onnx.save(helper.make_model(net().graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), world.model)
    np.savez(world.arrays, x=samples(36))
    monkeypatch.setattr(Path, "write_bytes", full)
    has(world.refused(*command), "No space left on device")


def test_a_cache_folder_that_cannot_be_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_CACHE", str(world.model / "cache"))
    done = world.run("calibrate", world.model, "--data", world.arrays, "-o", world.output / "t.calib.json")
    assert done.status == 0, done.err
    has(done.err, "can't be kept", "cache folder", "model.onnx/cache", "set TRTOPT_CACHE to another")


# --- what isn't installed ---


def test_without_any_tensorrt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, module, None)
    engine = world.output / "m.engine"
    message = world.refused("build", world.model, "--fp16", "-o", engine)
    has(message, "no TensorRT can be used", to_install("rtx"), to_install("trt8"), to_install("trt10"))
    message = world.refused("build", world.model, "--fp16", "--backend", "rtx", "-o", engine)
    has(message, "tensorrt_rtx isn't installed", to_install("rtx"))
    message = world.refused("build", world.model, "--fp16", "--backend", "tensorrt", "-o", engine)
    has(message, "tensorrt isn't installed", to_install("trt8"), to_install("trt11"))
    # The rest works without: a check says that no parser was asked.
    found = world.run("check", world.model, "--json")
    assert found.status == 0
    assert "tensorrt-rtx" in found.out


@pytest.mark.parametrize(
    ("module", "typed", "words"),
    [
        (
            "onnxruntime",
            "calibrate model.onnx --data data.npz",
            ("calibration needs onnxruntime", "install 'onnxruntime"),
        ),
        (
            "cv2",
            "calibrate model.onnx --images photos --preprocess imagenet",
            ("images needs cv2", "'opencv-python-he"),
        ),
        ("torch", "export torchvision:resnet18", ("needs torch", "pip install 'torch")),
    ],
)
def test_without_an_optional_package(
    world: World, monkeypatch: pytest.MonkeyPatch, module: str, typed: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(world.folder)
    has(world.refused(*typed.split(), "-o", world.output / "made"), *words)


# --- engines ---


OLD = (
    b"ftrt" + bytes(20) + bytes((8, 6, 0, 12)) + bytes(4000)
)  # the header as TensorRT 8.6 writes it, and nothing behind


@pytest.mark.usefixtures("rtx")
def test_plans_of_another_generation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtopt.trt import select

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    path = world.output / "old.engine"
    path.write_bytes(OLD)
    with pytest.raises(EngineMismatch) as caught:
        select("rtx").load(path.read_bytes(), str(path))
    has(str(caught.value), "old.engine was made by TensorRT 8.6.0.12", "this is TensorRT-RTX", "`backend='tensorrt'`")
    described = world.run("inspect", path)
    assert described.status == 0
    has(described.out, "TensorRT 8.6.0.12", "--trust")
    message = world.refused("inspect", path, "--trust")
    has(message, "old.engine was made by TensorRT 8.6.0.12", to_install("trt8"), "build the engine again")


def test_files_that_are_no_engine(world: World) -> None:
    path = world.output / "m.engine"
    has(world.refused("inspect", path), "the engine", "doesn't exist")
    has(world.refused("inspect", world.output), "is a folder")
    for content in (b"", b"ftrt", world.model.read_bytes(), np.random.default_rng(0).bytes(5000)):
        path.write_bytes(content)
        has(world.refused("inspect", path), "m.engine isn't a TensorRT plan")


@pytest.mark.usefixtures("rtx")
def test_engines_that_changed_since(world: World) -> None:
    from trtopt.trt import select

    engine, manifest = world.output / "m.engine", world.output / "m.engine.json"
    done = world.run("build", world.model, "--fp16", *RTX, "--shapes", "x:1x3x32x32", "-o", engine)
    assert done.status == 0, done.err
    whole, told = engine.read_bytes(), manifest.read_text()
    engine.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError, match=r"is damaged: it has \d+ bytes, its header says \d+"):
        select("rtx").load(engine.read_bytes(), "m.engine")
    has(world.refused("inspect", engine), "isn't the plan its manifest describes", "sha256", "build it again")
    manifest.unlink()
    has(world.refused("inspect", engine), "is damaged", "its header says", "build or copy it again")
    engine.write_bytes(whole)
    for content, words in (
        (told[:-50], ("m.engine.json can't be read", "build the engine again")),
        ("[]", ("has format None", "build the engine again")),
        (told.replace("trtopt.engine/1", "trtopt.engine/9"), ("'trtopt.engine/9'", "'trtopt.engine/1'")),
        ('{"format": "trtopt.engine/1"}', ("is damaged or incomplete", "build the engine again")),
    ):
        manifest.write_text(content)
        has(world.refused("inspect", engine), *words)
    manifest.write_text(told)
    assert world.run("inspect", engine).status == 0
    # A manifest speaks for a plan whose maker isn't here.
    foreign = json.loads(told)
    engine.write_bytes(OLD)
    foreign["plan"]["sha256"] = sha256_file(engine)
    manifest.write_text(json.dumps(foreign))
    found = world.run("inspect", engine)
    assert found.status == 0
    assert "TensorRT 8.6.0.12" in found.out
