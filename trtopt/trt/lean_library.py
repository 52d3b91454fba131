"""The lean runtime's library, which TensorRT puts into version-compatible plans: is it there, and of the right version?

TensorRT asks the system's loader for it at the end of a build. Where it came with a wheel of Python's, nothing on the loader's
path leads there: then it is loaded here first, which the loader remembers by the library's own name.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from pathlib import Path

from trtopt.core.version import package_version
from trtopt.trt.compatibility import numbers

_WHEELS = ("tensorrt_lean", "tensorrt_lean_libs")


def problem(version: str, folder: Path) -> str:
    """Say why TensorRT `version`, whose module is in `folder`, can't make version-compatible plans that carry the lean runtime,
    and what to install; empty: it can, from now on."""
    release = numbers(version)[:3]
    short = ".".join(map(str, release))
    # 8 asks for the whole version, which is not how its wheel's library is called; later ones for their first number.
    name = f"libnvinfer_lean.so.{short if release[0] < 10 else release[0]}"
    for place in (name, folder / name, *_in_wheels(release[0])):
        if _version(str(place)) == release and _version(name) == release:
            return ""
    if release[0] < 10:
        install = (
            f"pip install tensorrt_lean=={short}, then `ln -s libnvinfer_lean.so.8 {name}` where LD_LIBRARY_PATH leads"
        )
    else:
        cuda = next((cuda for cuda in (13, 12, 11) if package_version(f"tensorrt-cu{cuda}")), 12)
        install = f"pip install tensorrt-lean-cu{cuda}-libs=={version}"
    return (
        f"`version_compatible=True` puts the lean runtime of TensorRT {version} into the plan, and {name} of it isn't here: "
        f"{install}; or add `exclude_lean_runtime=True`, which gives plans for that version alone"
    )


def _in_wheels(major: int) -> list[Path]:
    folders: list[str] = []
    for package in _WHEELS:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(package)  # imports nothing
            folders += (spec.submodule_search_locations or ()) if spec else ()
    return [Path(folder, f"libnvinfer_lean.so.{major}") for folder in folders]


def _version(library: str) -> tuple[int, ...] | None:
    """The version that a library says itself to be; None where it can't be loaded."""
    try:
        number = int(ctypes.CDLL(library).getInferLibVersion())  # ctypes never unloads it
    except (OSError, AttributeError):
        return None
    # 8601 is 8.6.1, and 101601 is 10.16.1
    thousand, hundred = (1000, 100) if number < 10_000 else (10_000, 100)
    return number // thousand, number % thousand // hundred, number % hundred
