"""trtopt as users have it: a wheel of this tree, in an environment of its own outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_wheel(scratch: Path) -> Path:
    """A wheel of what setuptools reads, made without the network."""
    source, dist = copied(scratch), scratch / "dist"
    _pip("wheel", scratch, "--no-build-isolation", "-w", dist, source)
    (wheel,) = dist.glob("trtopt-*.whl")
    return wheel


def copied(scratch: Path) -> Path:
    """A copy of what setuptools reads, so that nothing is left in the checkout."""
    source = scratch / "source"
    for name in ("trtopt", "models", "calibration"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def install(wheel: Path, venv: Path) -> None:
    """Make `venv` with the wheel in it; everything else is borrowed from the tests' environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    _pip("install", venv, wheel, python=venv / "bin" / "python")
    _borrow(venv)


def install_editable(source: Path, venv: Path) -> None:
    """Make `venv` with the checkout `source` in it, as `pip install --editable` does."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    # By this Python, which has setuptools; nothing of its own environment is changed.
    _pip("install", venv, "--prefix", venv, "--ignore-installed", "--no-build-isolation", "--editable", source)
    _borrow(venv)


def _borrow(venv: Path) -> None:
    (packages,) = venv.glob("lib/python*/site-packages")
    # Its own .pth files aren't followed from here, so the checkout that it may have as editable isn't found.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def environment(venv: Path, folder: Path) -> dict[str, str]:
    """Variables for commands of `venv`, whose cache is in `folder`."""
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**_without_checkout(), "PATH": path, "TRTOPT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def _without_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _pip(command: str, folder: Path, *arguments: str | Path, python: Path | None = None) -> None:
    """Run pip where it doesn't see the checkout: a `trtopt.egg-info` left in it counts as installed, and nothing is."""
    place = ["--python", python] if python else []
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    words = [sys.executable, "-m", "pip", *place, command, *quiet, *arguments]
    subprocess.run(words, cwd=folder, env=_without_checkout(), check=True)
