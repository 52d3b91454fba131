"""What a new user types first, as it is first typed: own modules, several inputs, own preprocessing, segmentation.

The walkthrough of an installed trtopt is in test_readme.py.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from world import RTX, World

from trtopt.data.samples import write_crops

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "your-own-model.md").read_text(encoding="utf-8")
MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3)

    def forward(self, x):
        return self.conv(x).relu()

def make():
    return Net()
"""


def ran(world: World, *arguments: object) -> str:
    found = world.run(*arguments)
    assert found.status == 0, found.err
    return found.out


def saved(path: Path, inputs: dict[str, tuple[int, list[int | str]]], nodes: list[onnx.NodeProto], rank: int) -> Path:
    """An ONNX file; nodes read the weights `w` (16 × 3 × 3 × 3) and `m` (32 × 32), and give y."""
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((16, 3, 3, 3)) / 5, "m": random.standard_normal((32, 32)) / 5}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
        [
            numpy_helper.from_array(value.astype(np.float32), name)
            for name, value in weights.items()
            if any(name in node.input for node in nodes)
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("source", ["my_model:make", "my_model.py:Net"])
def test_an_own_module_in_the_current_folder(world: World, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(world.output)
    Path("my_model.py").write_text(MODULE)
    ran(world, "export", source, "--inputs", "x:batchx3x32x32", "-o", "one.onnx")
    assert [item.name for item in onnx.load("one.onnx").graph.input] == ["x"]
    assert "my_model" not in sys.modules


@pytest.mark.usefixtures("rtx")
def test_shapes_of_several_inputs_are_one_profile(world: World) -> None:
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("MatMul", ["sum", "m"], ["y"]),
    ]
    wanted = (TensorProto.FLOAT, ["batch", "length", 32])
    model, engine = saved(world.output / "two.onnx", {"a": wanted, "b": wanted}, nodes, 3), world.output / "two.engine"
    sizes = "1x8x32,8x16x32,16x64x32"
    ran(world, "build", model, "--fp16", "--shapes", f"a:{sizes}", "--shapes", f"b:{sizes}", *RTX, "-o", engine)
    (profile,) = json.loads(Path(f"{engine}.json").read_bytes())["profiles"]
    assert profile == {"a": sizes, "b": sizes}


@pytest.mark.usefixtures("rtx")
@pytest.mark.parametrize("in_a_file", [False, True], ids=["options", "file"])
def test_a_detector_with_a_normalization_of_its_own(world: World, in_a_file: bool) -> None:
    """Its size is open: images take that of the shape it is tuned for."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    model = saved(world.output / "det.onnx", {"x": (TensorProto.FLOAT, ["n", 3, "h", "w_"])}, nodes, 4)
    how = ["--scale", "1/255", "--mean", "0.5", "--std", "0.25"]
    if in_a_file:
        file = world.output / "own.toml"
        file.write_text("scale = 0.00392156862745098\nmean = 0.5\nstd = 0.25\n")
        how = ["--preprocess", str(file)]
    engine = world.output / "det.engine"
    shapes = ["--shapes", "x:1x3x32x32,1x3x64x64,4x3x96x96"]
    ran(world, "build", model, "--int8", "--images", world.photos, *how, *shapes, *RTX, "-o", engine)
    kept = json.loads(Path(f"{engine}.json").read_bytes())["preprocess"]
    assert kept["size"] == [64, 64]
    assert (kept["mean"], kept["std"]) == ([0.5], [0.25])


def test_a_segmentation_model_of_torchvision_without_a_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def download(*_: object, **__: object) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    model = world.output / "segment.onnx"
    ran(world, "export", "torchvision:lraspp_mobilenet_v3_large", "--inputs", "input:batchx3x128x128", "-o", model)
    assert onnx.load(model).graph.output


@pytest.mark.usefixtures("rtx")
def test_the_page_on_your_own_model(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks in order: a block that begins with a file's name is that file, the others are run."""
    monkeypatch.chdir(world.output)
    Path("quickstart-out").mkdir()
    write_crops("imagenet-crops", "quickstart-out/calibration")
    commands, said = 0, ""
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S):
        name = re.match(r"# (\w+\.\w+)\n", block)
        if name:
            Path(name[1]).write_text(block)
        elif language == "python":
            done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines() == re.findall(r"print\(.*?\)\s+# (.*)", block)
        elif "\ntrtopt " not in f"\n{block}":
            subprocess.run(["bash", "-ec", f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n{block}'], check=True)
        else:
            for line in block.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line)
                if program == "python":
                    subprocess.run([sys.executable, *arguments], check=True)
                else:
                    assert program == "trtopt"
                    said += ran(world, *arguments)
                    commands += 1
    assert commands == 14
    assert "2 of 2 convolutions INT8; 1 of 1 matrix products INT8" in said
    assert "vector (embedding): cosine 0.99" in said and "outside the limit" not in said
    assert len(np.load("sentences.npz")["ids"]) == 256
