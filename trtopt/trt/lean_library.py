"""The lean runtime's library, which TensorRT puts into version-compatible plans: is it there?

TensorRT asks the system's loader for it at the end of a build. Where it came with a wheel of Python's, nothing on the loader's
path leads there: then it is loaded here first, which the loader remembers by the library's own name. 8.6 asks for another name
than its wheel's library has; that needs a link.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from trtopt.core.version import package_version
from trtopt.trt.compatibility import numbers

_WHEELS = ("tensorrt_lean", "tensorrt_lean_libs")
_held: list[ctypes.CDLL] = []  # never unloaded


def library_name(version: str) -> str:
    """Return what TensorRT asks the loader for: 8 by the whole version, later ones (and TensorRT-RTX) by its first number."""
    release = numbers(version)
    return "libnvinfer_lean.so." + ".".join(map(str, release[: 3 if release[0] < 10 else 1]))


def problem(version: str, folder: Path) -> str:
    """Say why TensorRT `version` can't make version-compatible plans that carry the lean runtime, and what to install;
    empty: it can, from now on.

    Args:
        folder: of TensorRT's module, where it looks, too.
    """
    name, instead = (
        library_name(version),
        "or add `exclude_lean_runtime=True`, which gives plans for that version alone",
    )
    places: list[str | Path] = [name, folder / name, *_in_wheels(numbers(version)[0])]
    for place in places:
        if not _loads(str(place)):
            continue
        if _loads(name):  # as TensorRT will ask
            return ""
        there = Path(place).parent
        return (
            f"`version_compatible=True` puts {name} into the plan; {place} is it, under another name. Type "
            f"`ln -s {Path(place).name} {there / name}` and `export LD_LIBRARY_PATH={there}`, {instead}"
        )
    package = f"tensorrt_lean=={'.'.join(map(str, numbers(version)[:3]))}"
    if numbers(version)[0] >= 10:
        cuda = next((cuda for cuda in (13, 12, 11) if package_version(f"tensorrt-cu{cuda}")), 12)
        package = f"tensorrt-lean-cu{cuda}-libs=={version}"
    return (
        f"`version_compatible=True` puts the lean runtime of TensorRT {version} into the plan, and {name} isn't here: "
        f"pip install {package}, {instead}"
    )


def _in_wheels(major: int) -> Iterator[Path]:
    for package in _WHEELS:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(package)  # imports nothing
            for folder in (spec.submodule_search_locations or ()) if spec else ():
                yield Path(folder, f"libnvinfer_lean.so.{major}")


def _loads(library: str) -> bool:
    try:
        _held.append(ctypes.CDLL(library))
    except OSError:
        return False
    return True
