"""`init`: recipes with what a model says of itself, and "?" for what it doesn't."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import written
from world import RTX, World

import trtopt
from trtopt.core.errors import DataError, ModelError, OutputError, UsageError
from trtopt.frontend.proposal import init
from trtopt.recipes.loader import Recipe, load_recipe

OWN = textwrap.dedent("""
    import torch
    from torch import nn

    class Digits(nn.Module):
        def __init__(self, width=4):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, width, 5), nn.Linear(width * 144, 10)
        def forward(self, x):
            return self.out(torch.max_pool2d(self.conv(x), 2).flatten(1))

    class Sentences(nn.Module):
        def __init__(self):
            super().__init__()
            self.letters, self.out = nn.Embedding(64, 16), nn.Linear(16, 5)
        def forward(self, ids, mask=None, position=None):
            return self.out((self.letters(ids) * mask.unsqueeze(2)).sum(1))
""")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shapes(recipe: Recipe) -> dict[str, Any]:
    return {info.name: (info.dtype, info.shape, str(recipe.ranges.get(info.name, ""))) for info in recipe.inputs}


def model(text: str, path: str) -> str:
    onnx.save(written(text, 18), path)
    return path


def test_inputs_are_as_the_samples(here: Path) -> None:
    """An optional argument that they hold, and types that modules don't take."""
    np.savez("s.npz", mask=np.ones((4, 9), np.float64), ids=np.ones((4, 9), np.int32))
    made = init("own:Sentences", data="s.npz")
    recipe = load_recipe(made.recipe)
    assert shapes(recipe) == {
        "ids": ("int64", ("batch", 9), ""),
        "mask": ("float32", ("batch", 9), ""),
    }
    assert recipe.source == "own.py:Sentences", "the file, so that pipeline sees a change"
    assert (recipe.precision, recipe.min_agreement, recipe.data) == ("int8", 0.95, Path("s.npz"))
    assert made.unknown == () and made.commands == ("trtopt pipeline sentences.toml -o sentences-out",)


def test_what_is_given_is_taken_and_the_rest_is_asked_for(here: Path) -> None:
    made = init("own.py:Digits", "new.toml", factory_arg={"width": 8}, inputs=["x:batchx1x28x28"])
    assert made.unknown == ("preprocess",) and "# As in training" in made.text
    with pytest.raises(UsageError, match=r'new\.toml has "\?" for preprocess: write there'):
        load_recipe("new.toml")
    Path("new.toml").write_text(made.text.replace('preprocess = "?"', 'preprocess = { scale = "1/255" }'))
    recipe = load_recipe("new.toml")
    assert shapes(recipe) == {"x": ("float32", ("batch", 1, 28, 28), "")}
    assert recipe.options == {"width": 8} and recipe.preprocess == {"scale": "1/255"}
    assert made.commands == ("trtopt pipeline new.toml -o new-out --images DIR",)


def test_a_module_that_nothing_is_said_of(here: Path) -> None:
    made = init("own.py:Sentences")
    assert made.unknown == ("inputs.ids.shape", "inputs.ids.dtype")
    with pytest.raises(UsageError, match=r"inputs\.ids\.shape, inputs\.ids\.dtype"):
        load_recipe(made.recipe)


def test_sizes_of_an_onnx_file(here: Path) -> None:
    fixed = init(model("(float[N,3] x, float scale) => (float[N,3] y) { y = Mul(x, scale) }", "fixed.onnx"))
    assert shapes(load_recipe(fixed.recipe)) == {"x": ("float32", ("N", 3), "")}
    made = init(model("(float[N,T] x, uint8[1,3,H,8] p) => (float[N,T] y) { y = Identity(x) }", "open.onnx"))
    assert made.unknown == ("inputs.x.range", "inputs.p.range")
    image = init(model("(float[N,3,8,8] x) => (float[N,3,8,8] y) { y = Identity(x) }", "image.onnx"))
    assert image.unknown == ("preprocess",)
    np.savez("s.npz", x=np.ones((4, 3, 8, 8), np.float32))
    assert init("image.onnx", force=True, data="s.npz").unknown == ()
    assert init(model("(uint8[N,3,8,8] x) => (uint8[N,3,8,8] y) { y = Identity(x) }", "u8.onnx")).unknown == ()


