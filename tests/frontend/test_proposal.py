"""`init`: recipes for models that nobody described; each loads, and says what of it was guessed."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper
from world import RTX, World

import trtopt
from trtopt.core.errors import DataError, MissingDependency, ModelError, OutputError, UsageError
from trtopt.frontend.exporter import export
from trtopt.frontend.proposal import init
from trtopt.recipes.loader import Recipe, load_recipe, package_file

OWN = textwrap.dedent("""
    import torch
    from torch import nn

    class Sentences(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.letters, self.out = nn.Embedding(64, width), nn.Linear(width, 5)
        def forward(self, ids, mask):
            return self.out((self.letters(ids) * mask.unsqueeze(2)).sum(1))

    class Digits(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 5), nn.Linear(4 * 144, 10)
        def forward(self, x):
            return self.out(torch.max_pool2d(self.conv(x), 2).view(-1, 576))  # wrong sizes give another number of samples

    class PhotoAndTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.table, self.out = nn.Conv2d(3, 8, 3), nn.Linear(7, 8), nn.Linear(16, 2)
        def forward(self, photo, table):
            return self.out(torch.cat([self.conv(photo).mean((2, 3)), self.table(table)], 1))

    class Sound(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(13, 8, batch_first=True), nn.Linear(8, 3)
        def forward(self, features):
            return self.out(self.rnn(features)[0])

    class Masked(Sentences):
        def forward(self, input_ids, attention_mask=None, position=None):
            return super().forward(input_ids, attention_mask)

    class Shifted(Digits):
        def forward(self, x, shift=None):
            return super().forward(x.float() + shift.view(-1, 1, 1, 1))

    class Step(Sentences):
        # One token of a text, with what came before.
        def __init__(self):
            super().__init__()
            self.keys, self.places = nn.Linear(16, 16), nn.Embedding(8, 16)
        def forward(self, token, place, past, rest):
            key = self.keys(self.letters(token) + self.places(place)).view(-1, 1, 1, 16)
            past = torch.where((torch.arange(8) == place).view(-1, 1, 8, 1), key, past)
            return self.out(past.sum((1, 2)) + rest), past

    class Leaving(Digits):
        def forward(self, x):
            raise SystemExit("bye")

    class Puzzle(nn.Module):
        def forward(self, box):
            return box["image"]

    class Vibration(nn.Module):  # whose kernel is longer than a sequence of words may be
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv1d(2, 4, 16, 4), nn.Linear(4, 3)
        def forward(self, wave):
            return self.out(self.conv(wave).mean(2))
""")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shapes(recipe: Recipe) -> dict[str, Any]:
    return {info.name: (info.dtype, info.shape, str(recipe.ranges[info.name])) for info in recipe.inputs}


def test_images_for_what_takes_none_are_refused(here: Path) -> None:
    (here / "photos").mkdir()
    (here / "photos" / "a.jpg").touch()
    with pytest.raises(UsageError, match=r"`images=` is given, and features \(.*float32\) aren't images: .*`data="):
        init("own.py:Sound", "sound.toml", images="photos")
    assert not (here / "sound.toml").exists()


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        (
            "Sentences",
            {
                "ids": ("int64", ("batch", "sequence"), "1x8,8x64,32x256"),
                "mask": ("int64", ("batch", "sequence"), "1x8,8x64,32x256"),
            },
        ),
        (
            "Masked",
            {
                "input_ids": ("int64", ("batch", "sequence"), "1x8,8x64,32x256"),
                "attention_mask": ("int64", ("batch", "sequence"), "1x8,8x64,32x256"),
            },
        ),
        ("Digits", {"x": ("float32", ("batch", 1, 28, 28), "1x1x28x28,8x1x28x28,32x1x28x28")}),
        (
            "PhotoAndTable",
            {
                "photo": ("float32", ("batch", 3, 224, 224), "1x3x224x224,8x3x224x224,32x3x224x224"),
                "table": ("float32", ("batch", 7), "1x7,8x7,32x7"),
            },
        ),
        ("Sound", {"features": ("float32", ("batch", "sequence", 13), "1x8x13,8x64x13,32x256x13")}),
    ],
)
def test_inputs_of_a_module_are_found_by_calling_it(here: Path, name: str, inputs: dict[str, Any]) -> None:
    made = init(f"own.py:{name}")
    assert made.recipe == Path(f"{name.lower()}.toml")
    recipe = load_recipe(made.recipe)
    assert shapes(recipe) == inputs
    assert recipe.source == f"own.py:{name}"
    assert "# Found by calling the module" in made.text
    assert (recipe.precision, recipe.min_agreement) == ("int8", 0.95)
    assert (recipe.preprocess is not None) == (name == "Digits")


def test_what_is_given_is_taken(here: Path) -> None:
    np.savez(here / "s.npz", ids=np.ones((4, 8), np.int64), mask=np.ones((4, 8), np.int64))
    made = init(
        "own:Sentences", "new.toml", factory_arg={"width": 4}, data="s.npz",
        inputs=["ids:batch,8:int64", "mask:batch,8:int64"],
    )  # fmt: skip
    recipe = load_recipe(made.recipe)
    assert [info.shape for info in recipe.inputs] == [("batch", 8), ("batch", 8)]
    assert recipe.source == "own.py:Sentences", "the file, so that pipeline sees a change"
    assert recipe.options == {"width": 4} and recipe.data == Path("s.npz")
    assert made.commands == ("trtopt pipeline new.toml -o new-out",)


@pytest.mark.parametrize(
    ("name", "arrays", "inputs"),
    [
        (
            "PhotoAndTable",
            {"photo": np.ones((4, 3, 40, 72), np.float64), "table": np.ones((4, 7), np.float32)},
            {
                "photo": ("float32", ("batch", 3, 40, 72), "1x3x40x72,8x3x40x72,32x3x40x72"),
                "table": ("float32", ("batch", 7), "1x7,8x7,32x7"),
            },
        ),
        (
            "Shifted",
            {"x": np.ones((4, 1, 28, 28), np.uint8), "shift": np.ones((4,), np.float32)},
            {
                "x": ("uint8", ("batch", 1, 28, 28), "1x1x28x28,8x1x28x28,32x1x28x28"),
                "shift": ("float32", ("batch",), "1,8,32"),
            },
        ),
        (
            "Step",
            {
                "token": np.ones((4, 1), np.int64),
                "place": np.ones((4, 1), np.int64),
                "past": np.ones((4, 2, 8, 16), np.float32),
                "rest": np.ones((4, 16), np.float32),
            },
            {
                "token": ("int64", ("batch", 1), "1x1,8x1,32x1"),
                "place": ("int64", ("batch", 1), "1x1,8x1,32x1"),
                "past": ("float32", ("batch", 2, 8, 16), "1x2x8x16,8x2x8x16,32x2x8x16"),
                "rest": ("float32", ("batch", 16), "1x16,8x16,32x16"),
            },
        ),
        (
            "Sentences",
            {"ids": np.ones((4, 9), np.int32), "mask": np.ones((4, 9), np.int64)},
            {
                "ids": ("int64", ("batch", "sequence"), "1x8,8x9,32x9"),
                "mask": ("int64", ("batch", "sequence"), "1x8,8x9,32x9"),
            },
        ),
        (  # other lengths will do, too; no engine takes more than the samples show
            "Sentences",
            {"mask": np.ones((4, 40), np.int64), "ids": np.ones((4, 40), np.int64)},
            {
                "ids": ("int64", ("batch", "sequence"), "1x8,8x40,32x40"),
                "mask": ("int64", ("batch", "sequence"), "1x8,8x40,32x40"),
            },
        ),
        (
            "Vibration",
            {"wave": np.ones((4, 2, 900), np.float32)},
            {"wave": ("float32", ("batch", 2, "length"), "1x2x128,1x2x900,8x2x900")},
        ),
        ("Waves", {"wave": np.ones((4, 1, 800))}, {"wave": ("float32", ("batch", 1, 800), "1x1x800,8x1x800,32x1x800")}),
        (
            "Shop",
            {"user": np.ones(4, np.int64), "items": np.ones((4, 20), np.int64)},
            {"user": ("int64", ("batch",), "1,8,32"), "items": ("int64", ("batch", 20), "1x20,8x20,32x20")},
        ),
    ],
)
def test_inputs_are_as_the_samples(here: Path, name: str, arrays: dict[str, Any], inputs: dict[str, Any]) -> None:
    """A size that no list of usual ones has, types, and an optional argument."""
    (here / "own.py").write_text(
        OWN
        + textwrap.dedent("""
            class Waves(nn.Module):  # whose kernel is longer than the lengths that are tried
                def __init__(self):
                    super().__init__()
                    self.conv, self.out = nn.Conv1d(1, 4, 400, 100), nn.Linear(4, 3)
                def forward(self, wave):
                    return self.out(self.conv(wave).mean(2))

            class Shop(nn.Module):  # whose layers don't tell its inputs
                def __init__(self):
                    super().__init__()
                    self.users, self.all = nn.Embedding(8, 4), nn.Embedding(8, 4)
                def forward(self, user, items):
                    return (self.users(user).unsqueeze(1).expand(-1, 20, -1) * self.all(items)).sum(2)
        """)
    )
    np.savez("s.npz", **arrays)
    assert shapes(load_recipe(init(f"own.py:{name}", data="s.npz").recipe)) == inputs


@pytest.mark.parametrize("data", [None, "s.npz"])
def test_a_signal_is_exported_at_a_length_of_its_range(here: Path, data: str | None) -> None:
    np.savez("s.npz", wave=np.ones((4, 2, 900), np.float32))
    made = init("own.py:Vibration", data=data)
    assert shapes(load_recipe(made.recipe))["wave"][2] == (
        "1x2x128,1x2x900,8x2x900" if data else "1x2x128,1x2x128,8x2x512"
    )
    assert export(str(made.recipe), "m.onnx").verified


def test_samples_that_calibrate_would_refuse_are_refused(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "text").mkdir()
    (here / "text" / "a.jpg").write_text("no image")
    np.savez("other.npz", y=np.ones((4, 1, 28, 28), np.float32))
    np.savez("small.npz", x=np.ones((4, 1, 20, 28), np.float32))
    (here / "torn.npz").write_bytes((here / "small.npz").read_bytes()[:100])
    np.savez("nan.npz", x=np.full((4, 1, 28, 28), np.nan, np.float32))
    for options, error, words in (
        ({"images": "none"}, UsageError, "`images='none'` doesn't exist"),
        ({"images": "own.py"}, UsageError, "isn't a folder"),
        ({"images": "empty"}, UsageError, "there is no image in empty"),
        ({"images": "text"}, DataError, "none of the 1 images can be used"),
        ({"data": "none.npz"}, UsageError, "none.npz doesn't exist"),
        ({"data": "own.py"}, UsageError, "neither .npz nor .npy"),
        ({"data": "empty"}, DataError, "there is no .npz or .npy file in empty"),
        ({"data": "other.npz"}, UsageError, "lacks x; it has y"),
        ({"data": "small.npz"}, UsageError, "dimension 2 must be 28"),
        ({"data": "torn.npz"}, DataError, "can't be read as .npz"),
        ({"data": "nan.npz"}, DataError, "NaN or infinite values"),
    ):
        with pytest.raises(error, match=words):
            init("own.py:Digits", **options)
    assert not list(here.glob("*.toml"))


def test_arrays_of_a_model_with_a_scalar_or_steps_first_are_taken(here: Path) -> None:
    graph = "g (float[batch,4] x, float scale) => (float[batch,4] y) { y = Mul(x, scale) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {graph}'), "scaled.onnx")
    np.savez("s.npz", x=np.ones((3, 4), np.float32), scale=np.ones(1, np.float32))
    assert load_recipe(init("scaled.onnx", data="s.npz").recipe).data == Path("s.npz")
    (here / "steps.py").write_text(
        "import torch\nclass Steps(torch.nn.Module):\n    def forward(self, x, h): return x + h[0]\n"
    )
    np.savez("t.npz", x=np.ones((5, 3, 8), np.float32), h=np.ones((2, 3, 8), np.float32))
    made = init("steps.py:Steps", inputs={"x": ("steps", "batch", 8), "h": (2, "batch", 8)}, data="t.npz")
    assert load_recipe(made.recipe).data == Path("t.npz")


def test_nothing_is_overwritten_unasked(here: Path) -> None:
    first = init("own.py:Digits", "d.toml")
    with pytest.raises(UsageError, match=r"d\.toml exists already.*`force=True`"):
        init("own.py:Sound", "d.toml")
    assert (here / "d.toml").read_text() == first.text
    assert init("own.py:Sound", "d.toml", force=True).text == (here / "d.toml").read_text() != first.text


def test_what_cannot_be_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match=r"don't tell its inputs; forward takes: box.*`inputs='box:"):
        init("own.py:Puzzle")
    with pytest.raises(UsageError, match="forward takes: x"):
        init("own.py:Leaving")
    with pytest.raises(UsageError, match="the dtype is 'object'"):
        init("own.py:Digits", inputs=["x:batchx1x28x28:object"])
    for source, words in (("resnet50", "is a recipe already"), ("resnet18", "torchvision:NAME"), ("own.py", "own.py:")):
        with pytest.raises(UsageError, match=words):
            init(source)
    with pytest.raises(UsageError, match="ends in"):
        init("own.py:Digits", "d.yaml")
    with pytest.raises(UsageError, match=r"absent\.onnx"):
        init("absent.onnx")
    for options, words in (
        (
            {"inputs": {"x": ("batch", 3, 8, 8)}},
            r"`inputs=` is for PyTorch models.*trtopt check .* --set NAME:SHAPE --fix",
        ),
        ({"factory_arg": {"depth": 3}}, r"`factory_arg=` is for the factory of a PyTorch model"),
    ):
        with pytest.raises(UsageError, match=words):
            init("absent.onnx", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`images=` and `data=` both say"):
        init("own.py:Digits", images="none", data="none.npz")
    with pytest.raises(UsageError, match="`images='none'` doesn't exist"):
        init("own.py:Digits", images="none")
    with pytest.raises(OutputError):
        init("own.py:Digits", "no-folder/d.toml")
    assert sorted(path.name for path in here.glob("*.toml")) == []


@pytest.mark.parametrize("kind", ["seq(float[n,4]) x", "optional(float[n,4]) x", "string[n,4] x"])
def test_an_input_that_is_no_tensor_of_numbers_is_refused(here: Path, kind: str) -> None:
    name = kind.split("(")[0].split("[")[0].replace("seq", "sequence")
    text = f'<ir_version: 9, opset_import: ["" : 18]> g ({kind}) => ({kind.replace(" x", " y")}) {{ y = Identity(x) }}'
    onnx.save(onnx.parser.parse_model(text), here / "m.onnx")
    with pytest.raises(ModelError, match=f"the input x is of type {name}, which TensorRT hasn't; convert it outside"):
        init("m.onnx")
    with pytest.raises(UsageError, match=f"the input x is of type {name}, which samples can't be given for"):
        trtopt.calibrate("m.onnx", data={"x": np.ones((2, 4), np.float32)})
    assert not (here / "m.toml").exists()


def test_a_torchvision_model_brings_its_own_preparation(here: Path) -> None:
    made = init("torchvision:resnet18")
    recipe = load_recipe(made.recipe)
    assert (recipe.source, recipe.preprocess) == ("torchvision:resnet18", "imagenet")
    assert "# resnet18 has random weights" in made.text
    assert made.commands[0] == "trtopt pipeline resnet18.toml -o resnet18-out --images DIR"


def test_a_model_of_a_package_is_named_by_the_package(here: Path) -> None:
    try:
        path = package_file("package:rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx")
    except MissingDependency as error:
        pytest.skip(str(error))
    made = init(str(path), "det.toml")
    recipe = load_recipe("det.toml")
    assert recipe.source == "package:rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx" and recipe.onnx == path
    assert shapes(recipe)["x"][1:] == (("batch", 3, "height", "width"), "1x3x320x320,1x3x640x640,8x3x960x960")
    assert recipe.preprocess == {"preset": "imagenet", "size": [320, 320], "resize": "letterbox"}
    assert "BatchNormalization" in made.text and "seem to be sigmoid_0.tmp_0: mask" in made.text


def _normalizing(path: Path, mean: float, std: float) -> Path:
    """A network whose first layer, a BatchNormalization, knows what its training's pixels were like."""
    values = {"s": np.ones(3), "b": np.zeros(3), "m": np.full(3, mean), "v": np.full(3, std**2)}
    graph = helper.make_graph(
        [
            helper.make_node("BatchNormalization", ["image", *values], ["n"], "norm"),
            helper.make_node("GlobalAveragePool", ["n"], ["p"]),
            helper.make_node("Flatten", ["p"], ["y"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("image", TensorProto.FLOAT, ["unk__1", 3, 64, 64]),
            helper.make_tensor_value_info("rate", TensorProto.INT64, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 3])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(
    ("mean", "std", "prepared"),
    [
        (0.05, 1.1, "imagenet"),
        (0.45, 0.25, {"scale": "1/255"}),
        (-0.1, 0.5, {"scale": "1/255", "mean": 0.5, "std": 0.5}),
        (115.0, 64.0, {}),
    ],
)
def test_preprocessing_is_what_brings_photos_nearest_to_training(
    here: Path, mean: float, std: float, prepared: Any
) -> None:
    made = init(str(_normalizing(here / "m.onnx", mean, std)))
    recipe = load_recipe("m.toml")
    assert recipe.preprocess == prepared and recipe.source == "m.onnx"
    assert "# A guess: with" in made.text and "Nothing tells RGB from BGR" in " ".join(made.guesses)
    assert "Scalars have no range and stand nowhere here: rate" in " ".join(made.guesses)


def test_the_command_and_the_pipeline_on_what_it_wrote(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX isn't installed: pip install 'trtopt[rtx]'")
    folder = world.model.parent
    monkeypatch.chdir(folder)
    said = world.run("init", world.model, "-o", "it's mine.toml")
    assert said.status == 0
    lines = said.out.splitlines()
    assert lines[-2].startswith("next: trtopt pipeline ") and lines[-1].startswith("or: ")
    again = world.run("init", world.model, "-o", "it's mine.toml", "--force", "--json")
    assert json.loads(again.out)["recipe"] == "it's mine.toml"
    run = world.run("pipeline", "it's mine.toml", "-o", folder / "out", "--precision", "fp16", *RTX)
    assert run.status == 0 and "2 of 2 convolutions FP16" in run.out
