"""A tritonserver of this machine: where it may be, and what it needs to be started."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from trtopt.core.errors import UsageError

VARIABLE = "TRITON_SERVER"
WHEEL = "nvidia-pytriton==0.7.0"
"""NVIDIA's wheel that holds a tritonserver (2.51, release 24.10) and its Python backend, for glibc 2.35 or newer."""
_USUAL = "/opt/tritonserver"  # in NVIDIA's containers


@dataclass(frozen=True)
class Installation:
    """A tritonserver, and what it needs to be started.

    Attributes:
        stubs: of the wheel: the Python backend's executables by Python version, of which one must lie beside the backend.
        libraries: of the wheel: folder of its shared libraries.
    """

    executable: Path
    backends: Path
    stubs: Path | None = None
    libraries: Path | None = None


def find_server(server: str | os.PathLike[str] | None = None) -> Installation | None:
    """The tritonserver to use; None where there is none. See `serve`.

    Raises:
        UsageError: `given`, or what $TRITON_SERVER names, is none.
    """
    for where, what in ((server, "`server=`"), (os.environ.get(VARIABLE), f"${VARIABLE}")):
        if where:
            installation = _installed(Path(where))
            if installation is None:
                raise UsageError(f"{what}: there is no tritonserver in {os.fspath(where)}: {how_to_install()}")
            return installation
    places = [Path(sys.prefix) / "tritonserver"]
    spec = importlib.util.find_spec("pytriton")
    places += [Path(folder).parent for folder in (spec.submodule_search_locations or [])] if spec else []
    in_path = shutil.which("tritonserver")
    places += [Path(in_path)] if in_path else []
    return next((installation for place in (*places, Path(_USUAL)) if (installation := _installed(place))), None)


def _installed(place: Path) -> Installation | None:
    """What is in a folder: the wheel's layout, or that of the container; `place` may be the executable itself."""
    place = place.absolute()
    wheel = place / "pytriton" / "tritonserver"
    if (wheel / "bin" / "tritonserver").is_file():
        return Installation(
            wheel / "bin" / "tritonserver",
            wheel / "backends",
            wheel / "python_backend_stubs",
            place / "nvidia_pytriton.libs",
        )
    executable = next((path for path in (place, place / "bin" / "tritonserver") if path.is_file()), None)
    if executable is None:
        return None
    executable = executable.resolve()
    return Installation(executable, executable.parent.parent / "backends")


def how_to_install() -> str:
    """The command that gives this Python a tritonserver."""
    folder = Path(sys.prefix) / "tritonserver"
    return f"{shlex.quote(sys.executable)} -m pip install --no-deps --target {shlex.quote(str(folder))} {WHEEL}"


def place_stub(installation: Installation, folder: Path, environment: dict[str, str]) -> None:
    """The wheel's backends, with the Python backend's executable for this Python; models then see what is installed here."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert installation.stubs is not None
    stub = installation.stubs / version / "triton_python_backend_stub"
    if not stub.is_file():
        versions = ", ".join(sorted(path.name for path in installation.stubs.iterdir()))
        raise UsageError(
            f"{installation.executable} has no Python backend for Python {version}; it has it for {versions}"
        )
    shutil.copytree(installation.backends, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(stub, folder / "python")
    libraries = [
        str(installation.libraries),
        str(sysconfig.get_config_var("LIBDIR") or ""),
        environment.get("LD_LIBRARY_PATH", ""),
    ]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    # The stub runs what python3 is the first in PATH, with its packages.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
