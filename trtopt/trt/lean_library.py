"""The lean runtime's library, which TensorRT puts into version-compatible plans: is it there, and of the right version?

TensorRT asks the system's loader for it at the end of a build. Where it came with a wheel of Python's, nothing on the loader's
path leads there: then it is loaded here first, which the loader remembers by the library's own name. 8.6 asks for another name
than its wheel's library has; that needs a link.
"""

from __future__ import annotations

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
    name, release, other_versions = library_name(version), numbers(version)[:3], list[str]()
    places: list[str | Path] = [name, folder / name, *_in_wheels(numbers(version)[0])]
    for place in places:
        library_version = _version(str(place))
        if library_version == release and (known := _version(name)) == release:
            return ""
        if library_version == release and known is None:
            there = Path(place).parent
            return (
                f"`version_compatible=True` puts {name} into the plan; {place} is it, under another name. Type "
                f"`ln -s {Path(place).name} {there / name}` and `export LD_LIBRARY_PATH={there}`, or add "
                "`exclude_lean_runtime=True`, which gives plans for that version alone"
            )
        other_versions += [f"{place} is of {'.'.join(map(str, library_version))}"] if library_version else []
    return (
        f"`version_compatible=True` puts the lean runtime of TensorRT {version} into the plan, and {name} isn't here"
        f"{' (' + '; '.join(dict.fromkeys(other_versions)) + ')' if other_versions else ''}: {_to_install(version)}, or add "
        "`exclude_lean_runtime=True`, which gives plans for that version alone"
    )


def _to_install(version: str) -> str:
    if numbers(version)[0] < 10:
        return f"pip install tensorrt_lean=={'.'.join(map(str, numbers(version)[:3]))}"
    cuda = next((cuda for cuda in (13, 12, 11) if package_version(f"tensorrt-cu{cuda}")), 12)
    return f"pip install tensorrt-lean-cu{cuda}-libs=={version}"


def _in_wheels(major: int) -> Iterator[Path]:
    for package in _WHEELS:
        try:
            spec = importlib.util.find_spec(package)  # imports nothing
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(folder, f"libnvinfer_lean.so.{major}")


def _version(library: str) -> tuple[int, ...] | None:
    """The version that a library says itself to be; None where it can't be loaded."""
    try:
        handle = ctypes.CDLL(library)
        number = int(handle.getInferLibVersion())
    except (OSError, AttributeError):
        return None
    _held.append(handle)
    # 8601 is 8.6.1, and 101601 is 10.16.1
    thousand, hundred = (1000, 100) if number < 10_000 else (10_000, 100)
    return number // thousand, number % thousand // hundred, number % hundred
