"""Packages that are installed, read from their metadata; none is imported."""

from __future__ import annotations

import contextlib
import importlib.machinery
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

_METADATA = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-.*)?\.(?:dist|egg)-info$")


@dataclass(frozen=True)
class Package:
    """A package that is installed.

    Attributes:
        name: as indexes normalize it ("onnxruntime-gpu").
        metadata: its .dist-info or .egg-info.
    """

    name: str
    version: str
    metadata: Path

    @property
    def folder(self) -> Path:
        """The folder of sys.path that it lies in."""
        return self.metadata.parent

    @property
    def major(self) -> int:
        match = re.match(r"\d+", self.version)
        return int(match[0]) if match else 0

    def requires(self) -> tuple[str, ...]:
        """Its requirements, such as "numpy>=1.26"; empty where they can't be read."""
        try:
            return tuple(Distribution.at(self.metadata).requires or ())
        except (OSError, ValueError):
            return ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed(path: Iterable[str]) -> dict[str, tuple[Package, ...]]:
    """Every package in these folders by its normalized name; where there are several of a name, Python's own choice first."""
    by_name: dict[str, list[Package]] = {}
    for folder in dict.fromkeys(Path(entry).absolute() for entry in path):
        entries: list[Path] = []
        with contextlib.suppress(OSError):  # an archive, or nothing
            entries = sorted(folder.iterdir())
        for entry in entries:
            if match := _METADATA.match(entry.name):
                name = _normalized(match["name"])
                by_name.setdefault(name, []).append(Package(name, match["version"], entry))
    return {name: tuple(packages) for name, packages in by_name.items()}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def module_file(name: str, path: Iterable[str]) -> Path | None:
    """Where `import name` would find a top-level module; None: nowhere, or in no file."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(name, list(path))
    except (ImportError, ValueError, OSError):
        return None
    if spec is None:
        return None
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return Path(place) if place else None


def unmet(packages: Mapping[str, tuple[Package, ...]], owners: Iterable[str]) -> dict[str, list[tuple[Package, str]]]:
    """What packages require and isn't there: name of the requirement → who wants it, and what ("numpy<2").

    Args:
        owners: whose requirements are looked at; extras are nobody's here.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    unmet_requirements: dict[str, list[tuple[Package, str]]] = {}
    for owner in owners:
        for package in packages.get(owner, ())[:1]:
            for text in package.requires():
                try:
                    requirement = Requirement(text)
                except InvalidRequirement:
                    continue
                if requirement.url or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                    continue
                name = _normalized(requirement.name)
                copies = packages.get(name, ())[:1]
                if not copies or not requirement.specifier.contains(copies[0].version, prereleases=True):
                    unmet_requirements.setdefault(name, []).append((package, f"{name}{requirement.specifier}"))
    return unmet_requirements


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (10, 16, 1, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])