def test_a_torchvision_model_brings_its_own_preparation(here: Path) -> None:
    made = init("torchvision:resnet18")
    recipe = load_recipe(made.recipe)
    assert (recipe.source, recipe.preprocess) == ("torchvision:resnet18", "imagenet")
    assert any("random weights" in note for note in made.notes)
    assert made.commands == ("trtopt pipeline resnet18.toml -o resnet18-out --images DIR",)


def test_nothing_is_overwritten_unasked(here: Path) -> None:
    first = init("own.py:Digits", "d.toml")
    with pytest.raises(UsageError, match=r"d\.toml exists already.*`force=True`"):
        init("own.py:Sentences", "d.toml")
    assert (here / "d.toml").read_text() == first.text
    assert init("own.py:Sentences", "d.toml", force=True).text == (here / "d.toml").read_text() != first.text


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("resnet50", {}, "is a recipe already"),
        ("resnet18", {}, "torchvision:NAME"),
        ("own.py", {}, "own.py:"),
        ("own.py:Digits", {"output": "d.yaml"}, "ends in"),
        ("own.py:Digits", {"inputs": ["x:batchx1x28x28:object"]}, "the dtype is 'object'"),
        ("own.py:Digits", {"images": "none", "data": "none.npz"}, "`images=` and `data=` both say"),
        ("own.py:Digits", {"images": "none"}, "`images='none'` doesn't exist"),
        ("own.py:Digits", {"data": "none.npz"}, "none.npz'` doesn't exist"),
        ("absent.onnx", {}, r"absent\.onnx"),
        ("absent.onnx", {"inputs": {"x": ("batch", 3)}}, "`inputs=` is for PyTorch models.*--set NAME:SHAPE"),
        ("absent.onnx", {"factory_arg": {"depth": 3}}, "`factory_arg=` is for PyTorch models"),
    ],
)
def test_what_cannot_be_is_refused(here: Path, source: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        init(source, **options)
    assert not list(here.glob("*.toml"))


def test_files_that_cannot_be_read_or_written(here: Path) -> None:
    (here / "torn.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"can't be read as \.npz"):
        init("own.py:Digits", data="torn.npz")
    with pytest.raises(OutputError):
        init("own.py:Digits", "no-folder/d.toml")
    assert not list(here.glob("*.toml"))


@pytest.mark.parametrize("kind", ["seq(float[n,4]) x", "optional(float[n,4]) x", "string[n,4] x"])
def test_an_input_that_is_no_tensor_of_numbers_is_refused(here: Path, kind: str) -> None:
    name = kind.split("(")[0].split("[")[0].replace("seq", "sequence")
    model(f"({kind}) => ({kind.replace(' x', ' y')}) {{ y = Identity(x) }}", "m.onnx")
    with pytest.raises(ModelError, match=f"the input x is of type {name}, which TensorRT hasn't; convert it outside"):
        init("m.onnx")
    with pytest.raises(UsageError, match=f"the input x is of type {name}, which samples can't be given for"):
        trtopt.calibrate("m.onnx", data={"x": np.ones((2, 4), np.float32)})
    assert not (here / "m.toml").exists()


def test_the_command_and_the_pipeline_on_what_it_wrote(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    folder = world.model.parent
    monkeypatch.chdir(folder)
    said = world.run("init", world.model, "-o", "it's mine.toml")
    assert said.status == 0 and 'fill in the "?" of preprocess' in said.out
    assert said.out.splitlines()[-1].startswith("next: trtopt pipeline ")
    again = world.run("init", world.model, "-o", "it's mine.toml", "--force", "--json")
    assert json.loads(again.out)["recipe"] == "it's mine.toml"
    recipe = Path("it's mine.toml")
    recipe.write_text(recipe.read_text().replace('"?"', "{}"))
    run = world.run("pipeline", recipe, "-o", folder / "out", "--precision", "fp16", *RTX)
    assert run.status == 0 and "2 of 2 convolutions FP16" in run.out
