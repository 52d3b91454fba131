"""A user's own module: found by file and name, called with arguments, its faults told by file and line, nothing left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtopt.core.errors import ModelError, TrtoptError, UsageError
from trtopt.frontend.factories import parse_argument
from trtopt.frontend.modules import opened

SIBLING = "import torch\nclass Block(torch.nn.Linear):\n    pass\n"
MODEL = """\
import torch
from trtopt_sibling import Block
class Net(torch.nn.Module):
    def __init__(self, width=3, deep=None):
        super().__init__()
        self.block, self.deep = Block(2, width), deep
    def forward(self, x):
        return self.block(x)
def needs(width):
    return Net(width)
def pair():
    return Net(), 3
def fails():
    return Net(width="wide")
def downloads():
    return torch.hub.load_state_dict_from_url("https://example.org/weights-12345678.pth")
def opens():
    import urllib.request
    return urllib.request.urlopen("https://example.org/")
def cached():
    try:
        opens()
    except OSError:
        return Net()
ready = Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with own modules; it isn't on sys.path, as for an installed command."""
    (tmp_path / "trtopt_model.py").write_text(MODEL)
    (tmp_path / "trtopt_sibling.py").write_text(SIBLING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item not in ("", str(Path.cwd()))])
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    assert sys.path == path
    assert not [name for name in set(sys.modules) - modules if "trtopt_" in name or name.startswith("own_")]


def made(text: str, **options: Any) -> Any:
    with opened(text, None, options) as found:
        return found.module


@pytest.mark.parametrize(
    "text", ["trtopt_model:Net", "trtopt_model.py:Net", "./trtopt_model.py:ready", "trtopt_model:cached"]
)
def test_the_current_folder_is_looked_through(folder: Path, text: str) -> None:
    """A library that has its file goes on without a network: `cached`."""
    assert type(made(text)).__name__ == "Net"


def test_a_file_elsewhere_finds_its_siblings_and_takes_arguments(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/trtopt_model.py").write_text(MODEL.replace("width=3", "width=5"))
    (folder / "sub/trtopt_sibling.py").write_text(SIBLING)
    assert made("sub/trtopt_model.py:Net").block.out_features == 5
    assert made("trtopt_model.py:Net").block.out_features == 3  # the other folder's module of this name
    net = made("sub/trtopt_model.py:Net", width=7, deep=True)
    assert net.block.out_features == 7 and net.deep is True


@pytest.mark.parametrize("name", ["torch", "this"])
def test_an_own_file_wins_over_an_installed_module_only_as_a_file(folder: Path, name: str) -> None:
    before = sys.modules.get(name)
    (folder / f"{name}.py").write_text(MODEL)
    assert type(made(f"{name}.py:Net")).__name__ == "Net"
    assert sys.modules.get(name) is before
    with pytest.raises(UsageError, match=rf"no 'Net'.*write {name}\.py:Net"):
        made(f"{name}:Net")
    sys.modules.pop("this", None)


@pytest.mark.parametrize(
    ("text", "options", "error", "words"),
    [
        ("trtopt_modle:Net", {}, UsageError, ["isn't installed", "no trtopt_modle.py"]),
        ("trtopt_modle.py:Net", {}, UsageError, ["doesn't exist"]),
        ("trtopt_model.py:Nett", {}, UsageError, ["no 'Nett'", "close: Net"]),
        ("trtopt_model.py", {}, UsageError, ["trtopt_model.py:Net"]),
        ("trtopt_model", {}, UsageError, ["trtopt_model.py:Net"]),
        ("trtopt_model:needs", {}, UsageError, ["'width'", "`factory_arg="]),
        (
            "trtopt_model:needs",
            {"wdth": 3},
            UsageError,
            ["'wdth'", "it takes width", "a function of your file"],
        ),
        ("trtopt_model:ready", {"width": 3}, UsageError, ["no factory arguments"]),
        ("trtopt_model:pair", {}, UsageError, ["of type tuple", "gives the model alone"]),
        ("trtopt_model:__name__", {}, UsageError, ["of type str"]),
        (
            "trtopt_model:fails",
            {},
            ModelError,
            ["trtopt_model.py, line 6: self.block, self.deep = Block(2, width)", "TypeError"],
        ),
        ("trtopt_model:downloads", {}, ModelError, ["downloads nothing", "example.org", "`weights=FILE`"]),
        ("trtopt_model:opens", {}, ModelError, ["downloads nothing", "`weights=FILE`"]),
        ("nets.py:Net", {}, UsageError, ["the file nets.py can't be read: it is a folder"]),
        (":Net", {}, UsageError, ["FILE.py:NAME"]),
        ("..a:Net", {}, TrtoptError, ["FILE.py:NAME"]),
    ],
)
def test_slips_say_what_to_type(
    folder: Path, text: str, options: dict[str, Any], error: type[TrtoptError], words: list[str]
) -> None:
    (folder / "nets.py").mkdir()
    with pytest.raises(error) as caught:
        made(text, **options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import trtopt_absent\n", ["line 1: import trtopt_absent", "isn't installed"]),
        ("def f(:\n", ["trtopt_bad.py, line 1", "SyntaxError"]),
        ("import sys\nsys.exit(3)\n", ["line 2: sys.exit(3)", "__main__"]),
        ("x = 1\ny = x / 0\n", ["line 2: y = x / 0", "ZeroDivisionError"]),
    ],
)
def test_faults_of_a_file_are_told_by_line(folder: Path, source: str, words: list[str]) -> None:
    (folder / "trtopt_bad.py").write_text(source)
    with pytest.raises(TrtoptError) as caught:
        made("trtopt_bad.py:f")
    assert all(word in str(caught.value) for word in words), caught.value


def test_relative_imports_are_typed_by_package(folder: Path) -> None:
    package = folder / "outer/trtopt_package/inner"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "__init__.py").write_text("")
    (package / "model.py").write_text(MODEL.replace("from trtopt_sibling", "from ..blocks"))
    (package.parent / "blocks.py").write_text(SIBLING)
    with pytest.raises(UsageError, match=r"relative import.*type PACKAGE.MODULE:FACTORY in the folder that holds"):
        made("outer/trtopt_package/inner/model.py:Net")
    os.chdir(folder / "outer")
    assert type(made("trtopt_package.inner.model:Net")).__name__ == "Net"


def test_factory_arguments_are_python_values() -> None:
    texts = {
        "a=None": None,
        "a=3": 3,
        "a=-1.5": -1.5,
        "a=True": True,
        "a=(1, 2)": (1, 2),
        "a=DEFAULT": "DEFAULT",
        "a='1'": "1",
    }
    assert {text: parse_argument(text)[1] for text in texts} == texts
    assert parse_argument("a=b=c") == ("a", "b=c") and parse_argument("a=") == ("a", "")
    deep = "(" * 100_000
    assert parse_argument(f"a={deep}") == ("a", deep)
    for wrong in ("a", "=3", "a b=3", "a=true", "a=null"):
        with pytest.raises(UsageError):
            parse_argument(wrong)


def test_a_recipe_names_a_file_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = 'description = "own"\nsource = "trtopt_model.py:Net"\n[options]\nwidth = 4\ndeep = 2\n'
    (folder / "own.toml").write_text(recipe)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    net = made("../own.toml", width=6)  # what is typed comes before the recipe's
    assert (net.block.out_features, net.deep) == (6, 2)
