"""Commands that can't be right, on files that can't be: one error that says what to type, an exit status, nothing written."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image
from world import PHOTO, RTX, World, has, net, samples

from trtopt.core.version import to_install

FOR = " ".join(RTX)


def changed(change: str) -> bytes:
    """The network after a line of Python on it."""
    exec(change, {"model": (model := net()), "graph": model.graph})
    return model.SerializeToString()


def photo(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PHOTO).save(file, kind)
    return file.getvalue()


FILES = {
    "empty.onnx": b"",
    "cut.onnx": net().SerializeToString()[:5000],
    "random.onnx": np.random.default_rng(3).bytes(4096),
    "page.onnx": b"<html>404 not found</html>",
    "zip.onnx": b"PK\x03\x04" + bytes(100),
    "photo.onnx": photo("PNG"),
    "cyclic.onnx": changed("graph.node[0].input[0] = 'd'"),
    "dangling.onnx": changed("graph.node[2].input[0] = 'nowhere'"),
    "opset.onnx": changed("model.opset_import[0].version = 99"),
    "short.onnx": changed("w = graph.initializer[1]; w.raw_data = w.raw_data[:-4]"),
    "inputs.onnx": changed("graph.node[3].input.append('a')"),
    "kernel.onnx": changed(
        "graph.node[2].input[1] = 'w1'"
    ),  # made for 3 channels, there are 16: onnx sees nothing wrong
    "empty.npz": b"",
    "text.npz": b"x,y\n1,2\n" * 30,
    "none/notes.txt": b"no image by its name",
    "bad/text.jpg": b"not an image\n" * 50,
    "bad/cut.jpg": photo("JPEG")[:5000],
    "bad/empty.png": b"",
    "text.calib.json": b"not JSON",
    "short.engine": b"ftrt",
    "other.onnx": net().SerializeToString(),
    "out/file": b"mine",
}
ARRAYS = {
    "name": {"image": samples(4)},
    "rank": {"x": samples(4)[0, 0]},
    "alone": {"x": samples(4)[0]},
    "layout": {"x": samples(4).transpose(0, 2, 3, 1)},
    "dtype": {"x": (samples(4) * 255).astype(np.uint8)},
    "none": {"x": samples(4)[:0]},
    "one": {"x": samples(1)},
    "constant": {"x": np.full((40, 3, 32, 32), 0.5, np.float32)},
    "nan": {"x": np.where(np.arange(40)[:, None, None, None] == 17, np.float32(np.nan), samples(40))},
    "objects": {"x": np.array([{"a": 1}], dtype=object)},
}
# What is typed, and words of the error. MODEL is each command that reads a model, INT8 `calibrate` and `build --int8`, which
# must say the same; FP16 is `build --fp16`.
ROWS = """
# Models
MODEL gone.onnx => gone.onnx | doesn't exist
MODEL empty.onnx => empty.onnx | is empty (0 bytes) | export or copy it again
MODEL cut.onnx => cut.onnx (5000 bytes) | truncated | copy
MODEL random.onnx => random.onnx (4096 bytes) | isn't an ONNX model
MODEL page.onnx => isn't an ONNX model | web page
MODEL zip.onnx => PyTorch checkpoint | trtopt export
MODEL photo.onnx => isn't an ONNX model
MODEL cyclic.onnx => cyclic | conv1 | relu2 | →
MODEL dangling.onnx => conv2 | 'nowhere' | no node, input or initializer
MODEL opset.onnx => opset 99 | allowed: 7 to | pip install -U onnx
MODEL short.onnx => 'w2' | 9216 bytes, 9212 are there
MODEL inputs.onnx => isn't valid ONNX | relu2 | 2 not in range
inspect cut.onnx => cut.onnx
profile model.onnx => is an ONNX model | trtopt build model.onnx
# Images, arrays and tables
INT8 --images gone --preprocess imagenet => --images | gone doesn't exist
INT8 --images none --preprocess imagenet => there is no image in | none | .jpg
INT8 --images bad --preprocess imagenet => none of the 3 images can be used | cut.jpg: | the file is empty
INT8 --images model.onnx --preprocess imagenet => isn't a folder
INT8 --images data.npz --preprocess imagenet => give them as --data data.npz
INT8 --images photos => needs --preprocess | imagenet | TOML
INT8 --images photos --preprocess imagenett => 'imagenett' | efficientnet-lite
INT8 --images photos --preprocess imagenet --limit 0 => --limit is 0 | at least 1
INT8 --images photos --size 64by64 => --size '64by64' can't be read; write 480x640, height first
INT8 --images photos --preprocess own.toml --size 64 => 'own.toml' is neither a preset
INT8 --data gone.npz => gone.npz | doesn't exist
INT8 --data none => no .npz or .npy file in
INT8 --data empty.npz => empty.npz can't be read as .npz | written completely?
INT8 --data text.npz => text.npz can't be read as .npz | written completely?
INT8 --data model.onnx => neither .npz nor .npy
INT8 --data data.npz --preprocess imagenet => --preprocess is for --images
INT8 --data name.npz => lacks x | it has image | inputs are x
INT8 --data rank.npz => x has shape 32x32 | takes nx3x32x32
INT8 --data alone.npz => only 1 sample | x is nx3x32x32
INT8 --data layout.npz => x has shape 4x32x32x3 | dimension 1 must be 3
INT8 --data dtype.npz => dtype uint8 | takes float32 | astype
INT8 --data none.npz => no samples | first axis
INT8 --data one.npz => 1 sample | at least 2 | some hundred
INT8 --data constant.npz => all 40 samples are the same one | different real inputs
INT8 --data nan.npz => nan.npz: x holds NaN or infinite values | sample 17
INT8 --data objects.npz => holds Python objects | np.stack
build model.onnx -o out/m.engine --int8 --calib gone.calib.json => the calibration table | doesn't exist
build model.onnx -o out/m.engine --int8 --calib text.calib.json => text.calib.json | trtopt calibrate
# Options
FP16 --shapes image:1x3x32x32 => no input 'image' | x (n, 3, 32, 32) | Write --shapes x:1x3x32x32,
FP16 --shapes x:1x3x32 => x has rank 4 (n, 3, 32, 32) | have rank 3
FP16 --shapes x:1x3x64x64 => fixed size of 32 in dimension 2, given 64 | fixed size of 32 in dimension 3
FP16 --shapes x:-1x3x32x32 => x can't have negative sizes | Write --shapes x:1x3x32x32,
FP16 --optimization-level 9 => --optimization-level is 9 | 0 to 5
FP16 --optimization-level high => --optimization-level | integer
FP16 --max-aux-streams=-1 => --max-aux-streams is -1 | 0 to
FP16 --max-aux-streams 2147483648 => --max-aux-streams is 2147483648 | 0 to 2147483647
FP16 --backend cuda => --backend is 'cuda' | auto, tensorrt, rtx
FP16 --bf16 => --fp16 and --bf16 | choose one
build model.onnx -o out/m.engine --int8 --fp8 => --int8 and --fp8
FP16 --images photos --data d.npz => --images and --data are both given | one of them
FP16 --calib t.json => --calib calibrates, but the build is fp16 | add --int8
build model.onnx -o out/m.engine --int8 => --int8 needs scales | --images DIR | random data is never used
FP16 --bogus => --bogus | trtopt build -h
FP16 --sparsity --bf16 => --sparsity requires an argument, not --bf16: type --sparsity off|keep|prune
build model.onnx --fp16 -o => -o requires an argument, not --json: type -o OUTPUT
calibrate model.onnx -o out/t.json --images a.jpg b.jpg => --images takes one folder, no list | try 'trtopt calibrate -h'
verify model.onnx model.onnx --data a.npz b.npz => --data takes one file or folder
check model.onnx --shapes a:1x3 b:1x4 => --shapes takes the shapes of several inputs in one text, 'a:1x3;b:1x4'
check model.onnx --images a.jpg b.jpg => --images takes one folder, no list such as a shell makes of *
export torchvision:resnet18 -o m.onnx --output-names , => --output-names ',' can't be read; write one, or A,B
bench m.engine --batch 1, => --batch '1,' can't be read; write numbers such as 1,8,32
check model.onnx another.onnx --data data.npz => unexpected extra argument
# Names of outputs that say another kind of file
build model.onnx --fp16 -o other.onnx => an engine is written | give other.engine | --save-onnx keeps its graph
calibrate model.onnx --data data.npz -o other.onnx => give | other.calib.json
export net.py:Net -o out/m.engine => give | m.onnx | trtopt build
# Engines
inspect gone.engine => the engine | doesn't exist
inspect out => is a folder
inspect short.engine => short.engine isn't a TensorRT plan
# Words of other tools
build m.onnx --precision fp16 => --fp16, --bf16, --int8 or --fp8
build -m m.onnx => trtopt build MODEL.onnx
check m.onnx -o c.onnx => writes the cleaned model with --fix FILE
verify a.onnx b.onnx --tolerance 1 => --min-snr DB
calibrate m.onnx --input s.npz => --data F.npz
quantize m.onnx => trtopt build MODEL.onnx --int8
deploy m.engine => No such command 'm.engine'; try 'trtopt deploy -h'
jobs net.toml => No such command 'net.toml'; try 'trtopt jobs -h'
pipeline net.onnx -o out => trtopt init net.onnx -o net.toml writes one
pipeline net.py:Net -o out => trtopt init net.py:Net -o net.toml writes one
nothing => No such command 'nothing'; try
"""
# What is named and isn't there is the user's mistake: exit status 2.
USAGE = (
    "calibrate model.onnx --images absent --size 64 -o out/t.json",
    "calibrate model.onnx --images none --size 64 -o out/t.json",
    "run model.onnx --images absent --scale 1 --backend onnxruntime",
    "run model.onnx --images none --scale 1 --backend onnxruntime",
    "export no_such_module:make -o out/m.onnx",
    "export json:no_such_attribute -o out/m.onnx",
    "inspect absent.onnx",
    f"build model.onnx --shapes z:1x3x8x8 {FOR} -o out/m.engine",
    f"build model.onnx --shapes x:1x3x32x32 --precision-override z=fp32 {FOR} -o out/m.engine",
)


@pytest.fixture
def files(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(world.folder)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    for name, arrays in ARRAYS.items():
        np.savez(f"{name}.npz", **arrays)  # type: ignore[arg-type]
    return world.folder


def commands(line: str) -> list[list[str]]:
    """List the commands that a row stands for; they write into out."""
    word, _, rest = line.partition(" ")
    target = "" if {"--backend", "--target"} & set(line.split()) else FOR
    lines = {
        "MODEL": [
            f"calibrate {rest} --data data.npz -o out/t.json",
            f"build {rest} --fp16 -o out/m.engine",
            f"build {rest} --int8 --data data.npz -o out/m.engine",
            f"verify {rest} model.onnx --data data.npz",
            f"verify model.onnx {rest} --data data.npz",
        ],
        "INT8": [
            f"calibrate model.onnx {rest} -o out/t.json",
            f"build model.onnx --int8 {rest} {FOR} -o out/m.engine",
        ],
        "FP16": [f"build model.onnx --fp16 {rest} {target} -o out/m.engine"],
    }
    return [shlex.split(item) for item in lines.get(word, [line])]


@pytest.mark.usefixtures("files", "rtx")
@pytest.mark.parametrize("row", [row for row in ROWS.splitlines() if " => " in row])
def test_one_error_in_the_same_words_says_what_to_do(world: World, row: str) -> None:
    line, said = row.split(" => ")
    messages = {world.refused(*words) for words in commands(line)}
    assert len(messages) == 1
    has(messages.pop(), *said.split(" | "))
    if line.startswith("MODEL") and "gone" not in line:  # `check` says it as what it found
        found = world.run("check", line.split()[1], "--fix", "out/clean.onnx", "--json")
        report = json.loads(found.out)
        assert (found.status, report["ok"], report["fixed"]) == (1, False, None)
        (finding,) = report["findings"]
        assert (finding["level"], finding["code"]) == ("error", "invalid-model")
        has(finding["message"], *said.split(" | "))
        assert set(world.contents()) == {"file"}


@pytest.mark.usefixtures("files", "rtx")
@pytest.mark.parametrize("line", USAGE)
def test_what_the_command_line_names_and_is_not_there_is_a_usage_error(world: World, line: str) -> None:
    found = world.run(*line.split())
    assert found.status == 2 and found.err.count("error: ") == 1
    assert "warning: " not in found.err  # said once
    world.refused(*line.split())


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
    said = world.refused("run", engine, "--input", world.arrays, "--backend", "onnxruntime")
    has(said, "--backend onnxruntime runs the graph that was kept beside m.engine", "build with --save-onnx")


@pytest.mark.usefixtures("files", "rtx")
def test_nodes_that_the_parser_refuses_are_named_and_the_model_as_the_user_knows_it(world: World) -> None:
    for precision in ("--fp16", "--int8 --data data.npz"):
        message = world.refused("build", "kernel.onnx", *precision.split(), *RTX, "-o", "out/m.engine")
        has(message, "can't take 1 part of kernel.onnx", "conv2 (Conv)", "Kernel weight dimension")
        assert "/model.onnx" not in message
    assert world.run("check", "kernel.onnx", "--backend", "rtx").status == 1


def test_a_model_that_overflows_names_the_tensor(world: World) -> None:
    model = net()
    weight = numpy_helper.to_array(model.graph.initializer[0])
    large = weight * np.float32(3e38 / np.abs(weight).max(initial=1))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(large, "w1"))
    onnx.save(model, world.model)
    has(world.refused("calibrate", world.model, "--data", world.arrays, "-o", "t.calib.json"), "'b'", "infinite")


# Outputs -----------------------------------------------------------------------------------------------------------------

WRITERS = (
    "calibrate model.onnx --data data.npz -o",
    f"build model.onnx --fp16 {FOR} -o",
    f"build model.onnx --fp16 {FOR} -o out/m.engine --save-onnx",
    "check model.onnx --backend rtx --fix",
)


@pytest.mark.usefixtures("files", "rtx")
@pytest.mark.parametrize("writer", WRITERS)
def test_outputs_that_cannot_be_written(world: World, writer: str) -> None:
    for folder in ("folder", "b.engine.json"):
        Path("out", folder).mkdir()
    has(world.refused(*writer.split(), "out/folder"), "can't write out/folder", "it is a folder, give a file name")
    has(world.refused(*writer.split(), "out/gone/m"), "can't write", "gone doesn't exist, create it with mkdir -p")
    if writer.startswith("build"):
        has(world.refused("build", "model.onnx", "--fp16", "-o", "out/b.engine"), "can't write out/b.engine.json")


@pytest.mark.usefixtures("files", "rtx")
@pytest.mark.parametrize(("writer", "which"), [*zip(WRITERS, ("t.calib.json", "m.engine", "m.onnx", "clean.onnx")),
                                               (WRITERS[1], "m.engine.json")])  # fmt: skip
def test_a_full_disk_leaves_what_was_there(
    world: World, writer: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the file is written, then the disk is full."""
    write, failed = Path.write_bytes, []

    def full(path: Path, content: bytes | memoryview) -> int:
        if path.parent.parent != world.output or path.parent.name.rsplit(".", 2)[0] != f".{which}":
            return write(path, content)
        write(path, memoryview(content)[: len(content) // 2])
        failed.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    command = [*writer.split(), world.output / which.replace(".engine.json", ".engine")]
    for turn in range(2):
        model = net()
        model.opset_import[0].version = 17 + turn
        onnx.save(model, world.model)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            message = world.refused(*command)
        has(message, f"can't write {world.output / which}", "No space left on device", "nothing was left")
        assert len(failed) > turn
        assert world.run(*command).status == 0  # the second time there are files of an earlier call


# What isn't installed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "line", "said"),
    [
        ("tensorrt tensorrt_rtx", "build model.onnx --fp16", ("no TensorRT", *map(to_install, ("rtx", "trt8")))),
        ("tensorrt_rtx", "build model.onnx --fp16 --backend rtx", ("tensorrt_rtx isn't installed", to_install("rtx"))),
        ("tensorrt", "build model.onnx --fp16 --backend tensorrt", ("tensorrt isn't installed", to_install("trt11"))),
        ("onnxruntime", "calibrate model.onnx --data data.npz", ("calibration needs onnxruntime", "install 'onnxruntime")),
        ("cv2", "calibrate model.onnx --images photos --preprocess imagenet", ("images needs cv2", "'opencv-python-he")),
        ("torch", "export torchvision:resnet18", ("needs torch", "pip install 'torch")),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("files")
def test_without_a_package(
    world: World, monkeypatch: pytest.MonkeyPatch, modules: str, line: str, said: tuple[str, ...]
) -> None:
    for module in modules.split():
        monkeypatch.setitem(sys.modules, module, None)
    output = [] if line.startswith("inspect") else ["-o", "out/made"]
    has(world.refused(*line.split(), *output), *said)
    found = world.run("check", "model.onnx", "--json")  # which works without, and says that no parser was asked
    assert found.status == 0 and ("tensorrt-rtx" in found.out or " " not in modules)
