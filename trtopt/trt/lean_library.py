"""The lean runtime's library, which TensorRT puts into version-compatible plans: is it there, and of the right version?

TensorRT asks the system's loader for it at the end of a build. Where it came with a wheel of Python's, nothing on the loader's
path leads there: then it is loaded here first, under the name that TensorRT asks for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trtopt.core.version import package_version
from trtopt.trt.compatibility import numbers

_WHEELS = ("tensorrt_lean", "tensorrt_lean_libs")
_MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's e_machine
_held: list[ctypes.CDLL] = []  # never unloaded


def library_name(version: str) -> str:
    """What TensorRT asks the loader for: 8 by the whole version, later ones by its first number (as TensorRT-RTX does)."""
    release = numbers(version)
    return "libnvinfer_lean.so." + ".".join(map(str, release[: 3 if release[0] < 10 else 1]))


def problem(version: str, folder: Path) -> str:
    """Why TensorRT `version` can't make version-compatible plans that carry the lean runtime, and what to install; empty: it
    can, from now on.

    Args:
        folder: of TensorRT's module, where it looks, too.
    """
    name, release, other_versions = library_name(version), numbers(version)[:3], list[str]()
    for place in (name, folder / name, *_in_wheels(numbers(version)[0])):
        library_version = _version(str(place))
        if library_version == release and (place == name or (_load_as(name, str(place)) and _version(name) == release)):
            return ""
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


def _load_as(name: str, path: str) -> bool:
    """Let the loader know the library `path`, already loaded by this path, by `name`, too, which isn't its own (SONAME).

    The loader learns such a name only when it finds the file by it. So it is let find a link of that name, by loading an empty
    library that needs it and says where to look (RUNPATH). No environment variable does this after a process has started.

    TensorRT reads the library from the path by which it was loaded first: that must not be the link, which doesn't stay.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is not None and not _knows(name):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, name).symlink_to(Path(path).resolve())
            asker = Path(folder, "asking.so")
            asker.write_bytes(_needing(name, machine))
            try:
                _held.append(ctypes.CDLL(str(asker)))
            except OSError:
                return False
    return _knows(name)


def _knows(name: str) -> bool:
    """Whether the loader has a library by this name already."""
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _needing(name: str, machine: int) -> bytes:
    """An ELF library without code that needs the library `name`, and looks for it in its own folder."""
    texts = b"\0" + name.encode() + b"\0$ORIGIN\0"
    header, program, section = 64, 2 * 56, 9 * 16
    dynamic = header + program
    strings, symbols = dynamic + section, dynamic + section + -(-len(texts) // 8) * 8
    size = symbols + 24
    entries = (
        (1, 1),  # NEEDED
        (29, 1 + len(name) + 1),  # RUNPATH
        (5, strings),  # STRTAB
        (10, len(texts)),  # STRSZ
        (6, symbols),  # SYMTAB, with the one symbol that every table begins with
        (11, 24),  # SYMENT
        (0, 0),
    )
    content = b"\x7fELF\2\1\1".ljust(16, b"\0")
    content += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, header, 0, 0, header, 56, 2, 64, 0, 0)
    for kind, offset, length in ((1, 0, size), (2, dynamic, section)):  # LOAD, DYNAMIC
        content += struct.pack(
            "<IIQQQQQQ", kind, 6, offset, offset, offset, length, length, 1 << 16 if kind == 1 else 8
        )
    content += b"".join(struct.pack("<QQ", *entry) for entry in entries).ljust(section, b"\0")
    return (content + texts).ljust(size, b"\0")
