"""Content of the wheel; `test_pages.py` has it work outside the checkout."""

from __future__ import annotations

import subprocess
import sys
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest
from wheel_environment import ROOT, copied, environment, install_editable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCES = {".c", ".h", ".so", ".pyc"}  # of compiled parts: the wheel has what is made of them


@pytest.fixture(scope="module")
def wheel(installed: Path) -> ZipFile:
    (path,) = installed.parent.glob("dist/trtopt-*.whl")
    return ZipFile(path)


def test_the_wheel_has_every_file_of_the_package(wheel: ZipFile) -> None:
    ours = {
        folder + path.relative_to(ROOT).as_posix()
        for folder, top in (("", "trtopt"), ("trtopt/recipes/", "models"), ("trtopt/recipes/", "calibration"))
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in SOURCES
    }
    recipes = "trtopt/recipes"
    some = {"trtopt/py.typed", f"{recipes}/models/resnet50.toml", f"{recipes}/calibration/imagenet-crops.toml"}
    assert some <= ours
    there = {name for name in wheel.namelist() if name.startswith("trtopt/") and Path(name).suffix not in SOURCES}
    assert there == ours


def test_the_wheel_has_the_license_and_says_which(wheel: ZipFile) -> None:
    (folder,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    told = message_from_string(wheel.read(f"{folder}/METADATA").decode())
    assert f'version = "{told["Version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert told["License-Expression"] == "Apache-2.0" and told.get_all("License-File") == ["LICENSE"]
    text = wheel.read(f"{folder}/licenses/LICENSE").decode()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    pythons = {item.rpartition(" ")[2] for item in told.get_all("Classifier", []) if "Python :: 3." in item}
    assert pythons == {"3.10", "3.11", "3.12", "3.13"}


LISTED = """
from trtopt.data.samples import FOLDER
from trtopt.recipes.loader import known_recipes, load_recipe
print(*known_recipes(), load_recipe("minilm").data.is_file(), *sorted(path.stem for path in FOLDER.glob("*.toml")))
"""


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_recipes_and_sample_sets_are_found(how: str, installed: Path, tmp_path: Path) -> None:
    venv = installed if how == "wheel" else tmp_path / "venv"
    if how == "editable":
        install_editable(copied(tmp_path), venv)
    command, variables = [venv / "bin" / "python", "-c", LISTED], environment(venv, tmp_path)
    done = subprocess.run(command, cwd=venv, env=variables, capture_output=True, text=True, check=True)
    models, sets = (sorted(path.stem for path in (ROOT / name).glob("*.toml")) for name in ("models", "calibration"))
    assert done.stdout.split() == [*models, "True", *sets]


def test_setuptools_is_told_of_every_folder() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "trtopt").rglob("*.py")}
    assert set(told["packages"]) == {".".join(folder.parts) for folder in folders} | set(told["package-dir"])


PROGRAM = """
import trtopt

def quantized(path: str) -> list[str]:
    table = trtopt.Table.load(path)
    entry: trtopt.TableEntry = table.tensors["x"]
    try:
        result: trtopt.BuildResult = trtopt.build("model.onnx", "model.engine", int8=True, calib=table)
    except (trtopt.PrecisionLost, trtopt.UnsupportedOperator) as error:
        return error.lines
    reveal_type(entry.amax)
    trtopt.build("model.onnx", "model.engine", shapes={"x": ((1, 3), (8, 3), (8, 3)), "y": "1x3,8x3,8x3", "z": (1, 3)})
    return [f"{item.node}: {item.precision}" for item in result.kept]
"""


def test_type_checkers_see_the_types_of_the_installed_package(installed: Path, tmp_path: Path) -> None:
    def checked(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "program.py"]  # strict
        command += ["--cache-dir", tmp_path / "types", "--python-executable", installed / "bin" / "python"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment(installed, tmp_path), capture_output=True, text=True
        )

    done = checked(PROGRAM)
    assert done.returncode == 0 and 'Revealed type is "float"' in done.stdout, done.stdout + done.stderr
    done = checked(PROGRAM.replace("int8=True", 'int8="yes"'))
    assert done.returncode == 1 and 'Argument "int8" to "build"' in done.stdout, done.stdout + done.stderr
