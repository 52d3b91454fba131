"""The version and the packages that extras bring, read where they are set: pyproject.toml, through the installed package."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path


def package_version(name: str) -> str | None:
    """The version of a package that is installed; None: it isn't."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


__version__ = package_version("trtopt") or "0+unknown"  # run from a source tree that isn't installed
# The maker that kept engines are known by. Raise the number where TensorRT gets other graphs: those of before may be wrong.
MAKER = f"{__version__}, graphs 3"


def to_install(*extras: str) -> str:
    """The command that installs what trtopt's extras bring, such as "ort": the packages themselves, since one that an index has
    under trtopt's own name needn't be this one. Of extras that those include, only what isn't there."""
    try:
        texts = requires("trtopt") or ()
    except PackageNotFoundError:  # run from a source tree that isn't installed
        place = f"{Path(__file__).resolve().parents[2]}[{','.join(extras)}]"
        return f"pip install {shlex.quote(place)}"
    from packaging.requirements import Requirement

    words: dict[str, None] = {}
    names = list(extras)
    for name in names:
        for requirement in map(Requirement, texts):
            marker, requirement.marker = requirement.marker, None
            if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": name}):
                continue
            if requirement.name == "trtopt":  # an extra includes another
                names += sorted(requirement.extras.difference(names))
            elif name in extras or package_version(requirement.name) is None:
                words[shlex.quote(str(requirement))] = None
    return " ".join(["pip install", *words])
