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


def to_install(*extras: str) -> str:
    """The command that installs what trtopt's extras bring, such as "ort".

    It names the packages themselves: a package that an index has under trtopt's own name needn't be this one.
    """
    try:
        texts = requires("trtopt") or ()
    except PackageNotFoundError:  # run from a source tree that isn't installed
        place = f"{Path(__file__).resolve().parents[2]}[{','.join(extras)}]"
        return f"pip install {shlex.quote(place)}"
    from packaging.requirements import Requirement

    words = []
    for wanted in map(Requirement, texts):
        marker, wanted.marker = wanted.marker, None
        if marker and not marker.evaluate({"extra": ""}) and any(marker.evaluate({"extra": name}) for name in extras):
            words.append(shlex.quote(str(wanted)))
    return " ".join(["pip install", *words])
